"""Blocks: a plain `torch.nn` model cut where gradients stop.

    [prologue] -> layer -> [between] -> activation -> [tail]

A block has one trainable layer, or with `split(model, blocks=...)` several, inside which autograd
runs: those before the last are part of the prologue. Modules between the layer and its activation
(usually BatchNorm) belong to the block, and so do modules after it that change the shape (pooling,
flatten). Dropout, and a normalisation after the activation, act on the *next* layer's inputs and
belong to the next block's prologue: so the inputs of a block can be computed once and still get a
new dropout mask every time. A recurrent layer has its activation inside. Each layer of torch's
`nn.RNN` is a block.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from tpsgd.common.errors import TpsgdError, user_line
from tpsgd.common.names import safe
from tpsgd.maths.kernels.rectified import chain, without_indices
from tpsgd.nets.activations import derivative_known
from tpsgd.nets.cuts.balance import Footprint
from tpsgd.nets.layers import LAYERS, gives_maps, layer_kind
from tpsgd.nets.model_inputs import data_of
from tpsgd.nets.modes import modes_restored
from tpsgd.nets.padded import Padded, SequenceLayer, through
from tpsgd.nets.recurrent import flat_modules
from tpsgd.objectives import Place

_SHAPE_ONLY = (nn.Flatten, nn.Unflatten, nn.Identity)
SWAPPED = (
    "x must have shape (samples, features): is data (y, x) in place of (x, y)? A single sample or "
    "feature is a dimension of size 1"
)
_POOLS = (nn.MaxPool1d, nn.MaxPool2d, nn.AvgPool1d, nn.AvgPool2d, nn.AdaptiveAvgPool2d)


@dataclass(eq=False)
class Block:
    """A trainable layer and the modules around it; `earlier` layers may learn in its prologue."""

    index: int
    name: str
    layer: nn.Module
    prologue: list[nn.Module] = field(default_factory=list)
    between: list[nn.Module] = field(default_factory=list)
    activation: nn.Module | None = None
    tail: list[nn.Module] = field(default_factory=list)
    key: int = 0  # its number in the keys of random numbers: blocks of a frozen backbone are 0
    earlier: list[nn.Module] = field(default_factory=list)
    paths: tuple[str, ...] = ()  # the names of its modules in the model
    ends: tuple[str, str] = ("", "")  # those of its first and its last layer
    of_class: bool = False  # whether the model is of a class, and no `nn.Sequential`

    def __str__(self) -> str:
        modules = self.layers if self.earlier else self.modules[len(self.prologue) :]
        names = [str(getattr(m, "block_title", type(m).__name__)) for m in modules]
        if self.earlier:
            runs = [(name, len(list(run))) for name, run in groupby(names)]
            names = [f"{count} x {name}" if count > 1 else name for name, count in runs]
        return safe(f"{self.name}: {' + '.join(names)}")

    @property
    def modules(self) -> list[nn.Module]:
        """All modules of the block, in the order in which data meets them."""
        act = [] if self.activation is None else [self.activation]
        return [*self.prologue, self.layer, *self.between, *act, *self.tail]

    @property
    def layers(self) -> list[nn.Module]:
        """Its trainable layers."""
        return [*self.earlier, self.layer]

    @property
    def maps(self) -> bool:
        """Whether an output with space is feature maps, channels first; else tokens come first."""
        return not self.recurrent and gives_maps(self.layer)

    @property
    def gives_tokens(self) -> bool:
        """Whether positions of the output are tokens, treated alike: attention, mixers, GRUs."""
        alone = (*LAYERS, nn.Embedding)
        return not self.maps and any(not isinstance(m, alone) for m in self.layers)

    @property
    def recurrent(self) -> bool:
        return isinstance(self.layer, SequenceLayer)

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that may learn, by a name that is unique within the block.

        In a recurrent block the cells alone learn, no scale and shift of a norm around them.
        """
        names: dict[nn.Parameter, str] = {}  # of a parameter that is used twice, the first
        for i, module in enumerate(self.modules):
            for name, p in module.named_parameters():
                if p.requires_grad and (module is self.layer or not self.recurrent):
                    names.setdefault(p, f"{i}.{name}")
        return {name: p for p, name in names.items()}

    def train(self, mode: bool) -> None:
        for module in self.modules:
            module.train(mode)

    def outputs(self, x: Tensor) -> dict[Place, Tensor]:
        """The block's output at every place, by its modules' own forward."""
        for module in [*self.prologue, self.layer, *self.between]:
            x = through(module, x)
        after = x if self.activation is None else self._through(self.activation, x)
        end = after
        for module in self.tail:
            end = through(module, end)
        return {Place.BEFORE: x, Place.AFTER: after, Place.END: end}

    def functions(self, place: Place) -> list[Any]:
        """What leads from the block's input to a place, in functions that store little."""
        return chain(self.modules[: len(self.modules) - len(self._after(place))], hooked)

    def onwards(self, place: Place, y: Tensor) -> Tensor:
        """The block's output, from that at a place, which stays as it is; without gradients."""
        for module in self._after(place):
            y = self._through(module, y)
        return y

    def _through(self, module: nn.Module, y: Tensor) -> Tensor:
        """A module's output; an activation that would write into its input gets a copy."""
        writes = module is self.activation and getattr(module, "inplace", False)
        return through(without_indices(module, hooked), y.clone() if writes else y)

    def _after(self, place: Place) -> list[nn.Module]:
        act = [self.activation] if self.activation is not None and place is Place.BEFORE else []
        return [] if place is Place.END else [*act, *self.tail]

    def __call__(self, x: Tensor) -> Tensor:
        for module in self.modules:
            x = through(module, x)
        return x

    @property
    def only_reshapes(self) -> bool:
        """Whether nothing but the shape changes after the activation."""
        return all(type(m) in _SHAPE_ONLY for m in self.tail)

    @property
    def pools(self) -> bool:
        """Whether the maps are pooled after the activation: the output has memory of its own."""
        after = (m for m in self.tail if type(m) not in _SHAPE_ONLY)
        return type(next(after, None)) in _POOLS

    def closed_form(self, at: Place) -> bool:
        """Whether the gradients are written out for an objective at that place."""
        return (
            layer_kind(self.layer) is not None
            and _plain_between(self.between)
            and derivative_known(self.activation)
            and not any(p.requires_grad for m in self.prologue for p in m.parameters())
            and not any(map(hooked, self.modules))
            and not any(map(hooked_parameters, self.modules))
            and (at is not Place.END or self.only_reshapes)
        )


def whole(model: nn.Module) -> Block:
    """The model as one block, whose local gradient is the whole gradient: backprop."""
    name = str(getattr(model, "block_title", type(model).__name__))
    chained = isinstance(model, nn.Sequential) and not hooked(model)
    modules: Any = model if chained else ()
    if len(modules) > 1 and is_activation(modules[-1]):
        return Block(0, name, modules[:-1], activation=modules[-1])
    return Block(0, name, model)


def is_activation(module: nn.Module) -> bool:
    """Whether it is an activation of torch's, or one whose derivative is known."""
    return type(module).__module__ == nn.ReLU.__module__ or derivative_known(module)


def hooked_parameters(module: nn.Module) -> bool:
    return any(p._backward_hooks for p in module.parameters())


def _plain_between(between: list[nn.Module]) -> bool:
    """Nothing, or a batch norm that learns and keeps its running statistics in the usual way."""
    if not between:
        return True
    norm: Any = between[0]
    usual = type(norm) in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d) and len(between) == 1
    return usual and norm.affine and norm.track_running_stats and norm.momentum is not None


def overwriting(model: nn.Module, blocks: list[Block]) -> list[Any]:
    """The modules with `inplace=True` that may overwrite what a block has yet to learn from.

    An activation right after a layer of a known kind overwrites that layer's own output: no other
    block reads it, and `Autograd` and `ClosedForm` know when the objective does.
    """
    plain = {b.activation for b in blocks if b.between or type(b.layer) in LAYERS}
    others = {
        m for b in blocks for top in b.modules if top is not b.activation for m in top.modules()
    }
    writers = [m for m in model.modules() if getattr(m, "inplace", False)]
    return [m for m in writers if m not in plain or m in others]


def has_batch_norm(modules: Iterable[nn.Module]) -> bool:
    """Whether one of these modules is a batch normalisation; of a model, give `model.modules()`."""
    return any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in modules)


def hooked(module: nn.Module) -> bool:
    """Whether hooks run when the module is called, or another forward than that of its class."""
    forward = module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
    return bool(forward or module._backward_hooks or module._backward_pre_hooks)


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
            raise misfit(who, block.modules, x, error) from error
        for y in outputs.values():
            value = data_of(y)
            if not isinstance(value, (Tensor, Padded)):
                raise TpsgdError(f"{who} must give one tensor, but gives a {type(value).__name__}")
            if y.shape[:1] != x.shape[:1]:
                raise TpsgdError(
                    f"{who} turns {len(x)} samples, {tuple(x.shape)}, into {tuple(y.shape)}: "
                    + ("the first dimension must stay the batch" if x.dim() > 1 else SWAPPED)
                )
        sizes.append({place: tuple(y.shape[1:]) for place, y in outputs.items()})
        x = outputs[Place.END]
    return sizes


def misfit(who: str, modules: list[nn.Module], x: Any, error: Exception) -> TpsgdError:
    """The error of modules that cannot take a batch, whose size is the library's choice."""
    reason = _misfit_of_layer(modules, x) if x.dim() > 1 else SWAPPED
    if not reason:
        first = (str(error) or type(error).__name__).splitlines()[0]
        reason = first.replace(str(tuple(x.shape)), _of_any_batch(x))
        reason += f" (tried with {len(x)} samples)" * (reason == first)
        reason += f" ({place})" if (place := user_line(error)) else ""
    return TpsgdError(f"{who} cannot take an input of shape {_of_any_batch(x)}: {reason}")


def _misfit_of_layer(modules: list[nn.Module], x: Any) -> str:
    """What the first layer that cannot take its input expects; "" if that is another reason."""
    for module in (m for top in modules for m in flat_modules(top)):
        name = type(module).__name__
        if isinstance(module, nn.Linear) and x.shape[-1] != module.in_features:
            advice = "; put nn.Flatten before it" * (x[0].numel() == module.in_features)
            return f"nn.{name} takes {module.in_features} features, got {x.shape[-1]}{advice}"
        convolution = isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d))
        dims = len(module.kernel_size) + 2 if convolution else 0
        if dims and (x.dim() != dims or x.shape[1] != module.in_channels):
            sizes = ", ".join(("depth", "height", "width")[5 - dims :])
            advice = "; for flat rows put nn.Unflatten before it" if x.dim() == 2 else ""
            expected = f"nn.{name} takes (batch, {module.in_channels}, {sizes})"
            return f"{expected}, got {_of_any_batch(x)}{advice}"
        try:
            with torch.no_grad():
                x = through(module, x)
        except Exception:  # whatever a custom module may raise
            return ""
        if not hasattr(x, "shape"):
            return f"nn.{name} gives a {type(x).__name__}, and the next module takes one tensor"
    return ""


def _of_any_batch(x: Any) -> str:
    return f"(batch, {', '.join(map(str, x.shape[1:]))})" if x.dim() > 1 else "(batch,)"


def footprints(blocks: list[Block], x: Any) -> list[Footprint]:
    """What autograd stores of a few samples for the gradients of every block.

    Blocks compute in evaluation mode: the statistics of batch norms stay as they are.
    """
    parameters = {p.untyped_storage()._cdata for b in blocks for p in b.named_parameters().values()}
    prints, tensors = [], []  # all tensors live on, so that no address is used twice
    pack, unpack = lambda t: tensors.append(t.detach()), lambda _: torch.empty(0)
    with modes_restored(*(m for block in blocks for m in block.modules)):
        shapes(blocks, x.clone())  # names a layer that does not fit, and sets the mode
        x = x.clone()  # the first module may write into its input
        for block in blocks:
            before = len(tensors)
            hooks = torch.autograd.graph.saved_tensors_hooks(pack, unpack)
            with torch.enable_grad(), hooks:
                for function in block.functions(Place.END):
                    x = through(function, x)
            storages = [t.untyped_storage() for t in tensors[before:]]
            stored = {s._cdata: s.nbytes() for s in storages if s._cdata not in parameters}
            largest = max([x.nbytes, *stored.values()])
            prints.append(Footprint(stored, largest, block.closed_form(Place.AFTER)))
            x = x.detach()
    return prints


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
