"""A step on a CPU as a tape, recorded once and replayed for every batch; see `tape`.

In a small net most of a step is Python. A step can be replayed if it reads its samples by indices,
its gradients are written out and its optimizer is one of torch's own.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from tpsgd import losses
from tpsgd.engine.fast.cuda_graphs import library_modules_only
from tpsgd.engine.fast.tape import Recording, Tape, record
from tpsgd.engine.learners.optimizers import has_curve
from tpsgd.engine.sources.batches import ArraySource, SampleBatch, ThroughBlocks
from tpsgd.maths.kernels.fused_optimizers import ELEMENTWISE, hooked, rate_of
from tpsgd.nets.autograd import Autograd
from tpsgd.train import Source, Step

WARM_UP = 2  # plain steps first: an optimizer makes its state in them, and memory is measured
WORTH_IT = 24  # steps that a recording must be used for
LOSSES = (None, *losses.ALL.values())
LONGEST = 4000  # operators of a step; more would be a long program, and little of it is overhead


def replayed(step: Step, learners: Sequence[Any], source: Source, library_only: bool) -> Step:
    """The step as a tape where that is possible, otherwise the step itself.

    `library_only`: the whole net consists of torch's and this library's modules.
    """
    return ReplayedStep(step, source) if _can_replay(learners, source, library_only) else step


class ReplayedStep:
    """A step that is replayed for every whole batch; a smaller one takes the plain step."""

    def __init__(self, step: Step, source: Source) -> None:
        self.step, self.form = step, source.form
        self.versions: list[int] = []
        self.rates: list[float | None] = []
        self.constant = True  # whether the step has been the same each time
        self.warmed_up = 0
        self.tape: Tape | None = None
        self.record: Recording | None = None  # of the step before, if this one is to be compared

    def __call__(self, learners: Sequence[Any], batch: SampleBatch) -> None:
        """Learn from a batch."""
        versions = [learner.version for learner in learners]
        if versions != self.versions:
            self.versions, self.tape, self.record, self.constant = versions, None, None, True
        rates = [learner.updater.rate for learner in learners]
        if rates != self.rates:
            self.rates = rates
            self._set_rates(learners)
        if batch.size < self.form.batch_size or not self.constant:
            self.step(learners, batch)
        elif self.tape is not None:
            tensors = iter(self.tape.replay(batch.index))
            for learner, *figures in zip(learners, tensors, tensors, tensors, strict=True):
                learner.figures.unstored = figures if figures[2] is not None else None
        elif self.warmed_up < WARM_UP:
            self.warmed_up += 1
            self.step(learners, batch)
        else:
            self._record(learners, batch)

    def _set_rates(self, learners: Sequence[Any]) -> None:
        """Let the tape follow the learning rates, or record another one."""
        for learner in learners:
            updater = learner.updater
            if self.tape is not None and updater.rate is not None and learner.learning:
                groups = updater.optimizer.param_groups
                tape, rate = self.tape, updater.rate
                if not all([tape.set_rate(group["params"], rate) for group in groups]):
                    self.tape = self.record = None

    def _record(self, learners: Sequence[Any], batch: SampleBatch) -> None:
        """Take a step, and note what it does; from the second time on it can be replayed."""
        index = batch.index.clone()  # a tensor of its own: its address is no constant

        def figures() -> list[Any]:
            batches = [learner.figures.unstored or (None, None, None) for learner in learners]
            return [tensor for batch in batches for tensor in batch]

        new = record(lambda: self.step(learners, replace(batch, index=index)), [index], figures)
        before, self.record = self.record, new
        if new is None or len(new.calls) > LONGEST:
            self.constant = False
        elif before is not None:
            self.constant = before == new
            self.tape, self.record = Tape(new, 1) if self.constant else None, None


def _can_replay(learners: Sequence[Any], source: Source, library_only: bool) -> bool:
    form = source.form
    below = source.source if isinstance(source, ThroughBlocks) else source
    learning = [learner for learner in learners if learner.learning]
    steps = max((x.epochs for x in learning), default=0) * source.samples // form.batch_size
    return (
        isinstance(below, ArraySource)
        and type(below.x) is Tensor  # sequences of different lengths change their shapes
        and form.device.type == below.x.device.type == "cpu"
        and form.micro_batch is None
        and steps >= WORTH_IT
        and all(map(_replayable, learning))
        and (source is below or library_only)
        and all(map(library_modules_only, learners))
    )


def _replayable(learner: Any) -> bool:
    """Whether the learner's step is operators only: this library's objective, torch's optimizer.

    A user's own objective may do anything in Python, which a tape would not repeat.
    """
    optimizer = learner.updater.optimizer
    if type(optimizer) not in ELEMENTWISE or hooked(optimizer):
        return False
    if has_curve(learner) and rate_of(optimizer) is None:
        return False  # its rate would be a constant of the tape
    closed_form = learner.objective.closed_form or learner.objective.closed_form_of_batch
    if closed_form is None or not closed_form.__module__.startswith("tpsgd."):
        return False
    return learner.objective.of_logits in LOSSES and not isinstance(learner.gradient, Autograd)
