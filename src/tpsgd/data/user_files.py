"""Find the reader for a user's file or folder; read what a user's Python function returns."""

import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tpsgd.common.errors import TpsgdError
from tpsgd.common.files import call_function, is_function, user_path
from tpsgd.data.arrays import RawArrays, from_arrays
from tpsgd.data.csv_files import Columns, read_csv
from tpsgd.data.dataset import Array, RawData
from tpsgd.data.images import read_folder
from tpsgd.data.npz_files import read_npz
from tpsgd.data.registry import DATASETS
from tpsgd.nets.padded import Padded

LONGEST_SIZE = 8  # digits of FOLDER@SIZE
TABLES = (".csv", ".tsv")


class UserFile(NamedTuple):
    """A file or folder, and the function that reads it to train on it."""

    path: Path
    read: Callable[[], RawData]


def find(spec: str, columns: Columns | None = None) -> UserFile | None:
    """The file or folder that `spec` names, not yet read; None if `spec` does not look like one.

    `FILE.npz`, `FILE.csv`, `FILE.py:FUNCTION`, or `FOLDER` or `FOLDER@SIZE` of images. Only a
    table has `columns`.
    """
    path, columns = user_path(spec), columns or Columns()
    suffix = path.suffix.lower()
    if any(columns[:4]) and suffix not in TABLES:
        raise TpsgdError(f"label, drop and impute are for tables, FILE.csv; {spec} is none.")
    is_there = spec in DATASETS or "@" in spec or os.path.exists(path)
    has_numbers = suffix in (*TABLES, ".npz") or is_function(spec)
    if columns.numbers and is_there and not has_numbers:
        raise TpsgdError(
            "task='regression' (--task regression) is for FILE.csv, FILE.npz and FILE.py:FUNCTION; "
            f"{spec} has classes."
        )
    if spec and os.path.isdir(path):
        return UserFile(path, partial(read_folder, path))
    folder, _, size = spec.rpartition("@")
    if folder and size.isdecimal():
        path = user_path(folder)
        if len(size) > LONGEST_SIZE:
            raise TpsgdError(f"{spec} asks for images that are too large; give a size such as @64.")
        return UserFile(path, partial(read_folder, path, int(size)))
    if is_function(spec):
        path = user_path(spec.rpartition(":")[0])
        return UserFile(path, lambda: from_arrays(spec, read_function(spec), columns.numbers))
    if not os.path.isfile(path):
        if suffix in (*TABLES, ".npz") or len(path.parts) > 1:
            raise TpsgdError(f"there is no {path}; check the name, or give the full path.")
        return None
    if suffix in TABLES:
        return UserFile(path, partial(read_csv, path, columns))
    if suffix == ".npz":
        return UserFile(path, lambda: from_arrays(str(path), read_npz(path), columns.numbers))
    raise TpsgdError(f"{path} is not one of FILE.npz, FILE.csv, FILE.py:FUNCTION, FOLDER.")


def read_function(spec: str) -> list[RawArrays]:
    """Call the function FILE.py:FUNCTION: it returns (x, y), or ((x, y), (x_test, y_test)).

    x may be `Padded`, or a list of sequences of different lengths. Such sequences are tokens if
    they have one whole number a step.
    """
    result = call_function(spec)
    is_nested = isinstance(result, tuple) and bool(result) and isinstance(result[0], tuple)
    pairs = list(result) if is_nested else [result]
    if len(pairs) > 2 or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise TpsgdError(f"{spec} must return (x, y) or ((x, y), (x_test, y_test)).")
    return [_arrays(spec, *pair) for pair in pairs]


def _arrays(source: str, x: Any, y: Any) -> RawArrays:
    if isinstance(x, list) and len({len(row) for row in x if hasattr(row, "__len__")}) > 1:
        with suppress(ValueError, TypeError):  # _array refuses what cannot be padded
            x = Padded.of(x)
    if not isinstance(x, Padded):
        return RawArrays(_array(source, x), _array(source, y))
    data, lengths = _array(source, x.data), _array(source, x.lengths)
    are_tokens = data.ndim == 2 and data.dtype.kind in "iu"
    return RawArrays(data, _array(source, y), lengths, are_tokens)


def _array(source: str, values: Any) -> Array:
    try:
        return np.asarray(values.detach().cpu() if hasattr(values, "detach") else values)
    except ValueError as error:
        raise TpsgdError(f"{source} returned samples of different shapes ({error}).") from error
    except (TypeError, RuntimeError) as error:  # a sparse tensor, or one on the meta device
        reason = str(error).partition("\n")[0]
        raise TpsgdError(f"{source} returned what is no array of numbers ({reason})") from error
