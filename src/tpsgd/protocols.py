"""What the training loop expects of batches, sources, learners and observers."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from tpsgd.rules import Signal


class Batch(Protocol):
    """Some samples; their numbers are gathered when they are loaded."""

    size: int
    share: float  # of a batch, if it is a micro-batch
    last: bool  # whether it is a whole batch, or the last part of one

    def load(self) -> tuple[Any, Tensor]: ...


class Source(Protocol):
    """Where the batches of an epoch come from."""

    @property
    def samples(self) -> int: ...

    @property
    def steps(self) -> int: ...

    @property
    def form(self) -> Any: ...

    def batches(self, block: int = 0, epoch: int | None = None) -> Iterator[Any]: ...


class Learner(Protocol):
    """A block that can learn, or the whole net under backprop."""

    block: Any
    signal: Signal  # what its objective receives: the label, or the error of the net's output
    epochs: int
    width: int  # how many layers learn in it
    learning: bool

    @property
    def calibrates(self) -> bool: ...
    def start(self) -> None: ...
    def stop(self) -> None: ...
    def batches(self, source: Source, epoch: int) -> Iterator[Any]: ...
    def forward(self, x: Any) -> Any: ...
    def output(self, saved: Any) -> Any: ...
    def error(self, saved: Any, labels: Tensor) -> Tensor: ...
    def update(
        self, saved: Any, s: Tensor, labels: Tensor, output_unused: bool = False
    ) -> None: ...
    def measure(self, saved: Any, labels: Tensor) -> None: ...
    def gauge(self, x: Any, labels: Tensor, share: float) -> Any: ...
    def calibrate(self) -> None: ...
    def resume(self) -> None: ...

    def finish_update(self) -> None:
        """End an update that had to wait for the next block."""

    def keep_figures(self) -> None:
        """Note the loss and the accuracy of the batch that the block has learned from."""

    def end_epoch(self, samples: int) -> None:
        """All batches of an epoch have been learned from."""

    def adjust_rate(self) -> None:
        """Let the learning rate follow its schedule, once the epoch has been recorded."""


class Observer:
    """Is told what happens while a net is trained. Override what you need."""

    def stage(self, learners: Sequence[Learner], learning: bool = True) -> None:
        """These blocks begin to learn; or they are frozen and their outputs are computed."""

    def started(self, learner: Learner) -> None:
        """A block has its objective and its optimizer."""

    def batch(self, learners: Sequence[Learner], batch: Batch) -> None:
        """These blocks have learned from a batch; without learners it was only computed."""

    def computing(self, active: bool) -> None:
        """Batches are computed without learning from them, or no longer."""

    def computed(self, samples: int, blocks: int) -> None:
        """Samples went through this many frozen blocks."""

    def kept(self, size: int, released: int) -> None:
        """Inputs of this many bytes are kept for reuse; others are released after this stage."""

    def epoch(self, end: "EpochEnd") -> set[Learner]:
        """An epoch has ended: the learners that must stop now."""
        return set()


class EpochEnd(NamedTuple):
    """What has happened in an epoch."""

    net: Any
    learners: Sequence[Learner]
    number: int  # from 0
    samples: int
    source: Source
    validation: Source | None
