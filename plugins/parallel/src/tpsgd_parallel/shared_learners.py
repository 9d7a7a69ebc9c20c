"""Learners of which every rank has one, and what they sum over the ranks.

A block's gradients are ready when the batch has passed it. Their sum over the ranks is begun then,
and waited for before the block reads its next batch: meanwhile the batch goes on to the next block.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tpsgd.engine.learners.solved import RecursiveSolver, RidgeSolver
from tpsgd.engine.solvers.least_squares import MomentSums, SampleSums
from tpsgd.maths.kernels.epoch_figures import EpochFigures
from tpsgd_parallel.gradient_sums import GradientSums, Message
from tpsgd_parallel.ranks import Ranks
from tpsgd_parallel.shares import EMPTY


class SummedFigures:
    """The figures of a learner, summed over the ranks when they are collected."""

    def __init__(self, figures: Any, ranks: Ranks) -> None:
        self.figures, self.ranks = figures, ranks

    def __getattr__(self, name: str) -> Any:
        return getattr(self.figures, name)

    def collect(self, samples: int) -> EpochFigures:
        """The figures of the samples of all ranks."""
        figures = self.figures
        figures.count_stored()
        classifies = torch.tensor(float(figures.classifies), device=figures.loss.device)
        counts = [figures.loss, figures.correct, figures.counted]
        counts += [] if figures.moments is None else [figures.moments]
        sums = torch.cat([t.double().flatten() for t in (classifies, *counts)])
        classifying, *sums = self.ranks.add_up(sums).split([1, *(t.numel() for t in counts)])
        for count, total in zip(counts, sums, strict=True):
            count.copy_(total.view(count.shape))
        figures.classifies = bool(classifying > 0)
        return figures.collect(samples)


OF_SAMPLES = ("forward", "output", "error", "update", "measure", "measure_features")


def _unless_empty(method: Any, x: Any, *others: Any, **more: Any) -> Any:
    """What a method of a learner does with samples; a rank that got none passes that on."""
    return x if x is EMPTY else method(x, *others, **more)


class SharedLearner:
    """A learner on one of several ranks, whose batches are shares; all else is the learner's."""

    _FIELDS = ("learner", "ranks", "last")

    def __init__(self, learner: Any, ranks: Ranks) -> None:
        self.learner, self.ranks = learner, ranks
        self.last = True  # whether the batch is whole with this micro-batch

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.learner, name)
        return partial(_unless_empty, value) if name in OF_SAMPLES else value

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._FIELDS:
            object.__setattr__(self, name, value)
        else:
            setattr(self.learner, name, value)

    @property
    def figures(self) -> SummedFigures:
        return SummedFigures(self.learner.figures, self.ranks)

    def calibrate(self) -> None:
        """Fit the objective to the features of all ranks."""
        learner = self.learner
        if learner.mean_square is None:
            first = next(iter(learner.params.values()))
            learner.mean_square = torch.zeros((), dtype=first.dtype, device=first.device)
        self.ranks.add_up(learner.mean_square)
        learner.calibrate()

    def finish(self) -> None:
        """Learn from a batch whose states the next block had to read first."""
        self.learner.updater.finish()

    def settle(self) -> None:
        """Take the step that waits for the sums over the ranks."""

    def end_epoch(self, samples: int) -> None:
        """End the epoch with the same weights and statistics on all ranks."""
        self.settle()
        self.learner.end_epoch(samples)
        modules = [m for top in self.learner.block.modules for m in top.modules()]
        for norm in (m for m in modules if isinstance(m, nn.modules.batchnorm._BatchNorm)):
            for statistic in (norm.running_mean, norm.running_var):  # each rank has seen others
                if statistic is not None and self.learner.learning:
                    self.ranks.add_up(statistic).div_(self.ranks.count)


class SharedGradients(SharedLearner):
    """A learner by gradients, which are summed over the ranks before the optimizer's step."""

    _FIELDS = (*SharedLearner._FIELDS, "sums", "overlap", "names", "unsummed", "messages")

    def __init__(self, learner: Any, sums: GradientSums, overlap: bool = True) -> None:
        super().__init__(learner, sums.ranks)
        self.sums, self.overlap = sums, overlap
        self.names: list[str] | None = None  # of the parameters that get gradients
        self.unsummed = False  # whether there are gradients that are in no message
        self.messages: list[Message] = []

    def start(self) -> None:
        self.learner.start()
        self.learner.updater.waits, self.names = True, None

    def forward(self, x: Any) -> Any:
        self.settle()
        return _unless_empty(self.learner.forward, x)

    def update(
        self, saved: Any, labels: Tensor, error: Tensor | None = None, output_unused: bool = False
    ) -> None:
        """Compute the gradients, and begin to sum them with those of the other ranks.

        A recurrent block whose states the next block reads step by step has them later.
        """
        _unless_empty(self.learner.update, saved, labels, error, output_unused)
        self.unsummed = self.last
        if not getattr(self.learner.gradient, "lazy", False):
            self._begin_sum()

    def finish(self) -> None:
        super().finish()
        self._begin_sum()

    def _begin_sum(self) -> None:
        if not self.unsummed:
            return
        self.unsummed = False
        self.messages = self.sums.add([self.learner.updater.moving[name] for name in self._names()])
        if not self.overlap:
            self.settle()

    def settle(self) -> None:
        """Wait for the sum of the block's gradients, and take the optimizer's step."""
        if self.messages:
            messages, self.messages = self.messages, []
            for message in messages:
                self.sums.end(message)
            self.learner.updater.step_optimizer()

    def _names(self) -> list[str]:
        """The parameters that get gradients on any rank: the same list on all ranks."""
        if self.names is None:
            moving = self.learner.updater.moving
            flags = self.ranks.from_all([p.grad is not None for p in moving.values()])
            self.names = [name for name, *each in zip(moving, *flags, strict=True) if any(each)]
        return self.names


class SharedRidge(SharedLearner):
    """A block solved from the sums over the samples of all ranks."""

    def end_epoch(self, samples: int) -> None:
        """Join the sums of all ranks, and solve for the weights."""
        learner = self.learner
        if learner.learning:
            _join_sums(learner, self.ranks)
            super().end_epoch(samples)
            for p in learner.params.values():
                self.ranks.send(p)
            if not self.ranks.first:
                learner.figures.loss.zero_()  # that of all samples, on every rank
                learner.figures.counted.zero_()


class SharedRecursive(SharedLearner):
    """A block solved after every batch, from the rows of all ranks."""

    def update(
        self, saved: Any, labels: Tensor, error: Tensor | None = None, output_unused: bool = False
    ) -> None:
        """Measure the loss of the rank's samples, then learn from those of all ranks."""
        self.measure(saved, labels)
        rows = None if saved is EMPTY else (saved.x, labels)
        self.learner.updater.learn(*_gathered(rows, self.learner, self.ranks))


def _gathered(rows: Sequence[Tensor] | None, learner: Any, ranks: Ranks) -> list[Tensor]:
    """Inputs and targets of all ranks, in their order; a rank without samples gives None."""
    everyone = ranks.from_all(None if rows is None else [t.cpu() for t in rows])
    device = next(iter(learner.params.values())).device
    pairs = zip(*(each for each in everyone if each is not None), strict=True)
    return [torch.cat(tensors).to(device) for tensors in pairs]


def _join_sums(learner: Any, ranks: Ranks) -> None:
    """Join the sums that the ranks have of a block's equations; exact in float64."""
    solver = learner.updater
    sums: MomentSums | SampleSums | None = solver.sums
    form = None if sums is None else (isinstance(sums, SampleSums), *sums.sides)
    stores, *sides = next(f for f in ranks.from_all(form) if f is not None)
    if solver.equations is None:
        solver.equations = solver.make_equations()
    if stores:
        rows = (torch.cat(sums.xs), torch.cat(sums.ys)) if isinstance(sums, SampleSums) else None
        x, y = _gathered(rows, learner, ranks)
        solver.sums = SampleSums(x, y, solver.has_bias)
        solver.sums.add(x, y)
        return
    if not isinstance(sums, MomentSums):  # the rank has no samples
        device = next(iter(learner.params.values())).device
        x, y = (torch.empty(0, side, device=device) for side in sides)
        sums = solver.sums = MomentSums(x, y, solver.has_bias)
    sums.pool(ranks.add_up)


def shared_learner(learner: Any, sums: GradientSums, overlap: bool = True) -> SharedLearner:
    """The learner as one of several ranks has it."""
    if isinstance(learner.updater, RidgeSolver):
        return SharedRidge(learner, sums.ranks)
    if isinstance(learner.updater, RecursiveSolver):
        return SharedRecursive(learner, sums.ranks)
    return SharedGradients(learner, sums, overlap)
