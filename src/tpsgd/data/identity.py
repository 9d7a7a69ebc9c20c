"""A name for what `load` gives, from what determines it; nothing is decoded to make it."""

import hashlib
import os
import re
from collections.abc import Iterable
from pathlib import Path

from tpsgd.data.download import fetch
from tpsgd.data.images import image_files
from tpsgd.data.registry import find

FORMAT = 1  # to be raised whenever the same files come to give other samples


def identity(spec: str, path: Path | None, seed: int, max_train: int | None) -> str:
    """A file name that changes with the spec, the split, and the files the data comes from.

    `path`: where data of one's own lies; None for a built-in set.
    """
    lines = _built_in(spec) if path is None else _own(path)
    place = "" if path is None else path.resolve()
    digest = hashlib.blake2b(os.fsencode(f"{FORMAT}\0{spec}\0{place}\0{seed}\0{max_train}"))
    for line in lines:
        digest.update(os.fsencode(f"\n{line}"))
    word = re.sub(r"[^\w-]+", "_", Path(spec).name)[:40]
    return f"{word}-{digest.hexdigest()[:32]}"


def _built_in(name: str) -> Iterable[str]:
    """Names and sizes of the files; what one made oneself of them has a time as well."""
    folder, entry = fetch(name), find(name)
    yield from (f"{file}\0{(folder / file).stat().st_size}" for file in entry.files)
    if entry.files:
        yield from map(_stamp, sorted(folder.glob("features/**/*.npy")))


def _own(path: Path) -> Iterable[str]:
    if path.is_dir():
        return map(_stamp, image_files(path))
    return [_stamp(path)] if path.is_file() else []


def _stamp(file: Path) -> str:
    found = file.stat()
    return f"{file}\0{found.st_size}\0{found.st_mtime_ns}"
