"""The angle between what a block learns from its own loss and what backprop would teach it."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tpsgd.objectives import Place, Signal
from tpsgd_probes.probes import Moment

Loss = Callable[[Tensor, Tensor], Tensor]


def alignment(loss: Loss = F.cross_entropy) -> Callable[[Moment], float | None]:
    """Degrees between the gradient of a block's own loss and that of the loss of the whole net.

    Both are taken on the batch, by the weights and biases of the block. Below 90 degrees a small
    step of the rule lowers the net's loss too. The output layer, blocks that do not learn by a loss
    of their own and backprop have no angle. A block that is trained before those behind it have
    learned is compared with backprop through random layers.
    """

    def alignment(moment: Moment) -> float | None:
        learners: Any = moment.net.learners
        if moment.last or len(learners) < 2 or not hasattr(learners[moment.block], "objective"):
            return None
        learner = learners[moment.block]
        if not learner.learning or not isinstance(learner.signal, Signal):
            return None
        parameters = [p for p in learner.block.layer.parameters() if p.requires_grad]
        before = moment.outputs[moment.block - 1] if moment.block else moment.x
        signal = moment.y
        if learner.signal is not Signal.LABEL:
            output = moment.outputs[-1].detach().requires_grad_()
            with torch.enable_grad():
                (gradient,) = torch.autograd.grad(loss(output, moment.y), output)
            signal = -gradient * len(moment.y)
            signal = signal if learner.signal is Signal.ERROR else signal.sign()
        with torch.enable_grad():
            outputs = learner.block.outputs(before)
            y = outputs[learner.gradient.at]
            local = learner.objective.loss(y, signal, *learner.tensors)
            x = outputs[Place.END]
            for other in learners[moment.block + 1 :]:
                x = other.block.outputs(x)[Place.END]
            pairs = [
                torch.autograd.grad(value, parameters, retain_graph=True, allow_unused=True)
                for value in (local, loss(x, moment.y))
            ]
        ours, theirs = (
            torch.cat([torch.zeros_like(p) if g is None else g for p, g in _flat(parameters, pair)])
            for pair in pairs
        )
        return degrees(ours, theirs)

    return alignment


def _flat(parameters: list[Tensor], gradients: Any) -> list[tuple[Tensor, Tensor | None]]:
    flat = (None if g is None else g.flatten() for g in gradients)
    return list(zip((p.flatten() for p in parameters), flat, strict=True))


def degrees(a: Tensor, b: Tensor) -> float | None:
    """The angle between two vectors; None where one of them is zero.

    Examples:
        >>> round(degrees(torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1.0])), 4)
        45.0
    """
    a, b = a.double(), b.double()
    lengths = a.norm() * b.norm()
    if not lengths > 0:
        return None
    return math.degrees(math.acos(max(-1.0, min(1.0, float(a @ b / lengths)))))
