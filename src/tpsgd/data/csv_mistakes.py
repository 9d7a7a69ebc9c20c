"""What is wrong with a table that cannot be read: the first line or column, and what to do."""

import csv
import shlex
from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tpsgd.common.errors import TpsgdError, shortened
from tpsgd.data.labels import LARGEST

BLANKS = {"", "nan", "na", "n/a", "null", "none", "?"}  # how programs write that a value is missing
HINT = "columns are separated by commas, semicolons or tabs, and line 1 must be the header"
AT_A_TIME = 2**20  # bytes of a file
LONGEST = 1000  # characters of a name
MOST_GROWN, ALWAYS_READ = 50, 2**25  # times a file's size in memory, and bytes always allowed
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
    for number_of_line, row in _rows(file, header):
        line = f"{file}, line {number_of_line}"
        if not row:
            continue
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


def _rows(file: Path, header: Header) -> Iterator[tuple[int, list[str]]]:
    """The rows below the header as text, each with the number of its last line."""
    with file.open(encoding="utf-8-sig", newline="") as stream:
        rows = csv.reader(stream, delimiter=header.delimiter)
        try:
            next(rows)
            for row in rows:
                yield rows.line_num, row
        except csv.Error as error:
            raise TpsgdError(
                f"{file}, line {rows.line_num} cannot be read ({error}): shorten its cells, or end "
                "a quote that begins before."
            ) from error


def check_text(file: Path, header: Header) -> None:
    """Refuse bytes that are no text, and a quote without an end, which hides all lines after it."""
    quotes = 0
    with file.open("rb") as stream:
        for piece in iter(partial(stream.read, AT_A_TIME), b""):
            quotes += piece.count(b'"')
            if b"\0" in piece:
                raise TpsgdError(f"{file} has NUL bytes, and is no text; save it as UTF-8.")
    before = last = 1
    for line, _ in _rows(file, header) if quotes % 2 else ():
        before, last = last, line
    if last > before + 1:
        raise TpsgdError(f"{file}, line {before + 1}: a quote begins there that does not end.")


def check_cells(file: Path, name: str, texts: Collection[str], rows: int) -> None:
    """Refuse texts of a column that are no names, as where several columns or lines are a cell."""
    for sign in ",;\t":
        if sign in name and all(sign in text for text in texts):
            raise TpsgdError(f"{file}: '{name}' has '{sign}' in it, and so have its cells: {HINT}.")
    long = max(texts, key=len)
    broken = next((text for text in texts if len(text.splitlines()) > 1), "")
    if broken or len(long) > LONGEST or is_much_larger(4 * len(long) * rows, file):
        raise TpsgdError(
            f"{file}, column '{name}': the text '{shortened(broken or long, 20)}' has"
            f" {len(broken or long):,} characters{' in several lines' * bool(broken)} and is no"
            " name of a class or of a sequence."
        )


def is_much_larger(nbytes: int, file: Path) -> bool:
    """Whether a table would take much more memory than its file takes on the disk."""
    return nbytes > max(ALWAYS_READ, MOST_GROWN * file.stat().st_size)


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
