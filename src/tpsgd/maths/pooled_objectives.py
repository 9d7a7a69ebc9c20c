"""Objectives of a function of the output: feature maps averaged over cells, units standardised.

A convolution does the same at every pixel, so targets are compared with averages over a grid of
cells. Standardised output cannot lower its loss by growing or shrinking. Both wrap an objective.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tpsgd.maths.pooling import back_to_pixels, cells, wide
from tpsgd.objectives import LossAndGrads, Objective

_EPS = 1e-5  # added to variances, as batch normalisation does


def of_pooled(objective: Objective, grid: tuple[int, ...]) -> Objective:
    """The same objective of feature maps averaged over a grid of cells; its P has that shape."""

    def pool(y: Tensor) -> Tensor:
        return wide(cells(y, grid)).view(len(y), -1, *grid)

    def loss(y: Tensor, s: Tensor, P: Any) -> Tensor:
        return objective.loss(pool(y), s, wide(P))

    def written_out(y: Tensor, s: Tensor, P: Any) -> LossAndGrads:
        local = objective.in_cells(pool(y), s, wide(P))
        dy = local.dy.to(y.dtype).contiguous()
        return local._replace(dy=back_to_pixels(dy, y, grid))

    return _wrapped(objective, loss, written_out, of_batch=not objective.closed_form)


def of_standardised(objective: Objective, maps: bool) -> Objective:
    """The same objective of the output with mean 0 and deviation 1 over the batch.

    Feature maps are standardised per channel, over the batch and space; other output per unit.
    """

    def shaped(y: Tensor) -> Tensor:
        return y if maps else y.flatten(1)

    def loss(y: Tensor, s: Tensor, P: Any) -> Tensor:
        return objective.loss(_standardised(shaped(y))[0].view(y.shape), s, P)

    def written_out(y: Tensor, s: Tensor, P: Any) -> LossAndGrads:
        x = shaped(y)
        f, mean, inverse = _standardised(x)
        local = objective(f.view(y.shape), s, P)
        dy, _, _ = torch.ops.aten.native_batch_norm_backward(
            shaped(local.dy), x, None, None, None, mean, inverse, True, _EPS, (True, False, False)
        )
        return local._replace(dy=dy.view(y.shape))

    return _wrapped(objective, loss, written_out, of_batch=True)


def _wrapped(
    objective: Objective,
    loss: Callable[..., Tensor],
    written_out: Callable[..., LossAndGrads],
    of_batch: bool,
) -> Objective:
    """The objective with another loss, which least squares cannot solve."""
    if not objective.written_out:
        return replace(objective, loss=loss, formula=None)  # autograd differentiates all of it
    return replace(
        objective,
        loss=loss,
        closed_form=None if of_batch else written_out,
        closed_form_of_batch=written_out if of_batch else None,
        squared=False,
        formula=None,
    )


def _standardised(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Each channel with mean 0 and deviation 1; its mean, and one over its deviation."""
    return torch.native_batch_norm(x, None, None, None, None, True, 0.0, _EPS)
