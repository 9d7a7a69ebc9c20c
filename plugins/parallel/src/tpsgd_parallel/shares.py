"""Every rank's share of a batch: consecutive samples of it, with their share of its gradient."""

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from tpsgd.common.errors import TpsgdError
from tpsgd.engine.sources.augment import Augmented
from tpsgd.engine.sources.batches import (
    ArraySource,
    DerivedSource,
    SampleBatch,
    ThroughBlocks,
    stored_samples,
)
from tpsgd.maths.random import Key, streams
from tpsgd.nets.padded import Padded
from tpsgd.train import Source
from tpsgd_parallel.ranks import Ranks

RAGGED = (
    "sequences of different lengths cannot be cut into the shares of ranks: leave parallel out, or "
    "pad them to one length"
)
EMPTY: Final = torch.empty(0)  # in place of the samples, and labels, of a rank that gets none


class ShareOfBatch(SampleBatch):
    """A rank's share of a batch; its `size` is that of the batch, which all ranks learn from."""

    def load(self) -> tuple[Any, Tensor]:
        return self.gather(self.index) if self.share else (EMPTY, EMPTY)

    def through(self, function: Callable[[Any], Any]) -> SampleBatch:
        return super().through(function) if self.share else self


def span(size: int, ranks: Ranks, least: int = 1) -> slice:
    """Which samples of a batch a rank gets: all ranks about as many, and at least `least` or none.

    They are cut as micro-batches are; of a batch with fewer samples the last ranks get none.
    """
    count = max(1, min(ranks.count, size // least))
    start, stop = (size * min(i, count) // count for i in (ranks.number, ranks.number + 1))
    return slice(start, stop)


@dataclass
class Shared(DerivedSource):
    """A source of which a rank gets its share of every batch, in the same order on all ranks."""

    ranks: Ranks

    def __post_init__(self) -> None:
        in_memory = isinstance(stored_samples(self.source), ArraySource)
        others = isinstance(self.source, Augmented) and not self.source.library_only
        self.by_index = in_memory and not others  # other batches are loaded, then cut

    def batches(self, block: int = 0, epoch: int | None = None) -> Iterator[Any]:
        if not self.by_index:  # torch's generator decides, or may do so
            share_random_state(self.ranks)
        elif epoch is not None and not self.ranks.first:  # for dropout, of other samples
            key = Key(self.form.seeds[0], block, epoch)
            torch.manual_seed(int(streams(key, [-1 - self.ranks.number])))
        least = 2 if self.form.batch_norm else 1
        for number, batch in enumerate(self.source.batches(block, epoch)):
            arrived = batch.index[0] if isinstance(batch.index, tuple) else batch.index
            if number == 0 and isinstance(arrived, list):
                check_same_samples(arrived[0][1], self.ranks)
            samples = span(batch.size, self.ranks, least)
            share = batch.share * (samples.stop - samples.start) / batch.size
            gather, index = batch.gather, batch.index
            if self.by_index:
                index = _cut(index, samples)
            else:
                gather = partial(_load_and_cut, gather, samples)
            yield ShareOfBatch(gather, index, batch.size, share, batch.last)


def check_same_samples(labels: Tensor, ranks: Ranks) -> None:
    """Refuse loaders that give ranks other samples, by the labels of a batch."""
    sums = ranks.from_all(zlib.crc32(labels.cpu().contiguous().numpy().tobytes()))
    for rank, other in enumerate(sums):
        if other != sums[0]:
            raise TpsgdError(
                f"the DataLoader gives rank {rank} other samples than rank 0: it must give all "
                "ranks the same batches, from the same seed if it has a generator"
            )


def share_random_state(ranks: Ranks) -> None:
    """Give torch's generator the state that it has on rank 0."""
    torch.set_rng_state(ranks.from_first(torch.get_rng_state()))


def _cut(index: Any, samples: slice) -> Any:
    """The indices of some samples of a batch, with the random numbers that come with them."""
    if isinstance(index, tuple):
        return tuple(_cut(t, samples) for t in index)
    return index[..., samples]


def _load_and_cut(
    gather: Callable[[Any], tuple[Any, Tensor]], samples: slice, index: Any
) -> tuple[Any, Tensor]:
    """Load a whole batch, and take some of its samples."""
    x, labels = gather(index)
    if isinstance(x, Padded):
        raise TpsgdError(RAGGED)
    return x[samples], labels[samples]


def shared(source: Source, ranks: Ranks) -> Source:
    """The source in shares; frozen blocks compute those of their rank alone."""
    if isinstance(source, ThroughBlocks):
        return replace(source, source=shared(source.source, ranks))
    return Shared(source, ranks)


def whole(source: Source) -> Source:
    """The source that `shared` was given."""
    if isinstance(source, ThroughBlocks):
        return replace(source, source=whole(source.source))
    return source.source if isinstance(source, Shared) else source
