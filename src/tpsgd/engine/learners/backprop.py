"""Backpropagation, for which the whole net is one block, and activation checkpointing."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as checkpointed

from tpsgd.common.errors import TpsgdError
from tpsgd.nets.cuts.split import layers_of
from tpsgd.nets.model_inputs import data_of
from tpsgd.nets.padded import SequenceLayer
from tpsgd.nets.recurrent import Chain, connect


@dataclass(frozen=True)
class Backprop:
    """In place of a rule: train the whole net by backprop, see `fit_backprop`."""

    segments: int | bool = False  # of activation checkpointing
    name = "backprop"


class Segments(nn.Sequential):
    """Segments of a model that store their inputs only; the last stores its activations too."""

    reads_inputs = True

    def forward(self, input: Any) -> Any:
        """As `nn.Sequential`'s."""
        *segments, last = self
        for segment in segments:
            contexts = partial(_contexts, segment)
            input = checkpointed(segment, input, use_reentrant=False, context_fn=contexts)
        return data_of(last(input))


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


def in_segments(model: nn.Module, segments: int | bool, samples: Any = None) -> nn.Module:
    """The model cut into segments that are recomputed in the backward pass."""
    if not segments:
        return connect(model)
    if not isinstance(segments, int):
        raise TpsgdError(f"segments must be True or a number, got {segments!r}")
    if any(isinstance(m, (SequenceLayer, nn.RNN)) for m in model.modules()):
        raise TpsgdError("segments are for models without recurrent layers")
    blocks = layers_of(model, samples)
    count = len(blocks) if segments is True else segments
    if not 1 <= count <= len(blocks):
        raise TpsgdError(f"segments must be between 1 and {len(blocks)}, got {count}")
    ends = [len(blocks) * i // count for i in range(count + 1)]
    groups = [blocks[a:b] for a, b in pairwise(ends)]
    return Segments(*(Chain(*(m for b in group for m in b.modules)) for group in groups))
