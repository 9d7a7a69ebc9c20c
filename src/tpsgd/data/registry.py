"""The built-in data sets: where they come from, what they hold, how they are checked."""

import difflib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from tpsgd.data import formats
from tpsgd.data.raw import Raw
from tpsgd.errors import TpsgdError

OWN = "FILE.npz, FILE.csv, FILE.py:FUNCTION or a folder of images"


@dataclass(frozen=True)
class Dataset:
    """One built-in set; `downloads` maps a published file to its published checksum."""

    name: str
    about: str
    classes: tuple[str, ...]
    shape: tuple[int, ...]
    train: int
    test: int
    licence: str
    citation: str
    read: Callable[[Path, "Dataset"], Raw]
    folder: str = ""
    files: tuple[str, ...] = ()
    mirrors: tuple[str, ...] = ()
    downloads: tuple[tuple[str, str], ...] = ()

    @property
    def urls(self) -> tuple[str, ...]:
        """Where the publisher offers each file."""
        return tuple(self.mirrors[0] + file for file, _ in self.downloads)


TEN = tuple("0123456789")


def _idx(*md5: str) -> tuple[tuple[str, str], ...]:
    return tuple(zip(formats.IDX_FILES, (f"md5:{m}" for m in md5), strict=True))


DIGITS = Dataset(
    name="digits",
    about="handwritten digits, 8 x 8, as they come with scikit-learn",
    classes=TEN,
    shape=(1, 8, 8),
    train=1438,
    test=359,
    licence="CC BY 4.0",
    citation="Alpaydin and Kaynak, Optical Recognition of Handwritten Digits, UCI, 1998",
    read=formats.digits,
)

MNIST = Dataset(
    name="mnist",
    about="handwritten digits, 28 x 28",
    classes=TEN,
    shape=(1, 28, 28),
    train=60_000,
    test=10_000,
    licence="CC BY-SA 3.0",
    citation="LeCun et al., Gradient-based learning applied to document recognition, 1998",
    read=formats.mnist_like,
    folder="mnist",
    files=formats.IDX_FILES,
    mirrors=(
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
    ),
    downloads=_idx(
        "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "d53e105ee54ea40749a09fcbcd1e9432",
        "9fb629c4189551a2d022fa330f9573f3",
        "ec29112dd5afa0611ce80d1b7f02629c",
    ),
)

FASHION = replace(
    MNIST,
    name="fashion-mnist",
    about="articles of clothing, 28 x 28 grey",
    classes=(
        *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
        *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
    ),
    licence="MIT",
    citation="Xiao, Rasul and Vollgraf, Fashion-MNIST, arXiv:1708.07747, 2017",
    folder="fashion-mnist",
    mirrors=(
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
    ),
    downloads=_idx(
        "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "25c81989df183df01b3e8a0aad5dffbe",
        "bef4ecab320f06d8554ea6380940ec79",
        "bb300cfdad3c16e7a12a480ee83cd310",
    ),
)

CIFAR10 = Dataset(
    name="cifar10",
    about="photographs of ten kinds of things, 32 x 32 colour",
    classes=(
        *("airplane", "automobile", "bird", "cat", "deer"),
        *("dog", "frog", "horse", "ship", "truck"),
    ),
    shape=(3, 32, 32),
    train=50_000,
    test=10_000,
    licence="none stated; cite the report",
    citation="Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009",
    read=formats.cifar,
    folder="cifar-10-batches-bin",
    files=formats.CIFAR_FILES,
    mirrors=("https://www.cs.toronto.edu/~kriz/",),
    downloads=(("cifar-10-binary.tar.gz", "md5:c32a1d4ab5d03f1284b67883e8d87530"),),
)

DATASETS: dict[str, Dataset] = {entry.name: entry for entry in (DIGITS, MNIST, FASHION, CIFAR10)}


def find(name: str) -> Dataset:
    """The built-in set of that name, or an error that suggests the closest one."""
    if name in DATASETS:
        return DATASETS[name]
    close = difflib.get_close_matches(name.lower(), DATASETS, n=1)
    hint = f"did you mean '{close[0]}'?" if close else f"built in are {', '.join(DATASETS)}."
    raise TpsgdError(f"'{name}' is no built-in data set, nor {OWN}; {hint}")
