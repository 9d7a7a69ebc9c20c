"""One calibration for the whole fleet.

`readout` divides its logits by the size that a block's features have in the first batch. If every
client measured it in every round, each would minimise another loss. So clients measure in the first
round only, before their blocks learn. The server combines the mean squares, weighted by samples,
and sends a constant for every block, which all clients use from then on.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from tpsgd.common.errors import TpsgdError
from tpsgd.engine.record import Run
from tpsgd.objectives import Objective, Site
from tpsgd.rules import Rule, resolve

NONE = 0.0  # in the place of a block whose objective is not calibrated


def scales_of(run: Run) -> list[float]:
    """What calibrated objectives multiplied the features by, for each block; empty if none did."""
    scales = [NONE if block.scale is None else block.scale for block in run.blocks]
    return scales if any(scales) else []


def combined(scales: Iterable[tuple[list[float], int]]) -> list[float]:
    """One constant per block, of the constants of clients and their numbers of samples.

    A constant is c / rms, and mean squares are averaged: so are the inverse squares of constants.

    Examples:
        >>> combined([([1.0, 0.0], 10), ([1.0, 0.0], 30)])
        [1.0, 0.0]
        >>> combined([([1.0], 1), ([0.5], 1)])  # mean squares 1 and 4
        [0.6324555320336759]
    """
    measured = [(constants, samples) for constants, samples in scales if constants]
    total = sum(samples for _, samples in measured)
    weights = [samples / total for _, samples in measured]
    return [
        sum(w * scale**-2 for w, scale in zip(weights, column, strict=True)) ** -0.5
        if all(column)
        else NONE
        for column in zip(*(constants for constants, _ in measured), strict=True)
    ]


def with_scales(rule: Rule | Sequence[Rule] | None, scales: Sequence[float]) -> list[Rule]:
    """A rule for every block, with these constants in place of a calibration."""
    rule = resolve(rule)
    rules = [rule] * len(scales) if isinstance(rule, Rule) else list(rule)
    if len(rules) != len(scales):
        raise TpsgdError(f"the server sent {len(scales)} scales for {len(rules)} blocks")
    return [_scaled(rule, scale) for rule, scale in zip(rules, scales, strict=True)]


def _scaled(rule: Rule, scale: float) -> Rule:
    draw = rule.objective
    if draw is None or not scale:
        return rule

    def objective(site: Site) -> Objective:
        drawn = draw(site)
        if drawn.calibration is None:
            return drawn
        *others, factor = drawn.tensors
        factor = factor * (scale / drawn.calibration.scale)
        return replace(drawn, tensors=(*others, factor), calibration=None)

    return replace(rule, objective=objective)
