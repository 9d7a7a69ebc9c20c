"""Names of torch that are not public, for speed: a release without one costs time, not results."""

import warnings
from functools import cache, reduce
from typing import Any

import torch


def internal(name: str) -> Any:
    """torch's internal of this dotted name; None, and one warning, where this torch has none.

    Examples:
        >>> internal("_fused_adam_") is torch._fused_adam_
        True
    """
    try:
        return reduce(getattr, name.split("."), torch)
    except AttributeError:
        _warn(name)
        return None


def fused_kernel(name: str, lists: int, **numbers: Any) -> Any:
    """A fused optimizer's kernel that takes lists of tensors and these numbers, or None."""
    kernel = internal(name)
    if kernel is None:
        return None
    try:  # without tensors nothing is computed, but the arguments are checked
        kernel(*([] for _ in range(lists)), **numbers)
    except TypeError:
        _warn(name)
        return None
    except RuntimeError:  # there are no tensors
        pass
    return kernel


@cache
def _warn(name: str) -> None:
    warnings.warn(
        f"torch {torch.__version__} has no torch.{name} of the kind this version of tpsgd knows: "
        "training gives the same results, more slowly",
        stacklevel=3,
    )
