"""The built-in data sets by name, and the folders in which they are looked for."""

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from tpsgd.common.errors import TpsgdError, shortened, suggestion
from tpsgd.data.dataset import Dataset
from tpsgd.data.sets import cifar10, digits, eeg, imagenette, mnist, tweets, ucf101

DATASETS: dict[str, Dataset] = {
    entry.name: entry
    for module in (digits, mnist, cifar10, imagenette, eeg, tweets, ucf101)
    for entry in module.ENTRIES
}


class Row(NamedTuple):
    """A line of `tpsgd data list`."""

    name: str
    samples: str
    shape: str
    classes: str
    where: str


def as_spec(spec: Any) -> str:
    """The name of a data set, or a path, as text; anything else is an error."""
    if isinstance(spec, str) or (
        isinstance(spec, os.PathLike) and isinstance(spec.__fspath__(), str)
    ):
        return os.fspath(spec)
    kind = shortened(repr(spec), 60)
    raise TpsgdError(
        f"a data set is named by text, the name of a built-in one or a path, got {kind}"
    )


def find(name: str) -> Dataset:
    """The entry of a built-in set; raises an error that suggests the closest name."""
    if (name := as_spec(name)) in DATASETS:
        return DATASETS[name]
    raise TpsgdError(
        f"'{name}' is not a built-in data set, nor a FILE.npz, FILE.csv, FILE.py:FUNCTION or folder"
        f" of images; {suggestion(name, DATASETS)}"
    )


def path(name: str) -> Path | None:
    """The folder with all files of a built-in set, or None; nothing is downloaded."""
    entry = find(name)
    if not entry.files:
        spec = find_spec("sklearn")
        return Path(spec.origin).parent if spec and spec.origin else None
    folders = [root / entry.folder for root in (data_root(), cache_root()) if root]
    return next((folder for folder in folders if not missing(entry, folder)), None)


def describe() -> list[Row]:
    """One row for each built-in set: its size, and where it is or how to get it.

    Examples:
        >>> describe()[0][:4]
        ('digits', '1438 + 359', '1 x 8 x 8', '10')
    """
    rows = []
    for name, entry in DATASETS.items():
        where = str(path(name) or f"not here: tpsgd data fetch {name}")
        where = where if entry.files else "comes with scikit-learn"
        shape = " x ".join(map(str, entry.shape))
        shape += f" of {entry.vocabulary}" if entry.vocabulary else ""
        classes = str(len(entry.classes) or entry.class_count)
        rows.append(Row(name, f"{entry.train} + {entry.test}", shape, classes, where))
    return rows


def data_root() -> Path | None:
    """The folder `$TPSGD_DATA`, with sets in their publishers' formats; None if it is not set."""
    if not (value := os.environ.get("TPSGD_DATA")):
        return None
    root = Path(value).expanduser()
    if not root.is_dir():
        raise TpsgdError(f"TPSGD_DATA is '{value}', which is not a folder; make it or unset it.")
    return root


def cache_root() -> Path:
    """`$TPSGD_CACHE`, or the user's cache folder according to pooch."""
    if value := os.environ.get("TPSGD_CACHE"):
        return Path(value).expanduser()
    import pooch

    return Path(pooch.os_cache("tpsgd"))


def missing(entry: Dataset, folder: Path) -> list[str]:
    """The files of a set that are not in the folder."""
    return [file for file in entry.files if not (folder / file).exists()]
