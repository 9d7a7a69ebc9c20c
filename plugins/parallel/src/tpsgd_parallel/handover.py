"""How batches go from one rank of a pipeline to the next: forward only, a bounded number at a time.

A rank sends what its last block computes, and goes on. It waits only if the next rank is several
batches behind. A rank receives the next batch while it learns from this one. Nothing ever comes
back.
"""

import time
from collections import deque
from collections.abc import Iterator
from functools import partial
from itertools import chain, pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tpsgd.common.errors import TpsgdError
from tpsgd.engine.learners.updaters import Updater
from tpsgd.engine.sources.batches import ArraySource, DerivedSource, SampleBatch, stored_samples
from tpsgd.engine.sources.loaders import LoaderSource
from tpsgd.maths.kernels.epoch_figures import Figures
from tpsgd.maths.kernels.memory_format import channels_last
from tpsgd.objectives import Signal
from tpsgd.train import Source
from tpsgd_parallel.stages import IN_FLIGHT

CPU = torch.device("cpu")


class BatchFormat(NamedTuple):
    """What the outputs of a block look like: a sample's shape, number format and memory format."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    memory_format: torch.memory_format

    @classmethod
    def of(cls, x: Tensor) -> "BatchFormat":
        last = x.dim() == 4 and channels_last(x)
        return cls(x.shape[1:], x.dtype, torch.channels_last if last else torch.contiguous_format)

    def empty(self, samples: int, device: torch.device) -> Tensor:
        """A batch to be filled."""
        format = self.memory_format
        size = samples, *self.shape
        return torch.empty(size, dtype=self.dtype, device=device, memory_format=format)

    def flat(self, x: Tensor) -> Tensor:
        """A batch in the order of its memory, as torch sends and receives it."""
        x = x.detach().contiguous(memory_format=self.memory_format)
        return x.permute(0, 2, 3, 1) if self.memory_format is torch.channels_last else x


class Outbox:
    """Sends batches to the next rank; at most `IN_FLIGHT` of them wait to be received.

    It stands after the blocks of a rank as a learner that learns nothing.
    """

    whole_net = learning = trains = False
    signal, epochs, layers, version = Signal.LABEL, 0, 0, 0
    gradient = None

    def __init__(self, rank: int, block: Any) -> None:
        self.rank, self.block = rank, block  # the last block before it
        self.updater, self.figures = Updater(), Figures(CPU, None)
        self.waited = 0.0  # seconds
        self.calibrates = False  # whether a block on a later rank does
        self.format: Any = None
        self.sent: deque[tuple[Any, Tensor]] = deque()

    def send(self, x: Tensor) -> None:
        """Begin to send a batch."""
        if self.format is None:
            self.format = BatchFormat.of(x)
            dist.send_object_list([self.format], self.rank, device=CPU)
        if x.shape[1:] != self.format.shape:
            raise TpsgdError(
                f"a batch of samples of shape {tuple(x.shape[1:])} follows one of "
                f"{tuple(self.format.shape)}: in a pipeline all samples must have the same shape"
            )
        self.wait_until(IN_FLIGHT - 1)
        flat = self.format.flat(x)
        self.sent.append((dist.isend(flat, self.rank), flat))

    def forward(self, x: Any) -> None:
        self.send(x)

    def measure_features(self, x: Any, labels: Tensor, share: float) -> None:
        """Send a batch to the blocks that measure the size of their features."""
        self.send(x)

    def rest(self, *_: Any) -> None:
        """Do nothing, where a block would start, learn or stop."""

    start = stop = calibrate = begin_epoch = end_epoch = set_mode = rest

    def wait_until(self, unreceived: int) -> None:
        """Wait until at most this many batches have not been received."""
        began = time.perf_counter()
        while len(self.sent) > unreceived:
            self.sent.popleft()[0].wait()
        self.waited += time.perf_counter() - began


class Inbox:
    """Receives batches from the rank before, one of them ahead of its use."""

    def __init__(self, rank: int, device: torch.device) -> None:
        self.rank, self.device, self.waited = rank, device, 0.0  # seconds
        self.format: Any = None
        self.arriving: deque[tuple[Any, Tensor]] = deque()

    def receive(self, samples: int, following: int | None) -> Tensor:
        """The next batch, of so many samples; the one that follows it begins to arrive."""
        began = time.perf_counter()
        if not self.arriving:
            self._expect(samples)
        if following is not None:
            self._expect(following)
        work, x = self.arriving.popleft()
        work.wait()
        self.waited += time.perf_counter() - began
        return x

    def _expect(self, samples: int) -> None:
        """Begin to receive a batch of so many samples."""
        if self.format is None:
            formats: list[Any] = [None]
            dist.recv_object_list(formats, self.rank, device=CPU)
            self.format = formats[0]
        x = self.format.empty(samples, self.device)
        self.arriving.append((dist.irecv(self.format.flat(x), self.rank), x))


class Received(DerivedSource):
    """The outputs of the rank before as batches, with the labels that this rank reads itself."""

    def __init__(self, source: Source, inbox: Inbox, key: int, validation: bool = False) -> None:
        super().__init__(labels_alone(stored_samples(source)))
        self.inbox, self.key, self.validation = inbox, key, validation
        self.calibrating = False  # whether the next pass ends after its first batch

    def batches(self, block: int = 0, epoch: int | None = None) -> Iterator[SampleBatch]:
        """The batches of an epoch, in the order of the pipeline's first block."""
        if epoch is None and not self.validation:
            return  # they are sent once, in the order of an epoch
        ahead, self.calibrating = not self.calibrating, False
        batches = self.source.batches(self.key, epoch)
        for batch, following in pairwise(chain(batches, [None])):
            samples = following.size if ahead and following else None
            yield batch.through(partial(self._received, batch.size, samples))

    def _received(self, samples: int, following: int | None, _: Any) -> Tensor:
        return self.inbox.receive(samples, following)


def labels_alone(source: ArraySource | LoaderSource) -> ArraySource | LoaderSource:
    """A source of labels in the same order; of samples in arrays, a number each is left."""
    if isinstance(source, LoaderSource):
        return source
    numbers = torch.zeros(len(source.y), 1, dtype=source.form.numbers, device=source.y.device)
    return ArraySource(numbers, source.y, source.form, order=source.order)
