"""What `fit(parallel=...)` takes: a way to share the work of a net among ranks."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from torch import nn

from tpsgd.engine.record import Recorder, Run
from tpsgd.engine.settings import Schedule, Settings
from tpsgd.parallel.on_rank import Agreed, Position, RankCheckpoint
from tpsgd.parallel.ranks import Ranks, check_gpus, joined, local_device
from tpsgd.saved.checkpoint import Checkpoint
from tpsgd.train import Net


class SingleProcess:
    """A run in one process, which shares nothing.

    `fit` calls `joined` and `plan` before it assembles the net, `shared` around the schedule,
    `schedule` for what runs it, and `same_records` at the end.
    """

    def joined(self, settings: Settings) -> AbstractContextManager[Settings]:
        """A context in which this process takes part in a run, with the settings for its part."""
        return nullcontext(settings)

    def plan(self, model: nn.Module, data: Any, method: Any, settings: Settings) -> None:
        """Choose which process does what; refuse what the processes cannot train."""

    def shared(self, net: Net, models: list[nn.Module]) -> AbstractContextManager[None]:
        """A context in which the net is trained."""
        return nullcontext()

    def schedule(self, schedule: Schedule) -> Schedule:
        """What trains the net."""
        return schedule

    def same_records(self, runs: list[Run]) -> list[Run]:
        """The records of the whole run."""
        return runs


class Parallel(SingleProcess):
    """The work of a net shared among ranks: subclasses override `share`.

    `share` changes a net: its learners, sources, the wrappers of a step, and what passes a frozen
    block's outputs on.
    """

    ranks: Ranks

    @contextmanager
    def joined(self, settings: Settings) -> Iterator[Settings]:
        """A context in which this process is a rank; the settings for its part in the job.

        Rank 0 alone shows progress, calls the callbacks and writes checkpoints.
        """
        with joined() as self.ranks:
            self.ranks.check_same("parallel", str(self))
            settings = replace(settings, device=local_device(settings.device))
            check_gpus(settings.device)
            checkpoint = settings.checkpoint
            written = "a folder" if isinstance(checkpoint, Checkpoint) else "none"
            self.ranks.check_same("setting of checkpoint", written)
            if isinstance(checkpoint, Checkpoint):
                checkpoint = RankCheckpoint.of_rank(checkpoint, self.ranks)
                settings = replace(settings, checkpoint=checkpoint)
            if not self.ranks.first:
                settings = replace(settings, progress=False, callbacks=())
            yield settings

    def send_weights(self, models: list[nn.Module]) -> None:
        """Give every rank the weights of rank 0."""
        for tensor in (t for m in models for t in (*m.parameters(), *m.buffers())):
            self.ranks.send(tensor)

    @contextmanager
    def shared(self, net: Net, models: list[nn.Module]) -> Iterator[None]:
        """A context in which all ranks train a net; before and after it they have its weights."""
        self.send_weights(models)
        learners, observers = net.learners, net.observers
        net.observers = [
            Agreed(each, self.ranks) if isinstance(each, Recorder) else each for each in observers
        ]
        net.observers.append(Position(self.ranks.watch))
        self.share(net, models)
        yield
        self.send_weights(models)
        net.learners, net.observers = learners, observers

    def share(self, net: Net, models: list[nn.Module]) -> None:
        raise NotImplementedError

    def same_records(self, runs: list[Run]) -> list[Run]:
        """Rank 0's records, with the model of this rank."""
        values = self.ranks.from_first([run.as_dict() for run in runs])
        for run, of_first in zip(runs, values, strict=True):
            vars(run).update(vars(Run.of(of_first, run.model)))
        return runs
