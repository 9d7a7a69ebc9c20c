"""`LastGoodWeights`: what a block's weights were before the epoch in which its loss broke."""

import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tpsgd.protocols import EpochEnd, Learner, Observer

IN_MEMORY = 1 << 20  # bytes; larger weights are kept in a temporary file


class LastGoodWeights(Observer):
    """Keeps the weights of the blocks that learn, as they were after their last good epoch.

    They are written once an epoch, when the device has to be waited for anyway, into a temporary
    file that has no name: the memory of training does not grow. Use it as a context manager.
    """

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []
        self._file: Any = None
        self._epoch: int | None = None  # after which the weights were written; 0: before the first

    def __enter__(self) -> "LastGoodWeights":
        return self

    def __exit__(self, *_: Any) -> None:
        if self._file is not None:
            self._file.close()

    def stage(self, learners: Sequence[Learner], learning: bool = True) -> None:
        """Keep the weights that these blocks begin with."""
        if learning:
            modules = [m for x in learners if x.epochs for m in x.block.modules]
            tensors = [t for m in modules for t in (*m.parameters(), *m.buffers())]
            self._tensors = list({id(t): t for t in tensors}.values())
            self._keep(0)

    def epoch(self, end: EpochEnd) -> set[Learner]:
        """Keep the weights after an epoch whose loss was finite, unless it was the last one."""
        if end.number + 1 < max(learner.epochs for learner in end.learners):
            self._keep(end.number + 1)
        return set()

    def restore(self) -> str:
        """Put the weights back; says in words which they are."""
        if self._epoch is None:
            return "its weights are lost"
        self._file.seek(0)
        for tensor in self._tensors:
            flat = _flat(tensor)
            content = bytearray(self._file.read(flat.nbytes))
            if content:
                flat.copy_(torch.frombuffer(content, dtype=flat.dtype))
        return (
            f"its weights are those after epoch {self._epoch}"
            if self._epoch
            else ("its weights are those before training")
        )

    def _keep(self, epoch: int) -> None:
        """Write the weights; a temporary folder that is full does not end the training."""
        self._epoch = None
        try:
            self._file = self._file or tempfile.SpooledTemporaryFile(IN_MEMORY)  # noqa: SIM115
            self._file.seek(0)
            for tensor in self._tensors:
                self._file.write(_flat(tensor).cpu().view(torch.uint8).numpy())
        except OSError:
            return
        self._epoch = epoch


def _flat(tensor: Tensor) -> Tensor:
    """All numbers of a tensor in the order of its memory; a view, unless the tensor has gaps."""
    tensor = tensor.detach()
    order = sorted(range(tensor.dim()), key=lambda d: -tensor.stride(d))
    return tensor.permute(order).reshape(-1)
