"""Activation checkpointing in the number of segments that saves most."""

from torch import nn

from tpsgd.engine.learners.backprop import Backprop
from tpsgd.engine.settings import Settings
from tpsgd.memory.rehearse import Inputs, rehearse
from tpsgd.nets.blocks import split


def best_segments(model: nn.Module, inputs: Inputs, settings: Settings) -> int:
    """The segments with which backprop has the lowest peak; of equals the fewest.

    Segments of 1, 2, 3, ... blocks are rehearsed. A segment per block stores every input, a few
    long segments store all activations of one of them: the best number lies in between.
    """
    blocks = len(split(model))
    counts = {-(-blocks // length) for length in range(1, max(2, blocks))}
    peaks = {n: rehearse(model, inputs, Backprop(n), settings).peak for n in sorted(counts)}
    return min(peaks, key=lambda n: peaks[n])
