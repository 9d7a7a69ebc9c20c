"""Backpropagation as a learner: the whole net is one block; and activation checkpointing."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as checkpointed

from tpsgd.common.errors import TpsgdError
from tpsgd.engine.learners.learner import GradientLearner
from tpsgd.nets.autograd import Autograd
from tpsgd.nets.blocks import split
from tpsgd.nets.padded import SequenceLayer


@dataclass(frozen=True)
class Backprop:
    """In place of a rule: train the whole net by backprop, see `fit_backprop`."""

    segments: int | bool = False  # of activation checkpointing
    name = "backprop"


class BackpropLearner(GradientLearner):
    """The whole net as one block, which makes its local gradient the gradient of the net.

    `width` counts its layers. With micro-batches autograd adds the gradients up itself.
    """

    whole_net = True

    def __init__(
        self, *args: Any, width: int = 1, accumulates: bool = False, **options: Any
    ) -> None:
        super().__init__(*args, **options)
        self.width, self.accumulates = width, accumulates

    def _update(self, saved: Any, s: Tensor, labels: Tensor, output_unused: bool) -> None:
        if not self.accumulates:
            return super()._update(saved, s, labels, output_unused)
        assert isinstance(self.backend, Autograd)
        local = self.backend.backward(self.params, saved, s, self.share)
        if self.share == 1.0 and not self.waits:
            self.apply_gradients()
        self.figures.add(local, labels)


class Segments(nn.Sequential):
    """Segments of a model that store their inputs only; the last stores its activations too."""

    def forward(self, input: Tensor) -> Tensor:
        """As `nn.Sequential`'s."""
        *segments, last = self
        for segment in segments:
            contexts = partial(_contexts, segment)
            input = checkpointed(segment, input, use_reentrant=False, context_fn=contexts)
        return last(input)


def _contexts(segment: nn.Module) -> tuple[Any, Any]:
    """The contexts of a segment's first pass and of its recomputation."""
    return nullcontext(), _statistics_unchanged(segment)


@contextmanager
def _statistics_unchanged(segment: nn.Module) -> Iterator[None]:
    """Batch norms do not count a recomputed batch twice."""
    norms = [m for m in segment.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    before = [(b, b.clone()) for m in norms for b in m.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)


def in_segments(model: nn.Module, segments: int | bool) -> nn.Module:
    """The model cut into segments that are recomputed in the backward pass."""
    if not segments:
        return model
    if not isinstance(segments, int):
        raise TpsgdError(f"segments must be True or a number, got {segments!r}")
    if any(isinstance(m, (SequenceLayer, nn.RNN)) for m in model.modules()):
        raise TpsgdError("segments are for models without recurrent layers")
    blocks = split(model)
    count = len(blocks) if segments is True else segments
    if not 1 <= count <= len(blocks):
        raise TpsgdError(f"segments must be between 1 and {len(blocks)}, got {count}")
    ends = [len(blocks) * i // count for i in range(count + 1)]
    groups = [blocks[a:b] for a, b in pairwise(ends)]
    return Segments(*(nn.Sequential(*(m for b in group for m in b.modules)) for group in groups))
