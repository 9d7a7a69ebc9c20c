"""UCF101: videos as sequences of features, one file of features for each video.

`benchmarks/ucf101_features.py` makes the feature files with an encoder of your choice.
Soomro, Zamir and Shah, UCF101, CRCV-TR-12-01, 2012; no licence stated.
"""

from functools import partial
from pathlib import Path

import numpy as np

from tpsgd.common.errors import TpsgdError
from tpsgd.data.dataset import Array, Dataset, Pair, RawData, readable

STEPS = 10
CLASS_LIST, TRAIN_LIST, TEST_LIST = "classInd.txt", "trainlist01.txt", "testlist01.txt"
MAKE = (
    "make features/CLASS/VIDEO.npy, (frames, features), with benchmarks/ucf101_features.py of"
    " tpsgd's repository"
)


def read(folder: Path, entry: Dataset) -> RawData:
    """The features of ten frames of each video, evenly spread."""
    classes = _read_classes(folder / CLASS_LIST)
    train, test = (_read_list(folder, name, classes) for name in (TRAIN_LIST, TEST_LIST))
    files = np.concatenate([train[0], test[0]])
    if missing := [file for file in files if not file.is_file()]:
        raise TpsgdError(
            f"{len(missing)} of {len(files)} feature files are missing, the first is"
            f" {missing[0]}; {MAKE}."
        )
    decode = partial(_decode, width=_frames(files[0]).shape[1])
    note = f"{STEPS} frames a video, evenly spread; the publisher's split 1"
    return RawData(classes, train, test, decode, note)


def evenly(n: int, steps: int = STEPS) -> Array:
    """The indices of `steps` frames out of `n`: the middle of each of `steps` equal stretches.

    Examples:
        >>> evenly(100), evenly(4, 6)
        (array([ 5, 15, 25, 35, 45, 55, 65, 75, 85, 95]), array([0, 1, 1, 2, 3, 3]))
    """
    return (2 * np.arange(steps) + 1) * n // (2 * steps)


def _read_classes(file: Path) -> tuple[str, ...]:
    """The names of the classes; each line has a number, counted from 1, and a name."""
    lines = [line.split() for line in _lines(file)]
    if any(len(p) != 2 or p[0] != str(i) for i, p in enumerate(lines, start=1)) or len(lines) < 2:
        raise TpsgdError(f"{file} is not a list of numbers from 1 and names; get it again.")
    return tuple(name for _, name in lines)


def _read_list(folder: Path, name: str, classes: tuple[str, ...]) -> Pair:
    """The feature files of a split list; its lines are `CLASS/VIDEO.avi`, perhaps with a number."""
    files: list[Path] = []
    labels: list[int] = []
    for line in _lines(folder / name):
        label, _, video = line.split()[0].partition("/")
        if not video or label not in classes:
            raise TpsgdError(f"{folder / name}: '{line}' is not a video of a class in {CLASS_LIST}")
        files.append(folder / "features" / label / f"{Path(video).stem}.npy")
        labels.append(classes.index(label))
    if not files:
        raise TpsgdError(f"{folder / name} is empty; get it again.")
    return np.array(files, dtype=object), np.array(labels)


def _lines(file: Path) -> list[str]:
    with readable(file, "UTF-8 text", "get it again"):
        return [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]


def _decode(files: Array, width: int) -> Array:
    x = np.empty((len(files), STEPS, width), np.float32)
    for row, file in zip(x, files, strict=True):
        frames = _frames(file)
        if frames.shape[1] != width:
            raise TpsgdError(f"{file} has {frames.shape[1]} features, the first file {width}.")
        row[:] = frames[evenly(len(frames))]
        if not np.isfinite(row).all():
            raise TpsgdError(f"{file} has numbers that are not finite; make it again.")
    return x


def _frames(file: Path) -> Array:
    """The features of a video, (frames, features); mapped, so that only some are read."""
    with readable(file, "a .npy file", "make it again"):
        frames = np.load(file, mmap_mode="r", allow_pickle=False)
    if getattr(frames, "ndim", 0) != 2 or not frames.size or frames.dtype.kind not in "fiu":
        raise TpsgdError(f"{file} must have numbers of shape (frames, features); make it again.")
    return frames


UCF101 = Dataset(
    name="ucf101",
    classes=(),
    shape=(STEPS, 2048),
    train=9537,
    test=3783,
    read=read,
    folder="ucf101",
    files=(CLASS_LIST, TRAIN_LIST, TEST_LIST),
    by_hand="take the videos and the split lists from its page at the University of Central"
    f" Florida; {MAKE}",
    class_count=101,
)
ENTRIES = (UCF101,)
