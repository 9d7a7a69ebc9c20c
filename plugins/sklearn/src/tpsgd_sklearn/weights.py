"""Sample weights: every loss is a mean over samples, each times its weight.

The weight travels in the label. Sample i of class c with the weight w_i has the row w_i y*_i, which
is w_i in column c and 0 elsewhere, so that the row's sum is the weight. The losses here read it:

| loss              | of one sample                        | how                                   |
|-------------------|--------------------------------------|---------------------------------------|
| cross-entropy     | - sum w y* log softmax(y)            | derivative w softmax(y) - w y*        |
| l1, l2, inner     | loss(a y, a P y*), a = w^(1/degree)  | loss(a y, a s) = a^degree loss(y, s)  |
| DFA               | - <y, P s>                           | s, minus the derivative, has w in it  |
"""

from dataclasses import dataclass, replace

from torch import Tensor

from tpsgd.common.errors import TpsgdError
from tpsgd.losses import Loss, cross_entropy
from tpsgd.objectives import Calibration, LossAndGrads, Objective, Signal, Site
from tpsgd.rules import Rule, scale_of

DEGREES = {"tpsgd-l1": 1, "tpsgd-l2": 2, "drtp": 2}  # by which a common factor leaves the loss


def weighted_rows(labels: Tensor, weights: Tensor, classes: int) -> Tensor:
    """Rows w_i y*_i for class indices and positive weights.

    Examples:
        >>> import torch
        >>> weighted_rows(torch.tensor([1, 0]), torch.tensor([0.5, 2.0]), 2)
        tensor([[0.0000, 0.5000],
                [2.0000, 0.0000]])
    """
    rows = weights.new_zeros(len(labels), classes)
    return rows.scatter_(1, labels[:, None], weights[:, None])


@dataclass(frozen=True)
class WeightedLoss(Loss):
    """A loss of rows that carry weights."""

    def grad(self, y: Tensor, labels: Tensor) -> Tensor:
        """The derivative of each sample's weighted loss with respect to y."""
        return self.link(y).mul_(labels.sum(1, keepdim=True)).sub_(labels)


def _value(y: Tensor, rows: Tensor) -> Tensor:
    return (rows.sum(1) * y.logsumexp(1) - (rows * y).sum(1)).mean()


weighted_cross_entropy = WeightedLoss("cross_entropy", cross_entropy.link, _value)


@dataclass(frozen=True)
class WeightedCalibration(Calibration):
    """The mean square of the features, a sample counting as its weight says."""

    @property
    def mean_square(self) -> Objective:
        """An objective whose loss is the weighted mean square of the features."""

        def loss(y: Tensor, rows: Tensor) -> Tensor:
            return (self.features(y, rows).square().mean(1) * rows.sum(1)).mean()

        return Objective(loss, lambda y, rows: LossAndGrads(loss(y, rows), y))


def weighted(rule: Rule) -> Rule:
    """The rule with labels that are rows w_i y*_i; its last block has `weighted_cross_entropy`.

    Examples:
        >>> from tpsgd import rules
        >>> weighted(rules.predsim())
        Traceback (most recent call last):
            ...
        tpsgd.TpsgdError: weights of samples or classes work with the rules readout, ...
    """
    make = rule.objective
    if make is None or rule.signal is Signal.ERROR:  # the signal has the weight as a factor
        return rule
    degree = DEGREES.get(rule.name)
    if degree is None and scale_of(rule) is None:
        raise TpsgdError(
            "weights of samples or classes work with the rules readout, readout-learned, "
            f"{', '.join(DEGREES)}, dfa and frozen, not with {rule.name}"
        )

    def objective(site: Site) -> Objective:
        unweighted = make(site)
        return _of_readout(unweighted) if degree is None else _scaled(unweighted, degree)

    return replace(rule, objective=objective)


def _of_readout(objective: Objective) -> Objective:
    """A readout, which has the last block's loss already; its calibration is weighted, too."""
    if (calibration := objective.calibration) is None:
        return objective
    weighted = WeightedCalibration(calibration.scale, calibration.features)
    return replace(objective, calibration=weighted)


def _scaled(objective: Objective, degree: int) -> Objective:
    """An objective whose outputs and targets are scaled, so that its loss has the weight."""
    closed_form = objective.closed_form
    if closed_form is None:
        raise TpsgdError("weights need a loss that is a mean over samples: not standardise=True")

    def scales(rows: Tensor) -> tuple[Tensor, Tensor]:
        w = rows.sum(1, keepdim=True)
        a = w ** (1 / degree)
        return a, rows * (a / w)

    def loss(y: Tensor, rows: Tensor, *tensors: Tensor) -> Tensor:
        a, s = scales(rows)
        return objective.loss(a * y, s, *tensors)

    def scaled_form(y: Tensor, rows: Tensor, *tensors: Tensor) -> LossAndGrads:
        a, s = scales(rows)
        local = closed_form(a * y, s, *tensors)
        return local._replace(dy=local.dy * a)

    return replace(objective, loss=loss, closed_form=scaled_form, squared=False)
