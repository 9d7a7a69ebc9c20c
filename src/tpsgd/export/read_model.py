"""From a torch model and a rule to a `Recipe`; what cannot be exported is refused here."""

import warnings
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from tpsgd.engine.anatomy import rules_for
from tpsgd.errors import TpsgdError
from tpsgd.export.recipe import (
    BlockRecipe,
    Cell,
    Codes,
    Convolution,
    Dense,
    Diagonal,
    Layer,
    LocalLoss,
    Pool,
    Recipe,
    Shape,
)
from tpsgd.losses import Loss, bce, cross_entropy, mse
from tpsgd.maths.pooling import cells
from tpsgd.maths.random import Key, streams
from tpsgd.names import safe
from tpsgd.nets import diagonal
from tpsgd.nets.blocks import Block, hooked, shapes, split
from tpsgd.nets.layers import zero_padding
from tpsgd.nets.modes import modes_restored
from tpsgd.nets.padded import Padded
from tpsgd.nets.precision import without_autocast
from tpsgd.nets.recurrent import Recurrent
from tpsgd.objectives import Site
from tpsgd.projections import Redrawn
from tpsgd.rules import Place, Rule, Signal

LARGEST = 65_535  # label, or size of a feature map: uint16_t in the C
MOST_BLOCKS = 32  # a bit each of the mask of those that learn
OPTIMIZERS = ("sgd", "momentum", "adam")
ACTIVATIONS: dict[type, str] = {
    nn.ReLU: "relu",
    nn.LeakyReLU: "leaky_relu",
    nn.Tanh: "tanh",
    nn.Sigmoid: "sigmoid",
}
LOSSES = {mse: "mse", cross_entropy: "cross_entropy", bce: "bce"}
BOUNDED = ("tanh", "sigmoid")
RESHAPING = (nn.Flatten, nn.Identity, nn.Unflatten)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d)


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
) -> Recipe:
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
    """
    shape = check_shape(shape)
    _check(batch, optimizer, seed, spare)
    blocks = split(model)
    _check_model(model, blocks)
    with modes_restored(*(m for block in blocks for m in block.modules)):
        sizes = shapes(blocks, torch.zeros(2, *shape, dtype=torch.float32))
        rules = rules_for(rule, blocks, None)
        loss = loss or rules[-1].loss
        if loss not in LOSSES:
            raise TpsgdError(f"loss {loss.name} is not exported; mse, cross_entropy and bce are")
        classes = _classes(blocks[-1], sizes[-1][Place.END])
        if classes + spare > LARGEST:
            raise TpsgdError(f"{classes + spare:,} classes are not exported; up to {LARGEST:,} are")
        if classes == 1 and (spare or loss is cross_entropy):
            raise TpsgdError(
                "a net with one output answers yes or no: export it with loss=tpsgd.bce, and "
                "without spare classes"
            )
        names = {id(p): name for name, p in model.named_parameters()}
        reader = _Reader(len(blocks), classes, spare, seed, loss, names)
        inputs = [tuple(shape), *(size[Place.END] for size in sizes[:-1])]
        records = [reader.block(*each) for each in zip(blocks, rules, inputs, sizes, strict=True)]
        recipe = Recipe(
            tuple(records), safe(rules[0].name), _one_step(blocks, tuple(shape)), classes, spare,
            batch, optimizer, LOSSES[loss], seed, _link(blocks[-1]),
        )  # fmt: skip
        if not any(block.learns for block in records):
            raise TpsgdError(f"{rules[0].name} trains nothing: there is no step to export")
        _check_recurrent(recipe)
        if samples is None:
            return recipe
        return calibrated(recipe, blocks, as_samples(samples, shape, recipe.recurrent))


def as_samples(samples: Any, shape: Shape, recurrent: bool = False) -> Tensor:
    """Inputs that readouts measure, as a tensor; sequences may have any number of steps."""
    if isinstance(samples, Padded):
        raise TpsgdError("samples of different lengths calibrate no readout: leave samples= out")
    try:
        x = torch.as_tensor(samples).detach().cpu().float()
    except (TypeError, ValueError, RuntimeError):
        raise TpsgdError(
            "samples must be inputs alone, a tensor or an array of numbers, without labels"
        ) from None
    first = 2 if recurrent else 1
    fits = x.dim() == len(shape) + 1 and tuple(x.shape[first:]) == shape[first - 1 :]
    if not fits or not x.numel():
        raise TpsgdError(
            f"samples must be one or more inputs of shape {shape}, got shape {tuple(x.shape)}"
        )
    if not x.isfinite().all():
        raise TpsgdError("samples have numbers that are not finite: leave those samples out")
    return x


def calibrated(recipe: Recipe, blocks: list[Block], samples: Tensor) -> Recipe:
    """The recipe with the gains of its readouts as these samples give them."""
    records, y = [], samples.float()
    with torch.no_grad():
        for block, record in zip(blocks, recipe.blocks, strict=True):
            x, outputs = y, block.outputs(y)
            local, y = record.local, outputs[Place.END]
            if local is not None and local.target:
                after = _over_time(block, x) if record.recurrent else outputs[Place.AFTER]
                features = cells(after, _grid(local, after)) if local.grid else after
                rms = float(features.square().mean().sqrt()) or 1.0
                local = replace(local, gain=local.target / rms)
            records.append(replace(record, local=local))
    return replace(recipe, blocks=tuple(records))


def _over_time(block: Block, x: Tensor) -> Tensor:
    """What the loss of a recurrent block looks at: outputs of all time steps, or of the last."""
    layer: Any = copy(block.layer)
    at_end = isinstance(layer, diagonal.Diagonal) and layer.loss_at is not diagonal.LossAt.EVERY
    layer.sequence = not at_end
    for module in block.prologue:
        x = module(x)
    return layer(x)


def _grid(local: LocalLoss, y: Tensor) -> tuple[int, ...]:
    assert local.grid is not None
    return local.grid[-(y.dim() - 2) :]


def check_shape(shape: Any) -> Shape:
    """The shape of one sample."""
    sizes = tuple(shape) if isinstance(shape, Sequence) else ()
    if not sizes or any(not isinstance(n, int) or n < 1 for n in sizes):
        raise TpsgdError(
            f"shape must be that of one sample, such as (64,) or (1, 28, 28), got {shape}"
        )
    return sizes


def _check_model(model: nn.Module, blocks: list[Block]) -> None:
    others = {p.dtype for p in model.parameters() if p.is_floating_point()} - {torch.float32}
    if others:
        word = str(others.pop()).removeprefix("torch.")
        raise TpsgdError(f"the model is in {word}: convert it with model.float()")
    if any(map(hooked, model.modules())):
        raise TpsgdError(
            "the model has hooks, as weight_norm and pruning set them, which an export would leave "
            "out: remove them"
        )
    if len(blocks) > MOST_BLOCKS:
        raise TpsgdError(f"{len(blocks)} blocks are not exported; up to {MOST_BLOCKS} are")


def _link(block: Block) -> str:
    """What follows the logits in the model, and is left out of the export."""
    return "" if block.activation is None else type(block.activation).__name__


def _check(batch: int, optimizer: str, seed: int, spare: int) -> None:
    if not isinstance(batch, int) or not 1 <= batch <= 1 << 15:
        raise TpsgdError(f"batch must be a whole number from 1 to 32,768, got {batch}")
    if optimizer not in OPTIMIZERS:
        raise TpsgdError(f"optimizer must be one of {', '.join(OPTIMIZERS)}, got {optimizer!r}")
    if not isinstance(seed, int) or not 0 <= seed < 1 << 63:
        raise TpsgdError(f"seed must be a whole number of at most 63 bits, got {seed}")
    if not isinstance(spare, int) or not 0 <= spare <= 1000:
        raise TpsgdError(f"spare must be a number of classes up to 1,000, got {spare}")


def _classes(block: Block, shape: Shape) -> int:
    if not isinstance(block.layer, nn.Linear) or len(shape) != 1 or block.pools:
        raise TpsgdError(
            f"the last block ({block}) must be an nn.Linear with one output per class to be "
            "exported"
        )
    return shape[0]


def _one_step(blocks: list[Block], shape: Shape) -> Shape:
    """The shape of what the program reads at once."""
    if not blocks[0].recurrent:
        return shape
    return shape[1:] or (1,)


def _check_recurrent(recipe: Recipe) -> None:
    """Recurrent layers come first, and all but the last of them give sequences."""
    kinds = [block.recurrent for block in recipe.blocks]
    if any(later and not earlier for earlier, later in pairwise(kinds)):
        raise TpsgdError("a recurrent layer after another kind of layer is not exported")
    if recipe.recurrent and recipe.batch > 1:
        raise TpsgdError(
            "a recurrent net is exported for one sequence at a time, read step by step: batch=1"
        )


class _Reader:
    """Reads the blocks of a model one by one."""

    def __init__(
        self, blocks: int, classes: int, spare: int, seed: int, loss: Loss, names: Mapping[int, str]
    ) -> None:
        self.blocks, self.classes, self.seed, self.loss = blocks, classes, seed, loss
        self.spare, self.names = spare, names  # of the model's parameters, by their identity

    def block(
        self, block: Block, rule: Rule, shape: Shape, size: Mapping[Place, Shape]
    ) -> BlockRecipe:
        """A block's record; `shape` is of one sample of its input."""
        who = f"block {block.index + 1} ({block})"
        last = block.index == self.blocks - 1
        learns = rule.head if last else rule.objective is not None
        learns = learns and bool(block.named_parameters())
        _refuse_partly_frozen(who, block, learns)
        _refuse_prologue(who, block)
        after = size[Place.BEFORE if last else Place.AFTER]
        activation, slope = ("none", 0.0) if last else _activation(who, block)
        local = self._local(who, block, rule, after) if learns and not last else None
        if local is not None and local.name == "inner" and activation not in BOUNDED:
            warnings.warn(
                f"{who}: {rule.name} has no minimum, and without Tanh or Sigmoid the outputs grow "
                "without bound; take readout, tpsgd_l2, or a bounded activation",
                stacklevel=4,
            )
        parameters = _parameters(who, block, learns)
        if last and self.spare:
            parameters = {name: _with_rows(p, self.spare) for name, p in parameters.items()}
        layer = _layer(who, block, _reshaped(block, shape), after)
        if last:
            layer = replace(layer, outputs=self.classes + self.spare)
            after = (self.classes + self.spare,)
            _refuse_link(who, block, self.loss)
        return BlockRecipe(
            block.index, str(block), layer, activation, slope, after,
            () if last else _pools(who, block, after), local, learns, parameters, block.name,
            self._names(block, parameters),
        )  # fmt: skip

    def _names(self, block: Block, parameters: Mapping[str, Tensor]) -> dict[str, str]:
        """The names of a layer's parameters in the model; a layer of `nn.RNN` shares the RNN's."""
        in_model = {name: self.names.get(id(p)) for name, p in block.layer.named_parameters()}
        return {name: in_model.get(name) or f"{block.name}.{name}" for name in parameters}

    def _local(self, who: str, block: Block, rule: Rule, shape: Shape) -> LocalLoss:
        """The local loss of a hidden block's output."""
        _refuse_place(who, block, rule)
        assert rule.objective is not None
        recurrent, outputs = block.recurrent, self.classes + self.spare
        site = Site(
            (block.layer.hidden,) if recurrent else shape,  # type: ignore[arg-type]
            outputs,
            Key(self.seed, block.index if recurrent else block.key),
            maps=block.maps and len(shape) > 1,
            loss=self.loss,
            recurrent=recurrent,
            redraw=True,
        )
        objective = rule.objective(site)
        formula = objective.formula
        if formula is None:
            raise TpsgdError(
                f"{who}: {rule.name} ({rule.options or rule.about}) is not exported; readout, "
                "tpsgd_l2, tpsgd_l1 and drtp without features= and standardise=, and frozen are"
            )
        if outputs == 1 and formula.name != "readout":
            raise TpsgdError(
                f"{who}: {rule.name} with a single yes-or-no output is not exported; give the last "
                "layer two outputs, or use readout"
            )
        if rule.signal is not Signal.LABEL:
            raise TpsgdError(
                f"{who}: {rule.name} needs the error of the output before a block can learn, and "
                "the exported step does not wait for it; use readout, tpsgd_l2, tpsgd_l1 or drtp"
            )
        per_step = recurrent and rule.per_step and not isinstance(block.layer, diagonal.Diagonal)
        local = LocalLoss(
            formula.name,
            _codes(who, formula.codes or objective.tensors[0], site, per_step),
            site.shape,
        )
        if formula.name != "readout":
            return local
        target = formula.gain if objective.calibration else 0.0
        grid = (1, *formula.grid)[-2:] if formula.grid else None
        assert formula.loss is not None
        return replace(
            local, grid=grid, gain=0.0 if target else formula.gain, target=target,
            loss=LOSSES[formula.loss], learned=formula.learned,
        )  # fmt: skip


def _codes(who: str, drawn: Tensor | Redrawn, site: Site, per_step: bool) -> Codes:
    """The class codes of a block."""
    size = prod(site.shape)
    if isinstance(drawn, Redrawn):
        size, name = prod(drawn.shape), drawn.projection.name
        if name in ("normal", "uniform", "binary", "per_filter"):
            starts = streams(site.key, list(range(site.classes)))
            return Codes(
                size, "normal" if name == "per_filter" else name,
                () if per_step else tuple(int(s) % 2**64 for s in starts.flatten()),
                drawn.projection.std, drawn.shape[0] if name == "per_filter" else 0,
                None, per_step, site.key.seed, site.key.block,
            )  # fmt: skip
        drawn = drawn.whole()
    if per_step:
        raise TpsgdError(
            f"{who}: orthogonal codes for every time step would be a table without end; choose "
            "others, such as projection=tpsgd.projections.binary()"
        )
    return Codes(size, "table", table=drawn.flatten(1).float().cpu())


def _reshaped(block: Block, shape: Shape) -> Shape:
    """The shape in which a block's layer reads a sample, after the modules that reshape it."""
    x = torch.empty(1, *shape, device="meta")
    for module in block.prologue:
        x = module(x)
    return tuple(x.shape[1:])


def _layer(who: str, block: Block, shape: Shape, after: Shape) -> Layer:
    """A layer's numbers."""
    layer: Any = block.layer
    if type(layer) is nn.Linear:
        if len(after) != 1:
            raise TpsgdError(f"{who} gives {after}: only one vector per sample is exported")
        return Dense(layer.in_features, layer.out_features)
    if type(layer) in (nn.Conv1d, nn.Conv2d) and (pads := zero_padding(layer)) is not None:
        channels, *space = shape
        rows, columns = _pair(space)
        numbers = (channels, layer.out_channels, *space, *after, *layer.kernel_size, *pads)
        _check_sizes(who, *numbers, *layer.stride, *layer.dilation)
        return Convolution(
            channels, (rows, columns), layer.out_channels, _pair(layer.kernel_size),
            _pair(after[1:]), _pair(layer.stride), _pair(pads, 0), _pair(layer.dilation),
            layer.groups,
        )  # fmt: skip
    if isinstance(layer, Recurrent) and not layer.bidirectional:
        return Cell(layer.inputs, layer.hidden, float(layer.leak))
    if isinstance(layer, diagonal.Diagonal) and not layer.bidirectional:
        return Diagonal(layer.inputs, layer.states, layer.hidden, layer.loss_at.value)
    raise TpsgdError(
        f"{who} is not exported{_cause(layer)}: nn.Linear, nn.Conv1d and nn.Conv2d with zero "
        "padding, tpsgd.Recurrent and nn.RNN that read in one direction are"
    )


def _cause(layer: Any) -> str:
    """Why a layer of a kind that is known is not exported."""
    if getattr(layer, "bidirectional", False):
        return ", because it reads in two directions"
    if type(layer) not in (nn.Conv1d, nn.Conv2d):
        return f", because it is a {type(layer).__name__}"
    if layer.padding_mode != "zeros":
        return f", because of its padding_mode={layer.padding_mode!r}"
    return ", because padding='same' adds more zeros on one side of an even kernel"


def _check_sizes(who: str, *sizes: int) -> None:
    if max(sizes) > LARGEST:
        raise TpsgdError(f"{who}: a size of {max(sizes):,} is not exported; up to {LARGEST:,} is")


def _pair(values: Sequence[int], first: int = 1) -> tuple[int, int]:
    """Rows and columns; one dimension is columns."""
    rows, columns = (first, *values)[-2:]
    return int(rows), int(columns)


def _activation(who: str, block: Block) -> tuple[str, float]:
    """The activation's name and its slope below 0."""
    module: Any = block.layer.activation if isinstance(block.layer, Recurrent) else block.activation
    if module is None:
        return "none", 0.0
    if type(module) not in ACTIVATIONS:
        raise TpsgdError(
            f"{who}: {type(module).__name__} is not exported; ReLU, LeakyReLU, Tanh and Sigmoid are"
        )
    slope = float(getattr(module, "negative_slope", 0.0))
    if type(module) is nn.LeakyReLU and slope <= 0:
        raise TpsgdError(f"{who}: LeakyReLU with slope {slope:g} is not exported; above 0 it is")
    return ACTIVATIONS[type(module)], slope


def _pools(who: str, block: Block, shape: Shape) -> tuple[Pool, ...]:
    """What shrinks the feature maps after the activation."""
    pools: list[Pool] = []
    for module in block.tail:
        if isinstance(module, RESHAPING):
            continue
        if block.recurrent or len(shape) < 2:
            raise TpsgdError(f"{who}: {type(module).__name__} is not exported there")
        pools.append(_pool(who, module, shape))
        _check_sizes(who, *shape, *pools[-1].kernel, *pools[-1].stride)
        shape = (shape[0], *pools[-1].out[-(len(shape) - 1) :])
    return tuple(pools)


def _pool(who: str, module: Any, shape: Shape) -> Pool:
    channels, size = shape[0], _pair(shape[1:])
    if type(module) in (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d):
        space, grid = shape[1:], module.output_size
        each = tuple(grid) if isinstance(grid, (tuple, list)) else (grid,) * len(space)
        out = tuple(n if g is None else g for g, n in zip(each, space, strict=True))
        if any(g > n for g, n in zip(out, space, strict=True)):
            raise TpsgdError(f"{who}: {module} is not exported: it would make {size} larger")
        return Pool("cells", channels, size, (0, 0), (0, 0), _pair(out))
    kinds = {nn.MaxPool1d: "max", nn.MaxPool2d: "max", nn.AvgPool1d: "mean", nn.AvgPool2d: "mean"}
    plain = (
        not any(_numbers(module.padding)) and not module.ceil_mode if type(module) in kinds else 0
    )
    if not plain or max(_numbers(getattr(module, "dilation", 1))) > 1 or _divisor(module):
        raise TpsgdError(
            f"{who}: {module} is not exported; nn.MaxPool and nn.AvgPool without padding, dilation "
            "and ceil_mode, and nn.AdaptiveAvgPool are"
        )
    dimensions = len(shape) - 1
    kernel, stride = (_pair(_numbers(n, dimensions)) for n in (module.kernel_size, module.stride))
    rows, columns = ((n - k) // s + 1 for n, k, s in zip(size, kernel, stride, strict=True))
    return Pool(kinds[type(module)], channels, size, kernel, stride, (rows, columns))


def _divisor(module: Any) -> bool:
    return getattr(module, "divisor_override", None) is not None


def _numbers(value: Any, count: int = 2) -> tuple[int, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (int(value),) * count


def _parameters(who: str, block: Block, learns: bool) -> dict[str, Tensor]:
    """A layer's parameters; a batch norm that does not learn is folded into them."""
    layer: Any = block.layer
    values = {name: p.detach().float().cpu().clone() for name, p in layer.named_parameters()}
    for norm in block.between:
        if learns or type(norm) not in NORMS or norm.running_var is None:
            raise TpsgdError(
                f"{who}: {type(norm).__name__} in a block that learns is not exported; a batch "
                "norm of a block whose layer is frozen is folded into its weights"
            )
        values = _folded(values, norm)
    if bad := [name for name, p in values.items() if not p.isfinite().all()]:
        raise TpsgdError(f"{who}: {', '.join(bad)} has numbers that are not finite")
    return values


def _folded(values: dict[str, Tensor], norm: Any) -> dict[str, Tensor]:
    """Weights and bias of a layer with the batch norm after it, as in evaluation mode."""
    weight = values["weight"].double()
    bias = values.get("bias", torch.zeros(len(weight))).double()
    factor = (norm.running_var.double() + norm.eps).rsqrt()
    shift = torch.zeros_like(factor)
    if norm.affine:
        factor, shift = factor * norm.weight.detach().double(), norm.bias.detach().double()
    bias = (bias - norm.running_mean.double()) * factor + shift
    weight = weight * factor.view(-1, *[1] * (weight.dim() - 1))
    return {"weight": weight.float(), "bias": bias.float()}


def _with_rows(p: Tensor, count: int) -> Tensor:
    """A parameter with rows of zeros for classes that may come."""
    return torch.cat([p, p.new_zeros(count, *p.shape[1:])])


def _refuse_partly_frozen(who: str, block: Block, learns: bool) -> None:
    frozen = [name for name, p in block.layer.named_parameters() if not p.requires_grad]
    if learns and frozen:
        raise TpsgdError(
            f"{who}: {', '.join(frozen)} is frozen and the rest of the layer is not; freeze all of "
            "it with requires_grad_(False), or none"
        )


def _refuse_prologue(who: str, block: Block) -> None:
    for module in block.prologue:
        if not isinstance(module, RESHAPING):
            raise TpsgdError(
                f"{who}: {type(module).__name__} before a layer is not exported; leave it out"
            )
        if block.recurrent:
            raise TpsgdError(
                f"{who}: {type(module).__name__} before a recurrent layer is not exported, because "
                "the program reads one time step after another; leave it out and give the shape "
                "(steps, features)"
            )


def _refuse_link(who: str, block: Block, loss: Loss) -> None:
    """The last block gives logits; a softmax or sigmoid that belongs to the loss may follow."""
    links: dict[Loss, tuple[type, ...]] = {
        cross_entropy: (nn.Softmax, nn.LogSoftmax),
        bce: (nn.Sigmoid,),
    }
    rest = [m for m in block.tail if not isinstance(m, RESHAPING)]
    fits = block.activation is None or isinstance(block.activation, links.get(loss, ()))
    if rest or block.between or not fits:
        raise TpsgdError(f"{who}: nothing may follow the last nn.Linear of an exported net")


def _refuse_place(who: str, block: Block, rule: Rule) -> None:
    after = rule.at is Place.AFTER or (rule.at is Place.END and block.only_reshapes)
    if not after and block.activation is not None:
        raise TpsgdError(f"{who}: a loss {rule.at.value} is not exported; at=Place.AFTER is")
