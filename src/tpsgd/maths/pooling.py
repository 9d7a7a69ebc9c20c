"""Feature maps averaged over a grid of cells, and the derivative of that average."""

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tpsgd.maths.kernels.memory_format import full

_POOL = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)


def wide(t: Any) -> Any:
    """A small tensor in float32 instead of bfloat16, for the sake of its differences."""
    return t.to(torch.float32) if t.dtype is torch.bfloat16 else t


def grid_for(shape: tuple[int, ...], features: int) -> tuple[int, ...]:
    """The finest equal grid of cells over feature maps that keeps at most `features` numbers."""
    filters, *space = shape
    side = int(max(1, features // filters) ** (1 / len(space)) + 1e-9)
    return tuple(min(side, n) for n in space)


def equal_cells(space: tuple[int, ...], grid: tuple[int, ...]) -> bool:
    """Whether a picture's cells all have the same size, and no pixel is in two of them."""
    return len(space) == 2 and not any(n % g for n, g in zip(space, grid, strict=True))


def averages(y: Tensor, grid: tuple[int, ...]) -> Tensor:
    """Feature maps averaged over a grid of cells: maps of that size, or y itself if it has it."""
    space = tuple(y.shape[2:])
    return y if space == grid else _average(y, grid).view(*y.shape[:2], *grid)


def cells(y: Tensor, grid: tuple[int, ...]) -> Tensor:
    """Feature maps averaged over a grid of cells, flat."""
    return _average(y, grid).flatten(1)


def _average(y: Tensor, grid: tuple[int, ...]) -> Tensor:
    space = tuple(y.shape[2:])
    if prod(grid) == 1:
        return y.flatten(2).mean(2)
    if equal_cells(space, grid):  # faster than adaptive pooling, above all on a GPU
        return F.avg_pool2d(y, (space[0] // grid[0], space[1] // grid[1]))
    pool: Callable[..., Tensor] = _POOL[len(grid) - 1]
    return pool(y, grid)


def back_to_pixels(df: Tensor, y: Tensor, grid: tuple[int, ...]) -> Tensor:
    """The derivative of `cells`: each pixel gets its share of its cell's derivative."""
    filters, space = y.shape[1], y.shape[2:]
    cells = df.view(-1, filters, *grid)
    if equal_cells(tuple(space), grid):
        return cells.mul_(prod(grid) / prod(space))  # one number per cell, see `spread`
    if prod(grid) == 1:
        return cells.div(prod(space)).expand(y.shape)
    if len(space) == 1:
        cells, y = cells[:, :, None], y[:, :, None]
        return torch.ops.aten._adaptive_avg_pool2d_backward(cells, y)[:, :, 0]
    if not y.is_contiguous():
        cells = cells.contiguous(memory_format=torch.channels_last)
    if len(space) == 3:
        return torch.ops.aten._adaptive_avg_pool3d_backward(cells, y)
    return torch.ops.aten._adaptive_avg_pool2d_backward(cells, y)


def pixel_codes(P: Tensor, shape: tuple[int, ...], grid: tuple[int, ...]) -> Tensor:
    """Codes of cells as codes of pixels: the same inner products with maps, without averaging.

    Examples:
        >>> y, P = torch.rand(2, 3, 4, 4), torch.rand(5, 3 * 2 * 2)
        >>> pixels = pixel_codes(P, (3, 4, 4), (2, 2))
        >>> torch.allclose(y.flatten(1) @ pixels.flatten(1).T, cells(y, (2, 2)) @ P.T)
        True
    """
    y = P.new_empty(len(P), *shape)
    return full(back_to_pixels(P.clone(), y, grid), y).contiguous()
