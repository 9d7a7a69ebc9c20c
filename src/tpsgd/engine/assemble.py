"""From a model, data and a rule to a net that is ready to be trained.

`assemble` is the one way there for `fit`, backprop and ZORB; the memory plan takes the same steps
(`dissect`, `make_learners`, `join`) with samples that have no numbers, dlADMM the first of them.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tpsgd.engine.anatomy import Anatomy, Method, dissect
from tpsgd.engine.augment import Augmented
from tpsgd.engine.backprop import Backprop, BackpropLearner
from tpsgd.engine.batches import (
    BatchForm,
    LoaderSource,
    as_source,
    check_values,
    first_samples,
    is_stream,
)
from tpsgd.engine.learner import Backend, BlockLearner, GradientLearner, accumulate
from tpsgd.engine.line import BackpropLine, line_of
from tpsgd.engine.optimizers import follow_curve, make_optimizer
from tpsgd.engine.record import BlockInfo
from tpsgd.engine.reuse import InputReuse
from tpsgd.engine.settings import Settings
from tpsgd.engine.solved import RecursiveLearner, RidgeLearner, check_solvers
from tpsgd.errors import TpsgdError
from tpsgd.losses import Loss, bce, cross_entropy
from tpsgd.maths.random import Key
from tpsgd.nets.autograd import Autograd
from tpsgd.nets.blocks import Block
from tpsgd.nets.closed_form import ClosedForm
from tpsgd.nets.diagonal import Diagonal
from tpsgd.nets.layers import layer_kind
from tpsgd.nets.padded import SequenceLayer
from tpsgd.nets.stacked import Stacked
from tpsgd.nets.unrolled import Unrolled
from tpsgd.nets.unrolled_diagonal import UnrolledDiagonal
from tpsgd.objectives import IDLE, Objective, Site, move, output
from tpsgd.protocols import Source
from tpsgd.rules import Place, Signal
from tpsgd.solvers import SOLVERS, Recursive, Ridge
from tpsgd.train import Net, Step, Wrap, sequential, simultaneous

SLICE = 1 << 20  # bytes of a weight's gradient worth computing apart
SLICES = 8  # at most, unless more are asked for
CPU_WINDOW = 8  # time steps computed together: more takes memory, and hardly less time
GPU_WINDOW = 16  # time steps computed together where launching one takes longer than computing it


def assemble(
    models: list[nn.Module],
    data: Any,
    method: Method,
    settings: Settings,
    device: torch.device,
    faster: Callable[[Sequence[Any]], Wrap],
) -> tuple[Net, Anatomy]:
    """A net that is ready to be trained; several models are restarts, stacked into one."""
    x = first_samples(data)
    anatomy = dissect(models, x, is_stream(data), method, settings, device, check_values)
    form, loss, classes = anatomy.form, anatomy.loss, anatomy.classes
    source: Source = as_source(data, form, loss, classes, True, anatomy.classifier)
    line = None
    if not isinstance(source, LoaderSource) or source.loader.batch_size is not None:
        line = backprop_line(anatomy, method, settings, x, source.samples)
    learners = make_learners(anatomy, method, settings, source.samples, line)
    validation = None
    if settings.validation is not None:
        validation = as_source(settings.validation, form, loss, classes, False, anatomy.classifier)
    if settings.augment is not None:
        source = Augmented(source, settings.augment)
    return join(learners, source, validation, settings, faster, line), anatomy


def backprop_line(
    anatomy: Anatomy, method: Method, settings: Settings, sample: Any, samples: int
) -> BackpropLine | None:
    """What backprop would take, where blocks learn one after another and may stay under it."""
    keeps_inputs = settings.memory.reuse not in (None, False) or settings.memory.fast
    if settings.schedule is not sequential or isinstance(method, Backprop) or keeps_inputs:
        return None
    params = [parameters(i, anatomy.cuts[:1]) for i in range(len(anatomy.blocks))]
    return line_of(anatomy, params, sample, samples)


def join(
    learners: list[Any],
    source: Source,
    validation: Source | None,
    settings: Settings,
    faster: Callable[[Sequence[Any]], Wrap],
    line: BackpropLine | None = None,
    pass_on: InputReuse | None = None,
) -> Net:
    """Learners and sources as a net; `faster` makes the wrapper of a step that speeds it up."""
    for learner in learners:
        learner.watched = bool(settings.callbacks)
    accelerate = faster(learners)

    def wrap(step: Step, learners: Sequence[Any], source: Source) -> Step:
        step = step if settings.memory.micro_batch is None else accumulate(step)
        return follow_curve(accelerate(step, learners, source), learners, source)

    reuse = settings.memory.reuse if settings.augment is None else False
    pass_on = pass_on or InputReuse(reuse, settings.memory.fast, line)
    return Net(learners, source, validation, [], wrap, pass_on)


def make_learners(
    anatomy: Anatomy,
    method: Method,
    settings: Settings,
    samples: int,
    line: BackpropLine | None = None,
) -> list[BlockLearner]:
    """Every block with its objective and its gradients; what cannot be trained is refused."""
    if isinstance(method, Backprop):
        return [_backprop_learner(anatomy)]
    learners = []
    for i, block in enumerate(anatomy.blocks):
        if block.recurrent:
            learners.append(_recurrent_learner(i, anatomy, settings, samples))
        else:
            learners.append(_block_learner(i, anatomy, settings, samples, line))
    check_solvers(learners, anatomy, settings.schedule is sequential, samples)
    return learners


def _block_learner(
    i: int, anatomy: Anatomy, settings: Settings, samples: int, line: BackpropLine | None
) -> BlockLearner:
    """Block i of every restart."""
    block, rule, form, size = anatomy.blocks[i], anatomy.rules[i], anatomy.form, anatomy.sizes[i]
    last = i == len(anatomy.blocks) - 1
    make, at = (rule.last if last else rule.objective), rule.at
    if last and make is None:
        at = place_of(block, anatomy.loss)
    fixed = output(anatomy.loss) if last else IDLE
    maps, stacked = len(size[at]) > 1, bool(anatomy.restarts)

    def draw() -> Objective:
        if make is None:
            return fixed
        options = {"maps": block.maps and maps, "redraw": settings.memory.redraw and not stacked}
        objective = _draw(make, size[at], anatomy, block.key, **options)
        return objective if stacked else _in_form(objective, form, maps)

    if stacked:
        backend: Backend = Stacked(ClosedForm(block, at, fixed, in_place=False))
    else:
        ragged = form.ragged and any(b.recurrent for b in anatomy.blocks[i:])
        kind = ClosedForm if block.closed_form(at) and not ragged else Autograd
        backend = kind(block, at, fixed, precision=form.precision)
    slices = _slices(block, math.prod(size[Place.BEFORE]), form, settings)
    codes_first = False
    if line is not None and settings.memory.micro_batch is None:
        least, codes_first = line.slices(i)
        chosen = block.maps or settings.memory.slices is not None
        slices = slices if chosen else max(slices, least)
    return _learner(
        *(i, anatomy, samples, backend, draw),
        learns=rule.head if last else rule.objective is not None,
        slices=slices,
        codes_first=codes_first,
        signal=Signal.LABEL if last else rule.signal,
        widest=max(map(math.prod, size.values())) * form.numbers.itemsize,
    )


def _recurrent_learner(i: int, anatomy: Anatomy, settings: Settings, samples: int) -> BlockLearner:
    """A recurrent block: an objective for each direction, drawn once or for each time step."""
    block, rule, on_gpu = anatomy.blocks[i], anatomy.rules[i], anatomy.form.device.type == "cuda"
    assert isinstance(block.layer, SequenceLayer)
    if i == len(anatomy.blocks) - 1:
        raise TpsgdError(
            f"the model ends with {block}, which gives states, not classes: add a classifier, "
            "nn.Linear(units, classes) for example"
        )
    codes = _RecurrentCodes(i, anatomy)
    lazy, stacked = _pulled(anatomy.blocks, i), bool(anatomy.restarts)
    if isinstance(block.layer, Diagonal):
        backend: Unrolled = UnrolledDiagonal(block, settings.window, lazy, stacked)
    else:
        backend = Unrolled(
            block,
            Place.BEFORE if rule.at is Place.BEFORE else Place.AFTER,
            codes.of_step if rule.per_step and rule.objective else None,
            settings.window or (GPU_WINDOW if on_gpu else _cpu_window(anatomy)),
            lazy=lazy,
            keep_codes=on_gpu,
            stacked=stacked,
        )
    learns = rule.objective is not None
    return _learner(i, anatomy, samples, backend, codes.draw, learns, signal=rule.signal)


class _RecurrentCodes:
    """The codes of a recurrent block: of both directions, and of all time steps or of each."""

    def __init__(self, i: int, anatomy: Anatomy) -> None:
        self.number, self.anatomy, self.rule = i, anatomy, anatomy.rules[i]
        self.layer: Any = anatomy.blocks[i].layer
        self.diagonal = isinstance(self.layer, Diagonal)
        if self.diagonal and self.rule.at is Place.BEFORE:
            raise TpsgdError(
                f"{self.rule.name} looks before the activation, but a diagonal layer has its loss "
                "at its output: leave out at=Place.BEFORE (loss_at= chooses the time steps)"
            )

    def draw(self) -> Objective:
        """The block's objective, with the codes of both directions if all steps share them."""
        rule = self.rule
        if rule.objective is None:
            return IDLE
        objective = self._draw_step(0, 0)
        if not rule.per_step or self.diagonal:
            each = [self.of_step(way, 0) for way in range(1 + self.layer.bidirectional)]
            tensors = tuple(t for column in zip(*each, strict=True) for t in column)
            return replace(objective, tensors=tensors, constants=objective.constants * len(each))
        if objective.learned:
            raise TpsgdError(f"{rule.name} learns its codes, so they must be the same at each step")
        return replace(objective, tensors=())

    def of_step(self, direction: int, step: int) -> tuple[Tensor, ...]:
        """The codes of one direction at a time step."""
        return self._draw_step(direction, step).tensors

    def _draw_step(self, direction: int, step: int) -> Objective:
        make, number = self.rule.objective, self.number
        assert make is not None
        number = -1 - number if direction else number  # so that directions have different codes
        return _draw(make, (self.layer.hidden,), self.anatomy, number, step, recurrent=True)


def _cpu_window(anatomy: Anatomy) -> int:
    """Time steps computed together: of short sequences half, to hold less than backprop does."""
    steps = 0 if anatomy.sample is None else anatomy.sample[0][0]
    return min(CPU_WINDOW, steps // 2 if steps > 3 else CPU_WINDOW)


def _learner(
    i: int,
    anatomy: Anatomy,
    samples: int,
    backend: Backend,
    draw: Callable[[], Objective],
    learns: bool,
    slices: int = 1,
    codes_first: bool = False,
    **options: Any,
) -> BlockLearner:
    """The kind of learner that the block's optimizer, or solver, asks for."""
    settings, params = anatomy.block_settings[i], parameters(i, anatomy.cuts)
    arguments = anatomy.blocks[i], backend, draw, settings, params
    options |= {"multi_label": anatomy.loss is bce, "restarts": anatomy.restarts}
    options["trains"] = learns and bool(params)
    if isinstance(settings.optimizer, Ridge):
        return RidgeLearner(*arguments, samples=samples, **options)
    if isinstance(settings.optimizer, Recursive):
        return RecursiveLearner(*arguments, samples=samples, **options)
    return GradientLearner(*arguments, slices=slices, codes_first=codes_first, **options)


def _backprop_learner(anatomy: Anatomy) -> BackpropLearner:
    """The whole net as one learner."""
    block, form, loss = anatomy.blocks[0], anatomy.form, anatomy.loss
    objective, stacked = output(loss), bool(anatomy.restarts)
    return BackpropLearner(
        block,
        Autograd(block, place_of(block, loss), objective, stacked, form.precision),
        lambda: objective,
        anatomy.block_settings[0],
        parameters(0, anatomy.cuts),
        multi_label=loss is bce,
        restarts=anatomy.restarts,
        width=len(anatomy.layers),
        accumulates=form.micro_batch is not None,
    )


def _draw(
    make: Callable[[Site], Objective],
    shape: tuple[int, ...],
    anatomy: Anatomy,
    block: int,
    step: int = 0,
    **options: bool,
) -> Objective:
    """An objective for outputs of this shape; the tensors of several restarts are stacked."""
    form = anatomy.form
    options |= {"loss": anatomy.loss, "device": form.device, "dtype": form.dtype}  # type: ignore
    keys = [Key(seed, block, step) for seed in form.seeds]
    objectives = [make(Site(shape, anatomy.classes, key, **options)) for key in keys]  # type: ignore
    if not anatomy.restarts:
        return objectives[0]
    columns = zip(*(objective.tensors for objective in objectives), strict=True)
    return replace(objectives[0], tensors=tuple(torch.stack(column) for column in columns))


def _in_form(objective: Objective, form: BatchForm, maps: bool) -> Objective:
    """An objective's tensors in the memory format, and codes of maps in the number format."""
    if form.precision is not None and maps and not objective.learned:
        tensors = tuple(t.to(form.precision) for t in objective.tensors)
        objective = replace(objective, tensors=tensors)
    return move(objective, _channels_last) if form.channels_last else objective


def _channels_last(t: Tensor) -> Tensor:
    return t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t


def _slices(block: Block, outputs: int, form: BatchForm, settings: Settings) -> int:
    """How many slices to compute a weight's gradient in: several if it is larger than the batch.

    `outputs`: of the layer, for one sample. The rows of a convolution with groups have different
    inputs, so they stay together.
    """
    layer: Any = block.layer
    kind = layer_kind(layer)
    if kind is None or not kind.dense(layer) or form.stacked:
        return 1
    if settings.memory.slices is not None:
        return settings.memory.slices
    if kind.maps:
        return 1  # a convolution takes about as long for a slice of its filters as for all
    if form.device.type == "cuda" and settings.schedule is simultaneous:
        return 1  # one kernel for the optimizers of all blocks: `learner.together`
    batch = (form.micro_batch or form.batch_size) * outputs * form.numbers.itemsize
    least = SLICE if form.micro_batch is None else 0  # micro-batches sum the whole gradient anyway
    return min(SLICES, max(1, layer.weight.nbytes // max(least, batch)))


def _pulled(blocks: list[Block], i: int) -> bool:
    """Whether the next block reads block i's states step by step as they come."""
    block, after = blocks[i], blocks[i + 1]
    layers = block.layer, after.layer
    return (
        all(isinstance(layer, SequenceLayer) and not layer.bidirectional for layer in layers)
        and isinstance(block.layer, Diagonal) == isinstance(after.layer, Diagonal)
        and bool(block.layer.sequence)
        and not block.tail
        and not after.prologue
    )


def place_of(block: Block, loss: Loss) -> Place:
    """Where the last block's loss looks: at the logits, even if a link function follows them."""
    link = {cross_entropy: (nn.Softmax, nn.LogSoftmax), bce: (nn.Sigmoid,)}.get(loss, ())
    return Place.BEFORE if isinstance(block.activation, link) else Place.END


def parameters(i: int, cuts: list[list[Block]]) -> dict[str, Tensor]:
    """Block i's parameters; those of several restarts stacked."""
    params: list[dict[str, Tensor]] = [dict(cut[i].named_parameters()) for cut in cuts]
    if len(cuts) == 1:
        return params[0]
    return {k: torch.stack([p[k].detach() for p in params]) for k in params[0]}


def unstack(cuts: list[list[Block]], learners: list[Any]) -> None:
    """Write stacked parameters back into the restarts' models."""
    for i, learner in enumerate(learners):
        for r, cut in enumerate(cuts):
            for name, p in cut[i].named_parameters().items():
                p.data.copy_(learner.params[name][r])


def check_optimizers(learners: list[Any]) -> None:
    """A mistake in the last block's optimizer should not wait until the others are trained."""
    for learner in learners:
        if learner.trains and not isinstance(learner.settings.optimizer, SOLVERS):
            make_optimizer(learner.settings.optimizer, learner.params, learner.settings.lr)


def block_infos(learners: list[Any], anatomy: Anatomy, restart: int = 0) -> list[BlockInfo]:
    """How each block was trained, for the record."""
    if not anatomy.rules:
        return [
            BlockInfo(str(b), "backprop", count(b.named_parameters()), "autograd")
            for b in anatomy.layers
        ]
    names = [*(rule.name for rule in anatomy.rules[:-1]), "head"]
    return [
        BlockInfo(str(x.block), name, count(x.block.named_parameters()), x.how, x.scale(restart))
        for x, name in zip(learners, names, strict=True)
    ]


def count(params: Mapping[str, Tensor]) -> int:
    """How many numbers some parameters hold."""
    return sum(p.numel() for p in params.values())
