"""Read `.npz` files; their arrays are mapped into memory if they are not compressed."""

import math
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from tpsgd.common.errors import TpsgdError
from tpsgd.common.units import size
from tpsgd.data.arrays import RawArrays, from_arrays
from tpsgd.data.dataset import Array, RawData

MAPPED = "save it with numpy.savez, without compression, and it is mapped instead of read"
NAMES = {kind + suffix for kind in ("x", "tokens", "y", "lengths") for suffix in ("", "_test")}
MOST_SHRUNK = 80  # times, since arrays are copied twice: hardly any real data is compressed better
ALWAYS_READ = 2**26  # bytes of arrays that may be compressed even better
HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


def read_npz(file: Path) -> RawData:
    """Arrays `x` and `y`, and perhaps `x_test` and `y_test`.

    Arrays `tokens` in place of `x` are whole numbers for an embedding; `lengths` are the numbers
    of steps of padded sequences.
    """
    arrays, names = read_arrays(file)
    x = "tokens" if "tokens" in arrays else "x"
    needed = {x, "y"} | ({"lengths"} & arrays.keys())
    if arrays.keys() not in (needed, needed | {f"{name}_test" for name in needed}):
        raise TpsgdError(
            f"{file} holds {', '.join(names) or 'nothing'}; expected x and y, and x_test and y_test"
            " both or neither (tokens in place of x and lengths for sequences, tokens_test and"
            " lengths_test for the test set)."
        )
    splits = [
        RawArrays(arrays[x + suffix], arrays["y" + suffix], arrays.get("lengths" + suffix))
        for suffix in ("", "_test")
        if "y" + suffix in arrays
    ]
    return from_arrays(str(file), splits, are_tokens=x == "tokens")


def read_arrays(file: Path) -> tuple[dict[str, Array], list[str]]:
    """The arrays with names that mean something here, and the names of all arrays."""
    try:
        with file.open("rb") as stream, np.load(stream) as archive:
            names = sorted(archive.files)
            samples = NAMES.intersection(names)
            _check_size(file, archive, samples)
            arrays = {name: read_array(file, archive, name) for name in samples}
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
    return arrays, names


def read_array(file: Path, archive: Any, name: str) -> Array:
    """An array of an open .npz file: mapped read-only if it is stored uncompressed, else read."""
    info = archive.zip.NameToInfo.get(f"{name}.npy")
    if info is None:
        return archive[name]
    if info.compress_type != zipfile.ZIP_STORED:
        return archive[name]
    with file.open("rb") as stream:
        stream.seek(info.header_offset + 26)  # the lengths of the two fields before the content
        lengths = stream.read(2), stream.read(2)
        stream.seek(sum(int.from_bytes(n, "little") for n in lengths), os.SEEK_CUR)
        if (read_header := HEADERS.get(np.lib.format.read_magic(stream))) is None:
            return archive[name]
        shape, fortran, dtype = read_header(stream)
        if dtype.hasobject or not math.prod(shape):
            return archive[name]
        with archive.zip.open(info) as content:  # its end is reached: the checksum is compared
            while content.read(2**18):
                pass
        order = "F" if fortran else "C"
        return np.asarray(np.memmap(stream, dtype, "r", stream.tell(), shape, order))


def _check_size(file: Path, archive: Any, names: set[str]) -> None:
    """Refuse compressed arrays whose headers, or whose zeros, ask for much more than is stored."""
    infos = [archive.zip.NameToInfo.get(f"{name}.npy") for name in names]
    packed = [i for i in infos if i is not None and i.compress_type != zipfile.ZIP_STORED]
    arrays = {info: _shape_and_bytes(archive, info) for info in packed}
    total, stored = sum(n for _, n in arrays.values()), sum(i.compress_size for i in packed)
    if total > max(ALWAYS_READ, MOST_SHRUNK * stored):
        largest = max(packed, key=lambda info: arrays[info][1])
        shape, nbytes = arrays[largest]
        raise TpsgdError(
            f"{file}: {size(largest.compress_size)} would become an array of {size(nbytes)},"
            f" {largest.filename[:-4]} of shape {shape}; if it is right, {MAPPED}."
        )


def _shape_and_bytes(archive: Any, info: zipfile.ZipInfo) -> tuple[tuple[int, ...], int]:
    """The shape of a compressed array by its header, and the bytes that it takes here."""
    with archive.zip.open(info) as stream:
        if (read_header := HEADERS.get(np.lib.format.read_magic(stream))) is None:
            return (), info.file_size
        shape, _, dtype = read_header(stream)
    count = math.prod(shape)
    if count * dtype.itemsize > info.file_size and not dtype.hasobject:
        raise ValueError("the array ends early")
    nbytes = count * max(dtype.itemsize, 4)  # bytes become float32
    return shape, nbytes * (2 if dtype.kind == "U" else 1)  # text is copied once more
