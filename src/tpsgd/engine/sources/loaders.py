"""The user's data as a source of batches: arrays `(x, y)`, a `Dataset` or a `DataLoader`."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    default_collate,
)

from tpsgd.common.errors import TpsgdError
from tpsgd.engine.sources.batches import ArraySource, BatchForm, SampleBatch, shares
from tpsgd.engine.sources.inputs import NO_LABEL, check_values, inputs, labels, pair, tensor
from tpsgd.losses import IGNORED, Loss
from tpsgd.maths.random import Key, streams
from tpsgd.nets.model_inputs import ModelInputs
from tpsgd.nets.padded import Padded
from tpsgd.targets import CLASSES, Target

RAGGED_UNCUT = (
    "sequences of different lengths cannot be cut into micro-batches: lower batch_size instead of "
    "setting micro_batch or a memory budget"
)
MANY = 256  # samples of a data set whose labels are looked at before training
DEAD_WORKER = "DataLoader worker"  # how torch's message of a worker's death begins


def as_source(
    data: Any,
    form: BatchForm,
    loss: Loss | None,
    classes: int | None,
    complete: bool = False,
    target: Target = CLASSES,
    scaling: Callable[[Tensor], Tensor] | None = None,
) -> "ArraySource | LoaderSource":
    """A source from arrays `(x, y)`, a `Dataset` or a `DataLoader`, with its labels checked.

    Without a loss the labels are not checked (evaluation looks at the output first). `complete`:
    these are all samples to learn from, so a class without samples gives a warning. `scaling` is
    of labels that are numbers.
    """
    if isinstance(data, TensorDataset) and len(data.tensors) == 2:
        data = data.tensors

    def checked(y: Tensor, complete: bool = False) -> Tensor:
        if loss is None:
            return y
        y = labels(y, loss, classes, complete, target)
        y = y if scaling is None else scaling(y)
        return y.to(form.dtype) if y.is_floating_point() else y

    if isinstance(data, DataLoader):
        return LoaderSource(data, form, checked)
    if isinstance(data, Dataset):
        loader = _loader(data, form.batch_size, torch.Generator())
        return LoaderSource(loader, form, checked, reshuffled=True)
    x, y = pair(data)
    x, y = inputs(x), tensor(y, "y")
    if len(x) != len(y):
        raise TpsgdError(f"x has {len(x):,} samples but y has {len(y):,} labels")
    if isinstance(x, Padded) and form.micro_batch is not None:
        raise TpsgdError(RAGGED_UNCUT)
    check_values(x, form)
    y = checked(y, complete)
    if target.positions and bool((y == IGNORED).all()):
        raise TpsgdError(NO_LABEL)
    if form.device.type == "cuda" and x.nbytes < torch.cuda.mem_get_info(form.device)[0] / 2:
        x, y = x.to(form.device), y.to(form.device)
    return ArraySource(x, y, form)


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
        return _length(self.loader)

    def batches(self, block: int = 0, epoch: int | None = None) -> Iterator[SampleBatch]:
        """An epoch; a loader made by the library is shuffled by (seed, block, epoch)."""
        form = self.form
        if self.reshuffled and epoch is not None:
            key = Key(form.seeds[0], block, epoch)
            self.loader.generator.manual_seed(int(streams(key, [-1])))  # type: ignore[union-attr]
        for count, batch in enumerate(self._arriving(epoch)):
            x, y = _pair_of(self.loader, batch)
            x, y = inputs(_writable(x)), self.check(tensor(y, "y"))
            y = y if y.is_floating_point() else y.long()
            check_values(x, form, partial(self._name, count))
            if isinstance(x, Padded):
                if form.micro_batch is not None:
                    raise TpsgdError(RAGGED_UNCUT)
                order = x.longest_first()
                x, y = x[order], y[order]
            if epoch is not None and form.skips(len(x)):
                continue
            for span, share in shares(form.cut(len(x)), y, slice(None)):
                arrived = [(form(x[span]), y[span].to(form.device))]
                samples, last = span.stop - span.start, span.stop == len(x)
                yield SampleBatch(list.pop, arrived, samples, share, last)

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


def is_stream(data: Any) -> bool:
    """Whether batches come from a loader, and may differ from one another in length."""
    return isinstance(data, (Dataset, DataLoader)) and not isinstance(data, TensorDataset)


def count_samples(data: Any) -> int:
    """How many samples there are; 0 if that is unknown."""
    if not isinstance(data, (Dataset, DataLoader)):
        return len(inputs(pair(data)[0]))
    if not isinstance(data, DataLoader):
        return _length(data)
    if isinstance(data.dataset, IterableDataset):
        return _length(data.dataset)
    return 0 if data.batch_size is None else _length(data.sampler)  # batches may have any size


def _length(sized: Any) -> int:
    try:
        return len(sized)
    except TypeError:
        return 0


def first_pair(data: Any, loss: Loss | None) -> tuple[Any, Target]:
    """A few samples, to learn shapes from, and what their labels are; a loader is asked once."""
    x, y = _first_batch(data, 2)
    x, y, all_of_them = _few(x), tensor(y, "y"), not is_stream(data)
    if y.is_floating_point() and not all_of_them:  # two labels do not tell much
        with torch.random.fork_rng([]):
            y = some_pairs(data, MANY)[1]
    return x, Target.of(y, loss, all_of_them)


def some_pairs(data: Any, count: int) -> tuple[Any, Tensor]:
    """All samples and labels; of a loader, its first samples and at least `count` labels."""
    if isinstance(data, TensorDataset):
        data = data.tensors
    if not isinstance(data, Dataset | DataLoader):
        x, y = pair(data)
        return inputs(x), tensor(y, "y")
    loader = data if isinstance(data, DataLoader) else _loader(data, MANY)
    first, batches, seen = None, [], 0
    for x, y in map(partial(_pair_of, loader), loader):
        first = inputs(x) if first is None else first
        batches.append(tensor(y, "y"))
        seen += len(batches[-1])
        if seen >= count:
            break
    return first, torch.cat(batches)


def _first_batch(data: Any, count: int) -> Sequence[Any]:
    """The x and y of arrays as they are; of a data set or a loader, those of the first batch."""
    if isinstance(data, TensorDataset):
        data = data.tensors
    if isinstance(data, Dataset):
        data = _loader(data, count)
    if not isinstance(data, DataLoader):
        return pair(data)
    batch = next(iter(data), None)
    if batch is None:
        raise TpsgdError("the data is empty: the loader gives no batch")
    return _pair_of(data, batch)


def _pair_of(loader: DataLoader, batch: Any) -> Sequence[Any]:
    """The x and y of a loader's batch; where torch made a list of several inputs, a tuple."""
    x, y = pair(batch)
    of_torch = loader.collate_fn in (default_collate, _collate)
    return tuple(x) if of_torch and isinstance(x, list) else x, y


def first_samples(data: Any, count: int = 2) -> Any:
    """The inputs of a few samples, to learn shapes from."""
    return _few(_first_batch(data, count)[0], count)


def _few(x: Any, count: int = 2) -> Any:
    """Samples of one's own from the beginning of x."""
    x = inputs(x)
    if not len(x):
        raise TpsgdError("the data is empty: x has no samples")
    first = x[:count]
    own = isinstance(first, (Tensor, ModelInputs))
    return first.clone() if own else first  # a module may write into it


def _loader(data: Dataset, batch_size: int, generator: torch.Generator | None = None) -> DataLoader:
    """A loader of a data set's samples, shuffled if there is a generator."""
    iterable = isinstance(data, IterableDataset)
    if not iterable and not hasattr(data, "__len__"):
        raise TpsgdError(
            f"{type(data).__name__} has no __len__, so its samples cannot be shuffled: add it, or "
            "make it an IterableDataset"
        )
    options: Any = {"generator": generator, "collate_fn": _collate}
    if generator is not None and not iterable:
        options["sampler"] = _NotedOrder(data, generator=generator)  # type: ignore[arg-type]
    return DataLoader(data, batch_size, **options)


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
