"""Learning rates that change with every batch: curves, and the optimizers that follow them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tpsgd.common.errors import TpsgdError


@dataclass(frozen=True, repr=False)
class RateCurve:
    """The learning rate of every step as a multiple of the optimizer's: `fit(lr_schedule=curve)`.

    `factor(step, steps)` is the multiple for a step, counted from 0, of a block that takes `steps`
    in all: its epochs times the batches of an epoch.
    """

    name: str
    factor: Callable[[int, int], float]

    def __repr__(self) -> str:
        return self.name


def one_cycle(warm_up: float = 0.2) -> RateCurve:
    """A learning rate that rises in a line to the optimizer's, then falls to 0 along a cosine.

    It changes with every batch and goes once through all epochs of a block, so that each block has
    the whole curve. The data must know how many batches an epoch has.

    Args:
        warm_up: the share of the steps in which the rate rises, from 0 to less than 1.

    Examples:
        >>> import tpsgd
        >>> curve = tpsgd.one_cycle(warm_up=0.25)
        >>> [round(curve.factor(step, 8), 2) for step in range(8)]
        [0.33, 0.67, 1.0, 0.93, 0.75, 0.5, 0.25, 0.07]
        >>> x, y = torch.randn(64, 8), torch.arange(64) % 2
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 2))
        >>> run = tpsgd.fit(model, (x, y), epochs=2, lr_schedule=curve)
        >>> run.settings["lr_schedule"]
        'one_cycle(0.25)'
    """
    if not isinstance(warm_up, (int, float)) or not 0 <= warm_up < 1:
        raise TpsgdError(f"one_cycle's warm_up must be a share from 0 to less than 1: {warm_up!r}")

    def factor(step: int, steps: int) -> float:
        rising = int(warm_up * steps)
        if step < rising:
            return (step + 1) / (rising + 1)
        return (1 + math.cos(math.pi * (step - rising) / (steps - rising))) / 2

    return RateCurve(f"one_cycle({warm_up:g})", factor)


class BatchRates:
    """Sets the learning rates of optimizers that step together, before each batch.

    Args:
        curve: what the rates follow.
        optimizers: those of the blocks; the rates that they have now are multiplied by the curve.
        steps: how many steps each of them takes in all.
    """

    def __init__(
        self, curve: RateCurve, optimizers: Sequence[Optimizer], steps: Sequence[int]
    ) -> None:
        self.curve, self.step = curve, 0
        self.numbers: dict[int, list[tuple[dict[str, Any], float]]] = {}
        in_tensors: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
        for optimizer, total in zip(optimizers, steps, strict=True):
            for group in optimizer.param_groups:
                if isinstance(rate := group["lr"], Tensor):
                    in_tensors.setdefault((total, rate.device, rate.dtype), []).append(group)
                else:
                    self.numbers.setdefault(total, []).append((group, rate))
        self.tensors = [(total, *_joined(groups)) for (total, *_), groups in in_tensors.items()]

    def advance(self) -> None:
        """Set the rates of the next step. Nothing waits for a device: a kernel sets many rates."""
        for steps, groups in self.numbers.items():
            factor = self.curve.factor(min(self.step, steps - 1), steps)
            for group, rate in groups:
                group["lr"] = rate * factor
        for steps, highest, rates in self.tensors:
            torch.mul(highest, self.curve.factor(min(self.step, steps - 1), steps), out=rates)
        self.step += 1


def _joined(groups: Sequence[dict[str, Any]]) -> tuple[Tensor, Tensor]:
    """Learning rates as one vector that the optimizers read from, and a copy of it."""
    highest = torch.stack([group["lr"].detach().reshape(()) for group in groups])
    rates = highest.clone()
    for i, group in enumerate(groups):
        group["lr"] = rates[i]
    return highest, rates
