"""MNIST and Fashion-MNIST as images, and MNIST as sequences of rows or of pixels.

MNIST: LeCun et al., Gradient-based learning applied to document recognition, 1998; CC BY-SA 3.0.
Fashion-MNIST: Xiao, Rasul and Vollgraf, arXiv:1708.07747, 2017; MIT.
"""

import gzip
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from tpsgd.common.errors import TpsgdError
from tpsgd.data.dataset import BYTES, Array, Dataset, RawData, check_labels, pixels, readable

FILES = tuple(
    f"{split}-{kind}-ubyte.gz"
    for split in ("train", "t10k")
    for kind in ("images-idx3", "labels-idx1")
)
SIZE = 28
POOL = 4


def with_channel(x: Array) -> Array:
    """Images of one channel, (samples, 1, 28, 28)."""
    return pixels(x)[:, None]


def averages(x: Array) -> Array:
    """Images averaged down to 7 x 7, as 49 steps of one pixel."""
    squares = x.reshape(len(x), SIZE // POOL, POOL, SIZE // POOL, POOL)
    total = squares.sum((2, 4), dtype=np.float32)
    return (total / (255 * POOL * POOL)).reshape(len(x), -1, 1)


def read_idx(file: Path, shape: tuple[int, ...]) -> Array:
    """A gzipped idx file of unsigned bytes, which must have exactly this shape.

    The format: a magic number (0, 0, 8 for bytes, the number of dimensions), each dimension as a
    big-endian 32-bit number, then the bytes.
    """
    with readable(file, "a gzip file", "fetch it again"), gzip.open(file) as stream:
        content = stream.read()
    header = bytes((0, 0, 8, len(shape))) + b"".join(n.to_bytes(4, "big") for n in shape)
    if not content.startswith(header) or len(content) != len(header) + math.prod(shape):
        raise TpsgdError(f"{file} is not a complete idx file of shape {shape}; fetch it again.")
    return np.frombuffer(content, np.uint8, offset=len(header)).reshape(shape)


def read(
    folder: Path, entry: Dataset, decode: Callable[..., Array] = with_channel, order: str = ""
) -> RawData:
    """Images (samples, 28, 28) and labels, for training and for testing."""
    images, labels, test_images, test_labels = (folder / file for file in FILES)
    train, test = (
        (read_idx(x, (n, SIZE, SIZE)), check_labels(y, read_idx(y, (n,)), entry))
        for n, x, y in ((entry.train, images, labels), (entry.test, test_images, test_labels))
    )
    note = f"{order}the publisher's own split"
    reading = BYTES if decode is with_channel else {}
    return RawData(entry.classes, train, test, decode, note, reading=reading)


def _downloads(*md5: str) -> tuple[tuple[str, str], ...]:
    return tuple(zip(FILES, (f"md5:{checksum}" for checksum in md5), strict=True))


MNIST = Dataset(
    name="mnist",
    classes=tuple("0123456789"),
    shape=(1, SIZE, SIZE),
    train=60_000,
    test=10_000,
    read=read,
    folder="mnist",
    files=FILES,
    mirrors=(
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
    ),
    downloads=_downloads(
        "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "d53e105ee54ea40749a09fcbcd1e9432",
        "9fb629c4189551a2d022fa330f9573f3",
        "ec29112dd5afa0611ce80d1b7f02629c",
    ),
)
FASHION_MNIST = replace(
    MNIST,
    name="fashion-mnist",
    classes=(
        *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
        *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
    ),
    folder="fashion-mnist",
    mirrors=(
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
    ),
    downloads=_downloads(
        "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "25c81989df183df01b3e8a0aad5dffbe",
        "bef4ecab320f06d8554ea6380940ec79",
        "bb300cfdad3c16e7a12a480ee83cd310",
    ),
)
BY_ROWS = partial(read, decode=pixels, order="rows from top to bottom, ")
BY_PIXELS = partial(
    read, decode=averages, order="squares of 4 x 4 pixels averaged and read row by row, "
)
ENTRIES = (
    MNIST,
    FASHION_MNIST,
    replace(MNIST, name="seq-mnist-rows", shape=(SIZE, SIZE), read=BY_ROWS),
    replace(MNIST, name="seq-mnist-pixels", shape=((SIZE // POOL) ** 2, 1), read=BY_PIXELS),
)
