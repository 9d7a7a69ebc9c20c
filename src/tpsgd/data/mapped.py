"""Samples kept in files: decoded and written piece by piece, mapped read-only when used."""

import contextlib
import errno
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tpsgd.data.rows import Array, Raw, Samples
from tpsgd.engine.inputs import tensor
from tpsgd.errors import TpsgdError
from tpsgd.nets.padded import Padded

PIECE = 4 * 2**20  # bytes of samples decoded together
FULL = {errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)}
ARRAYS = ("train-x", "train-y", "test-x", "test-y")


class Kept(NamedTuple):
    """A data set whose samples lie on disk."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    classes: tuple[str, ...]
    note: str
    vocabulary: int | None


class Sample(NamedTuple):
    """What one decoded sample looks like."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        """What it takes on disk."""
        return math.prod(self.shape) * self.dtype.itemsize


LABEL = Sample((), np.dtype(np.int64))


def read(folder: Path, key: str) -> Kept | None:
    """What an earlier call wrote under this name; None where it is not there whole."""
    try:
        about = json.loads((folder / f"{key}.json").read_text(encoding="utf-8"))
        sizes = [(folder / f"{key}-{name}.npy").stat().st_size for name in ARRAYS]
        if sizes != about["bytes"]:
            return None
        train, test = (_pair(folder / f"{key}-{part}") for part in ("train", "test"))
        return Kept(train, test, tuple(about["classes"]), about["note"], about["vocabulary"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write(
    folder: Path, key: str, spec: str, raw: Raw, train: Samples, test: Samples, note: str
) -> None:
    """Decode the samples piece by piece into files that `read` finds, or leave none behind."""
    like = _sample(spec, raw, train)
    needed = (len(train.y) + len(test.y)) * (like.nbytes + LABEL.nbytes)
    about = {"data": spec, "classes": raw.classes, "note": note, "vocabulary": raw.vocabulary}
    files = [folder / f"{key}-{name}.npy" for name in ARRAYS]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if (free := shutil.disk_usage(folder).free) < needed:
            raise _full(spec, folder, needed, f"{free:,} are free")
        with _all_or_none([*files, folder / f"{key}.json"]) as (*arrays, said):
            for (x, y), samples in zip((arrays[:2], arrays[2:]), (train, test), strict=True):
                _save(x, len(samples.y), like, _pieces(raw.decode, samples, like))
                _save(y, len(samples.y), LABEL, iter([samples.y]))
            sizes = [file.stat().st_size for file in arrays]
            said.write_text(json.dumps({**about, "bytes": sizes}, indent=1), encoding="utf-8")
    except OSError as error:
        if error.errno in FULL:
            raise _full(spec, folder, needed, "there is no room for them") from error
        why = error.strerror or type(error).__name__
        raise TpsgdError(f"cannot write to {folder} ({why}); name another folder.") from error


def _sample(spec: str, raw: Raw, samples: Samples) -> Sample:
    """How samples look, learnt from the first one."""
    first = raw.decode(samples.at(slice(1)))
    if isinstance(first, Padded):
        raise TpsgdError(
            f"{spec} holds sequences of different lengths, which stay in memory; load it without"
            " on_disk."
        )
    return Sample(first.shape[1:], first.dtype)


def _pieces(
    decode: Callable[[Array], Array | Padded], samples: Samples, like: Sample
) -> Iterator[Array]:
    step = max(1, PIECE // like.nbytes)
    for start in range(0, len(samples.y), step):
        made = decode(samples.at(slice(start, start + step)))
        assert not isinstance(made, Padded)
        yield made


def _save(file: Path, count: int, like: Sample, pieces: Iterator[Array]) -> None:
    """A .npy file, by plain writes: a full disk fails them, but would kill who writes to a map."""
    with file.open("wb") as stream:
        descr = np.lib.format.dtype_to_descr(like.dtype)
        header = {"descr": descr, "fortran_order": False, "shape": (count, *like.shape)}
        np.lib.format.write_array_header_1_0(stream, header)
        for piece in pieces:
            stream.write(np.ascontiguousarray(piece, like.dtype).data)
        stream.flush()
        os.fsync(stream.fileno())


@contextlib.contextmanager
def _all_or_none(files: list[Path]) -> Iterator[list[Path]]:
    """Names to write to; they become `files` when all is written, the last one last."""
    unfinished = [file.with_name(f"{file.name}.{os.getpid()}.part") for file in files]
    try:
        yield unfinished
        files[-1].unlink(missing_ok=True)
        for part, file in zip(unfinished, files, strict=True):
            part.replace(file)
    finally:
        for part in unfinished:
            part.unlink(missing_ok=True)


def _pair(start: Path) -> tuple[Tensor, Tensor]:
    x = np.load(f"{start}-x.npy", mmap_mode="r", allow_pickle=False)
    return tensor(x, "x"), torch.from_numpy(np.load(f"{start}-y.npy", allow_pickle=False))


def _full(spec: str, folder: Path, needed: int, found: str) -> TpsgdError:
    return TpsgdError(
        f"{spec} needs {needed:,} bytes in {folder}, where {found}; make room, name another folder,"
        " or ask for less with max_train."
    )
