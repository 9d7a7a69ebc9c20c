"""Computing in a lower precision than the parameters have.

Parameters, and what an objective learns, stay as they are and are rounded where they are used;
their gradients have the precision in which they were computed.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from tpsgd.nets.padded import through


def lowered(device: torch.device, precision: torch.dtype | None) -> AbstractContextManager[Any]:
    """A context in which modules compute in this precision; None changes nothing."""
    return nullcontext() if precision is None else torch.autocast(device.type, precision)


@contextmanager
def without_autocast() -> Iterator[None]:
    """A context in which a `torch.autocast` around it has no effect, as decorator too.

    Without its cache, which outlives every context inside this one: it would keep old weights.
    """
    off: Any = {"enabled": False, "cache_enabled": False}
    with torch.autocast("cpu", **off), torch.autocast("cuda", **off):
        yield


def apply(modules: Iterable[nn.Module], x: Any, precision: torch.dtype | None) -> Any:
    """x after these modules, in this precision."""
    with lowered(x.device, precision):
        for module in modules:
            x = through(module, x)
    return x if precision is None else x.to(precision)


def rounded(
    precision: torch.dtype | None, y: Tensor, s: Tensor, tensors: tuple[Any, ...] = ()
) -> tuple[Any, ...]:
    """An objective's arguments in one number format.

    In a lower precision that is float32 for vectors, which are small, and the precision itself for
    feature maps; the tensors that an objective multiplies are rounded too, its vectors are not.
    """
    if precision is None:
        return (y, s, *tensors)
    dtype = torch.float32 if y.dim() == 2 else precision
    s = s.to(dtype) if s.is_floating_point() else s
    return (y.to(dtype), s, *(in_format(t, dtype) for t in tensors))


def in_format(t: Any, dtype: torch.dtype) -> Any:
    """An objective's tensor in a number format; vectors and noise keys stay as they are."""
    stays = isinstance(t, Tensor) and (t.dim() == 1 or t.dtype is torch.int64)
    return t if stays else t.to(dtype)
