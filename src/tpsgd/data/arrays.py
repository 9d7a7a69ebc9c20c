"""Arrays of a user, from a file or a function: checked and brought into one form."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from tpsgd.common.errors import TpsgdError
from tpsgd.data import labels
from tpsgd.data.dataset import BYTES, Array, RawData, converted, numbers, pixels, tokens
from tpsgd.nets.padded import Padded

MOST_TOKENS = 2**24  # different ones, of which an embedding has a vector each
CHECKED_BYTES = 2**20  # bytes of x that are checked at a time: x may be a mapped file
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


def from_arrays(
    source: str, splits: Sequence[RawArrays], numbers: bool = False, columns: Sequence[str] = ()
) -> RawData:
    """Check the training arrays and, if there are any, the test arrays, and number the classes.

    Labels that are numbers stay as they are, in columns that may have names.
    """
    raw = check_arrays(source, splits, numbers)
    if numbers:
        return labels.numbered(source, raw, columns)
    raw = labels.encode(source, raw)
    labels.warn_of_numbers(source, raw)
    return raw


def check_arrays(source: str, splits: Sequence[RawArrays], of_numbers: bool = False) -> RawData:
    """Check arrays and bring them into one form, whatever their labels are: bytes are pixels."""
    splits = [_checked(source, split, of_numbers) for split in splits]
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
    if len({split.y.shape[1:] for split in splits if split.y is not None}) > 1:
        raise TpsgdError(f"{source}: y of training and of test samples must have equal shapes.")
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


def _checked(source: str, split: RawArrays, of_numbers: bool) -> RawArrays:
    """Samples of finite numbers with their labels, and zeros as padding; or an error."""
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
        y = labels.checked(source, x, y, are_tokens, of_numbers)
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
    if size > MOST_TOKENS:
        raise TpsgdError(f"{source}: the token {size - 1} is too large; number tokens from 0.")
    if (largest := int(samples[-1].max())) >= size:
        raise TpsgdError(
            f"{source}: tokens_test has the token {largest}, tokens end at {size - 1}."
        )
    return size
