"""Random numbers that are the same everywhere: splitmix64, a counter-based hash.

A number is a pure function of a key and a counter, in 64-bit integer arithmetic. It does not depend
on the machine, the device, or which other numbers were drawn before.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15
SORTED = 1 << 12  # up to this number, samples are shuffled by sorting
ROUNDS = 3  # of the Feistel network that shuffles
MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


@dataclass(frozen=True)
class Key:
    """What a random draw depends on: the seed, the block and the time step (or epoch)."""

    seed: int = 0
    block: int = 0
    step: int = 0


def streams(key: Key, members: list[int], device: torch.device | str = "cpu") -> Tensor:
    """The start of each member's stream of numbers, a column `(members, 1)`."""
    return torch.tensor([[_signed(_chain(key, m))] for m in members], device=device)


def splitmix64(counter: Tensor, streams: Tensor) -> Tensor:
    """The hash of each stream at each counter: 64 bits in an int64."""
    z = counter * _signed(GOLDEN) + streams
    for shift, factor in zip((30, 27), MIX, strict=True):
        z ^= (z >> shift).bitwise_and_((1 << (64 - shift)) - 1)
        z *= _signed(factor)
    z ^= (z >> 31).bitwise_and_((1 << 33) - 1)
    return z


def permutation(n: int, key: Key, device: torch.device | str = "cpu") -> Iterator[Tensor]:
    """range(n) in an order that depends on the key, in pieces, in memory that does not grow with n.

    A small range is sorted by its hashes. For a larger one, a Feistel network permutes the counter:
    the two halves of its bits change each other in turn. It permutes the range to the next power of
    two, and numbers from n on are left out.

    Examples:
        >>> sorted(torch.cat(list(permutation(5, Key(seed=1)))).tolist())
        [0, 1, 2, 3, 4]
    """
    if n <= SORTED:
        yield splitmix64(torch.arange(n, device=device), streams(key, [-1], device)).argsort()[0]
        return
    for piece in mixed(n, key, device):
        yield piece[piece < n]


def mixed(n: int, key: Key, device: torch.device | str = "cpu") -> Iterator[Tensor]:
    """As `permutation`, of the range to the next power of two."""
    bits = max(2, (n - 1).bit_length())
    span = 1 << (12 if torch.device(device).type == "cpu" else 15)
    rounds = streams(key, list(range(-2 * ROUNDS, 0)), device)
    for start in range(0, 1 << bits, span):
        counter = torch.arange(start, min(start + span, 1 << bits), device=device)
        yield _feistel(counter, bits, rounds)


def _feistel(counter: Tensor, bits: int, rounds: Tensor) -> Tensor:
    low = bits // 2
    high = bits - low
    left, right = counter >> low, counter.bitwise_and((1 << low) - 1)
    for left_key, right_key in rounds.view(-1, 2, 1):
        left ^= splitmix64(right, left_key).bitwise_and_((1 << high) - 1)
        right ^= splitmix64(left, right_key).bitwise_and_((1 << low) - 1)
    return left.bitwise_left_shift_(low).bitwise_or_(right)


def shuffled(n: int, keys: list[Key], device: torch.device | str = "cpu") -> Tensor:
    """A permutation of range(n) for each key: (keys, n).

    Examples:
        >>> torch.equal(shuffled(5, [Key(7), Key(0)])[1:], shuffled(5, [Key(0)]))
        True
    """
    return torch.stack([torch.cat(list(permutation(n, key, device))) for key in keys])


def _chain(key: Key, member: int) -> int:
    state = 0
    for number in (key.seed, key.block, key.step, member):
        state = _splitmix((state ^ number) % 2**64)
    return state


def _splitmix(z: int) -> int:
    z = (z + GOLDEN) % 2**64
    z = ((z ^ (z >> 30)) * MIX[0]) % 2**64
    z = ((z ^ (z >> 27)) * MIX[1]) % 2**64
    return z ^ (z >> 31)


def _signed(z: int) -> int:
    return z - 2**64 if z >= 2**63 else z
