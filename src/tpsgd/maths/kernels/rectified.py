"""ReLU, and ReLU with max pooling, that store less for the backward pass than torch's modules.

    max(relu(z)) = relu(max(z))

So before a pooling nothing of the size of z is stored: the largest value of each cell tells whether
ReLU let it pass, and its index where its derivative goes. torch would store relu(z), and indices of
eight bytes. A ReLU alone writes its output over its input, and in the backward pass the derivative
of its input over that of its output. Values and gradients are torch's, bit for bit.
"""

from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tpsgd.maths.kernels.memory_format import channels_last

# Neither their output nor the derivative of their input is read by anything else.
_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_FRESH = (*_LAYERS, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_POOLS = (nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d)
_VIEWS = (nn.Flatten, nn.Identity)

CHUNKS = 4  # of a batch, whose derivatives are scattered one after another
SMALL = 1 << 20  # bytes of a batch that is not worth dividing

Function = Callable[[Any], Any]


def chain(modules: Sequence[nn.Module], hooked: Callable[[nn.Module], bool]) -> list[Function]:
    """Functions that do what these modules do one after another, and store less.

    A ReLU is replaced where it follows a layer or a batch norm, whose output nothing else reads,
    and a module comes after it whose derivative is a tensor of its own, or none. A module that is
    `hooked` stays.

    Examples:
        >>> modules = [nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
        >>> len(chain(modules, lambda module: False))
        3
    """
    functions: list[Function] = []
    i = 0
    while i < len(modules):
        module = modules[i]
        after = next((m for m in modules[i + 1 :] if type(m) not in _VIEWS), None)
        plain = i > 0 and type(module) is nn.ReLU and type(modules[i - 1]) in _FRESH
        if not plain or any(map(hooked, modules[i - 1 : i + 2])):
            functions.append(module)
        elif after is not None and after is modules[i + 1] and _tiles(after):
            functions.append(partial(rectified_and_pooled, size=_pair(after.kernel_size)))
            i += 1
        elif after is None or type(after) in (*_FRESH, *_POOLS):
            functions.append(rectified)
        else:
            functions.append(module)
        i += 1
    return functions


def _pair(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else tuple(size)  # type: ignore[return-value]


def _tiles(pool: Any) -> bool:
    """Whether it is a max pooling whose cells do not overlap: a pixel belongs to one at most."""
    return (
        type(pool) is nn.MaxPool2d
        and _pair(pool.kernel_size) == _pair(pool.stride)
        and (_pair(pool.padding), _pair(pool.dilation)) == ((0, 0), (1, 1))
        and not (pool.return_indices or pool.ceil_mode)
    )


def rectified(z: Tensor) -> Tensor:
    """relu(z), in the memory of z."""
    return F.relu(z) if z._is_view() else _Rectified.apply(z)  # type: ignore[return-value]


def rectified_and_pooled(z: Tensor, size: tuple[int, int]) -> Tensor:
    """The largest value of relu(z) in every cell of this size."""
    if torch.is_grad_enabled() and z.requires_grad:
        return _RectifiedMax.apply(z, size)  # type: ignore[return-value]
    return tiled_max(z, size).relu_()


def tiled_max(y: Tensor, size: tuple[int, int]) -> Tensor:
    """The largest value in every cell of this size, without torch's indices of eight bytes.

    Examples:
        >>> tiled_max(torch.arange(16.0).view(1, 1, 4, 4), (2, 2))
        tensor([[[[ 5.,  7.],
                  [13., 15.]]]])
    """
    for dim, cell in zip((2, 3), size, strict=True):
        cells = y.narrow(dim, 0, y.shape[dim] // cell * cell).unflatten(dim, (-1, cell))
        y = reduce(torch.maximum, cells.unbind(dim + 1))
    return y


def without_indices(module: nn.Module, hooked: Callable[[nn.Module], bool]) -> Function:
    """A module, or a function for a max pooling through which no gradient goes."""
    if _tiles(module) and not hooked(module):
        return partial(tiled_max, size=_pair(module.kernel_size))  # type: ignore[arg-type]
    return module


class _Rectified(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:  # pyright: ignore
        y = z.relu_()
        ctx.mark_dirty(y)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:  # pyright: ignore
        (y,) = ctx.saved_tensors
        backward = torch.ops.aten.threshold_backward
        if dy.stride() != y.stride():
            return backward(dy, y, 0)
        return backward.grad_input(dy, y, 0, grad_input=dy)


class _RectifiedMax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, size: tuple[int, int]) -> Tensor:  # pyright: ignore
        y, index = F.max_pool2d_with_indices(z, size)
        y.relu_()
        ctx.save_for_backward(y, index.to(torch.int32))
        ctx.shape, ctx.channels_last = z.shape, channels_last(z)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:  # pyright: ignore
        shape, last = ctx.shape, ctx.channels_last
        layout = torch.channels_last if last else torch.contiguous_format
        dz = torch.empty(shape, dtype=dy.dtype, device=dy.device, memory_format=layout).zero_()
        count = CHUNKS if dz.nbytes > SMALL else 1
        chunks = zip(*(t.chunk(count) for t in (dz, dy, *ctx.saved_tensors)), strict=True)
        for dz_chunk, dy_chunk, y, index in chunks:  # scattering needs indices of eight bytes
            passed = torch.ops.aten.threshold_backward(dy_chunk, y, 0)
            into, *places = (_rows(t, last) for t in (dz_chunk, index.long(), passed))
            into.scatter_(1 if last else 2, *places)
        return dz, None


def _rows(maps: Tensor, channels_last: bool) -> Tensor:
    """Maps as (samples, pixels, channels) or (samples, channels, pixels): a view if they are so."""
    return maps.permute(0, 2, 3, 1).flatten(1, 2) if channels_last else maps.flatten(2)
