"""Least squares with a penalty on the weights, from sums over samples or from the samples.

    W, b = argmin  mean ||x W + b - y||^2 + alpha ||W||^2

With C the covariance of the inputs, V its eigenvectors and v its eigenvalues, and D the covariance
of inputs and targets, W = V (v + alpha)^-1 V^T D. Directions in which the inputs do not vary (a
constant pixel, a repeated input) get no weight, so alpha = 0 is the pseudo-inverse, up to the
precision of float64: deviations below about 1e-6 of the largest count as 0. Without an alpha,
generalised cross-validation chooses it (Golub, Heath & Wahba 1979), which estimates the mean error
of samples that are left out.

`MomentSums` has d x d numbers for d inputs, whatever the number of samples. `SampleSums` stores the
samples, which takes less memory if they are fewer than the inputs. Both give the same weights, in
float64.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

ALPHAS = tuple(10.0**k for k in range(-10, 2))  # of the mean variance of the inputs
_NEGLIGIBLE = 1e-15  # of the largest variance, times the number of inputs: rounding


class Solution(NamedTuple):
    """Weight `(targets, inputs)`, bias, half the mean squared error; per restart if stacked."""

    weight: Tensor
    bias: Tensor
    loss: Tensor
    alpha: Tensor  # the penalty


def workspace(sums: "MomentSums | SampleSums | None") -> int:
    """Bytes that LAPACK allocates, outside torch, for the eigenvectors: 2 n^2 numbers."""
    side = sums.xx.shape[-1] if isinstance(sums, MomentSums) else sums.count if sums else 0
    return 16 * side * side


class Spectrum(NamedTuple):
    """The inputs in the directions of their principal components, and the targets."""

    variance: Tensor  # of each direction, ascending
    V: Tensor  # the directions, in columns
    along: Tensor  # each direction's covariance with the targets
    x: Tensor  # means, 0 without a bias
    y: Tensor
    yy: Tensor  # the targets' covariance
    samples: int
    bias: bool


class MomentSums:
    """Sums of products over samples; about their running means if there is a bias.

    A batch of m rows with means x_B, y_B, after n rows with means x_A, y_A, adds its centred rows
    and one row sqrt(n m / (n + m)) (x_B - x_A, y_B - y_A) for the shift of the means (Chan, Golub &
    LeVeque 1983), so that large numbers are never subtracted from each other.
    """

    def __init__(self, x: Tensor, y: Tensor, bias: bool) -> None:
        *lead, _, d = x.shape
        k, wide = y.shape[-1], {"device": x.device, "dtype": torch.float64}
        self.count, self.bias = 0, bias
        self.x, self.y = torch.zeros(*lead, 1, d, **wide), torch.zeros(*lead, 1, k, **wide)
        self.xx = torch.zeros(*lead, d, d, **wide)
        self.xy = torch.zeros(*lead, d, k, **wide)
        self.yy = torch.zeros(*lead, k, k, **wide)

    def add(self, x: Tensor, y: Tensor) -> None:
        """Add a batch."""
        m = x.shape[-2]
        if not m:  # none of its positions has a label
            return
        if self.bias:
            x, y = self._centred(x, y)
        self.count += m
        _add_product(self.xx, x, x)
        _add_product(self.xy, x, y)
        _add_product(self.yy, y, y)

    def _centred(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        n, m = self.count, x.shape[-2]
        mx, my = x.mean(-2, keepdim=True), y.mean(-2, keepdim=True)
        dx, dy = mx - self.x, my - self.y
        weight = math.sqrt(n * m / (n + m))
        self.x, self.y = self.x + dx * (m / (n + m)), self.y + dy * (m / (n + m))
        return torch.cat([x - mx, weight * dx], -2), torch.cat([y - my, weight * dy], -2)

    @property
    def sides(self) -> tuple[int, int]:
        """How many inputs and targets a row has."""
        return self.xx.shape[-1], self.yy.shape[-1]

    def pool(self, total: Callable[[Tensor], Tensor]) -> None:
        """Join these sums with those over other samples; `total` adds a tensor of each up.

        Rows are centred about the mean of all: n (x_A - x)(x_A - x)^T more for each of the sums.
        """
        n, count = self.count, total(self.x.new_full((1,), self.count))
        x, y = (total(mean * n) / count for mean in (self.x, self.y))
        dx, dy = ((self.x - x) * math.sqrt(n), (self.y - y) * math.sqrt(n))
        for products, a, b in ((self.xx, dx, dx), (self.xy, dx, dy), (self.yy, dy, dy)):
            _add_product(products, a, b)
            total(products)
        self.x, self.y, self.count = x, y, round(float(count))

    def merge(self, other: "MomentSums") -> None:
        """Add the sums over other samples: the sums over both, up to rounding.

        As a batch's sums are added, with one row for the shift of the means.
        """
        n, m = self.count, other.count
        self.count = n + m
        for name in ("xx", "xy", "yy"):
            getattr(self, name).add_(getattr(other, name))
        if not self.bias:
            return
        dx, dy, weight = other.x - self.x, other.y - self.y, n * m / (n + m)
        self.x, self.y = self.x + dx * (m / (n + m)), self.y + dy * (m / (n + m))
        _add_product(self.xx, dx, weight * dx)
        _add_product(self.xy, dx, weight * dy)
        _add_product(self.yy, dy, weight * dy)

    def solve(self, alpha: float | None, codes: Tensor | None = None) -> Solution:
        """The weights; with `codes`, for the targets y times the codes."""
        n, x, y = self.count, self.x.squeeze(-2), self.y.squeeze(-2)
        variance, V = torch.linalg.eigh(self.xx / n)
        spectrum = Spectrum(variance, V, V.mT @ self.xy / n, x, y, self.yy / n, n, self.bias)
        return _solve(spectrum, alpha, codes)

    def so_far(self, gamma: float, codes: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Weight and bias for a penalty of `gamma` on the sum of squares; NaN if it is singular."""
        A = self.xx.clone()
        A.diagonal(dim1=-2, dim2=-1).add_(gamma)
        L, failed = torch.linalg.cholesky_ex(A)
        W, y = torch.cholesky_solve(self.xy, L), self.y
        W = torch.where((failed > 0)[..., None, None], torch.nan, W)
        if codes is not None:
            W, y = W @ codes.double(), y @ codes.double()
        return W.mT, (y - self.x @ W).squeeze(-2)


class SampleSums:
    """The samples themselves, for a problem with as many directions as samples."""

    def __init__(self, x: Tensor, y: Tensor, bias: bool) -> None:
        self.count, self.bias, self.xs, self.ys = 0, bias, [], []

    @property
    def sides(self) -> tuple[int, int]:
        """How many inputs and targets a row has."""
        return self.xs[0].shape[-1], self.ys[0].shape[-1]

    def add(self, x: Tensor, y: Tensor) -> None:
        """Add a batch."""
        self.count += x.shape[-2]
        self.xs.append(x)
        self.ys.append(y)

    def solve(self, alpha: float | None, codes: Tensor | None = None) -> Solution:
        """As `MomentSums.solve`, from the products of the samples with one another."""
        x, y = torch.cat(self.xs, -2), torch.cat(self.ys, -2)
        self.xs.clear()
        n = x.shape[-2]
        mx, my = x.mean(-2) * self.bias, y.mean(-2) * self.bias
        x, y = x.sub_(mx.unsqueeze(-2)), y - my.unsqueeze(-2)
        variance, U = torch.linalg.eigh(x @ x.mT / n)
        # V = x^T U / sqrt(n v), and V^T x^T = sqrt(n v) U^T
        scale = (n * variance.clamp(min=0)).sqrt()
        V = (x.mT @ U) * torch.where(_varies(variance, x.shape[-1]), 1 / scale, 0).unsqueeze(-2)
        along = scale.unsqueeze(-1) * (U.mT @ y) / n
        spectrum = Spectrum(variance, V, along, mx, my, y.mT @ y / n, n, self.bias)
        return _solve(spectrum, alpha, codes)


def _solve(spectrum: Spectrum, alpha: float | None, codes: Tensor | None) -> Solution:
    """The weights for this penalty, or for the best by generalised cross-validation."""
    variance, V, along, x, y, yy, n, bias = spectrum
    if codes is not None:
        codes = codes.double()
        along, y = along @ codes, (y.unsqueeze(-2) @ codes).squeeze(-2)
        total = ((yy @ codes) * codes).sum((-1, -2))
    else:
        total = yy.diagonal(dim1=-2, dim2=-1).sum(-1)
    varies = _varies(variance, V.shape[-2])
    variance = torch.where(varies, variance, 0)
    along = torch.where(varies.unsqueeze(-1), along, 0)
    power = along.square().sum(-1)
    if alpha is None:
        penalty = _best_alpha(variance, power, total, n, bias, V.shape[-2])
    else:
        penalty = torch.full_like(variance[..., :1], alpha)
    shrunk = torch.where(varies, 1 / (variance + penalty), 0)
    W = V @ (along * shrunk.unsqueeze(-1))
    loss = (total - (power * (variance + 2 * penalty) * shrunk.square()).sum(-1)).clamp(min=0) / 2
    return Solution(W.mT, y - (x.unsqueeze(-2) @ W).squeeze(-2), loss, penalty.squeeze(-1))


def _varies(variance: Tensor, inputs: int) -> Tensor:
    """The directions in which inputs vary by more than rounding errors."""
    return variance > variance[..., -1:].clamp(min=1e-30) * max(inputs, 10) * _NEGLIGIBLE


def _best_alpha(
    variance: Tensor, power: Tensor, total: Tensor, n: int, bias: bool, inputs: int
) -> Tensor:
    """The alpha with the smallest (error / n) / (1 - parameters / n)^2, for each restart."""
    mean = variance.sum(-1, keepdim=True).clamp(min=1e-30) / min(inputs, n)
    scores = []
    for alpha in ALPHAS:
        a = alpha * mean
        explained = (power * (variance + 2 * a) / (variance + a).square()).sum(-1)
        used = ((variance / (variance + a)).sum(-1) + bias) / n
        score = (total - explained).clamp(min=0) / (1 - used).square()
        scores.append(torch.where(used < 0.95, score, torch.inf))
    best = torch.stack(scores, -1).argmin(-1, keepdim=True)
    return torch.tensor(ALPHAS, dtype=mean.dtype, device=mean.device)[best] * mean


def _add_product(into: Tensor, a: Tensor, b: Tensor) -> None:
    """into += a^T b."""
    (into.baddbmm_ if into.dim() == 3 else into.addmm_)(a.mT, b)
