"""Arrays of a user, from a file or a function: checked and brought into one form."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from tpsgd.common.errors import TpsgdError
from tpsgd.data.dataset import BYTES, Array, RawData, converted, numbers, pixels, tokens
from tpsgd.nets.padded import Padded

CHECKED_BYTES = 2**20  # bytes of x that are checked at a time: x may be a mapped file
MOST_SINGLE_CLASSES = 20  # up to this number, most samples may be the only one of their class
LAST_LETTER, SURROGATES = 0x10FFFF, 0xD800 >> 11  # in Unicode
TABLES = "(samples, features), (samples, steps, features) or (samples, channels, height, width)"


class RawArrays(NamedTuple):
    """Samples of one split; labels and, for sequences of different lengths, numbers of steps.

    `y` is None for new samples without labels. With `blanks`, samples are NaN where a value is
    missing. `names` are those of the sequences in a table.
    """

    x: Array
    y: Array | None
    lengths: Array | None = None
    are_tokens: bool = False
    blanks: bool = False
    names: list[str] | None = None


def from_arrays(source: str, splits: Sequence[RawArrays]) -> RawData:
    """Check the training arrays and, if there are any, the test arrays, and number the classes."""
    return encode(source, check_arrays(source, splits))


def check_arrays(source: str, splits: Sequence[RawArrays]) -> RawData:
    """Check arrays and bring them into one form, whatever their labels are: bytes are pixels."""
    splits = [_checked(source, split) for split in splits]
    samples: list[Any] = [split.x for split in splits]
    are_tokens = splits[0].are_tokens
    lengths = [split.lengths for split in splits if split.lengths is not None]
    kinds = {(s.are_tokens, s.lengths is None, s.x.dtype == np.uint8) for s in splits}
    shapes = {x.shape[2 if lengths else 1 :] for x in samples}  # only lengths may differ
    if len(kinds) > 1 or len(shapes) > 1:
        raise TpsgdError(
            f"{source}: the training samples are {samples[0].dtype} of shape {samples[0].shape},"
            f" the test samples {samples[1].dtype} of shape {samples[1].shape}; they must match"
            " (give lengths and lengths_test, or Padded, for sequences of different lengths)."
        )
    of_bytes = not are_tokens and samples[0].dtype == np.uint8
    decode = tokens if are_tokens else pixels if of_bytes else numbers
    vocabulary = _vocabulary(source, samples) if are_tokens else None
    notes = ["bytes divided by 255"] if of_bytes else []
    if lengths:
        if decode is not numbers:  # those may be scaled before they are rounded
            samples, decode = [decode(x) for x in samples], converted
        samples, note = _pad_to_longest(samples, lengths)
        notes.append(note)
    elif not are_tokens:
        if of_bytes and samples[0].ndim == 3:
            samples = [x[:, None] for x in samples]  # grey images
        shape = samples[0].shape
        if len(shape) == 4 and shape[-1] in (1, 3, 4) and min(shape[1:3]) > 4:
            samples = [np.moveaxis(x, -1, 1) for x in samples]
            notes.append("axes put in the order channels, height, width")
    scale = None if are_tokens or of_bytes or len(samples[0].shape) > 3 else "none"
    train, test = [*zip(samples, (split.y for split in splits), strict=True), None][:2]
    reading = BYTES if of_bytes else {}
    return RawData((), train, test, decode, ", ".join(notes), vocabulary, reading, scale)


def encode(source: str, raw: RawData) -> RawData:
    """Name the classes of the training set, and number them from 0 in sorted order.

    Examples:
        >>> x, y = np.zeros((3, 2)), np.array(["dog", "cat", "dog"])
        >>> pets = encode("pets.csv", RawData((), (x, y), None, numbers, ""))
        >>> pets.classes, pets.train[1]
        (('cat', 'dog'), array([1, 0, 1]))
    """
    y, y_test = (label_values(source, pair[1]) for pair in (raw.train, raw.test or raw.train))
    if "U" in y.dtype.kind + y_test.dtype.kind:
        y, y_test = y.astype(str), y_test.astype(str)
    values, index = np.unique(y, return_inverse=True)
    if len(values) < 2:
        raise TpsgdError(f"{source}: every label is {values[0]}; at least two classes are needed.")
    if len(values) > max(MOST_SINGLE_CLASSES, len(y) / 2):
        raise TpsgdError(
            f"{source}: {len(y):,} labels have {len(values):,} different values, the first is"
            f" {y[0]}; a label must be the class of its sample, and classes need several samples."
        )
    index_test = np.searchsorted(values, y_test).clip(max=len(values) - 1)
    if (unknown := values[index_test] != y_test).any():
        raise TpsgdError(
            f"{source}: no training sample of the test set's class {y_test[unknown][0]}."
        )
    train, test = (raw.train[0], index), raw.test and (raw.test[0], index_test)
    return replace(raw, classes=tuple(map(str, values)), train=train, test=test)


def label_values(source: str, y: Array) -> Array:
    """Labels as whole numbers if they are whole numbers, else as text."""
    if y.dtype.kind in "biu":
        return y
    try:
        real = y.astype(np.float64)
    except (TypeError, ValueError):
        return y.astype(str)
    if (fraction := ~np.isfinite(real) | (real != np.floor(real))).any():
        raise TpsgdError(f"{source}: the label {y[fraction][0]} is not a whole number or a name.")
    whole = real.astype(np.int64)
    return whole if y.dtype.kind == "f" or (whole.astype(str) == y).all() else y.astype(str)


def _checked(source: str, split: RawArrays) -> RawArrays:
    """Samples of finite numbers with one label each, and zeros as padding; or an error."""
    x, y, lengths, are_tokens = split[:4]
    if are_tokens:
        fits, expected = x.ndim == 2 and x.dtype.kind in "iu", "whole numbers (samples, steps)"
    elif lengths is not None:
        fits, expected = x.ndim > 2 and x.dtype.kind in "iuf", "numbers (samples, steps, features)"
    else:
        fits, expected = x.ndim > 1 and x.dtype.kind in "biuf", f"numbers {TABLES}"
    if not fits:
        name = "tokens" if are_tokens else "x"
        raise TpsgdError(f"{source}: {name} is {x.dtype} of shape {x.shape}; expected {expected}.")
    if y is not None:
        y = y[:, 0] if y.ndim == 2 and y.shape[1] == 1 else y
        if y.shape != x.shape[:1]:
            raise TpsgdError(
                f"{source}: y has the shape {y.shape}; expected one label for each of the {len(x)}"
                " samples (for one-hot rows, give y.argmax(1))."
            )
        if y.dtype.kind == "U":  # a damaged file may have numbers in it that are no letters
            code = np.ascontiguousarray(y).view(np.dtype(np.uint32).newbyteorder(y.dtype.byteorder))
            if (code > LAST_LETTER).any() or ((code >> 11) == SURROGATES).any():
                raise TpsgdError(f"{source}: the labels are no text; save them again.")
    if x.size == 0:
        raise TpsgdError(f"{source}: x is empty, of shape {x.shape}.")
    if lengths is not None:
        x = _without_padding(source, x, lengths)
    if x.dtype.kind == "f" and not split.blanks:
        _check_finite(source, x)
    return split._replace(x=x, y=y)


def _without_padding(source: str, x: Array, lengths: Array) -> Array:
    """Sequences with zeros after their ends; an error if a length is wrong."""
    n, steps = x.shape[:2]
    is_whole = lengths.shape == (n,) and lengths.dtype.kind in "iu"
    if not is_whole or lengths.min() < 1 or lengths.max() > steps:
        raise TpsgdError(f"{source}: lengths must be {n} whole numbers from 1 to {steps}.")
    is_step = np.arange(steps) < lengths[:, None]
    return np.where(is_step.reshape(*is_step.shape, *[1] * (x.ndim - 2)), x, x.dtype.type(0))


def _check_finite(source: str, x: Array) -> None:
    step = max(1, CHECKED_BYTES * len(x) // x.nbytes)
    for start in range(0, len(x), step):
        if not (finite := np.isfinite(x[start : start + step])).all():
            sample, *rest = np.argwhere(~finite)[0].tolist()
            i = [start + sample, *rest]
            raise TpsgdError(
                f"{source}: x{i} is {x[tuple(i)]}; replace it by a number or drop sample {i[0]}."
            )


def _pad_to_longest(samples: Sequence[Array], lengths: Sequence[Array]) -> tuple[list[Any], str]:
    """Samples, padded or cut to the longest length; and a note on it.

    The samples of each split become `Padded`, unless all lengths are equal.
    """
    every_length = np.concatenate(lengths)
    shortest, longest = int(every_length.min()), int(every_length.max())
    padded: list[Any] = []
    for x, steps in zip(samples, lengths, strict=True):
        x = x[:, :longest]
        x = np.pad(x, [(0, 0), (0, longest - x.shape[1]), *[(0, 0)] * (x.ndim - 2)])
        if shortest < longest:
            x = Padded(torch.from_numpy(x), torch.from_numpy(steps.astype(np.int64)))
        padded.append(x)
    return padded, f"{shortest} to {longest} steps" if shortest < longest else f"{longest} steps"


def _vocabulary(source: str, samples: Sequence[Array]) -> int:
    """One more than the largest token of the training set; a larger one in the test set raises."""
    size = int(samples[0].max()) + 1
    if (smallest := min(int(x.min()) for x in samples)) < 0:
        raise TpsgdError(f"{source}: the token {smallest} is negative; number tokens from 0.")
    if (largest := int(samples[-1].max())) >= size:
        raise TpsgdError(
            f"{source}: tokens_test has the token {largest}, tokens end at {size - 1}."
        )
    return size
