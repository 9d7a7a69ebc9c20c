"""Batches: their form, and those of arrays, in memory or in a file, also through frozen blocks.

The numbers of a batch are gathered on the training device when it is loaded. Arrays are indexed,
never copied; their order in an epoch is a function of the seed, the block and the epoch, and the
same on every device.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import nextafter
from typing import Any

import torch
from torch import Tensor, nn

from tpsgd.losses import IGNORED
from tpsgd.maths.kernels.memory_format import channels_last, like, rows
from tpsgd.maths.random import Key, permutation, shuffled
from tpsgd.nets.layers import unsafe_channels_last
from tpsgd.nets.model_inputs import ModelInputs
from tpsgd.nets.padded import Padded, as_pixels
from tpsgd.train import Source

WORTH_CUTTING = 1 << 20  # bytes of a batch that is better processed in parts


@dataclass(frozen=True)
class BatchForm:
    """What a batch looks like when it reaches the model."""

    device: torch.device
    dtype: torch.dtype
    batch_size: int
    seeds: tuple[int, ...]  # one per restart; more than one means stacked batches
    channels_last: bool = False
    lookup: bool = False  # the first layer is an embedding: inputs stay whole numbers
    batch_norm: bool = False  # which cannot take a batch of one sample
    tokens: int = 0  # size of the vocabulary: inputs (batch, steps) stay whole numbers
    in_chunks: bool = False  # sequences are gathered a few time steps at a time
    ragged: bool = False  # sequences differ in length
    micro_batch: int | None = None  # at most this many samples at a time
    precision: torch.dtype | None = None  # of activations, if it is not the parameters' dtype

    @property
    def stacked(self) -> bool:
        """Whether a batch holds one batch per restart."""
        return len(self.seeds) > 1

    @property
    def numbers(self) -> torch.dtype:
        """The number format of samples when they reach the model."""
        return self.precision or self.dtype

    @property
    def no_batches(self) -> str:
        """Why an epoch without any batch is an error."""
        if self.batch_norm:
            return (
                "batch normalisation needs at least 2 samples per batch, and no batch has 2: raise "
                "batch_size"
            )
        return "the data is empty: an epoch gave no batch"

    def skips(self, size: int) -> bool:
        """Whether a training batch of this size is left out."""
        return self.batch_norm and size == 1

    def cut(self, size: int) -> list[slice]:
        """A batch of this size as micro-batches, all about equally large."""
        count = 1 if self.micro_batch is None else -(-size // self.micro_batch)
        if self.batch_norm:
            count = max(1, min(count, size // 2))
        return [slice(size * i // count, size * (i + 1) // count) for i in range(count)]

    def looks_up(self, x: Any, leading: int = 1) -> bool:
        """Whether x, with this many leading dimensions of samples, holds indices to look up."""
        whole = not x.is_floating_point()
        return whole and (self.lookup or (self.tokens > 1 and x.dim() == leading + 1))

    def __call__(self, x: Any, leading: int = 1) -> Any:
        """x on the device, in the model's number format and memory format."""
        if isinstance(x, ModelInputs):
            return x.map(self._one_of_several)
        if self.looks_up(x, leading):
            return x.to(self.device, torch.long if self.tokens else x.dtype)
        options: Any = {}
        if self.channels_last and x.dim() == 4:
            options["memory_format"] = torch.channels_last
        return as_pixels(x, x.to(self.device, self.numbers, **options))

    def _one_of_several(self, x: Tensor) -> Tensor:
        """One input of several: real numbers and pixels as ever, other whole numbers unchanged."""
        if x.is_floating_point() or x.dtype is torch.uint8:
            return as_pixels(x, x.to(self.device, self.numbers))
        return x.to(self.device)

    def first(self, x: Any) -> Any:
        return x[:, :1] if self.stacked else x[:1]


def suits_channels_last(modules: Iterable[nn.Module]) -> bool:
    """Whether channels last is faster (there are convolutions) and safe.

    A user's module may rely on `view`, so only torch's and this library's get that memory format.
    """
    modules = list(modules)
    safe = all(is_library_module(m) and not unsafe_channels_last(m) for m in modules)
    return safe and any(isinstance(m, nn.Conv2d) for m in modules)


def is_library_module(module: nn.Module) -> bool:
    """Whether a module is torch's or this library's, not the user's."""
    return type(module).__module__.startswith(("torch.nn", "tpsgd.", "tpsgd_"))


def has_lookup(modules: Iterable[nn.Module]) -> bool:
    """Whether the model has an embedding, whose inputs are whole numbers."""
    return any(isinstance(m, (nn.Embedding, nn.EmbeddingBag)) for m in modules)


@dataclass(slots=True)
class SampleBatch:
    """Samples at some indices, gathered when they are loaded.

    A micro-batch is a `share` of a batch; `last` says that it is the batch's last one.
    """

    gather: Callable[[Any], tuple[Any, Tensor]]
    index: Any  # sample indices; of a loader, a list with the one batch it gave
    size: int
    share: float = 1.0
    last: bool = True

    def load(self) -> tuple[Any, Tensor]:
        """Inputs and labels on the device."""
        return self.gather(self.index)

    def through(self, function: Callable[[Any], Any]) -> "SampleBatch":
        """The same batch with its inputs changed by a function."""

        def gather(index: Any) -> tuple[Any, Tensor]:
            x, labels = self.gather(index)
            return function(x), labels

        return replace(self, gather=gather)


@dataclass
class ArraySource:
    """Samples in memory, or in a file. `per_restart`: x has a leading dimension of restarts."""

    x: Any  # a tensor, Padded sequences, or rows in a file (DiskRows)
    y: Tensor
    form: BatchForm
    per_restart: bool = False
    order: Callable[[int, Key, torch.device], Iterator[Tensor]] = permutation

    def __post_init__(self) -> None:
        """Samples that are ready for the model as they are need only be gathered."""
        x, y, form = self.x, self.y, self.form
        changed = form.stacked or form.in_chunks or (form.channels_last and len(x.shape) == 4)
        placed = (x.device, x.dtype, y.device) == (form.device, form.numbers, form.device)
        whole = type(x) is Tensor and x.dim() > 1 and x.is_contiguous() and not self.per_restart
        classes = y.is_floating_point() or y.dtype is torch.long
        self.ready = whole and placed and classes and not changed

    @property
    def samples(self) -> int:
        return len(self.y)

    @property
    def steps(self) -> int:
        whole, rest = divmod(self.samples, self.form.batch_size)
        return whole + (rest > 0 and not self.form.skips(rest))

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
        x, form = self.x, self.form
        if self.ready:
            samples = x.flatten(1).index_select(0, index).view(-1, *x.shape[1:])
            return samples, self.y.index_select(0, index)
        if ragged := isinstance(x, Padded):
            index = index[x.lengths[index.cpu()].argsort(descending=True, stable=True)]
        labels = self.y.index_select(0, index) if index.dim() == 1 else self.y[index]
        labels = (labels if labels.is_floating_point() else labels.long()).to(form.device)
        if self.per_restart:
            restart = torch.arange(len(index), device=index.device)[:, None]
            return form(x[restart, index], 2), labels
        if form.in_chunks:
            steps: Any = LazySequences(x.data if ragged else x, index, form)
            return Padded(steps, x.lengths[index.cpu()]) if ragged else steps, labels
        if isinstance(x, Tensor) and index.dim() == 1:
            return _gathered(x, index, form), labels
        return form(x[index], index.dim()), labels

    def batches(self, block: int = 0, epoch: int | None = None) -> Iterator[SampleBatch]:
        """The batches of an epoch in its random order; without an epoch in the stored order."""
        for index in self.indices(block, epoch):
            size = index.shape[-1]
            if epoch is not None and self.form.skips(size):
                continue
            if self.form.micro_batch is None:
                yield SampleBatch(self.take, index, size)
                continue
            for span, share in shares(self.form.cut(size), self.y, index):
                samples, last = span.stop - span.start, span.stop == size
                yield SampleBatch(self.take, index[..., span], samples, share, last)


def shares(spans: Iterable[slice], y: Tensor, index: Any) -> list[tuple[slice, float]]:
    """What micro-batches are of a batch: their shares of its labelled positions, or samples."""
    spans = list(spans)
    if y.is_floating_point() or y.dim() == 1:
        return [(span, (span.stop - span.start) / spans[-1].stop) for span in spans]
    counts = (y[index] != IGNORED).flatten(1).sum(1)
    labelled = [int(counts[span].sum()) for span in spans]
    most = 1.0 if len(spans) == 1 else nextafter(1.0, 0.0)  # 1 is a whole batch
    total = max(1, sum(labelled))
    return [(s, min(n / total, most)) for s, n in zip(spans, labelled, strict=True)]


def _gathered(x: Tensor, index: Tensor, form: BatchForm) -> Tensor:
    """Samples in the model's memory format; a large batch in parts, so that it exists once."""
    transposes = form.channels_last and x.dim() == 4 and not channels_last(x)
    if not transposes or form.looks_up(x):
        return form(rows(x, index))
    nbytes = len(index) * x[0].numel() * form.numbers.itemsize
    if nbytes < WORTH_CUTTING:
        return form(rows(x, index))
    options: Any = {"device": form.device, "memory_format": torch.channels_last}
    out = torch.empty((len(index), *x.shape[1:]), dtype=form.numbers, **options)
    step = -(-len(index) // 4)
    for few, target in zip(index.split(step), out.split(step), strict=True):
        target.copy_(rows(x, few))
    return as_pixels(x, out)


def _batched(chunks: Iterator[Tensor], size: int) -> Iterator[Tensor]:
    """Indices that come in chunks of any size, in batches: views of a chunk where possible."""
    waiting = torch.empty(0, dtype=torch.long)
    for chunk in chunks:
        if len(waiting):
            missing = size - len(waiting)
            waiting, chunk = torch.cat([waiting, chunk[:missing]]), chunk[missing:]
            if len(waiting) < size:
                continue
            yield waiting
        whole = len(chunk) // size * size
        yield from chunk[:whole].split(size) if whole else ()
        waiting = chunk[whole:].clone()
        del chunk  # before the next one is drawn
    if len(waiting):
        yield waiting


@dataclass
class LazySequences:
    """A batch of sequences that is read from its array a few time steps at a time.

    It has what a recurrent layer asks of a tensor; tokens are gathered as whole numbers.
    """

    x: Tensor
    index: Tensor
    form: BatchForm

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.index.shape, *self.x.shape[1:])

    def dim(self) -> int:
        return len(self.shape)

    def is_floating_point(self) -> bool:
        return not self.form.looks_up(self.x)

    def narrow(self, dim: int, start: int, length: int) -> Tensor:
        """Some time steps, ready for the model."""
        return self.form(self.x.narrow(1, start, length)[self.index], self.index.dim())

    def long(self) -> "LazySequences":
        return self

    def __getitem__(self, samples: Any) -> "LazySequences":
        return LazySequences(self.x, self.index[samples], self.form)


@dataclass
class DerivedSource:
    """A source whose batches are those of another source, changed when they are loaded."""

    source: Source

    @property
    def form(self) -> BatchForm:
        return self.source.form

    @property
    def samples(self) -> int:
        return self.source.samples

    @property
    def steps(self) -> int:
        return self.source.steps


@dataclass
class ThroughBlocks(DerivedSource):
    """A source whose batches go through frozen blocks: inputs recomputed instead of kept."""

    functions: tuple[Callable[[Tensor], Tensor], ...]
    at_a_time: int | None = None  # samples, where more would take too much memory

    def outputs(self, x: Any) -> Any:
        return in_parts(self.functions, x, self.at_a_time)

    def batches(self, block: int = 0, epoch: int | None = None) -> Iterator[SampleBatch]:
        """The source's batches, each computed through the blocks when it is loaded."""
        for batch in self.source.batches(block, epoch):
            yield batch.through(self.outputs)


def in_parts(functions: Sequence[Callable[[Any], Any]], x: Any, at_a_time: int | None) -> Any:
    """A batch through functions that treat each sample by itself, a few samples at a time."""
    if at_a_time is None or not isinstance(x, Tensor) or len(x) <= at_a_time:
        for function in functions:
            x = function(x)
        return x
    out: Tensor | None = None
    for start in range(0, len(x), at_a_time):
        outputs = in_parts(functions, x[start : start + at_a_time], None)
        if out is None:
            out = like(outputs, len(x))
        out[start : start + len(outputs)] = outputs
    return out


def stored_samples(source: Any) -> Any:
    """The arrays (`ArraySource`) or the loader below frozen blocks and augmentation."""
    while isinstance(source, DerivedSource):
        source = source.source
    return source


def depth(source: Source) -> int:
    """How many frozen blocks a sample goes through each time it is loaded."""
    return len(source.functions) if isinstance(source, ThroughBlocks) else 0
