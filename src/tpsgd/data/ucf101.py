"""Videos as sequences of features: UCF101's own split, and a file of features a video."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tpsgd.data.rows import Array, Pair, Raw
from tpsgd.errors import TpsgdError

if TYPE_CHECKING:
    from tpsgd.data.entry import Dataset

STEPS = 10
LISTS = ("classInd.txt", "trainlist01.txt", "testlist01.txt")
MAKE = "make features/CLASS/VIDEO.npy with: python -m tpsgd.data.frames"


def read(folder: Path, entry: Dataset) -> Raw:
    """Ten frames a video, evenly spread, as the features an encoder made of them."""
    classes = _classes(folder / LISTS[0])
    train, test = (_listed(folder, name, classes) for name in LISTS[1:])
    files = np.concatenate([train[0], test[0]])
    lost = [file for file in files if not file.is_file()]
    if lost:
        raise TpsgdError(
            f"{len(lost)} of {len(files)} feature files are missing, {lost[0]} the first; {MAKE}."
        )
    width = _frames(files[0]).shape[1]
    note = f"{STEPS} frames a video, evenly spread; the publisher's split 1"
    return Raw(classes, train, test, partial(_decode, width=width), note)


def evenly(n: int, steps: int = STEPS) -> Array:
    """Which `steps` of `n` frames to take: the middle of each of `steps` equal stretches.

    Examples:
        >>> evenly(100), evenly(4, 6)
        (array([ 5, 15, 25, 35, 45, 55, 65, 75, 85, 95]), array([0, 1, 1, 2, 3, 3]))
    """
    return (2 * np.arange(steps) + 1) * n // (2 * steps)


def _classes(file: Path) -> tuple[str, ...]:
    """The names in `classInd.txt`, whose lines are a number and a name, in the numbers' order."""
    pairs = [line.split() for line in _lines(file)]
    if any(len(p) != 2 or p[0] != str(i) for i, p in enumerate(pairs, start=1)) or len(pairs) < 2:
        raise TpsgdError(f"{file} is no list of numbers from 1 and names; get it again.")
    return tuple(name for _, name in pairs)


def _listed(folder: Path, name: str, classes: tuple[str, ...]) -> Pair:
    """The feature files of a split list, whose lines are `CLASS/VIDEO.avi` and perhaps a number."""
    files: list[Path] = []
    labels: list[int] = []
    for line in _lines(folder / name):
        kind, _, video = line.split()[0].partition("/")
        if not video or kind not in classes:
            raise TpsgdError(f"{folder / name}: '{line}' names no video of a known class.")
        files.append(folder / "features" / kind / f"{Path(video).stem}.npy")
        labels.append(classes.index(kind))
    if not files:
        raise TpsgdError(f"{folder / name} is empty; get it again.")
    return np.array(files, dtype=object), np.array(labels)


def _lines(file: Path) -> list[str]:
    try:
        return [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise TpsgdError(f"{file} cannot be read ({error}); get it again.") from error


def _decode(files: Array, width: int) -> Array:
    x = np.empty((len(files), STEPS, width), np.float32)
    for row, file in zip(x, files, strict=True):
        frames = _frames(file)
        if frames.shape[1] != width:
            raise TpsgdError(
                f"{file} holds {frames.shape[1]} features a frame, the first file {width}; make"
                " them all with one encoder."
            )
        row[:] = frames[evenly(len(frames))]
        if not np.isfinite(row).all():
            raise TpsgdError(f"{file} holds numbers that are not finite; make it again.")
    return x


def _frames(file: Path) -> Array:
    """The features of one video, (frames, features), read only where they are used."""
    try:
        frames = np.load(file, mmap_mode="r", allow_pickle=False)
    except (OSError, EOFError, ValueError) as error:
        raise TpsgdError(f"{file} cannot be read as a .npy file; make it again.") from error
    if getattr(frames, "ndim", 0) != 2 or not frames.size or frames.dtype.kind not in "fiu":
        raise TpsgdError(f"{file} must hold numbers of shape (frames, features); make it again.")
    return frames
