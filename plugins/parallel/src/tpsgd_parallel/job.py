"""What `fit(parallel=...)` takes: a way to share the work of a net among ranks."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

from torch import nn

from tpsgd.engine.extension import Extension
from tpsgd.engine.record import Recorder, Run
from tpsgd.engine.settings import Settings
from tpsgd.features.run_identity import identity
from tpsgd.saved.checkpoint import Checkpoint
from tpsgd.train import Net
from tpsgd_parallel.on_rank import Agreed, Position, RankCheckpoint
from tpsgd_parallel.ranks import Ranks, check_gpus, check_same_on_ranks, joined, local_device


class Parallel(Extension):
    """The work of a net shared among ranks: subclasses override `share`.

    `share` changes a net: its learners, sources, the wrappers of a step, and what passes a frozen
    block's outputs on.
    """

    ranks: Ranks

    @contextmanager
    def enter(self, settings: Settings) -> Iterator[Settings]:
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

    def process_group(self) -> AbstractContextManager[Ranks]:
        """A context in which this process is a rank, for work around a run."""
        return joined()

    def send_weights(self, models: Sequence[nn.Module]) -> None:
        """Give every rank the weights of rank 0."""
        for tensor in (t for m in models for t in (*m.parameters(), *m.buffers())):
            self.ranks.send(tensor)

    def check_ranks(self, net: Net) -> None:
        """Refuse ranks that were started with different settings, models or data."""
        values = identity(net, net.models[0], net.recorder.runs[0].settings)
        values |= {"number of batches": net.source.steps}
        check_same_on_ranks(self.ranks.from_all(values))

    @contextmanager
    def around(self, net: Net) -> Iterator[None]:
        """A context in which all ranks train a net; before and after it they have its weights."""
        self.check_ranks(net)
        models = net.models
        self.send_weights(models)
        learners, observers = net.learners, net.observers
        net.observers = [
            Agreed(each, self.ranks) if isinstance(each, Recorder) else each for each in observers
        ]
        net.observers.append(Position(self.ranks.watch))
        self.share(net)
        yield
        self.send_weights(models)
        net.learners, net.observers = learners, observers

    def share(self, net: Net) -> None:
        raise NotImplementedError

    def finish(self, net: Net, runs: list[Run]) -> list[Run]:
        """Rank 0's records, with the model of this rank."""
        values = self.ranks.from_first([run.as_dict() for run in runs])
        for run, of_first in zip(runs, values, strict=True):
            vars(run).update(vars(Run.of(of_first, run.model)))
        return runs
