"""Brain waves: UCI's table of the Bonn recordings, and its two ways to split it."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tpsgd.data.rows import Array, Raw
from tpsgd.data.split import stratified
from tpsgd.errors import TpsgdError

if TYPE_CHECKING:
    from tpsgd.data.entry import Dataset

SAMPLES = 178  # in a row: a second
EVERY = 4
ROWS = 23  # of a recording
SCALE = 200
SEIZURE, TUMOUR, HEALTHY = 1, 2, 5  # the column y; the publisher's sets S, F and Z
SHARE = 0.25
SEED = 0
COLUMNS = [*(f"X{i}" for i in range(1, SAMPLES + 1)), "y"]


class Table(NamedTuple):
    """The rows, what each of them shows and the number of the recording it was cut from."""

    x: Array
    y: Array
    recording: Array


def read(folder: Path, entry: Dataset, *, against: int, by_recording: bool) -> Raw:
    """Seizure (class 1) against one other kind (class 0); every fourth sample, divided by 200.

    A recording was cut into 23 rows. Split by rows, a model is tested on recordings it has seen.
    """
    file = folder / entry.files[0]
    table = _table(file)
    mine = np.flatnonzero(np.isin(table.y, (SEIZURE, against)))
    mine = mine[np.argsort(table.recording[mine], kind="stable")]  # recording by recording
    x, y, recording = (column[mine] for column in table)
    if len(np.unique(y)) < 2:
        raise TpsgdError(f"{file} has no rows of y = {SEIZURE} or none of y = {against}.")
    y = (y == SEIZURE).astype(np.int64)
    if by_recording:
        train, what = _without_recordings(file, y, recording), "recordings"
    else:
        train, what = stratified(y, len(y) - round(SHARE * len(y)), SEED), "rows"
    note = f"{SHARE:.0%} of the {what} held out, the same for every seed; samples / {SCALE}"
    return Raw(entry.classes, (x[train], y[train]), (x[~train], y[~train]), _steps, note)


def _without_recordings(file: Path, y: Array, recording: Array) -> Array:
    """Mask of the rows to train on; the others are whole recordings, as many of either class."""
    numbers, first, index = np.unique(recording, return_index=True, return_inverse=True)
    if (np.bincount(index) != ROWS).any() or (y != y[first][index]).any():
        raise TpsgdError(
            f"{file}: its rows' names do not tell the recordings apart ({ROWS} rows of one class"
            " each are expected, named X1.V1 to X23.V1 and the like); take the split by rows."
        )
    keep = stratified(y[first], len(numbers) - round(SHARE * len(numbers)), SEED)
    return keep[index]


def _table(file: Path) -> Table:
    """The whole table; what follows the first dot of a row's name tells its recording."""
    known: dict[str, int] = {}

    def recording(name: str) -> int:
        return known.setdefault(name.strip().partition(".")[2], len(known))

    try:
        with file.open(encoding="utf-8-sig", newline="") as stream:
            header = next(csv.reader(stream), [])
            if header[1:] != COLUMNS:
                raise TpsgdError(
                    f"{file} does not have the columns of UCI's table: the row's name, X1 to"
                    f" X{SAMPLES} and y."
                )
            table = np.loadtxt(
                stream,
                np.float32,
                None,
                ",",
                {0: recording},
                ndmin=2,
                encoding="utf-8",
                quotechar='"',
            )
    except (OSError, UnicodeDecodeError, IndexError) as error:
        raise TpsgdError(f"{file} cannot be read ({error}); get it again.") from error
    except TpsgdError:
        raise
    except ValueError as error:
        raise TpsgdError(f"{file} is no whole table of numbers ({error}); get it again.") from error
    if table.shape[1] != len(COLUMNS) + 1 or not np.isfinite(table).all():
        raise TpsgdError(f"{file} is no whole table of finite numbers; get it again.")
    return Table(table[:, 1:-1], table[:, -1], table[:, 0].astype(np.int64))


def _steps(x: Array) -> Array:
    return (x[:, ::EVERY, None] / np.float32(SCALE)).astype(np.float32)
