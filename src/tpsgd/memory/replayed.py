"""Functions that a rehearsal goes through once, and whose memory it allocates after that."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tpsgd.engine.batches import ThroughBlocks
from tpsgd.memory.fake_tensors import CountedProducts
from tpsgd.protocols import Source


@dataclass(frozen=True)
class RecordedCall:
    """What a call returned, and the most bytes that were alive in it beyond those before it."""

    outputs: list[tuple[Any, ...]]  # shape, strides, type and device of each
    rise: int
    workspace: int
    products: int


class Replayed:
    """A function of a tensor: for shapes that it has seen, a few operators replace it."""

    def __init__(self, function: Callable[[Any], Any], live: CountedProducts) -> None:
        self.function, self.live = function, live
        self.calls: dict[Any, RecordedCall] = {}

    def __call__(self, x: Any) -> Any:
        """What the function returns."""
        if not self.live.watching or not isinstance(x, Tensor):
            return self.function(x)
        key = _layout(x)
        if key in self.calls:
            return self._replay(self.calls[key])
        return self._record(key, x)

    def _record(self, key: Any, x: Tensor) -> Any:
        live = self.live
        peak, start, products = (
            (live.peak, live.at_peak, live.extra_at_peak),
            live.live,
            live.products,
        )
        live.begin()
        result = self.function(x)
        workspace = live.extra_at_peak
        rise = live.peak - workspace - start
        if peak[0] >= live.peak:
            live.peak, live.at_peak, live.extra_at_peak = peak
        outputs = result if isinstance(result, tuple) else (result,)
        if all(isinstance(t, Tensor) and not _same_storage(t, x) for t in outputs):
            layouts = [_layout(t) for t in outputs]
            self.calls[key] = RecordedCall(layouts, rise, workspace, live.products - products)
        return result

    def _replay(self, call: RecordedCall) -> Any:
        live = self.live
        start = live.live
        outputs = tuple(
            torch.empty_strided(shape, strides, dtype=dtype, device=device)
            for shape, strides, dtype, device in call.outputs
        )
        others = call.rise - (live.live - start)
        temporary = torch.empty(others, dtype=torch.uint8) if others > 0 else None
        live.note(call.workspace)
        del temporary
        live.products += call.products
        return outputs[0] if len(outputs) == 1 else outputs


def _layout(t: Tensor) -> tuple[Any, ...]:
    return tuple(t.shape), t.stride(), t.dtype, t.device


def _same_storage(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata


def through_blocks(
    source: Source, functions: tuple[Any, ...], at_a_time: int | None, live: CountedProducts
) -> ThroughBlocks:
    """Frozen blocks whose outputs are gone through once."""
    replayed = (f if isinstance(f, Replayed) else Replayed(f, live) for f in functions)
    blocks = ThroughBlocks(source, tuple(replayed), at_a_time)
    blocks.outputs = Replayed(blocks.outputs, live)  # type: ignore[method-assign]
    return blocks
