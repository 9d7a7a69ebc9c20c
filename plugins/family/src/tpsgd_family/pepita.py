"""PEPITA: the error reaches the net through its input, in a second forward pass.

    first pass: h_i        e = y_N - y*        second pass, of x + F e: h'_i
    W_i <- W_i - eta * h'_{i-1}^T (h_i - h'_i),        the last:  W_N <- W_N - eta * h'_{N-1}^T e'

Dellaferrera & Kreiman, "Error-driven Input Modulation: Solving the Credit Assignment Problem
without a Backward Pass" (2022). The derivative of the activation does not appear: the objective
looks before it. Every block learns from the second pass, as in the authors' program.
"""

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

from torch import Tensor

from tpsgd.common.errors import TpsgdError
from tpsgd.objectives import BlockSignal, NetSignal, Objective, Place, Site, aim
from tpsgd.projections import uniform
from tpsgd.rules import Rule
from tpsgd_family.passes import check_number, following, forward


class TwoPasses(NetSignal):
    """The difference between the activities of two passes."""

    about = "the difference to a second pass, of the input plus the projected error"

    def __call__(self, learners: Sequence[Any], x: Any, labels: Tensor) -> Iterable[BlockSignal]:
        first = forward(learners, x, "pepita")
        if not learners[0].tensors:
            raise TpsgdError("pepita needs the first block, which has F, to learn")
        error = learners[-1].error(first.saved[-1], labels)
        x = x + aim(learners[0].tensors[0], -error).to(x.dtype)
        for learner, before in zip(learners[:-1], first.saved[:-1], strict=True):
            saved = learner.forward(x)
            yield BlockSignal(saved, activity(learner, saved) - activity(learner, before))
            x = learner.output(saved)
        yield BlockSignal(learners[-1].forward(x), labels)


def activity(learner: Any, saved: Any) -> Tensor:
    """A block's output after its activation."""
    z, activation = learner.gradient.objective_input(saved), learner.block.activation
    return z if activation is None else activation(z.clone())


def pepita(scale: float = 0.05) -> Rule:
    """The input plus the projected error in a second pass (Dellaferrera & Kreiman 2022).

    F, of shape (classes, input), is uniform within `scale * sqrt(6 / inputs)`, as published. Take
    SGD with momentum, biases left out, as published.

    Examples:
        >>> pepita().signal.needs_output
        True
    """

    check_number("scale", scale)

    def objective(site: Site) -> Objective:
        if site.key.block:
            return following()
        std = scale * (2 / prod(site.input)) ** 0.5
        return following(site.draw(uniform(std), site.input))

    about = "difference of two forward passes, the second of input plus projected error"
    options = f"uniform F, scale {scale:g}"
    signal = TwoPasses()
    return Rule("pepita", objective, signal=signal, at=Place.BEFORE, about=about, options=options)
