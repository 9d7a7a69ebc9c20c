"""From a frozen block to the next one's inputs: kept in memory or in a file, or computed again."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tpsgd.engine.augmented import Augmented
from tpsgd.engine.batches import WORTH_CUTTING, Arrays, Form, Source, Stream, Through
from tpsgd.engine.disk_rows import Stored
from tpsgd.engine.learner import Learner
from tpsgd.engine.meter import Meter
from tpsgd.errors import TpsgdError
from tpsgd.maths.random import permutation
from tpsgd.nets.padded import Padded
from tpsgd.nets.unrolled import UnrolledBatch, computed

AT_ONCE = 32 << 20  # bytes that samples may take inside a block while they are handed on


def in_loader(source: Source) -> bool:
    """Whether samples come from a loader, whose batches may differ in length."""
    while isinstance(source, (Augmented, Through)):
        source = source.source
    return isinstance(source, Stream)


def seen_through(source: Source, function: Callable[[Any], Any], at_once: int | None) -> Through:
    """A source with one more function behind it."""
    if isinstance(source, Through):
        at_once = min(filter(None, (source.at_once, at_once)), default=None)
        return Through(source.source, (*source.functions, function), at_once)
    return Through(source, (function,), at_once)


def at_once_for(learner: Learner, form: Form) -> int | None:
    """How many samples to hand on together: a part of a batch, where that saves much."""
    if form.stacked or form.batch_size * learner.widest < WORTH_CUTTING:
        return None
    return max(1, min(AT_ONCE // learner.widest, form.batch_size // 4))


def computed_now(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The function with its output computed at once, even where it would be pulled."""
    return lambda x: computed(function(x))


def first_output(source: Source, function: Callable[[Any], Any]) -> Any:
    """One sample's output."""
    for piece in source.batches():
        pulled = isinstance(piece.x, UnrolledBatch)
        sample = computed(function(piece.x if pulled else source.form.first(piece.x)))
        return source.form.first(sample) if pulled else sample
    raise TpsgdError("the data is empty: the loader gives no batch")


def depth(source: Source) -> int:
    """How many frozen blocks a sample passes each time it is asked for."""
    return len(source.functions) if isinstance(source, Through) else 0


def place_for(sample: Any, source: Source) -> Tensor:
    """Memory for what a source's samples become."""
    form = source.form
    shape = (*sample.shape[:1], source.samples, *sample.shape[2:])
    if not form.stacked:
        shape = (source.samples, *sample.shape[1:])
    maps = form.channels_last and len(shape) == 4 and not form.stacked
    layout = torch.channels_last if maps else torch.contiguous_format
    return torch.empty(shape, dtype=sample.dtype, device=form.device, memory_format=layout)


@torch.no_grad()
def collect(
    source: Source, function: Callable[[Any], Any], room: Tensor | Stored, meter: Meter
) -> Arrays:
    """A source's samples pushed through a function, kept in memory or in a file."""
    form, n, lead = source.form, source.samples, int(source.form.stacked)
    ys, lengths, start, largest, batch = [], [], 0, 1, 0
    for number, (x, y, _, last) in enumerate(source.batches()):
        stop = start + y.shape[lead]
        batch = batch + y.shape[lead]
        largest, batch = max(largest, batch), 0 if last else batch
        if stop > n:
            raise TpsgdError(f"the data has more samples than the {n:,} it says it has")
        with meter.watch(number < 2):
            made = function(x)
            if isinstance(made, Padded):
                lengths.append(made.lengths)
                made = made.data
            if isinstance(room, Stored):
                room.write(start, made)
            else:
                room.narrow(lead, start, stop - start).copy_(made)
        ys.append(y[0] if form.stacked else y)
        start = stop
        del x, y, made
    kept = room.first(start) if isinstance(room, Stored) else room.narrow(lead, 0, start)
    if isinstance(source, Arrays) and not isinstance(source.x, Padded):
        labels = source.y
    else:
        labels = torch.cat(ys)  # a loader's, or sorted by length
    form = replace(form, batch_size=largest, in_chunks=False)  # a loader brings its own size
    x = Padded(kept, torch.cat(lengths)) if lengths else kept  # type: ignore[arg-type]
    below = source.source if isinstance(source, Through) else source
    order = below.order if isinstance(below, Arrays) else permutation
    return Arrays(x, labels, form, per_restart=form.stacked, order=order)
