"""The training loop that every schedule, and backprop, runs on."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, cast

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from tpsgd.engine.batches import Arrays, Batches, Source, in_parts
from tpsgd.engine.cuda_graphs import Steps, known_modules
from tpsgd.engine.device import available
from tpsgd.engine.disk_rows import Stored
from tpsgd.engine.learner import Learner
from tpsgd.engine.meter import Meter
from tpsgd.engine.optimizers import OptimizerFactory
from tpsgd.engine.record import Epoch, Run
from tpsgd.engine.reuse import (
    at_once_for,
    collect,
    computed_now,
    depth,
    first_output,
    in_loader,
    place_for,
    seen_through,
)
from tpsgd.engine.step import Figures, advance, validate
from tpsgd.errors import TpsgdError
from tpsgd.nets.padded import Padded
from tpsgd.rules import Signal
from tpsgd.solvers import SOLVERS, Ridge
from tpsgd.solvers.equations import keeps_samples
from tpsgd.solvers.least_squares import SampleSums, workspace


@dataclass(frozen=True)
class EarlyStopping:
    """Stop a block when its loss (on validation data where given) has not improved for a while."""

    patience: int = 2
    min_delta: float = 0.0


@dataclass(frozen=True)
class BlockSettings:
    """How one block is taught."""

    epochs: int
    optimizer: OptimizerFactory
    lr: float | None = None
    early_stopping: EarlyStopping | None = None


@dataclass
class Trainer:
    """The learners of a model, their data and their courses, and the records being made."""

    learners: list[Learner]
    courses: list[BlockSettings]
    source: Source
    validation: Source | None
    meter: Meter
    runs: list[Run]  # one, or one per stacked restart
    lr_schedule: Callable[[Optimizer], LRScheduler] | None = None
    callbacks: Sequence[Callable[[Epoch], Any]] = ()
    progress: Callable[[int, int], None] | None = None
    reuse: bool | str | Path | None = None
    expected: int = 0  # samples, of a rehearsal, which takes two batches
    began: float = field(default_factory=time.perf_counter)
    passed: int = 0

    @property
    def total(self) -> int:
        """Sample passes if nobody stops early."""
        layers = zip(self.learners, self.courses, strict=True)
        work = sum(x.width * c.epochs for x, c in layers if x.trains)
        return self.source.samples * work

    def train(self, learners: list[Learner], source: Source, validation: Source | None) -> None:
        """Train consecutive blocks together until each has had its epochs."""
        busy = [x for x in learners if x.trains and self.courses[x.block.index].epochs]
        if any(isinstance(self.courses[x.block.index].optimizer, Ridge) for x in busy):
            return self._solve(learners, source, validation)
        self.meter.stage(x.block.index for x in learners)
        watches = {x: Watch(self.courses[x.block.index].early_stopping) for x in busy}
        schedulers: dict[Learner, LRScheduler] = {}
        for x in busy:
            course = self.courses[x.block.index]
            with self.meter.watch():
                x.start(course.optimizer, course.lr)
            self._label(x)
            if self.lr_schedule is not None and x.optimizer is not None:
                schedulers[x] = self.lr_schedule(x.optimizer)
                if isinstance(schedulers[x], ReduceLROnPlateau):
                    raise TpsgdError(
                        "lr_schedule cannot be ReduceLROnPlateau, which waits for a metric; choose "
                        "one that is stepped by the epoch, or use early_stopping"
                    )
        steps = Steps(
            lambda piece: advance(learners, busy, piece),
            source,
            busy,
            self.lr_schedule is None,
            behind_ours=all(map(known_modules, self.learners)),
            ours=all(map(known_modules, learners)),
        )
        for epoch in range(max((self.courses[x.block.index].epochs for x in busy), default=0)):
            samples = self._epoch(steps, learners[0].block.key, epoch)
            watched, halted = self._record(learners, busy, epoch, samples, validation)
            for x in list(busy):
                if x in schedulers:
                    schedulers[x].step()
                last = epoch + 1 >= self.courses[x.block.index].epochs
                if last or x.block.index in halted or watches[x].stop(watched[x.block.index]):
                    x.stop()
                    busy.remove(x)
                    steps.forget()
            if not busy:
                break

    def _solve(self, learners: list[Learner], source: Source, validation: Source | None) -> None:
        """A block in closed form: one pass over the samples."""
        (learner,) = learners
        self.meter.stage([learner.block.index])
        solver = self.courses[learner.block.index].optimizer
        assert isinstance(solver, Ridge)
        with self.meter.watch():
            learner.start(None, None)
        batches, samples = self._all_samples(learner, source), 0
        with torch.no_grad():
            for number in count():
                with self.meter.watch(number < 2 or isinstance(learner.sums, SampleSums)):
                    piece = next(batches, None)
                    if piece is None:
                        break
                    learner.add_up(piece.x, piece.labels, self.expected or source.samples)
                samples += piece.labels.shape[1 if source.form.stacked else 0]
                del piece
                if self.progress is not None and number % 8 == 0:
                    self.progress(self.passed + samples, self.total)
            with self.meter.watch():
                self.meter.unseen(workspace(learner.sums))
                learner.solve(solver.alpha, samples)
        self._record(learners, learners, 0, samples, validation)
        learner.stop()
        self.passed += samples
        if self.progress is not None:
            self.progress(self.passed, self.total)
        for run in self.runs:
            run.sample_passes += samples
            run.forward_passes += samples * depth(source)

    def _all_samples(self, learner: Learner, source: Source) -> Batches:
        """Every sample once; a rehearsal has a few, and takes them again if all would be kept."""
        left, layer = self.expected, cast(Any, learner.block.layer)
        again = self.meter.rehearsal and keeps_samples(layer, True, self.expected)
        for piece in source.batches():
            while True:
                part = slice(0, left) if again else slice(None)
                held = [piece._replace(x=piece.x[part], labels=piece.labels[part])]
                left -= len(held[0].labels)
                yield held.pop()
                if not again or left <= 0:
                    break
            if again:
                return
            del piece

    def pass_on(self, learner: Learner, source: Source) -> Source:
        """The next block's inputs: computed once and kept if they fit, otherwise remade."""

        def function(x: Any) -> Any:
            return learner.output(learner.forward(x))

        learner.block.train(False)
        self.meter.stage([learner.block.index], learning=False)
        at_once = at_once_for(learner, source.form)
        with self.meter.watch():
            sample = first_output(source, function)
        need = sample.nbytes * source.samples
        given = source is self.source or source is self.validation
        held = source.x.nbytes if isinstance(source, Arrays) and not given else 0
        later = self.learners[self.learners.index(learner) + 1 :]
        fits = self.meter.rehearsal or need < available(source.form.device) / 2
        once = later == self.learners[-1:] and self.courses[later[0].block.index].epochs <= 1
        keeps = fits and not once if self.reuse is None else self.reuse  # what is read once
        any_length = in_loader(source) and any(x.block.recurrent for x in later)
        uneven = isinstance(sample, Padded) and keeps is not True  # a file has equal rows
        if not source.samples or keeps is False or any_length or uneven:
            return seen_through(source, function, at_once)
        for run in self.runs:
            run.forward_passes += source.samples * (1 + depth(source))
        if keeps is True:
            self.meter.keep(need, instead_of=held)
            room = place_for(sample, source)
        else:
            room = Stored(sample, source.samples, keeps)
        return collect(
            source, lambda x: in_parts((computed_now(function),), x, at_once), room, self.meter
        )

    def _epoch(self, steps: Steps, block: int, epoch: int) -> int:
        """One pass over the samples; its first steps are watched for memory."""
        samples = 0
        width = sum(x.width for x in steps.learners)
        batches = steps.epoch(block, epoch)
        form = steps.source.form
        seen = 2 * len(form.cut(form.batch_size))
        with torch.no_grad():
            for number in count():
                with self.meter.watch(steps.done < seen):
                    size, step = next(batches, (0, None))
                    if step is None:
                        break
                    step()
                steps.done += 1
                samples += size
                self.passed += size * width
                if self.progress is not None and number % 8 == 0:
                    self.progress(self.passed, self.total)
        if not samples and steps.source.form.skip_single:
            raise TpsgdError(
                "batch normalisation needs at least 2 samples a batch, and no batch has so many: "
                "raise batch_size"
            )
        if not samples:
            raise TpsgdError("the data is empty: an epoch gave no batch")
        if self.progress is not None:
            self.progress(self.passed, self.total)
        for run in self.runs:
            run.sample_passes += samples * width
            run.forward_passes += samples * depth(steps.source)
        return samples

    def _label(self, learner: Learner) -> None:
        """Say what a learner's tensors are for, as they come."""
        self.meter.label("projections", learner.tensors)
        if not self.meter.rehearsal or learner.optimizer is None:
            return

        def before(optimizer: Optimizer, *_: Any) -> None:
            grads = (p.grad for g in optimizer.param_groups for p in g["params"])
            self.meter.label("gradients", [g for g in grads if g is not None])

        def after(optimizer: Optimizer, *_: Any) -> None:
            states = (t for state in optimizer.state.values() for t in state.values())
            self.meter.label("optimizer", states)

        learner.optimizer.register_step_pre_hook(before)
        learner.optimizer.register_step_post_hook(after)

    def _record(
        self,
        learners: list[Learner],
        busy: list[Learner],
        epoch: int,
        samples: int,
        validation: Source | None,
    ) -> tuple[dict[int, float], set[int]]:
        """Write the epoch into the histories: the loss to watch per block, and who must halt."""
        if self.meter.rehearsal:  # there are no numbers
            return {x.block.index: 0.0 for x in busy}, set()
        figures: Figures = {x.block.index: x.collect(samples) for x in busy}
        checks = {} if validation is None else validate(learners, busy, validation, self.meter)
        seconds = time.perf_counter() - self.began
        halted: set[int] = set()
        for x in busy:
            i = x.block.index
            for r, run in enumerate(self.runs):
                loss = figures[i][0][r]
                record = Epoch(
                    block=i + 1 if x.width == 1 else 0,
                    epoch=epoch + 1,
                    loss=loss,
                    accuracy=_at(figures[i][1], r),
                    val_loss=_at(checks[i][0], r) if i in checks else None,
                    val_accuracy=_at(checks[i][1], r) if i in checks else None,
                    seconds=seconds,
                )
                run.history.append(record)
                if any([callback(record) is True for callback in self.callbacks]):
                    halted.add(i)
                if not math.isfinite(loss):
                    solved = isinstance(self.courses[i].optimizer, SOLVERS)
                    cure = (
                        "its inputs or targets are too large for its equations: scale them, or "
                        "raise the penalty"
                        if solved
                        else "lower its learning rate or bound its activation"
                    )
                    raise TpsgdError(
                        f"the loss of block {i + 1} ({x.block}) became {loss} in epoch "
                        f"{epoch + 1}: {cure}"
                    )
        watched = {i: sum(checks.get(i, figures[i])[0]) for i in figures}
        network = learners[-1].block.index
        for x in busy:  # a rule that follows the output's error is judged by the output
            if x.signal is not Signal.LABEL and network in watched:
                watched[x.block.index] = watched[network]
        return watched, halted


def _at(values: list[float] | None, r: int) -> float | None:
    return None if values is None else values[r]


class Watch:
    """Early stopping's memory of one block."""

    def __init__(self, rule: EarlyStopping | None) -> None:
        self.rule, self.best, self.waited = rule, math.inf, 0

    def stop(self, loss: float) -> bool:
        """Whether the block has waited long enough for a better loss than its best."""
        if self.rule is None:
            return False
        better = loss < self.best - self.rule.min_delta
        self.best, self.waited = (loss, 0) if better else (self.best, self.waited + 1)
        return self.waited >= self.rule.patience
