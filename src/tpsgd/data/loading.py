"""From a name or a path to tensors: read, hold out, thin, convert."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tpsgd.data import mapped as disk
from tpsgd.data import user_files as own
from tpsgd.data.download import fetch
from tpsgd.data.identity import identity
from tpsgd.data.registry import DATASETS, find
from tpsgd.data.rows import Raw, Samples
from tpsgd.data.split import hold_out, stratified
from tpsgd.errors import TpsgdError
from tpsgd.nets.padded import Padded


@dataclass(frozen=True, eq=False)
class Data:
    """A data set: x, (samples, *shape), and y, int64, indices into `classes`.

    x is a tensor, float32, or int64 tokens from 0 to `vocabulary` - 1; where sequences differ in
    length it is `Padded` instead, and the first of `shape` is the longest's length.

    Loaded with `on_disk`, x is a tensor over a file that is mapped read-only: the system reads what
    is asked for and forgets it again when memory is short. Whoever writes into it ends the process
    (take `x[:100].clone()`); `fit` and `evaluate` never do. The labels are in memory.
    """

    name: str
    train: tuple[Any, Tensor] = field(repr=False)
    test: tuple[Any, Tensor] = field(repr=False)
    classes: tuple[str, ...]
    shape: tuple[int, ...]
    note: str
    vocabulary: int | None = None


def load(
    spec: str,
    *,
    seed: int = 0,
    max_train: int | None = None,
    on_disk: Path | str | None = None,
) -> Data:
    """Load a built-in data set by name, or one's own by path.

    Images come as (samples, channels, height, width) in [0, 1], tables as (samples, features),
    sequences as (samples, steps, features), sequences of tokens as whole numbers (samples, steps).
    Sequences of different lengths come as `Padded`.

    Args:
        spec: a name out of `DATASETS`; or `FILE.npz` (arrays x, y, perhaps x_test, y_test),
            `FILE.csv` (a header, and a column label, y, class or target, else the last one),
            `FILE.py:FUNCTION` (it returns (x, y) or ((x, y), (x_test, y_test))), a `FOLDER` of
            images in subfolders named after their classes, or `FOLDER@64` to resize them.
            Sequences: in a `.npz`, `lengths` (and lengths_test) says how many steps of each x are
            real, the padding being at the end, and `tokens` (and tokens_test) in place of x means
            whole numbers to look up; a `.csv` with a column `sequence` has one row a time step, in
            the order of a column `time` or `step` if there is one; a function may return `Padded`.
            A built-in set is looked for in `$TPSGD_DATA`, then in the cache (`$TPSGD_CACHE`),
            then downloaded into the cache.
        seed: chooses the test part where the data has none of its own, and the samples kept.
        max_train: keep at most that many training samples, the class shares kept.
        on_disk: a folder for the decoded samples, where they do not fit in memory. They are decoded
            a few MB at a time into `.npy` files there, and mapped read-only (see `Data`); they are
            the same, bit for bit, as without it. A later call for the same data takes those files,
            unless what they were made of has changed: the files' names, sizes or times of change
            (built-in sets: sizes), the seed or max_train. Old files are yours to delete, and so
            are any that end in `.part`, left by a process that was killed. What a function returns
            is written anew each time. Images, functions that return a mapped array and plain
            `.npz` files (`numpy.savez`) are never whole in memory; other formats are while they
            are read the first time. Sequences of different lengths are refused.

    Returns:
        The data; its `note` says how it was split and what was done to it.

    Examples:
        >>> data = load("digits", max_train=200)
        >>> len(data.train[1]), len(data.test[1])
        (200, 359)
        >>> data.note.split("; ")[1]
        '200 of 1438 training samples, stratified, seed 0'
    """
    if seed < 0 or (max_train is not None and max_train < 1):
        raise TpsgdError(
            f"seed {seed} and max_train {max_train}: a seed is 0 or more, max_train 1 or more."
        )
    if on_disk is not None:
        return _on_disk(spec, Path(on_disk).expanduser(), seed, max_train)
    raw = _read(spec)
    train, test, note = _split(spec, raw, seed, max_train)
    pair = _tensors(raw, train)
    shape = tuple(pair[0].shape[1:])
    return Data(spec, pair, _tensors(raw, test), raw.classes, shape, note, raw.vocabulary)


def _on_disk(spec: str, folder: Path, seed: int, max_train: int | None) -> Data:
    """As `load`, from files in the folder, which are made where they are not there."""
    found = _own(spec)
    key = identity(spec, found and found.path, seed, max_train)
    kept = disk.read(folder, key) if found is None or found.repeats else None
    if kept is None:
        raw = _read(spec)
        train, test, note = _split(spec, raw, seed, max_train)
        disk.write(folder, key, spec, raw, train, test, note)
        kept = disk.read(folder, key)
    if kept is None:
        raise TpsgdError(f"the files of {spec} in {folder} were changed just now; try again.")
    note = "; ".join(filter(None, (kept.note, "read from disk")))
    shape = tuple(kept.train[0].shape[1:])
    return Data(spec, kept.train, kept.test, kept.classes, shape, note, kept.vocabulary)


def _own(spec: str) -> own.Own | None:
    return None if spec in DATASETS else own.find(spec)


def _read(spec: str) -> Raw:
    if (found := _own(spec)) is not None:
        return found.read()
    entry = find(spec)
    return entry.read(fetch(spec), entry)


def _split(spec: str, raw: Raw, seed: int, max_train: int | None) -> tuple[Samples, Samples, str]:
    """What to train on and what to test on, and the note that says how they were chosen."""
    notes = [raw.note] if raw.note else []
    train = Samples(*raw.train)
    if raw.test is None:
        keep, note = hold_out(spec, train.y, seed)
        train, test = train.keep(keep), train.keep(~keep)
        notes.append(note)
    else:
        test = Samples(*raw.test)
    if max_train is not None and max_train < len(train.y):
        notes.append(f"{max_train} of {len(train.y)} training samples, stratified, seed {seed}")
        train = train.keep(stratified(train.y, max_train, seed))
    return train, test, "; ".join(notes)


def _tensors(raw: Raw, samples: Samples) -> tuple[Tensor | Padded, Tensor]:
    made = raw.decode(samples.at(slice(None)))
    labels = torch.from_numpy(samples.y.astype(np.int64, copy=False))
    return made if isinstance(made, Padded) else torch.from_numpy(made), labels
