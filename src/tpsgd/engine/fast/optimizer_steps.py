"""Steps of torch's optimizers by their fused kernels, without what surrounds these.

On a CPU the checks, hooks and lists of `Optimizer.step` take 50 to 100 microseconds, as long as a
small block's whole gradient. On a GPU a kernel for a single block leaves most of the device idle.
The state stays in the optimizer, so its state dict is torch's.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from tpsgd.maths.kernels.fused_optimizers import ADAMS, hooked, rate_of
from tpsgd.maths.kernels.torch_internals import fused_kernel, internal
from tpsgd.train import Step

QuickStep = Callable[[], None]


def quick_step(optimizer: Optimizer) -> QuickStep | None:
    """The step of a fused Adam or SGD on a CPU, once it has its state; None for others."""
    if hooked(optimizer) or rate_of(optimizer) is None:
        return None
    (group,) = optimizer.param_groups
    special = any(group.get(k) for k in ("differentiable", "capturable", "amsgrad"))
    if special or any(p.device.type != "cpu" for p in group["params"]):
        return None
    if type(optimizer) in ADAMS:
        return _adam_step([optimizer])
    return None if isinstance(optimizer, torch.optim.Adagrad) else _sgd_step(optimizer)


def joint_step(optimizers: Sequence[Optimizer]) -> QuickStep | None:
    """One step for several fused Adams with the same settings on a GPU, once they have states."""
    joinable = len(optimizers) > 1 and all(map(_is_fused_adam_on_gpu, optimizers))
    return _adam_step(optimizers) if joinable else None


def _is_fused_adam_on_gpu(optimizer: Optimizer) -> bool:
    if type(optimizer) not in ADAMS or hooked(optimizer) or len(optimizer.param_groups) != 1:
        return False
    (group,) = optimizer.param_groups
    on_gpu = all(p.is_cuda for p in group["params"])
    return bool(group.get("fused")) and on_gpu and not group.get("amsgrad")


def _adam_step(optimizers: Sequence[Optimizer]) -> QuickStep | None:
    """Adam's kernel on the parameters of all these optimizers, with the settings of the first."""
    group = optimizers[0].param_groups[0]
    pairs = [(p, o.state[p]) for o in optimizers for p in o.param_groups[0]["params"]]
    if not all("step" in state for _, state in pairs):
        return None
    params, states = [p for p, _ in pairs], [state for _, state in pairs]
    first, second, counts = ([s[k] for s in states] for k in ("exp_avg", "exp_avg_sq", "step"))
    decoupled = group.get("decoupled_weight_decay", False)
    numbers = {"lr": 0.0, "beta1": 0.0, "beta2": 0.0, "weight_decay": 0.0, "eps": 0.0}
    name = "_fused_adamw_" if decoupled else "_fused_adam_"
    kernel = fused_kernel(name, 6, **numbers, amsgrad=False, maximize=False)
    on_gpu = params[0].is_cuda
    add = internal("_foreach_add_") if on_gpu else None
    if kernel is None or (on_gpu and add is None):
        return None

    def step() -> None:
        (beta1, beta2), grads = group["betas"], [p.grad for p in params]
        if add is not None:
            add(counts, 1)
        else:  # few: faster than torch's own loop over a list
            for count in counts:
                count.add_(1)
        kernel(
            *(params, grads, first, second, [], counts),
            lr=group["lr"], beta1=beta1, beta2=beta2, weight_decay=group["weight_decay"],
            eps=group["eps"], amsgrad=False, maximize=group["maximize"],
        )  # fmt: skip

    return step


def _sgd_step(optimizer: Optimizer) -> QuickStep | None:
    (group,) = optimizer.param_groups
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


def together(step: Step) -> Step:
    """The step with one kernel for the optimizers of all blocks, once all have their gradients.

    On a GPU, a kernel for a single block leaves most of the device idle.
    """

    def with_joint_optimizers(learners: Sequence[Any], batch: Any) -> None:
        waiting = [x for x in learners if x.learning and getattr(x, "slices", 0) == 1]
        for learner in waiting:
            learner.waits = True
        step(learners, batch)
        for learner in waiting:
            learner.waits = False
        if batch.last:
            _step_together(waiting)

    return with_joint_optimizers


def _step_together(learners: Sequence[Any]) -> None:
    """Take the steps of several optimizers, in one kernel where they have the same settings."""
    ready = [x for x in learners if all(p.grad is not None for p in x.moving.values())]
    alike = [x for x in ready if x.settings == ready[0].settings]
    step = joint_step([x.optimizer for x in alike])
    if step is not None:
        step()
        for learner in alike:
            learner.drop_gradients()
    for learner in learners:
        if step is None or learner not in alike:
            learner.apply_gradients()
