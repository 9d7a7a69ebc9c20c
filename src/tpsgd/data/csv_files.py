"""Read `.csv` files: a header, a label column, and a sample or a time step in each row."""

import csv
import re
import warnings
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tpsgd.common.errors import TpsgdError, shortened, suggestion
from tpsgd.common.names import printable
from tpsgd.common.units import size
from tpsgd.data.arrays import RawArrays, from_arrays
from tpsgd.data.csv_mistakes import LARGEST, Header, first_mistake, number
from tpsgd.data.dataset import Array, RawData
from tpsgd.data.scaling import IMPUTE, check_word

LABEL_NAMES = ("label", "y", "class", "target")
SEQUENCE_NAMES = ("sequence", "sequence_id")
TIME_NAMES = ("time", "step")
ID_NAME = re.compile(r"(^|[^a-z])(id|index)$|Id$|ID$")
TIME_NAME = re.compile(r"time|date|^ms$|^t$")
MANY_ROWS = 50  # of which a column that never falls is no measurement
# the least share of different values in such a column, and in one with the name of a time
MANY_VALUES, MANY_TIMES = 0.5, 0.1
HINT = "columns are separated by commas, semicolons or tabs, and line 1 must be the header"
MOST_GROWN, ALWAYS_READ = 50, 2**25  # times a file's size in memory, and bytes always allowed


class Columns(NamedTuple):
    """What a user says of the columns of a table; see `tpsgd.data.load`."""

    label: str | None = None
    drop: tuple[str, ...] = ()
    impute: str | None = None

    @classmethod
    def of(cls, label: str | None, drop: str | Sequence[str], impute: str | None) -> "Columns":
        """Names in a list, or in a text with commas; the word none is None."""
        check_word("impute", impute, IMPUTE)
        names = drop.split(",") if isinstance(drop, str) else drop
        names = tuple(name.strip() for name in names if name)
        return cls(label, names, None if impute == "none" else impute)


def read_csv(file: Path, choices: Columns = Columns()) -> RawData:  # noqa: B008
    """Features, which `load` standardises by default, and labels.

    The label column is that of the choices, else `label`, `y`, `class` or `target`, else the last
    one. A first column without a name has row names and is left out. With a column `sequence` or
    `sequence_id`, each row is a time step; a column `time`, or `step`, which must count by one,
    gives the order.
    """
    with _readable(file):
        header = _read_header(file, choices)
        arrays, _ = _read_arrays(file, header, blanks=choices.impute is not None)
    assert header.label is not None
    if header.sequence is None:
        _warn_of_row_numbers(file, [header.names[i] for i in header.features], arrays.x)
    try:
        raw = from_arrays(str(file), [arrays])
    except TpsgdError as error:
        if choices.label or header.names[header.label].lower() in LABEL_NAMES:
            raise
        last = f"The label was taken from the last column, '{header.names[header.label]}'"
        raise TpsgdError(f"{error} {last}: name another one, label=... (--label).") from error
    note = f"label column '{printable(header.names[header.label])}'"
    columns = [header.names[i] for i in header.features]
    reading = {"columns": columns, "label": header.names[header.label]}
    note = f"{note}, {raw.note}" if raw.note else note
    return replace(raw, note=note, reading=reading, scale="standard")


def read_columns(
    file: Path, columns: list[str], label: str | None, blanks: bool
) -> tuple[RawArrays, list[str], bool]:
    """The features in these columns, the names of the samples, and whether there are labels.

    All other columns are ignored. Samples are named by their sequence, or numbered from 1. Blank
    features are NaN if there may be `blanks`.
    """
    with _readable(file):
        names, delimiter = _read_names(file)
        if missing := [name for name in columns if name not in names]:
            hint = f": {HINT}" if len(names) == 1 else ""
            raise TpsgdError(f"{file} has no column '{missing[0]}', which the model reads{hint}.")
        _refuse_repeated(file, names, {*columns, label})
        sequence, time = (_column(names, c) for c in (SEQUENCE_NAMES, TIME_NAMES))
        sequence = None if sequence is None or names[sequence] in columns else sequence
        time = None if sequence is None or (time and names[time] in columns) else time
        place = names.index(label) if label in names else None
        features = [names.index(name) for name in columns]
        header = Header(names, delimiter, features, place, sequence, time)
        return *_read_arrays(file, header, blanks), place is not None


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, UnicodeDecodeError) as error:
        raise TpsgdError(f"{file} cannot be read as UTF-8 text ({error}).") from error


def _read_arrays(file: Path, header: Header, blanks: bool) -> tuple[RawArrays, list[str]]:
    """Features and labels, which are empty without a column of labels; and the samples' names."""
    table, texts = _read_table(file, header, blanks)
    first, last = header.features[0], header.features[-1]
    beside = header.features == list(range(first, last + 1))  # then nothing is copied
    x = table[:, slice(first, last + 1) if beside else header.features]
    y = np.full(len(x), "") if header.label is None else texts[header.label]
    if header.sequence is None:
        return RawArrays(x, y, blanks=blanks), [str(row) for row in range(1, len(x) + 1)]
    time = None if header.time is None else table[:, header.time]
    is_counted = header.time is not None and header.names[header.time].lower() == "step"
    sequences = texts[header.sequence]
    names = np.unique(sequences).tolist()
    arrays = _to_sequences(file, x, y, sequences, time, is_counted)
    return arrays._replace(blanks=blanks), names


def _read_names(file: Path) -> tuple[list[str], str]:
    """The names of the columns, and what separates them."""
    with file.open(encoding="utf-8-sig", newline="") as stream:
        line = stream.readline()
    if not line.strip():
        raise TpsgdError(f"{file} is empty or starts with an empty line; a header is needed.")
    delimiter = max(",;\t", key=line.count)
    names = [name.strip() for name in next(csv.reader([line], delimiter=delimiter))]
    numeric = [name for name in names if number(name) is not None]
    if numeric == names or not all(name.isdecimal() for name in numeric):
        raise TpsgdError(f"{file} starts with numbers; its first line must name the columns.")
    return names, delimiter


def _read_header(file: Path, choices: Columns) -> Header:
    names, delimiter = _read_names(file)
    if len(names) == 1:
        raise TpsgdError(
            f"{file} has no column of features besides the label '{shortened(names[0])}': {HINT}."
        )
    named = [*choices.drop, *([] if choices.label is None else [choices.label])]
    if missing := [name for name in named if name not in names]:
        raise TpsgdError(f"{file} has no column '{missing[0]}': {suggestion(missing[0], names)}")
    if choices.label in choices.drop:
        raise TpsgdError(f"the column '{choices.label}' cannot be dropped: it is the label.")
    others = ["" if name in named else name for name in names]
    label, sequence, time = (_column(others, c) for c in (LABEL_NAMES, SEQUENCE_NAMES, TIME_NAMES))
    label = label if choices.label is None else names.index(choices.label)
    if sequence is None:
        time = None  # then it is a feature like any other
    elif label is None:
        raise TpsgdError(
            f"{file} has sequences but no column label, y, class or target: name it, label=..."
            " (--label)."
        )
    left = [i for i in range(len(names)) if names[i] not in choices.drop]
    if not left:
        raise TpsgdError(f"{file} has no column that was not dropped.")
    label = left[-1] if label is None else label
    features = [i for i in left if i not in {label, sequence, time} and (i or names[0])]
    if not features:
        raise TpsgdError(f"{file} has no column of features besides the label '{names[label]}'.")
    _refuse_repeated(file, names, {names[i] for i in (*features, label)})
    return Header(names, delimiter, features, label, sequence, time)


def _refuse_repeated(file: Path, names: list[str], used: Container[str | None]) -> None:
    """Refuse a name that two columns have: a trained model finds its columns by their names."""
    counts = Counter(names)
    if repeated := [name for name in counts if counts[name] > 1 and name in used]:
        shown = shortened(", ".join(f"'{name}'" for name in repeated))
        raise TpsgdError(
            f"{file} has several columns of the name {shown}, and a trained model finds columns by"
            " their names: rename them."
        )


def _column(names: list[str], choices: tuple[str, ...]) -> int | None:
    lower = [name.lower() for name in names]
    return next((lower.index(name) for name in choices if name in lower), None)


def _read_table(file: Path, header: Header, blanks: bool) -> tuple[Array, dict[int, Array]]:
    """The table as numbers, and the columns of labels and of sequences as text.

    They are float64: float32 cannot tell two seconds of a calendar apart, nor two places on a map.
    A table that has blanks, or decimal commas and columns separated by something else, is read
    twice.
    """
    of_text = [column for column in (header.label, header.sequence) if column is not None]
    codes: dict[int, dict[str, int]] = {column: {} for column in of_text}  # each text's number
    converters: dict[int | str, Callable[[str], float]] = {
        column: lambda text, code=code: code.setdefault(text.strip(), len(code))
        for column, code in codes.items()
    }
    unused = set(range(len(header.names))) - {*header.features, *of_text, header.time}
    converters |= {column: lambda _: 0.0 for column in unused}
    try:
        table = _numbers(file, header.delimiter, converters)
    except UnicodeDecodeError:
        raise
    except ValueError as error:
        if not blanks and header.delimiter == ",":
            raise first_mistake(file, header) from error
        try:
            converters |= dict.fromkeys(header.features, _lenient(header, blanks))
            table = _numbers(file, header.delimiter, converters)
        except ValueError:
            raise first_mistake(file, header, blanks) from error
    if table.size == 0:
        raise TpsgdError(f"{file} has a header but no rows.")
    has_gap = any("" in code for code in codes.values())
    if table.shape[1] != len(header.names) or has_gap:
        raise first_mistake(file, header, blanks)
    for column, values in enumerate(table.T):
        is_finite = np.abs(values) <= LARGEST  # also as float32
        if blanks and column in header.features:
            is_finite |= np.isnan(values)
        if not is_finite.all():
            raise first_mistake(file, header, blanks)
    for column, code in codes.items():
        _check_lengths(file, header.names[column], max(code, key=len), len(table))
    rows = {column: table[:, column].astype(np.int64) for column in codes}
    return table, {column: np.array(list(codes[column]))[i] for column, i in rows.items()}


def _numbers(
    file: Path, delimiter: str, converters: dict[int | str, Callable[[str], float]]
) -> Array:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # an empty table, refused by the caller
        return np.loadtxt(
            file, np.float64, None, delimiter, converters,
            skiprows=1, ndmin=2, encoding="utf-8-sig", quotechar='"',
        )  # fmt: skip


def _lenient(header: Header, blanks: bool) -> Callable[[str], float]:
    """A converter of cells with decimal commas, or with nothing in them, which is NaN."""

    def convert(text: str) -> float:
        value = number(text, header.delimiter != ",", np.nan if blanks else None)
        if value is None:
            raise ValueError(text)
        return value

    return convert


def _check_lengths(file: Path, name: str, longest: str, rows: int) -> None:
    """Refuse a text so long that a column of texts as long would fill the memory."""
    if 4 * len(longest) * rows > max(ALWAYS_READ, MOST_GROWN * file.stat().st_size):
        raise TpsgdError(
            f"{file}, column '{name}': the text '{longest[:20]}...' has {len(longest):,} characters"
            " and is no name of a class or of a sequence."
        )


def _warn_of_row_numbers(file: Path, names: list[str], x: Array) -> None:
    """Warn of columns that number the rows or name them, which say nothing of other rows."""
    for name, column in zip(names, x.T, strict=True):
        column = column[~np.isnan(column)]
        steps, is_time = np.diff(column), TIME_NAME.search(name.lower()) is not None
        rises = len(column) >= MANY_ROWS and (steps >= 0).all()
        is_id = ID_NAME.search(name) is not None and (column == np.floor(column)).all()
        if not (rises or is_id):
            continue
        least = MANY_TIMES if rises and is_time else MANY_VALUES
        if len(np.unique(column)) >= least * len(column):
            numbers = is_id or (steps == 1).all()
            how = "numbers the rows" if numbers else "never falls from row to row"
            warnings.warn(
                f"{file}: the column '{name}' {how}, and is used as a feature: leave "
                f"it out if it is an id or a time, drop=[{name!r}] (--drop {name})",
                stacklevel=2,
            )


def _to_sequences(
    file: Path, x: Array, y: Array, names: Array, time: Array | None, is_counted: bool
) -> RawArrays:
    """One sample for each name, with its steps ordered by time or as in the file."""
    unique, number = np.unique(names, return_inverse=True)
    order = np.lexsort((number,) if time is None else (time, number))
    x, y, number = x[order], y[order], number[order]
    lengths = np.bincount(number)
    first = np.cumsum(lengths) - lengths
    if (change := y != y[first][number]).any():
        raise TpsgdError(f"{file}: the sequence '{unique[number[change][0]]}' has two labels.")
    if time is not None:
        _check_times(file, unique[number], time[order], is_counted)
    _check_padding(file, 8 * len(lengths) * int(lengths.max()) * x.shape[1], lengths)
    is_step = np.arange(lengths.max()) < lengths[:, None]
    steps = np.zeros((*is_step.shape, x.shape[1]))
    steps[is_step] = x
    return RawArrays(steps, y[first], lengths)


def _check_padding(file: Path, nbytes: int, lengths: Array) -> None:
    """Refuse sequences so different in length that padding to the longest would fill the memory."""
    if nbytes > max(ALWAYS_READ, MOST_GROWN * file.stat().st_size):
        raise TpsgdError(
            f"{file}: {len(lengths):,} sequences, padded to the {lengths.max():,} steps of the"
            f" longest one, would take {size(nbytes)}; cut long sequences into several."
        )


def _check_times(file: Path, names: Array, time: Array, is_counted: bool) -> None:
    """Refuse two steps of a sequence at the same time and, if steps are counted, a gap."""
    difference, same_sequence = np.diff(time), names[1:] == names[:-1]
    wrong = same_sequence & (difference != 1 if is_counted else difference == 0)
    if wrong.any():
        i = int(wrong.argmax())
        raise TpsgdError(
            f"{file}: the sequence '{names[i]}' goes from {time[i]:.12g} to {time[i + 1]:.12g}; a"
            " column time must have each time once, and a column step must count by one."
        )
