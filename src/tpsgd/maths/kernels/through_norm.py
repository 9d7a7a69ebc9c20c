"""A batch norm's derivative written over that of its output, on a GPU.

torch's kernel for both allocates feature maps once more. Its two parts, which are public for norms
over several processes, are a sum over the batch and a function of each number.
"""

from typing import Any

import torch
from torch import Tensor

LARGE = 16 << 20  # bytes of feature maps whose copy is worth avoiding
CHUNKS = 8  # of a batch


def suits(dz: Tensor, x: Tensor) -> bool:
    """Whether the derivative is large, on a GPU, and lies in memory as the norm's input does."""
    on_gpu = type(dz) is Tensor and dz.is_cuda and dz.nbytes >= LARGE
    return on_gpu and dz.stride() == x.stride() and dz.dtype is x.dtype


def in_place(dz: Tensor, x: Tensor, weight: Any, mean: Tensor, inverse_std: Tensor) -> Any:
    """The derivatives with respect to x, in the memory of dz, to the weight and to the bias."""
    weight = torch.ones_like(mean) if weight is None else weight
    total, product, dweight, dbias = torch.batch_norm_backward_reduce(
        dz, x, mean, inverse_std, weight, True, True, True
    )
    count = torch.full((1,), x.numel() // x.shape[1], dtype=torch.int32, device=x.device)
    numbers = mean, inverse_std, weight, total, product, count
    for derivative, inputs in zip(dz.chunk(CHUNKS), x.chunk(CHUNKS), strict=True):
        derivative.copy_(torch.batch_norm_backward_elemt(derivative, inputs, *numbers))
    return dz, dweight, dbias
