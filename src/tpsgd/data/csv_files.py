"""Read `.csv` files: a header, a label column, and a sample or a time step in each row."""

import csv
import re
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tpsgd.common.errors import TpsgdError, shortened, suggestion
from tpsgd.common.names import printable
from tpsgd.common.units import size
from tpsgd.data.arrays import RawArrays, from_arrays
from tpsgd.data.csv_mistakes import (
    HINT,
    Header,
    check_cells,
    check_text,
    first_mistake,
    is_much_larger,
    number,
)
from tpsgd.data.dataset import Array, RawData, readable
from tpsgd.data.labels import AS_NUMBERS, LARGEST, MOST_SINGLE_CLASSES, TASKS
from tpsgd.data.scaling import IMPUTE, check_word

LABEL_NAMES = ("label", "y", "class", "target")
AXES = ("x", "z")  # beside which y is a coordinate
# of columns that are hardly features
LIKELY_NAMES = ("activity", "category", "classes", "diagnosis", "gesture", "labels", "outcome")
SEQUENCE_NAMES = ("sequence", "sequence_id")
TIME_NAMES = ("time", "step")
ID_NAME = re.compile(r"(^|[^a-z])(id|index)$|Id$|ID$")
TIME_NAME = re.compile(r"time|date|^ms$|^t$")
MANY_ROWS = 50  # of which a column that never falls is no measurement
# the least share of different values in such a column, and in one with the name of a time
MANY_VALUES, MANY_TIMES = 0.5, 0.1


class Columns(NamedTuple):
    """The columns of a table that a user names; see `tpsgd.data.load`.

    `features` are the columns of the samples that a model was trained on, for new samples.
    `numbers`: the labels are numbers, perhaps in several columns.
    """

    label: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    impute: str | None = None
    features: tuple[str, ...] = ()
    numbers: bool = False

    @classmethod
    def of(
        cls,
        label: str | Sequence[str] | None,
        drop: str | Sequence[str],
        impute: str | None,
        task: str | None = None,
    ) -> "Columns":
        """Names in a list, or in a text with commas; the word none is None."""
        check_word("impute", impute, IMPUTE)
        check_word("task", task, TASKS)
        for kind, names in (("label", label_names(label)), ("drop", drop)):
            if not isinstance(names, (str, Sequence)) or not all(isinstance(n, str) for n in names):
                raise TpsgdError(f"{kind} must be names of columns, got {names!r}")
        names = drop.split(",") if isinstance(drop, str) else drop
        names = tuple(name.strip() for name in names if name)
        filling, numbers = None if impute == "none" else impute, task == "regression"
        return cls(label_names(label), names, filling, numbers=numbers)


def label_names(label: Any) -> tuple[str, ...]:
    """The names of the label columns; a text with commas may be one name (`_label_columns`)."""
    return tuple(label) if isinstance(label, (list, tuple)) else (label,) if label else ()


def read_csv(file: Path, choices: Columns = Columns()) -> RawData:  # noqa: B008
    """A table to train on: features, which `load` standardises by default, and labels."""
    arrays, header = read_table(file, choices)
    features = [header.names[i] for i in header.features]
    names = [header.names[i] for i in header.labels]
    label = names[0]
    if header.sequence is None:
        _warn_of_row_numbers(file, features, arrays.x)
    try:
        raw = from_arrays(str(file), [arrays], choices.numbers, names)
    except TpsgdError as error:
        if choices.label or label.lower() in LABEL_NAMES:
            raise
        last = f"The label was taken from the last column, '{label}'"
        raise TpsgdError(f"{error} {last}: name another one, label=... (--label).") from error
    if not (choices.label or choices.numbers or label.lower() in LABEL_NAMES):
        _check_last(file, features, arrays.x, raw, label)
    noun = f"label column{'s' * (len(names) > 1)}"
    listed = ", ".join(f"'{printable(name)}'" for name in names)
    note = ", ".join(filter(None, (f"{noun} {listed}", raw.note)))
    reading = {"columns": features, "label": label if len(names) == 1 else names} | raw.reading
    return replace(raw, note=note, reading=reading, scale="standard")


def read_table(file: Path, choices: Columns) -> tuple[RawArrays, Header]:
    """The features and the labels of a table.

    The label column is that of the choices, else `label`, `y`, `class` or `target`, else the last
    one; where others may be it, it must be chosen. A first column without a name has row names and
    is left out. With a column `sequence` or `sequence_id`, each row is a time step; a column
    `time`, or `step`, which must count by one, gives the order. New samples have the columns of the
    trained model, in any order, and perhaps labels.
    """
    with readable(file, "UTF-8 text", "save it as UTF-8"):
        header = _read_header(file, choices)
        table, texts = _read_cells(file, header, blanks=choices.impute is not None)
    first, last = header.features[0], header.features[-1]
    adjacent = header.features == list(range(first, last + 1))  # then nothing is copied
    x = table[:, slice(first, last + 1) if adjacent else header.features]
    y = texts.get(header.labels[0]) if header.labels else None
    y = table[:, header.labels] if header.labels and header.of_numbers else y
    arrays = RawArrays(x, y, blanks=choices.impute is not None)
    if header.sequence is not None:
        time = None if header.time is None else table[:, header.time]
        arrays = _to_sequences(file, header, arrays, texts[header.sequence], time)
    return arrays, header


def _read_names(file: Path) -> tuple[list[str], str]:
    """The names of the columns, and what separates them."""
    with file.open(encoding="utf-8-sig", newline="") as stream:
        line = stream.readline()
    if not line.strip():
        raise TpsgdError(f"{file} is empty or starts with an empty line; a header is needed.")
    delimiter = max(",;\t", key=line.count)
    try:
        cells = next(csv.reader([line], delimiter=delimiter, strict=True))
    except csv.Error as error:
        raise TpsgdError(
            f"{file}, line 1 is no header of names in whole quotes ({error})."
        ) from error
    names = [name.strip() for name in cells]
    numeric = [name for name in names if number(name) is not None]
    if numeric == names or not all(name.isdecimal() for name in numeric):
        raise TpsgdError(f"{file} starts with numbers; its first line must name the columns.")
    return names, delimiter


def _read_header(file: Path, choices: Columns) -> Header:
    names, delimiter = _read_names(file)
    is_new, chosen = bool(choices.features), _label_columns(choices, names)
    named = [*choices.features, *choices.drop, *(() if is_new else chosen)]
    if missing := [name for name in named if name not in names]:
        hint = HINT if len(names) == 1 else suggestion(missing[0], names)
        reads = ", which the model reads" if is_new else ""
        raise TpsgdError(f"{file} has no column '{missing[0]}'{reads}: {hint}")
    if dropped := [name for name in chosen if name in choices.drop]:
        raise TpsgdError(f"the column '{dropped[0]}' cannot be dropped: it is the label.")
    others = ["" if name in named else name.lower() for name in names]
    sequence, time = (
        next((others.index(name) for name in choices if name in others), None)
        for choices in (SEQUENCE_NAMES, TIME_NAMES)
    )
    time = None if sequence is None else time  # without sequences it is a feature like any other
    labels = tuple(map(names.index, chosen)) if {*chosen} <= {*names} else ()
    features = [names.index(name) for name in choices.features]
    if not is_new:
        left = [i for i, name in enumerate(names) if name not in choices.drop]
        left = [i for i in left if i not in (sequence, time) and (i or names[0])]
        labels = labels or _guessed_label(file, names, left, sequence is not None)
        features = [i for i in left if i not in labels]
    if not features:
        problem = f"has no column of features besides the label in '{shortened(', '.join(names))}'"
        raise TpsgdError(f"{file} {problem}: {HINT}.")
    used = {names[i] for i in (*features, *labels)}
    if repeated := [name for name, n in Counter(names).items() if n > 1 and name in used]:
        listed = shortened(", ".join(f"'{name}'" for name in repeated))
        raise TpsgdError(
            f"{file} has several columns of the name {listed}, and a trained model finds columns by"
            " their names: rename them."
        )
    return Header(names, delimiter, features, labels, sequence, time, choices.numbers)


def _guessed_label(
    file: Path, names: list[str], left: list[int], of_sequences: bool
) -> tuple[int, ...]:
    """The label by its name, else the last column; an error if another one may be it as well.

    Beside columns x or z, y is a coordinate, or the label if there is nothing else.
    """
    named = [i for i in left if names[i].lower() in LABEL_NAMES]
    words = [i for i in named if names[i].lower() != "y"]
    axes = [i for i in left if names[i].lower() in AXES]
    if axes and words:
        named = words
    elif axes and named and len(left) > 2:
        named = [i for i in left if i not in axes or i == left[-1]]
    elif named and not words and named[0] not in (left[0], left[-1]):
        named += left[-1:]
    if of_sequences and not named:
        raise TpsgdError(
            f"{file} has sequences but no column label, y, class or target: name it, label=..."
            " (--label)."
        )
    candidates = dict.fromkeys(names[i] for i in named)
    if len(candidates) > 1:
        raise _several_labels(file, list(candidates))
    return tuple(named[:1] or left[-1:])


def _several_labels(file: Path, names: Sequence[str]) -> TpsgdError:
    """An error that asks which of several columns is the label."""
    listed = shortened(", ".join(f"'{name}'" for name in names))
    return TpsgdError(
        f"{file} has several columns that may be the label, {listed}: name it, label=... (--label)."
    )


def _check_last(file: Path, features: list[str], x: Array, raw: RawData, label: str) -> None:
    """Refuse the last column as the label if another one has the name of a label, or its values.

    Those are a few whole numbers, where the last column has many.
    """

    def is_rival(name: str, column: Array) -> bool:
        if name.lower() in LIKELY_NAMES:
            return True
        values = np.unique(column[~np.isnan(column)]) if many else column[:0]
        return 1 < len(values) <= MOST_SINGLE_CLASSES and bool((values == np.floor(values)).all())

    many = len(raw.classes) > MOST_SINGLE_CLASSES and number(raw.classes[0]) is not None
    rivals = [name for name, column in zip(features, x.T, strict=True) if is_rival(name, column)]
    if rivals:
        raise _several_labels(file, [label, *rivals])


def _label_columns(choices: Columns, names: list[str]) -> tuple[str, ...]:
    """The names of the label columns that were chosen; of one text, `price,area`, two."""
    label = tuple(dict.fromkeys(choices.label))
    if len(label) == 1 and label[0] not in names and "," in label[0]:
        words = tuple(dict.fromkeys(word.strip() for word in label[0].split(",")))
        label = words if choices.numbers or {*words} <= {*names} else label
    if len(label) > 1 and not choices.numbers:
        raise TpsgdError(f"several label columns are numbers to predict: {AS_NUMBERS}.")
    return label


def _read_cells(file: Path, header: Header, blanks: bool) -> tuple[Array, dict[int | None, Array]]:
    """The table as numbers, and the columns of labels and of sequences as text.

    They are float64: float32 cannot tell two seconds of a calendar apart, nor two places on a map.
    A table that has blanks, or decimal commas and columns separated by something else, is read
    twice.
    """
    check_text(file, header)
    has_commas = header.delimiter != ","
    codes: dict[int, dict[str, int]]  # the number of each text in a column of texts
    texts_at = (*(() if header.of_numbers else header.labels), header.sequence)
    codes = {column: {} for column in texts_at if column is not None}
    read = (*header.features, *(header.labels if header.of_numbers else ()))
    used = {*read, *codes, header.time}
    converters: dict[int | str, Callable[[str], float]]
    converters = {i: lambda _: 0.0 for i in range(len(header.names)) if i not in used}
    for column, code in codes.items():
        converters[column] = lambda text, code=code: code.setdefault(text.strip(), len(code))

    def lenient(text: str) -> float:
        value = number(text, has_commas, np.nan if blanks else None)
        return np.inf if value is None else value  # refused below

    table = _numbers(file, header.delimiter, converters)
    if table is None and (blanks or has_commas):
        converters |= dict.fromkeys(read, lenient)
        table = _numbers(file, header.delimiter, converters)
    if table is None:
        raise first_mistake(file, header, blanks)
    if table.size == 0:
        raise TpsgdError(f"{file} has a header but no rows.")
    fits = table.shape[1] == len(header.names) and not any("" in code for code in codes.values())
    for column, values in enumerate(table.T):
        is_blank = np.isnan(values) if blanks and column in header.features else False
        fits = fits and ((np.abs(values) <= LARGEST) | is_blank).all()  # also as float32
    if not fits:
        raise first_mistake(file, header, blanks)
    texts: dict[int | None, Array] = {}
    for column, code in codes.items():
        check_cells(file, header.names[column], code, len(table))
        texts[column] = np.array(list(code))[table[:, column].astype(np.int64)]
    return table, texts


def _numbers(
    file: Path, delimiter: str, converters: dict[int | str, Callable[[str], float]]
) -> Array | None:
    """The cells of a table; None if one cannot be converted, or if the lengths of rows differ."""
    with warnings.catch_warnings(), suppress(ValueError):
        warnings.simplefilter("ignore", UserWarning)  # an empty table, refused by the caller
        return np.loadtxt(
            file, np.float64, None, delimiter, converters,
            skiprows=1, ndmin=2, encoding="utf-8-sig", quotechar='"',
        )  # fmt: skip


def _warn_of_row_numbers(file: Path, names: list[str], x: Array) -> None:
    """Warn of columns that number the rows or name them, which say nothing of other rows."""
    for name, column in zip(names, x.T, strict=True):
        column = column[~np.isnan(column)]
        steps, is_time = np.diff(column), TIME_NAME.search(name.lower()) is not None
        rises = len(column) >= MANY_ROWS and (steps >= 0).all()
        is_id = ID_NAME.search(name) is not None and (column == np.floor(column)).all()
        least = MANY_TIMES if rises and is_time else MANY_VALUES
        if (rises or is_id) and len(np.unique(column)) >= least * len(column):
            numbers = is_id or (steps == 1).all()
            problem = "numbers the rows" if numbers else "never falls from row to row"
            warnings.warn(
                f"{file}: the column '{name}' {problem}, and is used as a feature: leave "
                f"it out if it is an id or a time, drop=[{name!r}] (--drop {name})",
                stacklevel=2,
            )


def _to_sequences(
    file: Path, header: Header, rows: RawArrays, sequence_names: Array, time: Array | None
) -> RawArrays:
    """One sample for each name, with its steps ordered by time or as in the file."""
    names, number = np.unique(sequence_names, return_inverse=True)
    order = np.lexsort((number,) if time is None else (time, number))
    x, y, number = rows.x[order], rows.y, number[order]
    lengths = np.bincount(number)
    first = np.cumsum(lengths) - lengths
    if y is not None:
        y = y[order]
        if (change := (y != y[first][number]).reshape(len(y), -1).any(1)).any():
            raise TpsgdError(f"{file}: the sequence '{names[number[change][0]]}' has two labels.")
        y = y[first]
    if time is not None and header.time is not None:
        time, is_counted = time[order], header.names[header.time].lower() == "step"
        difference = np.diff(time)
        wrong = difference != 1 if is_counted else difference == 0
        if (wrong := wrong & (number[1:] == number[:-1])).any():
            i = int(wrong.argmax())
            raise TpsgdError(
                f"{file}: the sequence '{names[number[i]]}' goes from {time[i]:.12g} to"
                f" {time[i + 1]:.12g}; a column time must have each time once, and a column step"
                " must count by one."
            )
    longest = int(lengths.max())
    nbytes = 8 * len(lengths) * longest * x.shape[1]
    if is_much_larger(nbytes, file):
        raise TpsgdError(
            f"{file}: {len(lengths):,} sequences, padded to the {longest:,} steps of the longest"
            f" one, would take {size(nbytes)}; cut long sequences into several."
        )
    is_step = np.arange(longest) < lengths[:, None]
    steps = np.zeros((*is_step.shape, x.shape[1]))
    steps[is_step] = x
    return rows._replace(x=steps, y=y, lengths=lengths, names=names.tolist())
