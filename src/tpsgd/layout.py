"""Rows of an array, taken without changing how it lies in memory.

Convolutions on a CPU are fastest with the channels last, so feature maps and their projections are
kept that way; plain indexing would bring them back to channels first.
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
    return x.flatten(1).index_select(0, index).view(-1, *x.shape[1:])
