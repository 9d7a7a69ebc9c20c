"""A block that learns by gradients: its objective, where its gradients come from, its optimizer.

`BlockLearner` is what every kind of learner shares; `GradientLearner` takes an optimizer's steps. A
block solved by least squares is in `solved.py`, a whole net under backprop in `backprop.py`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from tpsgd.common.errors import TpsgdError
from tpsgd.engine.learners.optimizers import LRSchedule, OptimizerFactory, make_optimizer
from tpsgd.maths.kernels.epoch_figures import Figures
from tpsgd.maths.kernels.fused_optimizers import ELEMENTWISE, hooked, rate_of
from tpsgd.maths.learning_rates import BatchRates, RateCurve
from tpsgd.nets.autograd import Autograd
from tpsgd.nets.blocks import Block
from tpsgd.nets.closed_form import ClosedForm, sliced
from tpsgd.nets.modes import statistics_restored
from tpsgd.nets.stacked import Stacked
from tpsgd.nets.unrolled import Unrolled
from tpsgd.objectives import IDLE, Objective
from tpsgd.rules import Signal
from tpsgd.train import Learner, Source, Step

Backend = ClosedForm | Autograd | Stacked | Unrolled  # what computes gradients


@dataclass(frozen=True)
class EarlyStopping:
    """Stop a block when its loss (on validation data where given) has stopped improving."""

    patience: int = 2
    min_delta: float = 0.0


@dataclass(frozen=True)
class BlockSettings:
    """How one block is trained."""

    epochs: int
    optimizer: Any  # a factory of optimizers, or a solver
    lr: float | None = None
    early_stopping: EarlyStopping | None = None
    lr_schedule: LRSchedule | None = None


class BlockLearner(Learner):
    """A block with its objective, and the backend that computes its gradients.

    `draw` makes the objective when the block begins to learn; its class codes are dropped when it
    stops. `widest` is the most bytes that one sample takes anywhere in the block.
    """

    whole_net = False  # whether it is a net under backprop, of which its blocks are the layers
    grows = False  # whether its memory grows with every batch
    optimizer: Optimizer | None = None
    watched = False  # whether the caller's functions may change something after every epoch
    rate: float | None = None
    waits = False  # whether the optimizer's step is taken later, with that of others

    def __init__(
        self,
        block: Block,
        backend: Backend,
        draw: Callable[[], Objective],
        settings: BlockSettings,
        params: dict[str, Tensor],
        *,
        signal: Signal = Signal.LABEL,
        multi_label: bool = False,
        restarts: int | None = None,
        trains: bool = True,
        widest: int = 0,
    ) -> None:
        self.block, self.backend, self.draw, self.settings = block, backend, draw, settings
        self.params, self.signal, self.multi_label = dict(params), signal, multi_label
        self.restarts, self.trains, self.widest = restarts, trains, widest
        self.epochs = settings.epochs if trains else 0
        self.width = len(block.layers)  # how many layers learn in it
        self.before_solving: Callable[[int], None] = lambda workspace: None
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
        self.version = 0  # changes with everything that a recorded step cannot follow

    @property
    def penalties(self) -> list[float]:
        """The penalty of a solved block, for each restart."""
        return []

    @property
    def how(self) -> str:
        """Where its gradients come from, in words."""
        return self.backend.label if self.trains else "frozen"

    def start(self) -> None:
        """Draw the objective; it lives only while the block learns."""
        if not self.epochs:
            return
        objective = self.draw()
        self.backend.set_objective(objective)
        self.objective = replace(objective, tensors=())
        self.tensors, self.written_out = objective.tensors, objective.written_out
        self.mean_over_samples = objective.closed_form is not None
        self.figures.of_logits = objective.of_logits
        learned = enumerate(objective.learned_tensors)
        self.params |= {f"objective.{i}": t for i, t in learned}
        self.learning, self.mean_square = True, None
        self.version += 1

    @property
    def calibrates(self) -> bool:
        """Whether its objective is fitted to the size of the block's output before it learns."""
        return self.learning and self.objective.calibration is not None

    @property
    def _ways(self) -> int:
        return self.backend.ways if isinstance(self.backend, Unrolled) else 1

    def gauge(self, x: Any, labels: Tensor, share: float) -> Any:
        """The block's output for a batch, whose features are measured; it leaves no trace."""
        with statistics_restored(self.block.modules):
            saved = self.forward(x)
            if self.calibrates:
                assert self.objective.calibration is not None
                self.backend.set_objective(self.objective.calibration.mean_square)
                loss = self.backend.measure(self.params, saved, labels, ()).loss
                self.backend.set_objective(self.objective)
                measured = loss * (share / self._ways)  # a sum over directions
                before = self.mean_square
                self.mean_square = measured if before is None else before + measured
            return self.output(saved)

    def calibrate(self) -> None:
        """Divide the objective by the root mean square of the features that were measured."""
        assert self.mean_square is not None
        rms = self.mean_square.sqrt()
        rms = torch.where(rms > 0, rms, 1.0)
        for t in self.tensors[-self._ways :]:
            t.div_(rms.to(t.dtype).view(-1, *[1] * (t.dim() - 1)) if t.dim() else rms)

    def scale(self, restart: int) -> float | None:
        """By how much the objective multiplies the block's features, if it was calibrated."""
        if self.mean_square is None or self.objective.calibration is None:
            return None
        rms = float(self.mean_square.view(-1)[restart]) ** 0.5
        return self.objective.calibration.scale / (rms or 1.0)

    def stop(self) -> None:
        """Freeze the block and drop its class codes."""
        told, self.before_stopping = self.before_stopping, None
        if told is not None:
            told(self)
        self.learning = False
        self.version += 1
        self.figures.free()
        if self.tensors or isinstance(self.backend, Unrolled):
            self.backend.set_objective(IDLE)
        self.tensors = ()
        self.params = {k: p for k, p in self.params.items() if not k.startswith("objective.")}
        self.block.train(False)

    def resume(self) -> None:
        """Back to training mode after validation; a block without an optimizer has none."""
        self.block.train(False)

    def batches(self, source: Source, epoch: int) -> Iterator[Any]:
        """The batches of an epoch, in the random order of this block."""
        return source.batches(self.block.key, epoch)

    def forward(self, x: Any) -> Any:
        """The block's values for a batch."""
        return self.backend.forward(self.params, x)

    def output(self, saved: Any) -> Any:
        """What the next block receives."""
        return self.backend.output(saved)

    def error(self, saved: Any, labels: Tensor) -> Tensor:
        """Minus the derivative of each sample's loss with respect to this block's output."""
        return self.backend.error(saved, labels)

    def measure(self, saved: Any, labels: Tensor) -> None:
        """Add the local loss of a batch to the figures without learning from it."""
        local = self.backend.measure(self.params, saved, labels, self.tensors)
        self.figures.add(local, labels)
        self.figures.keep()

    def keep_figures(self) -> None:
        """Note the loss and the accuracy of the batch that the block has learned from."""
        self.figures.keep()

    def apply_gradients(self) -> None:
        """Take the step for which micro-batches have summed the gradients."""


class GradientLearner(BlockLearner):
    """A block that takes an optimizer's steps on its local loss.

    The gradient of its weight may be computed in `slices`, each applied before the next is made;
    with `codes_first`, learned codes take their step before any of them.
    `share` < 1 belongs to micro-batches: gradients are summed, and `apply_gradients` comes later.
    """

    def __init__(
        self, *args: Any, slices: int = 1, codes_first: bool = False, **options: Any
    ) -> None:
        super().__init__(*args, **options)
        self.slices, self.codes_first, self.share = slices, codes_first, 1.0
        self.optimizer: Optimizer | None = None
        self.quick_step: Callable[[Optimizer], Callable[[], None] | None] = lambda optimizer: None
        self.quick: Callable[[], None] | None = None  # the optimizer's step, by `quick_step`
        self.plain = True  # whether `quick_step` has not been asked yet
        self.scheduler: LRScheduler | None = None
        self.batch_rates: BatchRates | None = None  # where its rate changes with every batch
        self.moving: dict[str, Tensor] = {}  # what the optimizer has: parameters, or slices
        self.pending: tuple[Any, ...] | None = None
        self.constants: Any = None
        self.rate: float | None = None  # of an optimizer whose kernel gets it as a number

    def start(self) -> None:
        """Draw the objective and make the optimizer; both live only while the block learns."""
        super().start()
        if not self.learning:
            return
        self._make_optimizer(self.settings.optimizer, self.settings.lr)
        curve, self.batch_rates = self.settings.lr_schedule, None
        if curve is not None and not isinstance(curve, RateCurve):
            assert self.optimizer is not None
            self.scheduler = curve(self.optimizer)
            if isinstance(self.scheduler, ReduceLROnPlateau):
                raise TpsgdError(
                    "lr_schedule cannot be ReduceLROnPlateau, which waits for a metric; choose "
                    "one that is stepped by the epoch, or use early_stopping"
                )
        self.constants = None
        self.resume()

    def _make_optimizer(self, factory: OptimizerFactory, lr: float | None) -> None:
        """An optimizer; of slices of the weight where it treats each number by itself."""
        for p in self.params.values():
            p.grad = None  # the user may have left one
        self.moving = self.params
        name = f"{len(self.block.prologue)}.weight"
        if isinstance(self.backend, ClosedForm) and self.slices > 1 and name in self.params:
            weight = self.params[name].detach()
            others = {k: p for k, p in self.params.items() if k != name}
            slices = sliced(name, len(weight), self.slices)
            self.moving = others | {k: weight if r is None else weight[r] for k, r in slices}
        self.optimizer = make_optimizer(factory, self.moving, lr)
        whole = type(self.optimizer) not in ELEMENTWISE or getattr(factory, "by_name", False)
        whole = whole or hooked(self.optimizer)  # a hook may need the whole gradient
        self.codes_first = self.codes_first and not whole
        if self.moving is not self.params and whole:
            self.moving, self.optimizer = self.params, make_optimizer(factory, self.params, lr)
        if isinstance(self.backend, ClosedForm):
            self.backend.slices = 1 if self.moving is self.params else self.slices

    def resume(self) -> None:
        """Back to training mode after validation."""
        self.block.train(self.learning)

    def stop(self) -> None:
        """Freeze the block; drop the optimizer's state and the class codes."""
        super().stop()
        self.optimizer = self.scheduler = self.quick = self.batch_rates = self.constants = None
        self.plain = True
        self.moving = {}

    def update(self, saved: Any, s: Tensor, labels: Tensor, output_unused: bool = False) -> None:
        """One step downhill on the local loss. `output_unused`: its memory may be overwritten.

        A recurrent block whose states the next block reads step by step learns meanwhile;
        `finish_update` then takes the step.
        """
        if isinstance(self.backend, Unrolled) and self.backend.lazy:
            self.backend.prepare_gradients(saved, s, self.tensors)
            self.pending = saved, s, labels, False
        else:
            self._update(saved, s, labels, output_unused)

    def finish_update(self) -> None:
        """Take the step that had to wait until the next block had read all states."""
        if self.pending is not None:
            pending, self.pending = self.pending, None
            self._update(*pending)

    def _update(self, saved: Any, s: Tensor, labels: Tensor, output_unused: bool) -> None:
        local, slices = self.backend.gradients(self.params, saved, s, self.tensors, output_unused)
        of_objective = {f"objective.{i}": grad for i, grad in enumerate(local.dtensors)}
        local = local._replace(dtensors=())  # whose memory is free once they are used
        if self.codes_first and self.share == 1.0 and not self.waits and of_objective:
            slices = chain([{}], slices)
        for grads in slices:
            grads |= of_objective
            of_objective = {}
            while grads:
                name, grad = grads.popitem()
                if name in self.moving:  # other parameters do not learn
                    _set_gradient(self.moving[name], grad, self.share)
                del grad
            if self.share == 1.0 and not self.waits:
                self.apply_gradients()
        self.figures.add(local, labels)

    def apply_gradients(self) -> None:
        """Take the optimizer's step and drop the gradients."""
        if self.optimizer is None:
            return
        if self.quick is not None and all(p.grad is not None for p in self.moving.values()):
            self.quick()
        else:
            self.optimizer.step()
            if self.plain:  # its state exists now
                self.quick, self.plain = self.quick_step(self.optimizer), False
            if self.constants is None:
                self.rate = rate_of(self.optimizer)
                self.constants = self._constants()
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Free the gradients."""
        for p in self.moving.values():
            p.grad = None

    def adjust_rate(self) -> None:
        """Let the learning rate follow its schedule, once the epoch has been recorded."""
        if self.scheduler is not None:
            self.scheduler.step()
        self.rate = None if self.optimizer is None else rate_of(self.optimizer)
        before, self.constants = self.constants, self._constants()
        if before != self.constants:
            self.version += 1
            self.quick, self.plain = None, True

    def _constants(self) -> Any:
        """What a quick or recorded step takes as given: memory of parameters, the optimizer."""
        if self.optimizer is None:
            return None
        followed = {"params", "initial_lr"} | ({"lr"} if self.rate is not None else set())
        settings = [
            (k, id(v) if isinstance(v, Tensor) else v)
            for group in self.optimizer.param_groups
            for k, v in group.items()
            if k not in followed
        ]
        values = (v for each in self.optimizer.state.values() for v in each.values())
        state = [id(v) for v in values if isinstance(v, Tensor)]
        memory = [p.untyped_storage()._cdata for p in self.params.values()]
        modules = [m for top in self.block.modules for m in top.modules()] if self.watched else []
        return memory, settings, state, hooked(self.optimizer), [_settings(m) for m in modules]


def _settings(module: Any) -> list[Any]:
    """A module's numbers, such as its mode, a dropout's share or a norm's momentum."""
    return [(k, v) for k, v in vars(module).items() if isinstance(v, (bool, int, float))]


def _set_gradient(p: Tensor, grad: Tensor, share: float) -> None:
    """Give a parameter its gradient, or add a micro-batch's share of it.

    The gradient gets the parameter's number format and strides, which fused optimizers need.
    """
    grad = grad.to(p.dtype)
    if share < 1.0:
        p.grad = grad * share if p.grad is None else p.grad.add_(grad, alpha=share)
    else:
        p.grad = grad
    if p.grad.stride() != p.stride():
        p.grad = torch.empty_like(p).copy_(p.grad)


def accumulate(step: Step) -> Step:
    """The step on micro-batches: gradients are summed, and applied after a batch's last one."""

    def accumulated(learners: Sequence[Any], batch: Any) -> None:
        for learner in learners:
            learner.share = batch.share
        step(learners, batch)
        for learner in learners:
            if learner.learning and batch.share < 1.0 and batch.last and not learner.waits:
                learner.apply_gradients()
            learner.share = 1.0

    return accumulated
