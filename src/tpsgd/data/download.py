"""Downloading a built-in set into the cache: complete, with its checksums verified, or not at all.

Each file gets its final name only when it is complete.
"""

import contextlib
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tpsgd.common.errors import TpsgdError
from tpsgd.common.files import write_whole
from tpsgd.data.dataset import Dataset
from tpsgd.data.registry import cache_root, data_root, find, missing, path


def fetch(name: str) -> Path:
    """The folder of a built-in set, which is downloaded if it is not on this machine."""
    entry = find(name)
    if (folder := path(name)) is not None:
        return folder
    if not entry.files:
        raise TpsgdError(f"'{name}' comes with scikit-learn; run: pip install scikit-learn")
    root = data_root()
    files = ", ".join(missing(entry, root / entry.folder) if root else entry.files)
    if not entry.downloads:
        raise TpsgdError(
            f"'{name}' cannot be downloaded by tpsgd: {entry.by_hand}; put {files} into"
            f" {root or '$TPSGD_DATA'}/{entry.folder}/."
        )
    if root and (root / entry.folder).is_dir():
        raise TpsgdError(f"{root / entry.folder} lacks {files}; add it or remove that folder.")
    return _download(entry)


def _download(entry: Dataset) -> Path:
    folder = (cache := cache_root()) / entry.folder
    is_archive = len(entry.downloads) == 1
    try:
        for file, checksum in entry.downloads:
            _retrieve(entry, file, checksum, cache if is_archive else folder)
        if is_archive:
            _unpack(cache / entry.downloads[0][0], entry, folder)
    except OSError as error:
        raise TpsgdError(
            f"cannot write to {cache} ({error.strerror or 'no permission'}); free some space or set"
            " TPSGD_CACHE to another folder."
        ) from error
    return folder


def _retrieve(entry: Dataset, file: str, checksum: str, folder: Path) -> None:
    """Download a file from the first mirror that has it and passes the check."""
    import pooch
    from requests import RequestException

    failures: list[str] = []
    for url in (mirror + file for mirror in entry.mirrors):
        try:
            with _progress_bar(file) as bar:
                pooch.retrieve(url, checksum, fname=file, path=folder, progressbar=bar)
            return
        except (RequestException, ConnectionError, ValueError) as error:
            failures.append(f"{url} ({_reason(error)})")
    raise TpsgdError(
        f"could not download {' nor '.join(failures)}; try again, or fetch it on another machine"
        f" and put {', '.join(entry.files)} into $TPSGD_DATA/{entry.folder}/."
    )


def _reason(error: Exception) -> str:
    if not isinstance(error, OSError):
        return "its checksum is not the published one"
    response = getattr(error, "response", None)
    return type(error).__name__ if response is None else f"HTTP status {response.status_code}"


def _unpack(archive: Path, entry: Dataset, folder: Path) -> None:
    """Extract the files of the set from the archive, then remove the archive."""
    folder.mkdir(exist_ok=True)
    try:
        with tarfile.open(archive) as tar:
            for file in entry.files:
                if (content := tar.extractfile(f"{entry.folder}/{file}")) is None:
                    raise KeyError(file)
                write_whole(folder / file, content.read())
    except (KeyError, EOFError, tarfile.TarError) as error:
        raise TpsgdError(f"{archive} cannot be unpacked ({error}); remove it.") from error
    archive.unlink()


@contextlib.contextmanager
def _progress_bar(label: str) -> Iterator[Any]:
    """The `progressbar` argument of pooch: a bar drawn by rich, or False without a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    console, hidden = Console(stderr=True), not sys.stderr.isatty()
    with Progress(console=console, transient=True, disable=hidden) as progress:
        task = progress.add_task(label, total=None)
        bar = SimpleNamespace(reset=lambda: progress.reset(task), close=lambda: None)
        bar.update = lambda n: progress.update(task, advance=n, total=bar.total)  # pooch sets total
        yield False if hidden else bar
