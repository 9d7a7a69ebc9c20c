"""CIFAR-10 in its binary version.

Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009; no licence stated.
"""

import math
from pathlib import Path

import numpy as np

from tpsgd.common.errors import TpsgdError
from tpsgd.data.dataset import BYTES, Dataset, Pair, RawData, check_labels, pixels, readable

FILES = (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin")
PER_FILE = 10_000


def read(folder: Path, entry: Dataset) -> RawData:
    """Records of one label byte, then the red, the green and the blue pixels."""
    train = _read_files(folder, FILES[:-1], entry)
    test = _read_files(folder, FILES[-1:], entry)
    return RawData(entry.classes, train, test, pixels, "the publisher's own split", reading=BYTES)


def _read_files(folder: Path, names: tuple[str, ...], entry: Dataset) -> Pair:
    record = 1 + math.prod(entry.shape)
    records = np.empty((len(names), PER_FILE, record), np.uint8)
    for batch, name in zip(records, names, strict=True):
        file = folder / name
        with readable(file, "a batch of CIFAR-10", "fetch it again"):
            content = np.fromfile(file, np.uint8)
        if content.size != batch.size:
            raise TpsgdError(f"{file} has {content.size} bytes, not {batch.size}; fetch it again.")
        batch[:] = content.reshape(batch.shape)
        check_labels(file, batch[:, 0], entry)
    flat = records.reshape(-1, record)
    return flat[:, 1:].reshape(-1, *entry.shape), flat[:, 0].astype(np.int64)


ENTRY = Dataset(
    name="cifar10",
    classes=(
        *("airplane", "automobile", "bird", "cat", "deer"),
        *("dog", "frog", "horse", "ship", "truck"),
    ),
    shape=(3, 32, 32),
    train=50_000,
    test=10_000,
    read=read,
    folder="cifar-10-batches-bin",
    files=FILES,
    mirrors=("https://www.cs.toronto.edu/~kriz/",),
    downloads=(("cifar-10-binary.tar.gz", "md5:c32a1d4ab5d03f1284b67883e8d87530"),),
)
ENTRIES = (ENTRY,)
