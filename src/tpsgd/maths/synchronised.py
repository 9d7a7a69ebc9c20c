"""The objective of `rules.lls`: the direction of a block's output, read through periodic codes.

Apolinario, Roy & Roy, "LLS: Local Learning Rule for Deep Neural Networks Inspired by Neural
Activity Synchronization" (2025):

    J = CE(B f / (|f| t), y*),   B_ck = sin(w_c k),   w_c from 50 to 512 in equal steps

f are the outputs of a block, feature maps averaged over a grid of cells, and t a temperature. As in
the authors' program; nothing of it is random or learned.
"""

from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from tpsgd.losses import Loss, cross_entropy
from tpsgd.maths.pooling import back_to_pixels, cells, grid_for
from tpsgd.objectives import NOT_COMPUTED, LossAndGrads, Objective, Site

SLOWEST, FASTEST = 50.0, 512.0  # radians for each unit
LEAST = 1e-12  # a norm below it counts as this


def synchronised(site: Site, most: int, temperature: float) -> Objective:
    """A classifier of the direction of the output; maps are averaged to at most `most` cells."""
    grid = grid_for(site.shape, most * site.shape[0]) if site.maps else None
    width = site.shape[0] * prod(grid) if grid else prod(site.shape)
    frequencies = torch.linspace(SLOWEST, FASTEST, site.classes, dtype=torch.float64)
    codes = (frequencies[:, None] * torch.arange(width)).sin() / temperature
    local = cross_entropy if site.loss.of_numbers and not site.numbers else site.loss
    reader = _Direction(local, grid)
    codes = codes.to(site.device, site.dtype)
    return Objective(reader.loss, reader.closed_form, (codes,), of_logits=local)


class _Direction(NamedTuple):
    """The loss and its derivative."""

    local: Loss
    grid: tuple[int, ...] | None

    def read(self, y: Tensor, codes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Directions, norms, logits."""
        f = (cells(y, self.grid) if self.grid else y).flatten(1)
        norm = f.norm(dim=1, keepdim=True).clamp(min=LEAST)
        direction = f / norm
        logits = direction @ codes.T
        return direction, norm, logits.float() if logits.dtype is torch.bfloat16 else logits

    def loss(self, y: Tensor, s: Tensor, codes: Tensor) -> Tensor:
        return self.local.value(self.read(y, codes)[2], s)

    def closed_form(self, y: Tensor, s: Tensor, codes: Tensor) -> LossAndGrads:
        direction, norm, logits = self.read(y, codes)
        e = self.local.grad(logits, s).to(y.dtype) / len(y)
        d = e @ codes
        d = (d - direction * (direction * d).sum(1, keepdim=True)) / norm
        dy = back_to_pixels(d, y, self.grid) if self.grid else d.view(y.shape)
        return LossAndGrads(NOT_COMPUTED, dy, (), logits)
