"""Arrays out of a .npz file, without reading them where they can be mapped."""

import math
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from tpsgd.data.rows import Array

HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


def array(file: Path, archive: Any, name: str) -> Array:
    """An array of an open .npz file: mapped read-only where it lies there plain, else read."""
    info = archive.zip.NameToInfo.get(f"{name}.npy")
    if info is None or info.compress_type != zipfile.ZIP_STORED:
        return archive[name]
    found = _mapped(file, archive, info)
    return archive[name] if found is None else found


def _mapped(file: Path, archive: Any, info: zipfile.ZipInfo) -> Array | None:
    """The array where it lies in the file; None for objects, and for what is too odd to map."""
    with file.open("rb") as stream:
        stream.seek(info.header_offset + 26)  # the lengths of the two fields before the content
        lengths = stream.read(2), stream.read(2)
        stream.seek(sum(int.from_bytes(n, "little") for n in lengths), os.SEEK_CUR)
        if (read_header := HEADERS.get(np.lib.format.read_magic(stream))) is None:
            return None
        shape, fortran, dtype = read_header(stream)
        if dtype.hasobject or not shape or not math.prod(shape):
            return None
        _verify(archive, info)
        order = "F" if fortran else "C"
        return np.asarray(np.memmap(stream, dtype, "r", stream.tell(), shape, order))


def _verify(archive: Any, info: zipfile.ZipInfo) -> None:
    """Read the content to its end, a little at a time: there its checksum is compared."""
    with archive.zip.open(info) as content:
        while content.read(2**18):
            pass
