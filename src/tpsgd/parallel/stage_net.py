"""The blocks of one rank of a pipeline, as a net that the ordinary loop trains.

Its batches are the outputs of the rank before it (`handover.Received`), and a last learner sends
its own outputs on (`handover.Sender`).
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from tpsgd.engine.learner import accumulate
from tpsgd.engine.optimizers import follow_curve
from tpsgd.engine.record import Progress, Recorder
from tpsgd.maths.random import Key, streams
from tpsgd.parallel.handover import Inbox, Outbox, Received, Sender
from tpsgd.parallel.on_rank import Position
from tpsgd.parallel.ranks import Ranks
from tpsgd.protocols import EpochEnd, Learner, Observer
from tpsgd.train import Net, Step


class StageNet:
    """The blocks of a rank as a net of their own, between the ranks before and after it."""

    def __init__(self, ranks: Ranks, blocks: range, net: Net, micro_batch: int | None) -> None:
        self.ranks, self.everyone, self.epochs_of_net = ranks, net.learners, net.epochs
        self.local = [net.learners[i] for i in blocks]  # that this rank trains
        self.inbox: Inbox | None = None
        self.outbox: Outbox | None = None
        self.sender: Sender | None = None
        source, validation, learners = net.source, net.validation, [*self.local]
        if not ranks.first:
            key = net.learners[0].block.key
            self.inbox = Inbox(ranks.number - 1, net.source.form.device)
            source = Received(net.source, self.inbox, key)
            if validation is not None:
                validation = Received(validation, self.inbox, key, validation=True)
            torch.manual_seed(int(streams(Key(net.source.form.seeds[0], ranks.number), [0])))
        if ranks.number < ranks.count - 1:
            self.outbox = Outbox(ranks.number + 1)
            self.sender = Sender(self.outbox, self.local[-1].block)
            learners.append(self.sender)
        observers = self._observers(net)
        wrap = _plain_step(micro_batch)
        self.net = Net(learners, source, validation, observers, wrap, net.pass_on, self.epochs)

    def _observers(self, net: Net) -> list[Observer]:
        """The observers of the net; callbacks see all blocks, and a broken loss is not repaired."""
        observers = list(net.observers)
        recorder = next(x for x in observers if isinstance(x, Recorder))
        callbacks, recorder.callbacks = recorder.callbacks, ()
        recorder.restore = lambda end: ""
        self.called = self.ranks.from_first(bool(callbacks))
        for observer in observers:
            if isinstance(observer, Progress):
                observer.total = net.source.samples * sum(x.width * x.epochs for x in self.local)
        agreement = Agreement(self, recorder, callbacks)
        return [*observers, agreement, Position(self.ranks.watch)]

    @property
    def agrees(self) -> bool:
        """Whether the ranks must tell one another after every epoch which blocks still learn."""
        stopping = any(x.settings.early_stopping for x in self.everyone)
        return stopping or self.called or hasattr(self.epochs_of_net, "checkpoint")

    def epochs(self, learners: Sequence[Any]) -> Iterator[int]:
        """The numbers of the epochs, until no block learns on any rank."""
        others = [x for x in self.everyone if x not in self.local]
        for learner in others:
            learner.learning = learner.epochs > 0
        for epoch in self.epochs_of_net(self.everyone):
            yield epoch
            for learner in others:
                learner.learning = epoch + 1 < learner.epochs
            if self.agrees:
                self._agree()

    def _agree(self) -> None:
        """Learn from the other ranks which of their blocks still learn."""
        flags = {x.block.index: x.learning for x in self.local}
        for learning in self.ranks.from_all(flags):
            for i, learner in enumerate(self.everyone):
                if i in learning and learner not in self.local:
                    learner.learning = learning[i]

    def end(self) -> float:
        """Wait until all batches have been received; the seconds that this rank has waited."""
        for learner in self.everyone:
            learner.learning = False
        if self.outbox is not None:
            self.outbox.wait_until(0)
        return sum(box.waited for box in (self.inbox, self.outbox) if box is not None)


def _plain_step(micro_batch: int | None) -> Callable[..., Step]:
    """The wrapper of a step whose batches arrive from elsewhere: no tape and no CUDA graph."""

    def wrap(step: Step, learners: Sequence[Any], source: Any) -> Step:
        return follow_curve(accumulate(step) if micro_batch else step, learners, source)

    return wrap


class Agreement(Observer):
    """What ranks tell one another: whose objective is calibrated, what callbacks decide."""

    def __init__(self, stage: StageNet, recorder: Recorder, callbacks: Sequence[Any]) -> None:
        self.stage_of_rank, self.recorder, self.callbacks = stage, recorder, callbacks

    def started(self, learner: Learner) -> None:
        """Once all blocks have started: a batch goes ahead to those that calibrate themselves."""
        stage = self.stage_of_rank
        if learner is not stage.net.learners[-1]:
            return
        calibrates = stage.ranks.from_all(any(x.calibrates for x in stage.local))
        if stage.sender is not None:
            stage.sender.calibrates = any(calibrates[stage.ranks.number + 1 :])
        if isinstance(stage.net.source, Received):
            stage.net.source.calibrating = any(calibrates[stage.ranks.number :])

    def epoch(self, end: EpochEnd) -> set[Learner]:
        """Let rank 0 call the callbacks with the epochs of all blocks; they may stop some."""
        stage = self.stage_of_rank
        if not stage.called:
            return set()
        numbers = {x.block.index + 1 for x in stage.local}
        written = [e for e in self.recorder.runs[0].history if e.epoch == end.number + 1]
        records = stage.ranks.from_all([e for e in written if e.block in numbers])
        records = sorted((e for each in records for e in each), key=lambda e: e.block)
        stopped = [e.block for e in records if any([f(e) is True for f in self.callbacks])]
        stopped = stage.ranks.from_first(stopped)
        return {x for x in stage.local if x.block.index + 1 in stopped}
