"""`rls()`: ridge regression by recursion over blocks of samples, the weights right after each.

    R_0 = I / gamma,   K = (I + X R X^T)^-1,   R <- R - R X^T K X R,   W <- W + R X^T (Y - X W)

This is what makes LM-KARnet a low-memory net (Zhuang, Lin & Toh, "A low-memory learning formulation
for a kernel-and-range network", 2019). R is d x d for d inputs, whatever the number of samples, and
after n of them the weights are those of `ridge(gamma / n)`.

The bias has no penalty, as in `ridge`: inputs and targets are seen from their running means. A
block of m rows with means x_B, y_B that meets n rows with means x_A, y_A adds, besides its own
centred rows, one row sqrt(n m / (n + m)) (x_B - x_A, y_B - y_A) for the shift of the means.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tpsgd.errors import TpsgdError


@dataclass(frozen=True)
class Recursive:
    """Where an optimizer stands: `start` gives what a block's rows are added to."""

    gamma: float = 1.0

    @property
    def __name__(self) -> str:
        return f"rls({self.gamma:g})"

    def start(self, bias: bool = True) -> "Recursion":
        """Before the first sample."""
        return Recursion(self.gamma, bias)


@dataclass
class Recursion:
    """R, W and the running means; each with a leading dimension of restarts, if any."""

    gamma: float
    bias: bool = True
    count: int = 0
    R: Tensor = field(default_factory=lambda: torch.empty(0))
    W: Tensor = field(default_factory=lambda: torch.empty(0))
    x: Tensor = field(default_factory=lambda: torch.empty(0))
    y: Tensor = field(default_factory=lambda: torch.empty(0))

    def add(self, x: Tensor, y: Tensor) -> None:
        """A block of rows more, in float64."""
        if not self.count:
            *lead, _, d = x.shape
            eye = torch.eye(d, dtype=x.dtype, device=x.device)
            self.R = eye.expand(*lead, d, d) / self.gamma
            self.W = x.new_zeros(*lead, d, y.shape[-1])
            self.x, self.y = x.new_zeros(*lead, 1, d), y.new_zeros(*lead, 1, y.shape[-1])
        if self.bias:
            x, y = self._centred(x, y)
        else:
            self.count += x.shape[-2]
        self._update(x, y)

    def _centred(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The block seen from its own means, and a row for the shift of the running ones."""
        n, m = self.count, x.shape[-2]
        mx, my = x.mean(-2, keepdim=True), y.mean(-2, keepdim=True)
        dx, dy = mx - self.x, my - self.y
        weight = math.sqrt(n * m / (n + m))
        self.count = n + m
        self.x, self.y = self.x + dx * (m / (n + m)), self.y + dy * (m / (n + m))
        return torch.cat([x - mx, weight * dx], -2), torch.cat([y - my, weight * dy], -2)

    def _update(self, x: Tensor, y: Tensor) -> None:
        eye = torch.eye(min(x.shape[-2:]), dtype=x.dtype, device=x.device)
        if x.shape[-2] <= x.shape[-1]:
            RX = self.R @ x.mT
            self.R = self.R - RX @ torch.linalg.solve(eye + x @ RX, RX.mT)
        else:  # more rows than inputs: (R^-1 + X^T X)^-1 = (I + R X^T X)^-1 R
            self.R = torch.linalg.solve(eye + self.R @ (x.mT @ x), self.R)
        self.R = (self.R + self.R.mT) / 2  # rounding must not make it lopsided
        self.W = self.W + self.R @ (x.mT @ (y - x @ self.W))

    def solution(self, codes: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Weight `(targets, inputs)` and bias; with `codes`, of targets that are y times them."""
        W, y = self.W, self.y
        if codes is not None:
            W, y = W @ codes.double(), y @ codes.double()
        return W.mT, (y - self.x @ W).squeeze(-2)


def rls(gamma: float = 1.0) -> Any:
    """Blocks by recursive least squares, one pass: `optimizer=tpsgd.rls()`, or a list.

    The same weights as `ridge(gamma / n)` after n samples (rows, for a convolution), but they are
    there after every batch, so a model can be used while it learns from a stream, under both
    schedules. The history's loss and accuracy are of each batch *before* it is learned from.

    Args:
        gamma: weighs the penalty against the *sum* of squared errors, which must be known before
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
    if not 0 < gamma < math.inf:
        raise TpsgdError(f"gamma must be a number, more than 0, got {gamma}")
    return Recursive(gamma)
