"""A layer's weights as the unknowns of linear equations: x W + b = y, one row for every product.

A linear layer has one row per sample; a convolution has one per sample and pixel, in which x is the
patch that its kernel reads there (im2col). The targets y are class codes P y*. Where a sample has a
single row, the labels y* are the targets and P multiplies the solution: least squares is linear in
its targets, so the solution for P y* is the solution for y* times P. The rank of a hidden layer
solved in this way is at most the number of classes.

With a label for every step or pixel, each of these is a row of its own; those without a label have
no row.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from tpsgd.losses import IGNORED
from tpsgd.maths.positions import Layout
from tpsgd.nets.layers import LAYERS

_PATCHES = 1 << 25  # bytes of patches in memory at a time


def inputs_of(layer: Any) -> int:
    """How many inputs one output unit of the layer reads."""
    return layer.weight[0].numel()


@dataclass
class Equations:
    """The equations of one block, batch by batch, in float64.

    Args:
        layer: the layer whose weights are the unknowns.
        classes: number of classes.
        codes: P, `(classes, *output)`, stacked over restarts if they are; None: the labels.
        signed: targets are +1 and -1 instead of 1 and 0, for outputs that are compared with 0.
        stacked: tensors have a leading dimension of restarts.
        layout: where the outputs are that have a label each.
    """

    layer: Any
    classes: int
    codes: Tensor | None = None
    signed: bool = False
    stacked: bool = False
    layout: Layout | None = None

    def __post_init__(self) -> None:
        self.kind = LAYERS[type(self.layer)]

    @property
    def single(self) -> bool:
        """Whether a sample has one row, so that codes can multiply the solution."""
        return self.codes is None or self.codes.dim() == 2 + self.stacked

    @property
    def mixing(self) -> Tensor | None:
        """The codes, where they multiply the solution."""
        return self.codes if self.single else None

    def parts(self, x: Tensor, labels: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """A batch's rows and their targets; of feature maps, a few samples at a time."""
        if not self.kind.maps:
            yield self(x, labels)
            return
        pixels = prod(x.shape[2:])  # about as many patches
        samples = max(1, _PATCHES // (8 * pixels * inputs_of(self.layer)))
        for few in zip(x.split(samples), labels.split(samples), strict=True):
            yield self(*few)

    def __call__(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The rows of these samples, and their targets."""
        assert self.kind.equations is not None
        rows, lead = self.kind.equations(self.layer, x), int(self.stacked)
        if self.layout is not None:
            rows, labels = rows.flatten(0, -2), self.layout.labels(labels)
            if not labels.is_floating_point():
                labelled = labels != IGNORED
                if type(labels) is not Tensor:  # in a plan, all positions
                    labelled = torch.arange(len(labels))
                rows, labels = rows[labelled], labels[labelled].long()
        y = labels.double() if labels.is_floating_point() else self._one_hot(labels)
        y = 2 * y - 1 if self.signed else y
        if self.codes is None or self.single:
            return rows.double(), y
        shape = self.codes.shape[lead + 1 :]
        targets = (y @ self.codes.double().flatten(lead + 1)).unflatten(-1, shape)
        if self.kind.maps:
            targets = targets.flatten(2).mT
        return rows.flatten(lead, -2).double(), targets.flatten(lead, -2)

    def _one_hot(self, labels: Tensor) -> Tensor:
        rows = torch.zeros(*labels.shape, self.classes, dtype=torch.float64, device=labels.device)
        return rows.scatter_(-1, labels.unsqueeze(-1), 1.0)


def keeps_samples(layer: Any, single: bool, samples: int) -> bool:
    """Whether to solve from the samples themselves: they are fewer than the layer's inputs.

    `samples=0` means that their number is not known.
    """
    return single and not LAYERS[type(layer)].maps and 0 < samples < inputs_of(layer)


def bytes_to_solve(layer: Any, samples: int, batch: int, keeps: bool, restarts: int) -> int:
    """About how many bytes it takes to solve for a layer's weights.

    Sums of d x d numbers, their eigenvectors and a workspace; or, with `keeps`, the samples and
    their products with one another.
    """
    d, k = inputs_of(layer), layer.weight.shape[0]
    numbers = 5 * samples * (d + samples) if keeps else 7 * d * d
    rows = 3 * _PATCHES // 8 if LAYERS[type(layer)].maps else 3 * d * batch
    return 8 * restarts * (numbers + rows + 4 * d * k)
