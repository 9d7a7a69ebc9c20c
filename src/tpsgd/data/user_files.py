"""Find the reader for a user's file or folder; read what a user's Python function returns."""

import importlib.util
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tpsgd.data.arrays import Arrays, from_arrays
from tpsgd.data.csv_files import read_csv
from tpsgd.data.dataset import Array, RawData
from tpsgd.data.images import read_folder
from tpsgd.data.npz_files import read_npz
from tpsgd.errors import TpsgdError
from tpsgd.nets.padded import Padded


class UserFile(NamedTuple):
    """A file or folder, its reader, and whether it reads the same until the file changes."""

    path: Path
    read: Callable[[], RawData]
    is_stable: bool = True


def find(spec: str) -> UserFile | None:
    """The file or folder that `spec` names, not yet read; None if `spec` does not look like one.

    `FILE.npz`, `FILE.csv`, `FILE.py:FUNCTION`, or `FOLDER` or `FOLDER@SIZE` of images.
    """
    path = Path(spec).expanduser()
    if spec and path.is_dir():
        return UserFile(path, partial(read_folder, path))
    folder, _, size = spec.rpartition("@")
    if folder and size.isdecimal():
        path = Path(folder).expanduser()
        return UserFile(path, partial(read_folder, path, int(size)))
    file, _, function = spec.rpartition(":")
    if file.endswith(".py"):
        path = _existing(Path(file).expanduser())
        return UserFile(path, partial(read_function, path, function), is_stable=False)
    if (suffix := path.suffix.lower()) in (".npz", ".csv"):
        return UserFile(path, partial(read_npz if suffix == ".npz" else read_csv, _existing(path)))
    if len(path.parts) > 1 or (spec and path.exists()):
        raise TpsgdError(
            f"{_existing(path)} is not one of FILE.npz, FILE.csv, FILE.py:FUNCTION, FOLDER."
        )
    return None


def read_function(file: Path, name: str) -> RawData:
    """Call the function `name` of `file`: it returns (x, y), or ((x, y), (x_test, y_test)).

    x may be `Padded`, or a list of sequences of different lengths. Such sequences are tokens if
    they have one whole number a step.
    """
    source, result = f"{file}:{name}", call(file, name)
    is_nested = isinstance(result, tuple) and bool(result) and isinstance(result[0], tuple)
    pairs = list(result) if is_nested else [result]
    if len(pairs) > 2 or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise TpsgdError(f"{source} must return (x, y) or ((x, y), (x_test, y_test)).")
    splits = [_arrays(source, *pair) for pair in pairs]
    are_padded = {split.lengths is not None for split in splits}
    if len(are_padded) > 1:
        raise TpsgdError(f"{source}: only one of x and x_test is Padded; they must match.")
    x = splits[0].x
    return from_arrays(source, splits, True in are_padded and x.ndim == 2 and x.dtype.kind in "iu")


def call(file: Path, name: str) -> Any:
    """What the function `name` of a Python file returns; it is called without arguments."""
    spec = importlib.util.spec_from_file_location(f"tpsgd_own_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise TpsgdError(f"{file} cannot be imported as Python.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
        function = getattr(module, name, None)
        result: Any = function() if callable(function) else None
    except Exception as error:
        raise TpsgdError(f"{file}:{name} failed with {type(error).__name__}: {error}") from error
    if not callable(function):
        raise TpsgdError(f"{file} has no function '{name}'.")
    return result


def _arrays(source: str, x: Any, y: Any) -> Arrays:
    lengths = None
    if isinstance(x, list) and len({len(row) for row in x if hasattr(row, "__len__")}) > 1:
        with suppress(ValueError, TypeError):  # _array refuses what cannot be padded
            x = Padded.of(x)
    if isinstance(x, Padded):
        x, lengths = x.data, _array(source, x.lengths)
    return Arrays(_array(source, x), _array(source, y), lengths)


def _array(source: str, values: Any) -> Array:
    try:
        return np.asarray(values.detach().cpu() if hasattr(values, "detach") else values)
    except ValueError as error:
        raise TpsgdError(f"{source} returned samples of different shapes ({error}).") from error


def _existing(path: Path) -> Path:
    if not path.exists():
        raise TpsgdError(f"there is no {path}; check the name, or give the full path.")
    return path
