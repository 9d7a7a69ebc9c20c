"""`LastGoodStep`: what a stream goes back to when a step breaks its weights."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from tpsgd.streams.online import OnlineNet

MOST = 64 << 20  # bytes; copies of more would slow every step down

Copy = list[tuple[list[Tensor], Any]]  # of each net: its model's tensors, its state


class LastGoodStep:
    """Copies of the weights and the state of nets, from before their last two steps.

    The loss of a step is that of the weights before it. So a loss that is not finite says that the
    step before has broken the weights, and the copy from before that one is good.
    """

    def __init__(self, nets: Sequence[OnlineNet]) -> None:
        self.nets = nets
        self.good: Copy | None = None  # gave a finite loss
        self.newest: Copy | None = None
        self.spare: Copy | None = None  # an older one, whose memory is used again

    @torch.no_grad()
    def keep(self) -> None:
        """Copy what a step is about to change."""
        present = [(net.tensors(), net.current_state()) for net in self.nets]
        if sum(t.nbytes for t in tensors_in(present)) > MOST:
            self.forget()
        else:
            self.newest, self.spare = copied(present, self.spare), None

    def confirm(self) -> None:
        """The loss of the step was finite."""
        self.good, self.newest, self.spare = self.newest, None, self.good

    def forget(self) -> None:
        """Drop the copies: the nets have other shapes, or are too large."""
        self.good = self.newest = self.spare = None

    def undo(self) -> None:
        """Go back to before the step, which did not end."""
        self._restore(self.newest)
        self.newest = None

    def restore(self) -> str:
        """Go back to weights that gave a finite loss; says in words where the stream is now."""
        copy = self.good or self.newest
        when = "the step before" if self.good else "this step"
        self._restore(copy)
        self.forget()
        if copy is None:
            return "the weights are lost (those of more than 64 MB are not copied)"
        return f"the model and the stream are as they were before {when}"

    @torch.no_grad()
    def _restore(self, copy: Copy | None) -> None:
        for net, (tensors, state) in zip(self.nets, copy or [], strict=copy is not None):
            for tensor, value in zip(net.tensors(), tensors, strict=True):
                tensor.copy_(value)
            net.learners, net.state = [], state


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in nested dictionaries, lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item)


def copied(value: Any, spare: Any = None) -> Any:
    """Nested dictionaries, lists and tuples with copies of the tensors in them.

    The copies take the memory of the tensors in `spare`, an older copy, where these are alike.

    Examples:
        >>> x = torch.zeros(2)
        >>> copy = copied({"sums": (x, 3)})
        >>> x += 1
        >>> copy
        {'sums': (tensor([0., 0.]), 3)}
    """
    if isinstance(value, Tensor):
        return spare.copy_(value) if _alike(value, spare) else value.detach().clone()
    if isinstance(value, dict):
        old = spare if isinstance(spare, dict) else {}
        return {key: copied(item, old.get(key)) for key, item in value.items()}
    if type(value) in (list, tuple):
        same = type(spare) is type(value) and len(spare) == len(value)
        return type(value)(map(copied, value, spare if same else [None] * len(value)))
    return value


def _alike(a: Tensor, b: Any) -> bool:
    return (
        isinstance(b, Tensor)
        and (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)
        and a.stride() == b.stride()
    )
