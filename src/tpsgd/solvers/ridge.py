"""`ridge()`: a block by least squares, in one pass over the samples, where an optimizer stands.

Ridge regression: Hoerl & Kennard (1970); on the states of a random recurrent net: Jaeger (2001); on
a random layer it is an extreme learning machine (Huang, Zhu & Siew 2006); on every block, with
projected targets, LM-KARnet (Zhuang, Lin & Toh 2019); see `tpsgd.peers`.
"""

import math
from dataclasses import dataclass
from typing import Any

from tpsgd.errors import TpsgdError


@dataclass(frozen=True)
class Ridge:
    """Least squares with a penalty on the weights, not on the bias."""

    alpha: float | None = None

    @property
    def __name__(self) -> str:
        return "ridge()" if self.alpha is None else f"ridge({self.alpha:g})"


def ridge(alpha: float | None = None) -> Any:
    """Blocks in closed form, in one pass each: `optimizer=tpsgd.ridge()`, or a list of optimizers.

    The last block is solved for the labels, a hidden one for the projected labels P y* of a rule
    with a squared error before the activation. `tpsgd.rls` is the same by recursion.

    - `rule=rules.frozen()`: random hidden layers and a solved head, an extreme learning machine.
    - `rule=rules.tpsgd_l2(at=Place.BEFORE)`: every block solved, LM-KARnet.
    - `optimizer=[torch.optim.Adam, tpsgd.ridge()]`: hidden blocks learn, the head is solved.

    Args:
        alpha: weighs the penalty against the *mean* squared error, so it need not grow with the
            data; 0 is the pseudo-inverse. Without it, generalised cross-validation chooses.

    The history has half the mean squared error of a solved block, and no accuracy: samples are read
    once.

    Examples:
        >>> import tpsgd, torch
        >>> x, y = torch.eye(4), torch.arange(4)
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4))
        >>> _ = tpsgd.fit(model, (x, y), optimizer=tpsgd.ridge(1e-9))
        >>> tpsgd.evaluate(model, (x, y))
        1.0
    """
    if alpha is not None and number("alpha", alpha, "ridge") < 0:
        raise TpsgdError(f"alpha must be a number, 0 or more, got {alpha}")
    return Ridge(alpha)


def number(name: str, value: Any, solver: str) -> float:
    """A finite number, or an error."""
    if not isinstance(value, (int, float)):
        raise TpsgdError(
            f"{name} must be a number, got a {type(value).__name__}; a solver is made by calling "
            f"it, as in optimizer=tpsgd.{solver}()"
        )
    if not math.isfinite(value):
        raise TpsgdError(f"{name} must be a finite number, got {value}")
    return value
