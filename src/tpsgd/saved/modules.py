"""Modules as plain values: their types, from an allow-list, and their constructors' arguments.

A description is `{"type": "Linear", "arguments": {"in_features": 4, ...}}`, and of a Sequential
`{"type": "Sequential", "modules": {"0": ..., "1": ...}}`. Arguments that have torch's defaults are
left out, so that a version of torch with an argument less can read them. Only the types listed here
are ever called, with values out of JSON: a description cannot run code. Modules are built without
memory, on torch's meta device; `trained` puts the stored tensors in.
"""

import inspect
import re
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import nn

from tpsgd.common.errors import TpsgdError, shortened
from tpsgd.nets.activations import derivative_known
from tpsgd.nets.blocks import hooked
from tpsgd.nets.recurrent import Recurrent

Description = dict[str, Any]

TORCH_TYPES = """
Linear Bilinear Identity Embedding RNN GroupNorm LayerNorm RMSNorm LocalResponseNorm
Flatten Unflatten PixelShuffle PixelUnshuffle ChannelShuffle Upsample
Dropout AlphaDropout FeatureAlphaDropout
ReLU ReLU6 LeakyReLU PReLU ELU SELU CELU GELU SiLU Mish Softplus Softsign Softshrink
Hardshrink Hardtanh Hardsigmoid Hardswish Sigmoid LogSigmoid Tanh Tanhshrink Threshold GLU
Softmax Softmax2d LogSoftmax Softmin
"""
OF_DIMENSIONS = """
Conv ConvTranspose BatchNorm InstanceNorm MaxPool AvgPool LPPool AdaptiveAvgPool AdaptiveMaxPool
ConstantPad ZeroPad ReflectionPad ReplicationPad CircularPad Dropout
"""  # 1d, 2d and 3d
TORCH = frozenset(TORCH_TYPES.split()) | {
    f"{name}{d}d" for name in OF_DIMENSIONS.split() for d in (1, 2, 3)
}
UNDESCRIBED = (
    "self", "device", "dtype", "args", "kwargs", "recompute_scale_factor", "min_value", "max_value",
)  # fmt: skip
MOST_LAYERS = 1000  # of an nn.RNN
NAME = re.compile(r"(?!__)\w{1,100}")  # of a module; Python reads __NAME__ itself

RNN = {  # the arguments of nn.RNN, whose names torch hides
    "input_size": None, "hidden_size": None, "num_layers": 1, "nonlinearity": "tanh",
    "bias": True, "batch_first": False, "dropout": 0.0, "bidirectional": False,
}  # fmt: skip
OWN = {  # where this library's types are; `zoo` imports this package's users
    "Recurrent": "tpsgd.nets.recurrent",
    "Diagonal": "tpsgd.nets.diagonal",
    "Residual": "tpsgd.zoo.resnet",
    **dict.fromkeys(("Patches", "EncoderLayer", "TokenMean"), "tpsgd.zoo.vit"),
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
            raise _needs_code(f"{owner!r} and {name!r} are one shared parameter")
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
        problem = f"torch {torch.__version__} cannot make the model that is described"
        raise TpsgdError(f"{problem}: {shortened(error, 200)}") from error


def _describe(module: nn.Module, path: str) -> Description:
    name = type(module).__name__
    where = f"{name} (module {path!r})"
    is_sequential = type(module) is nn.Sequential
    if any(map(hooked, [module] if is_sequential else module.modules())):
        raise _needs_code(f"{where} has hooks, which are code")
    if is_sequential:
        children = {_checked(k): m for k, m in module._modules.items() if m is not None}
        below = {k: _describe(m, f"{path}.{k}".lstrip(".")) for k, m in children.items()}
        return {"type": "Sequential", "modules": below}
    if name in OWN and type(module) is _own_type(name):
        arguments = _own_arguments(name, module)
    elif name in TORCH and type(module) is getattr(nn, name):
        arguments = _arguments(module)
    else:
        raise _needs_code(f"{where} is no module of torch or tpsgd on its list")
    if isinstance(module, Recurrent) and not derivative_known(module.activation):
        raise _needs_code(f"{where} has an activation of your own")
    return {"type": name, "arguments": arguments}


def _build(description: Any) -> nn.Module:
    name = description["type"]
    if name == "Sequential" and description.keys() == {"type", "modules"}:
        net = nn.Sequential()
        for key, child in description["modules"].items():
            net.add_module(_checked(key), _build(child))
        return net
    if description.keys() != {"type", "arguments"} or name not in TORCH | OWN.keys():
        raise TpsgdError(f"{_quoted(name)} is no type of module that this version of tpsgd loads")
    arguments = {k: _from_json(v) for k, v in description["arguments"].items()}
    if name == "Recurrent":
        activation = arguments.pop("activation")
        if activation not in TORCH or not isinstance(arguments["bidirectional"], bool):
            raise TypeError("activation must be a name, bidirectional true or false")
        arguments |= {"activation": getattr(nn, activation), "init": "zeros"}
    if name in OWN:
        return _own_type(name)(**arguments)
    unknown = arguments.keys() - _defaults(name).keys()
    if unknown or not 0 <= arguments.get("num_layers", 0) <= MOST_LAYERS:
        raise TpsgdError(f"the arguments of {name} make no sense: {_quoted(arguments)}")
    return getattr(nn, name)(**arguments)


def _own_type(name: str) -> Any:
    return getattr(import_module(OWN[name]), name)


def _own_arguments(name: str, module: Any) -> dict[str, Any]:
    if name == "Residual":
        conv = module.conv1
        return {"inputs": conv.in_channels, "width": conv.out_channels, "stride": conv.stride[0]}
    if name == "Diagonal":
        sizes = {"inputs": module.inputs, "units": module.hidden, "states": module.states}
        return sizes | {"loss_at": module.loss_at.value, "sequence": module.sequence}
    if hasattr(module, "sizes"):  # those of `zoo.vit`
        return {key: getattr(module, key) for key in module.sizes}
    names = ("inputs", "hidden", "leak", "bidirectional", "sequence")
    arguments = {key: getattr(module, key) for key in names}
    return arguments | {"activation": type(module.activation).__name__}


def _arguments(module: nn.Module) -> dict[str, Any]:
    """The arguments of a torch module that are not its defaults, out of its attributes."""
    arguments = {}
    for key, default in _defaults(type(module).__name__).items():
        value: Any = getattr(module, key)
        if key == "bias" and not isinstance(value, bool):
            # a norm without parameters has no bias, whatever its argument was
            flags = (getattr(module, flag, True) for flag in ("affine", "elementwise_affine"))
            value = value is not None or not all(flags)
        if value != default or type(value) is not type(default):
            arguments[key] = value
    return arguments


@cache
def _defaults(name: str) -> dict[str, Any]:
    """The arguments of a torch module's constructor with their defaults, None if there is none."""
    if name == "RNN":
        return RNN
    parameters = inspect.signature(getattr(nn, name).__init__).parameters.values()
    described = [p for p in parameters if p.name[0] != "_" and p.name not in UNDESCRIBED]
    return {p.name: None if p.default is p.empty else p.default for p in described}


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(_from_json, value))
    if isinstance(value, dict):
        raise TpsgdError(f"a module's argument is {_quoted(value)}: expected a number or a word")
    return value


def _checked(name: str) -> str:
    """The name of a module, if it is one: it gets into messages, tables and exported files."""
    if not NAME.fullmatch(name):
        raise TpsgdError(
            f"a module is called {_quoted(name)}: names in a saved model have letters, digits "
            "and _, at most 100; rename it and save the model again"
        )
    return name


def _needs_code(problem: str) -> TpsgdError:
    return TpsgdError(
        f"the model cannot be described without code: {problem}; put the function that makes the "
        "model into a file and save with factory='FILE.py:FUNCTION'"
    )


def _quoted(value: Any) -> str:
    return shortened(repr(value))
