"""What a block wants: a local loss of its own output, and that loss's derivative.

An `Objective` is a pure function of the block's output `y`, the signal `s` and a few tensors of its
own (the projection P, usually), so the same code is run once, stacked over restarts, or exported.
`loss` is the definition; `closed` is the same with its derivative written out, and
`tests/test_objectives.py` holds the two equal. A loss that is no mean over samples, because it
compares them or scales them by one another, has its derivative in `together` instead. Without
either, autograd differentiates `loss` with respect to `y` alone: no graph reaches beyond the
block's output.

The signal is always *where the output should go*: the label y*, or minus the derivative of the
network's loss with respect to its output. `aim(P, s)` is the paper's projected signal P s.

| objective | local loss (sum over units, mean over batch) | -dL/dy of a sample    |
|-----------|----------------------------------------------|-----------------------|
| `inner`   | - <y, P s>                                   | P s                   |
| `l1`      | sum abs(P s - y)                             | sign(P s - y)         |
| `l2`      | 1/2 sum (P s - y)^2                          | P s - y               |
| `readout` | a loss of f(y) P^T / sqrt(d) against s       | f'(y)(s - p) P/sqrt(d)|
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tpsgd.errors import TpsgdError
from tpsgd.losses import Loss, bce, cross_entropy, minus_labels
from tpsgd.maths.memory_format import full, rows
from tpsgd.maths.pooling import back_to_pixels, cells, grid_for, wide
from tpsgd.maths.random import Key
from tpsgd.projections import Projection, Redrawn


class LossAndGrads(NamedTuple):
    """What an objective says about one batch."""

    loss: Tensor
    dy: Tensor
    dtensors: tuple[Tensor, ...] = ()
    logits: Tensor | None = None


@dataclass(frozen=True)
class Objective:
    """One block's wish. `learned` tensors are trained together with the block."""

    loss: Callable[..., Tensor]
    closed: Callable[..., LossAndGrads] | None = None
    tensors: tuple[Tensor, ...] = ()
    learned: bool = False
    squared: bool = False  # half the squared distance to P s: least squares can solve it
    together: Callable[..., LossAndGrads] | None = (
        None  # as `closed`, of a batch that cannot be cut
    )

    def __call__(self, y: Tensor, s: Tensor, *tensors: Tensor) -> LossAndGrads:
        """The loss of a batch and its derivatives; `tensors` stand in for the objective's own."""
        local = self.coarse(y, s, *tensors)
        return local._replace(dy=full(local.dy, y))

    def coarse(self, y: Tensor, s: Tensor, *tensors: Tensor) -> LossAndGrads:
        """The same, but `dy` may hold one number per cell of feature maps; see `layout.full`."""
        tensors = tensors or self.tensors
        if written := self.closed or self.together:
            return written(y, s, *tensors)
        return differentiate(self.loss, y, s, tensors, self.learned)


IDLE = Objective(lambda y, s: y.new_zeros(()))  # of a block that is not learning


@dataclass(frozen=True)
class Site:
    """Where an objective is placed: all that a rule may ask about its block."""

    shape: tuple[int, ...]  # of one sample's output
    classes: int
    key: Key
    maps: bool = False  # the output is a set of feature maps, filters first
    loss: Loss = cross_entropy  # of the last block
    device: torch.device | str = "cpu"
    dtype: torch.dtype = torch.float32
    recurrent: bool = False  # the output is a recurrent layer's state; `key` has its time step
    redraw: bool = False  # P is made again, a class at a time, whenever it is needed

    def draw(self, projection: Projection, shape: tuple[int, ...] | None = None) -> Tensor:
        """P for this site, or for another shape made from it."""
        P = projection(shape or self.shape, self.classes, self.key, self.device)
        return P.to(self.dtype)

    def codes(
        self, projection: Projection, shape: tuple[int, ...] | None = None
    ) -> "Tensor | Redrawn":
        """P for this site (or another shape), or what stands for it where it is not stored."""
        shape = shape or self.shape
        if not self.redraw or projection.name == "orthogonal":  # whose rows need one another
            return self.draw(projection, shape)
        return Redrawn(projection, shape, self.classes, self.key, self.device, self.dtype)


def differentiate(
    loss: Callable[..., Tensor], y: Tensor, s: Tensor, tensors: tuple[Tensor, ...], learned: bool
) -> LossAndGrads:
    """A loss's derivatives by autograd, on a graph that starts at y."""
    with torch.enable_grad():
        y = y.detach().requires_grad_()
        tensors = tuple(
            t if isinstance(t, Redrawn) else t.detach().requires_grad_(learned) for t in tensors
        )
        value = loss(y, s, *tensors)
        if not isinstance(value, Tensor) or value.dim():
            found = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise TpsgdError(
                f"a loss must return one number, a tensor of shape (), a mean over the batch; got "
                f"{found}"
            )
        if not value.requires_grad:
            raise TpsgdError("a loss must depend on the output: no gradient leads from it to y")
        wanted = (y, *tensors) if learned else (y,)
        dy, *dtensors = torch.autograd.grad(value, wanted)
    return LossAndGrads(value.detach(), dy, tuple(dtensors))


def aim(P: Any, s: Tensor) -> Tensor:
    """The projected signal P s of every sample: rows of P for labels, a product otherwise."""
    if isinstance(P, Redrawn):
        return P.aim(s)
    if s.is_floating_point():
        return (s @ P.flatten(1)).view(-1, *P.shape[1:])
    return rows(P, s)


def inner(P: Any) -> Objective:
    """Align with the projected signal: DRTP's, DFA's and sDFA's implicit loss. It has no floor."""

    def loss(y: Tensor, s: Tensor, P: Any) -> Tensor:
        return -(y * aim(P, s)).sum() / len(y)

    def closed(y: Tensor, s: Tensor, P: Tensor) -> LossAndGrads:
        dy = aim(P / -len(y), s)  # P is small: scaled before it is spread over the batch
        return LossAndGrads(_dot(y, dy), dy)

    return Objective(loss, closed, (P,))


def l1(P: Any) -> Objective:
    """Reach the projected signal in the sum of absolute differences."""

    def loss(y: Tensor, s: Tensor, P: Tensor) -> Tensor:
        return (aim(P, s) - y).abs().sum() / len(y)

    def closed(y: Tensor, s: Tensor, P: Tensor) -> LossAndGrads:
        rest = aim(P, s).sub_(y)
        loss = torch.linalg.vector_norm(rest, 1) / len(y)
        return LossAndGrads(loss, rest.sign_().mul_(-1.0 / len(y)))

    return Objective(loss, closed, (P,))


def l2(P: Any) -> Objective:
    """Reach the projected signal in half the sum of squares."""

    def loss(y: Tensor, s: Tensor, P: Tensor) -> Tensor:
        return (aim(P, s) - y).square().sum() / (2 * len(y))

    def closed(y: Tensor, s: Tensor, P: Tensor) -> LossAndGrads:
        dy = aim(P / -len(y), s).add_(y, alpha=1.0 / len(y))
        return LossAndGrads(_dot(dy, dy) * (len(y) / 2), dy)

    return Objective(loss, closed, (P,), squared=True)


def any_loss(P: Any, loss: Callable[[Tensor, Tensor], Tensor]) -> Objective:
    """Any `(output, target) -> scalar` between the output and the projected signal."""
    return Objective(lambda y, s, P: loss(y, aim(P, s)), None, (P,))


def output(loss: Loss) -> Objective:
    """The last block's wish: its output against the labels themselves."""

    def closed(y: Tensor, s: Tensor) -> LossAndGrads:
        return LossAndGrads(loss.value(y, s), loss.grad(y, s) / len(y), (), y)

    return Objective(loss.value, closed)


def readout(
    site: Site, projection: Projection, learned: bool, features: int, scale: float
) -> Objective:
    """Be readable: cross-entropy of y read out through the class codes, against the label.

    Where the last block has `bce` (several classes at once, or one yes-or-no output), so has this.
    Feature maps are averaged over a grid of cells first, the finest that keeps at most `features`
    numbers (one cell at least). Output of any other kind is read out whole.
    """
    grid = grid_for(site.shape, features) if site.maps else None
    d = site.shape[0] * prod(grid) if grid else prod(site.shape)
    factor = scale / d**0.5
    local = bce if site.loss is bce else cross_entropy

    def read(y: Tensor, P: Tensor) -> tuple[Tensor, Tensor]:
        f = cells(y, grid) if grid else y.flatten(1)
        return f, wide(f @ P.T).mul(factor)

    def value(y: Tensor, s: Tensor, P: Tensor) -> Tensor:
        return local.value(read(y, P)[1], s)

    def closed(y: Tensor, s: Tensor, P: Tensor) -> LossAndGrads:
        f, logits = read(y, P)
        e = minus_labels(local.link(logits), s).mul(factor / len(y))
        e = e.to(y.dtype)
        df = e @ P
        dy = back_to_pixels(df, y, grid) if grid else df.view(y.shape)
        return LossAndGrads(local.value(logits, s), dy, (e.T @ f,) if learned else (), logits)

    return Objective(value, closed, (site.draw(projection, (d,)),), learned)


def move(objective: Objective, place: Callable[[Tensor], Tensor]) -> Objective:
    """The same objective with its tensors elsewhere, or in another layout."""
    tensors = (t.laid_out() if isinstance(t, Redrawn) else place(t) for t in objective.tensors)
    return replace(objective, tensors=tuple(tensors))


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """The sum of a * b, without keeping the product when both lie alike in memory."""
    if a.dim() == 4 and not a.is_contiguous():
        a, b = a.permute(0, 2, 3, 1), b.permute(0, 2, 3, 1)
    if a.is_contiguous() and b.is_contiguous():
        return a.flatten() @ b.flatten()
    return (a * b).sum()
