"""Least squares instead of an optimizer.

`ridge()`: solve a block by least squares, in one pass over the samples, without an optimizer.

Ridge regression: Hoerl & Kennard (1970). On the states of a random recurrent net: Jaeger (2001). On
a random layer it is an extreme learning machine (Huang, Zhu & Siew 2006); on every block, with
projected targets, LM-KARnet (Zhuang, Lin & Toh 2019).

`rls()`: ridge regression on a stream, with its solution after every batch.

LM-KARnet (Zhuang, Lin & Toh, "A low-memory learning formulation for a kernel-and-range network",
2019) is named after this recursion over batches X, Y of samples:

    R_0 = I / gamma,   K = (I + X R X^T)^-1,   R <- R - R X^T K X R,   W <- W + R X^T (Y - X W)

R is the inverse of A = gamma I + sum X^T X. We store A, add each batch to it, and solve
A W = sum X^T Y by its Cholesky factor: the same weights, without the subtraction that lets rounding
errors grow when inputs are correlated. A is d x d for d inputs, whatever the number of samples.
After n samples the weights are those of `ridge(gamma / n)`.
"""

from dataclasses import dataclass
from typing import Any

from tpsgd.common.errors import TpsgdError
from tpsgd.common.numbers import is_real

__all__ = ["SOLVERS", "Recursive", "Ridge", "ridge", "rls"]


@dataclass(frozen=True)
class Ridge:
    """Least squares with a penalty on the weights, not on the bias."""

    alpha: float | None = None

    @property
    def __name__(self) -> str:
        return "ridge()" if self.alpha is None else f"ridge({self.alpha:g})"


def ridge(alpha: float | None = None) -> Any:
    """Solve blocks in one pass each: `optimizer=tpsgd.ridge()`, or as one of a list of optimizers.

    The last block is solved for the labels, a hidden block for the projected labels P y* of a rule
    with a squared error before the activation. `tpsgd.rls` does the same on a stream.

    - `rule=rules.frozen()`: random hidden layers and a solved head, an extreme learning machine.
    - `rule=rules.tpsgd_l2(at=Place.BEFORE)`: every block solved, LM-KARnet.
    - `optimizer=[torch.optim.Adam, tpsgd.ridge()]`: hidden blocks learn, the head is solved.

    Args:
        alpha: weight of the penalty relative to the *mean* squared error, so it does not depend on
            the number of samples; 0 is the pseudo-inverse. The default is chosen by generalised
            cross-validation.

    The history has half the mean squared error of a solved block, and no accuracy, because samples
    are read only once.

    Examples:
        >>> import tpsgd, torch
        >>> x, y = torch.eye(4), torch.arange(4)
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4))
        >>> _ = tpsgd.fit(model, (x, y), optimizer=tpsgd.ridge(1e-9))
        >>> tpsgd.evaluate(model, (x, y))
        1.0
    """
    if alpha is not None and not (is_real(alpha) and alpha >= 0):
        raise bad_penalty("alpha must be a number, 0 or more", alpha, "ridge")
    return Ridge(alpha)


def bad_penalty(rule: str, value: Any, solver: str) -> TpsgdError:
    """The error for a penalty that is no number, or a wrong one."""
    got = value if isinstance(value, (int, float)) else f"a {type(value).__name__}"
    return TpsgdError(f"{rule}, got {got}; a solver must be called: optimizer=tpsgd.{solver}()")


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
    if not (is_real(gamma) and gamma > 0):
        raise bad_penalty("gamma must be a number, more than 0", gamma, "rls")
    return Recursive(gamma)


SOLVERS = (Ridge, Recursive)
