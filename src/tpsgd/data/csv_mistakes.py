"""What is wrong with a table that cannot be read: the first line or column, and what to do."""

import csv
import shlex
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from tpsgd.common.errors import TpsgdError, shortened
from tpsgd.data.labels import LARGEST

BLANKS = {"", "nan", "na", "n/a", "null", "none", "?"}  # how programs write that a value is missing
MOST_CLASSES = 20  # different texts in a column that looks like the label


class Header(NamedTuple):
    """The names of the columns, what separates them, and the numbers of the columns by their role.

    Only a table of time steps has a column for the sequence, and perhaps one for the time. New
    samples may have no label; labels that are numbers may be in several columns.
    """

    names: list[str]
    delimiter: str
    features: list[int]
    labels: tuple[int, ...]
    sequence: int | None
    time: int | None
    of_numbers: bool = False


def number(text: str, comma: bool = False, blank: float | None = None) -> float | None:
    """The number in a cell, perhaps with a decimal comma; None if there is none.

    Examples:
        >>> number("1,5", comma=True), number("n/a", blank=0.0), number("low")
        (1.5, 0.0, None)
    """
    if text.strip().lower() in BLANKS:
        return blank
    try:
        return float(text.replace(",", ".") if comma else text)
    except ValueError:
        return None


def first_mistake(file: Path, header: Header, blanks: bool) -> TpsgdError:
    """An error that names the first line or cell that cannot be used; slow, so called last."""
    names, comma = header.names, header.delimiter != ","
    for line, row in _rows(file, header):
        if len(row) != len(names):
            hint = "; with decimal commas, columns need semicolons between them"
            hint = hint if len(row) > len(names) and not comma else ""
            if names[0].startswith("#"):
                hint = f"; line 1 must be the header, and is '{shortened(names[0])}'"
            return TpsgdError(f"{line} has {len(row)} cells, the header has {len(names)}{hint}.")
        for i, cell in enumerate(row):
            if i in header.labels and header.of_numbers:
                value = number(cell, comma)
                if value is None or not abs(value) <= LARGEST:
                    return _label_mistake(f"{line}, column '{names[i]}'", cell)
            elif i in (*header.labels, header.sequence) and not cell.strip():
                return TpsgdError(f"{line} has no text in the column '{names[i]}'.")
            if i in (header.time, *header.features):
                value = number(cell, comma, 0.0 if blanks and i != header.time else None)
                if value is None or not abs(value) <= LARGEST:
                    return _cell_mistake(file, header, line, i, cell)
    return TpsgdError(f"{file} cannot be read as a table.")


def _rows(file: Path, header: Header) -> Iterator[tuple[str, list[str]]]:
    """The rows below the header as text, each with its place in the file."""
    with suppress(csv.Error), file.open(encoding="utf-8-sig", newline="") as stream:
        rows = csv.reader(stream, delimiter=header.delimiter)
        next(rows)
        for row in filter(None, rows):
            yield f"{file}, line {rows.line_num}", row


def _label_mistake(place: str, cell: str) -> TpsgdError:
    if cell.strip().lower() in BLANKS:
        return TpsgdError(f"{place}: '{cell}' is blank; leave out rows without a number to learn.")
    return TpsgdError(
        f"{place}: '{shortened(cell)}' is no number to learn; classes are predicted without "
        "task='regression' (--task regression)."
    )


def _cell_mistake(file: Path, header: Header, line: str, column: int, cell: str) -> TpsgdError:
    """What is wrong with a cell that must be a number; a column of texts is described as such."""
    place, texts = f"{line}, column '{header.names[column]}'", _texts(file, header)
    if cell.strip().lower() in BLANKS and column != header.time and column not in texts:
        return TpsgdError(
            f"{place}: '{cell}' is blank; to fill blank cells, train with impute='median' (--impute"
            f" median), or leave the column out, {_drop([header.names[column]])}."
        )
    if number(cell.replace(",", "")) is not None and "," in cell:
        return TpsgdError(f"{place}: '{cell}' has a comma in it; write a number as 1234.5.")
    if column not in texts:
        return TpsgdError(f"{place}: '{shortened(cell)}' is not a finite number.")
    names = {i: header.names[i] for i in texts}
    labels = {i: values for i, values in texts.items() if 1 < len(values) <= MOST_CLASSES}
    likely = min(labels, key=lambda i: len(labels[i]), default=None)
    advice = ""
    if likely is not None:
        shown, label = shortened(", ".join(sorted(labels[likely])), 40), names[likely]
        option = f"label={label!r} (--label {shlex.quote(label)})"
        advice = f"if '{label}' ({shown}) is the label, say {option}; "
    others = [name for i, name in names.items() if i != likely] or list(names.values())
    words = shortened(", ".join(f"'{name}'" for name in names.values()))
    return TpsgdError(
        f"{file} has text, not numbers, in {words}: {advice}leave out columns that are no"
        f" measurements, {_drop(others)}."
    )


def _drop(names: list[str]) -> str:
    return f"drop={names} (--drop {shlex.quote(','.join(names))})"


def _texts(file: Path, header: Header) -> dict[int, set[str]]:
    """The different texts of each column of features that has more texts than numbers.

    Words for blanks, such as none, are among them: there they may be the name of a class.
    """
    texts: dict[int, set[str]] = {i: set() for i in header.features}
    surplus = dict.fromkeys(texts, 0)  # of texts over numbers
    for _, row in _rows(file, header):
        for i in texts if len(row) == len(header.names) else ():
            cell = row[i].strip()
            if number(cell, comma=True) is not None:
                surplus[i] -= 1
            elif cell:
                texts[i].add(cell)
                surplus[i] += cell.lower() not in BLANKS
    return {i: values for i, values in texts.items() if surplus[i] > 0}
