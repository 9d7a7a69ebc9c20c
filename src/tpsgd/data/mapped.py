"""Samples on disk: decoded a few at a time into `.npy` files, and mapped read-only when used."""

import contextlib
import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tpsgd.common.errors import TpsgdError
from tpsgd.data.dataset import Data, RawData
from tpsgd.data.download import fetch
from tpsgd.data.images import image_files
from tpsgd.data.registry import find
from tpsgd.data.split import Subset
from tpsgd.nets.padded import Padded

FORMAT = 7  # raise it when the same source files give different samples, or other files
DECODED_BYTES = 4 * 2**20  # bytes of samples that are decoded together


def folder_name(
    spec: str, path: Path | None, seed: int, max_train: int | None, *scale_and_columns: Any
) -> str:
    """A name for the folder of a data set, which changes when the samples may change.

    `path` is the user's file or folder, None for a built-in set.
    """
    location = "" if path is None else path.resolve()
    choices = FORMAT, spec, location, seed, max_train, *scale_and_columns
    digest = hashlib.blake2b(os.fsencode("\0".join(map(str, choices))))
    for line in _source_files(spec, path):
        digest.update(os.fsencode(f"\n{line}"))
    word = re.sub(r"[^\w-]+", "_", Path(spec).name)[:40]
    return f"{word}-{digest.hexdigest()[:32]}"


def read(folder: Path) -> Data | None:
    """The data that an earlier call wrote into this folder; None if it is not complete."""
    try:
        about = json.loads((folder / "about.json").read_text(encoding="utf-8"))
        train, test = _map(folder, "train"), _map(folder, "test")
        about["note"] = "; ".join(filter(None, (about["note"], "read from disk")))
        about["classes"], about["shape"] = tuple(about["classes"]), tuple(train[0].shape[1:])
        return Data(train=train, test=test, **about)
    except (OSError, EOFError, ValueError, KeyError, TypeError):
        return None


def write(folder: Path, spec: str, raw: RawData, train: Subset, test: Subset, note: str) -> None:
    """Decode the samples, a few at a time, into a folder for `read`; an error leaves no folder."""
    first = raw.decode(train.take(slice(1)))
    if isinstance(first, Padded):
        raise TpsgdError(f"{spec} has sequences of different lengths; load it without on_disk.")
    sample = np.dtype((first.dtype, first.shape[1:]))
    needed = sum(len(s.y) * sample.itemsize + s.labels.nbytes for s in (train, test))
    about = {"name": spec, "classes": raw.classes, "note": note}
    about |= {"vocabulary": raw.vocabulary, "reading": raw.reading}
    unfinished = folder.with_name(f"{folder.name}.{os.getpid()}.part")
    try:
        unfinished.mkdir(parents=True, exist_ok=True)
        if (free := shutil.disk_usage(unfinished).free) < needed:
            raise TpsgdError(
                f"{spec} needs {needed:,} bytes in {folder.parent}, where {free:,} are free; free"
                " some space, name another folder, or ask for fewer samples with max_train."
            )
        for name, split in (("train", train), ("test", test)):
            _save(unfinished / f"{name}-x.npy", raw, split, sample)
            np.save(unfinished / f"{name}-y.npy", split.labels)
        (unfinished / "about.json").write_text(json.dumps(about, indent=1), encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # another process has just written the same folder
            unfinished.replace(folder)
    except OSError as error:
        raise TpsgdError(f"cannot write to {folder.parent} ({error.strerror}).") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _source_files(spec: str, path: Path | None) -> Iterator[str]:
    """Names, sizes and times of a user's files; names and sizes of published files."""
    files: Iterable[Path] = []
    if path is None:
        folder, entry = fetch(spec), find(spec)
        yield from (f"{file}\0{(folder / file).stat().st_size}" for file in entry.files)
        if entry.files:  # features that the user made
            files = sorted(folder.glob("features/**/*.npy"))
    elif path.is_dir():
        files = image_files(path)
    elif path.is_file():
        files = [path]
    for file in files:
        status = file.stat()
        yield f"{file}\0{status.st_size}\0{status.st_mtime_ns}"


def _save(file: Path, raw: RawData, samples: Subset, sample: np.dtype[Any]) -> None:
    """Write a .npy file, not through a map: on a full disk, that would end the process."""
    count, step = len(samples.y), max(1, DECODED_BYTES // sample.itemsize)
    with file.open("wb") as stream:
        descr = np.lib.format.dtype_to_descr(sample.base)
        header = {"descr": descr, "fortran_order": False, "shape": (count, *sample.shape)}
        np.lib.format.write_array_header_1_0(stream, header)
        for piece in samples.pieces(step):
            stream.write(np.ascontiguousarray(raw.decode(piece), sample.base).data)
        stream.flush()
        os.fsync(stream.fileno())


def _map(folder: Path, split: str) -> tuple[Tensor, Tensor]:
    """Samples over a mapped file, and labels in memory."""
    x = np.load(folder / f"{split}-x.npy", mmap_mode="r")
    y = np.load(folder / f"{split}-y.npy")
    if len(x) != len(y):
        raise ValueError("the files are not from the same call")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)
        return torch.from_numpy(x), torch.from_numpy(y)
