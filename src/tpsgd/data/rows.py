"""What every reader hands on: rows as they are stored, and how chosen rows become numbers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tpsgd.errors import TpsgdError
from tpsgd.nets.padded import Padded

Array = NDArray[Any]
Pair = tuple[Array, Array]


@dataclass(frozen=True)
class Raw:
    """Rows and class indices, not yet split, thinned or converted.

    `decode` turns the rows that were chosen into float32 (tokens into int64), once: pixels are
    divided, images read from disk, so that nothing is converted that is not asked for.
    `vocabulary` is how many different tokens there are, where the rows hold tokens.
    """

    classes: tuple[str, ...]
    train: Pair
    test: Pair | None
    decode: Callable[[Array], Array | Padded]
    note: str
    vocabulary: int | None = None


@dataclass(frozen=True)
class Samples:
    """Rows as they are stored, which of them are meant (None: all) and the class of each of those.

    Nothing is copied to choose some, so that rows may lie in a file larger than memory.
    """

    x: Array
    y: Array
    rows: Array | None = None

    def keep(self, mask: Array) -> "Samples":
        """Those the mask says."""
        rows = np.flatnonzero(mask) if self.rows is None else self.rows[mask]
        return Samples(self.x, self.y[mask], rows)

    def at(self, piece: slice) -> Array:
        """The rows of a piece, ready to be decoded."""
        return self.x[piece] if self.rows is None else self.x[self.rows[piece]]


def pixels(x: Array) -> Array:
    """Bytes 0..255 as float32 in [0, 1]."""
    return np.divide(x, np.float32(255), dtype=np.float32, order="C")


def numbers(x: Array) -> Array:
    """Any real numbers as float32, unscaled; no copy where they already are."""
    return np.require(x, np.float32, ["C", "W"])


def tokens(x: Array) -> Array:
    """Whole numbers as int64, for a layer that looks them up."""
    return np.require(x, np.int64, ["C", "W"])


def encode(where: str, train: Pair, test: Pair | None) -> tuple[tuple[str, ...], Pair, Pair | None]:
    """Name the classes that occur in `train` and number them from 0, in sorted order.

    Examples:
        >>> x = np.zeros((3, 2))
        >>> classes, (_, y), _ = encode("pets.csv", (x, np.array(["dog", "cat", "dog"])), None)
        >>> classes, y
        (('cat', 'dog'), array([1, 0, 1]))
    """
    y, y_test = _labels(where, train[1]), None if test is None else _labels(where, test[1])
    if y_test is not None and "U" in y.dtype.kind + y_test.dtype.kind:
        y, y_test = y.astype(str), y_test.astype(str)
    values, index = np.unique(y, return_inverse=True)
    if len(values) < 2:
        raise TpsgdError(f"{where}: every label is {values[0]}; two classes or more are needed.")
    classes = tuple(str(v) for v in values)
    if test is None or y_test is None:
        return classes, (train[0], index), None
    at = np.searchsorted(values, y_test).clip(max=len(values) - 1)
    if (strange := values[at] != y_test).any():
        raise TpsgdError(
            f"{where}: the test part has the class {y_test[strange][0]}, which the train part never"
            " shows; add samples of it or leave it out."
        )
    return classes, (train[0], index), (test[0], at)


def _labels(where: str, y: Array) -> Array:
    """Labels as whole numbers where they are such, else as text; real numbers are refused."""
    if y.dtype.kind in "biu":
        return y
    try:
        real = y.astype(np.float64)
    except (TypeError, ValueError):
        return y.astype(str)
    if (bad := ~np.isfinite(real) | (real != np.floor(real))).any():
        raise TpsgdError(
            f"{where}: the label {y[bad][0]} is no class; give whole numbers or names as labels."
        )
    whole = real.astype(np.int64)
    return whole if y.dtype.kind == "f" or (whole.astype(str) == y).all() else y.astype(str)
