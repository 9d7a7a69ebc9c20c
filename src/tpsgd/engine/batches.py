"""Where batches come from: arrays in memory, a stream, either behind frozen blocks.

A source yields `(x, labels)` on the training device. Arrays are indexed, never copied; their order
in an epoch is a function of the seed, the block and the epoch, and the same on every device.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    TensorDataset,
    default_collate,
)

from tpsgd.engine.batch_form import WORTH_CUTTING, Batches, Form, MicroBatch
from tpsgd.engine.disk_rows import Stored
from tpsgd.engine.inputs import check_finite, inputs, labels, pair, tensor
from tpsgd.errors import TpsgdError
from tpsgd.losses import Loss
from tpsgd.maths.memory_format import channels_last, like, rows
from tpsgd.maths.random import Key, permutation, shuffled, streams
from tpsgd.nets.padded import Padded

UNCUT = (
    "sequences of different lengths cannot be cut into micro-batches: lower batch_size instead of "
    "setting micro_batch or a memory budget"
)


class Source(Protocol):
    """Anything that yields an epoch's batches."""

    @property
    def form(self) -> Form:
        """How its batches look."""
        ...

    @property
    def samples(self) -> int:
        """How many samples an epoch has; 0 when that is not known."""
        ...

    def batches(self, block: int = 0, epoch: int | None = None) -> Batches:
        """An epoch in the order of (block, epoch), or in its own order without an epoch."""
        ...


@dataclass
class Arrays:
    """Samples in memory. `per_restart`: x has a leading dimension of restarts."""

    x: Tensor | Padded | Stored
    y: Tensor
    form: Form
    per_restart: bool = False
    order: Callable[[int, Key, torch.device], Iterator[Tensor]] = permutation

    @property
    def samples(self) -> int:
        """How many samples an epoch has."""
        return len(self.y)

    def indices(self, block: int, epoch: int | None) -> Iterator[Tensor]:
        """Each batch's sample indices: (batch,), or (restarts, batch) when stacked."""
        size, device = self.form.batch_size, self.x.device
        keys = [Key(seed, block, epoch or 0) for seed in self.form.seeds]
        if epoch is None:
            for start in range(0, self.samples, size):
                index = torch.arange(start, min(start + size, self.samples), device=device)
                yield index.expand(len(keys), -1) if self.form.stacked else index
        elif self.form.stacked:
            yield from shuffled(self.samples, keys, device).split(size, -1)
        else:
            yield from _batched(self.order(self.samples, keys[0], device), size)

    def take(self, index: Tensor) -> tuple[Any, Tensor]:
        """The samples at these indices, ready for the model; the longest sequences first."""
        x: Any = self.x
        if isinstance(x, Padded):
            index = index[x.lengths[index.cpu()].argsort(descending=True, stable=True)]
        labels = numbered(self.y[index]).to(self.form.device)
        if self.form.in_chunks and not self.per_restart:
            return gathered(x, index, self.form), labels
        if self.per_restart:
            restart = torch.arange(len(index), device=index.device)[:, None]
            return self.form(x[restart, index], 2), labels
        if isinstance(x, Stored):
            return self.form(x.rows(index)), labels
        if isinstance(x, Padded) or index.dim() > 1:
            return self.form(x[index], index.dim()), labels
        return _ready(x, index, self.form), labels

    def batches(self, block: int = 0, epoch: int | None = None) -> Batches:
        """An epoch's batches, gathered one at a time."""
        for index in self.indices(block, epoch):
            size = index.shape[-1]
            if epoch is not None and self.form.skips(size):
                continue
            for part in self.form.cut(size):
                x, labels = self.take(index[..., part])
                held = [MicroBatch(x, labels, (part.stop - part.start) / size, part.stop == size)]
                del x, labels  # while the next one is made, this one must not live on here
                yield held.pop()


def _ready(x: Tensor, index: Tensor, form: Form) -> Tensor:
    """Samples in the model's layout; a large batch in parts, so that it is never there twice."""
    turns = form.channels_last and x.dim() == 4 and not channels_last(x)
    many = len(index) * x[0].numel() * form.numbers.itemsize
    if not turns or many < WORTH_CUTTING or form.looks_up(x):
        return form(rows(x, index))
    shape = (len(index), *x.shape[1:])
    layout = torch.channels_last
    out = torch.empty(shape, dtype=form.numbers, device=form.device, memory_format=layout)
    step = -(-len(index) // 4)
    for start in range(0, len(index), step):
        part = index[start : start + step]
        out[start : start + step].copy_(rows(x, part))
    return out


def _batched(parts: Iterator[Tensor], size: int) -> Iterator[Tensor]:
    """Indices that come in parts of any size, in batches."""
    held = torch.empty(0, dtype=torch.long)
    for part in parts:
        held = torch.cat([held.to(part.device), part])
        while len(held) >= size:
            yield held[:size]
            held = held[size:]
    if len(held):
        yield held


def numbered(y: Tensor) -> Tensor:
    """Class labels as torch wants them; rows of labels as they are."""
    return y if y.is_floating_point() else y.long()


@dataclass
class Gathered:
    """A batch of sequences that is read from its array a few time steps at a time."""

    x: Tensor
    index: Tensor
    form: Form

    @property
    def shape(self) -> tuple[int, ...]:
        """As if it had been gathered whole."""
        return (*self.index.shape, *self.x.shape[1:])

    def dim(self) -> int:
        """As if it had been gathered whole."""
        return len(self.shape)

    def is_floating_point(self) -> bool:
        """Whether its numbers are real once they are gathered."""
        return not self.form.looks_up(self.x)

    def narrow(self, dim: int, start: int, length: int) -> Tensor:
        """Some time steps, ready for the model."""
        leading = self.index.dim()
        return self.form(self.x.narrow(1, start, length)[self.index], leading)

    def long(self) -> "Gathered":
        """Itself: tokens are gathered as such."""
        return self

    def __getitem__(self, part: Any) -> "Gathered":
        return Gathered(self.x, self.index[part], self.form)


def gathered(x: Any, index: Tensor, form: Form) -> Any:
    """The samples at these indices, to be read a few time steps at a time."""
    if isinstance(x, Padded):
        return Padded(Gathered(x.data, index, form), x.lengths[index.cpu()])  # type: ignore
    return Gathered(x, index, form)


@dataclass
class Stream:
    """Batches from a loader, in whatever order and size it gives them."""

    loader: DataLoader
    form: Form
    check: Callable[[Tensor], Tensor]
    own: bool = False  # made here, so that its order is ours to choose

    @property
    def samples(self) -> int:
        """How many samples an epoch has at most, as far as the loader knows; 0 if it does not."""
        return count_samples(self.loader)

    def batches(self, block: int = 0, epoch: int | None = None) -> Batches:
        """An epoch; a loader of our own is shuffled by (seed, block, epoch)."""
        if self.own and epoch is not None:
            key = Key(self.form.seeds[0], block, epoch)
            self.loader.generator.manual_seed(int(streams(key, [-1])))  # type: ignore[union-attr]
        for batch in self.loader:
            x, y = pair(batch)
            x, y = inputs(_writable(x)), numbered(self.check(tensor(y, "y")))
            check(x, self.form)
            if isinstance(x, Padded):
                order = x.longest_first()
                x, y = x[order], y[order]
            if epoch is not None and self.form.skips(len(x)):
                continue
            for part in self._cut(x):
                share = (part.stop - part.start) / len(x)
                mine = self.form(x[part]), y[part].to(self.form.device)
                yield MicroBatch(*mine, share, part.stop == len(x))

    def _cut(self, x: Tensor | Padded) -> list[slice]:
        if isinstance(x, Padded) and self.form.micro_batch is not None:
            raise TpsgdError(UNCUT)
        return self.form.cut(len(x))


@dataclass
class Through:
    """A source seen through frozen functions: inputs recomputed instead of kept."""

    source: Source
    functions: tuple[Callable[[Tensor], Tensor], ...]
    at_once: int | None = None  # samples, where more would hold too much of what lies between

    @property
    def form(self) -> Form:
        """As the underlying source's."""
        return self.source.form

    @property
    def samples(self) -> int:
        """As the underlying source's."""
        return self.source.samples

    def seen(self, x: Any) -> Any:
        """A batch behind the functions."""
        return in_parts(self.functions, x, self.at_once)

    def batches(self, block: int = 0, epoch: int | None = None) -> Batches:
        """The underlying batches, each passed through the functions, one output at a time."""
        for piece in self.source.batches(block, epoch):
            held = [piece._replace(x=self.seen(piece.x))]
            del piece  # while the next batch is made, this one must not live on here
            yield held.pop()


def in_parts(functions: Sequence[Callable[[Any], Any]], x: Any, at_once: int | None) -> Any:
    """A batch through functions that treat each sample by itself, a few samples at a time."""
    if at_once is None or not isinstance(x, Tensor) or len(x) <= at_once:
        for function in functions:
            x = function(x)
        return x
    out: Tensor | None = None
    for start in range(0, len(x), at_once):
        part = in_parts(functions, x[start : start + at_once], None)
        if out is None:
            out = like(part, len(x))
        out[start : start + len(part)] = part
    return out


def source(
    data: Any, form: Form, loss: Loss | None, classes: int | None, complete: bool = False
) -> Arrays | Stream:
    """A source from arrays `(x, y)`, a `Dataset` or a `DataLoader`, with its labels checked.

    Without a loss the labels come as they are (for evaluation, which looks at the output first).
    `complete`: this is all there is to learn from, so a class without samples deserves a warning.
    """
    if isinstance(data, TensorDataset) and len(data.tensors) == 2:
        data = data.tensors

    def known(y: Tensor, complete: bool = False) -> Tensor:
        if loss is None:
            return y
        y = labels(y, loss, classes, complete)
        return y.to(form.dtype) if y.is_floating_point() else y

    if isinstance(data, DataLoader):
        return Stream(data, form, known)
    if isinstance(data, Dataset):
        return Stream(_loader(data, form), form, known, own=True)
    x, y = pair(data)
    x, y = inputs(x), tensor(y, "y")
    if not len(x):
        raise TpsgdError("the data is empty: x has no samples")
    if len(x) != len(y):
        raise TpsgdError(f"x has {len(x):,} samples but y has {len(y):,} labels")
    if isinstance(x, Padded) and form.micro_batch is not None:
        raise TpsgdError(UNCUT)
    check(x, form)
    y = known(y, complete)
    if form.device.type == "cuda" and x.nbytes < torch.cuda.mem_get_info(form.device)[0] / 2:
        x, y = x.to(form.device), y.to(form.device)
    return Arrays(x, y, form)


def count_samples(data: Any) -> int:
    """How many samples there are, as far as can be known; 0 if that is unknown."""
    if not isinstance(data, (Dataset, DataLoader)):
        return len(inputs(pair(data)[0]))
    known: Any = data
    if isinstance(data, DataLoader) and isinstance(data.dataset, IterableDataset):
        known = data.dataset
    elif isinstance(data, DataLoader):  # a batch sampler's batches may have any size
        known = data.sampler if data.batch_size is not None else ()
    try:
        return len(known)
    except TypeError:
        return 0


def in_stream(data: Any) -> bool:
    """Whether batches come from a loader, and may differ from one another in length."""
    return isinstance(data, (Dataset, DataLoader)) and not isinstance(data, TensorDataset)


def first_samples(data: Any, count: int = 2) -> Any:
    """A few samples' inputs, to learn shapes from."""
    if isinstance(data, TensorDataset):
        data = data.tensors
    if isinstance(data, DataLoader):
        batch = next(iter(data), None)
        if batch is None:
            raise TpsgdError("the data is empty: the loader gives no batch")
        return inputs(_writable(pair(batch)[0]))[:count]
    if isinstance(data, Dataset):
        return first_samples(DataLoader(data, batch_size=count, collate_fn=_collate), count)
    x = inputs(pair(data)[0])
    if not len(x):
        raise TpsgdError("the data is empty: x has no samples")
    first = x[:count]
    return first.clone() if isinstance(first, Tensor) else first  # a module may write into it


def _writable(x: Any) -> Any:
    """A loader's batch, which a module may write into."""
    locked = isinstance(x, np.ndarray) and not x.flags.writeable
    return x.copy() if locked else x


def _loader(data: Dataset, form: Form) -> DataLoader:
    iterable = isinstance(data, IterableDataset)
    return DataLoader(
        data,
        form.batch_size,
        shuffle=None if iterable else True,
        generator=torch.Generator(),
        collate_fn=_collate,
    )


def _collate(samples: list[Any]) -> Any:
    """A batch of samples, sequences of different lengths included."""
    if all(isinstance(s, Sequence) and len(s) == 2 for s in samples):
        lengths = {np.shape(x)[:1] for x, _ in samples if isinstance(x, (Tensor, np.ndarray))}
        if len(lengths) > 1:
            return Padded.of([x for x, _ in samples]), default_collate([y for _, y in samples])
    return default_collate(samples)


def check(x: Tensor | Padded, form: Form) -> None:
    """Numbers that are numbers, tokens that are known."""
    if isinstance(x, Padded):
        return check(x.data, form)
    check_finite(x)
    if form.tokens > 1 and form.looks_up(x) and x.numel():
        low, high = int(x.min()), int(x.max())
        if low < 0 or high >= form.tokens:
            raise TpsgdError(
                f"token {low if low < 0 else high} is out of range: the first layer has "
                f"{form.tokens} inputs, so tokens go from 0 to {form.tokens - 1}"
            )
