"""One's own data: which reader a path asks for, and arrays from `.npz` files and functions."""

import importlib.util
import sys
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from tpsgd.data.arrays import from_arrays
from tpsgd.data.images import read_folder
from tpsgd.data.raw import Pair, Raw
from tpsgd.data.table import read_csv
from tpsgd.errors import TpsgdError


def read(spec: str) -> Raw | None:
    """Read what `spec` names, or None where it looks like no file of one's own.

    `FILE.npz`, `FILE.csv`, `FILE.py:FUNCTION`, `FOLDER` or `FOLDER@SIZE` of images.
    """
    path = Path(spec).expanduser()
    if spec and path.is_dir():
        return read_folder(path)
    folder, _, size = spec.rpartition("@")
    if folder and size.isdecimal():
        return read_folder(Path(folder).expanduser(), int(size))
    file, _, function = spec.rpartition(":")
    if file.endswith(".py"):
        return from_function(_there(Path(file).expanduser()), function)
    if (suffix := path.suffix.lower()) in (".npz", ".csv"):
        return (read_npz if suffix == ".npz" else read_csv)(_there(path))
    if len(path.parts) > 1 or (spec and path.exists()):
        raise TpsgdError(f"{_there(path)} is none of FILE.npz, FILE.csv, FILE.py:FUNCTION, FOLDER.")
    return None


def read_npz(file: Path) -> Raw:
    """Arrays `x` and `y`, and `x_test` and `y_test` where there is a test part."""
    try:
        with file.open("rb") as stream, np.load(stream, allow_pickle=False) as arrays:
            names = set(arrays.files)
            wanted = [k for k in ("x", "y", "x_test", "y_test") if k in names]
            found = {k: arrays[k] for k in wanted}
    except (OSError, EOFError, TypeError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        if "Object arrays" in str(error):
            what = "holds Python objects, which may run code when read; save plain arrays"
        else:
            what = "is no .npz file, or not a whole one; save it again with numpy.savez"
        raise TpsgdError(f"{file} {what}.") from error
    if "x" not in found or "y" not in found or ("x_test" in found) != ("y_test" in found):
        raise TpsgdError(
            f"{file} holds {', '.join(sorted(names)[:6]) or 'nothing'}{', ...' * (len(names) > 6)};"
            " expected x and y, and x_test and y_test both or neither."
        )
    test = (found["x_test"], found["y_test"]) if "x_test" in found else None
    return from_arrays(str(file), (found["x"], found["y"]), test)


def from_function(file: Path, name: str) -> Raw:
    """Run `name` in `file`: it returns (x, y), or ((x, y), (x_test, y_test))."""
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
    nested = isinstance(result, tuple) and bool(result) and isinstance(result[0], tuple)
    pairs = list(result) if nested else [result]
    if len(pairs) > 2 or not all(isinstance(p, tuple) and len(p) == 2 for p in pairs):
        raise TpsgdError(f"{where} must return (x, y) or ((x, y), (x_test, y_test)).")
    arrays = [_as_arrays(where, pair) for pair in pairs]
    return from_arrays(where, arrays[0], arrays[1] if len(arrays) == 2 else None)


def _as_arrays(where: str, pair: tuple[Any, Any]) -> Pair:
    try:
        x, y = (np.asarray(v.detach().cpu() if hasattr(v, "detach") else v) for v in pair)
    except ValueError as error:
        raise TpsgdError(f"{where} returned samples of different shapes ({error}).") from error
    return x, y


def _there(path: Path) -> Path:
    if not path.exists():
        raise TpsgdError(f"there is no {path}; check the name, or give the full path.")
    return path
