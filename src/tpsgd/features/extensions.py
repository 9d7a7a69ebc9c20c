"""The extensions of a run that `fit` composes from its settings."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from tpsgd.common.errors import TpsgdError
from tpsgd.common.units import as_bytes, size
from tpsgd.engine.extension import Extension
from tpsgd.engine.lengths import length_in_words
from tpsgd.engine.record import Progress, Run
from tpsgd.engine.settings import LOW, Settings
from tpsgd.engine.sources.batches import stored_samples
from tpsgd.engine.spec import RunRequest
from tpsgd.features.changes import Changes
from tpsgd.features.checkpoints import keep_checkpoints
from tpsgd.features.last_good import LastGoodWeights
from tpsgd.features.likely_mistakes import (
    hint_for,
    refuse_broken_weights,
    warn_of_bytes,
    warn_of_link,
)
from tpsgd.features.memory_choice import memory_choice
from tpsgd.features.progress_bar import bar_unless
from tpsgd.memory.budget import within_budget
from tpsgd.memory.meter import Meter, tensor_bytes
from tpsgd.saved.checkpoint import Checkpoint
from tpsgd.train import Net


def features_of(settings: Settings) -> list[Extension]:
    """The extensions of a run; observers come before the meter, which pauses while they work."""
    warned = Warned()
    extensions: list[Extension] = [warned, LastGoodKept()]
    if settings.memory.budget is not None:
        extensions.append(Budget())
    if settings.callbacks and settings.parallel is None:
        extensions.append(FollowedChanges())
    extensions.append(ProgressShown())
    if settings.memory.measure:
        extensions.append(Measured())
    if settings.parallel is not None:
        extensions.append(settings.parallel)
    if settings.checkpoint is not None:
        extensions.append(Checkpointed(settings.memory.budget is None))
    return [*extensions, Explained(settings, warned)]


class Budget(Extension):
    """Other memory settings, chosen by the plan, that keep a run within its budget."""

    def prepare(self, request: RunRequest) -> RunRequest:
        """The request with the settings that fit; an error names the smallest feasible budget."""
        if not request.local:
            raise TpsgdError(
                "backprop takes no memory budget, because it cannot train block by block: leave it "
                "out, or take memory=tpsgd.Memory(micro_batch=8), which needs less"
            )
        arguments = request.model, request.data, request.method, request.settings
        return replace(request, settings=within_budget(*arguments))


class LastGoodKept(Extension):
    """Weights that a model goes back to when its loss breaks."""

    @contextmanager
    def around(self, net: Net) -> Iterator[None]:
        """Keep them after every epoch."""
        with LastGoodWeights() as last_good:
            net.observers.append(last_good)
            net.recorder.restore = last_good.restore
            yield


class FollowedChanges(Extension):
    """Follows or refuses what callbacks do to the model."""

    @contextmanager
    def around(self, net: Net) -> Iterator[None]:
        """Compare the model with what it was, right after the callbacks."""
        net.observers.insert(1, Changes(net.models[0], net))
        yield


class ProgressShown(Extension):
    """The caller's progress function, or a bar on a terminal."""

    @contextmanager
    def around(self, net: Net) -> Iterator[None]:
        """Call it every few batches."""
        with bar_unless(net.spec.settings.progress) as progress:
            if progress is not None:
                net.observers.append(Progress(progress, net.learners, net.source.samples))
            yield


class Measured(Extension):
    """The memory of a run, in its records."""

    @contextmanager
    def around(self, net: Net) -> Iterator[None]:
        """Count while the net is trained; the other observers are not counted."""
        net.measured = Meter(net.source.form.device)
        net.observers = net.measured.around(net.observers)
        yield

    def finish(self, net: Net, runs: list[Run]) -> list[Run]:
        """Write the peak and the kept inputs into the records."""
        copies = [p for x in net.learners for p in x.params.values()] if len(runs) > 1 else []
        stacked = sum(p.nbytes for p in copies)  # of the parameters, made before the meter started
        for run in runs:
            run.peak_bytes = net.measured.peak(sum(map(tensor_bytes, net.models)) + stacked)
            run.kept_bytes = net.measured.kept_bytes
        return runs


class Checkpointed(Extension):
    """The state of a run in a folder, from which a later run goes on.

    `keeps_ended`: with the state of blocks that have learned already.
    """

    def __init__(self, keeps_ended: bool) -> None:
        self.keeps_ended = keeps_ended

    @contextmanager
    def around(self, net: Net) -> Iterator[None]:
        """Write it after epochs."""
        settings, meter = net.spec.settings, meter_of(net)
        assert isinstance(settings.checkpoint, Checkpoint)
        arguments = settings.checkpoint, net, net.models, net.recorder, meter, settings.callbacks
        with keep_checkpoints(*arguments, self.keeps_ended):
            yield


class Warned(Extension):
    """Errors and warnings of likely mistakes in the model or the data."""

    @contextmanager
    def around(self, net: Net) -> Iterator[None]:
        """Look for them before the run; `samples` are those of the data."""
        refuse_broken_weights(net.models)
        warn_of_link(net.spec)
        warn_of_bytes(net.source)
        self.samples = stored_samples(net.source)
        yield


class Explained(Extension):
    """Sentences in the records: how long a run was, how it saved memory, why it has not learned.

    `asked` are the settings before the data and the budget decided some of them.
    """

    def __init__(self, asked: Settings, warned: Warned) -> None:
        self.asked, self.warned = asked, warned

    def finish(self, net: Net, runs: list[Run]) -> list[Run]:
        """Write them."""
        samples, spec, budget = self.warned.samples, net.spec, self.asked.memory.budget
        for run, model in zip(runs, net.models, strict=True):
            run.settings["memory_budget"] = budget
            run.hint = hint_for(run, samples, spec)
            run.length = length_in_words(self.asked, run, samples)
            arguments = run, model, net, spec, spec.settings, meter_of(net)
            run.memory, run.backprop = memory_choice(*arguments)
        total = runs[0].total_bytes
        if budget not in (None, LOW) and total > as_bytes(budget):
            text = f"training took {size(total)}, more than the budget of"
            warnings.warn(f"{text} {size(as_bytes(budget))}", stacklevel=5)
        return runs


def meter_of(net: Net) -> Meter | None:
    """The meter of a net, if its memory is measured."""
    return net.measured if isinstance(net.measured, Meter) else None
