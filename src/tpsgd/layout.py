"""How feature maps lie in memory, and how to take parts of them without moving the rest.

Convolutions on a CPU are fastest with the channels last, so feature maps and their projections are
kept that way; plain indexing would bring them back to channels first. A derivative that is the same
for all pixels of a cell is kept as one number per cell and only spread where it is used.
"""

import torch
from torch import Tensor


def channels_last(x: Tensor) -> bool:
    """Whether a batch of feature maps has its channels last in memory, and only so."""
    return (
        x.dim() == 4
        and not x.is_contiguous()
        and x.is_contiguous(memory_format=torch.channels_last)
    )


def rows(x: Tensor, index: Tensor) -> Tensor:
    """x[index] for a vector of indices, in x's own layout; whole rows are copied at once."""
    if channels_last(x):
        return rows(x.permute(0, 2, 3, 1), index).permute(0, 3, 1, 2)
    try:
        flat = x.view(len(x), -1)
    except RuntimeError:  # no view has whole rows: flattening would copy the whole array
        return x[index]
    return flat.index_select(0, index).view(-1, *x.shape[1:])


def cells(x: Tensor, grid: tuple[int, int]) -> Tensor:
    """Feature maps as a view with a dimension for cells and one for pixels, down and across."""
    down, across = grid
    if channels_last(x):
        x = x.permute(0, 2, 3, 1)
        n, height, width, filters = x.shape
        return x.view(n, down, height // down, across, width // across, filters)
    n, filters, height, width = x.shape
    return x.view(n, filters, down, height // down, across, width // across)


def spread(coarse: Tensor, like: Tensor) -> Tensor:
    """One number per cell as a view that repeats it for each pixel, shaped as `cells(like)`."""
    grid = coarse.shape[2], coarse.shape[3]
    if channels_last(like):
        coarse = coarse.permute(0, 2, 3, 1)[:, :, None, :, None]
    else:
        coarse = coarse[:, :, :, None, :, None]
    return coarse.expand(cells(like, grid).shape)


def full(dy: Tensor, y: Tensor) -> Tensor:
    """A derivative in y's own shape, whether it came so or as one number per cell."""
    if dy.shape == y.shape or dy.dim() != 4:
        return dy
    filled = torch.empty_like(y)
    cells(filled, (dy.shape[2], dy.shape[3])).copy_(spread(dy, y))
    return filled
