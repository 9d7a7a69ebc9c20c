"""The field's other ways to train without backpropagation, each as an arm of `compare`.

| arm          | hidden layers                                              | last layer           |
|--------------|------------------------------------------------------------|----------------------|
| `lm_karnet`  | least squares to projected labels, before the activation   | least squares        |
| `zorb`       | least squares to labels taken back through the random net  | least squares        |
| `dladmm`     | the whole net by alternating updates, all samples at once  | the same             |
| `elm`        | random: the control of the closed-form methods             | least squares        |

The two in closed form that are not functions of their own are a rule and a solver:

    lm_karnet   fit(model, data, rule=rules.tpsgd_l2(at=Place.BEFORE), optimizer=ridge())
    elm         fit(model, data, rule=rules.frozen(), optimizer=ridge())

KPnet (Zhuang, Lin & Toh, "Correlation projection for analytic learning of a classification
network", 2021, and its kin) cascades modules of two layers, a random one and one solved for encoded
labels. In the same words: rule=[frozen(), before, frozen(), before, ...] with
before = rules.tpsgd_l2(at=Place.BEFORE), and optimizer=ridge().
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from tpsgd.comparison.compare import Arm
from tpsgd.engine.solved import unsolvable
from tpsgd.errors import TpsgdError
from tpsgd.nets.blocks import split
from tpsgd.peers.dladmm import fit_dladmm, refuse
from tpsgd.peers.zorb import check_model, fit_zorb
from tpsgd.projections import Projection
from tpsgd.rules import Place, frozen, tpsgd_l2
from tpsgd.solvers import ridge


def lm_karnet(alpha: float | None = None, projection: Projection | None = None) -> Arm:
    """Low-memory kernel-and-range net: every block solved, hidden ones for projected labels.

    Zhuang, Lin & Toh, "A low-memory learning formulation for a kernel-and-range network" (2019).
    No program of theirs is public. Our reading is that of Lomnitz et al. (2022), who compare with
    it: "LM-KARnet replaces target propagation in ZORB with random projection". So a hidden layer is
    the least-squares map from its inputs to P y*, before its activation, the last one to y*. We
    take normal codes P and, in place of a bare pseudo-inverse, the penalty that generalised
    cross-validation chooses; `alpha=0` is the pseudo-inverse. Its sums over samples need memory
    that does not grow with them; `tpsgd.rls` is the recursion of the paper, with the same weights.

    Such a layer is the linear classifier's output, mixed by P: no more than one independent
    direction per class goes on to the next layer, however wide it is.
    """
    rule = replace(
        tpsgd_l2(projection, Place.BEFORE),
        name="lm-karnet",
        about="least squares to P y* before the activation",
    )
    return Arm("lm-karnet", rule, optimizer=ridge(alpha))


def elm(alpha: float | None = None) -> Arm:
    """Extreme learning machine: hidden layers stay random, the last one is solved.

    Huang, Zhu & Siew, "Extreme learning machine: theory and applications" (2006), with a penalty
    (Huang et al. 2012). As deep as the model. It is what every closed-form method must beat.
    """
    rule = replace(frozen(), name="elm", about="control: random hidden layers, head by ridge")
    return Arm("elm", rule, optimizer=ridge(alpha))


def zorb(**options: Any) -> Arm:
    """ZORB's arm; `options` are those of `tpsgd.fit_zorb`."""
    about = "least squares to labels taken back through the net"
    return Arm("zorb", None, method=partial(fit_zorb, **options), remark=about)


def dladmm(**options: Any) -> Arm:
    """dlADMM's arm; `options` are those of `tpsgd.fit_dladmm`."""
    about = "alternating updates of all layers, full batch"
    return Arm("dladmm", None, method=partial(fit_dladmm, **options), remark=about)


PEERS: dict[str, Callable[[], Arm]] = {
    "zorb": zorb,
    "lm-karnet": lm_karnet,
    "dladmm": dladmm,
    "elm": elm,
}


def suits(word: str, model: nn.Module) -> bool:
    """Whether a peer can train such a model, as far as its layers tell."""
    try:
        blocks = split(model)
        if word == "dladmm":
            refuse(blocks)
        elif word == "zorb":
            check_model(blocks)
    except TpsgdError:
        return False
    rule = PEERS[word]().rule
    learn = blocks if rule and rule.objective else blocks[-1:] if rule else []
    return not any(unsolvable(b, rule, b is blocks[-1]) for b in learn if rule)
