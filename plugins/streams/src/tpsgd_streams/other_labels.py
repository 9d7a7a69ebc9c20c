"""Labels of a stream that are not one class for each sample: numbers, and those of positions.

Numbers are standardised by the mean and the deviation of all that have come. For a step the last
layer gives standardised numbers, and their own units before and after it, so that new statistics
change no output (van Hasselt et al., "Learning values across many orders of magnitude", 2016).
`rls()`, whose sums are over all labels, learns numbers as they are.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tpsgd.engine.evaluate import all_outputs
from tpsgd.features.target_scaling import TargetScaling
from tpsgd.losses import IGNORED
from tpsgd.saved.expected import check_count, check_tensor
from tpsgd.targets import Target

ROUNDING = 1e-20  # of a mean square: a smaller variance is that of a constant


class LabelStatistics:
    """How many numbers have come, their mean, and the sum of squares about it, in float64."""

    def __init__(self, count: int, mean: Tensor, squares: Tensor) -> None:
        self.count, self.mean, self.squares = count, mean, squares

    @classmethod
    def of(cls, rows: Tensor) -> "LabelStatistics":
        """Those of some labels, a row for each."""
        mean = rows.mean(0)
        return cls(len(rows), mean, (rows - mean).square().sum(0))

    def __add__(self, other: "LabelStatistics") -> "LabelStatistics":
        n, m = self.count, other.count
        apart = other.mean - self.mean
        squares = self.squares + other.squares + apart.square() * (n * m / (n + m))
        return LabelStatistics(n + m, self.mean + apart * (m / (n + m)), squares)

    def scaling(self, shifts: bool) -> TargetScaling:
        """The scaling to mean 0 and deviation 1; of a constant, the deviation 1."""
        variance = self.squares / self.count
        constant = variance <= ROUNDING * self.mean.square()
        mean = self.mean if shifts else torch.zeros_like(self.mean)
        return TargetScaling(mean, torch.where(constant, 1.0, variance.sqrt()))

    def checked(self, outputs: int) -> "LabelStatistics":
        """The same, out of a file; a ValueError if they cannot be those of so many numbers."""
        check_count("labels", self.count, least=1)
        for values in (self.mean, self.squares):
            check_tensor("labels", values, torch.empty(outputs, dtype=torch.float64, device="meta"))
        if not torch.isfinite(self.mean).all() or not (self.squares >= 0).all():
            raise ValueError("the mean and the deviation of the labels are no numbers")
        return self

    @contextmanager
    def standardised(self, layer: Any, in_units: bool) -> Iterator[TargetScaling]:
        """A context in which a last layer gives standardised numbers; `in_units`: as before it."""
        scaling = self.scaling(layer.bias is not None)
        if in_units:
            scaling.out_of(layer)
        try:
            yield scaling
        finally:
            scaling.into(layer)


def gives_units(model: nn.Module, x: Any, rows: Tensor, target: Target) -> bool:
    """Whether outputs are nearer to labels than their mean is, or than half of the way from 0.

    So a model that was trained before goes on, and one with random weights begins at the mean.
    """
    out = target.outputs_last(all_outputs(model, x, len(x))).to(rows)
    errors = (out.reshape(rows.shape) - rows).square().mean(0)
    least = torch.maximum(rows.var(0, correction=0), rows.square().mean(0) / 2)
    return bool((errors < least).all())


def mistakes(out: Tensor, y: Tensor, target: Target) -> Tensor:
    """The mean absolute error of each sample's numbers; the share of its labels that are wrong."""
    out, y = target.outputs_last(out), target.canonical(y).to(out.device)
    if target.numbers:
        return (out - y).abs().flatten(1).mean(1)
    labelled = (y != IGNORED).flatten(1)
    wrong = (out.argmax(-1) != y).flatten(1) & labelled
    return wrong.sum(1) / labelled.sum(1).clamp(min=1)
