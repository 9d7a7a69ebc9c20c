"""The extensions of a run that `fit` composes from its settings."""

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

from tpsgd.common.errors import TpsgdError
from tpsgd.common.units import as_bytes, size
from tpsgd.engine.extension import Extension
from tpsgd.engine.record import Progress, Run
from tpsgd.engine.settings import LOW, Settings
from tpsgd.engine.sources.batches import stored_samples
from tpsgd.engine.spec import RunRequest
from tpsgd.features import likely_mistakes
from tpsgd.features.changes import Changes
from tpsgd.features.checkpoints import Checkpoints
from tpsgd.features.last_good import LastGoodWeights
from tpsgd.features.memory_choice import memory_choice
from tpsgd.features.progress_bar import bar_unless
from tpsgd.features.target_scaling import StandardisedTargets
from tpsgd.memory.budget import within_budget
from tpsgd.memory.meter import Meter, tensor_bytes
from tpsgd.train import Net, Source


def features_of(settings: Settings) -> list[Extension]:
    """The extensions of a run; observers come before the meter, which pauses while they work."""
    budget, parallel = settings.memory.budget, settings.parallel
    optional = [
        StandardisedTargets(),
        LastGoodWeights(),
        None if budget is None else Budget(),
        Changes() if settings.callbacks and parallel is None else None,
        ProgressShown(),
        Measured() if settings.memory.measure else None,
        parallel,
        Explained(settings),
        None if settings.checkpoint is None else Checkpoints(budget is None),
    ]
    return [extension for extension in optional if extension is not None]


class Budget(Extension):
    """Other memory settings, chosen by the plan, that keep a run within its budget."""

    def prepare(self, request: RunRequest) -> RunRequest:
        if not request.local:
            raise TpsgdError(
                "backprop takes no memory budget, because it cannot train block by block: leave it "
                "out, or take memory=tpsgd.Memory(micro_batch=8), which needs less"
            )
        arguments = request.model, request.data, request.method, request.settings
        return replace(request, settings=within_budget(*arguments, request.target))


class ProgressShown(Extension):
    """The caller's progress function, or a bar on a terminal, told every few batches."""

    @contextmanager
    def around(self, net: Net) -> Iterator[None]:
        with bar_unless(net.spec.settings.progress) as progress:
            if progress is not None:
                net.observers.append(Progress(progress, net.learners, net.source.samples))
            yield


class Measured(Extension):
    """The memory of a run, in its records; that of the other observers is not counted."""

    def around(self, net: Net) -> AbstractContextManager[None]:
        net.measured = Meter(net.source.form.device)
        net.observers = net.measured.around(net.observers)
        return super().around(net)

    def finish(self, net: Net, runs: list[Run]) -> list[Run]:
        copies = [p for x in net.learners for p in x.params.values()] if len(runs) > 1 else []
        stacked = sum(p.nbytes for p in copies)  # of the parameters, made before the meter started
        for run in runs:
            run.peak_bytes = net.measured.peak(sum(map(tensor_bytes, net.models)) + stacked)
            run.kept_bytes = net.measured.kept_bytes
        return runs


class Explained(Extension):
    """Likely mistakes before a run; then sentences in its records on length, memory and learning.

    `asked` are the settings before the data and the budget decided some of them.
    """

    def __init__(self, asked: Settings) -> None:
        self.asked = asked

    def around(self, net: Net) -> AbstractContextManager[None]:
        likely_mistakes.refuse_broken_weights(net.models)
        likely_mistakes.warn_of_link(net.spec)
        likely_mistakes.warn_of_cut(net.spec, net.models[0])
        likely_mistakes.warn_of_bytes(net.source)
        return super().around(net)

    def finish(self, net: Net, runs: list[Run]) -> list[Run]:
        samples, budget = stored_samples(net.source), self.asked.memory.budget
        for run, model in zip(runs, net.models, strict=True):
            run.settings["memory_budget"] = budget
            run.hint = likely_mistakes.hint_for(run, samples, net.spec)
            run.length = length_in_words(self.asked, run, samples)
            run.memory, run.backprop = memory_choice(run, model, net)
        total = runs[0].total_bytes
        if budget not in (None, LOW) and total > as_bytes(budget):
            text = f"training took {size(total)}, more than the budget of"
            warnings.warn(f"{text} {size(as_bytes(budget))}", stacklevel=5)
        return runs


def length_in_words(asked: Settings, run: Run, source: Source) -> str:
    """The steps and epochs of a run, in a line; "" if its epochs were not chosen from the data."""
    if asked.epochs is not None:
        return ""
    epochs, most = max((e.epoch for e in run.history), default=0), run.settings["epochs"]
    words = f"{epochs} epoch{'s' * (epochs != 1)} of batches of {run.settings['batch_size']}"
    if source.steps:
        words = f"{source.steps * epochs:,} steps a block: {words}"
    if isinstance(most, int) and 1 < epochs < most:
        words += f", stopped before {most}"
    samples = f"{source.samples:,} sample{'s' * (source.samples != 1)}"
    return f"{words}, chosen for {samples}" if source.samples else words
