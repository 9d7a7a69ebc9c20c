"""From a model, data and a rule to a net that is ready to be trained.

`assemble` is the one way there for `fit`, backprop and ZORB; the memory plan takes the same steps
(`specify`, `make_learners`, `join`) with samples that have no numbers, dlADMM the first of them.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tpsgd.common.errors import TpsgdError
from tpsgd.engine.learners.backprop import Backprop
from tpsgd.engine.learners.learner import (
    BlockLearner,
    Gradient,
    accumulate,
    calibrate,
    step_on_error,
    with_figures,
    with_pending_updates,
)
from tpsgd.engine.learners.optimizers import follow_curve, make_optimizer
from tpsgd.engine.learners.solved import RecursiveSolver, RidgeSolver, check_solvers
from tpsgd.engine.learners.updaters import BackwardSteps, OptimizerSteps, PendingSteps, Updater
from tpsgd.engine.line import BackpropLine, line_of
from tpsgd.engine.settings import Settings
from tpsgd.engine.solvers import SOLVERS, Ridge
from tpsgd.engine.sources.augment import Augmented
from tpsgd.engine.sources.batches import BatchForm
from tpsgd.engine.sources.inputs import check_values
from tpsgd.engine.sources.loaders import LoaderSource, as_source, is_stream
from tpsgd.engine.sources.reuse import InputReuse
from tpsgd.engine.spec import Method, RunRequest, RunSpec, specify
from tpsgd.losses import Loss, bce, cross_entropy
from tpsgd.maths.noise import noise_key
from tpsgd.maths.positions import Layout, at_positions, masked, of_token_mean
from tpsgd.maths.random import Key
from tpsgd.nets.autograd import Autograd
from tpsgd.nets.blocks import Block
from tpsgd.nets.closed_form import ClosedForm
from tpsgd.nets.diagonal import Diagonal
from tpsgd.nets.layers import layer_kind
from tpsgd.nets.padded import SequenceLayer
from tpsgd.nets.precision import in_format
from tpsgd.nets.stacked import Stacked
from tpsgd.nets.unrolled import Unrolled
from tpsgd.objectives import IDLE, NetSignal, Objective, Place, Signal, Site, move, output
from tpsgd.targets import Target, grid_of
from tpsgd.train import Net, Source, Step, Wrap, sequential, simultaneous, step

Faster = Callable[[Sequence[Any]], Wrap]
SLICE = 1 << 20  # bytes of a weight's gradient worth computing apart
SLICES = 8  # at most, unless more are asked for
CPU_WINDOW = 8  # time steps computed together: more takes memory, and hardly less time
GPU_WINDOW = 16  # time steps computed together where launching one takes longer than computing it


def assemble(asked: RunRequest, device: torch.device, faster: Faster | None = None) -> Net:
    """A net that is ready to be trained; several models are restarts, stacked into one.

    `faster` makes the wrapper of a step that speeds it up.
    """
    data, settings = asked.data, asked.settings
    x = asked.samples
    if asked.random is not None:
        torch.set_rng_state(asked.random)
    spec = specify(asked, x, is_stream(data), device, check_values)
    labelled = spec.form, spec.loss, spec.classes
    source: Source = as_source(data, *labelled, True, spec.target, spec.scaling)
    line = None
    if not isinstance(source, LoaderSource) or source.loader.batch_size is not None:
        line = backprop_line(spec, x, source.samples)
    learners = make_learners(spec, asked.method, settings, source.samples, line)
    validation = None
    if settings.validation is not None:
        held_out = settings.validation, *labelled, False
        validation = as_source(*held_out, spec.target, spec.scaling)
    if settings.augment is not None:
        source = Augmented(source, settings.augment)
    net = join(learners, source, validation, settings, faster, line)
    net.spec, net.models, net.order = spec, asked.models, settings.order
    return net


def backprop_line(spec: RunSpec, sample: Any, samples: int) -> BackpropLine | None:
    """What backprop would take, where blocks learn one after another and may stay under it."""
    settings = spec.settings
    keeps_inputs = settings.memory.reuse not in (None, False) or settings.memory.fast
    if settings.order is not sequential or isinstance(spec.method, Backprop) or keeps_inputs:
        return None
    params = [parameters(i, spec.cuts[:1]) for i in range(len(spec.blocks))]
    return line_of(spec, params, sample, samples)


def join(
    learners: list[Any],
    source: Source,
    validation: Source | None,
    settings: Settings,
    faster: Faster | None = None,
    line: BackpropLine | None = None,
    pass_on: InputReuse | None = None,
) -> Net:
    """Learners and sources as a net; `faster` makes the wrapper of a step that speeds it up."""
    for learner in learners:
        learner.updater.watched = bool(settings.callbacks)
    accelerate = None if faster is None else faster(learners)

    def wrap(step: Step, learners: Sequence[Any], source: Source) -> Step:
        if any(getattr(x.gradient, "lazy", False) for x in learners):
            step = with_pending_updates(step)
        step = step if settings.memory.micro_batch is None else accumulate(step)
        step = step if accelerate is None else accelerate(step, learners, source)
        return with_figures(follow_curve(step, learners, source))

    reuse = settings.memory.reuse if settings.augment is None else False
    pass_on = pass_on or InputReuse(reuse, settings.memory.fast, line)
    waits = any(x.signal is not Signal.LABEL for x in learners if x.trains)
    plain = step_on_error if waits else step
    return Net(learners, source, validation, [], wrap, pass_on, plain, batches_for, calibrate)


def batches_for(learners: Sequence[Any], source: Source, epoch: int) -> Iterator[Any]:
    """The batches of an epoch, in the random order of the first block; a solver's as stored."""
    if learners[0].updater.in_stored_order:
        return source.batches()
    return source.batches(learners[0].block.key, epoch)


def make_learners(
    spec: RunSpec,
    method: Method,
    settings: Settings,
    samples: int,
    line: BackpropLine | None = None,
) -> list[BlockLearner]:
    """Every block with its objective and its gradients; what cannot be trained is refused."""
    if isinstance(method, Backprop):
        return [_whole_net(spec)]
    learners = []
    for i, block in enumerate(spec.blocks):
        if block.recurrent:
            learners.append(_recurrent_learner(i, spec, settings, samples))
        else:
            learners.append(_block_learner(i, spec, settings, samples, line))
    check_solvers(learners, spec, settings.order is sequential, samples)
    return learners


def _block_learner(
    i: int, spec: RunSpec, settings: Settings, samples: int, line: BackpropLine | None
) -> BlockLearner:
    """Block i of every restart."""
    block, rule, form, size = spec.blocks[i], spec.rules[i], spec.form, spec.sizes[i]
    last = i == len(spec.blocks) - 1
    make, at = (rule.last if last else rule.objective), rule.at
    if last and make is None:
        at = place_of(block, spec.loss)
    layout, fixed = layout_of(i, at, spec), output(spec.loss) if last else IDLE
    maps, stacked = len(size[at]) > 1, bool(spec.restarts)
    if layout is not None:
        fixed = at_positions(fixed, layout) if last else IDLE

    def draw() -> Objective:
        if make is None:
            return fixed
        redraw = settings.memory.redraw and not stacked
        options: dict[str, Any] = {"maps": block.maps and maps, "redraw": redraw}
        options |= {"input": entering, "behind": tuple(getattr(weight, "shape", ()))}
        if layout is not None:
            vector = (size[at][0 if layout.channels_first else -1],)
            objective = _draw(make, vector, spec, block.key, **(options | {"maps": False}))
            return at_positions(objective, layout)
        if block.gives_tokens and rule.classifies and len(size[at]) == 2:
            return of_token_mean(_draw(make, size[at][1:], spec, block.key, **options))
        objective = _draw(make, size[at], spec, block.key, **options)
        return objective if stacked else _in_form(objective, form, maps)

    if stacked:
        gradient: Gradient = Stacked(ClosedForm(block, at, fixed, in_place=False))
    else:
        ragged = form.ragged and any(b.recurrent for b in spec.blocks[i:])
        kind = ClosedForm if block.closed_form(at) and not ragged else Autograd
        gradient = kind(block, at, fixed, precision=form.precision)
    of_net = isinstance(rule.signal, NetSignal)
    first = () if spec.sample is None else tuple(spec.sample[0])
    entering = spec.sizes[i - 1][Place.END] if i else first
    weight = None if last else getattr(spec.blocks[i + 1].layer, "weight", None)
    if of_net and form.precision is not None:
        raise TpsgdError(f"{rule.name} computes in its model's number format: leave precision out")
    slices = _slices(block, math.prod(size[Place.BEFORE]), form, settings)
    codes_first = False
    if line is not None and settings.memory.micro_batch is None:
        least, codes_first = line.slices(i)
        chosen = block.maps or settings.memory.slices is not None
        slices = slices if chosen else max(slices, least)
    return _learner(
        *(i, spec, samples, gradient, draw),
        learns=rule.head if last else rule.objective is not None,
        slices=1 if of_net else slices,
        noise=noise_key(Key(form.seeds[0], block.key), form.device) if of_net else None,
        codes_first=codes_first,
        signal=Signal.LABEL if last else rule.signal,
        widest=max(map(math.prod, size.values())) * form.numbers.itemsize,
    )


def layout_of(i: int, at: Place, spec: RunSpec) -> Layout | None:
    """Where the positions of a block's output are; None if a sample has one label."""
    target, block, shape = spec.target, spec.blocks[i], spec.sizes[i][at]
    if not target.positions:
        return None
    if i == len(spec.blocks) - 1:
        return Layout(target.positions, target.channels_first, target, spec.classes)
    if spec.rules[i].signal is not Signal.LABEL:  # an error, which is 0 where there is no label
        target = replace(target, ignores=False)
    grid = grid_of(shape, block.maps, target, f"block {i + 1} ({block})")
    return Layout(grid, block.maps or len(shape) == 1, target, spec.classes)


def _recurrent_learner(i: int, spec: RunSpec, settings: Settings, samples: int) -> BlockLearner:
    """A recurrent block: an objective for each direction, drawn once or for each time step."""
    block, rule, on_gpu = spec.blocks[i], spec.rules[i], spec.form.device.type == "cuda"
    assert isinstance(block.layer, SequenceLayer)
    if i == len(spec.blocks) - 1:
        raise TpsgdError(
            f"the model ends with {block}, which gives states, not classes: add a classifier, "
            "nn.Linear(units, classes) for example"
        )
    learns, target = rule.objective is not None, spec.target
    if learns and len(target.positions) > 1:
        raise TpsgdError(f"block {i + 1} ({block}) reads steps, and labels are those of pixels")
    if rule.signal is not Signal.LABEL:  # an error, which is 0 where there is no label
        target = replace(target, ignores=False)
    codes = _RecurrentCodes(i, spec, target)
    lazy, stacked = _pulled(spec.blocks, i), bool(spec.restarts)
    labelled = {"target": target, "classes": spec.classes, "lazy": lazy, "stacked": stacked}
    if isinstance(block.layer, Diagonal):
        gradient = Unrolled(block, window=settings.window, **labelled)
    else:
        gradient = Unrolled(
            block,
            Place.BEFORE if rule.at is Place.BEFORE else Place.AFTER,
            codes.of_step if rule.per_step and rule.objective else None,
            settings.window or (GPU_WINDOW if on_gpu else _cpu_window(spec)),
            keep_codes=on_gpu,
            **labelled,
        )
    return _learner(i, spec, samples, gradient, codes.draw, learns, signal=rule.signal)


class _RecurrentCodes:
    """The codes of a recurrent block: of both directions, and of all time steps or of each."""

    def __init__(self, i: int, spec: RunSpec, target: Target) -> None:
        self.number, self.spec, self.rule = i, spec, spec.rules[i]
        self.masks = bool(target.positions) and target.ignores
        self.layer: Any = spec.blocks[i].layer
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
        if objective.noise_at is not None:
            raise TpsgdError(f"{rule.name} draws random numbers: recurrent blocks have none")
        objective = masked(objective) if self.masks else objective
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
        return _draw(make, (self.layer.hidden,), self.spec, number, step, recurrent=True)


def _cpu_window(spec: RunSpec) -> int:
    """Time steps computed together: of short sequences half, to hold less than backprop does."""
    steps = 0 if spec.sample is None else spec.sample[0][0]
    return min(CPU_WINDOW, steps // 2 if steps > 3 else CPU_WINDOW)


def _learner(
    i: int,
    spec: RunSpec,
    samples: int,
    gradient: Gradient,
    draw: Callable[[], Objective],
    learns: bool,
    slices: int = 1,
    codes_first: bool = False,
    **options: Any,
) -> BlockLearner:
    """Block i with the updater that its optimizer, or solver, asks for."""
    settings, params = spec.block_settings[i], parameters(i, spec.cuts)
    if isinstance(settings.optimizer, SOLVERS):
        layout = layout_of(i, Place.BEFORE, spec)
        kind = RidgeSolver if isinstance(settings.optimizer, Ridge) else RecursiveSolver
        updater: Updater = kind(samples, layout)
    else:
        steps = PendingSteps if getattr(gradient, "lazy", False) else OptimizerSteps
        updater = steps(slices, codes_first)
    options |= {"multi_label": spec.loss is bce, "restarts": spec.restarts}
    options |= {"target": spec.target, "outputs": spec.classes}
    trains = learns and bool(params)
    parts = spec.blocks[i], gradient, updater, draw, settings, params
    return BlockLearner(*parts, trains=trains, **options)


def _whole_net(spec: RunSpec) -> BlockLearner:
    """Backprop: the whole net is one block, so its local gradient is the gradient of the net."""
    block, form, loss = spec.blocks[0], spec.form, spec.loss
    at, objective, stacked = place_of(block, loss), output(loss), bool(spec.restarts)
    if layout := layout_of(0, at, spec):
        objective = at_positions(objective, layout)
    return BlockLearner(
        block,
        Autograd(block, at, objective, stacked, form.precision),
        OptimizerSteps() if form.micro_batch is None else BackwardSteps(),
        lambda: objective,
        spec.block_settings[0],
        parameters(0, spec.cuts),
        multi_label=loss is bce,
        target=spec.target,
        outputs=spec.classes,
        restarts=spec.restarts,
        layers=len(spec.layers),
        whole_net=True,
    )


def _draw(
    make: Callable[[Site], Objective],
    shape: tuple[int, ...],
    spec: RunSpec,
    block: int,
    step: int = 0,
    **options: Any,
) -> Objective:
    """An objective for outputs of this shape; the tensors of several restarts are stacked."""
    form = spec.form
    options |= {"loss": spec.loss, "numbers": spec.target.numbers}
    options |= {"device": form.device, "dtype": form.dtype}
    keys = [Key(seed, block, step) for seed in form.seeds]
    objectives = [make(Site(shape, spec.classes, key, **options)) for key in keys]
    if not spec.restarts:
        return objectives[0]
    columns = zip(*(objective.tensors for objective in objectives), strict=True)
    return replace(objectives[0], tensors=tuple(torch.stack(column) for column in columns))


def _in_form(objective: Objective, form: BatchForm, maps: bool) -> Objective:
    """An objective's tensors in the memory format, and codes of maps in the number format."""
    if form.precision is not None and maps and not objective.learned:
        tensors = tuple(in_format(t, form.precision) for t in objective.tensors)
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
    if form.device.type == "cuda" and settings.order is simultaneous:
        return 1  # all blocks are in one graph: more kernels would take longer
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


def count(params: Mapping[str, Tensor]) -> int:
    """How many numbers some parameters hold."""
    return sum(p.numel() for p in params.values())
