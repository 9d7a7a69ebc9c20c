"""A layer's weights as the unknowns of linear equations: x W + b = y, a row for every product.

A linear layer has one row per sample; a convolution one per sample and pixel, x being the patch
that its kernel meets there (im2col). The targets y are class codes P y*. Where a sample has a
single row, y is the label itself and P is applied to the solution, because least squares is linear
in y: the solution for P y* is the solution for y* times P. A hidden layer solved so has no more
rank than there are classes.
"""

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tpsgd.errors import TpsgdError
from tpsgd.memory import available
from tpsgd.run import size

Layer = nn.Linear | nn.Conv1d | nn.Conv2d
_COPIES = 5  # of d x d numbers: sums, covariance, eigenvectors and what eigh works on


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
    positions: int = 1  # rows that a sample has

    @property
    def mixing(self) -> Tensor | None:
        """The codes, where they are applied to the solution."""
        flat = self.codes is not None and self.codes.dim() == 2 + self.stacked
        return self.codes if flat else None

    def few(self, samples: int) -> bool:
        """Whether so many samples are known to be fewer than the inputs; 0: nobody knows."""
        single = self.codes is None or self.mixing is not None
        return single and 0 < samples < inputs_of(self.layer)

    def __call__(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """A batch's rows and their targets."""
        rows = rows_of(self.layer, x, self.pads)
        y = labels if labels.is_floating_point() else F.one_hot(labels, self.classes)
        y = 2 * y.double() - 1 if self.signed else y.double()
        if self.codes is None or self.mixing is not None:
            return rows.double(), y
        targets = (y @ self.codes.double().flatten(1)).view(len(y), *self.codes.shape[1:])
        if not isinstance(self.layer, nn.Linear):
            targets = targets.flatten(2).mT
        self.positions = prod(rows.shape[1:-1])
        return rows.flatten(0, -2).double(), targets.flatten(0, -2)


def check_room(name: str, layer: Layer, samples: int, restarts: int, device: torch.device) -> None:
    """Refuse before memory runs out, not after."""
    d, k = inputs_of(layer), max(layer.weight.shape[0], 1)
    few = 0 < samples < d and isinstance(layer, nn.Linear)
    numbers = 3 * samples * (d + samples) if few else _COPIES * d * d
    need, free = 8 * restarts * (numbers + 4 * d * k), available(device)
    if need > free:
        raise TpsgdError(
            f"{name} cannot be solved in closed form here: its {d:,} inputs need about "
            f"{size(need)} for their products with one another, and {size(free)} are free; pool "
            "its inputs first, or train it with an optimizer"
        )
