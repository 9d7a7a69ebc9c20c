"""dlADMM: the layers of a net are constraints, and all unknowns are updated in turn.

Wang, Yu, Chen & Zhao, "ADMM for Efficient Deep Learning with Global Convergence" (KDD 2019).
Samples are rows, a_0 = x, m_i = a_{i-1} W_i' + b_i, and f is a ReLU or LeakyReLU. The net has
further unknowns: z_i, which should equal m_i, and a_i, which should equal f(z_i). With the dual
variable u of the last constraint, the updates lower the augmented Lagrangian

    sum CE(z_L) + <u, z_L - m_L> + rho/2 sum_i |z_i - m_i|^2 + rho/2 sum_{i<L} |a_i - f(z_i)|^2

Our reading, which a test holds equal to the authors' program: an iteration goes backward (z, b, W
of each layer, then its inputs a, from the last layer to the first), goes forward (a, W, b, z), and
ends with u += rho (z_L - m_L).

| unknown | update                                                                             |
|---------|------------------------------------------------------------------------------------|
| b       | the minimum: b + mean(z - m + u/rho)                                               |
| W, a    | a gradient step on a quadratic bound of curvature theta (tau), doubled until it holds |
| z_i     | the better of the minima on either side of 0                                       |
| z_L     | FISTA (Beck & Teboulle 2009)                                                       |

No derivative passes through more than one layer. What differs from the authors' program:

- The Lagrangian is quadratic in W and in a, so a bound along the step G holds exactly when theta is
  at least rho |a G'|^2 / |G|^2. We compute how often to double, at most `DOUBLINGS` times. Theirs
  tries one doubling after another, which can go on for ever because of rounding errors.
- FISTA's step is 2, the longest with a proof of convergence (the curvature of the cross-entropy of
  a softmax is at most 1/2). Theirs is 4, with which it need not converge.
- u/rho is computed for the biases only: in float32 it would swallow what it is added to.
- rho starts at 1. With their 1e-6, progress depends on the number of samples and on the scale of
  the initial weights.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from tpsgd.common.errors import TpsgdError
from tpsgd.losses import cross_entropy

DOUBLINGS = 60  # of theta and tau, at most
FISTA = 500  # steps, at most
TOLERANCE = 1e-3  # FISTA ends when a step changes the sum over all samples by less


@dataclass(frozen=True)
class StepSizes:
    """The numbers that decide the size of an update; see `fit_dladmm`."""

    rho: float = 1.0
    theta: float = 1.0
    tau: float = 1.0
    fista_step: float = 2.0
    max_rho: float | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            number = isinstance(value, (int, float)) and 0 < value < math.inf
            if not number and (name != "max_rho" or value is not None):
                raise TpsgdError(f"{name} must be a number above 0, got {value!r}")
        if self.max_rho is not None and self.max_rho < self.rho:
            raise TpsgdError(f"max_rho must be rho ({self.rho:g}) or more, got {self.max_rho!r}")


@dataclass
class Problem:
    """The unknowns of a net of L layers and their constraints."""

    W: list[Tensor]  # (outputs, inputs) each
    b: list[Tensor | None]
    a: list[Tensor]  # each layer's inputs, (samples, inputs); the first are the data
    z: list[Tensor]  # each layer's target outputs, (samples, outputs)
    m: list[Tensor]  # its actual outputs, a W' + b
    u: Tensor  # the dual variable of z_L = m_L
    labels: Tensor
    slopes: list[float]  # of the hidden layers' activations, below 0

    @property
    def last(self) -> int:
        """The number of the last layer, counted from 0."""
        return len(self.W) - 1

    def parameters(self) -> list[Tensor]:
        """Weight and bias of each layer."""
        pairs = zip(self.W, self.b, strict=True)
        return [t for pair in pairs for t in pair if t is not None]

    def force(self, i: int, rho: float) -> Tensor:
        """Minus the derivative of the Lagrangian with respect to m_i."""
        pull = rho * (self.z[i] - self.m[i])
        return pull.add_(self.u) if i == self.last else pull


@torch.no_grad()
def begin(
    W: list[Tensor], b: list[Tensor | None], x: Tensor, labels: Tensor, slopes: list[float]
) -> Problem:
    """Unknowns that agree with the net, except z_L: 1 for the true class, -1 for the others."""
    a, m = [x], []
    for i, (weight, bias) in enumerate(zip(W, b, strict=True)):
        m.append(F.linear(a[i], weight, bias))
        if i < len(slopes):
            a.append(activated(m[i], slopes[i]))
    z_last = torch.full_like(m[-1], -1.0).scatter_(1, labels[:, None], 1.0)
    u = torch.zeros_like(z_last)
    return Problem(list(W), list(b), a, [*m[:-1], z_last], m, u, labels, slopes)


@torch.no_grad()
def iterate(p: Problem, steps: StepSizes) -> None:
    """One iteration: layers from last to first, layers from first to last, the dual variable."""
    for i in reversed(range(len(p.W))):
        p.m[i] = F.linear(p.a[i], p.W[i], p.b[i])  # afresh: rounding errors do not add up
        update_z(p, i, steps)
        update_b(p, i, steps)
        update_W(p, i, steps)
        if i > 0:
            update_a(p, i, steps)
    for i in range(len(p.W)):
        if i > 0:
            update_a(p, i, steps)
        update_W(p, i, steps)
        update_b(p, i, steps)
        update_z(p, i, steps)
    p.u = p.u + steps.rho * (p.z[-1] - p.m[-1])


def update_b(p: Problem, i: int, steps: StepSizes) -> None:
    """The bias that minimises the Lagrangian."""
    if (bias := p.b[i]) is not None:
        more = p.force(i, steps.rho).mean(0) / steps.rho
        p.b[i] = bias + more
        p.m[i] = p.m[i] + more


def update_W(p: Problem, i: int, steps: StepSizes) -> None:
    """W + G / theta, G = (rho (z - m) + u)' a."""
    G, norm = direction(p.force(i, steps.rho).mT @ p.a[i])
    along = p.a[i] @ G.mT
    length = norm / doubled(steps.theta, steps.rho * along.square().sum())
    p.W[i] = p.W[i] + length * G
    p.m[i] = p.m[i] + along.mul_(length)


def update_a(p: Problem, i: int, steps: StepSizes) -> None:
    """The inputs of layer i: a + G / tau, G = (rho (z - m) + u) W - rho (a - f(z before))."""
    rho, y = steps.rho, activated(p.z[i - 1], p.slopes[i - 1])
    G, norm = direction(p.force(i, rho) @ p.W[i] - rho * (p.a[i] - y))
    along = G @ p.W[i].mT
    length = norm / doubled(steps.tau, rho * (1 + along.square().sum()))
    p.a[i] = p.a[i] + length * G
    p.m[i] = p.m[i] + along.mul_(length)


def update_z(p: Problem, i: int, steps: StepSizes) -> None:
    """The z of layer i that minimises the Lagrangian."""
    if i < p.last:
        p.z[i] = hidden_z(p.m[i], p.a[i + 1], p.slopes[i])
    else:
        p.z[i] = output_z(p, steps)


def direction(G: Tensor) -> tuple[Tensor, Tensor]:
    """G divided by its length, and the length."""
    norm = torch.linalg.vector_norm(G)
    return G / norm.clamp(min=torch.finfo(G.dtype).tiny), norm


def doubled(first: float, needed: Tensor) -> Tensor:
    """`first`, doubled until it is no less than `needed`, but `DOUBLINGS` times at most."""
    return first * 2 ** (needed / first).log2().ceil().clamp(0, DOUBLINGS)


def hidden_z(m: Tensor, a: Tensor, slope: float) -> Tensor:
    """The z that minimises (z - m)^2 + (a - f(z))^2, element by element.

    Below 0 f(z) = slope z, above f(z) = z: each side has its minimum, (m + slope a)/(1 + slope^2)
    and (m + a)/2, or 0 where that lies on the other side. The lower of the two is the answer.
    """

    def value(z: Tensor, y: Tensor) -> Tensor:
        return (z - m).square() + (a - y).square()

    below = ((m + slope * a) / (1 + slope**2)).clamp(max=0)
    above = ((m + a) / 2).clamp(min=0)
    return torch.where(value(below, slope * below) > value(above, above), above, below)


def output_z(
    p: Problem, steps: StepSizes, most: int = FISTA, tolerance: float = TOLERANCE
) -> Tensor:
    """The last z that minimises sum CE(z) + <u, z - m> + rho/2 |z - m|^2, by FISTA from p's z.

    A gradient step on the cross-entropy, then the exact minimum of the rest, from a point that is
    extrapolated along the last move.
    """
    z, m, u, labels = p.z[-1], p.m[-1], p.u, p.labels
    rho, eta = steps.rho, steps.fista_step
    moved, k, last_value = z, 1.0, None
    for _ in range(most):
        d = z - m
        value = F.cross_entropy(z, labels, reduction="none") + ((u + rho / 2 * d) * d).sum(1)
        # differences of samples, then their sum: float32 cannot resolve a difference of sums
        if last_value is not None and (value - last_value).sum().abs() < tolerance:
            break
        last_value, last_moved = value, moved
        moved = (rho * m - u + z / eta - cross_entropy.grad(z, labels)) / (rho + 1 / eta)
        k, last_k = (1 + math.sqrt(1 + 4 * k * k)) / 2, k
        z = moved + (last_k - 1) / k * (moved - last_moved)
    return z


def activated(z: Tensor, slope: float) -> Tensor:
    """ReLU, or LeakyReLU where there is a slope."""
    return F.leaky_relu(z, slope) if slope else z.clamp(min=0)


def outputs(p: Problem) -> Tensor:
    """The net's outputs, with its activations instead of the unknowns."""
    y = p.m[0]
    for i in range(1, len(p.W)):
        y = F.linear(activated(y, p.slopes[i - 1]), p.W[i], p.b[i])
    return y
