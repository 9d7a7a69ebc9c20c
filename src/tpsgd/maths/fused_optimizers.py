"""torch's optimizers by their fused kernels, without what surrounds these.

On a CPU the checks, hooks and lists of `Optimizer.step` take 50 to 100 microseconds, as long as a
small block's whole gradient. On a GPU a kernel for a single block leaves most of the device idle.
The state stays in the optimizer, so its state dict is torch's.
"""

from collections.abc import Callable, Sequence
from inspect import unwrap

import torch
from torch import Tensor
from torch.optim import Optimizer

from tpsgd.maths.torch_internals import fused_kernel, internal

REAL = (torch.float32, torch.float64)
QuickStep = Callable[[], None]


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


ADAMS = (Adam, torch.optim.Adam, torch.optim.AdamW)
FUSED = (*ADAMS, SGD, torch.optim.SGD, torch.optim.Adagrad)
ELEMENTWISE = (  # each number is updated by itself
    *(*FUSED, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax),
    *(torch.optim.Adadelta, torch.optim.RMSprop),
)


def hooked(optimizer: Optimizer) -> bool:
    """Whether hooks run when it steps."""
    names = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"
    return any(getattr(optimizer, name, True) for name in names)


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


def rate_of(optimizer: Optimizer) -> float | None:
    """The learning rate that its fused kernel gets as a number with every step; None: it has none.

    For any other optimizer a learning rate is one of the numbers of its Python code.
    """
    groups = optimizer.param_groups
    if type(optimizer) not in FUSED or len(groups) != 1 or not groups[0].get("fused"):
        return None
    rate = groups[0]["lr"]
    return None if isinstance(rate, Tensor) else rate


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
