"""Passes through a net that the rules share: forward with every input kept, and back by a block."""

from collections.abc import Callable, Sequence
from math import isfinite
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from tpsgd.common.errors import TpsgdError
from tpsgd.nets.blocks import Block
from tpsgd.nets.modes import statistics_restored
from tpsgd.objectives import LossAndGrads, Objective, Place

ACTIVATED = Place.AFTER, Place.END


def check_number(name: str, value: Any, zero: bool = False) -> None:
    """Refuse what is no finite number above 0, or with `zero` 0 itself."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value)
    if not number or value < 0 or (value == 0 and not zero):
        least = "0 or more" if zero else "above 0"
        raise TpsgdError(f"{name} must be a number {least}, got {value!r}")


class Forward(NamedTuple):
    """What enters each block, and its saved values."""

    inputs: list[Tensor]
    saved: list[Any]


def forward(learners: Sequence[Any], x: Any, name: str) -> Forward:
    """A pass of a batch; what these rules cannot be used for is refused."""
    if not isinstance(x, Tensor):
        raise TpsgdError(f"{name} is for models of one input, a tensor")
    for learner in learners:
        refuse_unsuited(learner, name)
    passed = Forward([], [])
    for learner in learners:
        passed.inputs.append(x)
        passed.saved.append(learner.forward(x))
        if learner is not learners[-1]:
            x = learner.output(passed.saved[-1])
    return passed


def refuse_unsuited(learner: Any, name: str) -> None:
    """Refuse a block of several layers, and dropout, whose mask the second pass would not have."""
    block: Block = learner.block
    if block.earlier:
        raise TpsgdError(f"{name} is for blocks of one layer each: leave blocks= out")
    dropouts = (m for top in block.modules for m in top.modules())
    if any(isinstance(m, nn.modules.dropout._DropoutNd) and m.p and m.training for m in dropouts):
        raise TpsgdError(
            f"{name} goes through block {block.index + 1} ({block}) twice, and dropout would draw "
            "another mask: leave dropout out of the model"
        )
    if learner.figures.target.positions:
        raise TpsgdError(f"{name} is for one label for each sample, and here positions have labels")


def modules_to(block: Block, place: Place) -> list[nn.Module]:
    """The modules from a block's input to a place."""
    modules = [*block.prologue, block.layer, *block.between]
    if place in ACTIVATED and block.activation is not None:
        modules.append(block.activation)
    return [*modules, *block.tail] if place is Place.END else modules


def run(block: Block, place: Place, x: Tensor, params: dict[str, Tensor]) -> Tensor:
    """The output at a place with other parameters, by their names in the block."""
    for i, module in enumerate(modules_to(block, place)):
        key = f"{i}."
        own = {k.removeprefix(key): p for k, p in params.items() if k.startswith(key)}
        x = functional_call(module, own, (x,))
    return x


def send_back(learner: Any, x: Tensor, direction: Tensor, matrix: Tensor) -> Tensor:
    """A direction of the block's output as one of its input, as if the weight was this matrix.

    The derivatives of everything else in the block are those at its true values.
    """
    block, layer = learner.block, learner.block.layer

    def swapped(x: Tensor) -> Tensor:
        other = functional_call(layer, {"weight": matrix}, (x,))
        return other + (layer(x) - other).detach()  # the value of one, the derivative of the other

    with torch.enable_grad(), statistics_restored(block.modules):
        x = x.detach().requires_grad_()
        y = x
        for module in modules_to(block, learner.gradient.at):
            y = swapped(y) if module is layer else module(y)
        return torch.autograd.grad(y, x, direction)[0]


def following(*tensors: Tensor) -> Objective:
    """The objective whose descent moves the output along the signal: -<y, s>, a mean over samples.

    Its tensors are what the signal of the whole net needs in this block.
    """

    def loss(y: Tensor, s: Tensor, *tensors: Tensor) -> Tensor:
        return -(y * s).sum() / len(y)

    def closed_form(y: Tensor, s: Tensor, *tensors: Tensor) -> LossAndGrads:
        dy = s.view(y.shape) * (-1.0 / len(y))
        return LossAndGrads((y * dy).sum(), dy)

    return Objective(loss, closed_form, tensors)


def loss_of(learner: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """The last block's loss of the net's output."""
    return learner.objective.loss
