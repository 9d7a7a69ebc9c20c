"""Optimizers: the default, plain SGD, one with two learning rates, and how a factory is called."""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tpsgd.errors import TpsgdError

# A factory with a true `by_name` gets the parameters in a dictionary.
OptimizerFactory = Callable[[Iterable[Tensor]], Optimizer]


class Adam(torch.optim.Adam):
    """torch's Adam without its decorators, which load torch.compile (a second) when first called.

    They keep the compiler out of these methods; and gradients, which `no_grad` does here.
    """

    add_param_group = unwrap(Optimizer.add_param_group)
    step = torch.no_grad()(unwrap(torch.optim.Adam.step))


class SGD(torch.optim.SGD):
    """torch's SGD without the decorators, as for Adam."""

    add_param_group = unwrap(Optimizer.add_param_group)
    step = torch.no_grad()(unwrap(torch.optim.SGD.step))


ELEMENTWISE = (  # each number is updated by itself
    *(Adam, SGD),
    *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam),
    *(torch.optim.Adamax, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.RMSprop),
)


REAL = (torch.float32, torch.float64)
_TORCH: Any = torch  # its fused kernels have no public name


def hooked(optimizer: Optimizer) -> bool:
    """Whether hooks run when it steps."""
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


FUSED = (Adam, SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)


def prefer_fused(optimizer: Optimizer) -> None:
    """Let torch take the step in one fused kernel on a CPU, unless the factory has chosen."""
    if type(optimizer) not in FUSED:
        return
    for group in optimizer.param_groups:
        chosen = group.get("fused") is not None or group.get("foreach") is not None
        special = any(group.get(k) for k in ("differentiable", "capturable"))
        real = all(p.device.type == "cpu" and p.dtype in REAL for p in group["params"])
        if not chosen and not special and real and not isinstance(group["lr"], Tensor):
            group["fused"] = True


def quick_step(optimizer: Optimizer) -> Callable[[], None] | None:
    """The step of a fused Adam or SGD without what surrounds it, once it has made its state.

    On a CPU the checks, hooks and lists of `Optimizer.step` take 50 to 100 microseconds, as long as
    a small block's whole gradient. None for other optimizers.
    """
    quick = _QUICK.get(type(optimizer))
    if quick is None or hooked(optimizer) or len(optimizer.param_groups) != 1:
        return None
    (group,) = optimizer.param_groups
    special = any(group.get(k) for k in ("differentiable", "capturable", "amsgrad"))
    on_cpu = all(p.device.type == "cpu" for p in group["params"])
    if not group.get("fused") or special or not on_cpu or isinstance(group["lr"], Tensor):
        return None
    return quick(optimizer, group)


def joint_step(optimizers: Sequence[Optimizer]) -> Callable[[], None] | None:
    """One step for several fused Adams with the same settings on a GPU, once they have states."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    alike = len(groups) == len(optimizers) > 1 and all(map(_on_gpu_fused, optimizers))
    states = [o.state[p] for o in optimizers for g in o.param_groups for p in g["params"]]
    if not alike or not all("step" in state for state in states):
        return None
    params, group = [p for g in groups for p in g["params"]], groups[0]
    first, second, steps = ([s[k] for s in states] for k in ("exp_avg", "exp_avg_sq", "step"))

    def step() -> None:
        (beta1, beta2), grads = group["betas"], [p.grad for p in params]
        _TORCH._foreach_add_(steps, 1)
        _TORCH._fused_adam_(
            *(params, grads, first, second, [], steps),
            lr=group["lr"], beta1=beta1, beta2=beta2, weight_decay=group["weight_decay"],
            eps=group["eps"], amsgrad=False, maximize=group["maximize"],
        )  # fmt: skip

    return step


def _on_gpu_fused(optimizer: Optimizer) -> bool:
    """Whether it is an Adam in fused kernels of a GPU and nothing else."""
    if type(optimizer) not in (Adam, torch.optim.Adam) or hooked(optimizer):
        return False
    return all(
        group.get("fused")
        and not (group.get("amsgrad") or group.get("decoupled_weight_decay"))
        and all(p.is_cuda for p in group["params"])
        for group in optimizer.param_groups
    )


def _quick_adam(optimizer: Optimizer, group: dict[str, Any]) -> Callable[[], None] | None:
    params = group["params"]
    states = [optimizer.state[p] for p in params]
    if not all("step" in state for state in states):
        return None
    decoupled = group.get("decoupled_weight_decay", False)
    kernel = _TORCH._fused_adamw_ if decoupled else _TORCH._fused_adam_
    first, second, steps = ([s[k] for s in states] for k in ("exp_avg", "exp_avg_sq", "step"))

    def step() -> None:
        (beta1, beta2), grads = group["betas"], [p.grad for p in params]
        for count in steps:  # few: faster than torch's own loop over a list
            count.add_(1)
        kernel(
            *(params, grads, first, second, [], steps),
            lr=group["lr"], beta1=beta1, beta2=beta2, weight_decay=group["weight_decay"],
            eps=group["eps"], amsgrad=False, maximize=group["maximize"],
        )  # fmt: skip

    return step


def _quick_sgd(optimizer: Optimizer, group: dict[str, Any]) -> Callable[[], None] | None:
    params = group["params"]
    moving = [optimizer.state[p].get("momentum_buffer") for p in params]
    if group["momentum"] and None in moving:
        return None
    moving = moving if group["momentum"] else []

    def step() -> None:
        _TORCH._fused_sgd_(
            *(params, [p.grad for p in params], moving),
            weight_decay=group["weight_decay"], momentum=group["momentum"], lr=group["lr"],
            dampening=group["dampening"], nesterov=group["nesterov"], maximize=group["maximize"],
            is_first_step=False,
        )  # fmt: skip

    return step


_QUICK: dict[type[Optimizer], Callable[..., Callable[[], None] | None]] = {
    Adam: _quick_adam,
    SGD: _quick_sgd,
    torch.optim.Adam: _quick_adam,
    torch.optim.AdamW: _quick_adam,
    torch.optim.SGD: _quick_sgd,
}


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
    if lr is not None and isinstance(factory, TwoRates):
        raise TpsgdError("two_rates sets the learning rates: leave lr out, or None for it")
    if lr is not None:
        for group in optimizer.param_groups:
            rate = group["lr"]
            group["lr"] = rate.fill_(lr) if isinstance(rate, Tensor) else lr
    prefer_fused(optimizer)
    return optimizer


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


OF_INPUT = re.compile(r"(weight|bias)_(x|ih_l\d+(_reverse)?)$")  # ours, and nn.RNN's


@dataclass(frozen=True)
class TwoRates:
    """Plain SGD with a rate for W_X, b_X and one for everything else; see `two_rates`."""

    x: float
    h: float
    by_name = True

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
