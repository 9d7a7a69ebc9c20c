"""Difference target propagation: every block has a target, and learned inverses find it.

    target of the last hidden block:   t_{N-1} = h_{N-1} - step * dL/dh_{N-1}
    of the others:                     t_i = h_i - g_{i+1}(h_{i+1}) + g_{i+1}(t_{i+1})
    J_i = 1/2 |h_i - t_i|^2 + 1/2 |g_{i+1}(f_{i+1}(h_i + e)) - (h_i + e)|^2,   g(h) = tanh(h V + c)

Lee, Zhang, Fischer & Bengio, "Difference target propagation" (2015). The second term teaches the
inverse alone; e is normal with deviation `noise`. V and c are tensors of block i's objective, so
that they have its optimizer, its learning rate and its place in the plan of memory. The inverse of
the last layer learns as the others do and is not used: the last hidden block has its target from
the gradient.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from tpsgd.common.errors import TpsgdError
from tpsgd.maths.noise import normal
from tpsgd.objectives import BlockSignal, NetSignal, Objective, Place, Site
from tpsgd.rules import Rule
from tpsgd_family.feedback import drawn
from tpsgd_family.passes import check_number, forward, send_back


class Targets(NetSignal):
    """The target of every block, and what its inverse learns from."""

    about = "a target from the blocks behind"

    def __init__(self, step: float, noise: float) -> None:
        self.step, self.noise = step, noise

    def __call__(self, learners: Sequence[Any], x: Any, labels: Tensor) -> Iterable[BlockSignal]:
        inputs, saved = forward(learners, x, "target-propagation")
        last, hidden = learners[-1], learners[:-1]
        h = inputs[1:]  # what every hidden block gives to the next
        error = send_back(
            last, h[-1], last.error(saved[-1], labels), last.block.layer.weight.detach()
        )
        targets = [h[-1] + self.step * error]
        for i in range(len(h) - 2, -1, -1):
            V, c = hidden[i].tensors
            targets.insert(0, h[i] - inverse(h[i + 1], V, c) + inverse(targets[0], V, c))
        for i, learner in enumerate(hidden):
            noisy = h[i] + self.noise * normal(learner.noise, h[i].shape, h[i].dtype)
            behind = learners[i + 1]
            seen = behind.gradient.objective_input(behind.forward(noisy))
            yield BlockSignal(saved[i], (targets[i], noisy, seen.detach().clone()))
        yield BlockSignal(saved[-1], labels)


def inverse(h: Tensor, V: Tensor, c: Tensor) -> Tensor:
    """What enters a block, from its output."""
    return torch.tanh(h @ V + c)


def target_propagation(step: float = 0.5, noise: float = 0.1) -> Rule:
    """Targets through learned inverses (Lee et al. 2015), which are linear layers and a tanh.

    `step` is how far the last hidden block's target is from its output, `noise` the deviation of
    what the inverses learn to undo.
    """

    check_number("step", step)
    check_number("noise", noise, zero=True)

    def loss(y: Tensor, s: tuple[Tensor, ...], V: Tensor, c: Tensor) -> Tensor:
        target, noisy, seen = s
        undone = inverse(seen, V, c)
        return ((y - target).square().sum() + (undone - noisy).square().sum()) / (2 * len(y))

    def objective(site: Site) -> Objective:
        if len(site.shape) != 1 or len(site.behind) != 2 or site.behind[1] != site.shape[0]:
            raise TpsgdError(
                f"target-propagation needs an nn.Linear behind block {site.key.block + 1}, which "
                f"gives {site.shape}; the weight behind it has the shape {site.behind}"
            )
        V = drawn(site)
        return Objective(loss, tensors=(V, V.new_zeros(V.shape[1])), learned=True)

    about = "targets through learned inverses; waits for the output"
    options = f"step {step:g}, noise {noise:g}"
    return Rule(
        "target-propagation", objective, signal=Targets(step, noise), at=Place.END, about=about,
        options=options,
    )  # fmt: skip
