"""From blocks and rules to learners: each block with its gradients and what it wants."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tpsgd.engine.batches import Form, check, first_samples
from tpsgd.engine.learner import Engine, Learner
from tpsgd.engine.record import BlockInfo
from tpsgd.engine.schedules import sequential
from tpsgd.engine.settings import Schedule, Settings
from tpsgd.engine.trainer import BlockSettings
from tpsgd.errors import TpsgdError
from tpsgd.losses import Loss, bce, cross_entropy
from tpsgd.maths.random import Key
from tpsgd.nets.autograd import Autograd
from tpsgd.nets.blocks import Block, has_batch_norm, shapes
from tpsgd.nets.closed_form import ClosedForm
from tpsgd.nets.layers import layer_kind
from tpsgd.nets.padded import Padded
from tpsgd.nets.precision import in_format
from tpsgd.nets.recurrent import Recurrent
from tpsgd.nets.stacked import Stacked
from tpsgd.nets.unrolled import Unrolled
from tpsgd.objectives import IDLE, Objective, Site, move, output
from tpsgd.rules import Place, Rule, Signal
from tpsgd.solvers import SOLVERS

SLICE = 1 << 20  # bytes of a weight's gradient worth making apart
SLICES = 8  # at most, unless more are asked for
GPU_WINDOW = 16  # time steps taken together where launching a step takes longer than doing it


def rules_for(rule: Rule | Sequence[Rule], blocks: list[Block], schedule: Schedule) -> list[Rule]:
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


def make_learner(
    i: int,
    cuts: list[list[Block]],
    rule: Rule,
    loss: Loss,
    size: dict[Place, tuple[int, ...]],
    classes: int,
    settings: Settings,
    form: Form,
) -> Learner:
    """Block i of every restart, with its objective and gradients."""
    block, last = cuts[0][i], i == len(cuts[0]) - 1
    if block.recurrent:
        return _recurrent_learner(i, cuts, rule, loss, classes, settings, form)
    at, make = rule.at, rule.last if last else rule.objective
    if last and make is None:
        at = place_of(block, loss)
    frozen = not rule.head if last else rule.objective is None
    objective = output(loss) if last else IDLE

    def draw() -> Objective:
        if make is None:
            return objective
        maps = block.maps and len(size[at]) > 1
        keys = [Key(settings.seed + r, block.key) for r in range(len(cuts))]
        drawn = [
            make(
                Site(
                    size[at], classes, key, maps, loss, form.device, form.dtype,
                    redraw=settings.memory.redraw and len(cuts) == 1,
                )
            )
            for key in keys
        ]  # fmt: skip
        if len(cuts) > 1:
            return _stack_objectives(drawn)
        return _laid_out(drawn[0], form, len(size[at]) > 1)

    tensors = parameters(i, cuts)
    if len(cuts) > 1:
        engine: Engine = Stacked(ClosedForm(block, at, objective, in_place=False))
    else:
        ragged = form.ragged and any(b.recurrent for b in cuts[0][i:])
        kind = ClosedForm if block.closed_form(at) and not ragged else Autograd
        engine = kind(block, at, objective, precision=form.precision)
    widest = max(map(math.prod, size.values())) * form.numbers.itemsize
    return Learner(
        block,
        engine,
        draw,
        Signal.LABEL if last else rule.signal,
        tensors,
        several=loss is bce,
        stack=len(cuts) if len(cuts) > 1 else None,
        trains=bool(tensors) and not frozen,
        slices=_slices(block, math.prod(size[Place.BEFORE]), form, settings.memory.slices),
        widest=widest,
    )


def _laid_out(objective: Objective, form: Form, maps: bool) -> Objective:
    """An objective's tensors as batches are: in their layout, and codes of maps in their format."""
    if form.precision is not None and maps and not objective.learned:
        made = tuple(in_format(t, form.precision) for t in objective.tensors)
        objective = replace(objective, tensors=made)  # type: ignore[arg-type]
    return move(objective, _last) if form.channels_last else objective


def _last(t: Tensor) -> Tensor:
    """Feature maps with their channels last in memory."""
    return t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t


def _slices(block: Block, outputs: int, form: Form, wanted: int | None) -> int:
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


def _recurrent_learner(
    i: int,
    cuts: list[list[Block]],
    rule: Rule,
    loss: Loss,
    classes: int,
    settings: Settings,
    form: Form,
) -> Learner:
    """A recurrent block: an objective for each direction, drawn anew for each time step or once."""
    block, layer, make = cuts[0][i], cuts[0][i].layer, rule.objective
    assert isinstance(layer, Recurrent)
    if i == len(cuts[0]) - 1:
        raise TpsgdError(
            f"the model ends with {block}, which gives states, not classes: add a classifier, "
            "nn.Linear(units, classes) for example"
        )
    ways, stacked = range(len(layer.cells)), len(cuts) > 1

    def drawn(way: int, step: int) -> Objective:
        """The objective of one direction at one step (of every restart, stacked)."""
        assert make is not None
        number = -1 - i if way else i  # backward cells have keys of their own
        sites = [
            Site(
                (layer.hidden,), classes, Key(settings.seed + r, number, step), False, loss,
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
    engine = Unrolled(
        block,
        Place.BEFORE if rule.at is Place.BEFORE else Place.AFTER,
        (lambda way, step: drawn(way, step).tensors) if rule.per_step and make else None,
        settings.window or (GPU_WINDOW if on_gpu else 1),
        lazy=_pulled(cuts[0], i),
        keep_codes=on_gpu,
        stacked=stacked,
    )
    params = parameters(i, cuts)
    trains = bool(params) and make is not None
    return Learner(
        block, engine, draw, rule.signal, params, several=loss is bce,
        stack=len(cuts) if stacked else None, trains=trains,
    )  # fmt: skip


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


def unstack(cuts: list[list[Block]], learners: list[Learner]) -> None:
    """Write stacked parameters back into the restarts' models."""
    for i, learner in enumerate(learners):
        for r, cut in enumerate(cuts):
            for name, p in cut[i].named_parameters().items():
                p.data.copy_(learner.params[name][r])


def sizes_of(
    blocks: list[Block], x: Any, settings: Settings, form: Form
) -> list[dict[Place, tuple[int, ...]]]:
    """Output shapes of every block, which held-out data must have too."""
    check(x, form)
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
) -> Form:
    """How batches must look for these blocks."""
    modules = [m for block in blocks for top in block.modules for m in top.modules()]
    if settings.precision is not None:
        _check_precision(modules, dtype, settings.precision)
    return Form(
        device,
        dtype,
        settings.batch_size,
        tuple(settings.seed + r for r in range(restarts)),
        channels_last=Form.may_be_channels_last(modules),
        whole_numbers=any(isinstance(m, (nn.Embedding, nn.EmbeddingBag)) for m in modules),
        skip_single=has_batch_norm(modules),
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


def infos(
    learners: list[Learner], rules: list[Rule], courses: list[BlockSettings]
) -> list[BlockInfo]:
    made = []
    for learner, rule, course in zip(learners, rules, courses, strict=True):
        name = "head" if learner is learners[-1] else rule.name
        solved = "solved" if isinstance(course.optimizer, SOLVERS) else learner.engine.label
        how = solved if learner.trains else "frozen"
        made.append(
            BlockInfo(str(learner.block), name, count(learner.block.named_parameters()), how)
        )
    return made


def count(params: Mapping[str, Tensor]) -> int:
    return sum(p.numel() for p in params.values())
