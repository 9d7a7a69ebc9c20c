"""1 x 1 convolutions with a stride on a CPU: every s-th pixel first, then a stride of 1.

    z[i, j] = W x[s i, s j] + b

Values and gradients are equal, and so is the time. oneDNN's weight gradient of such a convolution
writes out of bounds where channels-last maps have fewer channels than a vector register holds (8
with AVX2, 16 with AVX-512; oneDNN issue 6035): the process ends, or the gradient is wrong.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tpsgd.maths.kernels.memory_format import channels_last


def skips_pixels(module: nn.Module) -> bool:
    """Whether a module is a convolution that reads one pixel in every s, and no zeros around them.

    Examples:
        >>> skips_pixels(nn.Conv2d(4, 8, 1, stride=2)), skips_pixels(nn.Conv2d(4, 8, 3, stride=2))
        (True, False)
    """
    return (
        isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d))
        and max(module.kernel_size) == 1 < max(module.stride)
        and (module.padding_mode != "zeros" or not any(_padding(module)))
    )


def unsafe_channels_last(module: nn.Module) -> bool:
    """Whether oneDNN's weight gradient is wrong for a module's channels-last maps, as it is."""
    return (
        isinstance(module, nn.ConvTranspose2d)
        and max(module.kernel_size) == 1 < max(module.stride)
        and any(module.output_padding)
    )


def _padding(layer: Any) -> tuple[int, ...]:
    return (0,) * len(layer.stride) if layer.padding == "valid" else layer.padding


def pixels_read(layer: Any, x: Tensor) -> Tensor:
    """The pixels that a convolution with `skips_pixels` reads, in x's memory format."""
    if any(pads := _padding(layer)):
        x = F.pad(x, [p for p in reversed(pads) for _ in range(2)], layer.padding_mode)
    layout = torch.channels_last if channels_last(x) else torch.contiguous_format
    steps = (slice(None, None, s) for s in layer.stride)
    return x[(..., *steps)].contiguous(memory_format=layout)


@contextmanager
def reading_pixels_first(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Let these convolutions, with `skips_pixels`, take a stride of 1 over the pixels they read."""
    layers: list[Any] = list(modules)
    for layer in layers:
        layer._conv_forward = partial(_convolve, layer)
    try:
        yield
    finally:
        for layer in layers:
            vars(layer).pop("_conv_forward", None)  # another thread may have been first


def _convolve(layer: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if x.is_cuda:
        return type(layer)._conv_forward(layer, x, weight, bias)
    convolve = (F.conv1d, F.conv2d, F.conv3d)
    return convolve[len(layer.stride) - 1](pixels_read(layer, x), weight, bias, groups=layer.groups)
