"""A linear recurrence of complex numbers over many steps at once, in real arithmetic.

    h_t = lambda h_{t-1} + b_t,     lambda = exp(-nu + i theta)

A complex number is a pair of real numbers, in a dimension of its own. The states of a few steps are
one product with the powers of lambda; many steps are cut into such chunks, and the states at the
ends of the chunks are a recurrence of their own, with a power of lambda. Powers are never divided
by, so nothing overflows however fast a state decays. Every tensor may have leading dimensions.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

CHUNK = 16  # steps whose states are one product


def powers(nu: Tensor, theta: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """lambda^0, lambda^1, ...: real and imaginary parts `(..., states, count)`.

    Examples:
        >>> powers(torch.tensor([0.0]), torch.tensor([torch.pi]), 3)[0]
        tensor([[ 1., -1.,  1.]])
    """
    exponents = torch.arange(count, dtype=nu.dtype, device=nu.device)
    size = (nu.unsqueeze(-1) * -exponents).exp()
    angle = theta.unsqueeze(-1) * exponents
    return size * angle.cos(), size * angle.sin()


def as_matrix(re: Tensor, im: Tensor) -> Tensor:
    """A complex matrix `(..., n, m)` as a real one `(..., 2 n, 2 m)` that acts on pairs."""
    return torch.cat((torch.cat((re, -im), -1), torch.cat((im, re), -1)), -2)


def _toeplitz(p: Tensor) -> Tensor:
    """The lower triangular matrix with p[t - s] in row t and column s."""
    steps = torch.arange(p.shape[-1], device=p.device)
    return p[..., (steps.unsqueeze(1) - steps).clamp(min=0)].tril()


def _plus(a: Tensor, b: Tensor) -> Tensor:
    """a + b, in the memory of a if no graph needs it."""
    return a + b if torch.is_grad_enabled() else a.add_(b)


class Scan:
    """The recurrence over `steps` steps, and its adjoint.

    States, inputs and derivatives have the shape `(..., states, 2, steps, rows)`, the state before
    the first step `(..., states, 2, rows)`.
    """

    def __init__(self, nu: Tensor, theta: Tensor, steps: int) -> None:
        self.steps, self.chunk = steps, min(CHUNK, steps)
        re, im = powers(nu, theta, self.chunk + 1)
        self.inside = as_matrix(_toeplitz(re[..., :-1]), _toeplitz(im[..., :-1]))
        self.onward = as_matrix(re[..., 1:, None], im[..., 1:, None])  # from the state before
        self.chunks = -(-steps // self.chunk)
        self.between = None
        if self.chunks > 1:
            self.between = Scan(nu * self.chunk, theta * self.chunk, self.chunks)

    def states(self, b: Tensor, start: Tensor | None = None) -> Tensor:
        """h_t of every step."""
        if self.between is None:
            h = self.inside @ b.flatten(-3, -2)
            return (h if start is None else _plus(h, self.onward @ start)).view(*b.shape[:-1], -1)
        parts = self._cut(b)
        shape = *parts.shape[:-1], -1  # an export may have any number of rows
        h = (self.inside @ parts.flatten(-4, -3).flatten(-2)).view(shape)
        del parts
        ends = self.between.states(h[..., -1, :, :], start)
        if start is None:
            before = F.pad(ends[..., :-1, :], (0, 0, 1, 0))
        else:
            before = torch.cat((start.unsqueeze(-2), ends[..., :-1, :]), -2)
        return self._joined(_plus(h, (self.onward @ before.flatten(-2)).view(shape)))

    def adjoints(self, g: Tensor) -> tuple[Tensor, Tensor]:
        """d_t = conj(lambda) d_{t+1} + g_t of every step, and what reaches the state before."""
        if self.between is None:
            g_flat = g.flatten(-3, -2)
            return (self.inside.mT @ g_flat).view(g.shape), self.onward.mT @ g_flat
        parts = self._cut(g)
        start = self.onward.mT @ parts.flatten(-4, -3).flatten(-2)
        start = start.view(*parts.shape[:-3], *parts.shape[-2:])  # of every chunk
        later = torch.cat((start[..., 1:, :], torch.zeros_like(start[..., :1, :])), -2)
        ends, first = self.between.adjoints(later)
        parts[..., -1, :, :] += ends  # a copy, see `_cut`
        d = (self.inside.mT @ parts.flatten(-4, -3).flatten(-2)).view(parts.shape)
        del parts
        return self._joined(d), start[..., 0, :] + first

    def _cut(self, b: Tensor) -> Tensor:
        """Steps as `(steps of a chunk, chunks)`, zeros after the last."""
        missing = self.chunks * self.chunk - self.steps
        b = F.pad(b, (0, 0, 0, missing)) if missing else b
        return b.unflatten(-2, (self.chunks, self.chunk)).transpose(-3, -2).contiguous()

    def _joined(self, parts: Tensor) -> Tensor:
        return parts.transpose(-3, -2).flatten(-3, -2)[..., : self.steps, :].contiguous()
