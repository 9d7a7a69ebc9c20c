"""Steps of torch's optimizers by their fused kernels, without what surrounds these.

On a CPU the checks, hooks and lists of `Optimizer.step` take 50 to 100 microseconds, as long as a
small block's whole gradient. The state stays in the optimizer, so its state dict is torch's.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from tpsgd.maths.kernels.fused_optimizers import ADAMS, hooked, rate_of
from tpsgd.maths.kernels.torch_internals import fused_kernel

QuickStep = Callable[[], None]


def quick_step(optimizer: Optimizer) -> QuickStep | None:
    """The step of a fused Adam or SGD on a CPU, once it has its state; None for others."""
    if hooked(optimizer) or rate_of(optimizer) is None:
        return None
    steps = [_step_of_group(optimizer, group) for group in optimizer.param_groups]
    quick = [step for step in steps if step is not None]
    if len(quick) < len(steps):
        return None
    if len(quick) == 1:
        return quick[0]

    def step() -> None:
        for each in quick:
            each()

    return step


def _step_of_group(optimizer: Optimizer, group: dict[str, Any]) -> QuickStep | None:
    special = any(group.get(k) for k in ("differentiable", "capturable", "amsgrad"))
    if special or any(p.device.type != "cpu" for p in group["params"]):
        return None
    if type(optimizer) in ADAMS:
        return _adam_step(optimizer, group)
    return None if isinstance(optimizer, torch.optim.Adagrad) else _sgd_step(optimizer, group)


def _adam_step(optimizer: Optimizer, group: dict[str, Any]) -> QuickStep | None:
    params = group["params"]
    states = [optimizer.state[p] for p in params]
    if not all("step" in state for state in states):
        return None
    first, second, counts = ([s[k] for s in states] for k in ("exp_avg", "exp_avg_sq", "step"))
    decoupled = group.get("decoupled_weight_decay", False)
    numbers = {"lr": 0.0, "beta1": 0.0, "beta2": 0.0, "weight_decay": 0.0, "eps": 0.0}
    name = "_fused_adamw_" if decoupled else "_fused_adam_"
    kernel = fused_kernel(name, 6, **numbers, amsgrad=False, maximize=False)
    if kernel is None:
        return None

    def step() -> None:
        (beta1, beta2), grads = group["betas"], [p.grad for p in params]
        for count in counts:  # few: faster than torch's own loop over a list
            count.add_(1)
        kernel(
            *(params, grads, first, second, [], counts),
            lr=group["lr"], beta1=beta1, beta2=beta2, weight_decay=group["weight_decay"],
            eps=group["eps"], amsgrad=False, maximize=group["maximize"],
        )  # fmt: skip

    return step


def _sgd_step(optimizer: Optimizer, group: dict[str, Any]) -> QuickStep | None:
    params = group["params"]
    momenta = [optimizer.state[p].get("momentum_buffer") for p in params]
    if group["momentum"] and None in momenta:
        return None
    momenta = momenta if group["momentum"] else []
    numbers = {"weight_decay": 0.0, "momentum": 0.0, "lr": 0.0, "dampening": 0.0}
    flags = {"nesterov": False, "maximize": False, "is_first_step": False}
    kernel = fused_kernel("_fused_sgd_", 3, **numbers, **flags)
    if kernel is None:
        return None

    def step() -> None:
        kernel(
            *(params, [p.grad for p in params], momenta),
            weight_decay=group["weight_decay"], momentum=group["momentum"], lr=group["lr"],
            dampening=group["dampening"], nesterov=group["nesterov"], maximize=group["maximize"],
            is_first_step=False,
        )  # fmt: skip

    return step
