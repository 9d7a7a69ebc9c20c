"""A linear head by least squares, in one pass over the samples.

    W, b = argmin  mean ||x W + b - y*||^2 + alpha ||W||^2

With C the covariance of the inputs and D that of inputs and labels, W = (C + alpha I)^-1 D: sums
over the samples are all that is kept, whatever their number, in float64.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Ridge:
    """Least squares with a penalty on the weights, not on the bias."""

    alpha: float = 1e-4

    @property
    def __name__(self) -> str:
        return f"ridge({self.alpha:g})"

    def solve(
        self, batches: Iterable[tuple[Tensor, Tensor]], classes: int, bias: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Weight `(classes, features)` and bias, each after the dimension of restarts, if any."""
        sums: Moments | None = None
        for x, labels in batches:
            y = labels if labels.is_floating_point() else F.one_hot(labels, classes)
            sums = sums or Moments(x, y, bias)
            sums.add(x.double(), y.double())
        assert sums is not None
        return sums.solve(self.alpha)


def ridge(alpha: float = 1e-4) -> Any:
    """The last block, a linear layer, in closed form: `optimizer=[..., tpsgd.ridge()]`.

    `alpha` weighs the penalty against the *mean* squared error, so it need not grow with the data.

    Examples:
        >>> import tpsgd
        >>> x, y = torch.eye(4), torch.arange(4)
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4))
        >>> _ = tpsgd.fit(model, (x, y), optimizer=tpsgd.ridge(1e-9))
        >>> tpsgd.evaluate(model, (x, y))
        1.0
    """
    return Ridge(alpha)


class Moments:
    """Sums of products over samples; with a bias, seen from the first one: less cancels out."""

    def __init__(self, x: Tensor, y: Tensor, bias: bool) -> None:
        *lead, _, d = x.shape
        wide = {"device": x.device, "dtype": torch.float64}
        self.count, self.bias = 0, bias
        self.origin = x[..., :1, :].double() * bias
        self.x, self.y = torch.zeros(*lead, d, **wide), torch.zeros(*lead, y.shape[-1], **wide)
        self.xx = torch.zeros(*lead, d, d, **wide)
        self.xy = torch.zeros(*lead, d, y.shape[-1], **wide)

    def add(self, x: Tensor, y: Tensor) -> None:
        """A batch more."""
        x = x - self.origin
        self.count += x.shape[-2]
        self.x += x.sum(-2)
        self.y += y.sum(-2)
        self.xx += x.mT @ x
        self.xy += x.mT @ y

    def solve(self, alpha: float) -> tuple[Tensor, Tensor]:
        """Weight and bias."""
        n = self.count
        x, y = self.x / n * self.bias, self.y / n * self.bias
        C = self.xx / n - x.unsqueeze(-1) * x.unsqueeze(-2)
        D = self.xy / n - x.unsqueeze(-1) * y.unsqueeze(-2)
        C.diagonal(dim1=-2, dim2=-1).add_(max(alpha, _floor(C)))
        W = torch.cholesky_solve(D, torch.linalg.cholesky(C))
        bias = y - ((x + self.origin.squeeze(-2)).unsqueeze(-2) @ W).squeeze(-2)
        return W.mT, bias


def _floor(C: Tensor) -> float:
    """A penalty that keeps constant or repeated features solvable."""
    largest = float(C.diagonal(dim1=-2, dim2=-1).max())
    return max(largest, 1e-30) * C.shape[-1] * 1e-14
