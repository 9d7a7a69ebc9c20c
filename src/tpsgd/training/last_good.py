"""`LastGoodWeights`: what a block's weights were before the epoch in which its loss broke."""

import math
import tempfile
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from tpsgd.engine.batches import DerivedSource
from tpsgd.protocols import EpochEnd, Learner, Observer
from tpsgd.train import validate

IN_MEMORY = 1 << 20  # bytes; larger weights are kept in a temporary file
MOST = 64 << 20  # bytes; larger weights are not kept: writing them would slow training down


class LastGoodWeights(Observer):
    """Keeps the weights of the blocks that learn, as they were after their last two epochs.

    A finite loss says that an epoch began with good weights: its last step may still have broken
    them. So the weights of the epoch before are kept too. They are written once an epoch, when the
    device has to be waited for anyway, into temporary files without names: the memory of training
    does not grow. Use it as a context manager.
    """

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []
        self._files: list[Any] = []  # two that take turns
        self._kept: list[tuple[int, Any]] = []  # epochs and their files, the newest last

    def __enter__(self) -> "LastGoodWeights":
        return self

    def __exit__(self, *_: Any) -> None:
        for file in self._files:
            file.close()

    def stage(self, learners: Sequence[Learner], learning: bool = True) -> None:
        """Keep the weights that these blocks begin with."""
        if learning:
            modules = [m for x in learners if x.epochs for m in x.block.modules]
            tensors = [t for m in modules for t in (*m.parameters(), *m.buffers())]
            self._tensors = list({id(t): t for t in tensors}.values())
            if sum(t.nbytes for t in self._tensors) > MOST:
                self._tensors = []
            self._kept = []
            self._keep(0)

    def epoch(self, end: EpochEnd) -> set[Learner]:
        """Keep the weights after an epoch whose loss was finite, unless it was the last one."""
        if end.number + 1 < max(learner.epochs for learner in end.learners):
            self._keep(end.number + 1)
        return set()

    def restore(self, end: EpochEnd) -> str:
        """Put the newest weights back that give a finite loss; says in words which they are."""
        words = "its weights are lost (a checkpoint, checkpoint=FOLDER, keeps them)"
        for epoch, file in reversed(self._kept):
            self._read(file)
            when = f"after epoch {epoch}" if epoch else "before training"
            words = f"its weights are those {when}"
            if gives_numbers(end):
                break
        return words

    def _keep(self, epoch: int) -> None:
        """Write the weights; a temporary folder that is full does not end the training."""
        if not self._tensors:
            return
        self._kept = self._kept[-1:]
        try:
            if len(self._files) < 2:
                self._files.append(tempfile.SpooledTemporaryFile(IN_MEMORY))  # noqa: SIM115
            newest = self._kept[0][1] if self._kept else None
            file = next(file for file in reversed(self._files) if file is not newest)
            file.seek(0)
            for tensor in self._tensors:
                file.write(_flat(tensor).cpu().view(torch.uint8).numpy())
        except OSError:
            return
        self._kept.append((epoch, file))

    def _read(self, file: Any) -> None:
        file.seek(0)
        for tensor in self._tensors:
            flat = _flat(tensor)
            if content := bytearray(file.read(flat.nbytes)):
                flat.copy_(torch.frombuffer(content, dtype=flat.dtype))


class _FirstBatch(DerivedSource):
    """A source with one batch."""

    def batches(self, block: int = 0, epoch: int | None = None) -> Iterator[Any]:
        """The first batch of the other source."""
        yield from islice(self.source.batches(block, epoch), 1)


def gives_numbers(end: EpochEnd) -> bool:
    """Whether the weights, as they are now, give a finite loss for a batch."""
    learners: list[Any] = [x for x in end.learners if x.learning]
    for learner in learners:
        learner.figures.collect(1)
    samples = validate(end.net, end.learners, _FirstBatch(end.source))
    losses = [loss for x in learners for loss in x.figures.collect(max(1, samples))[0]]
    return all(map(math.isfinite, losses))


def _flat(tensor: Tensor) -> Tensor:
    """All numbers of a tensor in the order of its memory; a view, unless the tensor has gaps."""
    tensor = tensor.detach()
    order = sorted(range(tensor.dim()), key=lambda d: -tensor.stride(d))
    return tensor.permute(order).reshape(-1)
