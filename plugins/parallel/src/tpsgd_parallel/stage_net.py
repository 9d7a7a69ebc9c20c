"""The blocks of one rank of a pipeline, as a net that the ordinary loop trains.

Its batches are the outputs of the rank before it (`handover.Received`), and a last learner sends
its own outputs on (`handover.Outbox`).
"""

from collections import ChainMap
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch

from tpsgd.engine.learners.learner import accumulate, with_figures
from tpsgd.engine.learners.optimizers import follow_curve
from tpsgd.engine.record import Progress, Recorder
from tpsgd.maths.random import Key, streams
from tpsgd.train import EpochEnd, Learner, Net, Observer, Step
from tpsgd_parallel.handover import Inbox, Outbox, Received
from tpsgd_parallel.on_rank import Position
from tpsgd_parallel.ranks import Ranks


class StageNet(Observer):
    """The blocks of a rank as a net of their own, between the ranks before and after it.

    As an observer of this net it tells the other ranks whose objective is calibrated, which blocks
    still learn, and what callbacks decide.
    """

    def __init__(self, ranks: Ranks, blocks: range, net: Net, micro_batch: int | None) -> None:
        self.ranks, self.everyone, self.epochs_of_net = ranks, net.learners, net.epochs
        self.local = [net.learners[i] for i in blocks]  # that this rank trains
        self.inbox: Inbox | None = None
        self.outbox: Outbox | None = None
        source, validation, learners = net.source, net.validation, [*self.local]
        if not ranks.first:
            key = net.learners[0].block.key
            self.inbox = Inbox(ranks.number - 1, net.source.form.device)
            source = Received(net.source, self.inbox, key)
            if validation is not None:
                validation = Received(validation, self.inbox, key, validation=True)
            torch.manual_seed(int(streams(Key(net.source.form.seeds[0], ranks.number), [0])))
        if ranks.number < ranks.count - 1:
            self.outbox = Outbox(ranks.number + 1, self.local[-1].block)
            learners.append(self.outbox)
        self._take_over(net)
        observers = [*net.observers, self, Position(ranks.watch)]
        wrap = partial(_plain_step, micro_batch)
        self.net = replace(
            net, learners=learners, source=source, validation=validation, observers=observers,
            wrap=wrap, epochs=self.epochs,
        )  # fmt: skip

    def _take_over(self, net: Net) -> None:
        """Call the callbacks here, with the epochs of all blocks; a broken loss is not repaired."""
        self.recorder = next(x for x in net.observers if isinstance(x, Recorder))
        self.callbacks, self.recorder.callbacks = self.recorder.callbacks, ()
        self.recorder.restore = lambda end: ""
        self.called = self.ranks.from_first(bool(self.callbacks))
        for observer in net.observers:
            if isinstance(observer, Progress):
                observer.total = net.source.samples * sum(x.layers * x.epochs for x in self.local)

    def epochs(self, learners: Sequence[Any]) -> Iterator[int]:
        """The numbers of the epochs, until no block learns on any rank."""
        stopping = any(x.settings.early_stopping for x in self.everyone)
        agree = stopping or self.called or hasattr(self.epochs_of_net, "checkpoint")
        others = [x for x in self.everyone if x not in self.local]
        for learner in others:
            learner.learning = learner.epochs > 0
        for epoch in self.epochs_of_net(self.everyone):
            yield epoch
            for learner in others:
                learner.learning = epoch + 1 < learner.epochs
            if agree:  # a block may stop earlier
                flags = {x.block.index: x.learning for x in self.local}
                flags = ChainMap(*self.ranks.from_all(flags))
                for learner in others:
                    learner.learning = flags[learner.block.index]

    def end(self) -> float:
        """Wait until all batches have been received; the seconds that this rank has waited."""
        for learner in self.everyone:
            learner.learning = False
        if self.outbox is not None:
            self.outbox.wait_until(0)
        return sum(box.waited for box in (self.inbox, self.outbox) if box is not None)

    def started(self, learner: Learner) -> None:
        """Once all blocks have started: a batch goes ahead to those that calibrate themselves."""
        if learner is not self.net.learners[-1]:
            return
        calibrates = self.ranks.from_all(any(x.calibrates for x in self.local))
        if self.outbox is not None:
            self.outbox.calibrates = any(calibrates[self.ranks.number + 1 :])
        if isinstance(self.net.source, Received):
            self.net.source.calibrating = any(calibrates[self.ranks.number :])

    def epoch(self, end: EpochEnd) -> set[Learner]:
        """Let rank 0 call the callbacks with the epochs of all blocks; they may stop some."""
        if not self.called:
            return set()
        numbers = {x.block.index + 1 for x in self.local}
        written = [e for e in self.recorder.runs[0].history if e.epoch == end.number + 1]
        records = chain(*self.ranks.from_all([e for e in written if e.block in numbers]))
        records = sorted(records, key=lambda e: e.block)
        stopped = [e.block for e in records if any([f(e) is True for f in self.callbacks])]
        stopped = self.ranks.from_first(stopped)
        return {x for x in self.local if x.block.index + 1 in stopped}


def _plain_step(micro_batch: int | None, step: Step, learners: Sequence[Any], source: Any) -> Step:
    """The step on batches that arrive from elsewhere: no tape and no CUDA graph."""
    step = accumulate(step) if micro_batch else step
    return with_figures(follow_curve(step, learners, source))
