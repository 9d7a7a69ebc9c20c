"""Arrays that a user gives, in a file or by a function: checked and brought into one form."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from tpsgd.data.dataset import Array, Pair, RawData, numbers, pixels, tokens
from tpsgd.errors import TpsgdError
from tpsgd.nets.padded import Padded

CHECKED_BYTES = 2**20  # bytes of x that are checked together


class Arrays(NamedTuple):
    """Samples, labels and, for sequences of different lengths, the number of steps of each."""

    x: Array
    y: Array
    lengths: Array | None = None


def from_arrays(source: str, splits: Sequence[Arrays], are_tokens: bool = False) -> RawData:
    """Check the training arrays and, if there are any, the test arrays, and name the classes.

    Bytes are taken as pixels, unless they are sequences with lengths or tokens.
    """
    if are_tokens or splits[0].lengths is not None:
        return _from_sequences(source, splits, are_tokens)
    pairs = [_checked(source, x, y) for x, y, _ in splits]
    first, last = pairs[0][0], pairs[-1][0]
    are_pixels = first.dtype == np.uint8
    if first.shape[1:] != last.shape[1:] or are_pixels != (last.dtype == np.uint8):
        raise TpsgdError(
            f"{source}: x is {first.dtype} with samples of shape {first.shape[1:]}, but x_test is"
            f" {last.dtype} with samples of shape {last.shape[1:]}; they must match."
        )
    decode, note = (pixels, "bytes divided by 255") if are_pixels else (numbers, "")
    if are_pixels and _channels_first(first).shape != first.shape:
        pairs = [(_channels_first(x), y) for x, y in pairs]
        note += ", axes put in the order channels, height, width"
    return RawData(*encode(source, *pairs), decode, note)


def pad_to_longest(splits: Sequence[tuple[Array, Array]]) -> tuple[list[Any], str]:
    """Samples, given with their lengths, padded or cut to the longest length; and a note on it.

    The samples of each split become `Padded`, in the dtype of `Data`, unless all lengths are equal.
    """
    lengths = np.concatenate([lengths for _, lengths in splits])
    shortest, longest = int(lengths.min()), int(lengths.max())
    padded: list[Any] = []
    for x, lengths in splits:
        x = x[:, :longest]
        if (lacking := longest - x.shape[1]) > 0:
            x = np.pad(x, [(0, 0), (0, lacking), *[(0, 0)] * (x.ndim - 2)])
        if shortest < longest:
            convert = tokens if x.ndim == 2 else numbers  # other sequences have features
            x = Padded(torch.from_numpy(convert(x)), torch.from_numpy(lengths.astype(np.int64)))
        padded.append(x)
    return padded, f"{shortest} to {longest} steps" if shortest < longest else ""


def encode(
    source: str, train: Pair, test: Pair | None = None
) -> tuple[tuple[str, ...], Pair, Pair | None]:
    """Name the classes of the training set, and number them from 0 in sorted order.

    Examples:
        >>> x = np.zeros((3, 2))
        >>> classes, (_, y), _ = encode("pets.csv", (x, np.array(["dog", "cat", "dog"])))
        >>> classes, y
        (('cat', 'dog'), array([1, 0, 1]))
    """
    y, y_test = _labels(source, train[1]), None if test is None else _labels(source, test[1])
    if y_test is not None and "U" in y.dtype.kind + y_test.dtype.kind:
        y, y_test = y.astype(str), y_test.astype(str)
    values, index = np.unique(y, return_inverse=True)
    if len(values) < 2:
        raise TpsgdError(f"{source}: every label is {values[0]}; at least two classes are needed.")
    classes = tuple(str(value) for value in values)
    if test is None or y_test is None:
        return classes, (train[0], index), None
    index_test = np.searchsorted(values, y_test).clip(max=len(values) - 1)
    if (unknown := values[index_test] != y_test).any():
        raise TpsgdError(
            f"{source}: the test set has the class {y_test[unknown][0]}, which the training set"
            " does not have; add training samples of it or leave it out."
        )
    return classes, (train[0], index), (test[0], index_test)


def _labels(source: str, y: Array) -> Array:
    """Labels as whole numbers if they are whole numbers, else as text."""
    if y.dtype.kind in "biu":
        return y
    try:
        real = y.astype(np.float64)
    except (TypeError, ValueError):
        return y.astype(str)
    if (fraction := ~np.isfinite(real) | (real != np.floor(real))).any():
        raise TpsgdError(
            f"{source}: the label {y[fraction][0]} is not a class; labels must be whole numbers or"
            " names."
        )
    whole = real.astype(np.int64)
    return whole if y.dtype.kind == "f" or (whole.astype(str) == y).all() else y.astype(str)


def _checked(source: str, x: Array, y: Array) -> tuple[Array, Array]:
    """Samples of finite numbers with one label each, or an error."""
    if x.dtype.kind not in "biuf" or x.ndim < 2:
        raise TpsgdError(
            f"{source}: x is {x.dtype} of shape {x.shape}; expected numbers of shape"
            " (samples, features), (samples, steps, features) or (samples, channels, height,"
            " width)."
        )
    y = y[:, 0] if y.ndim == 2 and y.shape[1] == 1 else y
    if y.ndim != 1:
        raise TpsgdError(
            f"{source}: y has the shape {y.shape}; expected one label for each sample (for one-hot"
            " rows, give y.argmax(1))."
        )
    if len(x) != len(y):
        raise TpsgdError(f"{source}: x has {len(x)} samples but y has {len(y)} labels.")
    if x.size == 0:
        raise TpsgdError(f"{source}: x is empty, of shape {x.shape}.")
    if x.dtype.kind == "f":
        _check_finite(source, x)
    return x, y


def _check_finite(source: str, x: Array) -> None:
    """Check a few samples at a time, because x may be a mapped file larger than memory."""
    step = max(1, CHECKED_BYTES * len(x) // x.nbytes)
    for start in range(0, len(x), step):
        if not (finite := np.isfinite(x[start : start + step])).all():
            sample, *rest = np.argwhere(~finite)[0].tolist()
            i = [start + sample, *rest]
            raise TpsgdError(
                f"{source}: x{i} is {x[tuple(i)]}; replace it by a number or drop sample {i[0]}."
            )


def _channels_first(x: Array) -> Array:
    """Images with a channel axis before height and width; grey images get one."""
    if x.ndim == 3:
        return x[:, None]
    is_last = x.ndim == 4 and x.shape[-1] in (1, 3, 4) and x.shape[1] not in (1, 3, 4)
    return np.moveaxis(x, -1, 1) if is_last else x


def _from_sequences(source: str, splits: Sequence[Arrays], are_tokens: bool) -> RawData:
    """Tokens (samples, steps), or sequences (samples, steps, features) with their lengths."""
    splits = [_checked_sequences(source, split, are_tokens) for split in splits]
    vocabulary = _vocabulary(source, [split.x for split in splits]) if are_tokens else None
    first, last = splits[0].x.shape, splits[-1].x.shape
    if first[2:] != last[2:]:
        raise TpsgdError(
            f"{source}: a step of x has the shape {first[2:]}, but a step of x_test {last[2:]};"
            " they must match."
        )
    if splits[0].lengths is None and first[1] != last[1]:
        raise TpsgdError(
            f"{source}: tokens has {first[1]} steps, but tokens_test {last[1]}; pad them and give"
            " lengths and lengths_test."
        )
    samples, note = [split.x for split in splits], ""
    if all(split.lengths is not None for split in splits):
        samples, note = pad_to_longest([(x, n) for x, _, n in splits if n is not None])
    pairs = [(x, split.y) for x, split in zip(samples, splits, strict=True)]
    decode = (lambda x: x) if note else tokens if are_tokens else numbers
    return RawData(*encode(source, *pairs), decode, note, vocabulary)


def _checked_sequences(source: str, split: Arrays, are_tokens: bool) -> Arrays:
    """Sequences whose padding is set to zero, or an error."""
    x, y, lengths = split
    if are_tokens:
        expected, fits = "whole numbers (samples, steps)", x.ndim == 2 and x.dtype.kind in "iu"
    else:
        expected, fits = "numbers (samples, steps, features)", x.ndim > 2 and x.dtype.kind in "iuf"
    if not fits:
        raise TpsgdError(
            f"{source}: {'tokens' if are_tokens else 'x with lengths'} is {x.dtype} of shape"
            f" {x.shape}; expected {expected}."
        )
    if lengths is not None:
        if lengths.shape != x.shape[:1] or lengths.dtype.kind not in "iu":
            raise TpsgdError(
                f"{source}: lengths is {lengths.dtype} of shape {lengths.shape}; expected a whole"
                f" number for each of the {len(x)} samples."
            )
        if (wrong := (lengths < 1) | (lengths > x.shape[1])).any():
            raise TpsgdError(
                f"{source}: the length of sample {wrong.argmax()} is {lengths[wrong][0]}; expected"
                f" 1 to {x.shape[1]}, the number of steps in x."
            )
        real = np.arange(x.shape[1]) < lengths[:, None]
        x = np.where(real.reshape(*real.shape, *[1] * (x.ndim - 2)), x, x.dtype.type(0))
    x, y = _checked(source, x, y)
    if are_tokens and x.min() < 0:
        raise TpsgdError(f"{source}: the token {x.min()} is negative; number tokens from 0.")
    return Arrays(x, y, lengths)


def _vocabulary(source: str, splits: list[Array]) -> int:
    """One more than the largest token of the training set; a larger one in the test set raises."""
    size = int(splits[0].max()) + 1
    if (largest := int(splits[-1].max())) >= size:
        raise TpsgdError(
            f"{source}: tokens_test has the token {largest}, but the largest in tokens is"
            f" {size - 1}; replace it by a token for unknown words."
        )
    return size
