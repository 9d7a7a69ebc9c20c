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
AT_A_TIME = 1 << 19  # numbers that are shuffled together
MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


@dataclass(frozen=True)
class Key:
    """What a random draw depends on: the seed, the block and the time step (or epoch)."""

    seed: int = 0
    block: int = 0
    step: int = 0


def streams(key: Key, members: list[int], device: torch.device | str = "cpu") -> Tensor:
    """The start of each member's stream of numbers, a column `(members, 1)`."""
    return _streams([(key, member) for member in members], device)


def _streams(members: list[tuple[Key, int]], device: torch.device | str) -> Tensor:
    return torch.tensor([[_signed(_chain(key, m))] for key, m in members], device=device)


def streams_of(key: Key, members: Tensor) -> Tensor:
    """As `streams`, for members in a tensor of any shape, on its device."""
    state = _signed(_chain(key))
    return splitmix64(members.new_ones(()), members ^ state)


def splitmix64(counter: Tensor, streams: Tensor) -> Tensor:
    """The hash of each stream at each counter: 64 bits in an int64."""
    z = counter * _signed(GOLDEN) + streams
    for shift, factor in zip((30, 27), MIX, strict=True):
        z ^= (z >> shift).bitwise_and_((1 << (64 - shift)) - 1)
        z *= _signed(factor)
    z ^= (z >> 31).bitwise_and_((1 << 33) - 1)
    return z


def permutation(n: int, key: Key, device: torch.device | str = "cpu") -> Iterator[Tensor]:
    """range(n) in an order that depends on the key, in pieces that do not grow with n.

    A small range is sorted by its hashes. For a larger one, a Feistel network permutes the counter:
    the two halves of its bits change each other in turn. It permutes the range to the next power of
    two, and numbers from n on are left out.

    Examples:
        >>> sorted(torch.cat(list(permutation(5, Key(seed=1)))).tolist())
        [0, 1, 2, 3, 4]
    """
    if n <= SORTED:
        yield shuffled(n, [key], device)[0]
        return
    for piece in mixed(n, key, device):
        yield piece[piece < n]


def mixed(n: int, key: Key, device: torch.device | str = "cpu") -> Iterator[Tensor]:
    """As `permutation`, of the range to the next power of two."""
    span = 1 << (12 if torch.device(device).type == "cpu" else 15)
    bits, tables = _feistel_tables(n, [key], device)
    for start in range(0, 1 << bits, span):
        yield _feistel(range(start, min(start + span, 1 << bits)), bits, tables)[0]


def shuffled(n: int, keys: list[Key], device: torch.device | str = "cpu") -> Tensor:
    """A permutation of range(n) for each key: (keys, n).

    Examples:
        >>> torch.equal(shuffled(5, [Key(7), Key(0)])[1:], shuffled(5, [Key(0)]))
        True
    """
    if n <= SORTED:
        starts = _streams([(key, -1) for key in keys], device)
        return splitmix64(torch.arange(n, device=device), starts).argsort()
    bits, tables = _feistel_tables(n, keys, device)
    order = torch.empty(len(keys), 1 << bits, dtype=torch.long, device=device)
    span = max(1 << 12, AT_A_TIME // len(keys))
    for start in range(0, 1 << bits, span):
        piece = range(start, min(start + span, 1 << bits))
        order[:, piece.start : piece.stop] = _feistel(piece, bits, tables)
    return order[order < n].view(len(keys), n)  # each row has as many numbers below n


def _feistel_tables(
    n: int, keys: list[Key], device: torch.device | str
) -> tuple[int, list[Tensor]]:
    """The bits of a counter up to n, and what half of its bits add to the other, in each round.

    A half has few values, so that all of them are hashed beforehand: (keys, values) each.
    """
    bits = max(2, (n - 1).bit_length())
    low = bits // 2
    rounds = [(key, member) for member in range(-2 * ROUNDS, 0) for key in keys]
    hashes = splitmix64(torch.arange(1 << (bits - low), device=device), _streams(rounds, device))
    tables = hashes.view(2 * ROUNDS, len(keys), -1)
    tables[::2].bitwise_and_((1 << (bits - low)) - 1)
    tables[1::2].bitwise_and_((1 << low) - 1)
    return bits, list(tables)


def _feistel(counters: range, bits: int, tables: list[Tensor]) -> Tensor:
    """Counters after the rounds of a Feistel network, for each key: (keys, counters)."""
    low = bits // 2
    counter = torch.arange(counters.start, counters.stop, device=tables[0].device)
    counter = counter.expand(len(tables[0]), -1)
    left, right = counter >> low, counter.bitwise_and((1 << low) - 1)
    for left_table, right_table in zip(tables[::2], tables[1::2], strict=True):
        left ^= left_table.gather(1, right)
        right ^= right_table.gather(1, left)
    return left.bitwise_left_shift_(low).bitwise_or_(right)


def _chain(key: Key, *member: int) -> int:
    state = 0
    for number in (key.seed, key.block, key.step, *member):
        state = _splitmix((state ^ number) % 2**64)
    return state


def _splitmix(z: int) -> int:
    z = (z + GOLDEN) % 2**64
    z = ((z ^ (z >> 30)) * MIX[0]) % 2**64
    z = ((z ^ (z >> 27)) * MIX[1]) % 2**64
    return z ^ (z >> 31)


def _signed(z: int) -> int:
    return z - 2**64 if z >= 2**63 else z
