"""Random numbers of a training step: the same for the same seed, block, epoch and batch.

A *noise key* is a tensor of two int64: where the stream of the epoch starts, and the number of the
batch. An objective that holds one (`Site.noise`) is a pure function of its tensors and still draws
other numbers for every batch: the learner renews the key with every epoch and counts the batches.
"""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from tpsgd.maths.random import Key, splitmix64, streams
from tpsgd.projections import QUANTUM, make_tables, quantiles

BITS = 24  # of each number, as many as a float32 holds


def noise_key(key: Key, device: torch.device | str = "cpu") -> Tensor:
    """The noise key of a seed and a block, before the first epoch."""
    start = streams(key, [0], device).view(1)
    return torch.cat((start, torch.zeros_like(start)))


def renew(noise: Tensor, start: Tensor, epoch: int) -> None:
    """Let a noise key begin an epoch; `start` is the key as it was drawn."""
    counter = torch.full_like(start[0], epoch + 1)
    noise.copy_(torch.stack((splitmix64(counter, start[0]), torch.zeros_like(start[1]))))


def bits(noise: Tensor, shape: Sequence[int]) -> Tensor:
    """Whole numbers below 2^24, uniformly distributed."""
    stream = splitmix64(noise[1], noise[0])
    counter = torch.arange(prod(shape), device=noise.device)
    return (splitmix64(counter, stream) >> (64 - BITS)).bitwise_and_((1 << BITS) - 1).view(*shape)


def normal(noise: Tensor, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers of mean 0 and deviation 1, within 4 deviations."""
    fixed = quantiles(bits(noise, shape), make_tables().to(noise.device))
    return (fixed * QUANTUM).to(dtype)


def below(noise: Tensor, shape: Sequence[int], limit: int) -> Tensor:
    """Whole numbers from 0 to limit - 1."""
    return (bits(noise, shape) * limit) >> BITS
