"""Fixed random class codes: the projection P of a block, one row per class.

Row c of P is a pure function of (seed, block, time step, class). So it can be recomputed instead of
being stored, a new class changes no other row, and the numbers are the same on every machine and
device: a counter-based hash (splitmix64) in integer arithmetic, then operations with
only one IEEE 754 rounding. `torch.randn` has neither property: its bytes differ between CPU types,
and its rows change with the shape.

    P = normal()(shape=(256,), classes=10, key=Key(seed=0, block=1))     # (10, 256)

| projection   | entries                                       | in the paper             |
|--------------|-----------------------------------------------|--------------------------|
| `normal`     | N(0, std); over whole feature maps "naive"    | linear, Conv2D naive     |
| `uniform`    | mean 0, the same deviation                    | linear                   |
| `binary`     | -std or +std; rows nearly orthogonal          | recurrent l1             |
| `orthogonal` | rows orthogonal, entries of deviation std     | recurrent DRTP           |
| `per_filter` | filter i of nf: N(0, std * i / nf), i = 1..nf | Conv2D filter-based      |

The paper prints sigma_i = i / nf "in [0, 1)" and counts i from 1: we count from 1, which gives
(0, 1], because i = 0 would be an all-zero target.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from statistics import NormalDist

import torch
from torch import Tensor

from tpsgd.common.errors import TpsgdError
from tpsgd.common.numbers import is_real
from tpsgd.maths.random import Key, splitmix64, streams

PIECE, PIECES = 1 << 9, 64  # numbers drawn together, and pieces of a large P
_BITS = 24  # of each hash, as many as a float32 holds
_TABLE = 12  # of those, the bits that choose a segment of the normal quantile table
_FIXED = 16  # binary digits after the point in that table
QUANTUM = 2.0 ** -(_FIXED + _BITS - _TABLE + 1)


@dataclass(frozen=True)
class Projection:
    """A distribution of class codes: call it with a shape, the classes and a key to draw P."""

    name: str
    rows: Callable[[Key, list[int], tuple[int, ...], torch.device], Tensor]
    std: float = 1.0

    def __post_init__(self) -> None:
        if not is_real(self.std):
            raise TpsgdError(f"std must be a number, the deviation of codes, got {self.std!r}")

    def __call__(
        self,
        shape: Iterable[int],
        classes: int | Iterable[int],
        key: Key,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """P of shape `(classes, *shape)`, float32.

        `classes` is their number, or the indices of the rows to draw.

        Examples:
            >>> P = normal()((2, 3), 4, Key(seed=1))
            >>> P.shape
            torch.Size([4, 2, 3])
            >>> bool((normal()((2, 3), [3], Key(seed=1))[0] == P[3]).all())
            True
        """
        shape = tuple(shape)
        indices = list(range(classes) if isinstance(classes, int) else classes)
        if not prod(shape) or not indices:
            raise TpsgdError(f"a projection needs a shape and classes, got {shape} and {classes}")
        P = self.rows(key, indices, shape, torch.device(device))
        return P if self.std == 1.0 else P.mul_(self.std)


@dataclass(frozen=True)
class Redrawn:
    """P that is not stored: the row of a class is computed when it is needed, and dropped again."""

    projection: Projection
    shape: tuple[int, ...]
    classes: int
    key: Key
    device: torch.device | str
    dtype: torch.dtype
    factor: float = 1.0
    channels_last: bool = False

    def to(self, dtype: torch.dtype) -> "Redrawn":
        """The same in another number format."""
        return replace(self, dtype=dtype)

    def laid_out(self) -> "Redrawn":
        """The same for feature maps with their channels last in memory."""
        return replace(self, channels_last=len(self.shape) == 3)

    def __truediv__(self, number: float) -> "Redrawn":
        return replace(self, factor=self.factor / number)

    def whole(self) -> Tensor:
        """P itself."""
        return self.projection(self.shape, self.classes, self.key, self.device).to(self.dtype)

    def aim(self, s: Tensor) -> Tensor:
        """P s of every sample, for class indices or rows of numbers; see `objectives.aim`."""
        layout = torch.channels_last if self.channels_last else torch.contiguous_format
        shape = (len(s), *self.shape)
        aims = torch.empty(shape, dtype=self.dtype, device=self.device, memory_format=layout)
        weighted = s.is_floating_point()
        if weighted:
            aims.zero_()
        each = [1] * len(self.shape)
        for c in range(self.classes):
            row = self.projection(self.shape, [c], self.key, self.device).to(self.dtype)
            row = row.mul_(self.factor)
            if weighted:
                aims.addcmul_(row, s[:, c].view(-1, *each))
            else:
                torch.where((s == c).view(-1, *each), row, aims, out=aims)
        return aims


def normal(std: float = 1.0) -> Projection:
    """Normal codes, by linear interpolation in a table of quantiles, within 4 deviations."""
    return Projection("normal", _normal, std)


def uniform(std: float = 1.0) -> Projection:
    """Uniform codes on (-sqrt(3) std, sqrt(3) std): mean 0, deviation std."""
    return Projection("uniform", _uniform, std)


def binary(std: float = 1.0) -> Projection:
    """Codes of -std and +std. Two rows of length n overlap by about 1/sqrt(n)."""
    return Projection("binary", _binary, std)


def orthogonal(std: float = 1.0) -> Projection:
    """Normal codes, orthogonalised row by row and scaled so that the deviation of entries is std.

    Row c is orthogonal to the rows before it. With more classes than units, that holds within each
    group of as many rows as there are units.
    """
    return Projection("orthogonal", _orthogonal, std)


def per_filter(std: float = 1.0) -> Projection:
    """The paper's filter-based sampling: filter i of nf gets N(0, std * i / nf).

    The first dimension of the shape counts the filters; for a linear layer, its units.
    """
    return Projection("per_filter", _per_filter, std)


def _normal(key: Key, classes: list[int], shape: tuple[int, ...], device: torch.device) -> Tensor:
    table = make_tables().to(device)
    return _fill(key, classes, shape, device, lambda u: quantiles(u, table)).mul_(QUANTUM)


def quantiles(u: Tensor, table: Tensor) -> Tensor:
    """Normal numbers, in whole multiples of `QUANTUM`, from whole numbers below 2^24."""
    low = _BITS - _TABLE
    segment, within = u >> low, (u & ((1 << low) - 1)).mul_(2).add_(1)
    start = table[segment]
    within.mul_(table[segment.add_(1)].sub_(start))
    return start.mul_(1 << (low + 1)).add_(within)


def _uniform(key: Key, classes: list[int], shape: tuple[int, ...], device: torch.device) -> Tensor:
    P = _fill(key, classes, shape, device, lambda u: u.mul_(2).add_(1 - (1 << _BITS)))
    return P.mul_(3**0.5 * 2.0**-_BITS)


def _binary(key: Key, classes: list[int], shape: tuple[int, ...], device: torch.device) -> Tensor:
    return _fill(key, classes, shape, device, lambda u: (u >> (_BITS - 1)).mul_(2).sub_(1))


def _per_filter(
    key: Key, classes: list[int], shape: tuple[int, ...], device: torch.device
) -> Tensor:
    sigma = torch.arange(1, shape[0] + 1, dtype=torch.float32) / shape[0]
    sigma = sigma.to(device).view(1, -1, *[1] * (len(shape) - 1))
    return _normal(key, classes, shape, device).mul_(sigma)


def _orthogonal(
    key: Key, classes: list[int], shape: tuple[int, ...], device: torch.device
) -> Tensor:
    """Gram-Schmidt in float64, rounded to 2**-18 so that the order of sums does not matter.

    Gram-Schmidt is A = L Q with a triangular L, the Cholesky factor of A A^T. It is done twice,
    because a single time loses digits when rows are nearly parallel.
    """
    units = prod(shape)
    rows = _normal(key, list(range(max(classes) + 1)), (units,), torch.device("cpu")).double()
    for group in rows.split(units):
        for _ in range(2):
            lower = torch.linalg.cholesky(group @ group.T)
            group.copy_(torch.linalg.solve_triangular(lower, group, upper=False))
    rows = rows[classes].mul_(units**0.5 * 2**18).round_().mul_(2.0**-18)
    return rows.float().view(-1, *shape).to(device)


def _fill(
    key: Key,
    classes: list[int],
    shape: tuple[int, ...],
    device: torch.device,
    convert: Callable[[Tensor], Tensor],
) -> Tensor:
    """A row of integers per class; on the CPU in pieces that take little beyond P."""
    units = prod(shape)
    P = torch.empty(len(classes), units, dtype=torch.float32, device=device)
    starts = streams(key, classes, device)
    piece = max(PIECE // len(classes), units // PIECES, 1) if device.type == "cpu" else units
    for start in range(0, units, piece):
        columns = P[:, start : start + piece]
        counter = torch.arange(start, start + columns.shape[1], device=device)
        top = (splitmix64(counter, starts) >> (64 - _BITS)).bitwise_and_((1 << _BITS) - 1)
        columns.copy_(convert(top))
    return P.view(-1, *shape)


@cache
def make_tables() -> Tensor:
    """Normal quantiles at k / 4096 in fixed point, within 4 deviations."""
    inverse, n = NormalDist().inv_cdf, 1 << _TABLE
    quantiles = (-4.0, *(inverse(k / n) for k in range(1, n)), 4.0)
    return torch.tensor([round((1 << _FIXED) * q) for q in quantiles])
