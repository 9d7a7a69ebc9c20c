"""Samples on disk: decoded a few at a time into `.npy` files, and mapped read-only when used."""

import contextlib
import errno
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

from tpsgd.data.dataset import Array, Data, RawData
from tpsgd.data.download import fetch
from tpsgd.data.images import image_files
from tpsgd.data.registry import find
from tpsgd.data.split import Subset
from tpsgd.errors import TpsgdError
from tpsgd.nets.padded import Padded

FORMAT = 1  # raise it when the same source files give different samples
DECODED_BYTES = 4 * 2**20  # bytes of samples that are decoded together
DISK_FULL = {errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)}
ARRAYS = ("train-x", "train-y", "test-x", "test-y")
LABEL = np.dtype(np.int64)


def file_name(spec: str, path: Path | None, seed: int, max_train: int | None) -> str:
    """A name for the files of a data set, which changes when the samples may change.

    It depends on the names and sizes of the source files, on the split, and on the times at which
    the user's files were changed. `path` is the user's file or folder, None for a built-in set.
    """
    location = "" if path is None else path.resolve()
    digest = hashlib.blake2b(os.fsencode(f"{FORMAT}\0{spec}\0{location}\0{seed}\0{max_train}"))
    for line in _built_in_files(spec) if path is None else _user_files(path):
        digest.update(os.fsencode(f"\n{line}"))
    word = re.sub(r"[^\w-]+", "_", Path(spec).name)[:40]
    return f"{word}-{digest.hexdigest()[:32]}"


def read(folder: Path, name: str) -> Data | None:
    """The data that an earlier call wrote under this name; None if it is not complete."""
    try:
        about = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
        sizes = [(folder / f"{name}-{array}.npy").stat().st_size for array in ARRAYS]
        if sizes != about["bytes"]:
            return None
        train, test = (_map(folder / f"{name}-{split}") for split in ("train", "test"))
        note = "; ".join(filter(None, (about["note"], "read from disk")))
        classes, shape = tuple(about["classes"]), tuple(train[0].shape[1:])
        return Data(about["data"], train, test, classes, shape, note, about["vocabulary"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write(
    folder: Path, name: str, spec: str, raw: RawData, train: Subset, test: Subset, note: str
) -> None:
    """Decode the samples, a few at a time, into files for `read`; after an error there are none."""
    sample = _sample_type(spec, raw, train)
    needed = (len(train.y) + len(test.y)) * (sample.itemsize + LABEL.itemsize)
    about = {"data": spec, "classes": raw.classes, "note": note, "vocabulary": raw.vocabulary}
    files = [folder / f"{name}-{array}.npy" for array in ARRAYS]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if (free := shutil.disk_usage(folder).free) < needed:
            raise _disk_full(spec, folder, needed, f"{free:,} are free")
        with _all_or_none([*files, folder / f"{name}.json"]) as (*arrays, about_file):
            for (x, y), split in zip((arrays[:2], arrays[2:]), (train, test), strict=True):
                _save(x, len(split.y), sample, _decoded(raw, split, sample))
                _save(y, len(split.y), LABEL, [split.y])
            about["bytes"] = [file.stat().st_size for file in arrays]
            about_file.write_text(json.dumps(about, indent=1), encoding="utf-8")
    except OSError as error:
        if error.errno in DISK_FULL:
            raise _disk_full(spec, folder, needed, "the disk is full") from error
        reason = error.strerror or type(error).__name__
        raise TpsgdError(f"cannot write to {folder} ({reason}); name another folder.") from error


def _built_in_files(name: str) -> Iterable[str]:
    """Names and sizes of the published files; features that the user made have a time as well."""
    folder, entry = fetch(name), find(name)
    yield from (f"{file}\0{(folder / file).stat().st_size}" for file in entry.files)
    if entry.files:
        yield from map(_stamp, sorted(folder.glob("features/**/*.npy")))


def _user_files(path: Path) -> Iterable[str]:
    if path.is_dir():
        return map(_stamp, image_files(path))
    return [_stamp(path)] if path.is_file() else []


def _stamp(file: Path) -> str:
    status = file.stat()
    return f"{file}\0{status.st_size}\0{status.st_mtime_ns}"


def _sample_type(spec: str, raw: RawData, samples: Subset) -> np.dtype[Any]:
    """The dtype of one decoded sample, shape included; all samples have that of the first."""
    first = raw.decode(samples.take(slice(1)))
    if isinstance(first, Padded):
        raise TpsgdError(
            f"{spec} has sequences of different lengths, which must be in memory; load it without"
            " on_disk."
        )
    return np.dtype((first.dtype, first.shape[1:]))


def _decoded(raw: RawData, samples: Subset, sample: np.dtype[Any]) -> Iterator[Any]:
    step = max(1, DECODED_BYTES // sample.itemsize)
    for start in range(0, len(samples.y), step):
        yield raw.decode(samples.take(slice(start, start + step)))


def _save(file: Path, count: int, sample: np.dtype[Any], pieces: Iterable[Array]) -> None:
    """Write a .npy file, not through a map: on a full disk, that would end the process."""
    with file.open("wb") as stream:
        descr = np.lib.format.dtype_to_descr(sample.base)
        header = {"descr": descr, "fortran_order": False, "shape": (count, *sample.shape)}
        np.lib.format.write_array_header_1_0(stream, header)
        for piece in pieces:
            stream.write(np.ascontiguousarray(piece, sample.base).data)
        stream.flush()
        os.fsync(stream.fileno())


@contextlib.contextmanager
def _all_or_none(files: list[Path]) -> Iterator[list[Path]]:
    """Names to write to; when all are written, they are renamed to `files`, the last one last."""
    unfinished = [file.with_name(f"{file.name}.{os.getpid()}.part") for file in files]
    try:
        yield unfinished
        files[-1].unlink(missing_ok=True)
        for source, file in zip(unfinished, files, strict=True):
            source.replace(file)
    finally:
        for source in unfinished:
            source.unlink(missing_ok=True)


def _map(start: Path) -> tuple[Tensor, Tensor]:
    """Samples over a mapped file, and labels in memory."""
    x = np.load(f"{start}-x.npy", mmap_mode="r", allow_pickle=False)
    y = torch.from_numpy(np.load(f"{start}-y.npy", allow_pickle=False))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)
        return torch.from_numpy(x), y


def _disk_full(spec: str, folder: Path, needed: int, free: str) -> TpsgdError:
    return TpsgdError(
        f"{spec} needs {needed:,} bytes in {folder}, where {free}; free some space, name another"
        " folder, or ask for fewer samples with max_train."
    )
