"""From a name or a path to tensors: read, hold out, thin, convert."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tpsgd.data import own
from tpsgd.data.download import fetch
from tpsgd.data.raw import Array, Raw
from tpsgd.data.registry import DATASETS, find
from tpsgd.data.split import hold_out, stratified
from tpsgd.errors import TpsgdError
from tpsgd.padded import Padded


@dataclass(frozen=True, eq=False)
class Data:
    """A data set in memory: x, (samples, *shape), and y, int64, indices into `classes`.

    x is a tensor, float32, or int64 tokens from 0 to `vocabulary` - 1; where sequences differ in
    length it is `Padded` instead, and the first of `shape` is the longest's length.
    """

    name: str
    train: tuple[Any, Tensor] = field(repr=False)
    test: tuple[Any, Tensor] = field(repr=False)
    classes: tuple[str, ...]
    shape: tuple[int, ...]
    note: str
    vocabulary: int | None = None


def load(spec: str, *, seed: int = 0, max_train: int | None = None) -> Data:
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
    raw = _read(spec)
    notes = [raw.note] if raw.note else []
    (x, y), test = raw.train, raw.test
    if test is None:
        keep, note = hold_out(spec, y, seed)
        test = x[~keep], y[~keep]
        x, y = x[keep], y[keep]
        notes.append(note)
    if max_train is not None and max_train < len(y):
        notes.append(f"{max_train} of {len(y)} training samples, stratified, seed {seed}")
        keep = stratified(y, max_train, seed)
        x, y = x[keep], y[keep]
    train, note = _tensors(raw, x, y), "; ".join(notes)
    shape = tuple(train[0].shape[1:])
    return Data(spec, train, _tensors(raw, *test), raw.classes, shape, note, raw.vocabulary)


def _read(spec: str) -> Raw:
    if spec not in DATASETS and (raw := own.read(spec)) is not None:
        return raw
    entry = find(spec)
    return entry.read(fetch(spec), entry)


def _tensors(raw: Raw, x: Array, y: Array) -> tuple[Tensor | Padded, Tensor]:
    made = raw.decode(x)
    labels = torch.from_numpy(y.astype(np.int64, copy=False))
    return made if isinstance(made, Padded) else torch.from_numpy(made), labels
