"""Batches changed at random on their way from a source."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tpsgd.engine.augment import Draws, applied
from tpsgd.engine.batch_form import Batches, Form
from tpsgd.engine.batches import Source
from tpsgd.errors import TpsgdError
from tpsgd.maths.random import Key


@dataclass
class Augmented:
    """A source whose batches are changed at random in an epoch; without one they are as they are.

    The numbers are a function of (seed, block, epoch, batch) and a sample's place in its batch.
    """

    source: Source
    function: Callable[[Tensor], Tensor]

    @property
    def form(self) -> Form:
        """As the underlying source's."""
        return self.source.form

    @property
    def samples(self) -> int:
        """As the underlying source's."""
        return self.source.samples

    def batches(self, block: int = 0, epoch: int | None = None) -> Batches:
        """The underlying batches, changed as (block, epoch) says."""
        if epoch is None:
            yield from self.source.batches(block)
            return
        key = Key(self.form.seeds[0], block, -1 - epoch)  # projections and orders have the others
        batch = start = 0
        for piece in self.source.batches(block, epoch):
            size, last = len(piece.labels), piece.last
            held = [piece._replace(x=self._changed(piece.x, Draws(key, batch, start)))]
            del piece  # while the next one is made, this one must not live on here
            yield held.pop()
            batch, start = (batch + 1, 0) if last else (batch, start + size)

    def _changed(self, x: Any, draws: Draws) -> Tensor:
        if not isinstance(x, Tensor):
            raise TpsgdError(
                "augment cannot change sequences that differ in length, or that are read in "
                "windows: leave it out"
            )
        return applied(self.function, x, draws)


def augmented(source: Source, function: Callable[[Tensor], Tensor] | None) -> Source:
    """The source, augmented if there is a function."""
    return source if function is None else Augmented(source, function)
