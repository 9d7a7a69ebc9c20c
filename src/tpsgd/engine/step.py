"""A batch through consecutive blocks, which learn from it or are only measured."""

from itertools import count
from typing import Any

import torch
from torch import Tensor

from tpsgd.engine.batches import MicroBatch, Source
from tpsgd.engine.learner import Learner
from tpsgd.engine.meter import Meter
from tpsgd.rules import Signal

Figures = dict[int, tuple[list[float], list[float] | None]]


def advance(
    learners: list[Learner],
    busy: list[Learner],
    piece: MicroBatch,
) -> None:
    """One batch through consecutive blocks; the busy ones learn from it."""
    x, labels, share, last_piece = piece
    del piece
    if any(b.signal is not Signal.LABEL for b in busy):
        _with_error(learners, busy, x, labels, share)
    else:
        _with_labels(learners, busy, x, labels, share)
    for learner in busy:
        learner.settle()
        if share < 1.0 and last_piece:
            learner.move()


def _with_labels(
    learners: list[Learner],
    busy: list[Learner],
    x: Any,
    labels: Tensor,
    share: float,
) -> None:
    """Every block learns as soon as the batch reaches it."""
    for learner in learners:
        saved = learner.forward(x)
        last = learner is learners[-1]
        if learner in busy:
            learner.improve(saved, labels, labels, output_unused=last, share=share)
        if not last:
            x = learner.output(saved)


def _with_error(
    learners: list[Learner], busy: list[Learner], x: Any, labels: Tensor, share: float
) -> None:
    """For rules that need the network's output before any block can learn."""
    values = []
    for learner in learners:
        values.append(learner.forward(x))
        x = learner.output(values[-1])
    error = learners[-1].error(values[-1], labels)
    signals = {Signal.LABEL: labels, Signal.ERROR: error, Signal.ERROR_SIGN: error.sign()}
    for learner, saved in zip(learners, values, strict=True):
        if learner in busy:
            learner.improve(saved, signals[learner.signal], labels, share=share)


@torch.no_grad()
def validate(learners: list[Learner], busy: list[Learner], source: Source, meter: Meter) -> Figures:
    """Loss and accuracy of the busy blocks on held-out data."""
    samples = 0
    for learner in learners:
        learner.block.train(False)
    batches = source.batches()
    for number in count():
        with meter.watch(number < 2):
            piece = next(batches, None)
            if piece is None:
                break
            samples += piece.labels.shape[1 if source.form.stacked else 0]
            _measure(learners, busy, piece.x, piece.labels)
        del piece
    for learner in busy:
        learner.wake()
    return {x.block.index: x.collect(samples) for x in busy if x.signal is Signal.LABEL}


def _measure(learners: list[Learner], busy: list[Learner], x: Any, labels: Tensor) -> None:
    """One held-out batch through consecutive blocks."""
    for learner in learners:
        saved = learner.forward(x)
        if learner in busy and learner.signal is Signal.LABEL:
            learner.measure(saved, labels)
        if learner is not learners[-1]:
            x = learner.output(saved)
        del saved
