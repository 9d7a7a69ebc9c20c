"""`ridge()`: a block by least squares, in one pass over the samples, where an optimizer stands.

Ridge regression: Hoerl & Kennard (1970); on the states of a random recurrent net: Jaeger (2001); on
a random layer it is an extreme learning machine (Huang, Zhu & Siew 2006); on every block, with
projected targets, LM-KARnet (Zhuang, Lin & Toh 2019); see `tpsgd.peers`.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tpsgd.errors import TpsgdError
from tpsgd.solvers.least_squares import Few, Moments, Solution


@dataclass(frozen=True)
class Ridge:
    """Least squares with a penalty on the weights, not on the bias."""

    alpha: float | None = None

    @property
    def __name__(self) -> str:
        return "ridge()" if self.alpha is None else f"ridge({self.alpha:g})"

    def solve(
        self,
        batches: Iterable[tuple[Tensor, Tensor]],
        bias: bool = True,
        codes: Tensor | None = None,
        few: bool = False,
    ) -> Solution:
        """The weights for rows of inputs and targets; `few`: there are fewer rows than inputs."""
        sums: Moments | Few | None = None
        for x, y in batches:
            sums = sums or (Few if few else Moments)(x, y, bias)
            sums.add(x, y)
        if sums is None:
            raise TpsgdError("the data is empty: an epoch gave no batch")
        return sums.solve(self.alpha, codes)


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
    if alpha is not None and not 0 <= alpha < math.inf:
        raise TpsgdError(f"alpha must be a number, 0 or more, got {alpha}")
    return Ridge(alpha)
