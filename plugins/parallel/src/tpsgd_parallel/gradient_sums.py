"""Gradients summed over the ranks: small blocks that follow one another share a message.

A message costs time besides that of its bytes. A block's gradients therefore wait for those of the
next blocks until there are `MESSAGE_BYTES`, or until the batch has passed all blocks.
"""

from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from tpsgd_parallel.ranks import Ranks

MESSAGE_BYTES = 1 << 20


class Message:
    """Gradients of some parameters that are summed together."""

    def __init__(self) -> None:
        self.params: list[Tensor] = []
        self.work: Any = None  # the sum, once it has begun
        self.total = torch.empty(0)

    def begin(self, ranks: Ranks) -> None:
        """Begin to sum the gradients with those of the other ranks."""
        self.total = torch.cat([_gradient(p).reshape(-1) for p in self.params])
        for p in self.params:
            if p.is_contiguous():
                p.grad = None  # its memory is free while the sum goes on
        self.work = ranks.begin_sum(self.total)

    def end(self) -> None:
        """Wait for the sums, and give them to the parameters; later calls do nothing."""
        if self.work is None:
            return
        self.work.wait()
        self.work = None
        sums = self.total.split([p.numel() for p in self.params])
        for p, values in zip(self.params, sums, strict=True):
            if p.is_contiguous():
                p.grad = values.view(p.shape)
            else:  # fused optimizers need gradients with the strides of the parameter
                _gradient(p).copy_(values.view(p.shape))


class GradientSums:
    """The messages of a rank; all ranks begin the same ones in the same order."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.filling: Message | None = None

    def add(self, params: list[Tensor]) -> list[Message]:
        """Add the gradients of a block to messages; the sum of one with enough bytes begins."""
        messages = []
        for form, group in groupby(params, _form):  # one number format in a message
            if self.filling is None or _form(self.filling.params[0]) != form:
                self.begin()
                self.filling = Message()
            messages.append(self.filling)
            self.filling.params += group
            if sum(p.nbytes for p in self.filling.params) >= MESSAGE_BYTES:
                self.begin()
        return messages

    def begin(self) -> None:
        """Begin the sum of what waits for more."""
        if self.filling is not None:
            self.filling.begin(self.ranks)
            self.filling = None

    def end(self, message: Message) -> None:
        """Wait for the sums of a message."""
        if message is self.filling:
            self.begin()
        message.end()


def _form(p: Tensor) -> tuple[torch.dtype, torch.device]:
    return p.dtype, p.device


def _gradient(p: Tensor) -> Tensor:
    """A parameter's gradient; zeros if the rank has no samples in this batch."""
    if p.grad is None:
        p.grad = torch.zeros_like(p)
    return p.grad
