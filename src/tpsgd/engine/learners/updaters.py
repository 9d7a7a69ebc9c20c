"""What changes the weights of a block: the base of all updaters, and an optimizer's steps."""

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from tpsgd.common.errors import TpsgdError
from tpsgd.engine.learners.optimizers import OptimizerFactory, make_optimizer
from tpsgd.maths.kernels.fused_optimizers import ELEMENTWISE, hooked, rate_of
from tpsgd.maths.learning_rates import BatchRates, RateCurve
from tpsgd.nets.closed_form import ClosedForm, sliced


class Updater:
    """Changes the weights of a block that learns. Override `apply`, and what else you need."""

    label = ""  # how weights are found, if not by the gradient
    trains_modules = False  # whether batch norm and dropout are in training mode
    in_stored_order = False  # whether samples are read once, in the order of the data
    grows = False  # whether its memory grows with every batch
    optimizer: Optimizer | None = None
    scheduler: LRScheduler | None = None
    scheduled = 0  # epochs that the scheduler has been stepped for
    collecting = False  # whether the inputs of the layer are enough
    batch_rates: BatchRates | None = None  # where the learning rate changes with every batch
    rate: float | None = None  # of an optimizer whose kernel gets it as a number
    share = 1.0  # of a batch, if it is a micro-batch
    learner: Any = None  # while it learns

    @property
    def penalties(self) -> tuple[float, ...]:
        """Of a solved block, for each restart."""
        return ()

    def start(self, learner: Any) -> None:
        """The learner has drawn its objective."""
        self.learner = learner

    def begin_epoch(self, epoch: int) -> None:
        """An epoch begins."""

    def apply(self, saved: Any, s: Tensor, labels: Tensor, output_unused: bool) -> None:
        """Learn from a batch."""
        raise NotImplementedError

    def finish(self) -> None:
        """Learn from a batch whose states the next block had to read first."""

    def take_step(self) -> None:
        """Take the step for which micro-batches have summed the gradients."""

    def end_epoch(self) -> None:
        """All batches of an epoch have been learned from."""

    def stop(self) -> None:
        """Drop everything."""
        self.learner = None


class OptimizerSteps(Updater):
    """An optimizer's steps on the local loss.

    The gradient of the weight may be computed in `slices`, each applied before the next is made;
    with `codes_first`, learned codes take their step before any of them. Of micro-batches, `share`
    < 1, gradients are summed. With `waits`, another takes the step, once it has summed gradients.
    """

    trains_modules = True
    quick_step: Callable[[Optimizer], Callable[[], None] | None] = staticmethod(lambda _: None)
    watched = False  # whether the caller's functions may change something after every epoch
    waits = False

    def __init__(self, slices: int = 1, codes_first: bool = False) -> None:
        self.slices, self.codes_first = slices, codes_first
        self.moving: dict[str, Tensor] = {}  # what the optimizer has: parameters, or slices
        self.constants: Any = None
        self._forget_quick_step()

    def _forget_quick_step(self) -> None:
        self.quick: Callable[[], None] | None = None  # the optimizer's step, by `quick_step`
        self.plain = True  # whether `quick_step` has not been asked yet

    def start(self, learner: Any) -> None:
        """Make the optimizer and the scheduler of its learning rate."""
        super().start(learner)
        settings = learner.settings
        self._make_optimizer(settings.optimizer, settings.lr)
        curve, self.batch_rates, self.constants = settings.lr_schedule, None, None
        self.scheduled = 0
        if curve is not None and not isinstance(curve, RateCurve):
            assert self.optimizer is not None
            self.scheduler = curve(self.optimizer)
            if isinstance(self.scheduler, ReduceLROnPlateau):
                raise TpsgdError(
                    "lr_schedule cannot be ReduceLROnPlateau, which waits for a metric; choose "
                    "one that is stepped by the epoch, or use early_stopping"
                )
        learner.block.train(True)

    def _make_optimizer(self, factory: OptimizerFactory, lr: float | None) -> None:
        """An optimizer; of slices of the weight where it treats each number by itself."""
        params, gradient, block = self.learner.params, self.learner.gradient, self.learner.block
        for p in params.values():
            p.grad = None  # the user may have left one
        self.moving = params
        name = f"{len(block.prologue)}.weight"
        if isinstance(gradient, ClosedForm) and self.slices > 1 and name in params:
            weight = params[name].detach()
            others = {k: p for k, p in params.items() if k != name}
            slices = sliced(name, len(weight), self.slices)
            self.moving = others | {k: weight if r is None else weight[r] for k, r in slices}
        self.optimizer = make_optimizer(factory, self.moving, lr)
        whole = type(self.optimizer) not in ELEMENTWISE or getattr(factory, "by_name", False)
        whole = whole or hooked(self.optimizer)  # a hook may need the whole gradient
        self.codes_first = self.codes_first and not whole
        if self.moving is not params and whole:
            self.moving, self.optimizer = params, make_optimizer(factory, params, lr)
        if isinstance(gradient, ClosedForm):
            gradient.slices = 1 if self.moving is params else self.slices

    def begin_epoch(self, epoch: int) -> None:
        """Let the learning rate follow its schedule; callbacks may have changed the model."""
        assert self.optimizer is not None
        if self.scheduler is not None and self.scheduled < epoch:
            self.scheduler.step()
            self.scheduled += 1
        if self.constants is None:  # no step has been taken
            return
        self.rate = rate_of(self.optimizer)
        before, self.constants = self.constants, self._constants()
        if before != self.constants:
            self.learner.version += 1
            self._forget_quick_step()

    def apply(self, saved: Any, s: Tensor, labels: Tensor, output_unused: bool) -> None:
        """One step downhill on the local loss."""
        learner, steps_now = self.learner, self.share == 1.0 and not self.waits
        local, slices = learner.gradient.gradients(
            learner.params, saved, s, learner.tensors, output_unused
        )
        of_objective = {f"objective.{i}": grad for i, grad in enumerate(local.dtensors)}
        local = local._replace(dtensors=())  # whose memory is free once they are used
        if self.codes_first and steps_now and of_objective:
            slices = chain([{}], slices)
        for grads in slices:
            grads |= of_objective
            of_objective = {}
            while grads:
                name, grad = grads.popitem()
                if name in self.moving:  # other parameters do not learn
                    _set_gradient(self.moving[name], grad, self.share)
                del grad
            if steps_now:
                self.step_optimizer()
        learner.figures.add(local, labels)

    def apply_gradients(self, grads: dict[str, Tensor], local: Any, labels: Tensor) -> None:
        """One step with gradients that another has computed."""
        for name, grad in grads.items():
            _set_gradient(self.moving[name], grad, self.share)
        if self.share == 1.0 and not self.waits:
            self.step_optimizer()
        self.learner.figures.add(local, labels)

    def take_step(self) -> None:
        """Take the optimizer's step and drop the gradients, unless another sums them first."""
        if not self.waits:
            self.step_optimizer()

    def step_optimizer(self) -> None:
        """Take the optimizer's step and drop the gradients."""
        assert self.optimizer is not None
        if self.quick is not None and all(p.grad is not None for p in self.moving.values()):
            self.quick()
        else:
            self.optimizer.step()
            if self.plain:  # its state exists now
                self.quick, self.plain = self.quick_step(self.optimizer), False
            if self.constants is None:
                self.rate = rate_of(self.optimizer)
                self.constants = self._constants()
        for p in self.moving.values():
            p.grad = None

    def stop(self) -> None:
        """Drop the optimizer with its state."""
        super().stop()
        self.optimizer = self.scheduler = self.batch_rates = self.constants = None
        self._forget_quick_step()
        self.moving = {}

    def _constants(self) -> Any:
        """What a quick or recorded step takes as given: memory of parameters, the optimizer."""
        assert self.optimizer is not None
        followed = {"params", "initial_lr"} | ({"lr"} if self.rate is not None else set())
        settings = [
            (k, id(v) if isinstance(v, Tensor) else v)
            for group in self.optimizer.param_groups
            for k, v in group.items()
            if k not in followed
        ]
        values = (v for each in self.optimizer.state.values() for v in each.values())
        state = [id(v) for v in values if isinstance(v, Tensor)]
        memory = [p.untyped_storage()._cdata for p in self.learner.params.values()]
        block = self.learner.block
        modules = [m for top in block.modules for m in top.modules()] if self.watched else []
        return memory, settings, state, hooked(self.optimizer), [_settings(m) for m in modules]


class PendingSteps(OptimizerSteps):
    """Steps of a recurrent block whose states the next block reads window by window.

    The block computes its gradients meanwhile, and takes its step when the next block has ended.
    """

    pending: tuple[Any, ...] | None = None

    def apply(self, saved: Any, s: Tensor, labels: Tensor, output_unused: bool) -> None:
        """Let the gradients be computed while the next block reads the states."""
        self.learner.gradient.prepare_gradients(saved, s, self.learner.tensors)
        self.pending = saved, s, labels, False

    def finish(self) -> None:
        """Take the step, once the next block has read all states."""
        if self.pending is not None:
            pending, self.pending = self.pending, None
            super().apply(*pending)


class BackwardSteps(OptimizerSteps):
    """Steps of backprop on micro-batches, whose gradients autograd adds up itself."""

    def apply(self, saved: Any, s: Tensor, labels: Tensor, output_unused: bool) -> None:
        """One step downhill, after the last micro-batch."""
        learner = self.learner
        local = learner.gradient.backward(learner.params, saved, s, self.share)
        if self.share == 1.0:
            self.take_step()
        learner.figures.add(local, labels)


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
