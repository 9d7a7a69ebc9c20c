"""Tables: a `.csv` file with a header and a label column."""

import csv
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tpsgd.data.raw import Array, Raw, encode, numbers
from tpsgd.errors import TpsgdError

LABELS = ("label", "y", "class", "target")
LARGEST = float(np.finfo(np.float32).max)


class Layout(NamedTuple):
    """What the header says: the columns' names, what parts them, which are features, the label."""

    names: list[str]
    delimiter: str
    features: list[int]
    label: int


def read_csv(file: Path) -> Raw:
    """Features and labels of a table; features are taken as they are, unscaled.

    The label column is `label`, `y`, `class` or `target`, else the last one. A first column
    without a name holds row names and is left out.
    """
    layout = _layout(file)
    labels: dict[str, int] = {}
    try:
        table = _parse(file, layout, labels)
    except UnicodeDecodeError as error:
        raise _not_text(file, error) from error
    except ValueError as error:
        raise _blame(file, layout) from error
    if table.size == 0:
        raise TpsgdError(f"{file} has a header but no rows.")
    if table.shape[1] != len(layout.names) or "" in labels or not np.isfinite(table).all():
        raise _blame(file, layout)
    y = np.array(list(labels))[table[:, layout.label].astype(np.int64)]
    classes, pair, _ = encode(str(file), (table[:, layout.features], y), None)
    note = f"label column '{layout.names[layout.label]}', features unscaled"
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
    label = next((lower.index(name) for name in LABELS if name in lower), len(names) - 1)
    features = [i for i in range(len(names)) if i != label and (i or names[0])]
    if not features:
        raise TpsgdError(f"{file} has no column beside the label '{names[label]}'.")
    return Layout(names, delimiter, features, label)


def _parse(file: Path, layout: Layout, labels: dict[str, int]) -> Array:
    """The whole table as float32 in one pass; a label becomes its number in `labels`."""
    columns: dict[int | str, Callable[[str], float]] = {
        layout.label: lambda text: labels.setdefault(text.strip(), len(labels))
    }
    if 0 not in layout.features and layout.label != 0:
        columns[0] = lambda _: 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of an empty table; the caller sees it
        return np.loadtxt(
            file, np.float32, None, layout.delimiter, columns,
            skiprows=1, ndmin=2, encoding="utf-8-sig", quotechar='"',
        )  # fmt: skip


def _blame(file: Path, layout: Layout) -> TpsgdError:
    """Name the first line or cell that cannot be used: slow, so asked only when one is there."""
    names, delimiter, features, label = layout
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
                for i in features:
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
