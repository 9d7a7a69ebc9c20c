"""Choosing samples: with a seed, keeping the share of each class, without copying the samples."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from tpsgd.common.errors import TpsgdError
from tpsgd.data.dataset import Array


@dataclass(frozen=True)
class Subset:
    """Some of the stored samples `x`: the indices of their rows (None for all), and their labels.

    No sample is copied before `take`, so that `x` may be a mapped file larger than memory.
    """

    x: Any
    y: Array
    rows: Array | None = None

    @property
    def labels(self) -> Array:
        """Numbers as float32, classes as int64."""
        return self.y.astype(np.float32 if self.y.dtype.kind == "f" else np.int64, copy=False)

    def keep(self, mask: Array) -> "Subset":
        """The samples for which the mask is true."""
        rows = np.flatnonzero(mask) if self.rows is None else self.rows[mask]
        return Subset(self.x, self.y[mask], rows)

    def shuffled(self, seed: int) -> "Subset":
        """The same samples in another order."""
        order = np.random.default_rng(seed).permutation(len(self.y))
        return Subset(self.x, self.y[order], order if self.rows is None else self.rows[order])

    def take(self, piece: slice) -> Any:
        """The samples at these positions of the subset, as they are stored."""
        return self.x[piece] if self.rows is None else self.x[self.rows[piece]]

    def pieces(self, count: int) -> Iterator[Any]:
        """All samples as they are stored, a few at a time."""
        return (self.take(slice(i, i + count)) for i in range(0, len(self.y), count))


def stratified(y: Array, k: int, seed: int) -> Array:
    """Mask of `k` samples with the class shares of `y`; every class gets one sample first.

    The samples of each class are shuffled. Number r of a class with n samples has the rank
    (r + 1/2) / n, number 0 the rank 0; the k samples of the lowest ranks are chosen. Numbers, and
    classes of steps or pixels, have no shares to keep: any k samples are chosen.

    Examples:
        >>> y = np.array([0] * 8 + [1] * 4)
        >>> np.bincount(y[stratified(y, 6, seed=0)])
        array([4, 2])
    """
    y = np.zeros(len(y), np.int64) if _has_no_shares(y) else y
    order = np.random.default_rng(seed).permutation(len(y))
    by_class = order[np.argsort(y[order], kind="stable")]
    n = np.bincount(y)
    r = np.arange(len(y)) - np.repeat(np.cumsum(n) - n, n)
    rank = np.empty(len(y))
    rank[by_class] = np.where(r == 0, 0, (r + 0.5) / np.repeat(n, n))
    chosen = np.zeros(len(y), dtype=bool)
    chosen[order[np.argsort(rank[order], kind="stable")[:k]]] = True
    return chosen


def of_every_class(y: Any, count: int | None, seed: int = 0) -> Any:
    """The first `count` samples as a slice, or a mask of others if those lack a class of `y`.

    Labels that are None, or numbers, have no classes. There may be more samples than `count`: one
    of every class.

    Examples:
        >>> of_every_class(np.array([0, 1, 1, 1]), 2)
        slice(None, 2, None)
        >>> y = np.array([0, 0, 1, 1])
        >>> y[of_every_class(y, 2)]
        array([0, 1])
    """
    first = slice(count)
    if y is None or _has_no_shares(y := np.asarray(y)) or len(set(y[first])) == len(set(y)):
        return first
    return stratified(y, max(len(y[first]), len(set(y))), seed)


def hold_out(y: Array, size: float, seed: int, source: str = "the data") -> Array:
    """Mask of the samples to train on; `size` of them, a share or a number, are held out.

    Classes of samples keep their shares. Error messages start with `source`, the name of the data.

    Examples:
        >>> y = np.array([0] * 8 + [1] * 4)
        >>> np.bincount(y[~hold_out(y, 0.25, 0, "pets.csv")])
        array([2, 1])
    """
    count = size if isinstance(size, int) else max(1, round(size * len(y)))
    train = stratified(y, len(y) - count, seed)
    few = not train.any() if _has_no_shares(y) else not np.isin(y[~train], y[train]).all()
    if few:
        raise TpsgdError(f"{source}: {len(y):,} samples are too few to hold out {count:,} of them.")
    return train


def hold_out_test(y: Array, seed: int, source: str) -> tuple[Array, str]:
    """The mask of `hold_out` for data without a test set, and the note that describes it."""
    train = hold_out(y, 0.2, seed, source)
    note = f"20 % held out as test, {how_chosen(y, seed)}"
    if not _has_no_shares(y) and (few := set(y[train]) - set(y[~train])):
        note += f", without {len(few):,} of {len(set(y)):,} classes, of which there are too few"
    return train, note


def how_chosen(y: Array, seed: int) -> str:
    """How `stratified` chooses samples, for a note."""
    return f"{'at random' if _has_no_shares(y) else 'stratified'}, seed {seed}"


def _has_no_shares(y: Array) -> bool:
    return y.ndim > 1 or y.dtype.kind == "f"
