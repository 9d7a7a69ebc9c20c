"""Whether a state that was read from a file fits the object that goes on from it.

The kernels of optimizers trust their state: a tensor of another shape makes them write beyond its
memory. So a state is compared with one that was made anew before anything takes it. A state that
does not fit is a ValueError, which `checkpoint.readable` turns into a sentence about the folder.
"""

import copy
import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tpsgd.common.errors import shortened

OF_DEVICE = ("params", "fused", "foreach", "capturable")  # what an optimizer has for its device


def check_number(name: str, value: Any, least: float = -math.inf, whole: bool = False) -> Any:
    """The value, if it is a finite number, not less than `least`.

    Examples:
        >>> check_number("epoch", 3, least=0, whole=True)
        3
        >>> check_number("epoch", "3")
        Traceback (most recent call last):
        ValueError: epoch cannot be '3'
    """
    right = type(value) is int or (type(value) is float and math.isfinite(value) and not whole)
    if not right or not least <= value < 2**63:
        raise _unfit(name, value)
    return value


check_count = partial(check_number, least=0, whole=True)


def check_tensor(name: str, value: Any, like: Tensor) -> Tensor:
    """The value, if it is a tensor with the shape and the number format of another one."""
    if not isinstance(value, Tensor) or (value.shape, value.dtype) != (like.shape, like.dtype):
        form = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
        expected = f"{like.dtype} {tuple(like.shape)}"
        raise ValueError(f"{name} is {shortened(form)} in place of {expected}")
    return value


def check_counter(name: str, value: Any) -> Tensor:
    """The value, if it is a tensor with one real number that is not negative."""
    if not isinstance(value, Tensor) or value.numel() != 1 or value.is_complex():
        raise ValueError(f"{name} must be a tensor of one number")
    check_number(name, float(value), least=0)
    return value


def checked_state(optimizer: Optimizer, saved: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """The state of each parameter in an optimizer's state dict, if it fits the optimizer.

    A parameter that never had a gradient has none: it gets that of a step without one, because
    fused kernels want the state of all parameters or of none.
    """
    for group, before in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        if group.keys() != before.keys():
            raise _unfit("an optimizer's settings", list(before))
        for name in group.keys() - set(OF_DEVICE):
            _check_setting(name, before[name], group[name])
    params = [p for group in optimizer.param_groups for p in group["params"]]
    if unknown := saved["state"].keys() - set(range(len(params))):
        raise _unfit("an optimizer's parameters", unknown)
    states = {}
    for number, parameter in enumerate(params):
        values, fresh = saved["state"].get(number), state_after_a_step(optimizer, parameter)
        if values and fresh is not None and values.keys() != fresh.keys():
            raise _unfit("an optimizer's state", list(values))
        for name, value in (values or {}).items():
            _check_state(name, value, parameter, (fresh or {}).get(name))
        states[number] = values or fresh or {}
    return states


def state_after_a_step(optimizer: Optimizer, parameter: Tensor) -> dict[str, Any] | None:
    """What an optimizer has for a parameter once it has stepped; None if that cannot be tried.

    A copy of the optimizer steps, with zeros in place of the parameter and nothing for the others.
    """
    twins: dict[int, Any] = {}
    for group in optimizer.param_groups:
        twins |= {id(p): torch.nn.Parameter(torch.empty(0), False) for p in group["params"]}
    twin = twins[id(parameter)] = torch.nn.Parameter(torch.zeros_like(parameter))
    twin.grad = torch.zeros_like(parameter)
    try:
        stepped: Any = copy.deepcopy(optimizer, twins)
        stepped.step()
    except Exception:  # an optimizer with attributes of its own, or one that needs a closure
        return None
    return dict(stepped.state[twin])


def _check_setting(name: str, value: Any, fresh: Any) -> None:
    """Refuse a setting of another kind; numbers may differ, since learning rates change.

    A learning rate may be a tensor on one device and a number on another.
    """
    value, fresh = (v.item() if isinstance(v, Tensor) else v for v in (value, fresh))
    if type(fresh) in (int, float):
        check_number(name, value, least=0 if fresh >= 0 else -math.inf)
        if 0 <= fresh < 1 <= value and "lr" not in name:
            raise _unfit(name, value)
    elif type(value) is type(fresh) and isinstance(fresh, (list, tuple)):
        for inner, of_fresh in zip(value, fresh, strict=True):
            _check_setting(name, inner, of_fresh)
    elif type(value) is not type(fresh) or value != fresh:
        raise _unfit(name, value)


def _check_state(name: str, value: Any, parameter: Tensor, fresh: Any) -> None:
    """Refuse a value of another form than the fresh one; without one, of an unlikely form."""
    if fresh is None and isinstance(value, Tensor) and value.numel() > 1:
        fresh = parameter
    if isinstance(fresh, Tensor) and (fresh.dim() or fresh.shape == parameter.shape):
        check_tensor(name, value, fresh)
    elif isinstance(fresh, Tensor) or isinstance(value, Tensor):
        check_counter(name, value)
    elif type(fresh) in (int, float):
        check_number(name, value)


def _unfit(name: str, value: Any) -> ValueError:
    return ValueError(f"{name} cannot be {shortened(repr(value))}")
