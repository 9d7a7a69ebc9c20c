"""The input that makes a module give y, or the nearest to it: ZORB takes labels back through these.

| module                 | inverse                                                                |
|------------------------|------------------------------------------------------------------------|
| Linear                 | (y - b) pinv(W)                                                        |
| Conv1d, Conv2d         | pinv of the kernel gives patches; where they overlap, their mean       |
| LeakyReLU              | y where y >= 0, else y / slope                                         |
| ReLU                   | y: the output nearest to a negative y is 0                             |
| Sigmoid, Tanh          | y scaled from its least and greatest value into the range, then undone |
| pooling                | each number again for all its pixels                                   |
| Flatten, Unflatten     | the shape before                                                       |
| Identity, Dropout      | y                                                                      |
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tpsgd.common.errors import TpsgdError
from tpsgd.nets.layers import layer_kind, zero_padding

EPSILON = 1e-5  # how far scaled targets stay from the ends of a bounded activation's range
BOUNDED, CONVOLUTIONS = (nn.Sigmoid, nn.Tanh), (nn.Conv1d, nn.Conv2d)  # what `F.fold` can do
POOLING = (
    *(nn.AvgPool1d, nn.AvgPool2d, nn.MaxPool1d, nn.MaxPool2d),
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d),
)


class Unscale(nn.Module):
    """gain * y + shift: takes the output of a bounded activation back to its targets."""

    gain: Tensor
    shift: Tensor

    def __init__(self, gain: Tensor, shift: Tensor) -> None:
        super().__init__()
        self.register_buffer("gain", gain)
        self.register_buffer("shift", shift)

    def forward(self, y: Tensor) -> Tensor:
        """In y's own precision."""
        return y * self.gain.to(y.dtype) + self.shift.to(y.dtype)


def inverse(module: nn.Module, y: Tensor, shape: torch.Size) -> tuple[Tensor, Unscale | None]:
    """The input of this shape that gives y (float64), and the scale of a bounded activation."""
    if isinstance(module, BOUNDED):
        return _bounded(module, y)
    invert = next(f for kinds, f in _INVERSES.items() if isinstance(module, kinds))
    return invert(module, y, shape), None


def check_invertible(module: nn.Module) -> None:
    """Refuse modules that have no inverse here."""
    if not any(isinstance(module, kinds) for kinds in (BOUNDED, *_INVERSES)):
        raise TpsgdError(
            f"ZORB has no inverse for {type(module).__name__}: it takes linear layers, "
            "convolutions, LeakyReLU, ReLU, Tanh, Sigmoid, pooling, Flatten and Dropout"
        )
    kind = layer_kind(module)
    if isinstance(module, CONVOLUTIONS) and (kind is None or not kind.dense(module)):
        raise TpsgdError("ZORB cannot invert a convolution with groups, or not padded with zeros")


def _bounded(module: nn.Module, y: Tensor) -> tuple[Tensor, Unscale]:
    """Scaled into the range of a sigmoid, 0 to 1, or of tanh, -1 to 1, and a little less."""
    low, high = y.min(), y.max()
    spread = torch.where(high > low, high - low, 1.0)
    share = ((y - low) / spread).mul(1 - 2 * EPSILON).add(EPSILON)
    gain = spread / (1 - 2 * EPSILON)
    if isinstance(module, nn.Sigmoid):
        return share.logit(), Unscale(gain, low - EPSILON * gain)
    shift = low + (0.5 - EPSILON) * gain
    return share.mul(2).sub(1).atanh(), Unscale(gain / 2, shift)


def _linear(module: Any, y: Tensor, shape: torch.Size) -> Tensor:
    return _less_bias(module, y, -1) @ pseudo_inverse(module.weight).mT


def _convolution(module: Any, y: Tensor, shape: torch.Size) -> Tensor:
    pads = zero_padding(module)
    assert pads is not None
    size, kernel, dilation, stride = shape[1:], module.kernel_size, module.dilation, module.stride
    if len(size) == 1:  # an image of one row
        size, kernel, pads = (1, *size), (1, *kernel), [0, *pads]
        dilation, stride = (1, *dilation), (1, *stride)
    patches = pseudo_inverse(module.weight.flatten(1)) @ _less_bias(module, y, 1).flatten(2)
    geometry = (tuple(size), kernel, dilation, tuple(pads), stride)
    overlaps = F.fold(torch.ones_like(patches[:1]), *geometry)
    return (F.fold(patches, *geometry) / overlaps.clamp(min=1)).view(len(y), *shape)


def _less_bias(module: Any, y: Tensor, dim: int) -> Tensor:
    if module.bias is None:
        return y
    bias = module.bias.detach().double()
    return y - (bias if dim == -1 else bias.view(-1, *[1] * (y.dim() - 2)))


def pseudo_inverse(weight: Tensor) -> Tensor:
    """By singular values; those as small as rounding errors count as 0."""
    W = weight.detach().double()
    return torch.linalg.pinv(W, rtol=10 * max(W.shape) * torch.finfo(W.dtype).eps)


def _leaky(module: Any, y: Tensor, shape: torch.Size) -> Tensor:
    slope = float(module.negative_slope)
    return y if slope == 0 else torch.where(y >= 0, y, y / slope)


_INVERSES: dict[Any, Callable[[Any, Tensor, torch.Size], Tensor]] = {
    nn.Linear: _linear,
    CONVOLUTIONS: _convolution,
    nn.LeakyReLU: _leaky,
    (nn.ReLU, nn.Identity, nn.modules.dropout._DropoutNd): lambda module, y, shape: y,
    (nn.Flatten, nn.Unflatten): lambda module, y, shape: y.reshape(len(y), *shape),
    POOLING: lambda module, y, shape: F.interpolate(y, size=list(shape[1:]), mode="nearest"),
    Unscale: lambda module, y, shape: (y - module.shift) / module.gain,
}
