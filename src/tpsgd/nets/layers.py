"""The layers whose gradients are written out: one record for each kind, in one table by type.

    z = x W + b,   dW = x^T dz,   db = sum dz

Blocks, closed forms, least squares, slices and stacked restarts read this table; none of them names
a layer type. To train another kind in closed form (Conv3d, an attention projection), add its entry
to `LAYERS` and hold it equal to autograd in `tests/nets/test_layers.py`.

A 1 x 1 convolution with a stride s, z[i, j] = W x[s i, s j] + b, reads its pixels first on a CPU,
and then has a stride of 1: values, gradients and time are equal. oneDNN's weight gradient of such a
convolution writes out of bounds where channels-last maps have fewer channels than a vector register
holds (8 with AVX2, 16 with AVX-512; oneDNN issue 6035): the process ends, or the gradient is wrong.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tpsgd.maths.kernels.memory_format import channels_last, sum_of_rows

FEW_OUTPUTS = 17  # of a linear layer on a CPU; and of a batch that is larger
COLUMNS = 1 << 18  # bytes of columns up to which multiplying them is faster than convolving


def _always(layer: Any) -> bool:
    return True


@dataclass(frozen=True)
class LayerKind:
    """What training needs to know about one kind of layer.

    Its functions get the module for its settings (stride, padding) and the tensors separately,
    because the weights may be a slice, a stack of restarts or rounded to a lower precision.

    Args:
        forward: `(layer, x, weight, bias) -> z`.
        weight_gradient: `(layer, x, dz, weight, rows) -> dW`, of these rows of the weight, or of
            all with `rows=None`.
        bias_gradient: `dz -> db`.
        equations: `(layer, x) -> ` what the weights are multiplied with, `(..., rows, inputs)`; a
            sample has one row, or one for each pixel of a feature map. None: least squares cannot
            solve for the weights.
        maps: the output is feature maps, channels first.
        stackable: `torch.vmap` can stack the functions over restarts.
        supports: `layer -> ` whether these functions hold for its settings.
        dense: `layer -> ` whether every output reads all inputs (a convolution without groups). If
            so, rows of the weight have separate gradients and are solutions of linear equations.
        with_relu: as `forward`, with a ReLU after it, in one kernel of a GPU.
    """

    forward: Callable[[Any, Tensor, Tensor, Tensor | None], Tensor]
    weight_gradient: Callable[[Any, Tensor, Tensor, Tensor, slice | None], Tensor]
    bias_gradient: Callable[[Tensor], Tensor]
    equations: Callable[[Any, Tensor], Tensor] | None = None
    maps: bool = False
    stackable: bool = False
    supports: Callable[[Any], bool] = _always
    dense: Callable[[Any], bool] = _always
    with_relu: Callable[[Any, Tensor, Tensor, Tensor | None], Tensor] | None = None


def layer_kind(layer: nn.Module) -> LayerKind | None:
    """The record of a layer, if its exact type has one that holds for its settings.

    Examples:
        >>> layer_kind(nn.Conv2d(1, 8, 3)).maps
        True
        >>> layer_kind(nn.Conv2d(1, 8, 3, padding=1, padding_mode="circular")) is None
        True
    """
    kind = LAYERS.get(type(layer))
    return kind if kind is not None and kind.supports(layer) else None


def gives_maps(layer: nn.Module) -> bool:
    """Whether an output with space is feature maps: where there are convolutions, no attention."""
    known = next((kind.maps for type_, kind in LAYERS.items() if isinstance(layer, type_)), None)
    if known is not None:
        return known
    modules = list(layer.modules())
    attention = any(isinstance(m, nn.MultiheadAttention) for m in modules)
    return not attention and any(isinstance(m, nn.modules.conv._ConvNd) for m in modules)


def ends_in_maps(model: nn.Module) -> bool:
    """Whether a model's last layer is a convolution, so that its outputs come channels first."""
    weighted = [m for m in model.modules() if getattr(m, "weight", None) is not None]
    layers = [m for m in weighted if isinstance(m.weight, Tensor) and m.weight.dim() > 1]
    return bool(layers) and isinstance(layers[-1], nn.modules.conv._ConvNd)


def zero_padding(layer: Any) -> list[int] | None:
    """Zeros on either side of each dimension; None for padding of another kind."""
    if layer.padding_mode != "zeros":
        return None
    if layer.padding == "valid":
        return [0] * len(layer.kernel_size)
    if layer.padding == "same":
        total = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
        return None if any(t % 2 for t in total) else [t // 2 for t in total]
    return list(layer.padding)


def skips_pixels(module: nn.Module) -> bool:
    """Whether a module is a convolution that reads one pixel in every s, and no zeros around them.

    Examples:
        >>> skips_pixels(nn.Conv2d(4, 8, 1, stride=2)), skips_pixels(nn.Conv2d(4, 8, 3, stride=2))
        (True, False)
    """
    return (
        isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d))
        and max(module.kernel_size) == 1 < max(module.stride)
        and (module.padding_mode != "zeros" or not any(zero_padding(module) or ()))
    )


def unsafe_channels_last(module: nn.Module) -> bool:
    """Whether oneDNN's weight gradient is wrong for a module's channels-last maps, as it is."""
    return (
        isinstance(module, nn.ConvTranspose2d)
        and max(module.kernel_size) == 1 < max(module.stride)
        and any(module.output_padding)
    )


def pixels_read(layer: Any, x: Tensor) -> Tensor:
    """The pixels that a convolution with `skips_pixels` reads, in x's memory format."""
    if layer.padding_mode != "zeros":
        x = F.pad(x, layer._reversed_padding_repeated_twice, layer.padding_mode)
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


def _linear_weight_gradient(
    layer: Any, x: Tensor, dz: Tensor, weight: Tensor, rows: slice | None
) -> Tensor:
    x, dz = x.reshape(-1, x.shape[-1]), dz.reshape(-1, dz.shape[-1])
    return (dz if rows is None else dz[:, rows]).T @ x


def convolution(
    convolve: Callable[..., Tensor], equations: Callable[[Any, Tensor], Tensor] | None = None
) -> LayerKind:
    """The record of a convolution in any number of dimensions."""

    def forward(layer: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        pads = zero_padding(layer)
        return convolve(x, weight, bias, layer.stride, pads, layer.dilation, layer.groups)

    return LayerKind(
        forward,
        _convolution_weight_gradient,
        _sum_per_filter,
        equations=equations,
        maps=True,
        supports=lambda layer: zero_padding(layer) is not None,
        dense=lambda layer: layer.groups == 1,
    )


def _convolution_weight_gradient(
    layer: Any, x: Tensor, dz: Tensor, weight: Tensor, rows: slice | None
) -> Tensor:
    dz, weight = (dz, weight) if rows is None else (dz[:, rows], weight[rows])
    stride = layer.stride
    if skips_pixels(layer) and not x.is_cuda:
        x, stride = pixels_read(layer, x), [1] * len(stride)
    how = (stride, zero_padding(layer), layer.dilation, False, [0] * len(stride))
    _, dw, _ = torch.ops.aten.convolution_backward(
        dz, x, weight.to(x.dtype), None, *how, layer.groups, (False, True, False)
    )
    return dw


def _sum_per_filter(dz: Tensor) -> Tensor:
    """The sum over samples and pixels; of channels-last maps on a GPU as a product."""
    if dz.is_cuda and channels_last(dz):
        return sum_of_rows(dz.permute(0, 2, 3, 1).reshape(-1, dz.shape[1]))
    return dz.sum((0, *range(2, dz.dim())))


def _patches_1d(layer: Any, x: Tensor) -> Tensor:
    """As `_patches_2d`, of images with one row."""
    pads = zero_padding(layer) or [0]
    kernel, stride, dilation = (
        (1, v[0]) for v in (layer.kernel_size, layer.stride, layer.dilation)
    )
    return F.unfold(x.unsqueeze(2), kernel, dilation, (0, pads[0]), stride).mT


def _patches_2d(layer: Any, x: Tensor) -> Tensor:
    """The patch that the kernel reads at each pixel (im2col)."""
    pads = tuple(zero_padding(layer) or [0, 0])
    return F.unfold(x, layer.kernel_size, layer.dilation, pads, layer.stride).mT


def _by_columns(kind: LayerKind) -> LayerKind:
    """The record of Conv2d with products of matrices in place of a few small convolutions."""

    def forward(layer: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not _columns_are_faster(layer, x):
            return kind.forward(layer, x, weight, bias)
        columns, w = _columns(layer, x).T, weight.flatten(1).T
        z = columns @ w if bias is None else torch.addmm(bias, columns, w)
        return z.view(len(x), *_size_of_output(layer, x), -1).permute(0, 3, 1, 2)

    def weight_gradient(
        layer: Any, x: Tensor, dz: Tensor, weight: Tensor, rows: slice | None
    ) -> Tensor:
        if not _columns_are_faster(layer, x):
            return kind.weight_gradient(layer, x, dz, weight, rows)
        weight, dz = (weight, dz) if rows is None else (weight[rows], dz[:, rows])
        dz = dz.permute(0, 2, 3, 1).reshape(-1, len(weight))
        return (_columns(layer, x) @ dz).T.reshape(weight.shape).contiguous()

    return replace(kind, forward=forward, weight_gradient=weight_gradient)


def _columns_are_faster(layer: Any, x: Tensor) -> bool:
    """Whether a CPU multiplies matrices faster than it convolves: small maps of one channel.

    The matrix of columns is then no larger than the output. It is made twice, so that no memory is
    taken in between. Channels-first maps and lower precisions are left to the convolution.
    """
    weights = prod(layer.kernel_size)
    if layer.in_channels > 1 or weights > layer.out_channels or x.device.type != "cpu":
        return False
    last = x.stride(1) == 1 and x.is_contiguous(memory_format=torch.channels_last)
    if not last or x.dtype not in (torch.float32, torch.float64):
        return False
    return len(x) * prod(_size_of_output(layer, x)) * weights * x.itemsize <= COLUMNS


def _columns(layer: Any, x: Tensor) -> Tensor:
    """The pixels that each weight of a kernel on one channel meets, (weights, samples x pixels)."""
    size, (down, across) = _size_of_output(layer, x), zero_padding(layer) or (0, 0)
    if down or across:
        x = F.pad(x, (across, across, down, down))
    sample, _, *pixel = x.stride()
    apart = [p * d for p, d in zip(pixel, layer.dilation, strict=True)]
    steps = [p * s for p, s in zip(pixel, layer.stride, strict=True)]
    shape = (*layer.kernel_size, len(x), *size)
    return x.as_strided(shape, (*apart, sample, *steps)).reshape(prod(layer.kernel_size), -1)


def _size_of_output(layer: Any, x: Tensor) -> list[int]:
    settings = zip(layer.kernel_size, layer.dilation, layer.stride, strict=True)
    sizes = zip(x.shape[2:], zero_padding(layer) or (0, 0), settings, strict=True)
    return [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, p, (k, d, s) in sizes]


def _convolution_with_relu(layer: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """cuDNN adds the bias and applies the ReLU while it writes the result."""
    pads = zero_padding(layer) or (0, 0)
    how = layer.stride, pads, layer.dilation, layer.groups
    return torch.cudnn_convolution_relu(x, weight, bias, *how)


def _linear(layer: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + b; of few outputs on a CPU as W x^T + b, which is faster, and then a view."""
    few = x.dim() == 2 and len(weight) < FEW_OUTPUTS < len(x) and x.device.type == "cpu"
    if few and bias is not None and x.dtype in (torch.float32, torch.float64):
        return torch.addmm(bias[:, None], weight, x.T).T
    return F.linear(x, weight, bias)


LAYERS: dict[type[nn.Module], LayerKind] = {
    nn.Linear: LayerKind(
        _linear,
        _linear_weight_gradient,
        lambda dz: sum_of_rows(dz.reshape(-1, dz.shape[-1])),
        equations=lambda layer, x: x,
        stackable=True,
    ),
    nn.Conv1d: convolution(F.conv1d, _patches_1d),
    nn.Conv2d: replace(
        _by_columns(convolution(F.conv2d, _patches_2d)), with_relu=_convolution_with_relu
    ),
}
