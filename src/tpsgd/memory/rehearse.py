"""A rehearsal of training: the same code on tensors that have a shape but no memory.

A model's parameters are replaced by torch's fake tensors, and two batches go through every block
while `LiveBytes` counts what would have been allocated. So a plan is no formula that must keep up
with the code: it is the code.
"""

import copy
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tpsgd.common.errors import TpsgdError
from tpsgd.engine.assemble import CPU_WINDOW, GPU_WINDOW, backprop_line, join, make_learners
from tpsgd.engine.fast.wrapper import wrapper
from tpsgd.engine.learners.backprop import Backprop
from tpsgd.engine.learners.optimizers import adam
from tpsgd.engine.learners.solved import RidgeLearner
from tpsgd.engine.settings import Memory, Settings, listed
from tpsgd.engine.solvers import SOLVERS
from tpsgd.engine.solvers.equations import keeps_samples
from tpsgd.engine.sources.batches import ArraySource
from tpsgd.engine.sources.reuse import InputReuse
from tpsgd.engine.spec import Method, RunRequest, request, specify
from tpsgd.losses import bce
from tpsgd.maths.random import SORTED, Key, mixed, permutation
from tpsgd.memory.alike import in_turn
from tpsgd.memory.cudnn import workspace_bytes
from tpsgd.memory.fake_tensors import CountedProducts, QuickFakeMode, need_fake_tensors
from tpsgd.memory.meter import CUDA_BLOCK, Meter, Stage, tensor_bytes
from tpsgd.nets.blocks import has_batch_norm, overwriting
from tpsgd.nets.diagonal import Diagonal
from tpsgd.nets.padded import SequenceLayer
from tpsgd.nets.precision import without_autocast
from tpsgd.nets.unrolled import FIRST_FEW, WINDOW, steps_without_traces
from tpsgd.projections import make_tables
from tpsgd.rules import Place
from tpsgd.train import Net, sequential

MANY = 1 << 20  # samples, where their number is unknown
LONG = 96  # time steps that are worth going through one by one
# A GPU's allocator does not split off less than 1 MB of a large block: half of that is added to
# peaks that must have large blocks in them.
FEW_LARGE, REMAINDER = 8 << 20, 512 << 10


@dataclass(frozen=True)
class Inputs:
    """What samples will look like: the shape and type of one, and how many there are."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    samples: int = 0


@dataclass(frozen=True)
class MemoryProfile:
    """Every stage's peak beyond the model, and the bytes of inputs kept for reuse."""

    weights: int
    stages: list[Stage]
    kept: int
    names: list[str]  # of the blocks
    varies: tuple[str, ...]  # why micro-batches would change what is learned
    outputs: list[int]  # bytes of every block's output for a sample

    @property
    def peak(self) -> int:
        """The most bytes at any time, the model included, kept inputs left out."""
        return self.weights + max(stage.peak for stage in self.stages)


def settings_of_backprop(settings: Settings) -> Settings:
    """Those of backprop with the same batch, and the first optimizer that is no solver."""
    optimizers = [o for o in listed(settings.optimizer) if not isinstance(o, SOLVERS)]
    return replace(
        settings, order=sequential, optimizer=[*optimizers, adam][0], lr=None, epochs=2,
        blocks=None, window=None, memory=Memory(), early_stopping=None,
    )  # fmt: skip


@without_autocast()
def rehearse(model: nn.Module, inputs: Inputs, method: Method, settings: Settings) -> MemoryProfile:
    """Go through a run without its numbers; of long sequences, through two shorter lengths.

    Beyond a few dozen time steps, and where a diagonal recurrence needs traces, memory grows
    linearly with their number.
    """
    need_fake_tensors()
    lengths = two_lengths(model, inputs, method, settings)
    if lengths is None:
        return _rehearse(model, inputs, method, settings)
    try:
        first, second = (
            _rehearse(model, replace(inputs, shape=(n, *inputs.shape[1:])), method, settings)
            for n in lengths
        )
    except TpsgdError:  # the model takes sequences of one length only
        return _rehearse(model, inputs, method, settings)
    return _extrapolated(first, second, (inputs.shape[0] - lengths[1]) / (lengths[1] - lengths[0]))


def two_lengths(
    model: nn.Module, inputs: Inputs, method: Method, settings: Settings
) -> tuple[int, int] | None:
    """The lengths that show how memory grows up to these steps; None if that length itself does."""
    steps = inputs.shape[0] if inputs.shape else 0
    recurrent = [m for m in model.modules() if isinstance(m, (SequenceLayer, nn.RNN))]
    diagonal = [m for m in recurrent if isinstance(m, Diagonal)]
    lengths = LONG // 3, 2 * LONG // 3
    by_tokens = not inputs.dtype.is_floating_point
    if diagonal and by_tokens and isinstance(recurrent[0], Diagonal):
        return None  # it reads all of them as one window
    if diagonal and isinstance(method, Backprop):  # as many operators for any length
        lengths = lengths if len(diagonal) < len(recurrent) else (steps, steps)
    elif diagonal:  # a few windows, and the same last one
        span = settings.window or WINDOW
        short = max(steps_without_traces(m, settings.window) for m in diagonal)
        windows = max(-(-short // span), FIRST_FEW) + 1
        lengths = tuple(n * span + steps % span for n in (windows, windows + 1))
    elif not isinstance(method, Backprop) and settings.window is None:
        gpu = torch.device(settings.device or next(model.parameters()).device).type == "cuda"
        lengths = tuple(n * (GPU_WINDOW if gpu else CPU_WINDOW) for n in (2, 4))
    return lengths if recurrent and steps > max(LONG, lengths[1]) else None  # type: ignore[return-value]


def _recurrent(model: nn.Module) -> bool:
    return any(isinstance(m, (SequenceLayer, nn.RNN)) for m in model.modules())


def _extrapolated(short: MemoryProfile, long: MemoryProfile, times: float) -> MemoryProfile:
    """The line through two rehearsals, `times` their distance beyond the second."""

    def beyond(a: int, b: int) -> int:
        return b + int(max(0, b - a) * times)

    stages = []
    for a, b in zip(short.stages, long.stages, strict=True):
        names = {**a.parts, **b.parts}
        parts = {k: beyond(a.parts.get(k, 0), b.parts.get(k, 0)) for k in names}
        stages.append(replace(b, peak=sum(parts.values()), parts=parts))
    return replace(long, stages=stages, kept=beyond(short.kept, long.kept))


def _rehearse(
    model: nn.Module, inputs: Inputs, method: Method, settings: Settings
) -> MemoryProfile:
    first = next(model.parameters())
    device = torch.device(settings.device if settings.device is not None else first.device)
    on_gpu = device.type == "cuda"
    if on_gpu and not torch.cuda.is_available():  # on the CPU, with a GPU's default window
        window = settings.window or (GPU_WINDOW if _recurrent(model) else None)
        device, settings = torch.device("cpu"), replace(settings, device="cpu", window=window)
    workspace = workspace_bytes if on_gpu else None
    live = CountedProducts(CUDA_BLOCK if on_gpu else 1, workspace, detail=True)
    meter = PlanMeter(device, live)
    make_tables()  # they must be real tensors
    mode = QuickFakeMode(allow_non_fake_inputs=True)
    fake = _faked(model, mode, device)
    asked = request([fake], None, method, settings)
    if asked.local:
        for module in overwriting(fake, asked.layers[0]):  # as `fit` has it
            module.inplace = False
    with mode, torch.random.fork_rng([]), _fake_tensor_log_disabled():
        net = _fake_net(asked, inputs, device)
        net.observers = meter.around([])
        with meter:
            if asked.settings.order is sequential:
                in_turn(net, meter)
            else:
                net.order(net)
    for stage in meter.stages if on_gpu else []:
        if stage.peak > FEW_LARGE:
            stage.peak += REMAINDER
            stage.parts["workspace"] += REMAINDER
    input_bytes = meter.kept_bytes * inputs.samples // net.source.samples
    varies = _varies(fake, net.learners)
    spec = net.spec
    names, itemsize = [str(block) for block in spec.layers], spec.form.numbers.itemsize
    outputs = [math.prod(size[Place.END]) * itemsize for size in spec.sizes]
    return MemoryProfile(tensor_bytes(fake), meter.stages, input_bytes, names, varies, outputs)


class PlanMeter(Meter):
    """A meter that also labels what the bytes are for, and notes the products of a step."""

    def __init__(self, device: torch.device, live: CountedProducts) -> None:
        super().__init__(device, live)
        self.counted, self.before = live, 0

    def batch(self, learners: Sequence[Any], batch: Any) -> None:
        """Note the multiplications since the batch before, for a sample."""
        super().batch(learners, batch)
        products = self.counted.products - self.before
        if products:
            self.stages[-1].multiplications = products / batch.size
        self.before = self.counted.products

    def started(self, learner: Any) -> None:
        """Label the class codes, and gradients and the optimizer's state when a step is taken."""
        super().started(learner)
        self._live.label("projections", learner.tensors)
        optimizer = learner.optimizer
        if optimizer is None:
            return

        def before(optimizer: Optimizer, *_: Any) -> None:
            grads = (p.grad for g in optimizer.param_groups for p in g["params"])
            self._live.label("gradients", [g for g in grads if g is not None])

        def after(optimizer: Optimizer, *_: Any) -> None:
            states = (t for state in optimizer.state.values() for t in state.values())
            self._live.label("optimizer", states)

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)


@contextmanager
def _fake_tensor_log_disabled() -> Iterator[None]:
    """Without torch's log lines about inputs that a model cannot take: an error tells the user."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _fake_net(asked: RunRequest, inputs: Inputs, device: torch.device) -> Net:
    """The net that would be trained, with two batches of fake samples."""
    model, settings = asked.model, _two_micro_batches(asked.settings, asked.model)
    samples = min(2 * settings.batch_size, inputs.samples or 2 * settings.batch_size)
    x = torch.empty(samples, *inputs.shape, dtype=inputs.dtype, device=device)
    spec = specify(replace(asked, settings=settings), x[:2], False, device)
    once = spec.block_settings[-1].epochs <= 1
    epochs = 2 if samples <= settings.batch_size else 1  # two batches show what all do
    shorter = [replace(s, epochs=min(s.epochs, epochs)) for s in spec.block_settings]
    spec = replace(spec, block_settings=shorter)
    line = backprop_line(spec, x, inputs.samples)
    learners = make_learners(spec, asked.method, settings, inputs.samples, line)
    for learner in learners:
        solved, layer = isinstance(learner, RidgeLearner), learner.block.layer
        if solved and keeps_samples(layer, True, inputs.samples):  # its memory grows with each
            learner.batches = partial(_repeated, samples=inputs.samples)
    loss, dtype, form = spec.loss, next(model.parameters()).dtype, spec.form
    shape = (samples, spec.classes) if loss is bce else (samples,)
    y = torch.empty(shape, dtype=dtype if loss is bce else torch.long, device=device)
    order = partial(_blank_order, expected=max(inputs.samples or MANY, samples))
    reuse = settings.memory.reuse
    if reuse is None:
        reuse = False if once else True if settings.memory.fast else None
    reuse = bool(reuse) if reuse is not None else None
    pass_on = InputReuse(reuse, line=line, samples=inputs.samples)
    source = ArraySource(x, y, form, order=order)
    net = join(learners, source, None, settings, wrapper, line, pass_on)
    net.spec, net.order = spec, settings.order
    return net


def _repeated(source: Any, epoch: int, samples: int) -> Iterator[Any]:
    """The first batch of a source, repeated until there are this many samples."""
    (batch, *_) = source.batches()
    for start in range(0, samples, batch.size):
        count = min(batch.size, samples - start)
        yield replace(batch, index=batch.index[:count], size=count)


def _two_micro_batches(settings: Settings, model: nn.Module) -> Settings:
    """A batch of two micro-batches, which show what all of them do."""
    if settings.memory.micro_batch is None:
        return settings
    count = -(-settings.batch_size // settings.memory.micro_batch)
    if has_batch_norm(model.modules()):
        count = max(1, min(count, settings.batch_size // 2))  # as BatchForm.cut
    largest = -(-settings.batch_size // count)
    batch_size = min(settings.batch_size, 2 * largest)
    return replace(settings, batch_size=batch_size).within(micro_batch=largest)


def _faked(model: nn.Module, mode: Any, device: torch.device) -> nn.Module:
    """A copy of a model whose parameters and buffers take no memory."""
    memo: dict[int, Any] = {}
    with mode:
        for t in (*model.parameters(), *model.buffers()):
            fake: Tensor = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device)
            if isinstance(t, nn.Parameter):
                fake = nn.Parameter(fake, t.requires_grad)
            memo[id(t)] = fake
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:  # whatever a custom module may raise
        raise TpsgdError(
            f"{type(model).__name__} cannot be copied, which a plan needs: {error}"
        ) from error


def _blank_order(n: int, key: Key, device: Any, expected: int) -> Iterator[Tensor]:
    """An order of n samples that takes the memory of an order of the expected number."""
    chunk: Tensor | None = None
    chunks = (permutation if expected <= SORTED else mixed)(expected, key, device)
    order = next(chunks)
    if expected > SORTED:  # indices beyond the number of samples are left out
        counted = 1 << (expected - 1).bit_length()
        chunk, order = order, order.new_zeros(-(-len(order) * expected // counted))
    yield order[:n]
    del chunks, chunk  # they live until here


def _varies(model: nn.Module, learners: list[Any]) -> tuple[str, ...]:
    """Why micro-batches would not add up to the same step."""
    frozen = {m for tap in model.modules() if getattr(tap, "is_tap", False) for m in tap.modules()}
    modules = [m for m in model.modules() if m not in frozen]
    reasons = {
        "batch normalisation": has_batch_norm(modules),
        "dropout": any(isinstance(m, nn.modules.dropout._DropoutNd) and m.p for m in modules),
        "a loss that may look at the whole batch": not all(x.mean_over_samples for x in learners),
    }
    return tuple(reason for reason, applies in reasons.items() if applies)
