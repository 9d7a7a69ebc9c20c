"""Where to cut a model into blocks of several layers.

While a block learns, autograd stores what its layers need for their gradients, and frees it before
the next block computes. So the block that stores most sets the peak memory, and a cut is better the
less that block stores. In a convolutional net that is the first one, with the largest maps.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from tpsgd.common.errors import TpsgdError

Blocks = int | Sequence[int]  # how many blocks, or how many layers each of them has
TIE = 1.1  # peaks that differ by less than this factor count as equal


@dataclass(frozen=True)
class Footprint:
    """What one layer stores for its gradients: bytes by storage, and bytes of its largest map.

    In `closed_form` a layer that is a block by itself has no derivative with respect to its input.
    """

    stored: dict[int, int]
    largest: int
    closed_form: bool = False


def layers_per_block(
    blocks: Blocks | str,
    layers: int,
    alone: Sequence[int] = (),
    footprints: Sequence[Footprint] = (),
    incomplete: Sequence[int] = (),
) -> list[int]:
    """How many of a model's layers each block has.

    Args:
        blocks: the number of layers in each block, or the number of blocks: the cut then makes the
            peak memory of the largest block smallest, and among cuts that are about equal in this,
            the blocks' numbers of layers most alike.
        layers: how many layers there are.
        alone: the numbers of layers (from 0) that must be a block each.
        footprints: what each layer stores; without them only the numbers of layers count.
        incomplete: the numbers of layers that no block ends with, unless it is in a list.

    Examples:
        >>> layers_per_block(3, 10)
        [3, 3, 4]
        >>> sizes = [800, 700, 200, 100, 100]
        >>> layers_per_block(2, 5, (), [Footprint({i: n}, n) for i, n in enumerate(sizes)])
        [1, 4]
    """
    in_list = isinstance(blocks, (list, tuple))
    numbers: list[Any] = list(blocks) if in_list else [blocks]
    whole = bool(numbers) and all(type(n) is int and n > 0 for n in numbers)
    most = layers - len(incomplete)
    if whole and in_list and sum(numbers) != layers:
        raise TpsgdError(f"blocks={blocks} adds up to {sum(numbers)}, not to the {layers} layers")
    if not whole or not (in_list or numbers[0] <= most):
        raise TpsgdError(
            f"blocks must be a number from 1 to {most}, 'auto', 'layers', or a list of how many "
            f"layers each block has, 1 or more, {layers} in all; got {blocks!r}"
        )
    counts = numbers
    if not in_list:
        counts = _lowest_cut(numbers[0], layers, alone, footprints, incomplete)
    for start, end in pairwise(accumulate(counts, initial=0)):
        if _mixed(start, end, alone):
            raise TpsgdError(
                f"blocks={blocks} puts a recurrent layer or a frozen backbone into a block with "
                "others, where no gradient could pass it: it needs a block of its own, so ask for "
                "more blocks"
            )
    return counts


def _mixed(start: int, end: int, alone: Sequence[int]) -> bool:
    """Whether a block has several layers, and one of them must be alone."""
    return end - start > 1 and any(start <= i < end for i in alone)


def _lowest_cut(
    blocks: int,
    layers: int,
    alone: Sequence[int],
    footprints: Sequence[Footprint],
    incomplete: Sequence[int],
) -> list[int]:
    """The cut with the lowest peak, and of these the most even."""
    peaks = _peaks(footprints)

    def peak(start: int, end: int) -> float:
        if _mixed(start, end, alone) or end - 1 in incomplete:
            return math.inf
        return peaks[start][end - start - 1] if peaks else 0.0

    lowest, _ = cheapest_cut(layers, blocks, peak, max)

    def unevenness(start: int, end: int) -> float:
        return (end - start) ** 2 if peak(start, end) <= TIE * lowest else math.inf

    return list(cheapest_cut(layers, blocks, unevenness, lambda a, b: a + b)[1])


def _peaks(footprints: Sequence[Footprint]) -> list[list[float]]:
    """The peak of a block from each layer on, by the number of layers after it.

    In the backward pass a layer finds what it and those before it have stored, and two maps: the
    derivatives with respect to its output and its input.
    """
    peaks: list[list[float]] = []
    for start in range(len(footprints)):
        stored: dict[int, int] = {}
        peaks.append([])
        highest = 0
        for i, layer in enumerate(footprints[start:]):
            stored |= layer.stored
            peak = sum(stored.values()) + 2 * layer.largest
            highest = max(highest, peak)
            peaks[-1].append(peak - layer.largest if i == 0 and layer.closed_form else highest)
    return peaks


def cheapest_cut(
    layers: int,
    blocks: int,
    cost: Callable[[int, int], float],
    total: Callable[[float, float], float],
) -> tuple[float, tuple[int, ...]]:
    """The cheapest cut and its numbers of layers; of equal ones, that with small blocks first."""
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}  # by the layers that are cut
    for _ in range(blocks):
        longer = {}
        for end in range(1, layers + 1):
            cuts = [
                (total(before, cost(start, end)), (*counts, end - start))
                for start, (before, counts) in best.items()
                if start < end
            ]
            if cuts:
                longer[end] = min(cuts)
        best = longer
    return best[layers]
