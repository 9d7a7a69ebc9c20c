"""Brain waves: UCI's table of the Bonn EEG recordings, split by recording or by row.

A recording was cut into 23 rows of a second each. With the split by row, rows of one recording
are in the training set and in the test set, so a model is tested on recordings that it has seen.
Andrzejak et al., Indications of nonlinear deterministic structures in EEG, 2001; CC BY 4.0.
"""

import csv
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from tpsgd.common.errors import TpsgdError
from tpsgd.data.dataset import Array, Dataset, RawData, readable
from tpsgd.data.split import hold_out

SAMPLES = 178  # of a row
ROWS = 23  # of a recording
STRIDE = 4  # every fourth sample is used
SCALE = 200
KINDS = {"seizure": 1, "tumour": 2, "healthy": 5}  # the column y; the publisher's sets S, F, Z
SHARE = 0.25
COLUMNS = [*(f"X{i}" for i in range(1, SAMPLES + 1)), "y"]


def read(folder: Path, entry: Dataset, by_recording: bool = True) -> RawData:
    """Seizures (class 1) against one other kind (class 0); the samples are divided by 200."""
    file = folder / entry.files[0]
    x, y, recording = read_table(file)
    other, seizure = (KINDS[name] for name in entry.classes)
    rows = np.flatnonzero(np.isin(y, (other, seizure)))
    rows = rows[np.argsort(recording[rows], kind="stable")]
    x, y, recording = x[rows], y[rows], recording[rows]
    if len(np.unique(y)) < 2:
        raise TpsgdError(f"{file} has no rows with y = {seizure}, or none with y = {other}.")
    y = (y == seizure).astype(np.int64)
    if by_recording:
        train, unit = _split_by_recording(file, y, recording), "recordings"
    else:
        train, unit = hold_out(y, SHARE, 0, str(file)), "rows"
    note = f"{SHARE:.0%} of the {unit} held out, the same for every seed; samples / {SCALE}"
    return RawData(entry.classes, (x[train], y[train]), (x[~train], y[~train]), _steps, note)


def _split_by_recording(file: Path, y: Array, recording: Array) -> Array:
    """Mask of the rows to train on; the test set is made of whole recordings."""
    _, first, index = np.unique(recording, return_index=True, return_inverse=True)
    if (np.bincount(index) != ROWS).any() or (y != y[first][index]).any():
        raise TpsgdError(f"{file}: row names do not tell recordings apart; use the split by rows.")
    return hold_out(y[first], SHARE, 0, str(file))[index]


def read_table(file: Path) -> tuple[Array, Array, Array]:
    """The samples of each row, the kind of brain wave, and the number of the recording.

    A row is named after its recording, from the first dot of the name.
    """
    recordings: dict[str, int] = {}

    def recording(row_name: str) -> int:
        return recordings.setdefault(row_name.strip().partition(".")[2], len(recordings))

    with (
        readable(file, "UCI's table", "get it again"),
        file.open(encoding="utf-8-sig", newline="") as stream,
    ):
        if next(csv.reader(stream), [])[1:] != COLUMNS:
            raise ValueError(f"its columns are not the row's name, X1 to X{SAMPLES} and y")
        table = np.loadtxt(stream, np.float32, None, ",", {0: recording}, ndmin=2, quotechar='"')
        if table.shape[1] != len(COLUMNS) + 1 or not np.isfinite(table).all():
            raise ValueError("a number is missing or not finite")
    return table[:, 1:-1], table[:, -1], table[:, 0].astype(np.int64)


def _steps(x: Array) -> Array:
    return (x[:, ::STRIDE, None] / np.float32(SCALE)).astype(np.float32)


EEG = Dataset(
    name="eeg",
    classes=("healthy", "seizure"),
    shape=(45, 1),
    train=3450,
    test=1150,
    read=read,
    folder="eeg",
    files=("data.csv",),
    by_hand="UCI withdrew its 'Epileptic Seizure Recognition' table; take data.csv from a copy of"
    " it (columns: the row's name such as X21.V1.791, X1 to X178, y from 1 to 5)",
)
EEG_ROWS = replace(EEG, name="eeg-rows", read=partial(read, by_recording=False))
ENTRIES = (
    EEG,
    EEG_ROWS,
    replace(EEG, name="eeg-tumour", classes=("tumour", "seizure")),
    replace(EEG_ROWS, name="eeg-tumour-rows", classes=("tumour", "seizure")),
)
