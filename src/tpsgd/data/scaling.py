"""Scaling of tables and series: the statistics of each feature of the training samples.

A feature is a column of a table `(samples, features)`, or a channel of series `(samples, steps,
features)`, over all of their steps. The statistics are plain values, so that they are saved with a
model and new samples are scaled as those that it was trained on (`saved.scaling`).
"""

from collections.abc import Iterable
from typing import Any

import numpy as np

from tpsgd.common.errors import TpsgdError, suggestion
from tpsgd.data.dataset import Array
from tpsgd.nets.padded import Padded

METHODS = ("none", "standard", "minmax")
IMPUTE = ("none", "mean", "median")
NOTES = {
    "none": "features unscaled",
    "standard": "features standardised: mean 0 and deviation 1 in the training samples",
    "minmax": "features scaled to 0..1 in the training samples",
}
# deviations below this share of the mean are rounding errors, of float32 and of other numbers
CONSTANT_32, CONSTANT = 1e-6, 1e-12


def check_word(kind: str, word: str | None, words: tuple[str, ...]) -> None:
    """Refuse a word that names no method."""
    if word is not None and word not in words:
        raise TpsgdError(f"unknown {kind} {word!r}: {suggestion(str(word), words)}")


def statistics(method: str, pieces: Iterable[Array | Padded]) -> dict[str, Any]:
    """The shift and the scale of each feature, from the training samples a few at a time.

    A feature that is constant is only shifted.

    Examples:
        >>> statistics("minmax", [np.array([[0.0, 5.0], [4.0, 5.0]])])
        {'method': 'minmax', 'shift': [0.0, 5.0], 'scale': [4.0, 1.0]}
    """
    count, mean, squares = 0, np.zeros(1), np.zeros(1)
    low, high = np.full(1, np.inf), np.full(1, -np.inf)
    rounding = CONSTANT
    for piece in pieces:
        x = _rows(piece)
        rounding = CONSTANT_32 if str(piece.dtype).endswith(("float16", "float32")) else CONSTANT
        total = count + len(x)
        distance = x.mean(0) - mean
        squares = squares + ((x - x.mean(0)) ** 2).sum(0) + distance**2 * count * len(x) / total
        mean, count = mean + distance * len(x) / total, total
        low, high = np.minimum(low, x.min(0)), np.maximum(high, x.max(0))
    mean = np.where(low == high, low, mean)  # else it may be off by a rounding error
    deviation = np.sqrt(squares / count)
    shift, scale = (mean, deviation) if method == "standard" else (low, high - low)
    scale = np.where(deviation <= rounding * np.abs(mean), 1.0, scale)
    return {"method": method, "shift": shift.tolist(), "scale": scale.tolist()}


def typical_values(
    method: str, pieces: Iterable[Array | Padded], columns: list[str]
) -> dict[str, Any]:
    """The mean or the median of each feature in the training samples, for cells that are blank.

    Examples:
        >>> typical_values("median", [np.array([[1.0], [np.nan], [9.0], [2.0]])], ["a"])
        {'method': 'median', 'values': [2.0]}
    """
    x = np.concatenate([_rows(piece) for piece in pieces])
    if (blank := np.isnan(x).all(0)).any():
        name = columns[int(blank.argmax())]
        raise TpsgdError(
            f"the column '{name}' is blank in all training samples: leave it out, drop=[{name!r}] "
            f"(--drop {name})"
        )
    values = (np.nanmean if method == "mean" else np.nanmedian)(x, axis=0)
    return {"method": method, "values": values.tolist()}


def _rows(x: Array | Padded) -> Array:
    """Samples, or the steps of all series, as rows of features."""
    if isinstance(x, Padded):
        data = x.data.numpy()
        return data[np.arange(data.shape[1]) < x.lengths.numpy()[:, None]].astype(np.float64)
    return x.reshape(-1, x.shape[-1]).astype(np.float64)
