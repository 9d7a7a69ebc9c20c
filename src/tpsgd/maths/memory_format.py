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


def like(x: Tensor, samples: int) -> Tensor:
    """Room for so many samples, laid out as these."""
    layout = torch.channels_last if channels_last(x) else torch.contiguous_format
    shape = (samples, *x.shape[1:])
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=layout)


def rows(x: Tensor, index: Tensor) -> Tensor:
    """x[index] for a vector of indices, in x's own layout; whole rows are copied at once."""
    if channels_last(x):
        return rows(x.permute(0, 2, 3, 1), index).permute(0, 3, 1, 2)
    try:
        flat = x.view(len(x), -1)
    except RuntimeError:  # no view has whole rows: flattening would copy the whole array
        return x[index]
    return flat.index_select(0, index).view(-1, *x.shape[1:])


def sum_of_rows(x: Tensor) -> Tensor:
    """The sum over the last dimension but one, as a product: a GPU's own sum takes twice x."""
    return x.new_ones(x.shape[-2]) @ x


def bands(x: Tensor, down: int) -> Tensor:
    """Feature maps as a view cut into this many bands of rows; a row stays in one piece."""
    if channels_last(x):
        n, filters, height, width = x.shape
        return x.permute(0, 2, 3, 1).view(n, down, height // down, width * filters)
    n, filters, height, width = x.shape
    return x.view(n, filters, down, height // down, width)


def spread(coarse: Tensor, like: Tensor) -> Tensor:
    """One number per cell, repeated for each pixel: shaped as `bands(like)`.

    Repeated for real along a row, which is little, and as a view down the rows, so that what is
    computed from it runs over whole rows at a time.
    """
    n, filters, down, across = coarse.shape
    repeat = like.shape[3] // across
    if channels_last(like):
        row = coarse.permute(0, 2, 3, 1).unsqueeze(3).expand(n, down, across, repeat, filters)
        row = row.reshape(n, down, 1, across * repeat * filters)
    else:
        row = coarse.repeat_interleave(repeat, 3).unsqueeze(3)
    return row.expand_as(bands(like, down))


def full(dy: Tensor, y: Tensor) -> Tensor:
    """A derivative in y's own shape, whether it came so or as one number per cell."""
    if dy.shape == y.shape or dy.dim() != 4:
        return dy
    filled = torch.empty_like(y)
    bands(filled, dy.shape[2]).copy_(spread(dy, y))
    return filled
