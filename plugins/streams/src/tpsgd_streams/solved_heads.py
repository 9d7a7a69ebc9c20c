"""Heads that are solved instead of trained, from samples that are read once.

Each head is a linear classifier `h W + b` of rows of features, which knows all samples so far
though it stores none of them. A new class is a column of zeros: it was absent from all samples.

- `RidgeHead`: ridge regression on one-hot labels, from sums of products. The order of samples
  changes nothing, and the sums over two parts add up to the sums over both (G-ACIL, Zhuang et al.
  2024). The penalty is chosen by the squared error of held-out samples (RanPAC): a fifth of all,
  which have sums of their own. Their error follows from the sums, so they are not stored either.
- `DiscriminantHead`: streaming linear discriminant analysis (Hayes & Kanan 2020), from the same
  sums: class means and one covariance.
- `RecursiveHead`: recursive least squares, with the solution after every sample and, if asked for,
  a forgetting factor (`recursion`).
"""

from dataclasses import dataclass
from typing import Any, Protocol
from zlib import crc32

import torch
from torch import Tensor, nn

from tpsgd.common.errors import TpsgdError
from tpsgd.engine.solvers.least_squares import MomentSums
from tpsgd.saved.expected import check_number, check_tensor

State = dict[str, Any]
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
        """Go on with a state."""


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

    def __init__(self, features: int, classes: int, alpha: float | None) -> None:
        self.alpha, self.learned = alpha, no_sums(features, classes)
        self.held_out = no_sums(features, classes) if alpha is None else None
        self.penalty = alpha or 0.0  # of the latest solution

    def add(self, x: Tensor, h: Tensor, y: Tensor) -> None:
        if self.held_out is None:
            self.learned.add(h, y)
            return
        apart = is_held_out(x)
        self.held_out.add(h[apart], y[apart])
        self.learned.add(h[~apart], y[~apart])

    def add_class(self) -> None:
        for sums in (self.learned, self.held_out):
            if sums is not None:
                pad_class(sums)

    def solution(self) -> tuple[Tensor, Tensor]:
        """Of all samples, with the penalty that samples that are held out choose."""
        total = copied(self.learned)
        if self.held_out is not None:
            merge(total, self.held_out)
        if self.alpha is not None:
            weight, bias, *_ = total.solve(self.alpha)
            return weight.mT, bias
        variance = mean_variance(total)
        if not variance:
            return torch.zeros_like(total.xy), total.y[0]
        self.penalty = self._best() * variance
        weight, bias = total.so_far(self.penalty * total.count)
        return weight.mT, bias

    def _best(self) -> float:
        """The penalty, of a feature's mean variance, with the smallest held-out error."""
        learned, held_out = self.learned, self.held_out
        if held_out is None or not held_out.count or not (variance := mean_variance(learned)):
            return UNKNOWN
        errors = {}
        for penalty in PENALTIES:
            weight, bias = learned.so_far(penalty * variance * learned.count)
            error = squared_error(held_out, weight.mT, bias)
            errors[penalty] = error if error == error else float("inf")  # NaN: cannot be solved
        return min(errors, key=lambda penalty: errors[penalty])

    def merge(self, other: Any, columns: list[int]) -> None:
        merge(self.learned, spread(other.learned, columns, self.learned.sides[1]))
        if self.held_out is not None:
            merge(self.held_out, spread(other.held_out, columns, self.held_out.sides[1]))

    def state(self) -> State:
        held_out = None if self.held_out is None else dict(vars(self.held_out))
        return {"learned": dict(vars(self.learned)), "held_out": held_out}

    def restore(self, state: State) -> None:
        learned, held_out = restored(self.learned, state["learned"]), state["held_out"]
        if (held_out is None) != (self.held_out is None):
            raise ValueError("the state has other sums")
        if self.held_out is not None:
            self.held_out = restored(self.held_out, held_out)
        self.learned = learned


class DiscriminantHead:
    """Linear discriminant analysis from sums."""

    def __init__(self, features: int, classes: int, shrinkage: float) -> None:
        self.shrinkage, self.learned = shrinkage, no_sums(features, classes)

    def add(self, x: Tensor, h: Tensor, y: Tensor) -> None:
        self.learned.add(h, y)

    def add_class(self) -> None:
        pad_class(self.learned)

    def solution(self) -> tuple[Tensor, Tensor]:
        """h W + b: the logarithm of each class's probability, up to a number for all classes."""
        sums, shrinkage = self.learned, self.shrinkage
        shares = sums.y[0].clamp(min=0)
        counts = (sums.count * shares).clamp(min=1)
        offsets = sums.xy / counts  # of class means from the mean of all
        within = (sums.xx - (offsets * counts) @ offsets.mT) / max(sums.count, 1)
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
        merge(self.learned, spread(other.learned, columns, self.learned.sides[1]))

    def state(self) -> State:
        return {"learned": dict(vars(self.learned))}

    def restore(self, state: State) -> None:
        self.learned = restored(self.learned, state["learned"])


def is_held_out(x: Tensor) -> Tensor:
    """Which samples are held out: a hash of its numbers decides, in whatever batch it comes."""
    samples = x.flatten(1).float().cpu().numpy()
    return torch.tensor([crc32(sample.tobytes()) % HELD_OUT == 0 for sample in samples])


def no_sums(features: int, classes: int) -> MomentSums:
    """Sums over no samples."""
    return MomentSums(torch.empty(0, features), torch.empty(0, classes), bias=True)


def copied(sums: MomentSums) -> MomentSums:
    """The same sums, to be changed."""
    copy = MomentSums.__new__(MomentSums)
    vars(copy).update({k: v.clone() if isinstance(v, Tensor) else v for k, v in vars(sums).items()})
    return copy


def merge(sums: MomentSums, other: MomentSums) -> None:
    """Add the sums over other samples."""
    if other.count:
        sums.merge(other)


def pad_class(sums: MomentSums) -> None:
    """A class that was absent from all samples."""
    sums.y, sums.xy = nn.functional.pad(sums.y, (0, 1)), nn.functional.pad(sums.xy, (0, 1))
    sums.yy = nn.functional.pad(sums.yy, (0, 1, 0, 1))


def spread(sums: MomentSums, columns: list[int], classes: int) -> MomentSums:
    """The same sums with their classes in these columns, and 0 for classes that never came."""
    wide = no_sums(sums.sides[0], classes)
    wide.count, wide.x, wide.xx = sums.count, sums.x, sums.xx
    index = torch.tensor(columns, dtype=torch.long)
    wide.y[:, index], wide.xy[:, index] = sums.y, sums.xy
    wide.yy[index[:, None], index] = sums.yy
    return wide


def mean_variance(sums: MomentSums) -> float:
    """The mean over features of their variance."""
    return float(sums.xx.diagonal().mean()) / max(sums.count, 1)


def squared_error(sums: MomentSums, weight: Tensor, bias: Tensor) -> float:
    """The sum of ||h W + b - y||^2 over the samples of these sums."""
    products = (weight * (sums.xx @ weight)).sum() - 2 * (weight * sums.xy).sum()
    shift = sums.x[0] @ weight + bias - sums.y[0]
    return float(products + sums.yy.trace() + sums.count * shift.square().sum())


def restored(like: MomentSums, values: State) -> MomentSums:
    """Sums out of a file; a ValueError if they are not such sums."""
    if not isinstance(values, dict) or values.keys() != vars(like).keys() or not values["bias"]:
        raise ValueError("the state has no sums")
    check_number("count", values["count"], least=0, whole=True)
    for name in ("x", "y", "xx", "xy", "yy"):
        check_tensor(name, values[name], getattr(like, name))
    sums = MomentSums.__new__(MomentSums)
    vars(sums).update(values)
    return sums
