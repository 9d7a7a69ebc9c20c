"""Random numbers that are the same everywhere: splitmix64, a counter-based hash.

A number is a pure function of a key and a counter, in 64-bit integer arithmetic, so it does not
depend on the machine, the device, the order of asking or how many others were drawn.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15
MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


@dataclass(frozen=True)
class Key:
    """What a draw depends on: the run's seed, the block and the time step (or epoch)."""

    seed: int = 0
    block: int = 0
    step: int = 0


def streams(key: Key, members: list[int], device: torch.device | str = "cpu") -> Tensor:
    """Where each member's stream of numbers starts, a column: (members, 1)."""
    return torch.tensor([[_signed(_chain(key, m))] for m in members], device=device)


def splitmix64(counter: Tensor, streams: Tensor) -> Tensor:
    """The hash of each stream at each counter: 64 bits in an int64."""
    z = counter * _signed(GOLDEN) + streams
    for shift, factor in zip((30, 27), MIX, strict=True):
        z ^= (z >> shift).bitwise_and_((1 << (64 - shift)) - 1)
        z *= _signed(factor)
    z ^= (z >> 31).bitwise_and_((1 << 33) - 1)
    return z


def shuffled(n: int, keys: list[Key], device: torch.device | str = "cpu") -> Tensor:
    """A permutation of range(n) for each key: (keys, n).

    Examples:
        >>> shuffled(5, [Key(seed=0)]).tolist() == shuffled(5, [Key(seed=7), Key(seed=0)])[
        ...     1:
        ... ].tolist()
        True
    """
    starts = torch.cat([streams(key, [-1]) for key in keys]).to(device)
    return splitmix64(torch.arange(n, device=device), starts).argsort(dim=1, stable=True)


def _chain(key: Key, member: int) -> int:
    state = 0
    for part in (key.seed, key.block, key.step, member):
        state = _splitmix((state ^ part) % 2**64)
    return state


def _splitmix(z: int) -> int:
    z = (z + GOLDEN) % 2**64
    z = ((z ^ (z >> 30)) * MIX[0]) % 2**64
    z = ((z ^ (z >> 27)) * MIX[1]) % 2**64
    return z ^ (z >> 31)


def _signed(z: int) -> int:
    return z - 2**64 if z >= 2**63 else z
