"""Read `.csv` files: a header, a label column, and a sample or a time step in each row."""

import csv
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tpsgd.data.arrays import encode, pad_to_longest
from tpsgd.data.dataset import Array, RawData, numbers
from tpsgd.errors import TpsgdError

LABEL_NAMES = ("label", "y", "class", "target")
SEQUENCE_NAMES = ("sequence", "sequence_id")
TIME_NAMES = ("time", "step")
LARGEST = float(np.finfo(np.float32).max)


class Header(NamedTuple):
    """The names of the columns, what separates them, and the numbers of the columns by their role.

    Only a table of time steps has a column for the sequence, and perhaps one for the time.
    """

    names: list[str]
    delimiter: str
    features: list[int]
    label: int
    sequence: int | None = None
    time: int | None = None


def read_csv(file: Path) -> RawData:
    """Features, which are not scaled, and labels.

    The label column is `label`, `y`, `class` or `target`, else the last one. A first column
    without a name has row names and is left out. With a column `sequence` or `sequence_id`, each
    row is a time step; a column `time`, or `step`, which must count by one, gives the order.
    """
    header = _read_header(file)
    labels: dict[str, int] = {}
    sequences: dict[str, int] = {}
    try:
        table = _parse(file, header, labels, sequences)
    except UnicodeDecodeError as error:
        raise _not_text(file, error) from error
    except ValueError as error:
        raise _first_mistake(file, header) from error
    if table.size == 0:
        raise TpsgdError(f"{file} has a header but no rows.")
    is_finite = (np.abs(table) <= LARGEST).all()  # also as float32
    if table.shape[1] != len(header.names) or "" in (*labels, *sequences) or not is_finite:
        raise _first_mistake(file, header)
    y = np.array(list(labels))[table[:, header.label].astype(np.int64)]
    x = table[:, header.features].astype(np.float32, copy=False)
    note = f"label column '{header.names[header.label]}', features unscaled"
    if header.sequence is None:
        return RawData(*encode(str(file), (x, y)), numbers, note)
    names = np.array(list(sequences))[table[:, header.sequence].astype(np.int64)]
    time = None if header.time is None else table[:, header.time]
    is_counted = header.time is not None and header.names[header.time].lower() == "step"
    x, y, steps = _to_sequences(file, x, y, names, time, is_counted)
    return RawData(*encode(str(file), (x, y)), lambda x: x, f"{note}, {steps}")


def _read_header(file: Path) -> Header:
    try:
        with file.open(encoding="utf-8-sig", newline="") as stream:
            line = stream.readline()
    except (OSError, UnicodeDecodeError) as error:
        raise _not_text(file, error) from error
    if not line.strip():
        raise TpsgdError(f"{file} is empty or starts with an empty line; a header is needed.")
    delimiter = max(",;\t", key=line.count)
    names = [name.strip() for name in next(csv.reader([line], delimiter=delimiter))]
    are_numbers = [_number(name) is not None for name in names]
    has_fraction = any(n and not s.isdecimal() for n, s in zip(are_numbers, names, strict=True))
    if all(are_numbers) or has_fraction:
        raise TpsgdError(f"{file} starts with numbers; its first line must name the columns.")
    label, sequence, time = (_column(names, c) for c in (LABEL_NAMES, SEQUENCE_NAMES, TIME_NAMES))
    if sequence is None:
        time = None  # then it is a feature like any other
    elif label is None:
        raise TpsgdError(
            f"{file} has a column '{names[sequence]}' but none for the label; name it label, y,"
            " class or target."
        )
    label = len(names) - 1 if label is None else label
    others = {label, sequence, time}
    features = [i for i in range(len(names)) if i not in others and (i or names[0])]
    if not features:
        raise TpsgdError(f"{file} has no column of features besides the label '{names[label]}'.")
    return Header(names, delimiter, features, label, sequence, time)


def _column(names: list[str], choices: tuple[str, ...]) -> int | None:
    lower = [name.lower() for name in names]
    return next((lower.index(name) for name in choices if name in lower), None)


def _parse(file: Path, header: Header, labels: dict[str, int], sequences: dict[str, int]) -> Array:
    """The table as numbers; a label, or the name of a sequence, becomes its number in the dict.

    Time steps are read as float64: float32 cannot tell two seconds of a calendar apart.
    """
    converters: dict[int | str, Callable[[str], float]] = {}
    if not header.names[0]:
        converters[0] = lambda _: 0.0
    converters[header.label] = lambda text: labels.setdefault(text.strip(), len(labels))
    dtype = np.float32
    if header.sequence is not None:
        converters[header.sequence] = lambda text: sequences.setdefault(
            text.strip(), len(sequences)
        )
        dtype = np.float64
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # an empty table, which read_csv refuses
        return np.loadtxt(
            file, dtype, None, header.delimiter, converters,
            skiprows=1, ndmin=2, encoding="utf-8-sig", quotechar='"',
        )  # fmt: skip


def _to_sequences(
    file: Path, x: Array, y: Array, names: Array, time: Array | None, is_counted: bool
) -> tuple[Array, Array, str]:
    """One sample for each name, its steps ordered by time or as in the file; with a note."""
    unique, number = np.unique(names, return_inverse=True)
    order = np.lexsort((number,) if time is None else (time, number))
    x, y, number = x[order], y[order], number[order]
    lengths = np.bincount(number)
    first = np.cumsum(lengths) - lengths
    if (change := y != y[first][number]).any():
        raise TpsgdError(
            f"{file}: the label of the sequence '{unique[number[change][0]]}' changes from"
            f" {y[first][number][change][0]} to {y[change][0]}; a sequence has one label."
        )
    if time is not None:
        _check_times(file, unique[number], time[order], is_counted)
    real = np.arange(lengths.max()) < lengths[:, None]
    steps = np.zeros((*real.shape, x.shape[1]), np.float32)
    steps[real] = x
    [samples], note = pad_to_longest([(steps, lengths)])
    return samples, y[first], note or f"{lengths[0]} steps"


def _check_times(file: Path, names: Array, time: Array, is_counted: bool) -> None:
    """Refuse two steps of a sequence at the same time and, if steps are counted, a gap."""
    same_sequence = names[1:] == names[:-1]
    if (twice := same_sequence & (time[1:] == time[:-1])).any():
        i = int(twice.argmax())
        raise TpsgdError(
            f"{file}: the sequence '{names[i]}' has two steps at {time[i]:.12g}; drop one of them."
        )
    if is_counted and (gap := same_sequence & (time[1:] != time[:-1] + 1)).any():
        i = int(gap.argmax())
        raise TpsgdError(
            f"{file}: the sequence '{names[i]}' goes from step {time[i]:.12g} to"
            f" {time[i + 1]:.12g}; add the steps between, or name the column time."
        )


def _first_mistake(file: Path, header: Header) -> TpsgdError:
    """An error that names the first line or cell that cannot be used; slow, so called last."""
    names, delimiter, features, label, sequence, time = header
    numeric = features if time is None else [time, *features]
    try:
        with file.open(encoding="utf-8-sig", newline="", errors="replace") as stream:
            rows = csv.reader(stream, delimiter=delimiter)
            next(rows)
            for row in filter(None, rows):
                line = f"{file}, line {rows.line_num}"
                if len(row) != len(names):
                    return TpsgdError(f"{line} has {len(row)} cells, the header has {len(names)}.")
                if not row[label].strip():
                    return TpsgdError(f"{line} has no label in the column '{names[label]}'.")
                if sequence is not None and not row[sequence].strip():
                    return TpsgdError(f"{line} has no sequence in the column '{names[sequence]}'.")
                for i in numeric:
                    value = _number(row[i])
                    if value is None or not abs(value) <= LARGEST:
                        return TpsgdError(
                            f"{line}, column '{names[i]}': '{row[i]}' is not a finite number;"
                            " replace it, or drop that line or column."
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
