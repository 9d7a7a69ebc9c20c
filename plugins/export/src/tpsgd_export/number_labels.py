"""Labels that are real numbers: what they are standardised with, and a last layer that gives them.

An exported net learns standardised numbers with a mean and a deviation that do not change; what it
takes and gives has the units of the labels. They are rounded to float32, which the C reads.
"""

import warnings
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tpsgd.common.errors import TpsgdError
from tpsgd.features.target_scaling import TargetScaling
from tpsgd.losses import Loss
from tpsgd.nets.blocks import Block
from tpsgd.targets import Target
from tpsgd_export.inputs import FEWEST_STEPS
from tpsgd_export.recipe import BlockRecipe


def are_numbers(labels: Any, loss: Loss | None) -> bool:
    """Whether labels are real numbers, not classes; those of steps or pixels are refused."""
    if labels is None:
        return False
    try:
        y = torch.as_tensor(labels)
    except (TypeError, ValueError, RuntimeError):
        return False
    if not y.dim():
        return False
    many = y.dim() > 1 and y.shape[1] > 1
    if y.dim() > 2 or (many and not y.is_floating_point()):
        raise TpsgdError(
            f"labels= has shape {tuple(y.shape)}: labels of steps or pixels are not exported, one "
            "for each sample is"
        )
    return Target.of(y, loss).numbers


def target_scaling(
    labels: Any, samples: Tensor | None, last: BlockRecipe, outputs: int
) -> TargetScaling:
    """Mean and deviation of the labels; before a last layer that does not learn they stay as is."""
    y = torch.as_tensor(labels).detach().cpu().double()
    y = y.view(len(y), -1)
    if samples is None or len(samples) != len(y):
        raise TpsgdError("numbers are learned from samples= and labels= together, a row for each")
    if y.shape[1] != outputs:
        raise TpsgdError(
            f"labels= has {y.shape[1]} numbers for each sample, and the last layer {outputs} "
            "outputs"
        )
    if not y.isfinite().all():
        raise TpsgdError("labels= has numbers that are not finite: leave those samples out")
    if not last.learns:
        return TargetScaling(torch.zeros(outputs).double(), torch.ones(outputs).double())
    exact = TargetScaling.of(y, shifts="bias" in last.parameters)
    scaling = TargetScaling(exact.shift.float().double(), exact.scale.float().double())
    _warn_of_lost_digits(scaling)
    return scaling


def _warn_of_lost_digits(scaling: TargetScaling) -> None:
    """Warn of labels so far from 0 that float32 has few steps between them."""
    steps = scaling.shift.abs() * torch.finfo(torch.float32).eps
    if (coarse := steps > FEWEST_STEPS * scaling.scale).any():
        i = int(coarse.int().argmax())
        warnings.warn(
            f"labels are float32 numbers, which lie about {steps[i]:.2g} apart near "
            f"{scaling.shift[i]:.9g}, and number {i} varies by about {scaling.scale[i]:.3g} there: "
            "subtract the same constant from all labels",
            stacklevel=4,
        )


def standardised(
    parameters: dict[str, Tensor], blocks: list[Block], samples: Tensor, y: Any, by: TargetScaling
) -> dict[str, Tensor]:
    """Those of a last layer that gives standardised numbers.

    A model whose outputs are nearer to the labels than to standardised ones gives the units of the
    labels, from an earlier training; another one is fresh, and its outputs count as standardised.
    """
    with torch.no_grad():
        out = samples
        for block in blocks:
            out = block(out)
    labels = by(torch.as_tensor(y).view(len(samples), -1))
    if (by(out) - labels).square().mean() < (out - labels).square().mean():
        layer = {name: p.double() for name, p in parameters.items()}
        by.out_of(SimpleNamespace(**{"bias": None, **layer}))
        return {name: p.float() for name, p in layer.items()}
    return parameters


def in_units(layer: list[Tensor], units: Tensor) -> None:
    """Let a last layer, its weights and its bias if any, give numbers in the units of the labels.

    `units` are the means, and behind them the deviations.
    """
    weight, bias = (*layer, None)[:2]
    TargetScaling(*units.double().chunk(2)).into(SimpleNamespace(weight=weight, bias=bias))
