"""Copies of a frozen model in fewer bytes; submodules keep their names, so taps stay valid."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from tpsgd.common.errors import TpsgdError

LAYERS = (nn.Conv1d, nn.Conv2d, nn.Linear)


def int8(model: nn.Module) -> nn.Module:
    """A copy that stores the weights of Conv1d, Conv2d and Linear in one byte each.

    Per output channel, s = max|w| / 127 and q = round(w / s). The layer computes with q s in
    floating point, so this saves memory, not time. The copy is for inference, not for training. To
    store it, save its `state_dict`.

    Examples:
        >>> net = nn.Linear(400, 100)
        >>> weight_bytes(int8(net)) / weight_bytes(net)
        0.2543...
    """
    light = copy.deepcopy(model)
    # layers whose weights are parametrised already are left alone
    layers: list[Any] = [
        m for m in light.modules() if type(m) in LAYERS and "weight" in m._parameters
    ]
    if not layers:
        kind = type(model).__name__
        raise TpsgdError(f"{kind} has no Conv1d, Conv2d or Linear for int8: give the float model")
    for layer in layers:
        weight = layer.weight.detach()
        if not weight.isfinite().all():
            raise TpsgdError(f"{layer} has weights that are not finite: load others")
        del layer.weight
        layer.register_buffer("weight", weight)  # a buffer, so that q and s become buffers too
        parametrize.register_parametrization(layer, "weight", PerChannel())
    return light


class PerChannel(nn.Module):
    """Weights as the product of whole numbers and a scale per output channel."""

    def forward(self, q: Tensor, scale: Tensor) -> Tensor:
        return q * scale

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The whole numbers (int8) and the scales (in the weights' type) of these weights."""
        scale = weight.abs().amax(tuple(range(1, weight.dim())), keepdim=True) / 127
        q = weight.float() / scale.float().where(scale != 0, 1)
        return q.round().clamp(-127, 127).to(torch.int8), scale


def bf16(model: nn.Module) -> nn.Module:
    """A copy in bfloat16, half the bytes, which takes float32 and gives float32.

    The outputs of its submodules are bfloat16. It is about twice as fast as float32 on a processor
    with bfloat16 arithmetic, and several times slower on any other.

    Examples:
        >>> light = bf16(nn.Sequential(nn.Linear(4, 3), nn.ReLU()))
        >>> light(torch.ones(2, 4)).dtype, light[0].weight.dtype
        (torch.float32, torch.bfloat16)
    """
    light = copy.deepcopy(model).bfloat16()
    for module in light.modules():  # each of them may be called by itself
        module.register_forward_pre_hook(
            lambda _, *arguments: _cast(arguments, torch.bfloat16), with_kwargs=True
        )
    light.register_forward_hook(lambda _, inputs, output: _cast(output, torch.float32))
    return light


def weight_bytes(model: nn.Module) -> int:
    """The bytes of all parameters and buffers; shared ones count once.

    Examples:
        >>> weight_bytes(nn.Linear(3, 2))
        32
    """
    return sum(t.nbytes for t in (*model.parameters(), *model.buffers()))


def _cast(x: Any, dtype: torch.dtype) -> Any:
    """The same value with its floating-point tensors, also inside containers, in another type."""
    if isinstance(x, Tensor):
        return x.to(dtype) if x.is_floating_point() else x
    if type(x) in (tuple, list):
        return type(x)(_cast(v, dtype) for v in x)
    return {k: _cast(v, dtype) for k, v in x.items()} if type(x) is dict else x
