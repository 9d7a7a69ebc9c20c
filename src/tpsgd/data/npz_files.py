"""Read `.npz` files; their arrays are mapped into memory if they are not compressed."""

import math
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from tpsgd.common.errors import TpsgdError
from tpsgd.common.units import size
from tpsgd.data.arrays import RawArrays
from tpsgd.data.dataset import Array

MAPPED = "save it with numpy.savez, without compression, and it is mapped instead of read"
NAMES = {kind + suffix for kind in ("x", "tokens", "y", "lengths") for suffix in ("", "_test")}
MOST_SHRUNK = 80  # times, since arrays are copied twice: hardly any real data is compressed better
ALWAYS_READ = 2**26  # bytes of arrays that may be compressed even better


def read_npz(file: Path, labelled: bool = True) -> list[RawArrays]:
    """Arrays `x` and `y`, and perhaps `x_test` and `y_test`; new samples need no `y`.

    Arrays `tokens` in place of `x` are whole numbers for an embedding; `lengths` are the numbers
    of steps of padded sequences.
    """
    arrays, names = _read_arrays(file)
    x = "tokens" if "tokens" in arrays else "x"
    suffixes = [suffix for suffix in ("", "_test") if x + suffix in arrays]
    needed = {x, "y"} | ({"lengths"} & arrays.keys())
    complete = arrays.keys() in (needed, needed | {f"{name}_test" for name in needed})
    if not suffixes or (labelled and not complete):
        raise TpsgdError(
            f"{file} holds {', '.join(names) or 'nothing'}; expected x and y, and x_test and y_test"
            " both or neither (tokens in place of x and lengths for sequences, tokens_test and"
            " lengths_test for the test set)."
        )
    return [
        RawArrays(arrays[x + s], arrays.get("y" + s), arrays.get("lengths" + s), x == "tokens")
        for s in suffixes
    ]


def _read_arrays(file: Path) -> tuple[dict[str, Array], list[str]]:
    """The arrays with names that mean something here, and the names of all arrays."""
    try:
        with file.open("rb") as stream, np.load(stream) as archive:
            names = sorted(archive.files)
            mapped = {name: _mapped(file, archive.zip, name) for name in NAMES.intersection(names)}
            packed = [name for name, array in mapped.items() if array is None]
            _check_size(file, archive.zip, packed)
            return mapped | {name: archive[name] for name in packed}, names
    except TpsgdError:
        raise
    except MemoryError as error:
        raise TpsgdError(f"{file} does not fit in memory; {MAPPED}.") from error
    except Exception as error:  # a damaged header makes numpy raise anything
        if "Object arrays" in str(error):
            problem = "holds Python objects, which may run code when read; save plain arrays"
        else:
            problem = "is not a complete .npz file; save it again with numpy.savez"
        raise TpsgdError(f"{file} {problem}.") from error


def _header(content: Any) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """The shape, the order of the axes and the dtype of an array, from the start of its file."""
    np.lib.format.read_magic(content)  # version 1, except for arrays of records
    return np.lib.format.read_array_header_1_0(content)


def _mapped(file: Path, archive: zipfile.ZipFile, name: str) -> Any:
    """An array that is stored uncompressed, mapped read-only; None for any other array."""
    info = archive.getinfo(f"{name}.npy")
    with archive.open(info) as content:
        shape, is_fortran, dtype = _header(content)
        stored = info.compress_type == zipfile.ZIP_STORED
        _check_whole(info, shape, dtype)
        if not stored or dtype.hasobject or not math.prod(shape):
            return None
        start = content.tell()
        while content.read(2**18):  # to the end, where the checksum is compared
            pass
    with file.open("rb") as stream:
        stream.seek(info.header_offset + 26)  # the lengths of the two fields before the content
        lengths = stream.read(2), stream.read(2)
        start += stream.tell() + sum(int.from_bytes(n, "little") for n in lengths)
        order = "F" if is_fortran else "C"
        return np.asarray(np.memmap(stream, dtype, "r", start, shape, order))


def _check_whole(info: zipfile.ZipInfo, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    """Refuse a header that claims more than there is, before numpy asks for memory."""
    if math.prod(shape) * dtype.itemsize > info.file_size and not dtype.hasobject:
        raise ValueError("the array ends early")


def _check_size(file: Path, archive: zipfile.ZipFile, names: list[str]) -> None:
    """Refuse compressed arrays whose headers, or whose zeros, ask for much more than is stored."""
    arrays: list[tuple[int, str]] = []
    stored = 0
    for name in names:
        info = archive.getinfo(f"{name}.npy")
        with archive.open(info) as content:
            shape, _, dtype = _header(content)
        count = math.prod(shape)
        # bytes become float32, and text is copied once more
        nbytes = count * max(dtype.itemsize, 4) * (2 if dtype.kind == "U" else 1)
        became = f"{size(info.compress_size)} would become an array of {size(nbytes)}"
        arrays.append((nbytes, f"{became}, {name} of shape {shape}"))
        stored += info.compress_size
    if sum(nbytes for nbytes, _ in arrays) > max(ALWAYS_READ, MOST_SHRUNK * stored):
        raise TpsgdError(f"{file}: {max(arrays)[1]}; if it is right, {MAPPED}.")
