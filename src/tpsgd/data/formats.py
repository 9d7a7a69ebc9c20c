"""The publishers' own formats of the built-in sets, checked byte by byte as they are read."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tpsgd.data.rows import Array, Pair, Raw, pixels
from tpsgd.data.split import hold_out
from tpsgd.errors import TpsgdError

if TYPE_CHECKING:
    from tpsgd.data.entry import Dataset

IDX_FILES = tuple(
    f"{part}-{kind}-ubyte.gz"
    for part in ("train", "t10k")
    for kind in ("images-idx3", "labels-idx1")
)
CIFAR_FILES = (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin")
CIFAR_PER_FILE = 10_000
PUBLISHED = "the publisher's own split"


def mnist_like(folder: Path, entry: Dataset) -> Raw:
    """Four gzipped idx files: images and labels, train and t10k."""
    train, test = ((x[:, None], y) for x, y in idx_pairs(folder, entry, *entry.shape[1:]))
    return Raw(entry.classes, train, test, pixels, PUBLISHED)


def idx_pairs(folder: Path, entry: Dataset, height: int, width: int) -> list[Pair]:
    """Images (samples, height, width) and labels of the train and of the t10k part."""
    pairs = []
    for part, n in (("train", entry.train), ("t10k", entry.test)):
        x = read_idx(folder / f"{part}-images-idx3-ubyte.gz", (n, height, width))
        file = folder / f"{part}-labels-idx1-ubyte.gz"
        pairs.append((x, _labels(file, read_idx(file, (n,)), entry)))
    return pairs


def read_idx(file: Path, dims: tuple[int, ...]) -> Array:
    """One gzipped idx file of unsigned bytes, which must hold exactly `dims`.

    The file is a magic number (0, 0, 8 for bytes, the number of dimensions), each dimension as a
    big-endian 32-bit number, then the bytes.
    """
    try:
        with gzip.open(file) as stream:
            raw = stream.read()
    except (OSError, EOFError, zlib.error) as error:
        raise _unreadable(file, error) from error
    start = 4 + 4 * len(dims)
    if raw[:4] != bytes((0, 0, 8, len(dims))):
        raise TpsgdError(
            f"{file} is no idx file of bytes in {len(dims)} dimensions: it starts with"
            f" '{raw[:4].hex()}', not '{0x0800 + len(dims):08x}'; fetch it again."
        )
    found = tuple(int.from_bytes(raw[i : i + 4], "big") for i in range(4, start, 4))
    if found != dims:
        raise TpsgdError(
            f"{file} says it holds {_times(found)} bytes, expected {_times(dims)}; fetch it again."
        )
    if len(raw) != start + math.prod(dims):
        raise TpsgdError(
            f"{file} unpacks to {len(raw)} bytes, expected {start + math.prod(dims)}:"
            " it is not whole; fetch it again."
        )
    return np.frombuffer(raw, np.uint8, offset=start).reshape(dims)


def cifar(folder: Path, entry: Dataset) -> Raw:
    """The binary version: records of one label byte and the R, G and B planes."""
    train = _records(folder, CIFAR_FILES[:-1], entry)
    test = _records(folder, CIFAR_FILES[-1:], entry)
    return Raw(entry.classes, train, test, pixels, PUBLISHED)


def _records(folder: Path, names: tuple[str, ...], entry: Dataset) -> tuple[Array, Array]:
    size = 1 + math.prod(entry.shape)
    records = np.empty((len(names), CIFAR_PER_FILE, size), np.uint8)
    for batch, name in zip(records, names, strict=True):
        file = folder / name
        try:
            found = file.stat().st_size
            if found == batch.nbytes:
                with file.open("rb") as stream:
                    stream.readinto(batch.data)
        except OSError as error:
            raise _unreadable(file, error) from error
        if found != batch.nbytes:
            raise TpsgdError(
                f"{file} is {found} bytes long, expected {CIFAR_PER_FILE} records of {size};"
                " it is not whole, or not the binary version: fetch it again."
            )
        _labels(file, batch[:, 0], entry)
    flat = records.reshape(-1, size)
    return flat[:, 1:].reshape(-1, *entry.shape), flat[:, 0].astype(np.int64)


def digits(folder: Path, entry: Dataset) -> Raw:
    """scikit-learn's copy of the 8 x 8 digits, with a split of our own that no seed moves."""
    from sklearn.datasets import load_digits

    x, y = map(np.asarray, load_digits(return_X_y=True))
    x = x.reshape(-1, *entry.shape)
    train, note = hold_out(entry.name, y, seed=0)
    pairs = (x[train], y[train]), (x[~train], y[~train])
    return Raw(entry.classes, *pairs, lambda x: (x / 16).astype(np.float32), note)


def _labels(file: Path, y: Array, entry: Dataset) -> Array:
    if y.max() >= len(entry.classes):
        raise TpsgdError(
            f"{file} holds the label {y.max()}, but {entry.name} has {len(entry.classes)} classes;"
            " fetch it again."
        )
    return y.astype(np.int64)


def _unreadable(file: Path, error: Exception) -> TpsgdError:
    if isinstance(error, FileNotFoundError):
        return TpsgdError(f"{file} is missing; put it there or fetch it again.")
    why = error.strerror if isinstance(error, OSError) and error.strerror else error
    return TpsgdError(f"{file} cannot be read, it may be cut short ({why}); fetch it again.")


def _times(dims: tuple[int, ...]) -> str:
    return " x ".join(map(str, dims))
