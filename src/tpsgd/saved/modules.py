"""Modules as plain values: their types, from an allow-list, and their constructors' arguments.

A description is `{"type": "Linear", "arguments": {"in_features": 4, ...}}`, and of a Sequential
`{"type": "Sequential", "modules": {"0": ..., "1": ...}}`. Arguments that have torch's defaults are
left out, so that a version of torch with an argument less can read them. Only the types listed here
are ever called, with values out of JSON: a description cannot run code. Modules are built without
memory, on torch's meta device; `trained` puts the stored tensors in.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import nn

from tpsgd.errors import TpsgdError, shortened
from tpsgd.nets.activations import derivative_known
from tpsgd.nets.blocks import hooked
from tpsgd.nets.diagonal import Diagonal
from tpsgd.nets.recurrent import Recurrent

Description = dict[str, Any]

TORCH_TYPES = """
Linear Bilinear Identity Embedding RNN
Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d ConvTranspose3d
BatchNorm1d BatchNorm2d BatchNorm3d InstanceNorm1d InstanceNorm2d InstanceNorm3d
GroupNorm LayerNorm RMSNorm LocalResponseNorm
MaxPool1d MaxPool2d MaxPool3d AvgPool1d AvgPool2d AvgPool3d LPPool1d LPPool2d LPPool3d
AdaptiveAvgPool1d AdaptiveAvgPool2d AdaptiveAvgPool3d
AdaptiveMaxPool1d AdaptiveMaxPool2d AdaptiveMaxPool3d
Flatten Unflatten PixelShuffle PixelUnshuffle ChannelShuffle Upsample
ConstantPad1d ConstantPad2d ConstantPad3d ZeroPad1d ZeroPad2d ZeroPad3d
ReflectionPad1d ReflectionPad2d ReflectionPad3d
ReplicationPad1d ReplicationPad2d ReplicationPad3d
CircularPad1d CircularPad2d CircularPad3d
Dropout Dropout1d Dropout2d Dropout3d AlphaDropout FeatureAlphaDropout
ReLU ReLU6 LeakyReLU PReLU ELU SELU CELU GELU SiLU Mish Softplus Softsign Softshrink
Hardshrink Hardtanh Hardsigmoid Hardswish Sigmoid LogSigmoid Tanh Tanhshrink Threshold GLU
Softmax Softmax2d LogSoftmax Softmin
"""
TORCH = frozenset(TORCH_TYPES.split())
UNDESCRIBED = (
    "self", "device", "dtype", "args", "kwargs", "recompute_scale_factor", "min_value", "max_value",
)  # fmt: skip
MOST_LAYERS = 1000  # of an nn.RNN
LONGEST_NAME = 100
NAME = re.compile(rf"(?!__)\w{{1,{LONGEST_NAME}}}")  # of a module; Python reads __NAME__ itself


@dataclass(frozen=True)
class OwnType:
    """A module type of this library: where it is, and how its arguments are read and given."""

    home: str
    arguments: Callable[[Any], dict[str, Any]]
    build: Callable[[Any, dict[str, Any]], nn.Module] = lambda cls, arguments: cls(**arguments)


def _recurrent_arguments(layer: Recurrent) -> dict[str, Any]:
    activation = type(layer.activation).__name__
    return {
        "inputs": layer.inputs,
        "hidden": layer.hidden,
        "leak": layer.leak,
        "activation": activation,
        "bidirectional": layer.bidirectional,
        "sequence": layer.sequence,
    }


def _build_recurrent(cls: Any, arguments: dict[str, Any]) -> nn.Module:
    name = arguments.pop("activation")
    if name not in TORCH or not isinstance(arguments["bidirectional"], bool):
        raise TypeError("activation must be a name, bidirectional true or false")
    return cls(**arguments, activation=getattr(nn, name), init="zeros")


def _diagonal_arguments(layer: Diagonal) -> dict[str, Any]:
    return {
        "inputs": layer.inputs,
        "units": layer.hidden,
        "states": layer.states,
        "loss_at": layer.loss_at.value,
        "sequence": layer.sequence,
    }


def _residual_arguments(block: Any) -> dict[str, Any]:
    conv = block.conv1
    stride = conv.stride[0]
    return {"inputs": conv.in_channels, "width": conv.out_channels, "stride": stride}


OWN = {  # `zoo` imports this package's users, so its types are looked up by name
    "Recurrent": OwnType("tpsgd.nets.recurrent", _recurrent_arguments, _build_recurrent),
    "Diagonal": OwnType("tpsgd.nets.diagonal", _diagonal_arguments),
    "Residual": OwnType("tpsgd.zoo.resnet", _residual_arguments),
}


def describe(model: nn.Module) -> Description:
    """A model as plain values; an error names the first module that is not on the list.

    Examples:
        >>> describe(nn.Sequential(nn.Linear(4, 2), nn.Tanh()))["modules"]["0"]
        {'type': 'Linear', 'arguments': {'in_features': 4, 'out_features': 2}}
    """
    description = _describe(model, "")
    owners: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = owners.setdefault(id(parameter), name)
        if owner != name:
            raise _not_plain(f"{owner!r} and {name!r} are one shared parameter")
    return description


def build(description: Any) -> nn.Module:
    """The model that was described, with tensors that have shapes but no memory.

    Examples:
        >>> build(describe(nn.Sequential(nn.Linear(4, 2), nn.Tanh())))
        Sequential(
          (0): Linear(in_features=4, out_features=2, bias=True)
          (1): Tanh()
        )
    """
    try:
        with torch.device("meta"):
            return _build(description)
    except TpsgdError:
        raise
    except Exception as error:  # constructors raise anything
        reason = shortened(error, 200)
        raise TpsgdError(
            f"the description of the model makes no sense to torch {torch.__version__}: {reason}"
        ) from error


def _describe(module: nn.Module, path: str) -> Description:
    name = type(module).__name__
    if hooked(module):
        raise _not_plain(f"{name} (module {path!r}) has hooks, which are code")
    if type(module) is nn.Sequential:
        children = {_checked(k): m for k, m in module._modules.items() if m is not None}
        below = {k: _describe(m, f"{path}.{k}".lstrip(".")) for k, m in children.items()}
        return {"type": "Sequential", "modules": below}
    if name in OWN and type(module) is _own_type(name):
        arguments = OWN[name].arguments(module)
    elif name in TORCH and type(module) is getattr(nn, name):
        arguments = _arguments(module)
    else:
        raise _not_plain(f"{name} (module {path!r}) is no module of torch or tpsgd on its list")
    if isinstance(module, Recurrent) and not derivative_known(module.activation):
        raise _not_plain(f"{name} (module {path!r}) has an activation of your own")
    for inner in list(module.modules())[1:]:
        if hooked(inner):
            raise _not_plain(f"{type(inner).__name__} (in module {path!r}) has hooks")
    return {"type": name, "arguments": arguments}


def _build(description: Any) -> nn.Module:
    if not isinstance(description, dict) or not isinstance(description.get("type"), str):
        raise TpsgdError(f"a module is described by {_quoted(description)}, which has no type")
    name = description["type"]
    if name == "Sequential" and description.keys() == {"type", "modules"}:
        net = nn.Sequential()
        for key, child in _mapping(description["modules"]).items():
            net.add_module(_checked(key), _build(child))
        return net
    if description.keys() != {"type", "arguments"} or name not in TORCH | OWN.keys():
        raise TpsgdError(f"{_quoted(name)} is no type of module that this version of tpsgd loads")
    arguments = {k: _from_json(v) for k, v in _mapping(description["arguments"]).items()}
    if name in OWN:
        return OWN[name].build(_own_type(name), arguments)
    unknown = arguments.keys() - _defaults(name).keys()
    if unknown or not 0 <= arguments.get("num_layers", 0) <= MOST_LAYERS:
        raise TpsgdError(f"the arguments of {name} make no sense: {_quoted(arguments)}")
    return getattr(nn, name)(**arguments)


def _arguments(module: nn.Module) -> dict[str, Any]:
    """The arguments of a torch module that are not its defaults, out of its attributes."""
    arguments = {}
    for key, default in _defaults(type(module).__name__).items():
        value = getattr(module, key)
        if key == "bias" and not isinstance(value, bool):
            value = value is not None or not _has_scale(module)
        if value != default or type(value) is not type(default):
            arguments[key] = _to_json(value)
    return arguments


def _has_scale(module: Any) -> bool:
    """Whether a norm has parameters: without any, it has no bias, whatever its argument was."""
    return getattr(module, "affine", True) and getattr(module, "elementwise_affine", True)


@cache
def _defaults(name: str) -> dict[str, Any]:
    """The arguments of a torch module's constructor with their defaults, None if there is none."""
    parameters = inspect.signature(_constructor(name)).parameters.values()
    described = [p for p in parameters if p.name[0] != "_" and p.name not in UNDESCRIBED]
    return {p.name: None if p.default is p.empty else p.default for p in described}


def _constructor(name: str) -> Any:
    return _rnn if name == "RNN" else getattr(nn, name).__init__


def _rnn(  # torch hides the names of these arguments
    input_size: int,
    hidden_size: int,
    num_layers: int = 1,
    nonlinearity: str = "tanh",
    bias: bool = True,
    batch_first: bool = False,
    dropout: float = 0.0,
    bidirectional: bool = False,
) -> None:
    """The constructor of nn.RNN."""


def _to_json(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [_to_json(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise _not_plain(f"{value!r} is an argument that JSON cannot hold")


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_from_json(item) for item in value)
    if isinstance(value, dict):
        raise TpsgdError(f"a module's argument is {_quoted(value)}: expected a number or a word")
    return value


def _checked(name: str) -> str:
    """The name of a module, if it is one: it gets into messages, tables and exported files."""
    if not NAME.fullmatch(name):
        raise TpsgdError(
            f"a module is called {_quoted(name)}: names in a saved model have letters, digits "
            f"and _, at most {LONGEST_NAME}; rename it and save the model again"
        )
    return name


def _own_type(name: str) -> Any:
    return getattr(import_module(OWN[name].home), name)


def _mapping(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise TpsgdError(f"{_quoted(value)} describes no module: expected names and values")
    return value


def _not_plain(problem: str) -> TpsgdError:
    return TpsgdError(
        f"the model cannot be described without code: {problem}; put the function that makes the "
        "model into a file and save with factory='FILE.py:FUNCTION'"
    )


def _quoted(value: Any) -> str:
    return shortened(repr(value))
