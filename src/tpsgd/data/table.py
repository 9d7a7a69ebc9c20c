"""Tables: a `.csv` file with a header and a label column, a row a sample or a time step."""

import csv
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tpsgd.data.rows import Array, Raw, encode, numbers
from tpsgd.data.steps import sequences
from tpsgd.errors import TpsgdError

LABELS = ("label", "y", "class", "target")
SEQUENCES = ("sequence", "sequence_id")
TIMES = ("time", "step")
LARGEST = float(np.finfo(np.float32).max)


class Layout(NamedTuple):
    """What the header says: the columns' names, what parts them, which are features, the label.

    A table of time steps also has a column for the sequence, and perhaps one for the time.
    """

    names: list[str]
    delimiter: str
    features: list[int]
    label: int
    sequence: int | None = None
    time: int | None = None


def read_csv(file: Path) -> Raw:
    """Features and labels of a table; features are taken as they are, unscaled.

    The label column is `label`, `y`, `class` or `target`, else the last one. A first column
    without a name holds row names and is left out. A column `sequence` or `sequence_id` makes each
    row a time step; `time`, or `step`, which counts by one, then gives their order,
    else the file does.
    """
    layout = _layout(file)
    labels: dict[str, int] = {}
    names: dict[str, int] = {}
    try:
        table = _parse(file, layout, labels, names)
    except UnicodeDecodeError as error:
        raise _not_text(file, error) from error
    except ValueError as error:
        raise _blame(file, layout) from error
    if table.size == 0:
        raise TpsgdError(f"{file} has a header but no rows.")
    if table.shape[1] != len(layout.names) or "" in (*labels, *names) or not _finite(table):
        raise _blame(file, layout)
    y = np.array(list(labels))[table[:, layout.label].astype(np.int64)]
    x = table[:, layout.features].astype(np.float32, copy=False)
    note = f"label column '{layout.names[layout.label]}', features unscaled"
    if layout.sequence is not None:
        which = np.array(list(names))[table[:, layout.sequence].astype(np.int64)]
        when = None if layout.time is None else table[:, layout.time]
        counted = layout.time is not None and layout.names[layout.time].lower() == "step"
        return sequences(file, x, y, which, when, counted, note)
    classes, pair, _ = encode(str(file), (x, y), None)
    return Raw(classes, pair, None, numbers, note)


def _layout(file: Path) -> Layout:
    try:
        with file.open(encoding="utf-8-sig", newline="") as stream:
            line = stream.readline()
    except (OSError, UnicodeDecodeError) as error:
        raise _not_text(file, error) from error
    if not line.strip():
        raise TpsgdError(f"{file} is empty or starts with an empty line; a header is needed.")
    delimiter = max(",;\t", key=line.count)
    names = [name.strip() for name in next(csv.reader([line], delimiter=delimiter))]
    read = [_number(name) is not None for name in names]
    if all(read) or any(r and not n.isdecimal() for r, n in zip(read, names, strict=True)):
        raise TpsgdError(f"{file} starts with numbers; its first line must name the columns.")
    lower = [name.lower() for name in names]
    label, sequence, time = (_first(lower, known) for known in (LABELS, SEQUENCES, TIMES))
    if sequence is None:
        time = None  # a feature like any other
    elif label is None:
        raise TpsgdError(
            f"{file} has a column '{names[sequence]}' but none for the label; name it label, y,"
            " class or target."
        )
    label = len(names) - 1 if label is None else label
    others = {label, sequence, time}
    features = [i for i in range(len(names)) if i not in others and (i or names[0])]
    if not features:
        raise TpsgdError(f"{file} has no column beside the label '{names[label]}'.")
    return Layout(names, delimiter, features, label, sequence, time)


def _first(names: list[str], known: tuple[str, ...]) -> int | None:
    return next((names.index(name) for name in known if name in names), None)


def _parse(file: Path, layout: Layout, labels: dict[str, int], names: dict[str, int]) -> Array:
    """The whole table in one pass; a label or a sequence's name becomes its number in the dict.

    Time steps are read in float64: float32 cannot tell the seconds of a calendar apart.
    """
    columns: dict[int | str, Callable[[str], float]] = {}
    if not layout.names[0]:
        columns[0] = lambda _: 0.0
    columns[layout.label] = lambda text: labels.setdefault(text.strip(), len(labels))
    dtype = np.float32
    if layout.sequence is not None:
        columns[layout.sequence] = lambda text: names.setdefault(text.strip(), len(names))
        dtype = np.float64
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of an empty table; the caller sees it
        return np.loadtxt(
            file, dtype, None, layout.delimiter, columns,
            skiprows=1, ndmin=2, encoding="utf-8-sig", quotechar='"',
        )  # fmt: skip


def _finite(table: Array) -> bool:
    """Whether every number is finite, and will be as float32."""
    return bool((np.abs(table) <= LARGEST).all())


def _blame(file: Path, layout: Layout) -> TpsgdError:
    """Name the first line or cell that cannot be used: slow, so asked only when one is there."""
    names, delimiter, features, label, sequence, time = layout
    numeric = features if time is None else [time, *features]
    try:
        with file.open(encoding="utf-8-sig", newline="", errors="replace") as stream:
            rows = csv.reader(stream, delimiter=delimiter)
            next(rows)
            for row in filter(None, rows):
                at = f"{file}, line {rows.line_num}"
                if len(row) != len(names):
                    return TpsgdError(f"{at} has {len(row)} cells, the header has {len(names)}.")
                if not row[label].strip():
                    return TpsgdError(f"{at} has no label in the column '{names[label]}'.")
                if sequence is not None and not row[sequence].strip():
                    return TpsgdError(f"{at} names no sequence in '{names[sequence]}'.")
                for i in numeric:
                    value = _number(row[i])
                    if value is None or not abs(value) <= LARGEST:
                        return TpsgdError(
                            f"{at}, column '{names[i]}': '{row[i]}' is no finite number; fill it"
                            " in, or drop that line or column."
                        )
    except csv.Error as error:
        return TpsgdError(f"{file} cannot be read as a table ({error}).")
    return TpsgdError(f"{file} cannot be read as a table.")


def _not_text(file: Path, error: Exception) -> TpsgdError:
    return TpsgdError(f"{file} cannot be read as UTF-8 text ({error}).")


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
