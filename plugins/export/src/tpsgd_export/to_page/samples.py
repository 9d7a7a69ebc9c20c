"""The samples inside a page: chosen by class, one byte per number, compressed.

A number is low + byte * width / levels. Pixels are stored without loss if all samples fit into the
page, else with 16 levels of grey, so that more samples fit; other features have 256 levels.
`drawing` measures how large and how thick strokes are in the data, so that what a visitor draws
looks like them.
"""

import zlib
from base64 import b64encode
from dataclasses import dataclass
from typing import Any

import numpy as np

from tpsgd.common.errors import TpsgdError
from tpsgd.data.dataset import Array, Data
from tpsgd.data.split import stratified
from tpsgd.nets.padded import Padded

MOST_TRAIN, MOST_HELD_OUT = 6000, 500
HELD_OUT_SHARE = 0.25  # of the training samples, at most, where the file is full
COARSE = 15  # levels of pixels above 0, where the file is full
EXACT_LEVELS = (1, 16, 255)  # of binary pictures, the digits of scikit-learn, and bytes
PATH = 2.4  # length of the strokes of a written sign, over its height
SAME_INK = 0.2  # short strokes are thicker if the ink of signs varies less than this
SAME_SIZE = 0.12  # signs of a set were scaled to a frame if their heights vary less than this


@dataclass(frozen=True)
class PageSamples:
    """Training and held-out samples as bytes of shape (samples, features), with their labels."""

    train: tuple[Array, Array]
    held_out: tuple[Array, Array]
    low: Array
    width: Array
    levels: int

    def numbers(self, x: Array) -> Array:
        """The samples as the page decodes them: float32."""
        return (self.low + x * self.width / self.levels).astype(np.float32)

    def record(self) -> dict[str, Any]:
        """Everything as plain values for the page."""
        sets = {"train": self.train, "held": self.held_out}
        return {
            "low": self.low.tolist(),
            "width": self.width.tolist(),
            "levels": self.levels,
            **{k: {"count": len(y), "x": text(x), "y": text(y)} for k, (x, y) in sets.items()},
        }


def text(values: Array) -> str:
    """An array, compressed and as ASCII letters."""
    return b64encode(zlib.compress(np.ascontiguousarray(values).tobytes(), 9)).decode()


def chosen(data: Data, limit: int, seed: int) -> PageSamples:
    """As many samples as `limit` bytes of the page can hold; classes keep their shares."""
    train, held_out = (_rows(*pair) for pair in (data.train, data.test))
    train = _thinned(*train, MOST_TRAIN, seed)
    held_out = _thinned(*held_out, MOST_HELD_OUT, seed)
    picture = len(data.shape) == 3
    grid = _grid(train[0], picture)
    sets = [(_bytes(x, *grid), y) for x, y in (train, held_out)]
    if picture and _length(sets) > limit:
        grid = (*grid[:2], min(grid[2], COARSE))
        sets = [(_bytes(x, *grid), y) for x, y in (train, held_out)]
    while (share := limit / _length(sets)) < 1:
        count = int(len(sets[0][1]) * share * 0.98)
        if count < len(data.classes):
            raise TpsgdError(
                f"samples of {train[0].shape[1]:,} numbers are too large for a page: "
                f"{limit:,} bytes do not hold one of each class"
            )
        tests = max(len(data.classes), int(count * HELD_OUT_SHARE))
        sets = [_thinned(*pair, n, seed) for pair, n in zip(sets, (count, tests), strict=True)]
    return PageSamples(sets[0], sets[1], *grid)


def _length(sets: list[tuple[Array, Array]]) -> int:
    """Bytes of the page that samples take."""
    return sum(len(text(x)) for x, _ in sets)


def _rows(x: Any, y: Any) -> tuple[Array, Array]:
    """Samples as rows of float32 numbers, and their labels."""
    if isinstance(x, Padded):
        raise TpsgdError("samples of different lengths do not fit into a page")
    return np.asarray(x, np.float32).reshape(len(y), -1), np.asarray(y).astype(np.uint16)


def _thinned(x: Array, y: Array, count: int, seed: int) -> tuple[Array, Array]:
    """At most `count` samples."""
    if count >= len(y):
        return x, y
    mask = stratified(y.astype(np.int64), count, seed)
    return x[mask], y[mask]


def _grid(x: Array, picture: bool) -> tuple[Array, Array, int]:
    """Low ends, widths and the number of levels: for all pixels together, or for each feature."""
    width = np.ones(1)
    for levels in EXACT_LEVELS if picture else ():
        whole = np.rint(x * levels)
        if whole.min() >= 0 and whole.max() <= levels and np.abs(x * levels - whole).max() < 1e-4:
            return 0 * width, width, levels
    axis = None if picture else 0
    low, high = (np.atleast_1d(np.asarray(v, np.float64)) for v in (x.min(axis), x.max(axis)))
    return low, high - low, 255


def _bytes(x: Array, low: Array, width: Array, levels: int) -> Array:
    """Samples as bytes; held-out numbers beyond the range of the training samples are cut off."""
    width = np.where(width > 0, width, 1.0)  # a constant is 0 wide
    return np.clip(np.rint((x - low) / width * levels), 0, levels).astype(np.uint8)


def drawing(x: Array, shape: tuple[int, ...]) -> dict[str, Any]:
    """How signs lie in grey pictures: their frame and the width of their strokes, in pixels.

    `paper` and `ink` are the numbers of an empty and of a full pixel. `area` is the ink of a
    sign in full pixels if all signs have about the same, else 0.
    """
    pictures = x.reshape(-1, *shape[-2:])
    low, high = float(x.min()), float(x.max())
    edge = np.concatenate([pictures[:, 0].ravel(), pictures[:, :, 0].ravel()])
    dark = float(np.median(edge)) > (low + high) / 2  # dark ink on light paper
    paper, ink = (high, low) if dark else (low, high)
    cover = (pictures - paper) / ((ink - paper) or 1.0)
    top, bottom, left, right = _extents(cover)
    height, width = bottom - top, right - left
    area = cover.sum((1, 2))
    stroke = area.mean() / (PATH * height.mean())
    rows = shape[-2]
    return {
        "paper": paper,
        "ink": ink,
        "stroke": float(np.clip(stroke, 0.04 * rows, 0.2 * rows)),
        "area": float(area.mean()) if area.std() < SAME_INK * area.mean() else 0.0,
        "fits": bool(height.std() < SAME_SIZE * rows),
        "height": float(height.mean()),
        "width": float(np.quantile(width, 0.8)),
        "x": float((left + right).mean() / 2),
        "y": float((top + bottom).mean() / 2),
    }


def _extents(cover: Array) -> list[Array]:
    """First and last rows and columns with ink (the last ones exclusive), for each picture."""
    ends = []
    for lines in (np.asarray((cover > 0.1).any(axis)) for axis in (2, 1)):
        ends += [lines.argmax(1), lines.shape[1] - lines[:, ::-1].argmax(1)]
    return ends
