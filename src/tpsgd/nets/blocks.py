"""Blocks: a plain `torch.nn` model cut where gradients stop.

    [prologue] -> layer -> [between] -> activation -> [tail]

A block has one trainable layer. Modules between the layer and its activation (usually BatchNorm)
belong to the block, and so do modules after it that change the shape (pooling, flatten). Dropout,
and a normalisation after the activation, act on the *next* layer's inputs and belong to the next
block's prologue: so the inputs of a block can be computed once and still get a new dropout mask
every time. A recurrent layer has its activation inside. Each layer of torch's `nn.RNN` is a block.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tpsgd.errors import TpsgdError
from tpsgd.nets.activations import derivative_known
from tpsgd.nets.layers import LAYERS, gives_maps, layer_kind
from tpsgd.nets.padded import Padded, SequenceLayer, through
from tpsgd.nets.recurrent import feeds_recurrent, views
from tpsgd.rules import Place

_NORMS = (
    nn.modules.batchnorm._NormBase,
    nn.GroupNorm,
    nn.LayerNorm,
    nn.RMSNorm,
    nn.LocalResponseNorm,
)
_ON_INPUTS = (*_NORMS, nn.modules.dropout._DropoutNd)  # after an activation: of the next block
_RECURRENT = (nn.RNNBase, nn.RNNCellBase)
_ATTENTION = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
_SHAPE_ONLY = (nn.Flatten, nn.Unflatten, nn.Identity)


@dataclass(eq=False)
class Block:
    """One trainable layer and the modules around it."""

    index: int
    name: str
    layer: nn.Module
    prologue: list[nn.Module] = field(default_factory=list)
    between: list[nn.Module] = field(default_factory=list)
    activation: nn.Module | None = None
    tail: list[nn.Module] = field(default_factory=list)
    key: int = 0  # its number in the keys of random numbers: blocks of a frozen backbone are 0

    def __str__(self) -> str:
        parts = [self.layer, *self.between, self.activation, *self.tail]
        return f"{self.name}: " + " + ".join(type(m).__name__ for m in parts if m is not None)

    @property
    def modules(self) -> list[nn.Module]:
        """All modules of the block, in the order in which data meets them."""
        act = [] if self.activation is None else [self.activation]
        return [*self.prologue, self.layer, *self.between, *act, *self.tail]

    @property
    def maps(self) -> bool:
        """Whether an output with space is feature maps, channels first."""
        return not self.recurrent and gives_maps(self.layer)

    @property
    def recurrent(self) -> bool:
        """Whether its layer reads sequences."""
        return isinstance(self.layer, SequenceLayer)

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that may learn, by a name that is unique within the block.

        In a recurrent block only the cells learn: the scale and shift of a normalisation in its
        prologue or tail stay as they are.
        """
        return {
            f"{i}.{name}": p
            for i, module in enumerate(self.modules)
            for name, p in module.named_parameters()
            if p.requires_grad and (module is self.layer or not self.recurrent)
        }

    def train(self, mode: bool) -> None:
        """Put the block's modules in training or evaluation mode."""
        for module in self.modules:
            module.train(mode)

    def outputs(self, x: Tensor) -> dict[Place, Tensor]:
        """The block's output at every place, by its modules' own forward."""
        for module in [*self.prologue, self.layer, *self.between]:
            x = through(module, x)
        outputs = {Place.BEFORE: x}
        if self.activation is not None:
            writes = getattr(self.activation, "inplace", False)
            x = through(self.activation, x.clone() if writes else x)
        outputs[Place.AFTER] = x
        for module in self.tail:
            x = through(module, x)
        return outputs | {Place.END: x}

    def __call__(self, x: Tensor) -> Tensor:
        """The block's output, as the model computes it."""
        for module in self.modules:
            x = through(module, x)
        return x

    def closed_form(self, at: Place) -> bool:
        """Whether the gradients are written out for an objective at that place."""
        tail_is_shape = all(type(m) in _SHAPE_ONLY for m in self.tail)
        return (
            layer_kind(self.layer) is not None
            and _plain_between(self.between)
            and derivative_known(self.activation)
            and not any(p.requires_grad for m in self.prologue for p in m.parameters())
            and not any(hooked(m) for m in self.modules)
            and (at is not Place.END or tail_is_shape)
        )


def split(model: nn.Module) -> list[Block]:
    """Cut a model into blocks, one per trainable layer.

    A `Sequential`, nested ones included, is cut between its layers; any other module with
    parameters (a residual block, say) becomes one block and learns through autograd inside itself.

    Examples:
        >>> model = nn.Sequential(nn.Flatten(), nn.Linear(9, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> [str(block) for block in split(model)]
        ['1: Linear + ReLU', '3: Linear']
    """
    groups: list[tuple[str, nn.Module, list[nn.Module]]] = []  # a layer and what follows it
    pending: list[nn.Module] = []  # before the first layer
    for name, module in _opened(list(leaves_of(model))):
        _refuse(name, module)
        if _is_layer(module):
            groups.append((name, module, []))
        else:
            (groups[-1][2] if groups else pending).append(module)
    if not groups:
        raise TpsgdError(f"{type(model).__name__} has no layer with parameters: nothing can learn")
    taps = [getattr(layer, "is_tap", False) for _, layer, _ in groups]
    backbone = 0 if all(taps) else taps.index(False)  # how many blocks it has
    blocks = []
    for i, (name, layer, followers) in enumerate(groups):
        between, act, rest = [], None, followers
        if not isinstance(layer, SequenceLayer):
            between, act, rest = _around_activation(followers)
        cut = next((k for k, m in enumerate(rest) if isinstance(m, _ON_INPUTS)), len(rest))
        cut = len(rest) if i == len(groups) - 1 else cut
        key = max(0, i - backbone)
        blocks.append(Block(i, name, layer, pending, between, act, rest[:cut], key))
        pending = rest[cut:]
    _refuse_shared(blocks)
    return blocks


def _refuse_shared(blocks: list[Block]) -> None:
    owners: dict[int, Block] = {}
    for block in blocks:
        for name, p in block.named_parameters().items():
            owner = owners.setdefault(id(p), block)
            if owner is not block:
                raise TpsgdError(
                    f"blocks {owner.index + 1} ({owner}) and {block.index + 1} ({block}) share a "
                    f"parameter ({name.partition('.')[2]}): it cannot belong to two blocks; give "
                    "each its own"
                )


def whole(model: nn.Module) -> Block:
    """The model as one block, whose local gradient is the whole gradient: backprop."""
    name = type(model).__name__
    if isinstance(model, nn.Sequential) and len(model) > 1 and _is_activation(model[-1]):
        return Block(0, name, model[:-1], activation=model[-1])
    return Block(0, name, model)


def leaves_of(
    module: nn.Module, name: str = "", top: bool = True
) -> Iterator[tuple[str, nn.Module]]:
    """The modules of nested `nn.Sequential`s by name, in the order in which data meets them."""
    if isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward:
        if hooked(module) and not top:
            yield name, module
            return
        for child_name, child in module._modules.items():  # a module used twice comes twice
            if child is not None:
                yield from leaves_of(child, f"{name}.{child_name}" if name else child_name, False)
    elif top and not isinstance(module, (*LAYERS, nn.RNNBase, SequenceLayer)):
        raise TpsgdError(
            f"cannot cut {type(module).__name__} into blocks: the order of its layers is hidden in "
            "its forward method; pass nn.Sequential of its stages (a stage may be any module), "
            "or train it whole with tpsgd.fit_backprop"
        )
    elif not isinstance(module, nn.Identity):
        yield name or type(module).__name__, module


def _opened(leaves: list[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """The leaves with every `nn.RNN` replaced by its layers, which share its parameters."""
    opened: list[tuple[str, nn.Module]] = []
    for i, (name, module) in enumerate(leaves):
        if type(module) is nn.RNN:
            sequence = feeds_recurrent([m for _, m in leaves[i + 1 :]])
            layers = list(views(module, sequence))
            many = module.num_layers > 1
            opened += [(f"{name}.{k}" if many else name, m) for k, m in enumerate(layers)]
        else:
            opened.append((name, module))
    return opened


def _refuse(name: str, module: nn.Module) -> None:
    if getattr(module, "is_tap", False):  # frozen: no gradient runs through it
        return
    for inner_name, m in module.named_modules():
        nested = inner_name and isinstance(m, SequenceLayer)
        if nested or isinstance(m, (*_RECURRENT, *_ATTENTION)):
            where = f"{name}.{inner_name}" if inner_name else name
            recurrent = "use tpsgd.Recurrent or nn.RNN, straight in the nn.Sequential"
            raise TpsgdError(
                f"{type(m).__name__} (module {where!r}) is not supported: its gradient would run "
                "through time or across tokens, which is not local; "
                f"{'replace it' if isinstance(m, _ATTENTION) else recurrent}, compute its outputs "
                "once and fit on those, or train a module that holds it with tpsgd.fit_backprop"
            )
        if any(isinstance(p, nn.UninitializedParameter) for p in m.parameters(recurse=False)):
            raise TpsgdError(f"{name!r} is lazy: run one batch through the model first")


def _is_layer(module: nn.Module) -> bool:
    return (
        any(True for _ in module.parameters())
        and not isinstance(module, _NORMS)
        and not _is_activation(module)
    )


def _is_activation(module: nn.Module) -> bool:
    return type(module).__module__ == nn.ReLU.__module__ or derivative_known(module)


def _around_activation(
    followers: list[nn.Module],
) -> tuple[list[nn.Module], nn.Module | None, list[nn.Module]]:
    for i, module in enumerate(followers):
        if _is_activation(module):
            return followers[:i], module, followers[i + 1 :]
    norms = next((i for i, m in enumerate(followers) if not isinstance(m, _NORMS)), len(followers))
    return followers[:norms], None, followers[norms:]


def _plain_between(between: list[nn.Module]) -> bool:
    """Nothing, or a batch norm that learns and keeps its running statistics in the usual way."""
    if not between:
        return True
    norm: Any = between[0]
    usual = type(norm) in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d) and len(between) == 1
    return usual and norm.affine and norm.track_running_stats and norm.momentum is not None


def has_batch_norm(modules: Iterable[nn.Module]) -> bool:
    """Whether one of these modules is a batch normalisation; of a model, give `model.modules()`."""
    return any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in modules)


def hooked(module: nn.Module) -> bool:
    """Whether hooks run, besides its forward, when the module is called."""
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)


def shapes(blocks: list[Block], x: Tensor) -> list[dict[Place, tuple[int, ...]]]:
    """The shape of one sample's output of every block, at every place.

    Runs a few samples in evaluation mode; a layer that does not fit is named.
    """
    sizes = []
    for block in blocks:
        block.train(False)
        who = f"block {block.index + 1} ({block})"
        try:
            with torch.no_grad():
                outputs = block.outputs(x)
        except Exception as error:  # whatever a custom module may raise
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise TpsgdError(
                f"{who} cannot take an input of shape {tuple(x.shape)}: {reason}"
            ) from error
        for y in outputs.values():
            if not isinstance(y, (Tensor, Padded)):
                raise TpsgdError(f"{who} must give one tensor, but gives a {type(y).__name__}")
            if y.shape[:1] != x.shape[:1]:
                raise TpsgdError(
                    f"{who} turns a batch of shape {tuple(x.shape)} into {tuple(y.shape)}: the "
                    "first dimension must stay the batch"
                )
        sizes.append({place: tuple(y.shape[1:]) for place, y in outputs.items()})
        x = outputs[Place.END]
    return sizes


@contextmanager
def products_of_layers() -> Iterator[list[int]]:
    """The multiply-adds of one sample in every product of weights that is computed meanwhile.

    A recurrent layer multiplies by its weights at each time step: a product of its own.
    """
    products: list[int] = []

    def count(module: nn.Module, _: Any, y: Any) -> None:
        cells = isinstance(module, SequenceLayer)
        for weight in (p for p in module.parameters(recurse=cells) if p.dim() > 1):
            pixels = y[0].numel() // len(weight) if isinstance(y, Tensor) and not cells else 1
            products.append(max(1, pixels) * weight.numel())

    hook = nn.modules.module.register_module_forward_hook(count)
    try:
        yield products
    finally:
        hook.remove()
