"""Heads that are solved instead of trained, from samples that are read once.

Each head is a linear classifier `h W + b` of rows of features, which knows all samples so far
though it stores none of them.

- `RidgeHead`: ridge regression on one-hot labels, from sums of products. The order of samples
  changes nothing, and the sums over two parts add up to the sums over both (G-ACIL, Zhuang et al.
  2024). The penalty is chosen by the squared error of held-out samples (RanPAC): a fifth of all,
  which have sums of their own. Their error follows from the sums, so they are not stored either.
- `DiscriminantHead`: streaming linear discriminant analysis (Hayes & Kanan 2020), from the same
  sums: class means and one covariance.
- `RecursiveHead`, in `recursion`: recursive least squares, with the solution after every sample.
"""

from dataclasses import dataclass
from typing import Any, Protocol
from zlib import crc32

import torch
from torch import Tensor

from tpsgd.common.errors import TpsgdError
from tpsgd.engine.solvers.least_squares import MomentSums
from tpsgd_streams.sums import State, added, make_sums

PENALTIES = tuple(10.0**k for k in range(-8, 3))  # of the mean variance of a feature
UNKNOWN = 0.1  # the penalty while no sample is held out
HELD_OUT = 5  # one sample in so many


class SolvedHead(Protocol):
    """What `OnePass` asks of a head."""

    def add(self, x: Tensor, h: Tensor, y: Tensor) -> None:
        """Learn from samples x with features h and one-hot labels y."""

    def add_class(self) -> None:
        """One more column, which was 0 for all samples so far."""

    def solution(self) -> tuple[Tensor, Tensor]:
        """Weights (features, classes) and biases."""
        ...

    def merge(self, other: Any, columns: list[int]) -> None:
        """Add the samples of another head, whose classes are these columns."""

    def state(self) -> State:
        """Plain values and tensors, which are not copied."""
        ...

    def restore(self, state: State) -> None:
        """Go on with a state; a ValueError if it is not one of such a head."""


@dataclass(frozen=True)
class Discriminant:
    """Streaming linear discriminant analysis."""

    shrinkage: float = 1e-4


def lda(shrinkage: float = 1e-4) -> Discriminant:
    """Streaming linear discriminant analysis: `tpsgd.OnePass(solver=tpsgd.lda())`.

    Class means and one covariance of all classes, shrunk towards a multiple of the identity.
    Classes count as often as they came.

    Args:
        shrinkage: from 0 to 1.
    """
    if not isinstance(shrinkage, (int, float)) or not 0 <= shrinkage <= 1:
        raise TpsgdError(f"shrinkage must be a number from 0 to 1, got {shrinkage!r}")
    return Discriminant(shrinkage)


class RidgeHead:
    """Ridge regression from sums; without `alpha`, by the error of held-out samples."""

    def __init__(
        self, features: int, classes: int, alpha: float | None, forgetting: float = 1.0
    ) -> None:
        self.alpha, self.learned = alpha, make_sums(features, classes, forgetting)
        held_out = make_sums(features, classes, forgetting) if alpha is None else None
        self.held_out, self.penalty = held_out, alpha or 0.0  # that of the latest solution

    def add(self, x: Tensor, h: Tensor, y: Tensor) -> None:
        if self.held_out is None:
            self.learned.add(h, y)
            return
        apart = is_held_out(x)
        self.held_out.add(h[apart], y[apart])
        self.learned.add(h[~apart], y[~apart])

    def add_class(self) -> None:
        self.learned.add_class()
        if self.held_out is not None:
            self.held_out.add_class()

    def solution(self) -> tuple[Tensor, Tensor]:
        """Of all samples, with the penalty that samples that are held out choose."""
        learned = self.learned.total()
        if self.alpha is not None or self.held_out is None:
            weight, bias, *_ = learned.solve(self.alpha)
            return weight.mT, bias
        held_out = self.held_out.total()
        total = added(learned, held_out)
        variance = mean_variance(total)
        if not variance:
            return torch.zeros_like(total.xy), total.y[0]
        self.penalty = best_penalty(learned, held_out) * variance
        weight, bias = total.so_far(self.penalty * total.count)
        return weight.mT, bias

    def merge(self, other: Any, columns: list[int]) -> None:
        self.learned.merge(other.learned, columns)
        if self.held_out is not None:
            self.held_out.merge(other.held_out, columns)

    def state(self) -> State:
        held_out = None if self.held_out is None else self.held_out.state()
        return {"learned": self.learned.state(), "held_out": held_out}

    def restore(self, state: State) -> None:
        self.learned.restore(state["learned"])
        if (state["held_out"] is None) != (self.held_out is None):
            raise ValueError("the state has other sums")
        if self.held_out is not None:
            self.held_out.restore(state["held_out"])


class DiscriminantHead:
    """Linear discriminant analysis from sums."""

    def __init__(
        self, features: int, classes: int, shrinkage: float, forgetting: float = 1.0
    ) -> None:
        self.shrinkage, self.learned = shrinkage, make_sums(features, classes, forgetting)

    def add(self, x: Tensor, h: Tensor, y: Tensor) -> None:
        self.learned.add(h, y)

    def add_class(self) -> None:
        self.learned.add_class()

    def solution(self) -> tuple[Tensor, Tensor]:
        """h W + b: the logarithm of each class's probability, up to a number for all classes."""
        sums, shrinkage = self.learned.total(), self.shrinkage
        shares = sums.y[0].clamp(min=0)
        counts = (sums.count * shares).clamp(min=1e-9)
        offsets = sums.xy / counts  # of class means from the mean of all
        within = (sums.xx - (offsets * counts) @ offsets.mT) / sums.count
        mean = within.diagonal().mean().clamp(min=1e-30)
        within.mul_(1 - shrinkage).diagonal().add_(shrinkage * mean)
        L, failed = torch.linalg.cholesky_ex(within)
        if failed:
            raise TpsgdError(
                "the covariance of the features has no inverse: pass more samples first, or take "
                "a larger shrinkage, solver=tpsgd.lda(0.01)"
            )
        weight = torch.cholesky_solve(offsets, L)
        bias = shares.log() - (offsets * weight).sum(0) / 2 - sums.x[0] @ weight
        return weight, bias

    def merge(self, other: Any, columns: list[int]) -> None:
        self.learned.merge(other.learned, columns)

    def state(self) -> State:
        return {"learned": self.learned.state()}

    def restore(self, state: State) -> None:
        self.learned.restore(state["learned"])


def is_held_out(x: Tensor) -> Tensor:
    """Which samples are held out: a hash of its numbers decides, in whatever batch it comes."""
    samples = x.flatten(1).float().cpu().numpy()
    return torch.tensor([crc32(sample.tobytes()) % HELD_OUT == 0 for sample in samples])


def best_penalty(learned: MomentSums, held_out: MomentSums) -> float:
    """The penalty, of a feature's mean variance, with the smallest error of held-out samples."""
    if not held_out.count or not (variance := mean_variance(learned)):
        return UNKNOWN
    errors = {}
    for penalty in PENALTIES:
        weight, bias = learned.so_far(penalty * variance * learned.count)
        error = squared_error(held_out, weight.mT, bias)
        errors[penalty] = error if error == error else float("inf")  # NaN: cannot be solved
    return min(errors, key=lambda penalty: errors[penalty])


def mean_variance(sums: MomentSums) -> float:
    """The mean over features of their variance; 0 without samples."""
    return float(sums.xx.diagonal().mean()) / sums.count if sums.count else 0.0


def squared_error(sums: MomentSums, weight: Tensor, bias: Tensor) -> float:
    """The sum of ||h W + b - y||^2 over the samples of these sums."""
    products = (weight * (sums.xx @ weight)).sum() - 2 * (weight * sums.xy).sum()
    shift = sums.x[0] @ weight + bias - sums.y[0]
    return float(products + sums.yy.trace() + sums.count * shift.square().sum())
