"""How batches go from one rank of a pipeline to the next: forward only, a bounded number at a time.

A rank sends what its last block computes, and goes on. It waits only if the next rank is several
batches behind. A rank receives the next batch while it learns from this one. Nothing ever comes
back.
"""

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor

from tpsgd.engine.batches import Arrays, Batch, DerivedSource, Stream, stored_samples
from tpsgd.errors import TpsgdError
from tpsgd.maths.memory_format import channels_last
from tpsgd.parallel.stages import IN_FLIGHT
from tpsgd.protocols import Source
from tpsgd.rules import Signal

FORMATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64)
DIMENSIONS = 8  # of a sample, at most


@dataclass(frozen=True)
class Layout:
    """What the outputs of a block look like: a sample's shape, number format and memory format."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    channels_last: bool

    @classmethod
    def of(cls, x: Tensor) -> "Layout":
        """The layout of a batch."""
        return cls(tuple(x.shape[1:]), x.dtype, x.dim() == 4 and channels_last(x))

    @classmethod
    def read(cls, numbers: list[int]) -> "Layout":
        """The layout that `numbers` stand for."""
        number_format, is_last, count, *sizes = numbers
        return cls(tuple(sizes[:count]), FORMATS[number_format], bool(is_last))

    def numbers(self) -> list[int]:
        """The layout as whole numbers, always as many."""
        sizes = [*self.shape, *[0] * (DIMENSIONS - len(self.shape))]
        return [FORMATS.index(self.dtype), self.channels_last, len(self.shape), *sizes]

    def packed(self, x: Tensor) -> Tensor:
        """A batch in the order of its memory."""
        x = x.detach()
        return x.permute(0, 2, 3, 1).contiguous() if self.channels_last else x.contiguous()

    def buffer(self, samples: int, device: torch.device) -> Tensor:
        """Room for a packed batch."""
        shape = self.shape
        if self.channels_last:
            shape = (*shape[1:], shape[0])
        return torch.empty(samples, *shape, dtype=self.dtype, device=device)

    def unpacked(self, buffer: Tensor) -> Tensor:
        """A packed batch as it was."""
        return buffer.permute(0, 3, 1, 2) if self.channels_last else buffer


class Outbox:
    """Sends batches to the next rank; at most `IN_FLIGHT` of them wait to be received."""

    def __init__(self, rank: int) -> None:
        self.rank, self.waited = rank, 0.0  # seconds
        self.layout: Layout | None = None
        self.sent: deque[tuple[Any, Tensor]] = deque()

    def send(self, x: Tensor) -> None:
        """Begin to send a batch."""
        import torch.distributed as dist

        if self.layout is None:
            self.layout = Layout.of(x)
            dist.send(torch.tensor(self.layout.numbers(), device=x.device), self.rank)
        if tuple(x.shape[1:]) != self.layout.shape:
            raise TpsgdError(
                f"a batch of samples of shape {tuple(x.shape[1:])} follows one of "
                f"{self.layout.shape}: in a pipeline all samples must have the same shape"
            )
        self.wait_until(IN_FLIGHT - 1)
        packed = self.layout.packed(x)
        self.sent.append((dist.isend(packed, self.rank), packed))

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
        self.layout: Layout | None = None
        self.arriving: deque[tuple[Any, Tensor]] = deque()

    def receive(self, samples: int, following: int | None) -> Tensor:
        """The next batch, of so many samples; the one that follows it begins to arrive."""
        began = time.perf_counter()
        if not self.arriving:
            self._expect(samples)
        if following is not None:
            self._expect(following)
        work, buffer = self.arriving.popleft()
        work.wait()
        self.waited += time.perf_counter() - began
        assert self.layout is not None
        return self.layout.unpacked(buffer)

    def _expect(self, samples: int) -> None:
        """Begin to receive a batch of so many samples."""
        import torch.distributed as dist

        if self.layout is None:
            numbers = torch.empty(3 + DIMENSIONS, dtype=torch.long, device=self.device)
            dist.recv(numbers, self.rank)
            self.layout = Layout.read(numbers.tolist())
        buffer = self.layout.buffer(samples, self.device)
        work: Any = dist.irecv(buffer, self.rank)
        self.arriving.append((work, buffer))


class Received(DerivedSource):
    """The outputs of the rank before as batches, with the labels that this rank reads itself."""

    def __init__(self, source: Source, inbox: Inbox, key: int, validation: bool = False) -> None:
        super().__init__(labels_alone(stored_samples(source)))
        self.inbox, self.key, self.validation = inbox, key, validation
        self.calibrating = False  # whether the next pass ends after its first batch

    def batches(self, block: int = 0, epoch: int | None = None) -> Iterator[Batch]:
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


def labels_alone(source: Arrays | Stream) -> Arrays | Stream:
    """A source of labels in the same order; of samples in arrays, a number each is left."""
    if isinstance(source, Stream):
        return source
    numbers = torch.zeros(len(source.y), 1, dtype=source.form.numbers, device=source.y.device)
    return Arrays(numbers, source.y, source.form, order=source.order)


class Sender:
    """Stands after the blocks of a rank as a learner that learns nothing: it sends its input on."""

    whole_net = grows = learning = waits = trains = False
    signal, epochs, width, version, rate = Signal.LABEL, 0, 0, 0, None
    backend = optimizer = None

    def __init__(self, outbox: Outbox, block: Any) -> None:
        self.outbox, self.block = outbox, block  # the last block before it
        self.calibrates = False  # whether a block on a later rank does

    def forward(self, x: Any) -> Any:
        """Send a batch."""
        self.outbox.send(x)

    def gauge(self, x: Any, labels: Tensor, share: float) -> Any:
        """Send a batch to the blocks that measure the size of their features."""
        self.outbox.send(x)

    def rest(self, *_: Any) -> None:
        """Do nothing, where a block would start, learn or stop."""

    start = stop = calibrate = resume = finish_update = keep_figures = end_epoch = rest
    adjust_rate = rest
