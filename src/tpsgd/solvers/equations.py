"""A layer's weights as the unknowns of linear equations: x W + b = y, a row for every product.

A linear layer has one row per sample; a convolution one per sample and pixel, x being the patch
that its kernel meets there (im2col). The targets y are class codes P y*. Where a sample has a
single row, y is the label itself and P is applied to the solution, because least squares is linear
in y: the solution for P y* is the solution for y* times P. A hidden layer solved so has no more
rank than there are classes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Layer = nn.Linear | nn.Conv1d | nn.Conv2d
_PATCHES = 1 << 25  # bytes of patches held at a time


def inputs_of(layer: Layer) -> int:
    """How many numbers one product of the layer reads."""
    if isinstance(layer, nn.Linear):
        return layer.in_features
    return layer.in_channels * prod(layer.kernel_size)


def rows_of(layer: Layer, x: Tensor, pads: list[int]) -> Tensor:
    """What the layer's weights are multiplied with, (rows, inputs); restarts come first."""
    if isinstance(layer, nn.Linear):
        return x
    if isinstance(layer, nn.Conv1d):
        kernel, stride, dilation = (
            (1, v[0]) for v in (layer.kernel_size, layer.stride, layer.dilation)
        )
        patches = F.unfold(x.unsqueeze(2), kernel, dilation, (0, pads[0]), stride)
    else:
        patches = F.unfold(x, layer.kernel_size, layer.dilation, tuple(pads), layer.stride)
    return patches.mT


@dataclass
class Equations:
    """The equations of one block, batch by batch, in float64.

    Args:
        layer: whose weights are wanted.
        pads: a convolution's zeros on either side.
        classes: how many labels there are.
        codes: P, `(classes, *output)`, stacked over restarts if they are; None: the labels.
        signed: yes is +1 and no is -1, for outputs that are cut at 0.
        stacked: tensors have a leading dimension of restarts.
    """

    layer: Layer
    pads: list[int]
    classes: int
    codes: Tensor | None = None
    signed: bool = False
    stacked: bool = False

    @property
    def single(self) -> bool:
        """Whether a sample has one row, so that codes can be applied to the solution."""
        return self.codes is None or self.codes.dim() == 2 + self.stacked

    @property
    def mixing(self) -> Tensor | None:
        """The codes, where they are applied to the solution."""
        return self.codes if self.single else None

    def parts(self, x: Tensor, labels: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """A batch's rows and their targets, a few samples at a time where each has many."""
        if isinstance(self.layer, nn.Linear):
            yield self(x, labels)
            return
        pixels = prod(x.shape[2:])  # about as many patches
        some = max(1, _PATCHES // (8 * pixels * inputs_of(self.layer)))
        for part in zip(x.split(some), labels.split(some), strict=True):
            yield self(*part)

    def __call__(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The rows of some samples, and their targets."""
        rows, lead = rows_of(self.layer, x, self.pads), int(self.stacked)
        y = labels.double() if labels.is_floating_point() else self._one_hot(labels)
        y = 2 * y - 1 if self.signed else y
        if self.codes is None or self.single:
            return rows.double(), y
        targets = (y @ self.codes.double().flatten(lead + 1)).unflatten(
            -1, self.codes.shape[lead + 1 :]
        )
        if not isinstance(self.layer, nn.Linear):
            targets = targets.flatten(2).mT
        return rows.flatten(lead, -2).double(), targets.flatten(lead, -2)

    def _one_hot(self, labels: Tensor) -> Tensor:
        rows = torch.zeros(*labels.shape, self.classes, dtype=torch.float64, device=labels.device)
        return rows.scatter_(-1, labels.unsqueeze(-1), 1.0)


def few(layer: Layer, single: bool, samples: int) -> bool:
    """Whether samples are known to be fewer than the inputs; 0: nobody knows how many there are."""
    return single and isinstance(layer, nn.Linear) and 0 < samples < inputs_of(layer)


def needed(layer: Layer, samples: int, batch: int, keeps: bool, restarts: int) -> int:
    """About as many bytes as solving for a layer takes; `keeps`: few samples are kept.

    Sums of d x d numbers, their eigenvectors and what finds them; or the samples, a few times.
    """
    d, k = inputs_of(layer), layer.weight.shape[0]
    numbers = 5 * samples * (d + samples) if keeps else 7 * d * d
    rows = 3 * d * batch if isinstance(layer, nn.Linear) else 3 * _PATCHES // 8
    return 8 * restarts * (numbers + rows + 4 * d * k)
