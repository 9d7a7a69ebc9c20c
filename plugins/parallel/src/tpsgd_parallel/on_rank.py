"""What a rank does differently from a process that trains alone: who decides, who writes."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from tpsgd.engine.record import Recorder
from tpsgd.saved.checkpoint import Checkpoint
from tpsgd.train import EpochEnd, Learner, Observer
from tpsgd_parallel.failures import Watch
from tpsgd_parallel.ranks import Ranks


@dataclass
class Agreed(Observer):
    """A recorder whose decisions to stop a block are those of rank 0, which has the callbacks."""

    observer: Recorder
    ranks: Ranks

    def started(self, learner: Learner) -> None:
        self.observer.started(learner)

    def computed(self, samples: int, blocks: int) -> None:
        self.observer.computed(samples, blocks)

    def epoch(self, end: EpochEnd) -> set[Learner]:
        stopping = self.observer.epoch(end)
        learners = [i for i, x in enumerate(end.learners) if x in stopping]
        return {end.learners[i] for i in self.ranks.from_first(learners)}


class Position(Observer):
    """Notes the epoch that a job is in, for the sentence about a rank that dies."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    def stage(self, learners: Sequence[Any], learning: bool = True) -> None:
        alone = len(learners) == 1 and not learners[0].whole_net
        block = f" of block {learners[0].block.index + 1}" if alone else ""
        self.watch.place = f"in epoch 1{block}" if learning else ""

    def epoch(self, end: EpochEnd) -> set[Learner]:
        before, after = f"epoch {end.number + 1}", f"epoch {end.number + 2}"
        self.watch.place = self.watch.place.replace(before, after)
        return set()


@dataclass(frozen=True)
class RankCheckpoint(Checkpoint):
    """A checkpoint that rank 0 reads and writes; the other ranks get its state from rank 0."""

    ranks: Any = None

    @classmethod
    def of_rank(cls, checkpoint: Checkpoint, ranks: Ranks) -> "RankCheckpoint":
        """The same checkpoint, on one of several ranks."""
        return cls(*(getattr(checkpoint, f.name) for f in fields(Checkpoint)), ranks=ranks)

    def claimed(self) -> AbstractContextManager[Path]:
        return super().claimed() if self.ranks.first else nullcontext(self.folder)

    def open(self) -> dict[str, Any] | None:
        return self.ranks.from_first(super().open() if self.ranks.first else None)

    def begin(self, identity: dict[str, Any]) -> None:
        if self.ranks.first:
            super().begin(identity)

    def write(self, state: dict[str, Any]) -> None:
        if self.ranks.first:
            super().write(state)
