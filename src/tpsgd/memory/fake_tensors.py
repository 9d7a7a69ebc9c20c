"""Fake tensors for a rehearsal, and a count of what they would have taken."""

from functools import cache
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from tpsgd.common.errors import TpsgdError
from tpsgd.maths.kernels.torch_internals import internal
from tpsgd.memory.meter import LiveBytes

try:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
except ImportError:  # they are not public: then nothing can be planned, and training goes on
    FakeTensor = FakeTensorMode = None


LSTM = "aten::mkldnn_rnn_layer"  # of oneDNN, on a CPU
_without_modes = internal("utils._python_dispatch._disable_current_modes")


class CountedProducts(LiveBytes):
    """Also counts the multiplications of matrix products and convolutions."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = _written(func, args, kwargs or {})
        if result is None:
            result = super().__torch_dispatch__(func, types, args, kwargs)
        operations = flop_registry.get(func._overloadpacket)
        if operations is not None:  # a multiplication and an addition are two of them
            self.products += operations(*args, **(kwargs or {}), out_val=result) // 2
        return result


def need_fake_tensors() -> None:
    """Refuse to plan where this torch has no fake tensors."""
    if FakeTensorMode is None:
        raise TpsgdError(
            f"torch {torch.__version__} has no fake tensors of the kind this version of tpsgd "
            "knows: memory cannot be planned, nor kept within a budget"
        )


class QuickFakeMode(FakeTensorMode or object):  # type: ignore[misc]
    """Fake tensors; operators that write into an argument return it without a look at the rest."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        written = _written(func, args, kwargs or {})
        if written is not None:
            return written
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func._schema.name == LSTM and torch.is_grad_enabled():  # torch counts none for it
            sizes = tuple(tuple(t.shape) for t in args[:7])
            nbytes = _lstm_workspace(sizes, args[7], tuple(args[8]), *args[9:])
            result = (*result[:3], result[0].new_empty(nbytes, dtype=torch.uint8))
        return result


@cache
def _lstm_workspace(sizes: Any, *settings: Any) -> int:
    """The bytes that oneDNN stores for the gradients of an LSTM; one pass over zeros tells."""
    if _without_modes is None:
        return 0
    with _without_modes(), torch.enable_grad():
        tensors = [torch.zeros(size) for size in sizes]
        return torch.ops.aten.mkldnn_rnn_layer(*tensors, *settings)[3].nbytes


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The fake tensor that an operator writes into, or its device; None for other operators."""
    if func is torch.ops.prim.device.default:
        return getattr(args[0], "fake_device", None)
    target = kwargs.get("out") if "out" in kwargs else args[0] if _in_place(func) else None
    if FakeTensor is None or not isinstance(target, FakeTensor):
        return None
    return target if target.numel() else None


@cache
def _in_place(func: Any) -> bool:
    """Whether an operator changes the values of its first argument and nothing else."""
    name = func._schema.name
    plain = name.endswith("_") and not name.endswith("__")
    return plain and torch.Tag.inplace_view not in func.tags and len(func._schema.returns) == 1
