"""From a model, data and a rule to a net that is ready to be trained.

`assemble` is the one way there: `fit`, backprop, ZORB and the memory plan all use it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from tpsgd.engine.augment import Augmented
from tpsgd.engine.backprop import Backprop, BackpropLearner, in_segments
from tpsgd.engine.batches import (
    BatchForm,
    as_source,
    check_values,
    first_samples,
    has_lookup,
    is_stream,
    suits_channels_last,
)
from tpsgd.engine.cuda_graphs import captured, library_modules_only
from tpsgd.engine.learner import (
    Backend,
    BlockLearner,
    BlockSettings,
    GradientLearner,
    accumulate,
)
from tpsgd.engine.optimizers import make_optimizer
from tpsgd.engine.record import BlockInfo
from tpsgd.engine.reuse import InputReuse
from tpsgd.engine.settings import Settings
from tpsgd.engine.solved import RecursiveLearner, RidgeLearner, check_solvers
from tpsgd.errors import TpsgdError
from tpsgd.losses import Loss, bce, cross_entropy
from tpsgd.maths.random import Key
from tpsgd.nets.autograd import Autograd
from tpsgd.nets.blocks import Block, has_batch_norm, shapes, split, whole
from tpsgd.nets.closed_form import ClosedForm
from tpsgd.nets.layers import layer_kind
from tpsgd.nets.padded import Padded
from tpsgd.nets.recurrent import Recurrent, connect
from tpsgd.nets.stacked import Stacked
from tpsgd.nets.unrolled import Unrolled
from tpsgd.objectives import IDLE, Objective, Site, move, output
from tpsgd.protocols import Source
from tpsgd.rules import Place, Rule, Signal
from tpsgd.solvers import SOLVERS, Recursive, Ridge
from tpsgd.train import Net, Step, sequential

SLICE = 1 << 20  # bytes of a weight's gradient worth computing apart
SLICES = 8  # at most, unless more are asked for
GPU_WINDOW = 16  # time steps computed together where launching one takes longer than computing it

Method = Rule | Sequence[Rule] | Backprop


@dataclass(frozen=True)
class Anatomy:
    """A model as the learners see it: blocks, rules, output shapes, and the form of a batch.

    With several models, restarts that are stacked, `cuts` has the blocks of each.
    """

    cuts: list[list[Block]]
    layers: list[Block]  # for the record: the blocks, also under backprop, which has one
    rules: list[Rule]
    block_settings: list[BlockSettings]
    loss: Loss
    form: BatchForm
    sizes: list[dict[Place, tuple[int, ...]]]
    classes: int

    @property
    def blocks(self) -> list[Block]:
        """The blocks of the first model."""
        return self.cuts[0]

    @property
    def restarts(self) -> int | None:
        """How many restarts are stacked, if any are."""
        return len(self.cuts) if len(self.cuts) > 1 else None


def assemble(
    models: list[nn.Module], data: Any, method: Method, settings: Settings, device: torch.device
) -> tuple[Net, Anatomy]:
    """A net that is ready to be trained; several models are restarts, stacked into one."""
    x = first_samples(data)
    anatomy = dissect(models, x, is_stream(data), method, settings, device, check_values)
    form, loss, classes = anatomy.form, anatomy.loss, anatomy.classes
    source: Source = as_source(data, form, loss, classes, complete=True)
    learners = make_learners(anatomy, method, settings, source.samples)
    held_out = settings.validation
    validation = None if held_out is None else as_source(held_out, form, loss, classes)
    if settings.augment is not None:
        source = Augmented(source, settings.augment)
    net = join(learners, source, validation, settings)
    return net, anatomy


def join(
    learners: list[Any],
    source: Source,
    validation: Source | None,
    settings: Settings,
    pass_on: InputReuse | None = None,
) -> Net:
    """Learners and sources as a net, with the wrappers of a step that the settings ask for."""
    ours = all(map(library_modules_only, learners))

    def wrap(step: Step, learners: Sequence[Any], source: Source) -> Step:
        step = step if settings.memory.micro_batch is None else accumulate(step)
        return captured(step, learners, source, ours)

    reuse = settings.memory.reuse if settings.augment is None else False
    return Net(learners, source, validation, [], wrap, pass_on or InputReuse(reuse))


def dissect(
    models: list[nn.Module],
    x: Any,
    stream: bool,
    method: Method,
    settings: Settings,
    device: torch.device,
    check: Callable[[Any, BatchForm], None] | None = None,
) -> Anatomy:
    """The blocks of the models, their rules and the shapes that a few samples x take in them."""
    if isinstance(method, Backprop):
        layers = _layers(models[0])
        _check_backprop(models[0], settings)
        cuts = [[whole(in_segments(connect(model), method.checkpoint))] for model in models]
        rules, loss = [], settings.loss or cross_entropy
        settings = replace(settings, window=None)
    else:
        cuts = [split(model) for model in models]
        layers = cuts[0]
        rules = rules_for(method, layers, settings.schedule)
        loss = settings.loss or rules[-1].loss
        if settings.window is not None and not any(block.recurrent for block in layers):
            raise TpsgdError("window is for models with recurrent layers, and there is none")
    block_settings = settings.per_block(len(cuts[0]))
    dtype = next(models[0].parameters()).dtype
    form = form_for(layers, x, stream, settings, device, dtype, len(models))
    if check is not None:
        check(x, form)
    sizes = sizes_of(cuts[0], x, settings, form)
    classes = classes_of(sizes[-1][Place.END], cuts[0][-1])
    return Anatomy(cuts, layers, rules, block_settings, loss, form, sizes, classes)


def _check_backprop(model: nn.Module, settings: Settings) -> None:
    """Refuse what backprop cannot train or cannot do."""
    optimizer, block = settings.per_block(1)[0].optimizer, whole(connect(model))
    if isinstance(optimizer, SOLVERS):
        raise TpsgdError(
            f"{optimizer.__name__} solves one block at a time; backprop, whose gradients go "
            "through all of them, needs an optimizer"
        )
    if not block.named_parameters():
        raise TpsgdError(f"{block.name} has no parameters that may learn")


def _layers(model: nn.Module) -> list[Block]:
    """The blocks of a model that is trained as a whole; any module will do."""
    try:
        return split(model)
    except TpsgdError:
        return [whole(connect(model))]


def make_learners(
    anatomy: Anatomy, method: Method, settings: Settings, samples: int
) -> list[BlockLearner]:
    """Every block with its objective and its gradients; what cannot be trained is refused."""
    if isinstance(method, Backprop):
        learners: list[BlockLearner] = [_backprop_learner(anatomy)]
    else:
        learners = [
            (_recurrent_learner if block.recurrent else _block_learner)(
                i, anatomy, settings, samples
            )
            for i, block in enumerate(anatomy.blocks)
        ]
        one_by_one = settings.schedule is sequential
        check_solvers(learners, anatomy.rules, anatomy.sizes, one_by_one, samples, anatomy.form)
    return learners


def check_optimizers(learners: list[Any]) -> None:
    """A mistake in the last block's optimizer should not wait until the others are trained."""
    for learner in learners:
        if learner.trains and not isinstance(learner.settings.optimizer, SOLVERS):
            make_optimizer(learner.settings.optimizer, learner.params, learner.settings.lr)


def rules_for(rule: Rule | Sequence[Rule], blocks: list[Block], schedule: Any) -> list[Rule]:
    """One rule per block, or an error that lists the blocks."""
    rules: list[Any] = list(rule) if isinstance(rule, (list, tuple)) else [rule]
    if isinstance(rule, Rule):
        rules *= len(blocks)
    if len(rules) != len(blocks) or not all(isinstance(r, Rule) for r in rules):
        listed = "; ".join(map(str, blocks))
        raise TpsgdError(
            f"rule must be a tpsgd.rules value or a list of {len(blocks)}, one per block, got "
            f"{len(rules)}: {[getattr(r, 'name', r) for r in rules]}; the blocks are {listed}; "
            "a rule is made by calling it, as in rule=tpsgd.rules.tpsgd_l2()"
        )
    for r in rules[:-1]:
        if r.needs_output and schedule is sequential:
            raise TpsgdError(
                f"{r.name} cannot learn block by block: its signal is the error of the whole net's "
                "output, which is not trained yet; use schedule=tpsgd.simultaneous"
            )
    return rules


def _block_learner(i: int, anatomy: Anatomy, settings: Settings, samples: int) -> BlockLearner:
    """Block i of every restart."""
    block, rule, form, loss = anatomy.blocks[i], anatomy.rules[i], anatomy.form, anatomy.loss
    size, last, stacked = anatomy.sizes[i], i == len(anatomy.blocks) - 1, anatomy.restarts
    at, make = rule.at, rule.last if last else rule.objective
    if last and make is None:
        at = place_of(block, loss)
    frozen = not rule.head if last else rule.objective is None
    fixed = output(loss) if last else IDLE

    def draw() -> Objective:
        if make is None:
            return fixed
        maps = block.maps and len(size[at]) > 1
        redraw = settings.memory.redraw and not stacked
        keys = [Key(settings.seed + r, block.key) for r in range(len(anatomy.cuts))]
        objectives = [
            make(
                Site(
                    size[at], anatomy.classes, key, maps, loss, form.device, form.dtype,
                    redraw=redraw,
                )
            )
            for key in keys
        ]  # fmt: skip
        if stacked:
            return _stack_objectives(objectives)
        return _laid_out(objectives[0], form, len(size[at]) > 1)

    if stacked:
        backend: Backend = Stacked(ClosedForm(block, at, fixed, in_place=False))
    else:
        ragged = form.ragged and any(b.recurrent for b in anatomy.blocks[i:])
        kind = ClosedForm if block.closed_form(at) and not ragged else Autograd
        backend = kind(block, at, fixed, precision=form.precision)
    params = parameters(i, anatomy.cuts)
    widest = max(map(math.prod, size.values())) * form.numbers.itemsize
    slices = _slices(block, math.prod(size[Place.BEFORE]), form, settings.memory.slices)
    signal = Signal.LABEL if last else rule.signal
    trains = bool(params) and not frozen
    common: dict[str, Any] = {"signal": signal, "trains": trains, "widest": widest}
    return _learner(i, anatomy, backend, draw, params, samples, slices, common)


def _learner(
    i: int,
    anatomy: Anatomy,
    backend: Backend,
    draw: Callable[[], Objective],
    params: dict[str, Tensor],
    samples: int,
    slices: int,
    common: dict[str, Any],
) -> BlockLearner:
    """The kind of learner that the block's optimizer, or solver, asks for."""
    settings = anatomy.block_settings[i]
    common |= {"multi_label": anatomy.loss is bce, "restarts": anatomy.restarts}
    arguments = anatomy.blocks[i], backend, draw, settings, params
    if isinstance(settings.optimizer, Ridge):
        return RidgeLearner(*arguments, samples=samples, **common)
    if isinstance(settings.optimizer, Recursive):
        return RecursiveLearner(*arguments, samples=samples, **common)
    return GradientLearner(*arguments, slices=slices, **common)


def _backprop_learner(anatomy: Anatomy) -> BackpropLearner:
    """The whole net as one learner."""
    block, form, loss = anatomy.blocks[0], anatomy.form, anatomy.loss
    objective = output(loss)
    backend = Autograd(
        block, place_of(block, loss), objective, bool(anatomy.restarts), form.precision
    )
    return BackpropLearner(
        block,
        backend,
        lambda: objective,
        anatomy.block_settings[0],
        parameters(0, anatomy.cuts),
        multi_label=loss is bce,
        restarts=anatomy.restarts,
        width=len(anatomy.layers),
        accumulates=form.micro_batch is not None,
    )


def _recurrent_learner(i: int, anatomy: Anatomy, settings: Settings, samples: int) -> BlockLearner:
    """A recurrent block: an objective for each direction, drawn once or for each time step."""
    cuts, rule, form, loss = anatomy.cuts, anatomy.rules[i], anatomy.form, anatomy.loss
    block, layer, make = cuts[0][i], cuts[0][i].layer, rule.objective
    assert isinstance(layer, Recurrent)
    if i == len(cuts[0]) - 1:
        raise TpsgdError(
            f"the model ends with {block}, which gives states, not classes: add a classifier, "
            "nn.Linear(units, classes) for example"
        )
    ways, stacked = range(len(layer.cells)), bool(anatomy.restarts)

    def drawn(way: int, step: int) -> Objective:
        """The objective of one direction at one step (of every restart, stacked)."""
        assert make is not None
        number = -1 - i if way else i  # backward cells have keys of their own
        sites = [
            Site(
                (layer.hidden,), anatomy.classes, Key(settings.seed + r, number, step), False, loss,
                form.device, form.dtype, recurrent=True,
            )
            for r in range(len(cuts))
        ]  # fmt: skip
        each = [make(site) for site in sites]
        return _stack_objectives(each) if stacked else each[0]

    def draw() -> Objective:
        if make is None:
            return IDLE
        first = drawn(0, 0)
        if not rule.per_step:
            return replace(first, tensors=tuple(t for w in ways for t in drawn(w, 0).tensors))
        if first.learned:
            raise TpsgdError(f"{rule.name} learns its codes, so they must be the same at each step")
        return replace(first, tensors=())

    on_gpu = form.device.type == "cuda"
    backend = Unrolled(
        block,
        Place.BEFORE if rule.at is Place.BEFORE else Place.AFTER,
        (lambda way, step: drawn(way, step).tensors) if rule.per_step and make else None,
        settings.window or (GPU_WINDOW if on_gpu else 1),
        lazy=_pulled(cuts[0], i),
        keep_codes=on_gpu,
        stacked=stacked,
    )
    params = parameters(i, cuts)
    common = {"signal": rule.signal, "trains": bool(params) and make is not None}
    return _learner(i, anatomy, backend, draw, params, samples, 1, common)


def _laid_out(objective: Objective, form: BatchForm, maps: bool) -> Objective:
    """An objective's tensors as batches are: in their layout, and codes of maps in their format."""
    if form.precision is not None and maps and not objective.learned:
        tensors = tuple(t.to(form.precision) for t in objective.tensors)
        objective = replace(objective, tensors=tensors)
    return move(objective, _last) if form.channels_last else objective


def _last(t: Tensor) -> Tensor:
    """Feature maps with their channels last in memory."""
    return t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t


def _slices(block: Block, outputs: int, form: BatchForm, wanted: int | None) -> int:
    """How many slices to make a weight's gradient in: more than one where it outweighs the batch.

    `outputs`: of the layer, for one sample. Rows of a convolution with groups have inputs of their
    own, so they stay together.
    """
    layer: Any = block.layer
    kind = layer_kind(layer)
    if kind is None or not kind.dense(layer) or len(form.seeds) > 1:
        return 1
    if wanted is not None:
        return wanted
    batch = (form.micro_batch or form.batch_size) * outputs * form.numbers.itemsize
    least = SLICE if form.micro_batch is None else 0  # of pieces the whole gradient is held anyway
    return min(SLICES, max(1, layer.weight.nbytes // max(least, batch)))


def _pulled(blocks: list[Block], i: int) -> bool:
    """Whether the next block reads block i's states step by step as they come."""
    layer, after = blocks[i].layer, blocks[i + 1]
    return (
        isinstance(layer, Recurrent)
        and isinstance(after.layer, Recurrent)
        and layer.sequence
        and not layer.bidirectional
        and not after.layer.bidirectional
        and not blocks[i].tail
        and not after.prologue
    )


def parameters(i: int, cuts: list[list[Block]]) -> dict[str, Tensor]:
    """Block i's parameters; those of several restarts stacked."""
    each = [dict(cut[i].named_parameters()) for cut in cuts]
    if len(cuts) == 1:
        return dict(each[0])
    return {k: torch.stack([p[k].detach() for p in each]) for k in each[0]}


def _stack_objectives(objectives: list[Objective]) -> Objective:
    columns = zip(*(o.tensors for o in objectives), strict=True)
    return replace(objectives[0], tensors=tuple(torch.stack(column) for column in columns))


def unstack(cuts: list[list[Block]], learners: list[Any]) -> None:
    """Write stacked parameters back into the restarts' models."""
    for i, learner in enumerate(learners):
        for r, cut in enumerate(cuts):
            for name, p in cut[i].named_parameters().items():
                p.data.copy_(learner.params[name][r])


def sizes_of(
    blocks: list[Block], x: Any, settings: Settings, form: BatchForm
) -> list[dict[Place, tuple[int, ...]]]:
    """Output shapes of every block, which held-out data must have too."""
    form = replace(form, precision=None)
    sizes = shapes(blocks, form(x))
    _refuse_ragged(blocks, x)
    if settings.validation is not None:
        x = form(first_samples(settings.validation))
        found = shapes(blocks, x)
        for block, ours, theirs in zip(blocks, sizes, found, strict=True):
            if isinstance(block.layer, Recurrent) and block.layer.sequence:
                theirs.update(ours)  # of any length
        if found != sizes:
            raise TpsgdError(
                f"the validation data's samples, of shape {tuple(x.shape[1:])}, give other output "
                "shapes than the training data's"
            )
    return sizes


def _refuse_ragged(blocks: list[Block], x: Any) -> None:
    """Only recurrent layers can leave the padding of sequences out when they learn."""
    readers = [b for b in blocks if isinstance(b.layer, Recurrent)]
    if not isinstance(x, Padded) or not readers or len(blocks) == 1:
        return
    for block in blocks[: readers[0].index]:
        if block.named_parameters():
            raise TpsgdError(
                f"block {block.index + 1} ({block}) comes before the first recurrent layer and "
                "cannot learn from sequences of different lengths: freeze it with "
                "requires_grad_(False)"
            )
    if readers[-1].layer.sequence:
        raise TpsgdError(
            f"block {readers[-1].index + 1} ({readers[-1]}) hands on sequences of different "
            "lengths, padding and all: let the last recurrent layer give its last state "
            "(sequence=False)"
        )


def form_for(
    blocks: list[Block],
    x: Any,
    streams: bool,
    settings: Settings,
    device: torch.device,
    dtype: torch.dtype,
    restarts: int,
) -> BatchForm:
    """How batches must look for these blocks."""
    modules = [m for block in blocks for top in block.modules for m in top.modules()]
    if settings.precision is not None:
        _check_precision(modules, dtype, settings.precision)
    return BatchForm(
        device,
        dtype,
        settings.batch_size,
        tuple(settings.seed + r for r in range(restarts)),
        channels_last=suits_channels_last(modules),
        lookup=has_lookup(modules),
        batch_norm=has_batch_norm(modules),
        tokens=_tokens(blocks[0]),
        in_chunks=_in_chunks(blocks[0], x, settings),
        ragged=streams or isinstance(x, Padded),
        micro_batch=settings.memory.micro_batch,
        precision=settings.precision,
    )


def _check_precision(modules: list[nn.Module], dtype: torch.dtype, precision: torch.dtype) -> None:
    name = str(precision).removeprefix("torch.")
    if dtype is not torch.float32:
        raise TpsgdError(
            f"precision={name} is for models in float32, which their parameters stay; this one is "
            f"in {str(dtype).removeprefix('torch.')}: leave precision out"
        )
    if any(isinstance(m, (Recurrent, nn.RNNBase, nn.RNNCellBase)) for m in modules):
        raise TpsgdError(
            f"precision={name} is for models without recurrent layers, whose errors would add up "
            "over time: leave precision out"
        )


def _tokens(first: Block) -> int:
    """How many tokens there are, if the model begins by looking them up."""
    reads = isinstance(first.layer, Recurrent) and not first.prologue
    return first.layer.inputs if reads else 0  # type: ignore[union-attr, return-value]


def _in_chunks(first: Block, x: Any, settings: Settings) -> bool:
    """Whether sequences can be gathered a few steps at a time, which a given window asks for."""
    if settings.window is None or not first.recurrent or first.prologue:
        return False
    return x.dim() == 3 or (x.dim() == 2 and _tokens(first) > 1 and not x.is_floating_point())


def place_of(block: Block, loss: Loss) -> Place:
    """Where the last block's loss looks: at the logits, even if a link function follows them."""
    link = {cross_entropy: (nn.Softmax, nn.LogSoftmax), bce: (nn.Sigmoid,)}.get(loss, ())
    return Place.BEFORE if isinstance(block.activation, link) else Place.END


def classes_of(shape: tuple[int, ...], block: Block) -> int:
    if len(shape) != 1:
        raise TpsgdError(
            f"the last block ({block}) must give one number per class, shape (batch, classes), but "
            f"gives (batch, {', '.join(map(str, shape))}); end the model with pooling or "
            "nn.Flatten() and an nn.Linear"
        )
    return shape[0]


def block_infos(learners: list[Any], anatomy: Anatomy) -> list[BlockInfo]:
    """How each block was trained, for the record."""
    if not anatomy.rules:
        return [
            BlockInfo(str(b), "backprop", count(b.named_parameters()), "autograd")
            for b in anatomy.layers
        ]
    return [
        BlockInfo(
            str(learner.block),
            "head" if learner is learners[-1] else rule.name,
            count(learner.block.named_parameters()),
            learner.how,
        )
        for learner, rule in zip(learners, anatomy.rules, strict=True)
    ]


def count(params: Mapping[str, Tensor]) -> int:
    """How many numbers some parameters hold."""
    return sum(p.numel() for p in params.values())
