"""Recursive least squares, sample after sample, with a bounded forgetting factor.

With h a row of features and a 1, P the inverse of gamma I + sum h^T h, and the latest sample first:

    g = P h^T,   W += g (y - h W) / (1 + h g),   P -= g g^T / (1 + h g)

W is then the ridge regression of all samples, the bias's row of W included in the penalty. With a
forgetting factor l below 1, a sample that came n samples ago counts l^n: (l + h g) stands for
(1 + h g), and P is divided by l. In directions in which no sample lies, P then grows without a
limit, and the next sample there, or rounding, ruins W (Astrom & Wittenmark, "Adaptive control":
estimator windup). So P is divided only while its trace is below a bound.
"""

from typing import Any

import torch
from torch import Tensor, nn

from tpsgd.common.errors import TpsgdError
from tpsgd.saved.expected import check_tensor

BLOCK = 64  # samples that are learned together where none is forgotten
BOUND = 10.0  # of the trace, in traces before the first sample
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
        """Learn from samples in their order."""
        h = nn.functional.pad(h, (0, 1), value=1.0)
        if self.forgetting == 1:
            for rows, targets in zip(h.split(BLOCK), y.split(BLOCK), strict=True):
                self._learn_together(rows, targets)
            return
        for row, target in zip(h, y, strict=True):
            self._learn(row, target)

    def _learn_together(self, h: Tensor, y: Tensor) -> None:
        """Several samples, none of which is forgotten (Woodbury)."""
        g = self.P @ h.mT
        inner = h @ g
        inner.diagonal().add_(1.0)
        gain = torch.cholesky_solve(g.mT, torch.linalg.cholesky(inner))
        self.W += gain.mT @ (y - h @ self.W)
        self.P -= g @ gain
        self.P.copy_((self.P + self.P.mT) / 2)

    def _learn(self, h: Tensor, y: Tensor) -> None:
        """One sample, while the earlier ones are forgotten."""
        g = self.P @ h
        scale = 1 / (self.forgetting + float(h @ g))
        self.W.addr_(g, y - h @ self.W, alpha=scale)
        self.P.addr_(g, g, alpha=-scale)
        if float(self.P.trace()) < self.bound:
            self.P /= self.forgetting

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
