"""Objectives of outputs with positions: steps, pixels or tokens.

With a label for every position, the positions of a batch are rows, and the objective is that of a
vector. Positions without a label have no part in it: the loss is the mean over the others. With one
label for all tokens, the objective is that of their mean.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tpsgd.losses import IGNORED
from tpsgd.objectives import LossAndGrads, Objective
from tpsgd.targets import Target, reduced


class Layout(NamedTuple):
    """Where the positions of an output are, and what their labels look like."""

    grid: tuple[int, ...]  # none: the output is one vector
    channels_first: bool
    target: Target
    outputs: int  # classes, or numbers

    def rows(self, y: Tensor) -> Tensor:
        """An output with a row for each position."""
        if y.dim() == 2:
            return y
        return y.flatten(2).mT.flatten(0, 1) if self.channels_first else y.flatten(0, -2)

    def unrolled(self, rows: Tensor, y: Tensor) -> Tensor:
        """Rows in the shape of an output."""
        if y.dim() == 2 or not self.channels_first:
            return rows.view(y.shape)
        return rows.view(len(y), -1, y.shape[1]).mT.view(y.shape)

    def labels(self, s: Tensor) -> Tensor:
        """The label of every row."""
        labels = reduced(s, self.grid, self.target, self.outputs)
        return labels.flatten(0, len(self.grid))


def at_positions(objective: Objective, layout: Layout) -> Objective:
    """The objective of a vector, at every position of an output."""
    of_rows = masked(objective) if layout.target.ignores else objective

    def loss(y: Tensor, s: Tensor, *tensors: Tensor) -> Tensor:
        return of_rows.loss(layout.rows(y), layout.labels(s), *tensors)

    def written_out(y: Tensor, s: Tensor, *tensors: Tensor) -> LossAndGrads:
        labels = layout.labels(s)
        local = of_rows.in_cells(layout.rows(y), labels, *(tensors or of_rows.tensors))
        return local._replace(dy=layout.unrolled(local.dy, y), labels=labels)

    whole = _wrapped(of_rows, loss, written_out)
    return _measured(whole, lambda y, s: (layout.rows(y), layout.labels(s)))


def of_token_mean(objective: Objective) -> Objective:
    """The objective of a vector, for the mean of an output's tokens `(batch, tokens, width)`.

    Read by weights of its own, every token would learn to be another feature, and later layers,
    which treat all tokens alike, could not use them.
    """

    def loss(y: Tensor, s: Tensor, *tensors: Tensor) -> Tensor:
        return objective.loss(y.mean(1), s, *tensors)

    def written_out(y: Tensor, s: Tensor, *tensors: Tensor) -> LossAndGrads:
        local = objective.in_cells(y.mean(1), s, *(tensors or objective.tensors))
        dy = local.dy.div(y.shape[1]).unsqueeze(1).expand(y.shape).contiguous()
        return local._replace(dy=dy)

    return _measured(_wrapped(objective, loss, written_out), lambda y, s: (y.mean(1), s))


def masked(objective: Objective) -> Objective:
    """The objective of the rows that have a label.

    Of a mean over samples, rows without one become zeros and get a derivative of zero, which leaves
    all shapes as they are; any other objective gets the other rows alone.
    """

    def chosen(y: Tensor, s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        index = (s != IGNORED).nonzero().squeeze(1)
        return index, y.index_select(0, index), s.index_select(0, index)

    def loss(y: Tensor, s: Tensor, *tensors: Tensor) -> Tensor:
        _, y, s = chosen(y, s)
        return objective.loss(y, s, *tensors) if len(s) else y.sum()

    def of_others(y: Tensor, s: Tensor, *tensors: Tensor) -> LossAndGrads:
        index, some, labels = chosen(y, s)
        if not len(labels):
            zeros = tuple(map(torch.zeros_like, objective.learned_tensors))
            return LossAndGrads(y.new_zeros(()), torch.zeros_like(y), zeros)
        local = objective(some, labels, *tensors)
        logits = local.logits
        if logits is not None:
            logits = logits.new_zeros(len(y), *logits.shape[1:]).index_copy(0, index, logits)
        dy = torch.zeros_like(y).index_copy(0, index, local.dy)
        return local._replace(dy=dy, logits=logits)

    def of_mean(y: Tensor, s: Tensor, *tensors: Tensor) -> LossAndGrads:
        labelled = s != IGNORED
        wide = torch.promote_types(y.dtype, torch.float32)
        factor = len(s) / labelled.sum().clamp(min=1).to(wide)
        mask = labelled.to(y.dtype).unsqueeze(1)
        local = objective.in_cells(y * mask, s.clamp(min=0), *tensors)
        dtensors = tuple(t * factor.to(t.dtype) for t in local.dtensors)
        value = local.loss
        if isinstance(value, Tensor):  # rows of zeros have a loss too: it is computed again
            value = loss(y, s, *tensors)
        return LossAndGrads(value, local.dy * (mask * factor), dtensors, local.logits, s)

    def labelled_alone(y: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        mask = (s != IGNORED).to(y.dtype)  # the mean square of all rows is then that of these
        return y * (mask * (len(s) / mask.sum().clamp(min=1)).sqrt()).unsqueeze(1), s

    whole = _wrapped(objective, loss, of_mean if objective.closed_form else of_others)
    return _measured(whole, labelled_alone)


def _measured(
    objective: Objective, change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
) -> Objective:
    """The objective calibrated to what its outputs and labels are changed into."""
    calibration = objective.calibration
    if calibration is None:
        return objective
    features = calibration.features
    calibration = replace(calibration, features=lambda y, s: features(*change(y, s)))
    return replace(objective, calibration=calibration)


def _wrapped(
    objective: Objective,
    loss: Callable[..., Tensor],
    written_out: Callable[..., Any],
) -> Objective:
    """The objective with another loss; what is no mean over samples stays none."""
    mean = objective.closed_form is not None
    return replace(
        objective,
        loss=loss,
        closed_form=written_out if mean else None,
        closed_form_of_batch=None if mean else written_out,
        squared=False,
        formula=None,
    )
