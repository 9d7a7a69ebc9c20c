"""Forward gradients: a derivative in one random direction, times this direction.

    g = (dL . v) v,      v normal with deviation 1,      E g = dL

| rule                                 | v is a direction of      | L                            |
|--------------------------------------|--------------------------|------------------------------|
| `forward_gradient()`                 | all weights              | the net's loss               |
| `forward_gradient(activations=True)` | all z_i, for each sample | each sample's loss           |
| `local_forward_gradient()`           | y_i, for each sample     | the block's local classifier |
| `weight_perturbation(sigma)`         | all weights              | the net's loss               |

The last one has (L(W + sigma v) - L(W)) / sigma in place of dL . v.

Baydin, Pearlmutter, Syme, Wood & Torr, "Gradients without backpropagation" (2022); Ren, Kornblith,
Liao & Hinton, "Scaling forward gradient with local losses" (2023). The numbers v are drawn from the
seed, the block, the epoch and the batch. Directional derivatives are computed in forward mode, but
for the local one: its inner product with v is taken of the closed form, which is the same number.
"""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tpsgd.maths.noise import normal
from tpsgd.nets.modes import statistics_restored
from tpsgd.objectives import BlockSignal, LossAndGrads, NetSignal, Objective, Place, Site
from tpsgd.rules import Rule, readout
from tpsgd_family.passes import check_number, following, forward, loss_of, refuse_unsuited, run

Weights = list[dict[str, Tensor]]  # of every block, by their names in it


class InWeights(NetSignal):
    """Gradients of all weights from one directional derivative of the net's loss."""

    about = "a change of the whole net's loss"

    def __init__(self, name: str, sigma: float | None = None) -> None:
        self.name, self.sigma = name, sigma

    def __call__(self, learners: Sequence[Any], x: Any, labels: Tensor) -> Iterable[BlockSignal]:
        for learner in learners:
            refuse_unsuited(learner, self.name)
        weights: Weights = [
            {n: p.detach() for n, p in learner.params.items()} if learner.learning else {}
            for learner in learners
        ]
        directions = [drawn(x.noise, w) for x, w in zip(learners, weights, strict=True)]
        modules = [m for learner in learners for m in learner.block.modules]

        def net(weights: Weights) -> tuple[Tensor, Tensor]:
            y = x
            for learner, own in zip(learners, weights, strict=True):
                last = learner is learners[-1]
                y = run(learner.block, learner.gradient.at if last else Place.END, y, own)
            return loss_of(learners[-1])(y, labels), y

        slope: Any  # along the directions
        with statistics_restored(modules):
            if self.sigma is None:
                with forward_mode():
                    duals, y = net(dual(weights, directions))
                    loss, slope = forward_ad.unpack_dual(duals)
                    logits = forward_ad.unpack_dual(y).primal
            else:
                loss, logits = net(weights)
                slope = (net(moved(weights, directions, self.sigma))[0] - loss) / self.sigma
        for learner, direction in zip(learners, directions, strict=True):
            shown = logits.detach() if learner is learners[-1] else None
            local = LossAndGrads(loss.detach(), loss.detach(), (), shown)
            yield BlockSignal(None, (), {n: slope * v for n, v in direction.items()}, local)


def drawn(noise: Tensor, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Random numbers in the shapes of a block's weights."""
    sizes = [p.numel() for p in weights.values()]
    pieces = normal(noise, (sum(sizes),)).split(sizes) if sizes else ()
    named = zip(weights.items(), pieces, strict=True)
    return {name: piece.view(p.shape).to(p.dtype) for (name, p), piece in named}


@contextmanager
def forward_mode() -> Iterator[None]:
    """Derivatives in forward mode, without torch's warning of its own deprecated compiler."""
    with warnings.catch_warnings(), forward_ad.dual_level():
        warnings.filterwarnings("ignore", "`torch.jit.script", DeprecationWarning)
        yield


def dual(weights: Weights, directions: Weights) -> Weights:
    """Weights that carry a direction through a pass in forward mode."""
    pairs = zip(weights, directions, strict=True)
    return [{n: forward_ad.make_dual(p, v[n]) for n, p in w.items()} for w, v in pairs]


def moved(weights: Weights, directions: Weights, sigma: float) -> Weights:
    """Weights a step along a direction."""
    pairs = zip(weights, directions, strict=True)
    return [{n: p + sigma * v[n] for n, p in w.items()} for w, v in pairs]


class InActivations(NetSignal):
    """Derivatives of every hidden activity z_i from one pass in forward mode."""

    about = "a change of the whole net's loss, for each sample"

    def __call__(self, learners: Sequence[Any], x: Any, labels: Tensor) -> Iterable[BlockSignal]:
        passed = forward(learners, x, "forward-gradient-activations")
        hidden, last = learners[:-1], learners[-1]
        z = [a.gradient.objective_input(s) for a, s in zip(hidden, passed.saved, strict=False)]
        directions = [normal(a.noise, y.shape, y.dtype) for a, y in zip(hidden, z, strict=True)]

        def net(changes: list[Tensor]) -> Tensor:
            y = x
            for learner, change in zip(hidden, changes, strict=True):
                y = run(learner.block, Place.BEFORE, y, {}) + change
                y = learner.block.onwards(Place.BEFORE, y)
            return run(last.block, last.gradient.at, y, {})

        modules = [m for learner in learners for m in learner.block.modules]
        with statistics_restored(modules), forward_mode():
            zeros = [forward_ad.make_dual(torch.zeros_like(v), v) for v in directions]
            change = forward_ad.unpack_dual(net(zeros)).tangent
        slope = (last.error(passed.saved[-1], labels) * change).flatten(1).sum(1)  # minus dL . v
        for saved, v in zip(passed.saved, directions, strict=False):
            yield BlockSignal(saved, v * slope.view(-1, *[1] * (v.dim() - 1)))
        yield BlockSignal(passed.saved[-1], labels)


def forward_gradient(activations: bool = False) -> Rule:
    """A derivative in one random direction of all weights (Baydin et al. 2022), or activities.

    With `activations` the direction is one of all hidden activities before the activation function
    (Ren et al. 2023), and the last layer learns by its own loss.
    """
    if activations:
        name, signal, kind = "forward-gradient-activations", InActivations(), "activities"
    else:
        name = "forward-gradient-weights"
        signal, kind = InWeights(name), "weights"
    about = f"directional derivative along random {kind}, times them; waits for the output"
    return Rule(name, _nothing, signal=signal, at=Place.BEFORE, about=about)


def weight_perturbation(sigma: float = 1e-3) -> Rule:
    """The change of the loss under a random change of all weights, times this change."""
    check_number("sigma", sigma)
    name, about = "weight-perturbation", "difference of two losses along random weights, times them"
    signal, options = InWeights(name, sigma), f"sigma {sigma:g}"
    return Rule(name, _nothing, signal=signal, at=Place.BEFORE, about=about, options=options)


def local_forward_gradient(learned: bool = True, at: Place = Place.AFTER) -> Rule:
    """Forward gradients of local classifiers, one direction for each sample (Ren et al. 2023).

    The classifier is `readout`'s; its codes, if they are learned, have their true gradient.
    """
    rule = readout(learned, at=at)
    make = rule.objective
    assert make is not None

    def objective(site: Site) -> Objective:
        return along_noise(make(site), site.noise())

    name, about = "forward-gradient-local", "local classifier, derivative in one random direction"
    return replace(rule, name=name, objective=objective, about=about)


def along_noise(inner: Objective, noise: Tensor) -> Objective:
    """The objective with the derivative (dJ . v) v of every sample in place of dJ."""
    at = len(inner.tensors) - 1  # before the last, which a calibration divides

    def closed_form(y: Tensor, s: Tensor, *tensors: Tensor) -> LossAndGrads:
        local = inner(y, s, *tensors[:at], *tensors[at + 1 :])
        v = normal(tensors[at], y.shape, y.dtype)
        slope = (local.dy * v).flatten(1).sum(1)
        return local._replace(dy=v * slope.view(-1, *[1] * (y.dim() - 1)))

    def loss(y: Tensor, s: Tensor, *tensors: Tensor) -> Tensor:
        fixed = y.detach()
        value = inner.loss(fixed, s, *tensors[:at], *tensors[at + 1 :])
        with torch.no_grad():
            dy = closed_form(fixed, s, *tensors).dy
        return value + ((y - fixed) * dy).sum()  # the same value, with that derivative

    return replace(
        inner, loss=loss, closed_form=None, closed_form_of_batch=closed_form, formula=None,
        tensors=(*inner.tensors[:at], noise, inner.tensors[at]), noise_at=at, squared=False,
        constants=inner.constants + inner.learned, of_logits=None,
    )  # fmt: skip


def _nothing(site: Site) -> Objective:
    return following()
