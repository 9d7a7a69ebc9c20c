"""A rehearsal of training: the same code on tensors that have a shape but no memory.

A model's parameters are replaced by torch's fake tensors, and two batches go through every block
while `LiveBytes` counts what would have been allocated. So a change of the training code changes
the plan too.
"""

import copy
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tpsgd.common.errors import TpsgdError
from tpsgd.engine.assemble import (
    CPU_WINDOW,
    GPU_WINDOW,
    backprop_line,
    batches_for,
    join,
    make_learners,
)
from tpsgd.engine.fast.wrapper import wrapper
from tpsgd.engine.learners.backprop import Backprop
from tpsgd.engine.learners.optimizers import adam
from tpsgd.engine.learners.solved import RidgeSolver
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
from tpsgd.nets.cuts.split import layers_of
from tpsgd.nets.diagonal import Diagonal
from tpsgd.nets.model_inputs import ModelInputs
from tpsgd.nets.padded import SequenceLayer
from tpsgd.nets.precision import without_autocast
from tpsgd.nets.unrolled import FIRST_FEW, WINDOW, steps_without_traces
from tpsgd.objectives import Place
from tpsgd.projections import make_tables
from tpsgd.targets import CLASSES, Target
from tpsgd.train import Net, sequential

MANY = 1 << 20  # samples, where their number is unknown
LONG = 96  # time steps that are worth going through one by one
# A GPU's allocator does not split off less than 1 MB of a large block: half of that is added to
# peaks that must have large blocks in them.
FEW_LARGE, REMAINDER = 8 << 20, 512 << 10


@dataclass(frozen=True)
class Inputs:
    """What samples will look like: the shape and type of one, and how many there are.

    For a model of several inputs, `several` has the shape and the type of each by its name.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    samples: int = 0  # 0: unknown
    several: Mapping[str | int, tuple[tuple[int, ...], torch.dtype]] = field(default_factory=dict)
    target: Target = CLASSES

    @classmethod
    def of(cls, x: Any, samples: int = 0, target: Target = CLASSES) -> "Inputs":
        """Those that a few samples show."""
        several = x.forms if isinstance(x, ModelInputs) else {}
        return cls(tuple(x.shape[1:]), x.dtype, samples, several, target)

    def blank(self, samples: int, device: torch.device) -> Any:
        """Samples without numbers."""
        if not self.several:
            return torch.empty(samples, *self.shape, dtype=self.dtype, device=device)
        return ModelInputs(
            {
                name: torch.empty(samples, *shape, dtype=dtype, device=device)
                for name, (shape, dtype) in self.several.items()
            }
        )


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
        """The most bytes at any time, with the model, without kept inputs."""
        return self.weights + max(stage.peak for stage in self.stages)


def settings_of_backprop(settings: Settings) -> Settings:
    """The settings of backprop with the same batch size, and the first optimizer, or Adam."""
    optimizers = [o for o in listed(settings.optimizer) if not isinstance(o, SOLVERS)]
    return replace(
        settings, order=sequential, optimizer=[*optimizers, adam][0], lr=None, epochs=2,
        blocks=None, window=None, memory=Memory(), early_stopping=None,
    )  # fmt: skip


@without_autocast()
def rehearse(model: nn.Module, inputs: Inputs, method: Method, settings: Settings) -> MemoryProfile:
    """Train on fake tensors, and count the bytes; of long sequences, rehearse two shorter lengths.

    Beyond a few dozen time steps, and where a diagonal recurrence needs traces, memory grows
    linearly with the number of steps.
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
    """Two lengths from which memory is extrapolated; None if the sequences are short enough."""
    steps = inputs.shape[0] if inputs.shape else 0
    recurrent = recurrent_layers(model)
    diagonal = [m for m in recurrent if isinstance(m, Diagonal)]
    lengths = LONG // 3, 2 * LONG // 3
    if diagonal and recurrent[0] is diagonal[0] and not inputs.dtype.is_floating_point:
        return None  # it reads all tokens as one window
    if diagonal and isinstance(method, Backprop):  # the number of operators is the same
        lengths = lengths if len(diagonal) < len(recurrent) else (steps, steps)
    elif diagonal:  # a few whole windows, and the last one
        span = settings.window or WINDOW
        short = max(steps_without_traces(m, settings.window) for m in diagonal)
        windows = max(-(-short // span), FIRST_FEW) + 1
        lengths = tuple(n * span + steps % span for n in (windows, windows + 1))
    elif not isinstance(method, Backprop) and settings.window is None:
        gpu = torch.device(settings.device or next(model.parameters()).device).type == "cuda"
        lengths = tuple(n * (GPU_WINDOW if gpu else CPU_WINDOW) for n in (2, 4))
    return lengths if recurrent and steps > max(LONG, lengths[1]) else None  # type: ignore[return-value]


def recurrent_layers(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if isinstance(m, (SequenceLayer, nn.RNN))]


def best_segments(model: nn.Module, inputs: Inputs, settings: Settings) -> int:
    """The number of checkpointed segments with the lowest peak of backprop; of equals the fewest.

    Segments of 1, 2, 3, ... blocks are rehearsed. A segment per block stores every input, a few
    long segments store all activations of one of them: the best number lies in between.
    """
    blocks = len(layers_of(model, inputs.blank(1, torch.device("meta"))))
    counts = {-(-blocks // length) for length in range(1, max(2, blocks))}
    peaks = {n: rehearse(model, inputs, Backprop(n), settings).peak for n in sorted(counts)}
    return min(peaks, key=lambda n: peaks[n])


def _extrapolated(short: MemoryProfile, long: MemoryProfile, times: float) -> MemoryProfile:
    """A linear extrapolation, by `times` the distance of two rehearsals beyond the second."""

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
        window = settings.window or (GPU_WINDOW if recurrent_layers(model) else None)
        device, settings = torch.device("cpu"), replace(settings, device="cpu", window=window)
    block, workspace = (CUDA_BLOCK, workspace_bytes) if on_gpu else (1, None)
    meter = PlanMeter(device, CountedProducts(block, workspace, detail=True))
    make_tables()  # they must be real tensors
    mode = QuickFakeMode(allow_non_fake_inputs=True)
    fake = _faked(model, mode, device)
    blank = inputs.blank(1, torch.device("meta"))
    asked = request([fake], None, method, settings, blank, inputs.target)
    for module in overwriting(fake, asked.layers[0]) if asked.local else []:  # as in `fit`
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
    spec, itemsize = net.spec, net.spec.form.numbers.itemsize
    return MemoryProfile(
        tensor_bytes(fake),
        meter.stages,
        kept=meter.kept_bytes * inputs.samples // net.source.samples,
        names=[str(block) for block in spec.layers],
        varies=_varies(fake, net.learners),
        outputs=[math.prod(size[Place.END]) * itemsize for size in spec.sizes],
    )


class PlanMeter(Meter):
    """A meter that also labels what the bytes are for, and notes the products of a step."""

    def batch(self, learners: Sequence[Any], batch: Any) -> None:
        super().batch(learners, batch)
        products, self.live.products = self.live.products, 0
        if products:
            self.stages[-1].multiplications = products / batch.size

    def started(self, learner: Any) -> None:
        super().started(learner)
        self.live.label("projections", learner.tensors)
        if (optimizer := learner.updater.optimizer) is not None:
            optimizer.register_step_pre_hook(self._label_gradients)
            optimizer.register_step_post_hook(self._label_state)

    def _label_gradients(self, optimizer: Optimizer, *_: Any) -> None:
        self.live.label("gradients", (p.grad for g in optimizer.param_groups for p in g["params"]))

    def _label_state(self, optimizer: Optimizer, *_: Any) -> None:
        states = (t for state in optimizer.state.values() for t in state.values())
        self.live.label("optimizer", states)


@contextmanager
def _fake_tensor_log_disabled() -> Iterator[None]:
    """No log lines of torch about inputs that a model cannot take, which raise an error too."""
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
    x = inputs.blank(samples, device)
    spec = specify(replace(asked, settings=settings), x[:2], False, device)
    once = spec.block_settings[-1].epochs <= 1
    epochs = 2 if samples <= settings.batch_size else 1  # two batches show what all do
    shorter = [replace(s, epochs=min(s.epochs, epochs)) for s in spec.block_settings]
    spec = replace(spec, block_settings=shorter)
    line = backprop_line(spec, x, inputs.samples)
    learners = make_learners(spec, asked.method, settings, inputs.samples, line)
    loss, dtype, form = spec.loss, next(model.parameters()).dtype, spec.form
    rows, shape = inputs.target.rows or loss is bce, inputs.target.shape
    shape = (spec.classes,) if rows and not shape else shape
    y = torch.empty(samples, *shape, dtype=dtype if rows else torch.long, device=device)
    y = spec.target.canonical(y)
    order = partial(_blank_order, expected=max(inputs.samples or MANY, samples))
    memory = settings.memory
    reuse = None if memory.reuse is None else bool(memory.reuse)
    if reuse is None and (once or memory.fast):
        reuse = not once
    pass_on = InputReuse(reuse, line=line, samples=inputs.samples)
    source = ArraySource(x, y, form, order=order)
    net = join(learners, source, None, settings, wrapper, line, pass_on)
    net.spec, net.order = spec, settings.order
    net.batches = partial(_batches, samples=inputs.samples)
    return net


def _batches(learners: Sequence[Any], source: Any, epoch: int, samples: int) -> Iterator[Any]:
    """The batches of an epoch; where memory grows with each, the first for all samples."""
    first = learners[0]
    solved = isinstance(first.updater, RidgeSolver)
    if not solved or not keeps_samples(first.block.layer, True, samples):
        yield from batches_for(learners, source, epoch)
        return
    (batch, *_) = source.batches()
    for start in range(0, samples, batch.size):
        count = min(batch.size, samples - start)
        yield replace(batch, index=batch.index[:count], size=count)


def _two_micro_batches(settings: Settings, model: nn.Module) -> Settings:
    """A batch of two micro-batches: the others take the same memory."""
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
    """An order of n samples that takes as much memory as an order of the expected number."""
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
        "the rule's random numbers": any(x.objective.noise_at is not None for x in learners),
    }
    return tuple(reason for reason, applies in reasons.items() if applies)
