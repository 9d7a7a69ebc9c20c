"""One's own data: which reader a path asks for, and arrays from `.npz` files and functions."""

import importlib.util
import sys
import zipfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tpsgd.data import npz
from tpsgd.data.arrays import from_arrays
from tpsgd.data.images import read_folder
from tpsgd.data.rows import Array, Raw
from tpsgd.data.sequences import Part, from_sequences
from tpsgd.data.table import read_csv
from tpsgd.errors import TpsgdError
from tpsgd.nets.padded import Padded

KINDS = ("x", "tokens", "y", "lengths")


class Own(NamedTuple):
    """Where data of one's own lies, and what reads it there.

    `repeats`: it reads the same as long as nobody changes that file or folder.
    """

    path: Path
    read: Callable[[], Raw]
    repeats: bool = True


def find(spec: str) -> Own | None:
    """What `spec` names, not yet read, or None where it looks like no file of one's own.

    `FILE.npz`, `FILE.csv`, `FILE.py:FUNCTION`, `FOLDER` or `FOLDER@SIZE` of images.
    """
    path = Path(spec).expanduser()
    if spec and path.is_dir():
        return Own(path, partial(read_folder, path))
    folder, _, size = spec.rpartition("@")
    if folder and size.isdecimal():
        path = Path(folder).expanduser()
        return Own(path, partial(read_folder, path, int(size)))
    file, _, function = spec.rpartition(":")
    if file.endswith(".py"):
        path = _there(Path(file).expanduser())
        return Own(path, partial(from_function, path, function), repeats=False)
    if (suffix := path.suffix.lower()) in (".npz", ".csv"):
        return Own(path, partial(read_npz if suffix == ".npz" else read_csv, _there(path)))
    if len(path.parts) > 1 or (spec and path.exists()):
        raise TpsgdError(f"{_there(path)} is none of FILE.npz, FILE.csv, FILE.py:FUNCTION, FOLDER.")
    return None


def read_npz(file: Path) -> Raw:
    """Arrays `x` and `y`, and `x_test` and `y_test` where there is a test part.

    `tokens` in place of `x` means whole numbers to look up; `lengths` marks padded sequences.
    """
    try:
        with file.open("rb") as stream, np.load(stream, allow_pickle=False) as arrays:
            names = set(arrays.files)
            wanted = {kind + part for kind in KINDS for part in ("", "_test")}
            found = {k: npz.array(file, arrays, k) for k in wanted & names}
    except (OSError, EOFError, TypeError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        if "Object arrays" in str(error):
            what = "holds Python objects, which may run code when read; save plain arrays"
        else:
            what = "is no .npz file, or not a whole one; save it again with numpy.savez"
        raise TpsgdError(f"{file} {what}.") from error
    x = "tokens" if "tokens" in found else "x"
    one = {x, "y"} | ({"lengths"} & found.keys())
    if found.keys() not in (one, one | {f"{kind}_test" for kind in one}):
        raise TpsgdError(
            f"{file} holds {', '.join(sorted(names)[:6]) or 'nothing'}{', ...' * (len(names) > 6)};"
            " expected x and y, and x_test and y_test both or neither (sequences: tokens in place"
            " of x; lengths, for both parts)."
        )
    parts = [
        Part(found[f"{x}{part}"], found[f"y{part}"], found.get(f"lengths{part}"))
        for part in ("", "_test")
        if f"y{part}" in found
    ]
    return _raw(str(file), parts, x == "tokens")


def from_function(file: Path, name: str) -> Raw:
    """Run `name` in `file`: it returns (x, y), or ((x, y), (x_test, y_test)).

    x may be `Padded`, or a list of sequences of different lengths; if such hold whole numbers, one
    a step, they are tokens.
    """
    where, result = f"{file}:{name}", call(file, name)
    nested = isinstance(result, tuple) and bool(result) and isinstance(result[0], tuple)
    pairs = list(result) if nested else [result]
    if len(pairs) > 2 or not all(isinstance(p, tuple) and len(p) == 2 for p in pairs):
        raise TpsgdError(f"{where} must return (x, y) or ((x, y), (x_test, y_test)).")
    parts = [_part(where, *pair) for pair in pairs]
    padded = all(part.lengths is not None for part in parts)
    if not padded and any(part.lengths is not None for part in parts):
        raise TpsgdError(f"{where} returned one part as Padded and one not; make them alike.")
    x = parts[0].x
    return _raw(where, parts, padded and x.ndim == 2 and x.dtype.kind in "iu")


def call(file: Path, name: str) -> Any:
    """What the function `name` in `file` returns when it is called without arguments."""
    where = f"{file}:{name}"
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
        raise TpsgdError(f"{where} failed with {type(error).__name__}: {error}") from error
    if not callable(function):
        raise TpsgdError(f"{file} has no function '{name}'.")
    return result


def _raw(where: str, parts: list[Part], tokens: bool) -> Raw:
    """Padded sequences and tokens need care of their own; the rest are plain arrays."""
    test = parts[1] if len(parts) == 2 else None
    if tokens or parts[0].lengths is not None:
        return from_sequences(where, parts[0], test, tokens)
    return from_arrays(where, parts[0][:2], test and test[:2])


def _part(where: str, x: Any, y: Any) -> Part:
    lengths = None
    if isinstance(x, list) and len({len(one) for one in x if hasattr(one, "__len__")}) > 1:
        with suppress(ValueError, TypeError):  # what cannot be sequences is refused as an array
            x = Padded.of(x)
    if isinstance(x, Padded):
        x, lengths = x.data, _array(where, x.lengths)
    return Part(_array(where, x), _array(where, y), lengths)


def _array(where: str, value: Any) -> Array:
    try:
        return np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)
    except ValueError as error:
        raise TpsgdError(f"{where} returned samples of different shapes ({error}).") from error


def _there(path: Path) -> Path:
    if not path.exists():
        raise TpsgdError(f"there is no {path}; check the name, or give the full path.")
    return path
