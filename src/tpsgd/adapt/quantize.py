"""Copies of a frozen model in fewer bytes; submodules keep their names, so taps stay valid."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from tpsgd.adapt.onnx_backbone import onnx_int8
from tpsgd.errors import TpsgdError

__all__ = ["bf16", "int8", "onnx_int8", "weight_bytes"]

LAYERS = (nn.Conv1d, nn.Conv2d, nn.Linear)


def int8(model: nn.Module) -> nn.Module:
    """A copy that keeps the weights of Conv1d, Conv2d and Linear in a byte each.

    Per output channel, s = max|w| / 127 and q = round(w / s); the layer computes with q s, made
    anew each time it runs and then forgotten. The copy is for running, not for training: it has no
    gradients of q. Save its `state_dict`.

    Args:
        model: what to copy; it stays as it is.

    Examples:
        >>> net = nn.Linear(400, 100)
        >>> weight_bytes(int8(net)) / weight_bytes(net)
        0.2543...
    """
    made = copy.deepcopy(model)
    layers: list[Any] = [m for m in made.modules() if _has_plain_weights(m)]
    if not layers:
        raise TpsgdError(
            f"{type(model).__name__} has no Conv1d, Conv2d or Linear whose weights could be stored "
            "in int8: give the float model"
        )
    for layer in layers:
        weight = layer.weight.detach()
        if not weight.isfinite().all():
            raise TpsgdError(f"{layer} has weights that are not finite: load others")
        del layer.weight
        layer.register_buffer("weight", weight)  # so that its parts become buffers as well
        parametrize.register_parametrization(layer, "weight", PerChannel())
    return made


def _has_plain_weights(m: nn.Module) -> bool:
    """Whether it is one of the layers, and its weights are not made of others already."""
    return type(m) in LAYERS and "weight" in m._parameters


class PerChannel(nn.Module):
    """Weights as the product of whole numbers and a scale per output channel."""

    def forward(self, q: Tensor, scale: Tensor) -> Tensor:
        """The weights."""
        return q * scale

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The parts of given weights: int8, and a scale in the weights' own type."""
        scale = weight.abs().amax(tuple(range(1, weight.dim())), keepdim=True) / 127
        q = weight.float() / scale.float().where(scale != 0, 1)
        return q.round().clamp(-127, 127).to(torch.int8), scale


def bf16(model: nn.Module) -> nn.Module:
    """A copy in bfloat16, half the bytes, which takes float32 and gives float32.

    What its submodules give is bfloat16. A processor with bfloat16 of its own is about twice as
    fast as in float32, any other several times slower.

    Args:
        model: what to copy; it stays as it is.

    Examples:
        >>> light = bf16(nn.Sequential(nn.Linear(4, 3), nn.ReLU()))
        >>> light(torch.ones(2, 4)).dtype, light[0].weight.dtype
        (torch.float32, torch.bfloat16)
    """
    made = copy.deepcopy(model).bfloat16()
    for module in made.modules():  # each of them may be called by itself
        module.register_forward_pre_hook(_enter, with_kwargs=True)
    made.register_forward_hook(_leave)
    return made


def weight_bytes(model: nn.Module) -> int:
    """Bytes of all parameters and buffers, shared ones once, and of weights held elsewhere.

    Examples:
        >>> weight_bytes(nn.Linear(3, 2))
        32
    """
    tensors = (*model.parameters(), *model.buffers())
    elsewhere = sum(int(getattr(m, "held_bytes", 0)) for m in model.modules())
    return elsewhere + sum(t.numel() * t.element_size() for t in tensors)


def _enter(_: nn.Module, args: Any, kwargs: Any) -> Any:
    return _cast(args, torch.bfloat16), _cast(kwargs, torch.bfloat16)


def _leave(_: nn.Module, args: Any, output: Any) -> Any:
    return _cast(output, torch.float32)


def _cast(x: Any, dtype: torch.dtype) -> Any:
    """The same with its floating numbers in another type, inside plain containers too."""
    if isinstance(x, Tensor):
        return x.to(dtype) if x.is_floating_point() else x
    if type(x) in (tuple, list):
        return type(x)(_cast(v, dtype) for v in x)
    return {k: _cast(v, dtype) for k, v in x.items()} if type(x) is dict else x
