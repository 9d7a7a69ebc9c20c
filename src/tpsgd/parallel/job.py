"""What `fit(parallel=...)` takes: a way to share the work of a net among ranks."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from torch import nn

from tpsgd.engine.record import Run
from tpsgd.engine.settings import Schedule, Settings
from tpsgd.parallel.on_rank import Agreed, Position, RankCheckpoint
from tpsgd.parallel.ranks import Ranks, check_gpus, joined, local_device
from tpsgd.saved.checkpoint import Checkpoint
from tpsgd.train import Net


class Alone:
    """One process: nothing to share."""

    @contextmanager
    def joined(self, settings: Settings) -> Iterator[Settings]:
        """The settings as they are."""
        yield settings

    def planned(self, model: nn.Module, data: Any, method: Any, settings: Settings) -> Settings:
        """The settings as they are."""
        return settings

    def shared(self, net: Net, models: list[nn.Module]) -> AbstractContextManager[None]:
        """The net as it is."""
        return nullcontext()

    def schedule(self, schedule: Schedule) -> Schedule:
        """The schedule as it is."""
        return schedule

    def same_records(self, runs: list[Run]) -> list[Run]:
        """The records as they are."""
        return runs


class Parallel:
    """The work of a net shared among ranks; a way to do it overrides `share`.

    `fit` calls `joined` and `planned` before it assembles the net, `shared` around the schedule,
    `schedule` for what runs it, and `same_records` at the end. `share` changes a net (its learners,
    sources, observers, the wrappers of a step, what passes a frozen block's outputs on) and returns
    a function for the end, after which every rank has the whole trained model.
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
            written = isinstance(settings.checkpoint, Checkpoint)
            self.ranks.check_same("setting of checkpoint", "a folder" if written else "none")
            if isinstance(settings.checkpoint, Checkpoint):
                checkpoint = RankCheckpoint.of_rank(settings.checkpoint, self.ranks)
                settings = replace(settings, checkpoint=checkpoint)
            if not self.ranks.first:
                settings = replace(settings, progress=False, callbacks=())
            yield settings

    def planned(self, model: nn.Module, data: Any, method: Any, settings: Settings) -> Settings:
        """The settings that this way needs; what it cannot train is refused."""
        return settings

    def send_weights(self, models: list[nn.Module]) -> None:
        """Give every rank the weights of rank 0."""
        for tensor in (t for m in models for t in (*m.parameters(), *m.buffers())):
            self.ranks.send_first(tensor)

    @contextmanager
    def shared(self, net: Net, models: list[nn.Module]) -> Iterator[None]:
        """A context in which a net is trained by all ranks, from the weights of rank 0."""
        self.send_weights(models)
        learners, observers = net.learners, net.observers
        net.observers = [Agreed.of(observer, self.ranks) for observer in observers]
        net.observers.append(Position(self.ranks.watch))
        synchronise = self.share(net, models)
        yield
        synchronise()
        net.learners, net.observers = learners, observers

    def share(self, net: Net, models: list[nn.Module]) -> Callable[[], Any]:
        """Change a net so that this rank does its part; what must be done after the schedule."""
        raise NotImplementedError

    def schedule(self, schedule: Schedule) -> Schedule:
        """The schedule as it is."""
        return schedule

    def same_records(self, runs: list[Run]) -> list[Run]:
        """Rank 0's records, with the model of this rank."""
        values = self.ranks.from_first([run.as_dict() for run in runs])
        for run, of_first in zip(runs, values, strict=True):
            vars(run).update(vars(Run.of(of_first, run.model)))
        return runs

    def __str__(self) -> str:
        return type(self).__name__
