"""Fetching a built-in set into the cache, whole and checked, or not at all."""

import contextlib
import errno
import shutil
import sys
import tarfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tpsgd.data.entry import Dataset
from tpsgd.data.folders import cache_root, data_root, missing, path
from tpsgd.data.registry import find
from tpsgd.errors import TpsgdError

REASONS = {
    "ChunkedEncodingError": "the connection broke off",
    "ConnectionError": "no connection",
    "ConnectTimeout": "no answer in time",
    "ReadTimeout": "no answer in time",
}
DISK = {getattr(errno, name) for name in ("EEXIST", "ENOSPC", "ENOTDIR", "EDQUOT", "EROFS")}


def fetch(name: str) -> Path:
    """The folder in which the built-in set `name` lies, after downloading it where needed."""
    entry = find(name)
    if (place := path(name)) is not None:
        return place
    if not entry.files:
        raise TpsgdError(f"'{name}' comes with scikit-learn; run: pip install scikit-learn")
    root = data_root()
    here = root is not None and (root / entry.folder).is_dir()
    lost = ", ".join(missing(entry, root / entry.folder)) if root and here else ""
    if not entry.downloads:
        raise TpsgdError(
            f"'{name}' cannot be downloaded from here: {entry.by_hand}; put"
            f" {lost or ', '.join(entry.files)} into {root or '$TPSGD_DATA'}/{entry.folder}/."
        )
    if root and here:
        raise TpsgdError(
            f"{root / entry.folder} lacks {lost}; put it there, or remove that folder and the whole"
            " set is downloaded."
        )
    return _download(entry)


def _download(entry: Dataset) -> Path:
    if find_spec("pooch") is None or (cache := cache_root()) is None:
        raise TpsgdError(f"to download '{entry.name}' pooch is needed; run: pip install pooch")
    folder = cache / entry.folder
    packed = len(entry.downloads) == 1
    for file, checksum in entry.downloads:
        _retrieve(entry, file, checksum, cache if packed else folder)
    if packed:
        _unpack(cache / entry.downloads[0][0], entry, folder)
    return folder


def _retrieve(entry: Dataset, file: str, checksum: str, folder: Path) -> None:
    """Take `file` from the first mirror that gives it whole; pooch renames it when it is."""
    import pooch

    failed: list[str] = []
    for url in (mirror + file for mirror in entry.mirrors):
        try:
            with _bar(file) as bar:
                pooch.retrieve(url, checksum, fname=file, path=folder, progressbar=bar)
            return
        except (OSError, ValueError) as error:
            if isinstance(error, PermissionError) or getattr(error, "errno", None) in DISK:
                raise _disk(folder, error) from error
            failed.append(f"{url} ({_reason(error)})")
    raise TpsgdError(
        f"could not download {' nor '.join(failed)}; try again, or fetch it on another machine"
        f" and put {', '.join(entry.files)} into $TPSGD_DATA/{entry.folder}/."
    )


def _unpack(archive: Path, entry: Dataset, folder: Path) -> None:
    """Take the files of `entry` out of the archive, each under its name only when it is whole."""
    try:
        folder.mkdir(exist_ok=True)
        with tarfile.open(archive) as tar:
            for file in entry.files:
                _extract(tar, f"{entry.folder}/{file}", folder / file)
        archive.unlink()
    except (KeyError, EOFError, tarfile.TarError) as error:
        raise TpsgdError(f"{archive} does not unpack ({error}); remove it, fetch again.") from error
    except OSError as error:
        raise _disk(folder, error) from error


def _extract(tar: tarfile.TarFile, member: str, file: Path) -> None:
    if (source := tar.extractfile(member)) is None:
        raise KeyError(member)
    part = file.with_name(f"{file.name}.part")
    try:
        with source, part.open("wb") as target:
            shutil.copyfileobj(source, target)
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)


def _reason(error: Exception) -> str:
    if not isinstance(error, OSError):
        return "half a file or another one: its checksum is not the published one"
    response = getattr(error, "response", None)
    if response is not None:
        return f"HTTP status {response.status_code}"
    return REASONS.get(type(error).__name__, type(error).__name__)


def _disk(folder: Path, error: Exception) -> TpsgdError:
    why = getattr(error, "strerror", None) or "no permission"
    return TpsgdError(
        f"cannot write to {folder} ({why}); make room there or set TPSGD_CACHE to another folder."
    )


@contextlib.contextmanager
def _bar(label: str) -> Iterator[Any]:
    """What pooch takes as `progressbar`: one drawn by rich, or True for tqdm, or False."""
    if find_spec("rich") is None:
        yield find_spec("tqdm") is not None
        return
    from rich.console import Console
    from rich.progress import Progress

    off = not sys.stderr.isatty()
    with Progress(console=Console(stderr=True), transient=True, disable=off) as progress:
        yield _RichBar(progress, label)


class _RichBar:
    """The four words pooch says to a progress bar, drawn by rich."""

    def __init__(self, progress: Any, label: str) -> None:
        self.progress, self.task = progress, progress.add_task(label, total=None)

    def _total(self, value: int) -> None:
        self.progress.update(self.task, total=value)

    total = property(fset=_total)

    def update(self, n: int) -> None:
        self.progress.advance(self.task, n)

    def reset(self) -> None:
        self.progress.update(self.task, completed=0)

    def close(self) -> None:
        self.progress.stop_task(self.task)
