"""Scaling of tables and series: the statistics of each feature of the training samples.

A feature is a column of a table `(samples, features)`, or a channel of series `(samples, steps,
features)`, over all of their steps. The statistics are plain values, so that they are saved with a
model and new samples are scaled as those that it was trained on (`saved.scaling`).
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from tpsgd.data.dataset import Array
from tpsgd.errors import TpsgdError, suggestion
from tpsgd.nets.padded import Padded
from tpsgd.saved.scaling import scaled

METHODS = ("none", "standard", "minmax")
NOTES = {
    "none": "features unscaled",
    "standard": "features standardised: mean 0 and deviation 1 in the training samples",
    "minmax": "features scaled to 0..1 in the training samples",
}
CONSTANT = 1e-6  # deviations below this share of the mean are rounding errors


def check_method(scale: str | None) -> None:
    """Refuse a word that names no method."""
    if scale is not None and scale not in METHODS:
        raise TpsgdError(f"unknown scale {scale!r}: {suggestion(str(scale), METHODS)}")


def statistics(method: str, pieces: Iterable[Array | Padded]) -> dict[str, Any]:
    """The shift and the scale of each feature, from the training samples a few at a time.

    A feature that is constant is only shifted.

    Examples:
        >>> statistics("minmax", [np.array([[0.0, 5.0], [4.0, 5.0]])])
        {'method': 'minmax', 'shift': [0.0, 5.0], 'scale': [4.0, 1.0]}
    """
    count, mean, squares = 0, np.zeros(1), np.zeros(1)
    low, high = np.full(1, np.inf), np.full(1, -np.inf)
    for piece in pieces:
        x = _rows(piece)
        total = count + len(x)
        distance = x.mean(0) - mean
        squares = squares + ((x - x.mean(0)) ** 2).sum(0) + distance**2 * count * len(x) / total
        mean, count = mean + distance * len(x) / total, total
        low, high = np.minimum(low, x.min(0)), np.maximum(high, x.max(0))
    deviation = np.sqrt(squares / count)
    shift, scale = (mean, deviation) if method == "standard" else (low, high - low)
    scale = np.where(deviation <= CONSTANT * np.abs(mean), 1.0, scale)
    numbers = {"shift": shift, "scale": scale}
    return {"method": method} | {k: v.astype(np.float32).tolist() for k, v in numbers.items()}


def _rows(x: Array | Padded) -> Array:
    """Samples, or the steps of all series, as rows of features."""
    if isinstance(x, Padded):
        data = x.data.numpy()
        return data[np.arange(data.shape[1]) < x.lengths.numpy()[:, None]].astype(np.float64)
    return x.reshape(-1, x.shape[-1]).astype(np.float64)


def decoded_and_scaled(
    decode: Callable[[Any], Any], scaling: Mapping[str, Any]
) -> Callable[[Any], Any]:
    """A reader's function that decodes samples, with scaling after it."""
    return lambda x: scaled(decode(x), scaling)
