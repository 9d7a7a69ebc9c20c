"""A block that learns: a gradient, which computes its local loss, and an updater of its weights.

Gradients (`nets/closed_form.py`, `nets/autograd.py`, `nets/unrolled.py`) have `forward`, `output`,
`gradients` and `measure`. Updaters (`updaters.py`, `solved.py`) have `start`, `apply`, `end_epoch`
and `stop`: an optimizer's steps, least squares after one pass, or least squares after every batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from tpsgd.common.errors import TpsgdError
from tpsgd.engine.learners.updaters import Updater
from tpsgd.engine.settings import BlockSettings
from tpsgd.maths.kernels.epoch_figures import Figures
from tpsgd.maths.noise import renew
from tpsgd.nets.autograd import Autograd
from tpsgd.nets.blocks import Block
from tpsgd.nets.closed_form import ClosedForm
from tpsgd.nets.model_inputs import data_of
from tpsgd.nets.modes import statistics_restored
from tpsgd.nets.padded import through
from tpsgd.nets.stacked import Stacked
from tpsgd.nets.unrolled import Unrolled
from tpsgd.objectives import IDLE, NetSignal, Objective, Signal
from tpsgd.targets import CLASSES, Target
from tpsgd.train import Batch, Learner, Source, Step, step

Gradient = ClosedForm | Autograd | Stacked | Unrolled


class BlockLearner(Learner):
    """A block with its objective, its gradient and its updater.

    `draw` makes the objective when the block begins to learn; its class codes are dropped when it
    stops. `outputs` are the classes, or the numbers of a label. `widest` is the most bytes that one
    sample takes anywhere in the block. `layers` counts the layers that learn in it: under backprop,
    those of the whole net. `noise` is a noise key, for a signal of the whole net.
    """

    def __init__(
        self,
        block: Block,
        gradient: Gradient,
        updater: Updater,
        draw: Callable[[], Objective],
        settings: BlockSettings,
        params: dict[str, Tensor],
        *,
        signal: Signal | NetSignal = Signal.LABEL,
        noise: Tensor | None = None,
        multi_label: bool = False,
        target: Target = CLASSES,
        outputs: int = 0,
        restarts: int | None = None,
        trains: bool = True,
        widest: int = 0,
        layers: int | None = None,
        whole_net: bool = False,
    ) -> None:
        self.block, self.gradient, self.updater, self.draw = block, gradient, updater, draw
        self.settings, self.params, self.signal = settings, dict(params), signal
        self.restarts, self.trains, self.widest = restarts, trains, widest
        self.multi_label, self.whole_net = multi_label, whole_net
        self.layers = len(block.layers) if layers is None else layers
        self.epochs = settings.epochs if trains else 0
        self.before_stopping: Callable[[Any], None] | None = None  # told of it, while it has all
        self.learning = False
        self.objective: Objective = IDLE  # without its tensors
        self.tensors: tuple[Tensor, ...] = ()
        self.mean_square: Tensor | None = None  # of its features in the first batch
        self.mean_over_samples = True  # whether its loss is a mean over samples, once drawn
        self.written_out = False  # whether its objective's derivative is a formula, once drawn
        first = next(iter(self.params.values()), torch.empty(0))
        self.figures = Figures(first.device, restarts)
        self.figures.multi_label = multi_label
        self.figures.expect(target, outputs)
        self.outputs, self.noise = outputs, noise
        self.first_noise = None if noise is None else noise.clone()  # before the first epoch
        self.version = 0  # changes with everything that a recorded step cannot follow

    @property
    def label(self) -> str:
        """How its weights are found, for the record."""
        return (self.updater.label or self.gradient.label) if self.trains else "frozen"

    def start(self) -> None:
        """Draw the objective and start the updater; both live only while the block learns."""
        if not self.epochs:
            return
        objective = self.draw()
        self.gradient.set_objective(objective)
        self.objective = replace(objective, tensors=())
        self.tensors, self.written_out = objective.tensors, objective.written_out
        self.mean_over_samples = objective.closed_form is not None
        self.figures.of_logits = objective.of_logits
        learned = enumerate(objective.learned_tensors)
        self.params |= {f"objective.{i}": t for i, t in learned}
        if objective.noise_at is not None:
            self.noise = objective.tensors[objective.noise_at]
            self.first_noise = self.noise.clone()
        self.learning, self.mean_square = True, None
        self.version += 1
        self.updater.start(self)

    def begin_epoch(self, epoch: int) -> None:
        """The mode, which validation may have changed, and the learning rate of the epoch."""
        self.set_mode()
        if self.noise is not None and self.first_noise is not None:
            renew(self.noise, self.first_noise, epoch)
        if self.learning:
            self.updater.begin_epoch(epoch)

    def set_mode(self) -> None:
        """Training mode while an optimizer changes the weights, otherwise evaluation mode."""
        self.block.train(self.learning and self.updater.trains_modules)

    def forward(self, x: Any) -> Any:
        """The block's values for a batch; while a solver collects equations, the layer's inputs."""
        if self.updater.collecting:
            for module in self.block.prologue:
                x = torch.vmap(module)(x) if self.restarts else through(module, x)
            return data_of(x)
        return self.gradient.forward(self.params, x)

    def output(self, saved: Any) -> Any:
        """What the next block receives."""
        return self.gradient.output(saved)

    def update(
        self, saved: Any, labels: Tensor, error: Tensor | None = None, output_unused: bool = False
    ) -> None:
        """Learn from a batch. `output_unused`: its memory may be overwritten."""
        if self.signal is Signal.LABEL:
            signal = labels
        else:
            assert error is not None
            signal = error if self.signal is Signal.ERROR else error.sign()
        self.updater.apply(saved, signal, labels, output_unused)
        if self.noise is not None:
            self.noise[1].add_(1)  # the next batch has other random numbers

    def error(self, saved: Any, labels: Tensor) -> Tensor:
        """Minus the derivative of each label's loss with respect to this block's output.

        With positions it has the form of labels that are numbers, a row for each position.
        """
        error, target = self.gradient.error(saved, labels), self.figures.target
        if not target.positions:
            return error
        error = error.movedim(1 + bool(self.restarts), -1) if target.channels_first else error
        return error * prod(target.positions)

    def measure(self, saved: Any, labels: Tensor) -> None:
        """Add the local loss of a batch to the figures without learning from it."""
        self.figures.add(self.gradient.measure(self.params, saved, labels, self.tensors), labels)
        self.figures.keep()

    def end_epoch(self, samples: int) -> None:
        """All batches of an epoch have been learned from."""
        if self.learning:
            self.updater.end_epoch()

    def stop(self) -> None:
        """Freeze the block; drop its class codes and what the updater has."""
        told, self.before_stopping = self.before_stopping, None
        if told is not None:
            told(self)
        self.learning = False
        self.version += 1
        self.figures.free()
        if self.tensors or isinstance(self.gradient, Unrolled):
            self.gradient.set_objective(IDLE)
        self.tensors = ()
        self.params = {k: p for k, p in self.params.items() if not k.startswith("objective.")}
        self.block.train(False)
        self.updater.stop()

    @property
    def calibrates(self) -> bool:
        """Whether its objective is fitted to the size of the block's output before it learns."""
        return self.learning and self.objective.calibration is not None

    @property
    def _directions(self) -> int:
        return self.gradient.directions if isinstance(self.gradient, Unrolled) else 1

    def measure_features(self, x: Any, labels: Tensor, share: float) -> Any:
        """The block's output for a batch, whose features are measured; it leaves no trace."""
        with statistics_restored(self.block.modules):
            saved = self.forward(x)
            if self.calibrates:
                assert self.objective.calibration is not None
                self.gradient.set_objective(self.objective.calibration.mean_square)
                loss = self.gradient.measure(self.params, saved, labels, ()).loss
                self.gradient.set_objective(self.objective)
                measured = loss * (share / self._directions)  # a sum over directions
                before = self.mean_square
                self.mean_square = measured if before is None else before + measured
            return self.output(saved)

    def calibrate(self) -> None:
        """Divide the objective by the root mean square of the features that were measured."""
        assert self.mean_square is not None
        rms = self.mean_square.sqrt()
        rms = torch.where(rms > 0, rms, 1.0)
        for t in self.tensors[-self._directions :]:
            t.div_(rms.to(t.dtype).view(-1, *[1] * (t.dim() - 1)) if t.dim() else rms)

    def scale(self, restart: int) -> float | None:
        """By how much the objective multiplies the block's features, if it was calibrated."""
        if self.mean_square is None or self.objective.calibration is None:
            return None
        rms = float(self.mean_square.view(-1)[restart]) ** 0.5
        return self.objective.calibration.scale / (rms or 1.0)


@torch.no_grad()
def calibrate(learners: Sequence[Any], source: Source, batches: Any) -> None:
    """Fit the objectives that ask for it to the size of their features in the first batch.

    One forward pass through the blocks as they are before they learn. It leaves no trace in them,
    nor in torch's random generators; a loader is asked for one batch more.
    """
    count = max((i for i, x in enumerate(learners, 1) if x.calibrates), default=0)
    if not count:
        return
    device = source.form.device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        for batch in batches(learners, source, 0):
            x, labels = batch.load()
            for learner in learners[:count]:
                x = learner.measure_features(x, labels, batch.share)
            if batch.last:
                break
        else:
            raise TpsgdError(source.form.no_batches)
    for learner in learners[:count]:
        if learner.calibrates:
            learner.calibrate()


def step_on_error(learners: Sequence[Any], batch: Batch) -> None:
    """`train.step` for DFA and sDFA, where no block can learn before the net's output is known."""
    if not any(x.learning and x.signal is not Signal.LABEL for x in learners):
        return step(learners, batch)
    x, labels = batch.load()
    if of_net := [learner.signal for learner in learners if isinstance(learner.signal, NetSignal)]:
        return _step_on_net(of_net[0], learners, x, labels)
    values = []
    for learner in learners:
        values.append(learner.forward(x))
        x = learner.output(values[-1])
    error = learners[-1].error(values[-1], labels)
    for learner, saved in zip(learners, values, strict=True):
        if learner.learning:
            learner.update(saved, labels, error)


def _step_on_net(signal: NetSignal, learners: Sequence[Any], x: Any, labels: Tensor) -> None:
    """Every block learns from what a signal of the whole net has for it."""
    for learner, own in zip(learners, signal(learners, x, labels), strict=True):
        if learner.learning and own is not None and own.gradients is None:
            learner.updater.apply(own.saved, own.signal, labels, False)
        elif learner.learning and own is not None:
            learner.updater.apply_gradients(own.gradients, own.local, labels)
        if learner.noise is not None:
            learner.noise[1].add_(1)


def with_figures(step: Step) -> Step:
    """The step, after which the loss and accuracy that it computed are stored."""

    def with_stored_figures(learners: Sequence[Any], batch: Any) -> None:
        step(learners, batch)
        for learner in learners:
            learner.figures.keep()

    return with_stored_figures


def accumulate(step: Step) -> Step:
    """The step on micro-batches: gradients are summed, and applied after a batch's last one."""

    def accumulated(learners: Sequence[Any], batch: Any) -> None:
        for learner in learners:
            learner.updater.share = batch.share
        step(learners, batch)
        for learner in learners:
            if learner.learning and batch.share < 1.0 and batch.last:
                learner.updater.take_step()
            learner.updater.share = 1.0

    return accumulated


def with_pending_updates(step: Step) -> Step:
    """The step, after which recurrent blocks learn whose states the next block had to read."""

    def with_updates(learners: Sequence[Any], batch: Any) -> None:
        step(learners, batch)
        for learner in learners:
            learner.updater.finish()

    return with_updates


@torch.no_grad()
def validate(learners: Sequence[Any], source: Source, observers: Sequence[Any]) -> int:
    """Measure the losses of learning blocks on other data: the number of samples."""
    samples = 0
    for observer in observers:
        observer.computing(True)
    for learner in learners:
        learner.block.train(False)
    for batch in source.batches():
        x, labels = batch.load()
        for learner in learners:
            saved = learner.forward(x)
            if learner.learning and learner.signal is Signal.LABEL:
                learner.measure(saved, labels)
            if learner is not learners[-1]:
                x = learner.output(saved)
            del saved
        samples += batch.size
        for observer in observers:
            observer.batch((), batch)
    for observer in observers:
        observer.computing(False)
    for learner in learners:
        learner.set_mode()
    return samples
