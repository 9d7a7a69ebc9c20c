"""A linear head by least squares, in one pass over the samples.

    W, b = argmin  mean ||x W + b - y*||^2 + alpha ||W||^2

With C the covariance of the inputs and D that of inputs and labels, W = (C + alpha I)^-1 D: sums
over the samples are all that is kept, whatever their number, in float64. The same sums tell which
alpha generalises best, by generalised cross-validation (Golub, Heath & Wahba 1979): the error of
each sample if it had been left out, as an average.

Ridge regression: Hoerl & Kennard (1970); on the states of a random recurrent net: Jaeger (2001).
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tpsgd.errors import TpsgdError

ALPHAS = tuple(10.0**k for k in range(-10, 2))  # of the mean variance of the inputs


@dataclass(frozen=True)
class Ridge:
    """Least squares with a penalty on the weights, not on the bias."""

    alpha: float | None = None

    @property
    def __name__(self) -> str:
        return "ridge()" if self.alpha is None else f"ridge({self.alpha:g})"

    def solve(
        self,
        batches: Iterable[tuple[Tensor, Tensor]],
        classes: int,
        bias: bool = True,
        signed: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Weight `(classes, features)` and bias, each after the dimension of restarts, if any.

        `signed`: yes is +1 and no is -1, for outputs that are cut at 0.
        """
        sums: Moments | None = None
        for x, labels in batches:
            y = labels if labels.is_floating_point() else F.one_hot(labels, classes)
            y = 2 * y.double() - 1 if signed else y.double()
            sums = sums or Moments(x, y, bias)
            sums.add(x.double(), y)
        assert sums is not None
        return sums.solve(self.alpha)


def ridge(alpha: float | None = None) -> Any:
    """The last block, a linear layer, in closed form: `optimizer=[..., tpsgd.ridge()]`.

    `alpha` weighs the penalty against the *mean* squared error, so it need not grow with the data;
    without it, generalised cross-validation chooses.

    Examples:
        >>> import tpsgd
        >>> x, y = torch.eye(4), torch.arange(4)
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4))
        >>> _ = tpsgd.fit(model, (x, y), optimizer=tpsgd.ridge(1e-9))
        >>> tpsgd.evaluate(model, (x, y))
        1.0
    """
    if alpha is not None and not 0 <= alpha < math.inf:
        raise TpsgdError(f"alpha must be a number, 0 or more, got {alpha}")
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
        self.yy = torch.zeros(lead, **wide)

    def add(self, x: Tensor, y: Tensor) -> None:
        """A batch more."""
        x = x - self.origin
        self.count += x.shape[-2]
        self.x += x.sum(-2)
        self.y += y.sum(-2)
        self.xx += x.mT @ x
        self.xy += x.mT @ y
        self.yy += y.square().sum((-1, -2))

    def solve(self, alpha: float | None) -> tuple[Tensor, Tensor]:
        """Weight and bias, in the directions in which the inputs vary independently."""
        n = self.count
        x, y = self.x / n * self.bias, self.y / n * self.bias
        C = self.xx / n - x.unsqueeze(-1) * x.unsqueeze(-2)
        D = self.xy / n - x.unsqueeze(-1) * y.unsqueeze(-2)
        variance, V = torch.linalg.eigh(C)
        floor = variance[..., -1:].clamp(min=1e-30) * C.shape[-1] * 1e-15
        variance, along = variance.clamp(min=0), V.mT @ D
        if alpha is None:
            penalty = self._chosen(variance, along, self.yy / n - y.square().sum(-1))
        else:
            penalty = torch.full_like(floor, alpha)
        penalty = torch.maximum(penalty, floor)  # constant or repeated inputs stay solvable
        W = V @ (along / (variance + penalty).unsqueeze(-1))
        bias = y - ((x + self.origin.squeeze(-2)).unsqueeze(-2) @ W).squeeze(-2)
        return W.mT, bias

    def _chosen(self, variance: Tensor, along: Tensor, total: Tensor) -> Tensor:
        """Each restart's alpha with the least (error / n) / (1 - parameters / n)^2."""
        n, power = self.count, along.square().sum(-1)
        mean = variance.mean(-1, keepdim=True).clamp(min=1e-30)
        scores = []
        for alpha in ALPHAS:
            a = alpha * mean
            explained = (power * (variance + 2 * a) / (variance + a).square()).sum(-1)
            used = ((variance / (variance + a)).sum(-1) + self.bias) / n
            score = (total - explained).clamp(min=0) / (1 - used).square()
            scores.append(torch.where(used < 0.95, score, torch.inf))
        best = torch.stack(scores, -1).argmin(-1, keepdim=True)
        return torch.tensor(ALPHAS, dtype=mean.dtype, device=mean.device)[best] * mean
