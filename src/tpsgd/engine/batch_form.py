"""What a batch is when it reaches the model: its form, and the pieces that it may come in."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class MicroBatch(NamedTuple):
    """A batch, or a share of one whose gradients are to be added to those of the others."""

    x: Any
    labels: Tensor
    share: float = 1.0
    last: bool = True  # of its batch


Batches = Iterator[MicroBatch]


@dataclass(frozen=True)
class Form:
    """How a batch must look when it reaches the model."""

    device: torch.device
    dtype: torch.dtype
    batch_size: int
    seeds: tuple[int, ...]  # one per restart; more than one means stacked batches
    channels_last: bool = False
    whole_numbers: bool = False  # the first layer looks things up (an embedding)
    skip_single: bool = False  # a last batch of one sample, which batch norm cannot take
    tokens: int = 0  # whole numbers (batch, steps) stay such; there are so many of them
    in_chunks: bool = False  # sequences are gathered a few time steps at a time
    ragged: bool = False  # sequences differ in length
    micro_batch: int | None = None  # at most so many samples at once; a batch comes in pieces
    precision: torch.dtype | None = None  # of what is computed, if that is not the parameters'

    @property
    def stacked(self) -> bool:
        """Whether a batch holds one batch per restart."""
        return len(self.seeds) > 1

    @property
    def numbers(self) -> torch.dtype:
        """What samples are made of when they reach the model."""
        return self.precision or self.dtype

    @staticmethod
    def may_be_channels_last(modules: Iterable[nn.Module]) -> bool:
        """Whether channels last pays (there are convolutions) and can do no harm.

        A module of the user's own may well rely on `view`, so only torch's modules, and the
        library's own, get that layout.
        """
        modules = list(modules)
        return any(isinstance(m, nn.Conv2d) for m in modules) and all(
            type(m).__module__.startswith(("torch.nn", "tpsgd.")) for m in modules
        )

    def skips(self, size: int) -> bool:
        """Whether a training batch of this size is left out."""
        return self.skip_single and size == 1

    def cut(self, size: int) -> list[slice]:
        """A batch of this size as pieces, all about equally large."""
        count = 1 if self.micro_batch is None else -(-size // self.micro_batch)
        if self.skip_single:
            count = max(1, min(count, size // 2))
        ends = [size * (i + 1) // count for i in range(count)]
        return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]

    def looks_up(self, x: Any, leading: int = 1) -> bool:
        """Whether x, with so many dimensions of samples, holds things to look up."""
        whole = not x.is_floating_point()
        return whole and (self.whole_numbers or (self.tokens > 1 and x.dim() == leading + 1))

    def __call__(self, x: Any, leading: int = 1) -> Any:
        """x on the device, in the model's number format and layout."""
        if self.looks_up(x, leading):
            return x.to(self.device, torch.long if self.tokens else x.dtype)
        if self.channels_last and x.dim() == 4:
            return x.to(self.device, self.numbers, memory_format=torch.channels_last)
        return x.to(self.device, self.numbers)

    def first(self, x: Any) -> Any:
        """The first sample of a batch."""
        return x[:, :1] if self.stacked else x[:1]


WORTH_CUTTING = 1 << 20  # bytes of a batch that is better taken a part at a time
