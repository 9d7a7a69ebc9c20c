"""Sequences of one's own from arrays: padded ones, and tokens."""

from typing import NamedTuple

import numpy as np
import torch

from tpsgd.data.arrays import checked
from tpsgd.data.rows import Array, Pair, Raw, encode, numbers, tokens
from tpsgd.errors import TpsgdError
from tpsgd.nets.padded import Padded


class Part(NamedTuple):
    """Samples, their labels, and how many steps of each sample are real (None: all)."""

    x: Array
    y: Array
    lengths: Array | None = None


def from_sequences(where: str, train: Part, test: Part | None, are_tokens: bool) -> Raw:
    """Check tokens (samples, steps), or numbers (samples, steps, features), with their lengths."""
    parts = [_part(where, p, are_tokens) for p in (train, test) if p is not None]
    vocabulary = _vocabulary(where, [part.x for part in parts]) if are_tokens else None
    if parts[0].x.shape[2:] != parts[-1].x.shape[2:]:
        raise TpsgdError(
            f"{where}: a step of x has the shape {parts[0].x.shape[2:]}, one of x_test"
            f" {parts[-1].x.shape[2:]}; make them alike."
        )
    if train.lengths is None and parts[0].x.shape[1] != parts[-1].x.shape[1]:
        raise TpsgdError(
            f"{where}: tokens has {parts[0].x.shape[1]} steps, tokens_test"
            f" {parts[-1].x.shape[1]}; pad them and give lengths and lengths_test."
        )
    x = _joined([part.x for part in parts])
    lengths = np.concatenate([_lengths(part) for part in parts])
    pairs = np.split(np.arange(len(x)), [len(parts[0].x)])
    labelled: list[Pair] = [(i, p.y) for i, p in zip(pairs, parts, strict=False)]
    classes, first, second = encode(where, labelled[0], labelled[1] if test else None)
    return Raw(classes, first, second, *padded(x, lengths, are_tokens), vocabulary)


class Rows(NamedTuple):
    """What `Raw` calls decode: from the numbers of chosen sequences to the sequences."""

    x: Array
    lengths: Array | None
    are_tokens: bool

    def __call__(self, chosen: Array) -> Array | Padded:
        """The chosen sequences, padded where they are not all of one length."""
        x = (tokens if self.are_tokens else numbers)(self.x[chosen])
        if self.lengths is None:
            return x
        return Padded(torch.from_numpy(x), torch.from_numpy(self.lengths[chosen]))


def padded(x: Array, lengths: Array, are_tokens: bool = False) -> tuple[Rows, str]:
    """A decoder for the rows of `x`, cut to the longest, and the note on their lengths."""
    low, high = int(lengths.min()), int(lengths.max())
    if low == high:
        return Rows(x[:, :high], None, are_tokens), ""
    return Rows(x[:, :high], lengths.astype(np.int64), are_tokens), f"{low} to {high} steps"


def _part(where: str, part: Part, are_tokens: bool) -> Part:
    """The part with what lies beyond its sequences' ends set to zero, checked."""
    x, y, lengths = part
    if are_tokens:
        expected, right = "whole numbers (samples, steps)", x.ndim == 2 and x.dtype.kind in "iu"
    else:
        expected, right = "numbers (samples, steps, features)", x.ndim > 2 and x.dtype.kind in "iuf"
    if not right:
        raise TpsgdError(
            f"{where}: {'tokens' if are_tokens else 'x with lengths'} is {x.dtype} of shape"
            f" {x.shape}; expected {expected}."
        )
    if lengths is not None:
        if lengths.shape != x.shape[:1] or lengths.dtype.kind not in "iu":
            raise TpsgdError(
                f"{where}: lengths is {lengths.dtype} of shape {lengths.shape}; expected a whole"
                f" number for each of the {len(x)} samples."
            )
        if (bad := (lengths < 1) | (lengths > x.shape[1])).any():
            raise TpsgdError(
                f"{where}: the length of sample {bad.argmax()} is {lengths[bad][0]}; expected 1 to"
                f" {x.shape[1]}, the steps x has room for."
            )
        real = np.arange(x.shape[1]) < lengths[:, None]
        x = np.where(real.reshape(*real.shape, *[1] * (x.ndim - 2)), x, x.dtype.type(0))
    x, y = checked(where, x, y)
    if are_tokens and x.min() < 0:
        raise TpsgdError(f"{where}: the token {x.min()} is below 0; number them from 0.")
    return Part(x, y, lengths)


def _vocabulary(where: str, parts: list[Array]) -> int:
    """How many token values the train part may show; the test part must keep to them."""
    size = int(parts[0].max()) + 1
    if (largest := int(parts[-1].max())) >= size:
        raise TpsgdError(
            f"{where}: tokens_test has the token {largest}, but the largest in tokens is"
            f" {size - 1}; replace it by the number you keep for unknown ones."
        )
    return size


def _joined(parts: list[Array]) -> Array:
    """All samples in one array, padded at the end to the most steps."""
    steps = max(part.shape[1] for part in parts)
    filled = [
        np.pad(part, [(0, 0), (0, steps - part.shape[1]), *[(0, 0)] * (part.ndim - 2)])
        for part in parts
    ]
    return np.concatenate(filled) if len(filled) > 1 else filled[0]


def _lengths(part: Part) -> Array:
    return np.full(len(part.x), part.x.shape[1]) if part.lengths is None else part.lengths
