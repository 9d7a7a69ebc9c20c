"""`rls()`: ridge regression on a stream, the weights right after every block of samples.

LM-KARnet (Zhuang, Lin & Toh, "A low-memory learning formulation for a kernel-and-range network",
2019) has its name from this recursion over blocks X, Y of samples:

    R_0 = I / gamma,   K = (I + X R X^T)^-1,   R <- R - R X^T K X R,   W <- W + R X^T (Y - X W)

R is the inverse of A = gamma I + sum X^T X. We keep A itself, to which a block is added, and solve
A W = sum X^T Y after each by its Cholesky factor: the same weights, without the subtraction that
lets rounding errors grow when inputs depend on one another. A is d x d for d inputs, whatever the
number of samples. After n of them the weights are those of `ridge(gamma / n)`.
"""

from dataclasses import dataclass
from typing import Any

from tpsgd.errors import TpsgdError
from tpsgd.solvers.ridge import number


@dataclass(frozen=True)
class Recursive:
    """Where an optimizer stands: a block's rows are added up, and solved after every batch."""

    gamma: float = 1.0

    @property
    def __name__(self) -> str:
        return f"rls({self.gamma:g})"


def rls(gamma: float = 1.0) -> Any:
    """Blocks by recursive least squares, one pass: `optimizer=tpsgd.rls()`, or a list.

    The same weights as `ridge(gamma / n)` after n samples (rows, for a convolution), but they are
    there after every batch, so a model can be used while it learns from a stream. Under
    `tpsgd.simultaneous` the blocks before it must stay as they are (`rules.frozen()`). Its sums
    take a few times d x d numbers for d inputs, and another `fit` begins anew. The
    history's loss and accuracy are of each batch *before* it is learned from.

    Args:
        gamma: weighs the penalty against the *sum* of squared errors, so it must be known before
            the samples are; more than 0.

    Examples:
        >>> import tpsgd, torch
        >>> x = torch.randn(200, 5)
        >>> y = (x[:, 0] > 0).long()
        >>> model = torch.nn.Sequential(torch.nn.Linear(5, 2))
        >>> run = tpsgd.fit(model, (x, y), optimizer=tpsgd.rls(), batch_size=10)
        >>> tpsgd.evaluate(model, (x, y)) > 0.9
        True
    """
    if number("gamma", gamma, "rls") <= 0:
        raise TpsgdError(f"gamma must be a number, more than 0, got {gamma}")
    return Recursive(gamma)
