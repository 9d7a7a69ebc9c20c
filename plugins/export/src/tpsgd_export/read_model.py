"""From a torch model and a rule to a `StepRecipe`; what cannot be exported is refused here."""

import warnings
from collections.abc import Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

from tpsgd import losses
from tpsgd.common.errors import TpsgdError, shortened
from tpsgd.common.names import safe
from tpsgd.common.numbers import is_whole
from tpsgd.engine.spec import rules_for
from tpsgd.losses import Loss, bce, cross_entropy, huber, l1, mse
from tpsgd.maths.pooling import cells
from tpsgd.maths.random import Key, streams
from tpsgd.nets.blocks import Block, hooked, shapes
from tpsgd.nets.cuts.balance import Blocks
from tpsgd.nets.cuts.sections import Section
from tpsgd.nets.cuts.split import LAYERS
from tpsgd.nets.diagonal import Diagonal, LossAt
from tpsgd.nets.layers import zero_padding
from tpsgd.nets.modes import modes_restored
from tpsgd.nets.padded import Padded
from tpsgd.nets.precision import without_autocast
from tpsgd.nets.recurrent import Recurrent
from tpsgd.objectives import Formula, Objective, Place, Signal, Site
from tpsgd.projections import Redrawn
from tpsgd.rules import Rule, frozen
from tpsgd_export.block_rows import (
    DROPOUT,
    INPUT,
    NORMS,
    POOLS,
    RESHAPING,
    LayerRow,
    cut,
    rows_of,
)
from tpsgd_export.kinds import check_kinds
from tpsgd_export.number_labels import are_numbers, standardised, target_scaling
from tpsgd_export.recipe import (
    BlockRecipe,
    CellLayer,
    Codes,
    Convolution,
    Dense,
    DiagonalLayer,
    Layer,
    LocalLoss,
    Pool,
    Shape,
    StepRecipe,
    refuse_joined,
)

LARGEST = 65_535  # label, or size of a feature map: uint16_t in the C
MOST_BLOCKS = 32  # a bit each of the mask of those that learn
OPTIMIZERS = ("sgd", "momentum", "adam")
RANGES = {"batch": (1, 1 << 15), "seed": (0, (1 << 63) - 1), "spare": (0, 1000)}
ACTIVATIONS: dict[type, str] = {
    type(None): "none", nn.ReLU: "relu", nn.LeakyReLU: "leaky_relu", nn.Tanh: "tanh",
    nn.Sigmoid: "sigmoid", nn.ReLU6: "relu6",
}  # fmt: skip
LOSSES = {mse: "mse", cross_entropy: "cross_entropy", bce: "bce"}
OF_NUMBERS = {mse: "mse", l1: "l1", huber: "huber"}
LINKS = {cross_entropy: (nn.Softmax, nn.LogSoftmax), bce: (nn.Sigmoid,)}  # that belong to a loss
HASHED = ("normal", "uniform", "binary", "per_filter")  # codes that need no table
PASS_NUMBERS = "pass samples= and labels=, real numbers"
BACKPROP = replace(frozen(), name="backprop")  # the control: blocks learn by the output's error


@without_autocast()
def read_model(
    model: nn.Module,
    rule: Rule | Sequence[Rule],
    shape: Sequence[int],
    *,
    batch: int = 1,
    optimizer: str = "sgd",
    loss: Loss | None = None,
    seed: int = 0,
    spare: int = 0,
    samples: Any = None,
    labels: Any = None,
    blocks: Blocks | str | None = LAYERS,
) -> StepRecipe:
    """The training step of a model in plain numbers.

    Args:
        model: as for `tpsgd.fit`.
        rule: a rule, or one for each block.
        shape: of one sample; sequences are (steps, inputs), and any number of steps will do.
        batch: samples of a step.
        optimizer: sgd, momentum or adam.
        loss: of the last block, if not the rule's own.
        seed: of the class codes.
        spare: classes that may come later.
        samples: inputs that calibrated readouts measure; without them, the first batch does it,
            or the first sequence, which a recurrent net then reads twice.
        labels: of the samples, if they are real numbers: the net learns these, standardised.
        blocks: which layers learn together, as for `tpsgd.split`.
    """
    shape = check_shape(shape)
    _check_settings(optimizer, batch=batch, seed=seed, spare=spare)
    check_kinds(model)
    parts, loss = cut(model, blocks, shape), losses.resolve(loss)
    _check_model(model, parts, shape)
    of_numbers = are_numbers(labels, loss)
    with modes_restored(*(m for block in parts for m in block.modules)):
        sizes = shapes(parts, torch.zeros(2, *shape, dtype=torch.float32))
        rules = rules_for(rule, parts, None)
        loss = loss or (mse if of_numbers else rules[-1].loss)
        classes = _outputs(parts[-1], sizes[-1][Place.END], spare, loss, of_numbers)
        names = {id(p): name for name, p in model.named_parameters()}
        net = _NetReader(len(parts), classes, spare, seed, loss, names, of_numbers)
        inputs = [shape, *(size[Place.END] for size in sizes[:-1])]
        records = [net.block(*each) for each in zip(parts, rules, inputs, sizes, strict=True)]
        if not any(block.learns for block in records):
            raise TpsgdError(f"{rules[0].name} trains nothing: there is no step to export")
        link = "" if parts[-1].activation is None else type(parts[-1].activation).__name__
        recipe = StepRecipe(
            tuple(records), safe(rules[0].name),
            (shape[1:] or (1,)) if parts[0].recurrent else shape, classes, spare, batch,
            optimizer, (LOSSES | OF_NUMBERS)[loss], seed, link,
            counts=() if blocks == LAYERS else tuple(len(block.layers) for block in parts),
        )  # fmt: skip
        _check_recurrent(recipe, of_numbers)
        if samples is not None:
            samples = as_samples(samples, shape, recipe.recurrent)
        if of_numbers:
            recipe = _of_numbers(recipe, parts, samples, labels)
        return recipe if samples is None else calibrated(recipe, parts, samples)


def _of_numbers(
    recipe: StepRecipe, blocks: list[Block], samples: Tensor | None, labels: Any
) -> StepRecipe:
    """The recipe of a net that learns numbers, with a last layer that gives them standardised."""
    *hidden, last = recipe.blocks
    scaling = target_scaling(labels, samples, last, recipe.classes)
    assert samples is not None
    parameters = standardised(dict(last.parameters), blocks, samples, labels, scaling)
    last = replace(last, parameters=parameters)
    return replace(recipe, blocks=(*hidden, last), targets=scaling)


def as_samples(samples: Any, shape: Shape, recurrent: bool = False) -> Tensor:
    """Inputs that readouts measure, as a tensor; sequences may have any number of steps."""
    if isinstance(samples, Padded):
        raise TpsgdError("samples of different lengths calibrate no readout: leave samples= out")
    try:
        x = torch.as_tensor(samples).detach().cpu().float()
    except (TypeError, ValueError, RuntimeError):
        raise TpsgdError("samples must be inputs in a tensor or array, without labels") from None
    first = 2 if recurrent else 1
    fits = x.dim() == len(shape) + 1 and tuple(x.shape[first:]) == shape[first - 1 :]
    if not fits or not x.numel():
        size = tuple(x.shape)
        raise TpsgdError(f"samples must be one or more inputs of shape {shape}, got shape {size}")
    if not x.isfinite().all():
        raise TpsgdError("samples have numbers that are not finite: leave those out")
    return x


def calibrated(recipe: StepRecipe, blocks: list[Block], samples: Tensor) -> StepRecipe:
    """The recipe with the gains of its readouts as these samples give them."""
    records, y = [], samples.float()
    with torch.no_grad():
        for block, record in zip(blocks, recipe.blocks, strict=True):
            x, outputs = y, block.outputs(y)
            local, y = record.local, outputs[Place.END]
            if local is not None and local.target:
                features = _over_time(block, x) if record.recurrent else outputs[Place.AFTER]
                if local.grid:
                    features = cells(features, local.grid[-(features.dim() - 2) :])
                rms = float(features.square().mean().sqrt()) or 1.0
                local = replace(local, gain=local.target / rms)
            records.append(replace(record, local=local))
    return replace(recipe, blocks=tuple(records))


def _over_time(block: Block, x: Tensor) -> Tensor:
    """What the loss of a recurrent block looks at: outputs of all time steps, or of the last."""
    layer: Any = copy(block.layer)
    layer.sequence = not (isinstance(layer, Diagonal) and layer.loss_at is not LossAt.EVERY)
    return layer(x)


def check_shape(shape: Any) -> Shape:
    """The shape of one sample."""
    sizes = tuple(shape) if isinstance(shape, Sequence) else ()
    if not sizes or not all(is_whole(n, 1) for n in sizes) or prod(sizes) >= 1 << 31:
        got = shortened(shape)
        raise TpsgdError(f"shape must be a sample's, such as (64,) or (1, 28, 28), got {got}")
    return sizes


def _check_settings(optimizer: str, **numbers: int) -> None:
    if optimizer not in OPTIMIZERS:
        raise TpsgdError(f"optimizer must be one of {', '.join(OPTIMIZERS)}, got {optimizer!r}")
    for name, value in numbers.items():
        low, high = RANGES[name]
        if not isinstance(value, int) or not low <= value <= high:
            raise TpsgdError(f"{name} must be a whole number from {low} to {high:,}, got {value}")


def _check_model(model: nn.Module, blocks: list[Block], shape: Shape) -> None:
    for dtype in {p.dtype for p in model.parameters() if p.is_floating_point()} - {torch.float32}:
        word = str(dtype).removeprefix("torch.")
        raise TpsgdError(f"the model is in {word}: convert it with model.float()")
    if names := [name or type(m).__name__ for name, m in model.named_modules() if hooked(m)]:
        raise TpsgdError(
            f"hooks, such as those of weight_norm and pruning, are not exported: remove those of "
            f"{', '.join(names)}"
        )
    for block in reversed(blocks):
        if any(getattr(m, "reads_inputs", False) for m in block.modules):
            raise TpsgdError(
                f"block {block.index + 1} ({block}) reads more than the activation of the block "
                "before it, such as an input of the model, and is not exported"
            )
    words = getattr(blocks[0].layer, "inputs", 1) if blocks[0].recurrent else 1
    if len(shape) == 1 and words > 1 and not blocks[0].prologue:
        raise TpsgdError(
            f"block 1 ({blocks[0]}) reads tokens, the numbers of words, which is not exported; "
            f"sequences of shape (steps, {words}) are, such as rows with a 1 at the word's number"
        )
    if len(blocks) > MOST_BLOCKS:
        raise TpsgdError(
            f"{len(blocks)} blocks are not exported; up to {MOST_BLOCKS} are: join some with "
            "blocks=, the numbers of layers in each"
        )


def _outputs(block: Block, shape: Shape, spare: int, loss: Loss, of_numbers: bool) -> int:
    """The outputs of the last block; those and a loss that cannot be exported are refused."""
    if loss in OF_NUMBERS and loss not in LOSSES and not of_numbers:
        raise TpsgdError(f"loss {loss.name} is for labels that are numbers: {PASS_NUMBERS}")
    if loss not in (OF_NUMBERS if of_numbers else LOSSES):
        names = ", ".join((OF_NUMBERS if of_numbers else LOSSES).values())
        raise TpsgdError(f"loss {loss.name} is not exported; {names} are")
    if not isinstance(block.layer, nn.Linear) or len(shape) != 1 or block.pools:
        raise TpsgdError(
            f"the last block ({block}) must be an nn.Linear with an output per class, or number, "
            f"but gives shape {shape}: labels of steps or pixels are not exported"
        )
    (classes,) = shape
    if classes + spare > LARGEST:
        raise TpsgdError(f"{classes + spare:,} classes are not exported; up to {LARGEST:,} are")
    if of_numbers and spare:
        raise TpsgdError("a net that learns numbers has no spare classes: leave spare out")
    if not of_numbers and classes == 1 and (spare or loss is cross_entropy):
        raise TpsgdError(
            "a net with one output is exported with loss=tpsgd.bce and spare=0; if it learns a "
            f"number, {PASS_NUMBERS}"
        )
    return classes


def _check_recurrent(recipe: StepRecipe, of_numbers: bool) -> None:
    """Recurrent layers come first, and read one sequence at a time."""
    if recipe.recurrent and of_numbers:
        raise TpsgdError("a recurrent net is exported for classes, not for labels that are numbers")
    if recipe.recurrent:
        refuse_joined(recipe, "a net that reads sequences")
    kinds = [block.recurrent for block in recipe.blocks]
    if any(later and not earlier for earlier, later in pairwise(kinds)):
        raise TpsgdError("a recurrent layer after another kind of layer is not exported")
    if recipe.recurrent and recipe.backprop:
        raise TpsgdError("backprop through time is not exported: it stores every time step")
    if recipe.recurrent and recipe.batch > 1:
        raise TpsgdError("a recurrent net is exported for one sequence at a time: batch=1")


@dataclass(frozen=True)
class _NetReader:
    """What all blocks of a net have in common."""

    blocks: int
    classes: int
    spare: int
    seed: int
    loss: Loss
    names: Mapping[int, str]  # of the model's parameters, by their identity
    of_numbers: bool = False

    def block(
        self, block: Block, rule: Rule, shape: Shape, size: Mapping[Place, Shape]
    ) -> BlockRecipe:
        """A block's record; `shape` is of one sample of its input."""
        try:
            return self._block(block, rule, shape, size)
        except TpsgdError as error:
            raise TpsgdError(f"block {block.index + 1} ({block}): {error}") from None

    def _block(
        self, block: Block, rule: Rule, shape: Shape, size: Mapping[Place, Shape]
    ) -> BlockRecipe:
        last = block.index == self.blocks - 1
        learns = rule.head if last else rule.objective is not None or rule is BACKPROP
        learns = learns and bool(block.named_parameters())
        rows = rows_of(block)
        if len(rows) > 1:
            _check_rows(rows, learns)
        sizes = [size] if rows[0].block is block else _sizes(rows, shape)
        inputs = {INPUT: shape} | {i: each[Place.END] for i, each in enumerate(sizes)}
        records = [
            self._row(row, learns, inputs[row.source], each, last and row is rows[-1])
            for row, each in zip(rows, sizes, strict=True)
        ]
        own = replace(records[-1], inner=tuple(records[:-1]), name=str(block))
        _check_rule(block, rule, own, own.shape if last else size[Place.AFTER])
        if last or not learns or rule is BACKPROP:
            return own
        local = self._local(block, rule, own.shape)
        if local.name == "inner" and own.activation not in ("tanh", "sigmoid"):
            warnings.warn(
                f"block {block.index + 1} ({block}): {rule.name} has no minimum, and without Tanh "
                "or Sigmoid the outputs grow without bound; take readout, tpsgd_l2, or a bounded "
                "activation",
                stacklevel=5,
            )
        return replace(own, local=local)

    def _row(
        self, row: LayerRow, learns: bool, shape: Shape, size: Mapping[Place, Shape], head: bool
    ) -> BlockRecipe:
        """A layer's record, without a local loss; `head`: it is the last one of the net."""
        block, activation, slope = row.block, "none", 0.0
        _check_block(block, learns)
        after = size[Place.BEFORE if head else Place.AFTER]
        parameters, pools = _parameters(block), ()
        layer = _layer(block, _reshaped(block, shape), after)
        if head:
            _check_head(block, self.loss)
            outputs = self.classes + self.spare
            layer, after = replace(layer, outputs=outputs), (outputs,)
            parameters = {  # with rows of zeros for classes that may come
                name: nn.functional.pad(p, (0, 0) * (p.dim() - 1) + (0, self.spare))
                for name, p in parameters.items()
            }
        else:
            activation, slope = _activation(block)
            pools = _pools(block, after)
        return BlockRecipe(
            block.index, str(block), layer, activation, slope, after, pools, None, learns,
            parameters, self._names(block, parameters), source=row.source, added=row.added,
        )  # fmt: skip

    def _names(self, block: Block, parameters: Mapping[str, Tensor]) -> dict[str, str]:
        """The names of a layer's parameters in the model; a layer of `nn.RNN` shares the RNN's."""
        in_model = {name: self.names.get(id(p)) for name, p in block.layer.named_parameters()}
        return {name: in_model.get(name) or f"{block.name}.{name}" for name in parameters}

    def _local(self, block: Block, rule: Rule, shape: Shape) -> LocalLoss:
        """The local loss of a hidden block's output."""
        layer: Any = block.layer
        recurrent, outputs = block.recurrent, self.classes + self.spare
        site = Site(
            (layer.hidden,) if recurrent else shape,
            outputs,
            Key(self.seed, block.index if recurrent else block.key),
            maps=block.maps and len(shape) > 1,
            loss=self.loss,
            numbers=self.of_numbers,
            recurrent=recurrent,
            redraw=True,
        )
        assert rule.objective is not None
        objective = rule.objective(site)
        formula = _formula(block, rule, objective, outputs if not self.of_numbers else 0)
        per_step = recurrent and rule.per_step and not isinstance(layer, Diagonal)
        codes = _codes(formula.codes or objective.tensors[0], site, per_step)
        local = LocalLoss(formula.name, codes, site.shape)
        if formula.name != "readout":
            return local
        target = formula.gain if objective.calibration else 0.0
        grid = (1, *formula.grid)[-2:] if formula.grid else None
        return replace(
            local, grid=grid, gain=0.0 if target else formula.gain, target=target,
            loss=(LOSSES | OF_NUMBERS)[formula.loss or cross_entropy], learned=formula.learned,
        )  # fmt: skip


def _sizes(rows: list[LayerRow], shape: Shape) -> list[dict[Place, Shape]]:
    """The shapes of one sample's output of every row at every place."""
    sizes: list[dict[Place, Shape]] = []
    for row in rows:
        reads, adds = (
            shape if i in (INPUT, None) else sizes[i][Place.END] for i in (row.source, row.added)
        )
        sizes += shapes([row.block], torch.zeros(2, *reads, dtype=torch.float32))
        if row.added is not None and adds != sizes[-1][Place.AFTER]:
            raise TpsgdError(
                f"a sum of shapes {adds} and {sizes[-1][Place.AFTER]} is not exported; of equal "
                "shapes it is"
            )
    return sizes


def _check_rows(rows: list[LayerRow], learns: bool) -> None:
    """All layers of a block learn together, or none of them; none reads time steps."""
    parameters = [id(p) for row in rows for p in row.block.layer.parameters()]
    if len(set(parameters)) < len(parameters):
        raise TpsgdError("two of its layers share a parameter, which is not exported")
    for row in rows:
        if learns and not any(p.requires_grad for p in row.block.layer.parameters()):
            raise TpsgdError(f"{row.block.name} is frozen: freeze all of the block, or none")
        if row.block.recurrent:
            raise TpsgdError("a recurrent layer that learns together with others is not exported")


def _check_rule(block: Block, rule: Rule, record: BlockRecipe, shape: Shape) -> None:
    """Refuse a rule that a block of these rows cannot learn by; its loss sees this shape."""
    if rule is BACKPROP and record.joined:
        raise TpsgdError(
            "backprop is exported for blocks of a layer each, without skip connections; take "
            "blocks=1 and rule='readout': the net is then one block, which is backprop"
        )
    if rule is BACKPROP and (block.pools or record.pools):
        raise TpsgdError("backprop is exported without pools")
    if not record.learns or not record.joined:
        return
    if record.shape != shape:
        raise TpsgdError(
            "it learns from its output after a pool or a reshaping, which is not exported: put "
            "that behind the block"
        )
    if any(len(row.pools) > 1 for row in record.inner):
        raise TpsgdError("two pools after a layer inside a block that learns are not exported")


def _formula(block: Block, rule: Rule, objective: Objective, outputs: int) -> Formula:
    """What is exported of a rule's objective; rules without it are refused."""
    formula = objective.formula
    at_end = rule.at is Place.END and block.only_reshapes
    if not (at_end or rule.at is Place.AFTER or block.activation is None):
        raise TpsgdError(f"a loss {rule.at.value} is not exported; at=Place.AFTER is")
    if formula is None:
        raise TpsgdError(
            f"{rule.name} ({rule.options or rule.about}) is not exported; readout, tpsgd_l2, "
            "tpsgd_l1 and drtp without features= and standardise=, and frozen are"
        )
    if outputs == 1 and formula.name != "readout":
        raise TpsgdError(f"{rule.name} is not exported for a single output; readout is")
    if rule.signal is not Signal.LABEL:
        raise TpsgdError(f"{rule.name} needs the error of the output, and no exported step does")
    return formula


def _codes(drawn: Tensor | Redrawn, site: Site, per_step: bool) -> Codes:
    """The class codes of a block."""
    if isinstance(drawn, Redrawn) and (name := drawn.projection.name) in HASHED:
        starts = streams(site.key, list(range(site.classes)))
        per_filter = name == "per_filter"
        return Codes(
            prod(drawn.shape), "normal" if per_filter else name,
            () if per_step else tuple(int(s) % 2**64 for s in starts.flatten()),
            drawn.projection.std, drawn.shape[0] if per_filter else 0, None, per_step,
            site.key.seed, site.key.block,
        )  # fmt: skip
    if per_step:
        raise TpsgdError("orthogonal codes for every time step would be a table without end")
    table = (drawn.whole() if isinstance(drawn, Redrawn) else drawn).flatten(1).float().cpu()
    return Codes(table.shape[1], "table", table=table)


def _reshaped(block: Block, shape: Shape) -> Shape:
    """The shape in which a block's layer reads a sample, after the modules that reshape it."""
    for module in block.prologue:
        if not _only_reshapes(module, shape):
            raise TpsgdError(f"{_title(module)} before a layer is not exported; leave it out")
        if block.recurrent:
            raise TpsgdError(
                f"{_title(module)} before a recurrent layer is not exported; leave it out and give "
                "the shape (steps, features)"
            )
        shape = tuple(module(torch.empty(1, *shape, device="meta")).shape[1:])
    return shape


def _only_reshapes(module: nn.Module, shape: Shape) -> bool:
    """Whether a module leaves a sample's numbers as they are; a `view` in a `forward` does, too."""
    if not isinstance(module, Section) or any(True for _ in module.parameters()):
        return isinstance(module, RESHAPING)
    x = torch.randn(2, *shape, dtype=torch.float32)
    return torch.equal(module(x).flatten(), x.flatten())


def _title(module: nn.Module) -> str:
    return module.block_title if isinstance(module, Section) else type(module).__name__


def _layer(block: Block, shape: Shape, after: Shape) -> Layer:
    """A layer's numbers."""
    layer: Any = block.layer
    kind, cause = type(layer), f"because it is a {type(layer).__name__}"
    if kind is nn.Linear:
        if len(after) != 1:
            raise TpsgdError(f"only one vector per sample is exported, not {after}")
        return Dense(layer.in_features, layer.out_features)
    if kind in (nn.Conv1d, nn.Conv2d):
        if (pads := zero_padding(layer)) is not None:
            settings = layer.kernel_size, layer.stride, pads, layer.dilation
            _check_sizes(layer.out_channels, *shape, *after, *sum(map(tuple, settings), ()))
            kernel, stride, _, dilation = map(_pair, settings)
            return Convolution(
                shape[0], _pair(shape[1:]), layer.out_channels, kernel, _pair(after[1:]), stride,
                _pair(pads, 0), dilation, layer.groups,
            )  # fmt: skip
        cause = "because padding='same' adds more zeros on one side of an even kernel"
        if layer.padding_mode != "zeros":
            cause = f"because of its padding_mode={layer.padding_mode!r}"
    elif getattr(layer, "bidirectional", False):
        cause = "because it reads in two directions"
    elif isinstance(layer, Recurrent):
        return CellLayer(layer.inputs, layer.hidden, float(layer.leak))
    elif isinstance(layer, Diagonal):
        return DiagonalLayer(layer.inputs, layer.states, layer.hidden, layer.loss_at.value)
    raise TpsgdError(
        f"not exported, {cause}: nn.Linear, nn.Conv1d and nn.Conv2d with zero padding, "
        "tpsgd.Recurrent and nn.RNN that read in one direction are"
    )


def _check_sizes(*sizes: int) -> None:
    if max(sizes) > LARGEST:
        raise TpsgdError(f"a size of {max(sizes):,} is not exported; up to {LARGEST:,} is")


def _pair(values: Sequence[int], first: int = 1) -> tuple[int, int]:
    """Rows and columns; one dimension is columns."""
    rows, columns = (first, *values)[-2:]
    return int(rows), int(columns)


def _activation(block: Block) -> tuple[str, float]:
    """The activation's name and its slope below 0."""
    module: Any = block.layer.activation if isinstance(block.layer, Recurrent) else block.activation
    kind, slope = type(module), float(getattr(module, "negative_slope", 0.0))
    if kind not in ACTIVATIONS:
        names = ", ".join(each.__name__ for each in ACTIVATIONS if each is not type(None))
        raise TpsgdError(f"{kind.__name__} is not exported; of activations, {names} are")
    if kind is nn.LeakyReLU and slope <= 0:
        raise TpsgdError(f"LeakyReLU with slope {slope:g} is not exported; above 0 it is")
    return ACTIVATIONS[kind], slope


def _pools(block: Block, shape: Shape) -> tuple[Pool, ...]:
    """What shrinks the feature maps after the activation."""
    pools: list[Pool] = []
    for module in block.tail:
        if _only_reshapes(module, shape):
            continue
        if block.recurrent or len(shape) < 2:
            raise TpsgdError(f"{_title(module)} is not exported there")
        pools.append(_pool(module, shape))
        _check_sizes(*shape, *pools[-1].kernel, *pools[-1].stride)
        shape = (shape[0], *pools[-1].out[-(len(shape) - 1) :])
    return tuple(pools)


def _pool(module: Any, shape: Shape) -> Pool:
    kind, size = POOLS.get(type(module)), _pair(shape[1:])
    unusual = getattr(module, "ceil_mode", False) or getattr(module, "divisor_override", None)
    unusual = unusual or any(_numbers(getattr(module, "padding", 0)))
    if kind is None or unusual or max(_numbers(getattr(module, "dilation", 1))) > 1:
        raise TpsgdError(
            f"{_title(module) if kind is None else module} is not exported; nn.MaxPool and "
            "nn.AvgPool without padding, dilation and ceil_mode, and nn.AdaptiveAvgPool are"
        )
    out = _pair(module(torch.empty(1, *shape, device="meta")).shape[2:])
    if kind != "cells":
        count = len(shape) - 1
        kernel, stride = (_pair(_numbers(n, count)) for n in (module.kernel_size, module.stride))
        return Pool(kind, shape[0], size, kernel, stride, out)
    if out[0] > size[0] or out[1] > size[1]:
        raise TpsgdError(f"{module} is not exported: it would make {size} larger")
    return Pool(kind, shape[0], size, (0, 0), (0, 0), out)


def _numbers(value: Any, count: int = 2) -> tuple[int, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (int(value),) * count


def _parameters(block: Block) -> dict[str, Tensor]:
    """A layer's parameters; a batch norm is folded into them, with its running statistics."""
    layer: Any = block.layer
    values = {name: p.detach().float().cpu().clone() for name, p in layer.named_parameters()}
    for norm in norms_of(block):
        if type(norm) not in NORMS or norm.running_var is None:
            raise TpsgdError(
                f"{_title(norm)} is not exported; nn.BatchNorm with running statistics, directly "
                "after a layer, is folded into it"
            )
        values = _folded(values, norm)
    if bad := [name for name, p in values.items() if not p.isfinite().all()]:
        raise TpsgdError(f"{', '.join(bad)} has numbers that are not finite")
    return values


def norms_of(block: Block) -> list[nn.Module]:
    """What lies between a layer and its activation, and is no dropout."""
    return [m for m in block.between if not isinstance(m, (nn.Identity, DROPOUT))]


def _folded(values: dict[str, Tensor], norm: Any) -> dict[str, Tensor]:
    """Weights and bias of a layer with the batch norm after it, as in evaluation mode."""
    norm, bias = deepcopy(norm).cpu().double(), values.get("bias")
    moments = norm.running_mean, norm.running_var, norm.eps
    fused = fuse_conv_bn_weights(values["weight"].double(), bias, *moments, norm.weight, norm.bias)
    return {name: p.detach().float() for name, p in zip(("weight", "bias"), fused, strict=True)}


def _check_block(block: Block, learns: bool) -> None:
    """All of a layer learns, or none of it."""
    frozen = [name for name, p in block.layer.named_parameters() if not p.requires_grad]
    if learns and frozen:
        raise TpsgdError(f"{', '.join(frozen)} is frozen: freeze all of the layer, or none")


def _check_head(block: Block, loss: Loss) -> None:
    """The last block gives logits; a softmax or sigmoid that belongs to the loss may follow."""
    rest = [m for m in block.tail if not isinstance(m, RESHAPING)]
    fits = block.activation is None or isinstance(block.activation, LINKS.get(loss, ()))
    if rest or block.between or not fits:
        raise TpsgdError("nothing may follow the last nn.Linear of an exported net")
