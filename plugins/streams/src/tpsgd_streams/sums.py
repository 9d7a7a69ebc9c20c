"""Sums over samples that are read once: all that least squares and discriminant analysis need.

`PooledSums` has d x d numbers for d features and forgets nothing. `ForgettingSums` has them for
each class, and a sample of a class counts less with every later sample of the same class: what a
class means can change, while a class that does not come stays as it is. Both add up over parts of
the data, and a new class was absent from all samples before it.
"""

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from tpsgd.engine.solvers.least_squares import MomentSums
from tpsgd.saved.expected import check_number, check_tensor

State = dict[str, Any]


class Sums(Protocol):
    """What heads ask of sums."""

    def add(self, h: Tensor, y: Tensor) -> None:
        """Add rows of features with one-hot labels."""

    def add_class(self) -> None:
        """One more class, which was absent from all samples."""

    def merge(self, other: Any, columns: list[int]) -> None:
        """Add the sums over other samples, whose classes are these columns."""

    def total(self) -> MomentSums:
        """Moments of all samples, not to be changed."""
        ...

    def state(self) -> State:
        """Plain values and tensors, which are not copied."""
        ...

    def restore(self, state: State) -> None:
        """Go on with a state; a ValueError if it is not one of such sums."""


def make_sums(features: int, classes: int, forgetting: float) -> Sums:
    """Sums over no samples."""
    if forgetting == 1:
        return PooledSums(features, classes)
    return ForgettingSums(features, classes, forgetting)


class PooledSums:
    """Sums over all samples, in which each counts once."""

    def __init__(self, features: int, classes: int) -> None:
        self.moments = no_moments(features, classes)

    def add(self, h: Tensor, y: Tensor) -> None:
        self.moments.add(h, y)

    def add_class(self) -> None:
        classes = self.moments.sides[1]
        self.moments = spread(self.moments, list(range(classes)), classes + 1)

    def merge(self, other: Any, columns: list[int]) -> None:
        if other.moments.count:
            self.moments.merge(spread(other.moments, columns, self.moments.sides[1]))

    def total(self) -> MomentSums:
        return self.moments

    def state(self) -> State:
        return dict(vars(self.moments))

    def restore(self, state: State) -> None:
        if state.keys() != vars(self.moments).keys() or not state["bias"]:
            raise ValueError("the state has no sums")
        check_number("count", state["count"], least=0, whole=True)
        check_tensors(self.state(), state)
        self.moments = moments_of(state)


class ForgettingSums:
    """Sums over each class, in which a sample counts `forgetting` to the power of later ones."""

    def __init__(self, features: int, classes: int, forgetting: float) -> None:
        self.forgetting, wide = forgetting, torch.float64
        self.weight = torch.zeros(classes, dtype=wide)  # of the samples of each class
        self.mean = torch.zeros(classes, features, dtype=wide)
        self.products = torch.zeros(classes, features, features, dtype=wide)  # about the mean

    def add(self, h: Tensor, y: Tensor) -> None:
        labels = y.argmax(1)
        for label in labels.unique().tolist():
            rows = h[labels == label]
            later = torch.arange(len(rows) - 1, -1, -1, dtype=torch.float64)
            weights, factor = self.forgetting**later, self.forgetting ** len(rows)
            self.weight[label] *= factor
            self.products[label] *= factor
            mean = weights @ rows / weights.sum()
            rows = rows - mean
            products = (rows.mT * weights) @ rows
            self._join(label, weights.sum(), mean, products)

    def _join(self, label: int, weight: Tensor, mean: Tensor, products: Tensor) -> None:
        """Add samples of a class by their weight, their mean and their products about it."""
        whole = self.weight[label] + weight
        apart, share = mean - self.mean[label], float(weight / whole)
        rank_one = float(self.weight[label]) * share
        self.products[label].add_(products).addr_(apart, apart, alpha=rank_one)
        self.mean[label] += apart * share
        self.weight[label] = whole

    def add_class(self) -> None:
        pad = nn.functional.pad
        self.weight, self.mean = pad(self.weight, (0, 1)), pad(self.mean, (0, 0, 0, 1))
        self.products = pad(self.products, (0, 0, 0, 0, 0, 1))

    def merge(self, other: Any, columns: list[int]) -> None:
        for label, column in enumerate(columns):
            if other.weight[label]:
                parts = other.weight[label], other.mean[label], other.products[label]
                self._join(column, *parts)

    def total(self) -> MomentSums:
        count = float(self.weight.sum())
        moments = no_moments(self.mean.shape[1], len(self.weight))
        if not count:
            return moments
        y = self.weight / count
        x = y @ self.mean
        apart = (self.mean - x).mT * self.weight
        xx = self.products.sum(0) + apart @ (self.mean - x)
        yy = self.weight.diag() - count * y[:, None] * y
        values = {"count": count, "x": x[None], "y": y[None], "xx": xx, "xy": apart, "yy": yy}
        return moments_of(vars(moments) | values)

    def state(self) -> State:
        return {"weight": self.weight, "mean": self.mean, "products": self.products}

    def restore(self, state: State) -> None:
        check_tensors(self.state(), state)
        vars(self).update({name: state[name] for name in self.state()})


def no_moments(features: int, classes: int) -> MomentSums:
    """Moments of no samples."""
    return MomentSums(torch.empty(0, features), torch.empty(0, classes), bias=True)


def moments_of(values: State) -> MomentSums:
    """Moments with these values."""
    moments = MomentSums.__new__(MomentSums)
    vars(moments).update(values)
    return moments


def added(*several: MomentSums) -> MomentSums:
    """The moments of all samples of these."""
    counted = [moments for moments in several if moments.count]
    first = (counted or several)[0]
    values = {k: v.clone() if isinstance(v, Tensor) else v for k, v in vars(first).items()}
    total = moments_of(values)
    for moments in counted[1:]:
        total.merge(moments)
    return total


def spread(moments: MomentSums, columns: list[int], classes: int) -> MomentSums:
    """The same moments with their classes in these columns, and 0 for classes that never came."""
    wide = no_moments(moments.sides[0], classes)
    wide.count, wide.x, wide.xx = moments.count, moments.x, moments.xx
    index = torch.tensor(columns, dtype=torch.long)
    wide.y[:, index], wide.xy[:, index] = moments.y, moments.xy
    wide.yy[index[:, None], index] = moments.yy
    return wide


def check_tensors(own: State, state: State) -> None:
    """Refuse a state whose tensors have other shapes."""
    for name, value in own.items():
        if isinstance(value, Tensor):
            check_tensor(name, state[name], value)
