"""The training loop: how blocks learn from a batch, and in which order.

    step           one batch: every block learns as the batch reaches it
    train          epochs of steps over a source of batches
    sequential     the paper's order: train a block, freeze it, go on to the next
    simultaneous   every batch trains every block

A *learner* is a block with its objective and its optimizer (`engine/learners/`). A *source* yields
the batches of an epoch (`engine/sources/`). An *observer* is told what happens: it keeps the
record, measures memory, shows progress, stops blocks early. Tapes and CUDA graphs (`engine/fast/`),
micro-batches and the memory meter wrap `step` or observe it; none of them is needed to understand
this file.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from tpsgd.common.errors import TpsgdError


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
    epochs: int
    learning: bool

    def start(self) -> None:
        """Draw the objective and make the optimizer."""

    def begin_epoch(self, epoch: int) -> None:
        """Set the mode and the learning rate of an epoch."""

    def forward(self, x: Any) -> Any:
        """The values of the block for a batch."""

    def output(self, saved: Any) -> Any:
        """What the next block receives."""

    def update(
        self, saved: Any, labels: Tensor, error: Tensor | None = None, output_unused: bool = False
    ) -> None:
        """Learn from a batch: from the labels, or from the error of the net's output."""

    def end_epoch(self, samples: int) -> None:
        """All batches of an epoch have been learned from."""

    def stop(self) -> None:
        """Freeze the block, and drop its objective and its optimizer."""


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


@dataclass(frozen=True)
class Epoch:
    """One block's epoch. Accuracy is known where the block has a classifier.

    Where labels are numbers, `r2` is the share of their variance that a regression explains.
    """

    block: int  # counted from 1; 0 is the whole net (backprop)
    epoch: int  # counted from 1
    loss: float
    accuracy: float | None = None
    val_loss: float | None = None
    val_accuracy: float | None = None
    seconds: float = 0.0  # since training began
    r2: float | None = None
    val_r2: float | None = None


class EpochEnd(NamedTuple):
    """What has happened in an epoch."""

    net: Any
    learners: Sequence[Learner]
    number: int  # from 0
    samples: int
    source: Source
    validation: Source | None


Step = Callable[[Sequence[Any], Any], None]
Wrap = Callable[[Step, Sequence[Any], Source], Step]


def until_stopped(learners: Sequence[Learner]) -> Iterator[int]:
    """The numbers of the epochs, from 0 on, until no block learns any more."""
    epoch = 0
    while any(learner.learning for learner in learners):
        yield epoch
        epoch += 1


@dataclass
class Net:
    """A model ready to be trained; `engine.assemble` makes it, an order takes it."""

    learners: list[Any]
    source: Source
    validation: Source | None
    observers: list[Observer]
    wrap: Wrap
    pass_on: Callable[["Net", Any, Source], Source]  # a frozen block's outputs, as a source
    step: Step  # on a batch; `wrap` makes it faster, or sums the gradients of micro-batches
    batches: Callable[[Sequence[Any], Source, int], Iterator[Any]]  # of an epoch
    calibrate: Callable[[Sequence[Any], Source, Any], None]  # fit objectives to the first batch
    epochs: Callable[[Sequence[Any]], Iterator[int]] = until_stopped  # of blocks that have started
    order: Any = None  # `sequential` or `simultaneous`
    models: Sequence[Any] = ()  # one, or restarts that are stacked
    spec: Any = None  # the specification of the run
    recorder: Any = None  # writes its records
    measured: Any = field(default_factory=nullcontext)  # a context around the training


def step(learners: Sequence[Learner], batch: Batch) -> None:
    """One batch: every block learns as soon as the batch reaches it, from the labels alone."""
    x, labels = batch.load()
    for learner in learners:
        saved = learner.forward(x)
        last = learner is learners[-1]
        if learner.learning:
            learner.update(saved, labels, output_unused=last)
        if not last:
            x = learner.output(saved)  # of the weights before the update
        del saved  # before the next block computes its own


def train(
    net: Net, learners: Sequence[Learner], source: Source, validation: Source | None = None
) -> None:
    """Train consecutive blocks together, each for its number of epochs."""
    for observer in net.observers:
        observer.stage(learners)
    for learner in learners:
        learner.start()
        for observer in net.observers:
            observer.started(learner)
    net.calibrate(learners, source, net.batches)
    take_step = net.wrap(net.step, learners, source)
    followers = [x for x in net.observers if type(x).batch is not Observer.batch]
    for epoch in net.epochs(learners):
        for learner in learners:
            learner.begin_epoch(epoch)
        samples = 0
        with torch.no_grad():
            for batch in net.batches(learners, source, epoch):
                take_step(learners, batch)
                samples += batch.size
                for observer in followers:
                    observer.batch(learners, batch)
                del batch  # its indices are free before anything is solved or validated
            if not samples:
                raise TpsgdError(source.form.no_batches)
            for learner in learners:
                learner.end_epoch(samples)
        end = EpochEnd(net, learners, epoch, samples, source, validation)
        stopping = set().union(*(observer.epoch(end) for observer in net.observers))
        for learner in learners:
            if learner.learning and (epoch + 1 >= learner.epochs or learner in stopping):
                learner.stop()


def sequential(net: Net) -> None:
    """The paper's order: train a block, freeze it, pass its outputs on to the next.

    Each block's inputs are computed once and reused in all its epochs where memory allows.
    """
    source, validation = net.source, net.validation
    for learner in net.learners:
        train(net, [learner], source, validation)
        if learner is not net.learners[-1]:
            source = net.pass_on(net, learner, source)
            validation = None if validation is None else net.pass_on(net, learner, validation)


def simultaneous(net: Net) -> None:
    """Every batch trains every block as it passes: for streams, and what DFA and sDFA need."""
    train(net, net.learners, net.source, net.validation)
