"""MNIST as sequences: a row of pixels a step, or a pixel of a small picture a step."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tpsgd.data.formats import PUBLISHED, idx_pairs
from tpsgd.data.rows import Array, Raw, pixels

if TYPE_CHECKING:
    from tpsgd.data.entry import Dataset

SIZE = 28
POOL = 4


def rows(folder: Path, entry: Dataset) -> Raw:
    """28 steps of 28 pixels each: the rows, top to bottom."""
    train, test = idx_pairs(folder, entry, SIZE, SIZE)
    return Raw(entry.classes, train, test, pixels, f"rows from top to bottom, {PUBLISHED}")


def pooled_pixels(folder: Path, entry: Dataset) -> Raw:
    """49 steps of one number each: squares of 4 x 4 pixels averaged, then read row by row."""
    train, test = idx_pairs(folder, entry, SIZE, SIZE)
    note = f"squares of {POOL} x {POOL} pixels averaged and read row by row, {PUBLISHED}"
    return Raw(entry.classes, train, test, _pooled, note)


def _pooled(x: Array) -> Array:
    squares = x.reshape(len(x), SIZE // POOL, POOL, SIZE // POOL, POOL)
    total = squares.sum((2, 4), dtype=np.float32)
    return (total / (255 * POOL * POOL)).reshape(len(x), -1, 1)
