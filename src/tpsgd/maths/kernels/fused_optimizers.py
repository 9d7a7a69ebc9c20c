"""torch's optimizers: fused kernels where torch has them, and what can be said of each kind."""

from inspect import unwrap

import torch
from torch import Tensor
from torch.optim import Optimizer

REAL = (torch.float32, torch.float64)


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
    """The one rate that its fused kernels get as a number with every step; None: it has none.

    For any other optimizer a learning rate is one of the numbers of its Python code.
    """
    groups = optimizer.param_groups
    if type(optimizer) not in FUSED or not all(group.get("fused") for group in groups):
        return None
    rates = [group["lr"] for group in groups]
    same = not any(isinstance(rate, Tensor) or rate != rates[0] for rate in rates)
    return rates[0] if same else None
