"""Optimizers: the default, plain SGD, one with two learning rates, and how a factory is called.

And the wrapper of a step whose learning rates change with every batch.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from tpsgd.common.errors import TpsgdError
from tpsgd.engine.solvers import SOLVERS
from tpsgd.maths.kernels.fused_optimizers import SGD, Adam, prefer_fused, rate_of
from tpsgd.maths.learning_rates import BatchRates, RateCurve
from tpsgd.saved.expected import OF_DEVICE
from tpsgd.train import Source, Step

# A factory with a true `by_name` gets the parameters in a dictionary.
OptimizerFactory = Callable[[Iterable[Tensor]], Optimizer]
LRSchedule = Callable[[Optimizer], LRScheduler] | RateCurve  # stepped by the epoch, or the batch


def make_optimizer(factory: Any, params: Mapping[str, Tensor], lr: float | None) -> Optimizer:
    """The factory's optimizer over these parameters; `lr` overrides its learning rate."""
    for p in params.values():
        p.requires_grad_(True)
    optimizer: Any = factory
    if callable(factory):
        named = getattr(factory, "by_name", False)
        optimizer = factory(params if named else list(params.values()))
    if not (callable(factory) and isinstance(optimizer, Optimizer)):
        raise TpsgdError(
            "optimizer must be a factory, params -> torch.optim.Optimizer, for example "
            "functools.partial(torch.optim.SGD, lr=0.1); it "
            f"{'gave' if callable(factory) else 'is'} {type(optimizer).__name__}"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TpsgdError("LBFGS evaluates its loss many times a step; choose another optimizer")
    if lr is not None and getattr(factory, "sets_rates", False):
        raise TpsgdError("two_rates sets the learning rates: leave lr out, or None for it")
    if lr is not None:
        for group in optimizer.param_groups:
            rate = group["lr"]
            group["lr"] = rate.fill_(lr) if isinstance(rate, Tensor) else lr
    prefer_fused(optimizer)
    return optimizer


def describe_optimizer(factory: Any, params: Mapping[str, Tensor], lr: float | None = None) -> str:
    """A solver with its penalty, or the optimizer that a factory makes, with its numbers.

    Examples:
        >>> from tpsgd import ridge, sgd
        >>> describe_optimizer(ridge(0.1), {}), describe_optimizer(sgd, {"w": torch.zeros(1)})[:14]
        ('Ridge(alpha=0.1)', "SGD [{'lr': 0.")
    """
    if isinstance(factory, SOLVERS):
        return repr(factory)
    optimizer = make_optimizer(factory, params, lr)
    groups = [
        {k: float(v) if isinstance(v, Tensor) else v for k, v in g.items() if k not in OF_DEVICE}
        for g in optimizer.param_groups
    ]
    return f"{type(optimizer).__name__} {groups}"


def adam(params: Iterable[Tensor]) -> Optimizer:
    """The default optimizer: Adam at 1e-3, one fused kernel."""
    params = list(params)
    if params[0].is_cuda:
        lr = torch.tensor(1e-3, device=params[0].device)  # a tensor, so that a graph can read it
        return Adam(params, lr=lr, fused=True, capturable=True)
    return Adam(params, lr=1e-3, fused=params[0].device.type == "cpu")


def sgd(params: Iterable[Tensor]) -> Optimizer:
    """Plain SGD at 0.1: no momentum, so no state in addition to the parameters."""
    return SGD(params, lr=0.1)


def momentum(params: Iterable[Tensor]) -> Optimizer:
    """SGD at 0.1 with Nesterov's momentum of 0.9, one fused kernel."""
    params, rate = list(params), 0.1
    if not params[0].is_cuda:
        return SGD(params, lr=rate, momentum=0.9, nesterov=True)
    lr = torch.tensor(rate, device=params[0].device)  # a tensor, so that a graph can read it
    return SGD(params, lr=lr, momentum=0.9, nesterov=True, fused=True)  # type: ignore


OF_INPUT = re.compile(r"(weight|bias)_(x|ih_l\d+(_reverse)?)$")  # ours, and nn.RNN's


@dataclass(frozen=True)
class TwoRates:
    """Plain SGD with a rate for W_X, b_X and one for everything else; see `two_rates`."""

    x: float
    h: float
    by_name = True
    sets_rates = True

    @property
    def __name__(self) -> str:
        return f"two_rates(x={self.x:g}, h={self.h:g})"

    def __call__(self, params: Mapping[str, Tensor]) -> Optimizer:
        """An optimizer over parameters by name."""
        of_input = [p for name, p in params.items() if OF_INPUT.search(name)]
        others = [p for name, p in params.items() if not OF_INPUT.search(name)]
        groups = [{"params": of_input, "lr": self.x}, {"params": others, "lr": self.h}]
        return SGD([group for group in groups if group["params"]], lr=self.h)


def two_rates(x: float, h: float) -> Any:
    """SGD for recurrent blocks whose input and state weights need different learning rates.

    A token's column of W_X only gets a gradient when the token occurs, so with tokens `x` must be
    much larger than `h`.

    Args:
        x: the rate of W_X and b_X.
        h: the rate of W_H and b_H, and of other blocks' parameters.

    Examples:
        >>> import tpsgd
        >>> x, y = torch.randint(0, 50, (64, 7)), torch.arange(64) % 2
        >>> model = torch.nn.Sequential(tpsgd.Recurrent(50, 16), torch.nn.Linear(16, 2))
        >>> optimizers = [tpsgd.two_rates(x=50.0, h=0.5), tpsgd.ridge()]
        >>> run = tpsgd.fit(model, (x, y), optimizer=optimizers, epochs=1)
    """
    if not (0 <= x < math.inf and 0 <= h < math.inf):
        raise TpsgdError(f"learning rates must be numbers, 0 or more, got x={x} and h={h}")
    return TwoRates(x, h)


def follow_curve(step: Step, learners: Sequence[Any], source: Source) -> Step:
    """The step with learning rates that change before every batch, where blocks have a curve."""
    following = [x.updater for x in learners if x.learning and has_curve(x)]
    if not following:
        return step
    batches, block_epochs = source.steps, [x.epochs for x in learners if x.updater in following]
    curve = following[0].learner.settings.lr_schedule
    if not batches:
        raise TpsgdError(
            f"{curve} needs the number of batches in an epoch, which this data does not tell: give "
            "it a length (__len__), or take an lr_schedule that is stepped by the epoch"
        )
    optimizers = [updater.optimizer for updater in following]
    rates = BatchRates(curve, optimizers, [epochs * batches for epochs in block_epochs])
    for updater in following:
        updater.batch_rates = rates
    groups = [
        (x, x.optimizer.param_groups[0]) for x in following if rate_of(x.optimizer) is not None
    ]

    def at_its_rate(learners: Sequence[Any], batch: Any) -> None:
        if batch.last:  # the optimizers' steps are taken in it
            rates.advance()
            for updater, group in groups:
                updater.rate = group["lr"]
        step(learners, batch)

    return at_its_rate


def has_curve(learner: Any) -> bool:
    """Whether an optimizer's learning rate changes with every batch; solvers have none."""
    curve = isinstance(learner.settings.lr_schedule, RateCurve)
    return learner.updater.optimizer is not None and curve
