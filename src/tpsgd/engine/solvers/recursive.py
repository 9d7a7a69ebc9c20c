"""`rls()`: ridge regression on a stream, with its solution after every batch.

LM-KARnet (Zhuang, Lin & Toh, "A low-memory learning formulation for a kernel-and-range network",
2019) is named after this recursion over batches X, Y of samples:

    R_0 = I / gamma,   K = (I + X R X^T)^-1,   R <- R - R X^T K X R,   W <- W + R X^T (Y - X W)

R is the inverse of A = gamma I + sum X^T X. We store A, add each batch to it, and solve
A W = sum X^T Y by its Cholesky factor: the same weights, without the subtraction that lets rounding
errors grow when inputs are correlated. A is d x d for d inputs, whatever the number of samples.
After n samples the weights are those of `ridge(gamma / n)`.
"""

import math
from dataclasses import dataclass
from typing import Any

from tpsgd.engine.solvers.ridge import bad_penalty


@dataclass(frozen=True)
class Recursive:
    """Least squares that is solved again after every batch."""

    gamma: float = 1.0

    @property
    def __name__(self) -> str:
        return f"rls({self.gamma:g})"


def rls(gamma: float = 1.0) -> Any:
    """Recursive least squares in one pass: `optimizer=tpsgd.rls()`, or as one of a list.

    After n samples (rows, for a convolution) the weights are those of `ridge(gamma / n)`, but they
    are updated after every batch, so a model can be used while it learns from a stream. Under
    `tpsgd.simultaneous` the blocks before it must be frozen (`rules.frozen()`). Its sums take a few
    times d x d numbers for d inputs; another `fit` starts from zero. The loss and accuracy in the
    history are those of each batch *before* the update.

    Args:
        gamma: weight of the penalty relative to the *sum* of squared errors; more than 0.

    Examples:
        >>> import tpsgd, torch
        >>> x = torch.randn(200, 5)
        >>> y = (x[:, 0] > 0).long()
        >>> model = torch.nn.Sequential(torch.nn.Linear(5, 2))
        >>> run = tpsgd.fit(model, (x, y), optimizer=tpsgd.rls(), batch_size=10)
        >>> tpsgd.evaluate(model, (x, y)) > 0.9
        True
    """
    if not (isinstance(gamma, (int, float)) and 0 < gamma < math.inf):
        raise bad_penalty("gamma must be a number, more than 0", gamma, "rls")
    return Recursive(gamma)
