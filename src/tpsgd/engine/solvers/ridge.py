"""`ridge()`: solve a block by least squares, in one pass over the samples, without an optimizer.

Ridge regression: Hoerl & Kennard (1970). On the states of a random recurrent net: Jaeger (2001). On
a random layer it is an extreme learning machine (Huang, Zhu & Siew 2006); on every block, with
projected targets, LM-KARnet (Zhuang, Lin & Toh 2019).
"""

import math
from dataclasses import dataclass
from typing import Any

from tpsgd.common.errors import TpsgdError


@dataclass(frozen=True)
class Ridge:
    """Least squares with a penalty on the weights, not on the bias."""

    alpha: float | None = None

    @property
    def __name__(self) -> str:
        return "ridge()" if self.alpha is None else f"ridge({self.alpha:g})"


def ridge(alpha: float | None = None) -> Any:
    """Solve blocks in one pass each: `optimizer=tpsgd.ridge()`, or as one of a list of optimizers.

    The last block is solved for the labels, a hidden block for the projected labels P y* of a rule
    with a squared error before the activation. `tpsgd.rls` does the same on a stream.

    - `rule=rules.frozen()`: random hidden layers and a solved head, an extreme learning machine.
    - `rule=rules.tpsgd_l2(at=Place.BEFORE)`: every block solved, LM-KARnet.
    - `optimizer=[torch.optim.Adam, tpsgd.ridge()]`: hidden blocks learn, the head is solved.

    Args:
        alpha: weight of the penalty relative to the *mean* squared error, so it does not depend on
            the number of samples; 0 is the pseudo-inverse. The default is chosen by generalised
            cross-validation.

    The history has half the mean squared error of a solved block, and no accuracy, because samples
    are read only once.

    Examples:
        >>> import tpsgd, torch
        >>> x, y = torch.eye(4), torch.arange(4)
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4))
        >>> _ = tpsgd.fit(model, (x, y), optimizer=tpsgd.ridge(1e-9))
        >>> tpsgd.evaluate(model, (x, y))
        1.0
    """
    if alpha is not None and not (isinstance(alpha, (int, float)) and 0 <= alpha < math.inf):
        raise bad_penalty("alpha must be a number, 0 or more", alpha, "ridge")
    return Ridge(alpha)


def bad_penalty(rule: str, value: Any, solver: str) -> TpsgdError:
    """The error for a penalty that is no number, or a wrong one."""
    got = value if isinstance(value, (int, float)) else f"a {type(value).__name__}"
    return TpsgdError(f"{rule}, got {got}; a solver must be called: optimizer=tpsgd.{solver}()")
