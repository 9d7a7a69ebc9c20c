"""Forward-Forward: every block tells true samples from false ones by the size of its activity.

    J_i = softplus(theta - g_i) for a positive sample, softplus(g_i - theta) for a negative one,
    g_i = sum y_i^2  (the goodness),    theta = threshold * units

Hinton, "The Forward-Forward Algorithm" (2022), supervised: the first numbers of a sample are
replaced by a label, the true one in a positive sample and another one in a negative sample. No
block may see the length of its input, which tells the goodness of the block before: put
`nn.RMSNorm(units, elementwise_affine=False)` between hidden layers. The prediction is the class
whose label gives the most goodness, summed over all hidden blocks but the first.
"""

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tpsgd.common.errors import TpsgdError
from tpsgd.maths.noise import below
from tpsgd.nets.cuts.split import split
from tpsgd.objectives import BlockSignal, LossAndGrads, NetSignal, Objective, Place, Site
from tpsgd.rules import Rule
from tpsgd_family.passes import check_number


class TrueAndFalse(NetSignal):
    """Samples with their own label and with another one; 1 and 0 as the signal."""

    about = "positive and negative samples, made anew for every batch"
    needs_output = False

    def __init__(self, strength: float) -> None:
        self.strength = strength

    def __call__(
        self, learners: Sequence[Any], x: Any, labels: Tensor
    ) -> Iterable[BlockSignal | None]:
        if labels.is_floating_point() or labels.dim() > 1 or not isinstance(x, Tensor):
            raise TpsgdError("forward-forward needs samples in one tensor, and a class for each")
        classes, noise = learners[-1].outputs, learners[0].noise
        wrong = (labels + 1 + below(noise, labels.shape, classes - 1)) % classes
        x = torch.cat([labelled(x, y, classes, self.strength) for y in (labels, wrong)])
        positive = torch.arange(len(x), device=x.device) < len(labels)
        for learner in learners[:-1]:
            saved = learner.forward(x)
            yield BlockSignal(saved, positive.to(x.dtype))
            x = learner.output(saved)
        yield None


def labelled(x: Tensor, labels: Tensor, classes: int, strength: float) -> Tensor:
    """Samples whose first numbers are their label: `strength` at its place, 0 elsewhere."""
    if prod(x.shape[1:]) < classes:
        raise TpsgdError(
            f"samples of {prod(x.shape[1:])} numbers have no room for {classes} labels"
        )
    flat = x.flatten(1).clone()
    flat[:, :classes] = F.one_hot(labels, classes).to(x.dtype) * strength
    return flat.view(x.shape)


def goodness_loss(theta: float) -> Objective:
    """The objective of one block."""

    def excess(y: Tensor, s: Tensor) -> Tensor:
        return y.flatten(1).square().sum(1) - theta

    def loss(y: Tensor, s: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(excess(y, s), s)

    def closed_form(y: Tensor, s: Tensor) -> LossAndGrads:
        logits = excess(y, s)
        share = (logits.sigmoid() - s) * (2.0 / len(y))
        dy = y * share.view(-1, *[1] * (y.dim() - 1))
        return LossAndGrads(F.binary_cross_entropy_with_logits(logits, s), dy)

    return Objective(loss, closed_form)


class Goodness(nn.Module):
    """The goodness of every class, as logits, of a model that Forward-Forward has trained."""

    def __init__(self, model: nn.Module, strength: float) -> None:
        super().__init__()
        self.model, self.strength = model, strength
        self.blocks = split(model)
        layer: Any = self.blocks[-1].layer
        self.classes = len(layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        """(samples, classes)."""
        classes = torch.arange(self.classes, device=x.device)
        every = (labelled(x, c.expand(len(x)), self.classes, self.strength) for c in classes)
        return torch.stack([self.of(samples) for samples in every], 1)

    def of(self, x: Tensor) -> Tensor:
        """The goodness of samples that have a label, of all hidden blocks but the first."""
        goodness = []
        for block in self.blocks[:-1]:
            outputs = block.outputs(x)
            goodness.append(outputs[Place.AFTER].flatten(1).square().sum(1))
            x = outputs[Place.END]
        return torch.stack(goodness[1:] or goodness).sum(0)


def forward_forward(threshold: float = 1.0, strength: float = 1.0) -> Rule:
    """Positive and negative samples in place of a backward pass (Hinton 2022).

    The last layer is neither trained nor used: `tpsgd.evaluate(model, data, rule=rule)`, or
    `run.predictor`, predicts by the goodness of each class. `strength` is the number that stands
    for a label in a sample; with pixels from 0 to 1 it is 1.

    Examples:
        >>> forward_forward().needs_output
        False
    """

    check_number("threshold", threshold)
    check_number("strength", strength)

    def objective(site: Site) -> Objective:
        return goodness_loss(threshold * prod(site.shape))

    def predictor(model: nn.Module) -> nn.Module:
        return Goodness(model, strength)

    about = "positive and negative samples by the size of the activity"
    options = f"threshold {threshold:g} of a unit, strength {strength:g}"
    return Rule(
        "forward-forward", objective, signal=TrueAndFalse(strength), about=about, options=options,
        head=False, predictor=predictor,
    )  # fmt: skip
