"""Training without numbers: the same code on tensors that have a shape and no memory.

A model's parameters are replaced by torch's fake tensors, and the trainer takes two batches through
every block while `LiveBytes` counts what would have been allocated. So a plan is not a formula that
must keep up with the code: it is the code.
"""

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tpsgd.engine.assemble import GPU_WINDOW, classes_of, form_for, make_learner, rules_for, shapes
from tpsgd.engine.backprop import in_segments, whole_learner
from tpsgd.engine.batches import Arrays
from tpsgd.engine.meter import CUDA_BLOCK, LiveBytes, Meter, Stage, tensor_bytes
from tpsgd.engine.record import Run
from tpsgd.engine.settings import Settings
from tpsgd.engine.solvable import check_solvers
from tpsgd.engine.trainer import Trainer
from tpsgd.errors import TpsgdError
from tpsgd.losses import bce, cross_entropy
from tpsgd.maths.random import SORTED, Key, mixed, permutation
from tpsgd.memory.cudnn import Workspaces
from tpsgd.nets.blocks import split, whole
from tpsgd.nets.recurrent import Recurrent, connect
from tpsgd.projections import make_tables
from tpsgd.rules import Place, Rule

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
class Rehearsal:
    """What a rehearsal found: every stage's peak beyond the model, and inputs kept for reuse."""

    weights: int
    stages: list[Stage]
    kept: int
    names: list[str]  # of the blocks
    varies: tuple[str, ...] = ()  # what makes a batch in pieces differ from a whole one

    @property
    def peak(self) -> int:
        """The most bytes held at once, the model included, kept inputs left out."""
        return self.weights + max(stage.peak for stage in self.stages)


@dataclass(frozen=True)
class Backprop:
    """Backprop's ways to save memory, as `fit_backprop` takes them."""

    checkpoint: int | bool = False


How = Rule | list[Rule] | Backprop
MANY = 1 << 20  # samples, where nobody knows
LONG = 96  # time steps that are worth going through one by one


def rehearse(model: nn.Module, inputs: Inputs, how: How, settings: Settings) -> Rehearsal:
    """Go through a training without its numbers; through a part of sequences that are long.

    Beyond a few dozen steps memory is a straight line in their number, which two lengths show.
    """
    reads = any(isinstance(m, (Recurrent, nn.RNN)) for m in model.modules())
    if not reads or not inputs.shape or inputs.shape[0] <= LONG:
        return _rehearse(model, inputs, how, settings)
    lengths = (LONG // 3, 2 * LONG // 3)
    try:
        one, two = (
            _rehearse(model, replace(inputs, shape=(n, *inputs.shape[1:])), how, settings)
            for n in lengths
        )
    except TpsgdError:  # a model of sequences of one length
        return _rehearse(model, inputs, how, settings)
    return _extended(one, two, (inputs.shape[0] - lengths[1]) / (lengths[1] - lengths[0]))


def _extended(one: Rehearsal, two: Rehearsal, times: float) -> Rehearsal:
    """Two rehearsals' straight line, so many times their distance further on."""

    def beyond(a: int, b: int) -> int:
        return b + int(max(0, b - a) * times)

    stages = []
    for a, b in zip(one.stages, two.stages, strict=True):
        names = {**a.parts, **b.parts}
        parts = {k: beyond(a.parts.get(k, 0), b.parts.get(k, 0)) for k in names}
        stages.append(replace(b, peak=sum(parts.values()), parts=parts))
    return replace(two, stages=stages, kept=beyond(one.kept, two.kept))


def _rehearse(model: nn.Module, inputs: Inputs, how: How, settings: Settings) -> Rehearsal:
    first = next(model.parameters())
    device = torch.device(settings.device if settings.device is not None else first.device)
    on_gpu = device.type == "cuda"
    if on_gpu and not torch.cuda.is_available():  # as on a CPU, but for what is known of a GPU
        device, settings = torch.device("cpu"), _as_on_gpu(model, settings)
    live = LiveBytes(CUDA_BLOCK if on_gpu else 1, Workspaces() if on_gpu else None, detail=True)
    meter = Meter(device, live)
    make_tables()  # real ones, before there are only fake ones
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    twin = _faked(model, mode, device)
    with mode, torch.random.fork_rng([]), _quietly():
        trainer, names = _trainer(twin, inputs, how, settings, meter, device, first.dtype)
        meter.begin()
        settings.schedule(trainer)
        meter.peak(0)
    for stage in meter.stages if on_gpu else []:
        if stage.peak > FEW_LARGE:
            stage.peak += REMAINDER
            stage.parts["workspace"] += REMAINDER
    weights = tensor_bytes(twin)
    kept = meter.kept * inputs.samples // trainer.source.samples
    return Rehearsal(weights, meter.stages, kept, names, _varies(twin, trainer))


@contextmanager
def _quietly() -> Iterator[None]:
    """Without torch's own lines about what a model cannot take: the caller gets a sentence."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _trainer(
    model: nn.Module,
    inputs: Inputs,
    how: How,
    settings: Settings,
    meter: Meter,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[Trainer, list[str]]:
    """The trainer that would do it."""
    settings = _shorter(settings, model)
    samples = min(2 * settings.batch_size, inputs.samples or 2 * settings.batch_size)
    x = torch.empty(samples, *inputs.shape, dtype=inputs.dtype, device=device)
    layers = split(model) if not isinstance(how, Backprop) else _layers(model)
    form = form_for(layers, x[:2], False, settings, device, dtype, 1)
    rules: list[Rule] = []
    if isinstance(how, Backprop):
        block = whole(in_segments(connect(model), how.checkpoint))
        loss, blocks = settings.loss or cross_entropy, [block]
    else:
        rules = rules_for(how, layers, settings.schedule)
        loss, blocks = settings.loss or rules[-1].loss, layers
    sizes = shapes(blocks, replace(form, precision=None)(x[:2]))
    classes = classes_of(sizes[-1][Place.END], blocks[-1])
    turns = 2 if samples <= settings.batch_size else 1  # two batches show what all do
    courses = [replace(c, epochs=min(c.epochs, turns)) for c in settings.courses(len(blocks))]
    with meter.watch():
        if isinstance(how, Backprop):
            learners = [whole_learner(blocks, loss, form, len(layers))]
        else:
            learners = [
                make_learner(i, [blocks], rules[i], loss, sizes[i], classes, settings, form)
                for i in range(len(blocks))
            ]
            check_solvers(learners, rules, courses, sizes, settings, inputs.samples, form)
    shape = (samples, classes) if loss is bce else (samples,)
    y = torch.empty(shape, dtype=dtype if loss is bce else torch.long, device=device)
    order = partial(_blank_order, expected=max(inputs.samples or MANY, samples))
    source = Arrays(x, y, form, order=order)
    run = Run("rehearsal", 0, {})
    once = settings.courses(len(blocks))[-1].epochs <= 1  # the courses here are shorter
    given = settings.memory.reuse is False or (settings.memory.reuse is None and once)
    reuse = settings.memory.reuse if given else True
    trainer = Trainer(learners, courses, source, None, meter, [run], reuse=reuse)
    trainer.expected = inputs.samples
    return trainer, [str(block) for block in layers]


def _as_on_gpu(model: nn.Module, settings: Settings) -> Settings:
    """The settings that a GPU would have by itself."""
    reads = any(isinstance(m, (Recurrent, nn.RNN)) for m in model.modules())
    window = settings.window or (GPU_WINDOW if reads else None)
    return replace(settings, device="cpu", window=window)


def _shorter(settings: Settings, model: nn.Module) -> Settings:
    """Two pieces of a batch show what all of them do."""
    if settings.memory.micro_batch is None:
        return settings
    pieces = -(-settings.batch_size // settings.memory.micro_batch)
    if any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules()):
        pieces = max(1, min(pieces, settings.batch_size // 2))  # as Form.cut
    largest = -(-settings.batch_size // pieces)
    batch_size = min(settings.batch_size, 2 * largest)
    return replace(settings, batch_size=batch_size).within(micro_batch=largest)


def _layers(model: nn.Module) -> list[Any]:
    try:
        return split(model)
    except TpsgdError:  # backprop takes any module
        return [whole(model)]


def _faked(model: nn.Module, mode: FakeTensorMode, device: torch.device) -> nn.Module:
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
    """An order of so many samples: it takes the memory of one, and says nothing."""
    part: Tensor | None = None
    parts = (
        permutation(expected, key, device) if expected <= SORTED else mixed(expected, key, device)
    )
    order = next(parts)
    if expected > SORTED:  # those beyond are left out
        counted = 1 << (expected - 1).bit_length()
        part, order = order, order.new_zeros(-(-len(order) * expected // counted))
    waiting = torch.empty_like(order[n:])  # for their batch: the caller copies the others
    yield order[:n]
    del parts, part, waiting  # which lived until here


def _varies(model: nn.Module, trainer: Trainer) -> tuple[str, ...]:
    """Why pieces of a batch would not add up to the same step."""
    frozen = {m for tap in model.modules() if getattr(tap, "is_tap", False) for m in tap.modules()}
    modules = [m for m in model.modules() if m not in frozen]
    found = {
        "batch normalisation": any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in modules),
        "dropout": any(isinstance(m, nn.modules.dropout._DropoutNd) and m.p for m in modules),
        "a loss that may look at the whole batch": not all(
            x.mean_over_samples for x in trainer.learners
        ),
    }
    return tuple(name for name, there in found.items() if there)
