"""Recursive least squares, sample after sample, with a bounded forgetting factor.

With h a row of features and a 1, P the inverse of gamma I + sum h^T h, and the latest sample first:

    g = P h^T,   W += g (y - h W) / (1 + h g),   P -= g g^T / (1 + h g)

W is then the ridge regression of all samples, the bias's row of W included in the penalty. With a
forgetting factor l below 1, a sample that came n samples ago counts l^n: (l + h g) stands for
(1 + h g), and P is divided by l. In directions in which no sample lies, P then grows without a
limit, and the next sample there, or rounding, ruins W (Astrom & Wittenmark, "Adaptive control":
estimator windup). So P is divided only while its trace is below a bound.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from tpsgd.common.errors import TpsgdError
from tpsgd.saved.expected import check_tensor

BLOCK = 64  # samples that are learned together where none is forgotten
BOUND = 10.0  # of the trace, in traces before the first sample
UNSOLVABLE = (
    "these samples are too large, or too unlike one another, for rls(): scale them to about 1, or "
    "take a larger gamma"
)
State = dict[str, Any]


class RecursiveHead:
    """Least squares that is solved after every sample.

    Args:
        features: of a row, without the 1.
        classes: columns.
        gamma: the penalty, relative to the sum of squared errors.
        forgetting: the factor l; 1 forgets nothing.
        bound: of the trace of P; None: ten times the trace that it begins with.
    """

    def __init__(
        self, features: int, classes: int, gamma: float, forgetting: float, bound: float | None
    ) -> None:
        side = features + 1
        self.forgetting, self.bound = forgetting, BOUND * side / gamma if bound is None else bound
        self.P = torch.eye(side, dtype=torch.float64) / gamma
        self.W = torch.zeros(side, classes, dtype=torch.float64)

    def add(self, x: Tensor, h: Tensor, y: Tensor) -> None:
        """Learn from samples in their order; from all of them, or from none if they are refused."""
        h = nn.functional.pad(h, (0, 1), value=1.0)
        pair = self.P, self.W
        if self.forgetting == 1:
            for rows, targets in zip(h.split(BLOCK), y.split(BLOCK), strict=True):
                pair = learned_together(*pair, rows, targets)
        else:
            pair = self.P.clone(), self.W.clone()
            for row, target in zip(h, y, strict=True):
                self._learn(*pair, row, target)
        if not all(torch.isfinite(t).all() for t in pair):
            raise TpsgdError(UNSOLVABLE)
        self.P, self.W = pair

    def _learn(self, P: Tensor, W: Tensor, h: Tensor, y: Tensor) -> None:
        """Change P and W by one sample, while the earlier ones are forgotten."""
        g = P @ h
        variance = float(h @ g)
        if not 0 <= variance < math.inf:  # P has lost a sign to rounding
            raise TpsgdError(UNSOLVABLE)
        scale = 1 / (self.forgetting + variance)
        W.addr_(g, y - h @ W, alpha=scale)
        P.addr_(g, g, alpha=-scale)
        if float(P.trace()) < self.bound:
            P /= self.forgetting

    def add_class(self) -> None:
        """A column of zeros, as of a class that was absent from all samples."""
        self.W = nn.functional.pad(self.W, (0, 1))

    def solution(self) -> tuple[Tensor, Tensor]:
        """Weights and biases, as they are."""
        return self.W[:-1], self.W[-1]

    def merge(self, other: Any, columns: list[int]) -> None:
        """Refused: P and W are no sums."""
        raise TpsgdError(
            "rls() has no sums that can be merged: take solver=tpsgd.ridge(), whose weights are "
            "the same without a forgetting factor"
        )

    def state(self) -> State:
        """P and W."""
        return {"P": self.P, "W": self.W}

    def restore(self, state: State) -> None:
        """Go on with a state."""
        for name in ("P", "W"):
            check_tensor(name, state[name], getattr(self, name))
        self.P, self.W = state["P"], state["W"]


def learned_together(P: Tensor, W: Tensor, h: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """P and W after several samples, none of which is forgotten (Woodbury)."""
    g = P @ h.mT
    inner = h @ g
    inner.diagonal().add_(1.0)
    L, failed = torch.linalg.cholesky_ex(inner)
    if failed:
        raise TpsgdError(UNSOLVABLE)
    gain = torch.cholesky_solve(g.mT, L)
    P = P - g @ gain
    return (P + P.mT) / 2, W + gain.mT @ (y - h @ W)
