"""The memory format of feature maps, and operations that preserve it.

Convolutions on a CPU are fastest in channels-last format, so feature maps and their projections are
stored that way; plain indexing would turn them into channels-first. A derivative that is the same
for all pixels of a cell is stored as one number per cell and expanded where it is used.
"""

import torch
from torch import Tensor

SMALL = 1 << 20  # bytes


def channels_last(x: Tensor) -> bool:
    """Whether a batch of feature maps is in channels-last format and not also contiguous."""
    return (
        x.dim() == 4
        and not x.is_contiguous()
        and x.is_contiguous(memory_format=torch.channels_last)
    )


def like(x: Tensor, samples: int) -> Tensor:
    """An empty batch of this number of samples, in x's memory format."""
    layout = torch.channels_last if channels_last(x) else torch.contiguous_format
    shape = (samples, *x.shape[1:])
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=layout)


def rows(x: Tensor, index: Tensor) -> Tensor:
    """x[index] for a vector of indices, in x's memory format; rows are copied as a whole."""
    if channels_last(x):
        return rows(x.permute(0, 2, 3, 1), index).permute(0, 3, 1, 2)
    try:
        flat = x.view(len(x), -1)
    except RuntimeError:  # flattening would copy the whole array
        return x[index]
    return flat.index_select(0, index).view(-1, *x.shape[1:])


def flat(x: Tensor, like: Tensor) -> Tensor:
    """Samples as rows of numbers, in the order that feature maps have in the memory of `like`."""
    return (x.permute(0, 2, 3, 1) if channels_last(like) else x).flatten(1)


def unflat(x: Tensor, like: Tensor) -> Tensor:
    """Rows in that order as samples in the shape of `like`, in its memory format."""
    if not channels_last(like):
        return x.view(-1, *like.shape[1:])
    _, filters, height, width = like.shape
    return x.view(-1, height, width, filters).permute(0, 3, 1, 2)


def sum_of_rows(x: Tensor) -> Tensor:
    """The sum over the last dimension but one.

    On a GPU it is a product where x is large, because a sum allocates x again.
    """
    if x.device.type == "cpu" or x.nbytes < SMALL:
        return x.sum(-2)
    return x.new_ones(x.shape[-2]) @ x


def bands(x: Tensor, down: int) -> Tensor:
    """A view of feature maps with their rows grouped into this many bands."""
    n, filters, height, width = x.shape
    if channels_last(x):
        return x.permute(0, 2, 3, 1).view(n, down, height // down, width * filters)
    return x.view(n, filters, down, height // down, width)


def spread(coarse: Tensor, like: Tensor) -> Tensor:
    """One number per cell, repeated for each pixel, in the shape of `bands(like)`.

    Copied along a row, which is small, and expanded as a view over the rows of a band.
    """
    n, filters, down, across = coarse.shape
    repeat = like.shape[3] // across
    if channels_last(like):
        few = coarse.contiguous(memory_format=torch.channels_last)  # so that many are copied faster
        row = few.permute(0, 2, 3, 1).unsqueeze(3).expand(n, down, across, repeat, filters)
        row = row.reshape(n, down, 1, across * repeat * filters)
    else:
        row = coarse.repeat_interleave(repeat, 3).unsqueeze(3)
    return row.expand_as(bands(like, down))


def full(dy: Tensor, y: Tensor) -> Tensor:
    """A derivative in the shape of y, from the same shape or from one number per cell."""
    if dy.shape == y.shape or dy.dim() != 4:
        return dy
    filled = torch.empty_like(y)
    pixels, values = bands(filled, dy.shape[2]), spread(dy.to(y.dtype), y)
    if _in_fours(pixels) and _in_fours(values):  # a quarter of the time
        pixels, values = pixels.view(torch.int64), values.view(torch.int64)
    pixels.copy_(values)
    return filled


def _in_fours(x: Tensor) -> bool:
    """Whether numbers of two bytes lie so in memory that they can be copied four at a time."""
    places = x.storage_offset(), x.shape[-1], *x.stride()[:-1]
    return x.element_size() == 2 and x.stride(-1) == 1 and not any(n % 4 for n in places)
