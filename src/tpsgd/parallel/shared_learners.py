"""Learners of which every rank has one, and what they sum over the ranks.

A block's gradients are ready when the batch has passed it. Their sum over the ranks is begun then,
and waited for before the block reads its next batch: meanwhile the batch goes on to the next block.
"""

from typing import Any

import torch
from torch import Tensor, nn

from tpsgd.engine.solved import RecursiveLearner, RidgeLearner
from tpsgd.nets.unrolled import Unrolled
from tpsgd.parallel.gradient_sums import GradientSums, Message
from tpsgd.parallel.ranks import Ranks
from tpsgd.parallel.shares import EMPTY
from tpsgd.parallel.sums import SummedFigures, gather_rows, join_sums


class SharedLearner:
    """A learner on one of several ranks, whose batches are shares; all else is the learner's."""

    _FIELDS = ("learner", "ranks", "last")

    def __init__(self, learner: Any, ranks: Ranks) -> None:
        self.learner, self.ranks = learner, ranks
        self.last = True  # whether the batch is whole with this micro-batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self.learner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._FIELDS:
            object.__setattr__(self, name, value)
        else:
            setattr(self.learner, name, value)

    @property
    def figures(self) -> SummedFigures:
        """Losses and hits of all ranks."""
        return SummedFigures(self.learner.figures, self.ranks)

    def forward(self, x: Any) -> Any:
        """The block's values for the rank's share of a batch."""
        return x if x is EMPTY else self.learner.forward(x)

    def output(self, saved: Any) -> Any:
        """What the next block receives."""
        return saved if saved is EMPTY else self.learner.output(saved)

    def error(self, saved: Any, labels: Tensor) -> Tensor:
        """Of the rank's samples."""
        return labels if saved is EMPTY else self.learner.error(saved, labels)

    def update(self, saved: Any, s: Tensor, labels: Tensor, output_unused: bool = False) -> None:
        """Learn from the rank's samples."""
        if saved is not EMPTY:
            self.learner.update(saved, s, labels, output_unused)

    def measure(self, saved: Any, labels: Tensor) -> None:
        """Add the loss of the rank's samples to the figures."""
        if saved is not EMPTY:
            self.learner.measure(saved, labels)

    def gauge(self, x: Any, labels: Tensor, share: float) -> Any:
        """The block's output for the rank's samples, whose features are measured."""
        return x if x is EMPTY else self.learner.gauge(x, labels, share)

    def calibrate(self) -> None:
        """Fit the objective to the features of all ranks."""
        learner = self.learner
        if learner.mean_square is None:
            first = next(iter(learner.params.values()))
            learner.mean_square = torch.zeros((), dtype=first.dtype, device=first.device)
        self.ranks.add_up(learner.mean_square)
        learner.calibrate()

    def settle(self) -> None:
        """Take the step that waits for the sums over the ranks."""

    def end_epoch(self, samples: int) -> None:
        """End the epoch with the same weights and statistics on all ranks."""
        self.settle()
        self.learner.end_epoch(samples)
        self._average_statistics()

    def _average_statistics(self) -> None:
        """Batch norms have seen other samples on every rank."""
        modules = [m for top in self.learner.block.modules for m in top.modules()]
        for norm in (m for m in modules if isinstance(m, nn.modules.batchnorm._BatchNorm)):
            for statistic in (norm.running_mean, norm.running_var):
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
        """Begin to learn; the optimizer's steps are taken here."""
        self.learner.start()
        self.learner.waits, self.names = True, None

    def forward(self, x: Any) -> Any:
        """The block's values, after its step on the batch before."""
        self.settle()
        return super().forward(x)

    def update(self, saved: Any, s: Tensor, labels: Tensor, output_unused: bool = False) -> None:
        """Compute the gradients, and begin to sum them with those of the other ranks.

        A recurrent block whose states the next block reads step by step has them later.
        """
        super().update(saved, s, labels, output_unused)
        self.unsummed = self.last
        backend = self.learner.backend
        if not (isinstance(backend, Unrolled) and backend.lazy):
            self._begin_sum()

    def finish_update(self) -> None:
        """The gradients of recurrent blocks are ready now."""
        self.learner.finish_update()
        self._begin_sum()

    def _begin_sum(self) -> None:
        if not self.unsummed:
            return
        self.unsummed = False
        moving = self.learner.moving
        if not (names := self._names()):
            return  # nothing of the block learns
        self.messages = self.sums.add([moving[name] for name in names])
        if not self.overlap:
            self.settle()

    def settle(self) -> None:
        """Wait for the sum of the block's gradients, and take the optimizer's step."""
        if self.messages:
            messages, self.messages = self.messages, []
            for message in messages:
                self.sums.end(message)
            self.learner.apply_gradients()

    def _names(self) -> list[str]:
        """The parameters that get gradients on any rank: the same list on all ranks."""
        if self.names is None:
            moving = self.learner.moving
            flags = torch.tensor([float(p.grad is not None) for p in moving.values()])
            flags = self.ranks.add_up(flags.to(self.ranks.device_of(moving))).tolist()
            self.names = [name for name, flag in zip(moving, flags, strict=True) if flag]
        return self.names


class SharedRidge(SharedLearner):
    """A block solved from the sums over the samples of all ranks."""

    def end_epoch(self, samples: int) -> None:
        """Join the sums of all ranks, and solve for the weights."""
        learner = self.learner
        if learner.learning:
            join_sums(learner, self.ranks)
            super().end_epoch(samples)
            for p in learner.params.values():
                self.ranks.send_first(p)
            if not self.ranks.first:
                learner.figures.loss.zero_()  # that of all samples, on every rank


class SharedRecursive(SharedLearner):
    """A block solved after every batch, from the rows of all ranks."""

    def update(self, saved: Any, s: Tensor, labels: Tensor, output_unused: bool = False) -> None:
        """Measure the loss of the rank's samples, then learn from those of all ranks."""
        self.measure(saved, labels)
        empty = saved is EMPTY
        x = gather_rows(None if empty else saved.x, self.ranks)
        self.learner.learn(x, gather_rows(None if empty else labels, self.ranks))


def shared_learner(learner: Any, sums: GradientSums, overlap: bool = True) -> SharedLearner:
    """The learner as one of several ranks has it."""
    if isinstance(learner, RidgeLearner):
        return SharedRidge(learner, sums.ranks)
    if isinstance(learner, RecursiveLearner):
        return SharedRecursive(learner, sums.ranks)
    return SharedGradients(learner, sums, overlap)
