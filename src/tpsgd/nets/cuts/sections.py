"""A part of a model's `forward` as a module: what leads from one activation to the next.

A part that is one call of torch's is the module that does the same, `nn.ReLU` for `F.relu`, so that
closed forms and exports know it. Any other part is a `Section`, which calls the user's own modules.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from tpsgd.common.errors import TpsgdError
from tpsgd.nets.model_inputs import ModelInputs

VIEWS = {
    "view", "reshape", "flatten", "permute", "transpose", "squeeze", "unsqueeze", "getitem", "t",
    "contiguous", "expand", "chunk", "split", "unbind", "unflatten", "movedim", "swapaxes",
    "detach",
}  # fmt: skip


class Section(nn.Module):
    """A part of a model's `forward` between two activations.

    Args:
        learning: the part in training mode.
        evaluating: the part in evaluation mode, if it differs: dropout written as a function.
        title: what it is called in tables.
        reads: the inputs of the model that it reads besides the activation: name and number.
    """

    def __init__(
        self,
        learning: fx.GraphModule,
        evaluating: fx.GraphModule | None,
        title: str,
        reads: Sequence[tuple[str, int]] = (),
    ) -> None:
        super().__init__()
        self.learning, self.evaluating = learning, evaluating
        self.block_title, self.reads = title, tuple(reads)
        self.reads_inputs = bool(reads)
        self.is_layer = False  # whether it multiplies by weights that may learn
        self.embeds = False  # whether these are vectors of tokens and places alone

    def forward(self, x: Any) -> Any:
        graph = self.learning if self.training or self.evaluating is None else self.evaluating
        if not self.reads_inputs:
            return graph.forward(x)
        if not isinstance(x, ModelInputs):
            raise TpsgdError("it takes several inputs: pass x as a tuple or a dict of them")
        return graph.forward(x.data, *(x.get(*names) for names in self.reads))


class Remember(nn.Module):
    """Carries the model's input along, because a later block reads it too."""

    reads_inputs = True

    def forward(self, x: Any) -> ModelInputs:
        return x if isinstance(x, ModelInputs) else ModelInputs({0: x}, x)


def _dropped(learning: fx.Node, evaluating: fx.Node) -> nn.Module | None:
    """The module of a dropout that is written as a function of `self.training`."""
    kind = {F.dropout: nn.Dropout, F.dropout1d: nn.Dropout1d, F.dropout2d: nn.Dropout2d}
    if learning.target not in kind:
        return None
    modes = []
    for node in (learning, evaluating):
        arguments = dict(zip(("p", "training", "inplace"), node.args[1:], strict=False))
        modes.append({"p": 0.5, "training": True} | arguments | dict(node.kwargs))
    if [mode["training"] for mode in modes] != [True, False]:
        return None
    return kind[learning.target](modes[0]["p"])  # type: ignore[index]


def _softmax(kind: type[nn.Module], dim: int | None, dtype: Any) -> nn.Module | None:
    return kind(dim) if dim is not None and dtype is None else None


def _flatten(start_dim: int = 0, end_dim: int = -1) -> nn.Module | None:
    return nn.Flatten(start_dim, end_dim) if start_dim > 0 else None


def _plain(module: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """An activation without arguments; its output gets memory of its own."""
    return lambda inplace=False: module()


def _max_pool(
    kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1,
    ceil_mode: bool = False, return_indices: bool = False,
) -> nn.Module | None:  # fmt: skip
    return (
        None
        if return_indices
        else nn.MaxPool2d(kernel_size, stride, padding, dilation, ceil_mode=ceil_mode)
    )


TWINS: dict[Any, Callable[..., nn.Module | None]] = {
    **dict.fromkeys((F.relu, torch.relu, torch.relu_, "relu", "relu_"), _plain(nn.ReLU)),
    **dict.fromkeys((F.tanh, torch.tanh, "tanh", "tanh_"), _plain(nn.Tanh)),
    **dict.fromkeys((F.sigmoid, torch.sigmoid, "sigmoid", "sigmoid_"), _plain(nn.Sigmoid)),
    F.silu: _plain(nn.SiLU),
    F.relu6: _plain(nn.ReLU6),
    F.hardswish: _plain(nn.Hardswish),
    F.mish: _plain(nn.Mish),
    F.leaky_relu: lambda negative_slope=0.01, inplace=False: nn.LeakyReLU(negative_slope),
    F.elu: lambda alpha=1.0, inplace=False: nn.ELU(alpha),
    F.gelu: lambda approximate="none": nn.GELU(approximate),
    F.softplus: lambda beta=1.0, threshold=20.0: nn.Softplus(beta, threshold),
    **dict.fromkeys((torch.flatten, "flatten"), _flatten),
    F.max_pool2d: _max_pool,
    torch.max_pool2d: _max_pool,
    F.avg_pool2d: nn.AvgPool2d,
    F.adaptive_avg_pool2d: nn.AdaptiveAvgPool2d,
    F.adaptive_avg_pool1d: nn.AdaptiveAvgPool1d,
    F.log_softmax: lambda dim=None, _stacklevel=3, dtype=None: _softmax(nn.LogSoftmax, dim, dtype),
    F.softmax: lambda dim=None, _stacklevel=3, dtype=None: _softmax(nn.Softmax, dim, dtype),
}


def twin(learning: fx.Node, evaluating: fx.Node) -> nn.Module | None:
    """The module that does what a call of a function does, if there is one."""
    if module := _dropped(learning, evaluating):
        return module
    make = TWINS.get(learning.target) if learning.op != "call_module" else None
    if make is None or any(isinstance(a, fx.Node) for a in learning.args[1:]):
        return None
    try:
        return make(*learning.args[1:], **learning.kwargs)
    except TypeError:  # an argument that the module does not have
        return None


def is_flatten(nodes: Sequence[fx.Node], is_batch: Callable[[Any], bool]) -> bool:
    """Whether nodes are `x.view(x.size(0), -1)` in one of its spellings, and nothing else."""
    view = nodes[-1]
    if view.op != "call_method" or view.target not in ("view", "reshape"):
        return False
    sizes: Any = view.args[1:] if len(view.args) != 2 else view.args[1]
    is_rows = isinstance(sizes, (tuple, list)) and len(sizes) == 2 and sizes[1] == -1
    return is_rows and is_batch(sizes[0]) and all(is_size(n) for n in nodes[:-1])


def is_size(node: fx.Node) -> bool:
    """Whether a node computes a shape, one of its numbers, or another property of a tensor."""
    if node.op == "call_method":
        return node.target in ("size", "dim", "numel")
    if node.op != "call_function":
        return False
    if node.target is getattr:
        return node.args[1] in ("shape", "ndim", "dtype", "device")
    of_numbers = getattr(node.target, "__module__", "") in ("_operator", "builtins", "math")
    return of_numbers and bool(node.all_input_nodes) and all(map(is_size, node.all_input_nodes))


def writes(node: fx.Node) -> bool:
    """Whether a call changes the memory of its first argument."""
    name = str(getattr(node.target, "__name__", node.target))
    in_place = name.endswith("_") and not name.endswith("__")
    of_operator = getattr(operator, name, None) is node.target and name in _IN_PLACE
    return in_place or of_operator or bool(node.kwargs.get("inplace"))


_IN_PLACE = {"iadd", "isub", "imul", "itruediv", "imatmul", "ipow", "setitem"}


def overwritten(nodes: Sequence[fx.Node], incoming: fx.Node | None) -> bool:
    """Whether calls may write into the memory of the activation that comes in."""
    views = {incoming}
    for node in nodes:
        first = node.args[0] if node.args else None
        if node.op in ("call_function", "call_method") and first in views:
            if writes(node) or (len(node.args) > 1 and node.args[1] is True):  # F.relu(x, True)
                return True
            if str(getattr(node.target, "__name__", node.target)) in VIEWS:
                views.add(node)
    return False
