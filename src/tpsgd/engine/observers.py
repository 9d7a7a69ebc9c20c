"""Who watches a run: the record with validation and early stopping, and the progress bar.

The memory meter, which is an observer too, has a file of its own (`meter.py`).
"""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from tpsgd.engine.batches import depth
from tpsgd.engine.learner import EarlyStopping
from tpsgd.engine.record import Epoch, Run
from tpsgd.errors import TpsgdError
from tpsgd.protocols import EpochEnd, Learner, Observer
from tpsgd.rules import Signal
from tpsgd.solvers import SOLVERS
from tpsgd.train import validate

Values = tuple[list[float], list[float] | None]  # losses and accuracies, one per restart


class Recorder(Observer):
    """Writes every epoch into the runs, calls the callbacks and stops blocks early."""

    def __init__(self, runs: list[Run], callbacks: Sequence[Callable[[Epoch], Any]] = ()) -> None:
        self.runs, self.callbacks = runs, callbacks  # one run, or one per stacked restart
        self.began = time.perf_counter()
        self.patience: dict[Learner, Patience] = {}

    def computed(self, samples: int, blocks: int) -> None:
        """Count samples that went through frozen blocks."""
        for run in self.runs:
            run.forward_passes += samples * blocks

    def epoch(self, end: EpochEnd) -> set[Learner]:
        """Write the epoch down; return the blocks whose callback or early stopping says stop."""
        learning: list[Any] = [x for x in end.learners if x.learning]
        for run in self.runs:
            run.sample_passes += end.samples * sum(x.width for x in learning)
        self.computed(end.samples, depth(end.source))
        figures = {x: x.figures.collect(end.samples) for x in learning}
        checks: dict[Any, Values] = {}
        if end.validation is not None:
            samples = validate(end.net, end.learners, end.validation)
            checked = [x for x in learning if x.signal is Signal.LABEL]
            checks = {x: x.figures.collect(samples) for x in checked}
        seconds = time.perf_counter() - self.began
        stopping = set()
        for x in learning:
            if self._write(x, end.number, figures[x], checks.get(x), seconds):
                stopping.add(x)
        return stopping | self._out_of_patience(end, figures | checks)

    def _write(
        self, learner: Any, epoch: int, figures: Values, check: Values | None, seconds: float
    ) -> bool:
        """One block's epoch, for every restart; whether a callback wants the block to stop."""
        stop, number = False, learner.block.index + 1
        for r, run in enumerate(self.runs):
            record = Epoch(
                block=number if learner.width == 1 else 0,
                epoch=epoch + 1,
                loss=figures[0][r],
                accuracy=figures[1][r] if figures[1] else None,
                val_loss=check[0][r] if check else None,
                val_accuracy=check[1][r] if check and check[1] else None,
                seconds=seconds,
            )
            run.history.append(record)
            if any([callback(record) is True for callback in self.callbacks]):
                stop = True
            if not math.isfinite(record.loss):
                raise TpsgdError(
                    f"the loss of block {number} ({learner.block}) became {record.loss} in epoch "
                    f"{epoch + 1}: {_cure(learner)}"
                )
        return stop

    def _out_of_patience(self, end: EpochEnd, values: dict[Any, Values]) -> set[Learner]:
        """Blocks whose loss has not improved for long enough."""
        losses = {x: sum(values[x][0]) for x in values}
        last, stopping = end.learners[-1], set()
        for learner in losses:
            rule = learner.settings.early_stopping
            if rule is None:
                continue
            follows_output = learner.signal is not Signal.LABEL and last in losses
            patience = self.patience.setdefault(learner, Patience(rule))
            if patience.spent(losses[last if follows_output else learner]):
                stopping.add(learner)
        return stopping


def _cure(learner: Any) -> str:
    if isinstance(learner.settings.optimizer, SOLVERS):
        return (
            "its inputs or targets are too large for its equations: scale them, or raise the "
            "penalty"
        )
    return "lower its learning rate or bound its activation"


class Patience:
    """Early stopping's memory of one block."""

    def __init__(self, rule: EarlyStopping) -> None:
        self.rule, self.best, self.waited = rule, math.inf, 0

    def spent(self, loss: float) -> bool:
        """Whether the block has waited long enough for a loss better than its best."""
        better = loss < self.best - self.rule.min_delta
        self.best, self.waited = (loss, 0) if better else (self.best, self.waited + 1)
        return self.waited >= self.rule.patience


class Progress(Observer):
    """Calls `progress(sample passes done, total)` every few batches."""

    def __init__(
        self, progress: Callable[[int, int], None], learners: Sequence[Any], samples: int
    ) -> None:
        self.progress, self.done, self.batches = progress, 0, 0
        self.total = samples * sum(x.width * x.epochs for x in learners)

    def batch(self, learners: Sequence[Learner], batch: Any) -> None:
        """Count the samples of a batch, once for every layer that learned from it."""
        self.done += batch.size * sum(x.width for x in learners if x.learning)
        if learners and self.batches % 8 == 0:
            self.progress(self.done, self.total)
        self.batches += 1

    def epoch(self, end: EpochEnd) -> set[Learner]:
        """Say how far the run is at the end of every epoch."""
        self.batches = 0
        self.progress(self.done, self.total)
        return set()
