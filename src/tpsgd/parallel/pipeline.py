"""`pipeline`: consecutive blocks on different ranks; a batch flows forward only.

Each rank trains its own blocks with the ordinary loop (`train.train`). Its batches are the outputs
of the rank before it (`handover.Received`), and a last learner sends its own outputs on
(`handover.Sender`). Blocks learn from labels alone, so no rank waits for anything to come back.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch.utils.data import SequentialSampler

from tpsgd.engine.backprop import Backprop
from tpsgd.engine.batches import Stream, count_samples, first_samples, stored_samples
from tpsgd.engine.learner import accumulate as summed
from tpsgd.engine.optimizers import follow_curve
from tpsgd.engine.record import Epoch, Progress, Recorder, Run
from tpsgd.engine.settings import Schedule, Settings
from tpsgd.errors import TpsgdError
from tpsgd.maths.random import Key, streams
from tpsgd.memory.block_costs import plan_pipeline
from tpsgd.memory.rehearse import Inputs
from tpsgd.nets.padded import Padded
from tpsgd.parallel.handover import Inbox, Outbox, Received, Sender
from tpsgd.parallel.job import Parallel
from tpsgd.parallel.pipeline_checkpoint import PipelineCheckpoint
from tpsgd.protocols import EpochEnd, Learner, Observer
from tpsgd.saved.checkpoint import Checkpoint
from tpsgd.train import Net, Step, sequential, simultaneous, train


def pipeline(stages: Sequence[int] | None = None) -> "Pipeline":
    """Train consecutive blocks on different ranks, for `fit(..., parallel=tpsgd.pipeline())`.

    A batch flows forward through the ranks, and each of them learns as it passes: no rank waits for
    another once the first batch has reached the last rank. The weights are those of
    `schedule=tpsgd.simultaneous` in one process. Every rank calls `fit` with the same arguments, and
    ends with the whole trained model and the same record. `run.settings["pipeline"]` tells how long
    each rank was busy.

    Args:
        stages: the number of blocks on each rank, `[2, 3, 1]`. Default: chosen from the plan, so
            that multiplications and bytes balance (`tpsgd.plan(..., ranks=3)` shows them).
    """
    return Pipeline(stages)


class Pipeline(Parallel):
    """A net cut into stages of consecutive blocks, one for each rank."""

    def __init__(self, stages: Sequence[int] | None = None) -> None:
        self.asked = stages
        self.stages: list[int] = []
        self.learners: list[Any] = []  # of all ranks
        self.micro_batch: int | None = None
        self.busy = self.seconds = 0.0

    def __str__(self) -> str:
        return "pipeline" if self.asked is None else f"pipeline {list(self.asked)}"

    @contextmanager
    def joined(self, settings: Settings) -> Iterator[Settings]:
        """A context in which this process is a rank; all blocks learn from every batch."""
        if settings.schedule is sequential:
            raise TpsgdError(
                "a pipeline trains all blocks at the same time: sequential trains one after "
                "another; leave schedule out, or take schedule=tpsgd.simultaneous"
            )
        with super().joined(replace(settings, schedule=simultaneous)) as settings:
            if isinstance(settings.checkpoint, Checkpoint):
                checkpoint = PipelineCheckpoint.of_pipeline(settings.checkpoint, self)
                settings = replace(settings, checkpoint=checkpoint)
            self.micro_batch = settings.memory.micro_batch
            yield settings

    def planned(self, model: nn.Module, data: Any, method: Any, settings: Settings) -> Settings:
        """Choose the stages; refuse what cannot learn in a pipeline."""
        if isinstance(method, Backprop):
            raise TpsgdError(
                "backprop is no pipeline of blocks that learn by themselves: its gradients come "
                "back; take tpsgd.data_parallel(), or fit"
            )
        with torch.random.fork_rng():
            x = first_samples(data)
        if isinstance(x, Padded):
            raise TpsgdError("a pipeline passes batches on whole: sequences must have one length")
        samples = count_samples(data)
        inputs = Inputs(tuple(x.shape[1:]), x.dtype, samples)
        plan = plan_pipeline(model, inputs, method, settings, self.ranks.count, self.asked)
        self.stages = self.ranks.from_first(plan.stages)
        return settings

    def spans(self) -> list[range]:
        """The numbers of the blocks on each rank."""
        ends = accumulate(self.stages)
        return [range(end - n, end) for end, n in zip(ends, self.stages, strict=True)]

    @contextmanager
    def shared(self, net: Net, models: list[nn.Module]) -> Iterator[None]:
        """A context in which all ranks have the weights of rank 0."""
        if len(models) > 1:
            raise TpsgdError("a pipeline trains one model: leave stacked=None")
        for source in filter(None, (net.source, net.validation)):
            _check_order(stored_samples(source))
        self.ranks.check_same("number of samples", net.source.samples)
        self.send_weights(models)
        yield

    def train(self, schedule: Schedule, net: Net) -> None:
        """Train the blocks of this rank; afterwards every rank has the weights of all blocks."""
        self.learners, stage = net.learners, Stage(self, net)
        self.ranks.from_all(None)  # all begin at the same time
        began = time.perf_counter()
        train(stage.net, stage.net.learners, stage.net.source, stage.net.validation)
        waited = stage.end()
        self.seconds = time.perf_counter() - began
        self.busy = self.seconds - waited
        self.spread_weights()

    def spread_weights(self) -> None:
        """Give every rank the weights of the blocks that others have trained."""
        for rank, span in enumerate(self.spans()):
            for i in span:
                for module in self.learners[i].block.modules:
                    for tensor in (*module.parameters(), *module.buffers()):
                        self.ranks.send_from(rank, tensor)

    def same_records(self, runs: list[Run]) -> list[Run]:
        """One record of all ranks: each has the epochs of its own blocks."""
        (run,) = runs
        each = self.ranks.from_all((run.as_dict(), self.busy, self.seconds))
        records = [Run.of(values) for values, _, _ in each]
        run.history = merged_history([record.history for record in records], self.spans())
        run.blocks = [records[r].blocks[i] for r, span in enumerate(self.spans()) for i in span]
        for name in ("sample_passes", "forward_passes"):
            setattr(run, name, sum(getattr(record, name) for record in records))
        for name in ("seconds", "setup_seconds", "peak_bytes", "resident_bytes"):
            setattr(run, name, max(getattr(record, name) for record in records))
        seconds = max(seconds for _, _, seconds in each)
        run.settings["pipeline"] = {
            "stages": self.stages,
            "seconds": seconds,
            "busy_seconds": [busy for _, busy, _ in each],
            "utilisation": [busy / seconds for _, busy, _ in each],
            "peak_bytes": [record.peak_bytes for record in records],
        }
        return runs


def merged_history(histories: Sequence[list[Epoch]], spans: Sequence[range]) -> list[Epoch]:
    """The epochs of all ranks' blocks, as one process would have written them."""
    own = [e for epochs, span in zip(histories, spans, strict=True) for e in epochs if e.block - 1 in span]
    return sorted(own, key=lambda epoch: (epoch.epoch, epoch.block))


def _check_order(source: Any) -> None:
    """Refuse a loader whose order may differ from rank to rank: each reads the labels itself."""
    if not isinstance(source, Stream) or source.reshuffled:
        return
    if not isinstance(source.loader.sampler, SequentialSampler):
        raise TpsgdError(
            "every rank of a pipeline reads the labels in the same order, which a DataLoader that "
            "shuffles chooses by itself: give arrays or a Dataset, which fit shuffles by its seed"
        )


class Stage:
    """The blocks of a rank as a net of their own, between the ranks before and after it."""

    def __init__(self, pipeline: Pipeline, net: Net) -> None:
        ranks, spans = pipeline.ranks, pipeline.spans()
        self.ranks, self.everyone, self.epochs_of_net = ranks, net.learners, net.epochs
        self.own = [net.learners[i] for i in spans[ranks.number]]
        self.inbox: Inbox | None = None
        self.outbox: Outbox | None = None
        self.sender: Sender | None = None
        source, validation, learners = net.source, net.validation, [*self.own]
        if not ranks.first:
            key = net.learners[0].block.key
            self.inbox = Inbox(ranks.number - 1, net.source.form.device)
            source = Received(net.source, self.inbox, key)
            if validation is not None:
                validation = Received(validation, self.inbox, key, validation=True)
            torch.manual_seed(int(streams(Key(net.source.form.seeds[0], ranks.number), [0])))
        if ranks.number < ranks.count - 1:
            self.outbox = Outbox(ranks.number + 1)
            self.sender = Sender(self.outbox, self.own[-1].block)
            learners.append(self.sender)
        observers = self._observers(net)
        wrap = _plain_step(pipeline.micro_batch)
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
                observer.total = net.source.samples * sum(x.width * x.epochs for x in self.own)
        agreement = Agreement(self, recorder, callbacks)
        return [*observers, agreement]

    @property
    def agrees(self) -> bool:
        """Whether the ranks must tell one another after every epoch which blocks still learn."""
        stopping = any(x.settings.early_stopping for x in self.everyone)
        return stopping or self.called or hasattr(self.epochs_of_net, "checkpoint")

    def epochs(self, learners: Sequence[Any]) -> Iterator[int]:
        """The numbers of the epochs, until no block learns on any rank."""
        others = [x for x in self.everyone if x not in self.own]
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
        flags = {x.block.index: x.learning for x in self.own}
        for learning in self.ranks.from_all(flags):
            for i, learner in enumerate(self.everyone):
                if i in learning and learner not in self.own:
                    learner.learning = learning[i]

    def end(self) -> float:
        """Wait until all batches have been received; the seconds that this rank has waited."""
        for learner in self.everyone:
            learner.learning = False
        if self.outbox is not None:
            self.outbox.wait_until(0)
        return sum(box.waited for box in (self.inbox, self.outbox) if box is not None)


def _plain_step(micro_batch: int | None) -> Any:
    """The wrapper of a step whose batches arrive from elsewhere: no tape and no CUDA graph."""

    def wrap(step: Step, learners: Sequence[Any], source: Any) -> Step:
        return follow_curve(summed(step) if micro_batch else step, learners, source)

    return wrap


class Agreement(Observer):
    """What ranks tell one another: whose objective is calibrated, what callbacks decide."""

    def __init__(self, stage: Stage, recorder: Recorder, callbacks: Sequence[Any]) -> None:
        self.stage_of_rank, self.recorder, self.callbacks = stage, recorder, callbacks

    def started(self, learner: Learner) -> None:
        """Once all blocks have started: a batch goes ahead to those that calibrate themselves."""
        stage = self.stage_of_rank
        if learner is not stage.net.learners[-1]:
            return
        calibrates = stage.ranks.from_all(any(x.calibrates for x in stage.own))
        if stage.sender is not None:
            stage.sender.calibrates = any(calibrates[stage.ranks.number + 1 :])
        if isinstance(stage.net.source, Received):
            stage.net.source.calibrating = any(calibrates[stage.ranks.number :])

    def epoch(self, end: EpochEnd) -> set[Learner]:
        """Let rank 0 call the callbacks with the epochs of all blocks: the blocks that they stop."""
        stage = self.stage_of_rank
        if not stage.called:
            return set()
        own = {x.block.index + 1 for x in stage.own}
        written = [e for e in self.recorder.runs[0].history if e.epoch == end.number + 1]
        records = stage.ranks.from_all([e for e in written if e.block in own])
        records = sorted((e for each in records for e in each), key=lambda e: e.block)
        stopped = [e.block for e in records if any([f(e) is True for f in self.callbacks])]
        stopped = stage.ranks.from_first(stopped)
        return {x for x in stage.own if x.block.index + 1 in stopped}
