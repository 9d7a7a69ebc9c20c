"""Where batches come from: arrays in memory or in a file, a loader, or frozen blocks after either.

The numbers of a batch are gathered on the training device when it is loaded. Arrays are indexed,
never copied; their order in an epoch is a function of the seed, the block and the epoch, and the
same on every device.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    default_collate,
)

from tpsgd.common.errors import TpsgdError
from tpsgd.engine.sources.inputs import check_finite, inputs, labels, pair, refuse_numbers, tensor
from tpsgd.losses import Loss
from tpsgd.maths.kernels.memory_format import channels_last, like, rows
from tpsgd.maths.random import Key, permutation, shuffled, streams
from tpsgd.nets.layers import unsafe_channels_last
from tpsgd.nets.padded import Padded, as_pixels
from tpsgd.train import Source

RAGGED_UNCUT = (
    "sequences of different lengths cannot be cut into micro-batches: lower batch_size instead of "
    "setting micro_batch or a memory budget"
)
DEAD_WORKER = "DataLoader worker"  # how torch's message of a worker's death begins
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
        if self.looks_up(x, leading):
            return x.to(self.device, torch.long if self.tokens else x.dtype)
        if self.channels_last and x.dim() == 4:
            options: Any = {"memory_format": torch.channels_last}
            return as_pixels(x, x.to(self.device, self.numbers, **options))
        return as_pixels(x, x.to(self.device, self.numbers))

    def first(self, x: Any) -> Any:
        """The first sample of a batch."""
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
    return type(module).__module__.startswith(("torch.nn", "tpsgd."))


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


Batches = Iterator[SampleBatch]


@dataclass
class ArraySource:
    """Samples in memory, or in a file. `per_restart`: x has a leading dimension of restarts."""

    x: Any  # a tensor, Padded sequences, or rows in a file (reuse.DiskRows)
    y: Tensor
    form: BatchForm
    per_restart: bool = False
    order: Callable[[int, Key, torch.device], Iterator[Tensor]] = permutation

    @property
    def samples(self) -> int:
        """How many samples an epoch has."""
        return len(self.y)

    @property
    def steps(self) -> int:
        """How many batches an epoch has."""
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

    def __post_init__(self) -> None:
        """Samples that are ready for the model as they are need only be gathered."""
        x, form = self.x, self.form
        self.ready = (
            type(x) is Tensor
            and not (self.per_restart or form.stacked or form.in_chunks or form.looks_up(x))
            and (x.device, x.dtype) == (form.device, form.numbers)
            and not (form.channels_last and x.dim() == 4)
            and (self.y.is_floating_point() or self.y.dtype is torch.long)
            and self.y.device == form.device
            and x.is_contiguous()
            and x.dim() > 1
        )

    def take(self, index: Tensor) -> tuple[Any, Tensor]:
        """The samples at these indices, ready for the model; the longest sequences first."""
        x = self.x
        if self.ready:
            samples = x.flatten(1).index_select(0, index).view(-1, *x.shape[1:])
            return samples, self.y.index_select(0, index)
        if isinstance(x, Padded):
            index = index[x.lengths[index.cpu()].argsort(descending=True, stable=True)]
        labels = self.y.index_select(0, index) if index.dim() == 1 else self.y[index]
        labels = _index_type(labels).to(self.form.device)
        if self.form.in_chunks and not self.per_restart:
            if isinstance(x, Padded):
                data: Any = LazySequences(x.data, index, self.form)
                return Padded(data, x.lengths[index.cpu()]), labels
            return LazySequences(x, index, self.form), labels
        if self.per_restart:
            restart = torch.arange(len(index), device=index.device)[:, None]
            return self.form(x[restart, index], 2), labels
        if not isinstance(x, (Tensor, Padded)):
            return self.form(x.rows(index)), labels
        if isinstance(x, Padded) or index.dim() > 1:
            return self.form(x[index], index.dim()), labels
        return _gathered(x, index, self.form), labels

    def batches(self, block: int = 0, epoch: int | None = None) -> Batches:
        """The batches of an epoch in its random order; without an epoch in the stored order."""
        for index in self.indices(block, epoch):
            size = index.shape[-1]
            if epoch is not None and self.form.skips(size):
                continue
            if self.form.micro_batch is None:
                yield SampleBatch(self.take, index, size)
                continue
            for span in self.form.cut(size):
                samples = span.stop - span.start
                share, last = samples / size, span.stop == size
                yield SampleBatch(self.take, index[..., span], samples, share, last)


def _gathered(x: Tensor, index: Tensor, form: BatchForm) -> Tensor:
    """Samples in the model's memory format; a large batch in parts, so that it exists once."""
    transposes = form.channels_last and x.dim() == 4 and not channels_last(x)
    nbytes = len(index) * x[0].numel() * form.numbers.itemsize
    if not transposes or nbytes < WORTH_CUTTING or form.looks_up(x):
        return form(rows(x, index))
    options: Any = {"device": form.device, "memory_format": torch.channels_last}
    out = torch.empty((len(index), *x.shape[1:]), dtype=form.numbers, **options)
    step = -(-len(index) // 4)
    for start in range(0, len(index), step):
        out[start : start + step].copy_(rows(x, index[start : start + step]))
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


def _index_type(y: Tensor) -> Tensor:
    """Class labels in torch's index type; rows of labels as they are."""
    return y if y.is_floating_point() else y.long()


@dataclass
class LazySequences:
    """A batch of sequences that is read from its array a few time steps at a time."""

    x: Tensor
    index: Tensor
    form: BatchForm

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the gathered batch."""
        return (*self.index.shape, *self.x.shape[1:])

    def dim(self) -> int:
        """The dimensions of the gathered batch."""
        return len(self.shape)

    def is_floating_point(self) -> bool:
        """Whether the gathered numbers are real."""
        return not self.form.looks_up(self.x)

    def narrow(self, dim: int, start: int, length: int) -> Tensor:
        """Some time steps, ready for the model."""
        return self.form(self.x.narrow(1, start, length)[self.index], self.index.dim())

    def long(self) -> "LazySequences":
        """Itself: tokens are gathered as whole numbers."""
        return self

    def __getitem__(self, samples: Any) -> "LazySequences":
        return LazySequences(self.x, self.index[samples], self.form)


@dataclass
class LoaderSource:
    """Batches from a loader, in whatever order and size it gives them."""

    loader: DataLoader
    form: BatchForm
    check: Callable[[Tensor], Tensor]
    reshuffled: bool = False  # the library made the loader, and chooses its order

    @property
    def samples(self) -> int:
        """The most samples that an epoch has, as far as the loader knows; 0 if it does not."""
        return count_samples(self.loader)

    @property
    def steps(self) -> int:
        """How many batches an epoch has; 0 if the loader does not know."""
        try:
            return len(self.loader)
        except TypeError:
            return 0

    def batches(self, block: int = 0, epoch: int | None = None) -> Batches:
        """An epoch; a loader made by the library is shuffled by (seed, block, epoch)."""
        if self.reshuffled and epoch is not None:
            key = Key(self.form.seeds[0], block, epoch)
            self.loader.generator.manual_seed(int(streams(key, [-1])))  # type: ignore[union-attr]
        for count, batch in enumerate(self._arriving(epoch)):
            x, y = pair(batch)
            x, y = inputs(_writable(x)), _index_type(self.check(tensor(y, "y")))
            check_values(x, self.form, partial(self._name, count))
            if isinstance(x, Padded):
                if self.form.micro_batch is not None:
                    raise TpsgdError(RAGGED_UNCUT)
                order = x.longest_first()
                x, y = x[order], y[order]
            if epoch is not None and self.form.skips(len(x)):
                continue
            for span in self.form.cut(len(x)):
                arrived = [(self.form(x[span]), y[span].to(self.form.device))]
                samples = span.stop - span.start
                yield SampleBatch(list.pop, arrived, samples, samples / len(x), span.stop == len(x))

    def _name(self, batch: int, place: int) -> str:
        """What to call a sample by its batch and its place in it."""
        if isinstance(self.loader.sampler, _NotedOrder):
            item = self.loader.sampler.order[batch * self.form.batch_size + place]
            return f"item {item} of the data set"
        return f"sample {place} of batch {batch}"

    def _arriving(self, epoch: int | None) -> Iterator[Any]:
        """What the loader gives; if it raises, or one of its workers dies, that is one sentence."""
        count = 0
        try:
            for count, batch in enumerate(self.loader, 1):  # noqa: B007
                yield batch
        except TpsgdError:
            raise
        except Exception as error:  # a user's data set raises anything
            if isinstance(error, (ConnectionError, EOFError)):
                error = RuntimeError(f"a {DEAD_WORKER} exited unexpectedly")
            name = type(error).__name__
            reason = str(error).strip().rpartition("\n")[2]  # of a worker: after its traceback
            when = "" if epoch is None else f" of epoch {epoch + 1}"
            raise TpsgdError(
                f"the data loader failed after {count} batches{when}: {name}: "
                f"{reason.removeprefix(f'{name}: ')}"
            ) from error


class _NotedOrder(RandomSampler):
    """The random order of an epoch, which tells the item that a sample was."""

    order: Sequence[int] = ()

    def __init__(self, data: Any, generator: torch.Generator) -> None:
        super().__init__(data, generator=generator)

    def __iter__(self) -> Iterator[int]:
        self.order = list(super().__iter__())
        return iter(self.order)


@contextmanager
def workers_watched() -> Iterator[None]:
    """A loader's worker that dies is one sentence, wherever torch notices it."""
    try:
        yield
    except RuntimeError as error:
        if DEAD_WORKER not in str(error):
            raise
        raise TpsgdError(f"the data loader failed: {error}") from error


@dataclass
class DerivedSource:
    """A source whose batches are those of another source, changed when they are loaded."""

    source: Source

    @property
    def form(self) -> BatchForm:
        """The form of the other source's batches."""
        return self.source.form

    @property
    def samples(self) -> int:
        """How many samples an epoch has."""
        return self.source.samples

    @property
    def steps(self) -> int:
        """How many batches an epoch has; 0 if that is unknown."""
        return self.source.steps


@dataclass
class ThroughBlocks(DerivedSource):
    """A source whose batches go through frozen blocks: inputs recomputed instead of kept."""

    functions: tuple[Callable[[Tensor], Tensor], ...]
    at_a_time: int | None = None  # samples, where more would take too much memory

    def outputs(self, x: Any) -> Any:
        """The blocks' outputs for a batch."""
        return in_parts(self.functions, x, self.at_a_time)

    def batches(self, block: int = 0, epoch: int | None = None) -> Batches:
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


def stored_samples(source: Source) -> ArraySource | LoaderSource:
    """The arrays or the loader below frozen blocks and augmentation."""
    while not isinstance(source, (ArraySource, LoaderSource)):
        source = source.source  # type: ignore[attr-defined]
    return source


def depth(source: Source) -> int:
    """How many frozen blocks a sample goes through each time it is loaded."""
    return len(source.functions) if isinstance(source, ThroughBlocks) else 0


def as_source(
    data: Any,
    form: BatchForm,
    loss: Loss | None,
    classes: int | None,
    complete: bool = False,
    classifier: str = "",
) -> ArraySource | LoaderSource:
    """A source from arrays `(x, y)`, a `Dataset` or a `DataLoader`, with its labels checked.

    Without a loss the labels are not checked (evaluation looks at the output first). `complete`:
    these are all samples to learn from, so a class without samples gives a warning. `classifier`:
    the name of a rule that learns from classes alone, so that other targets are refused.
    """
    if isinstance(data, TensorDataset) and len(data.tensors) == 2:
        data = data.tensors

    def checked(y: Tensor, complete: bool = False) -> Tensor:
        if loss is None:
            return y
        y = labels(y, loss, classes, complete)
        if classifier and y.is_floating_point():
            refuse_numbers(y, classifier)
        return y.to(form.dtype) if y.is_floating_point() else y

    if isinstance(data, DataLoader):
        return LoaderSource(data, form, checked)
    if isinstance(data, Dataset):
        _check_sized(data)
        generator = torch.Generator()
        sampler = None if isinstance(data, IterableDataset) else _NotedOrder(data, generator)
        options: Any = {"generator": generator, "collate_fn": _collate, "sampler": sampler}
        loader = DataLoader(data, form.batch_size, **options)
        return LoaderSource(loader, form, checked, reshuffled=True)
    x, y = pair(data)
    x, y = inputs(x), tensor(y, "y")
    if len(x) != len(y):
        raise TpsgdError(f"x has {len(x):,} samples but y has {len(y):,} labels")
    if isinstance(x, Padded) and form.micro_batch is not None:
        raise TpsgdError(RAGGED_UNCUT)
    check_values(x, form)
    y = checked(y, complete)
    if form.device.type == "cuda" and x.nbytes < torch.cuda.mem_get_info(form.device)[0] / 2:
        x, y = x.to(form.device), y.to(form.device)
    return ArraySource(x, y, form)


def count_samples(data: Any) -> int:
    """How many samples there are; 0 if that is unknown."""
    if not isinstance(data, (Dataset, DataLoader)):
        return len(inputs(pair(data)[0]))
    sized: Any = data
    if isinstance(data, DataLoader) and isinstance(data.dataset, IterableDataset):
        sized = data.dataset
    elif isinstance(data, DataLoader):  # a batch sampler's batches may have any size
        sized = data.sampler if data.batch_size is not None else ()
    try:
        return len(sized)
    except TypeError:
        return 0


def is_stream(data: Any) -> bool:
    """Whether batches come from a loader, and may differ from one another in length."""
    return isinstance(data, (Dataset, DataLoader)) and not isinstance(data, TensorDataset)


def first_samples(data: Any, count: int = 2) -> Any:
    """The inputs of a few samples, to learn shapes from."""
    if isinstance(data, TensorDataset):
        data = data.tensors
    if isinstance(data, DataLoader):
        batch = next(iter(data), None)
        if batch is None:
            raise TpsgdError("the data is empty: the loader gives no batch")
        return inputs(_writable(pair(batch)[0]))[:count]
    if isinstance(data, Dataset):
        _check_sized(data)
        return first_samples(DataLoader(data, batch_size=count, collate_fn=_collate), count)
    x = inputs(pair(data)[0])
    if not len(x):
        raise TpsgdError("the data is empty: x has no samples")
    first = x[:count]
    return first.clone() if isinstance(first, Tensor) else first  # a module may write into it


def _check_sized(data: Dataset) -> None:
    """Refuse a data set whose samples can neither be counted nor iterated over."""
    if not isinstance(data, IterableDataset) and not hasattr(data, "__len__"):
        raise TpsgdError(
            f"{type(data).__name__} has no __len__, so its samples cannot be shuffled: add it, or "
            "make it an IterableDataset"
        )


def _writable(x: Any) -> Any:
    """A loader's batch, which a module may write into."""
    locked = isinstance(x, np.ndarray) and not x.flags.writeable
    return x.copy() if locked else x


def _collate(samples: list[Any]) -> Any:
    """A batch of samples, sequences of different lengths included."""
    if all(isinstance(s, Sequence) and len(s) == 2 for s in samples):
        lengths = {np.shape(x)[:1] for x, _ in samples if isinstance(x, (Tensor, np.ndarray))}
        if len(lengths) > 1:
            return Padded.of([x for x, _ in samples]), default_collate([y for _, y in samples])
    return default_collate(samples)


def check_values(
    x: Tensor | Padded, form: BatchForm, name: Callable[[int], str] = "sample {}".format
) -> None:
    """Refuse NaN and infinity, and tokens outside the vocabulary; `name` is that of a sample."""
    if isinstance(x, Padded):
        return check_values(x.data, form, name)
    check_finite(x, name)
    if form.tokens > 1 and form.looks_up(x) and x.numel():
        low, high = int(x.min()), int(x.max())
        if low < 0 or high >= form.tokens:
            raise TpsgdError(
                f"token {low if low < 0 else high} is out of range: the first layer has "
                f"{form.tokens} inputs, so tokens go from 0 to {form.tokens - 1}"
            )
