"""The last good weights: those that a model goes back to when a loss breaks.

A finite loss says that an epoch, or a step of a stream, began with good weights: its last update
may still have broken them. So there are two copies, of which the older one is certainly good.
"""

import math
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from tpsgd.engine.extension import Extension
from tpsgd.engine.learners.learner import validate
from tpsgd.engine.sources.batches import DerivedSource
from tpsgd.features.run_identity import bytes_of
from tpsgd.train import EpochEnd, Learner, Net, Observer

IN_MEMORY = 1 << 20  # bytes; more are written into a temporary file
MOST = 64 << 20  # bytes; of more there is no copy, which would slow training down


class LastGood:
    """The latest two copies of tensors, each with a state that belongs to them; the newest last.

    Args:
        in_files: the copies are temporary files without names, so that the memory of training does
            not grow. Otherwise they stay on the device, which is faster.
    """

    def __init__(self, in_files: bool = False) -> None:
        self.in_files = in_files
        self.copies: list[tuple[Any, Any]] = []  # values of the tensors, state

    def keep(self, tensors: Sequence[Tensor], state: Any = None) -> None:
        self.drop(slice(0, -1))
        if sum(t.nbytes for t in (*tensors, *tensors_in(state))) > MOST:
            self.drop()
        elif not self.in_files:
            self.copies.append((copied(list(tensors)), copied(state)))
        else:
            with suppress(OSError), ExitStack() as until_written:  # a folder may be full
                file = until_written.enter_context(tempfile.SpooledTemporaryFile(IN_MEMORY))
                for tensor in tensors:
                    file.write(bytes_of(tensor))
                until_written.pop_all()
                self.copies.append((file, copied(state)))

    @torch.no_grad()
    def restore(self, number: int, tensors: Sequence[Tensor]) -> Any:
        """Put the values of a copy back into the tensors; its state."""
        values, state = self.copies[number]
        for tensor, value in zip(tensors, _read(values, tensors), strict=True):
            tensor.copy_(value)
        return state

    def drop(self, which: slice = slice(None)) -> None:
        """Remove copies: all of them, if the tensors have other shapes now."""
        for values, _ in self.copies[which] if self.in_files else ():
            values.close()
        del self.copies[which]


class LastGoodWeights(Extension, Observer):
    """Keeps the weights of the blocks that learn, as they were after their last two epochs.

    They are written once an epoch, when the device has to be waited for anyway.
    """

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []
        self._last_good = LastGood(in_files=True)

    @contextmanager
    def around(self, net: Net) -> Iterator[None]:
        net.observers.append(self)
        net.recorder.restore = self.restore
        try:
            yield
        finally:
            self._last_good.drop()

    def stage(self, learners: Sequence[Learner], learning: bool = True) -> None:
        if learning:
            modules = [m for x in learners if x.epochs for m in x.block.modules]
            tensors = [t for m in modules for t in (*m.parameters(), *m.buffers())]
            self._tensors = list({id(t): t for t in tensors}.values())
            self._last_good.drop()
            self._last_good.keep(self._tensors, 0)

    def epoch(self, end: EpochEnd) -> set[Learner]:
        """Keep the weights after an epoch whose loss was finite, unless it was the last one."""
        if end.number + 1 < max(learner.epochs for learner in end.learners):
            self._last_good.keep(self._tensors, end.number + 1)
        return set()

    def restore(self, end: EpochEnd) -> str:
        """Put the newest weights back that give a finite loss; says in words which they are."""
        words = "its weights are lost (a checkpoint, checkpoint=FOLDER, keeps them)"
        for number in reversed(range(len(self._last_good.copies))):
            epoch = self._last_good.restore(number, self._tensors)
            when = f"after epoch {epoch}" if epoch else "before training"
            words = f"its weights are those {when}"
            if gives_numbers(end):
                break
        return words


class _FirstBatch(DerivedSource):
    def batches(self, block: int = 0, epoch: int | None = None) -> Iterator[Any]:
        yield from islice(self.source.batches(block, epoch), 1)


def gives_numbers(end: EpochEnd) -> bool:
    """Whether the weights, as they are now, give a finite loss for a batch."""
    learners: list[Any] = [x for x in end.learners if x.learning]
    for learner in learners:
        learner.figures.collect(1)
    samples = validate(end.learners, _FirstBatch(end.source), end.net.observers)
    losses = [loss for x in learners for loss in x.figures.collect(max(1, samples)).losses]
    return all(map(math.isfinite, losses))


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in nested dictionaries, lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item)


def copied(value: Any) -> Any:
    """Nested dictionaries, lists and tuples with copies of the tensors in them."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    return type(value)(map(copied, value)) if type(value) in (list, tuple) else value


def _read(values: Any, tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """The values of a copy, in a list or a file, in the shapes of the tensors."""
    if isinstance(values, list):
        yield from values
        return
    values.seek(0)
    for tensor in tensors:
        content = bytearray(values.read(tensor.nbytes))
        numbers = torch.frombuffer(content, dtype=tensor.dtype) if content else torch.empty(0)
        yield numbers.view(tensor.shape)
