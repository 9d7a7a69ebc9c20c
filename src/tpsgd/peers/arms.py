"""Other ways to train without backpropagation, each as an arm of `compare`.

LM-KARnet and ELM are a rule with a solver instead of an optimizer:

    lm_karnet   fit(model, data, rule=rules.tpsgd_l2(at=Place.BEFORE), optimizer=ridge())
    elm         fit(model, data, rule=rules.frozen(), optimizer=ridge())

So is KPnet (Zhuang, Lin & Toh, "Correlation projection for analytic learning of a classification
network", 2021), a cascade of modules with a random layer and a layer solved for encoded labels:
rule=[frozen(), before, frozen(), before, ...] with before = rules.tpsgd_l2(at=Place.BEFORE), and
optimizer=ridge().
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from tpsgd.engine.record import Run
from tpsgd.engine.solved import unsolvable
from tpsgd.errors import TpsgdError
from tpsgd.nets.blocks import split
from tpsgd.peers.dladmm import check_model as check_dladmm
from tpsgd.peers.dladmm import fit_dladmm
from tpsgd.peers.zorb import check_model as check_zorb
from tpsgd.peers.zorb import fit_zorb
from tpsgd.projections import Projection
from tpsgd.rules import Entry, Place, frozen, tpsgd_l2
from tpsgd.solvers import ridge
from tpsgd.training.arm import Arm

SHARED = ("seed", "device", "progress", "validation", "callbacks")  # settings of all arms


def lm_karnet(alpha: float | None = None, projection: Projection | None = None) -> Arm:
    """Low-memory kernel-and-range net: every block is solved, hidden blocks for projected labels.

    Zhuang, Lin & Toh, "A low-memory learning formulation for a kernel-and-range network" (2019).
    Their program is not public. We read the method as Lomnitz et al. (2022) do, who compare with
    it: "LM-KARnet replaces target propagation in ZORB with random projection". A hidden layer is
    the least-squares map from its inputs to P y*, before its activation; the last layer is the map
    to y*. We use normal codes P and, instead of a bare pseudo-inverse, the penalty that generalised
    cross-validation chooses; `alpha=0` is the pseudo-inverse. The memory for its sums over samples
    does not grow with their number; `tpsgd.rls` is the recursion of their paper and gives the same
    weights.

    The output of such a layer is that of a linear classifier, mixed by P: however wide the layer,
    it passes on at most one independent direction per class.
    """
    rule = replace(
        tpsgd_l2(projection, Place.BEFORE),
        name="lm-karnet",
        about="least squares to P y* before the activation",
    )
    return Arm("lm-karnet", rule, optimizer=ridge(alpha))


def elm(alpha: float | None = None) -> Arm:
    """Extreme learning machine: hidden layers are random, the last layer is solved.

    Huang, Zhu & Siew, "Extreme learning machine: theory and applications" (2006), with a penalty
    (Huang et al. 2012), and as deep as the model. Every closed-form method has to beat it.
    """
    rule = replace(frozen(), name="elm", about="control: random hidden layers, head by ridge")
    return Arm("elm", rule, optimizer=ridge(alpha))


def zorb(**options: Any) -> Arm:
    """ZORB as an arm; `options` are those of `fit_zorb`."""
    about = "least squares to labels propagated back through the net"
    return Arm("zorb", None, method=partial(_train, by=fit_zorb, options=options), remark=about)


def dladmm(**options: Any) -> Arm:
    """dlADMM as an arm; `options` are those of `fit_dladmm`."""
    about = "alternating updates of all layers, full batch"
    method = partial(_train, by=fit_dladmm, options=options)
    return Arm("dladmm", None, method=method, remark=about)


def _train(
    model: nn.Module, data: Any, *, by: Callable[..., Run], options: dict[str, Any], **settings: Any
) -> Run:
    """Train by a peer, which has no epochs, rates or batches of the size that other arms have."""
    shared = {name: value for name, value in settings.items() if name in SHARED}
    return by(model, data, **(shared | options))


ALL = {
    "zorb": Entry(zorb, "Ranganathan & Lewandowski 2020", "#7B2D00", ">", recurrent=False),
    "lm-karnet": Entry(lm_karnet, "Zhuang et al. 2019", "#7A3E9D", "<", "--", recurrent=False),
    "dladmm": Entry(
        dladmm, "Wang et al. 2019", "#00504A", "*", feed_forward=False, recurrent=False
    ),
    "elm": Entry(elm, "Huang et al. 2006", "#3C3C3C", "8", "-.", recurrent=False),
}


def suits(word: str, model: nn.Module) -> bool:
    """Whether a peer can train a model with these layers."""
    try:
        blocks = split(model)
        if word == "dladmm":
            check_dladmm(blocks)
        elif word == "zorb":
            check_zorb(blocks)
    except TpsgdError:
        return False
    rule = ALL[word].make().rule
    if rule is None:
        return True
    solved = blocks if rule.objective else blocks[-1:]
    return not any(unsolvable(block, rule, block is blocks[-1]) for block in solved)
