"""Initial weights of a recurrent cell.

| init             | W_X       | W_H                          | for                         |
|------------------|-----------|------------------------------|-----------------------------|
| `zeros`          | 0         | 0                            | the paper's first choice    |
| `uniform`        | U(-r, r)  | U(-r, r)                     | the paper's second, r small |
| `scaled_uniform` | U(-x, x)  | U(-h, h)                     | few features a step         |
| `reservoir`      | U(-x, x)  | normal, of a spectral radius | a state with a long memory  |

Biases are zero. Random numbers come from torch's generator, as in torch's layers.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from tpsgd.common.errors import TpsgdError

Init = Callable[[Tensor, Tensor], None]  # fills W_X (hidden, inputs) and W_H (hidden, hidden)


def zeros() -> Init:
    """All zeros: the state of an untrained sigmoid cell is 1/2."""

    @torch.no_grad()
    def fill(weight_x: Tensor, weight_h: Tensor) -> None:
        weight_x.zero_()
        weight_h.zero_()

    return fill


def uniform(reach: float = 0.01) -> Init:
    """Uniform in (-reach, reach), both matrices: the paper's "small magnitude"."""
    return scaled_uniform(reach, reach)


def scaled_uniform(x: float = 1.0, h: float = 0.1) -> Init:
    """W_X uniform in (-x, x), W_H uniform in (-h, h)."""

    @torch.no_grad()
    def fill(weight_x: Tensor, weight_h: Tensor) -> None:
        weight_x.uniform_(-x, x)
        weight_h.uniform_(-h, h)

    return fill


def reservoir(radius: float = 0.9, x: float | None = None) -> Init:
    """W_H normal, scaled to a spectral radius; W_X uniform in (-x, x): an echo state network.

    With a radius just under 1, a state fades slowly instead of vanishing or exploding (Jaeger
    2001). The default of `x` is 3, or 96 / inputs if a step has more than 32 features. (This was
    best on held-out data for `readout` with a leak of 0.1; for an untrained cell 0.3 is better.)
    """

    @torch.no_grad()
    def fill(weight_x: Tensor, weight_h: Tensor) -> None:
        reach = 3.0 * min(1.0, 32 / weight_x.shape[1]) if x is None else x
        weight_x.uniform_(-reach, reach)
        weight_h.normal_()
        weight_h.mul_(radius / spectral_radius(weight_h))

    return fill


def spectral_radius(weight: Tensor, squarings: int = 14) -> float:
    """The largest absolute eigenvalue, as the norm of a high power: ||W^k||^(1/k), k = 2^14.

    Examples:
        >>> round(spectral_radius(torch.tensor([[0.0, 4.0], [1.0, 0.0]])), 3)
        2.0
    """
    power, log, k = weight.detach().double(), 0.0, 1
    for _ in range(squarings):
        norm = float(power.norm())
        if norm == 0.0:
            return 0.0
        log += math.log(norm) / k
        power, k = (power / norm) @ (power / norm), 2 * k
    return math.exp(log) * float(power.norm()) ** (1.0 / k)


BY_NAME: dict[str, Callable[[], Init]] = {
    "zeros": zeros,
    "uniform": uniform,
    "scaled_uniform": scaled_uniform,
    "reservoir": reservoir,
}


def named(init: Init | str) -> Init:
    """An init, or the one with this name and its default numbers."""
    if callable(init):
        return init
    make = BY_NAME.get(str(init).replace("-", "_"))
    if make is None:
        raise TpsgdError(f"unknown init {init!r}: choose {', '.join(BY_NAME)}, or tpsgd.inits.…()")
    return make()
