"""The records of this package: a built-in set, what a reader returns, and what `load` returns."""

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tpsgd.common.errors import TpsgdError
from tpsgd.nets.padded import Padded

Array = NDArray[Any]
Pair = tuple[Any, Any]  # samples (an array, or `Padded`) and their labels (an array, or None)
Decoder = Callable[[Any], Any]  # from samples as they are stored
BYTES = {"scaling": {"method": "bytes"}}  # of samples that were bytes, and were divided by 255


@dataclass(frozen=True)
class RawData:
    """Samples as they are stored, and their labels; not yet split, thinned out or converted.

    Labels are indices into `classes`; without classes, they are as stored. `decode` converts
    samples to float32, or tokens to int64: it divides pixels by 255, reads image files and so on.
    `test` is None for data without a test set, `vocabulary` the number of different tokens.
    `reading` is the part of `Data.inputs` that the reader knows. `scale` is the scaling that `load`
    chooses if its caller does not; None for samples that are not scaled.
    """

    classes: tuple[str, ...]
    train: Pair
    test: Pair | None
    decode: Decoder
    note: str
    vocabulary: int | None = None
    reading: dict[str, Any] = field(default_factory=dict)
    scale: str | None = None

    @property
    def decode_exactly(self) -> Decoder:
        """`decode` without rounding to float32, for samples that are scaled before that.

        A place on a map or a time is so far from 0 that float32 has none of the digits that differ.
        """
        return converted if self.decode is numbers else self.decode


@dataclass(frozen=True)
class Dataset:
    """The registry entry of a built-in set; its module's docstring has the source and the licence.

    `train` and `test` are numbers of samples. `files` must all be in `folder`. `downloads` lists
    the published files with their published checksums; without downloads, `by_hand` says where to
    get the files. If only those files name the classes, `classes` is empty.
    """

    name: str
    classes: tuple[str, ...]
    shape: tuple[int, ...]
    train: int
    test: int
    read: Callable[[Path, "Dataset"], RawData]
    folder: str = ""
    files: tuple[str, ...] = ()
    mirrors: tuple[str, ...] = ()
    downloads: tuple[tuple[str, str], ...] = ()
    by_hand: str = ""
    vocabulary: int | None = None
    class_count: int = 0


@dataclass(frozen=True, eq=False)
class Data:
    """A data set: x of shape (samples, *shape), and y, int64 indices into `classes`.

    Steps or pixels may have a class each, -100 for none. With `task="regression"`, y is float32,
    (samples,) or (samples, targets), and there are no classes.

    x is a float32 tensor, or an int64 tensor of tokens from 0 to `vocabulary` - 1. Sequences of
    different lengths are `Padded`, and `shape` has the length of the longest.

    Loaded with `on_disk`, x is a tensor over a file that is mapped read-only: the system reads the
    samples that are used and drops them when memory is short. `fit` and `evaluate` never write to
    x. Writing to it ends the process; copy what you change, as in `x[:100].clone()`. The labels
    are in memory.
    """

    name: str
    train: tuple[Any, Tensor] = field(repr=False)
    test: tuple[Any, Tensor] = field(repr=False)
    classes: tuple[str, ...]
    shape: tuple[int, ...]
    note: str
    vocabulary: int | None = None
    reading: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def targets(self) -> tuple[str, ...]:
        """The names of the columns of numbers to predict; empty for classes."""
        return tuple(self.reading.get("targets", ()))

    @property
    def inputs(self) -> dict[str, Any]:
        """What a sample looks like, in plain values for `Run.save`: shape, scaling, columns."""
        sample: dict[str, Any] = {"shape": list(self.shape)}
        if self.vocabulary is not None:
            sample["vocabulary"] = self.vocabulary
        return sample | self.reading


@contextmanager
def readable(file: Path, kind: str, advice: str) -> Iterator[None]:
    """One sentence for whatever the reader of a missing or damaged file raises."""
    try:
        yield
    except TpsgdError:
        raise
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise TpsgdError(f"{file} cannot be read as {kind} ({error}); {advice}.") from error


def pixels(x: Array) -> Array:
    """Bytes from 0 to 255 as float32 in [0, 1]."""
    return np.divide(x, np.float32(255), dtype=np.float32, order="C")


def numbers(x: Any) -> Any:
    """Real numbers as float32, unscaled; float32 arrays are not copied."""
    if isinstance(x, Padded):
        return Padded(x.data.float(), x.lengths)
    return np.require(x, np.float32, ["C", "W"])


def tokens(x: Array) -> Array:
    """Whole numbers as int64, for an embedding layer."""
    return np.require(x, np.int64, ["C", "W"])


def converted(x: Any) -> Any:
    """Samples that are converted already."""
    return x


def check_labels(file: Path, y: Array, entry: Dataset) -> Array:
    """The labels of a built-in set as int64; raises if one is not a class of that set."""
    if y.max() >= len(entry.classes):
        raise TpsgdError(f"{file} has the label {y.max()}, which is not a class of {entry.name}.")
    return y.astype(np.int64)
