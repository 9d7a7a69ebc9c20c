"""Where data sets lie on this machine: `$TPSGD_DATA`, then the cache."""

import os
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from tpsgd.data.entry import Dataset
from tpsgd.data.registry import DATASETS, find
from tpsgd.errors import TpsgdError


class Row(NamedTuple):
    """A line of `tpsgd data list`, ready to print."""

    name: str
    samples: str
    shape: str
    classes: str
    where: str


def path(name: str) -> Path | None:
    """The folder in which the built-in set `name` lies whole, or None: nothing is downloaded."""
    entry = find(name)
    if not entry.files:
        spec = find_spec("sklearn")
        return Path(spec.origin).parent if spec and spec.origin else None
    roots = [root for root in (data_root(), cache_root()) if root is not None]
    return next((f for r in roots if not missing(entry, f := r / entry.folder)), None)


def describe() -> list[Row]:
    """What there is: one row per built-in set, with the place it lies in or how to get it.

    Examples:
        >>> describe()[0][:4]
        ('digits', '1438 + 359', '1 x 8 x 8', '10')
    """
    return [_row(entry) for entry in DATASETS.values()]


def data_root() -> Path | None:
    """`$TPSGD_DATA`, a folder of sets in their publishers' formats; None where it is not set."""
    if not (value := os.environ.get("TPSGD_DATA")):
        return None
    root = Path(value).expanduser()
    if not root.is_dir():
        raise TpsgdError(f"TPSGD_DATA names '{value}', which is no folder; make it or unset it.")
    return root


def cache_root() -> Path | None:
    """`$TPSGD_CACHE`, else the user's cache folder as pooch knows it; None without pooch."""
    if value := os.environ.get("TPSGD_CACHE"):
        return Path(value).expanduser()
    try:
        import pooch
    except ImportError:
        return None
    return Path(pooch.os_cache("tpsgd"))


def missing(entry: Dataset, folder: Path) -> list[str]:
    """The files of `entry` that are not in `folder`."""
    return [file for file in entry.files if not (folder / file).exists()]


def _row(entry: Dataset) -> Row:
    place = path(entry.name)
    if not entry.files:
        where = "comes with scikit-learn" if place else "not here: pip install scikit-learn"
    else:
        where = str(place) if place else f"not here: tpsgd data fetch {entry.name}"
    shape = " x ".join(map(str, entry.shape))
    if entry.vocabulary:
        shape += f" of {entry.vocabulary}"
    classes = len(entry.classes) or entry.unnamed
    return Row(entry.name, f"{entry.train} + {entry.test}", shape, str(classes), where)
