"""Methods that are a rule with a solver instead of an optimizer, as arms of `compare`.

    lm_karnet   fit(model, data, rule=rules.tpsgd_l2(at=Place.BEFORE), optimizer=ridge())
    elm         fit(model, data, rule=rules.frozen(), optimizer=ridge())

So is KPnet (Zhuang, Lin & Toh, "Correlation projection for analytic learning of a classification
network", 2021), a cascade of modules with a random layer and a layer solved for encoded labels:
rule=[frozen(), before, frozen(), before, ...] with before = rules.tpsgd_l2(at=Place.BEFORE), and
optimizer=ridge().
"""

from dataclasses import replace

from torch import nn

from tpsgd.common.errors import TpsgdError
from tpsgd.engine.arm import Arm
from tpsgd.engine.solvers import ridge
from tpsgd.engine.solvers.solvable import unsolvable
from tpsgd.nets.cuts.split import LAYERS, split
from tpsgd.objectives import Place
from tpsgd.projections import Projection
from tpsgd.rules import Entry, Rule, frozen, tpsgd_l2


def lm_karnet(alpha: float | None = None, projection: Projection | None = None) -> Arm:
    """Low-memory kernel-and-range net: every block is solved, hidden blocks for projected labels.

    Zhuang, Lin & Toh, "A low-memory learning formulation for a kernel-and-range network" (2019).
    Their program is not public. We read the method as Lomnitz et al. (2022) do: a hidden layer is
    the least-squares map from its inputs to P y*, before its activation; the last layer is the map
    to y*. We use normal codes P and the penalty that generalised cross-validation chooses;
    `alpha=0` is the pseudo-inverse. `tpsgd.rls` is the recursion of their paper and gives the same
    weights. However wide such a layer is, it passes on at most one direction per class.
    """
    about = "least squares to P y* before the activation"
    rule = replace(tpsgd_l2(projection, Place.BEFORE), name="lm-karnet", about=about)
    return Arm("lm-karnet", rule, optimizer=ridge(alpha))


def elm(alpha: float | None = None) -> Arm:
    """Extreme learning machine: hidden layers are random, the last layer is solved.

    Huang, Zhu & Siew, "Extreme learning machine: theory and applications" (2006), with a penalty
    (Huang et al. 2012), and as deep as the model. Every closed-form method has to beat it.
    """
    rule = replace(frozen(), name="elm", about="control: random hidden layers, head by ridge")
    return Arm("elm", rule, optimizer=ridge(alpha))


def solvable(model: nn.Module, rule: Rule) -> bool:
    """Whether the blocks of a model that a rule solves can be solved."""
    try:
        blocks = split(model, blocks=LAYERS)
    except TpsgdError:
        return False
    solved = blocks if rule.objective else blocks[-1:]
    return not any(unsolvable(block, rule, block is blocks[-1]) for block in solved)


ALL = {
    "lm-karnet": Entry(
        lm_karnet, "Zhuang et al. 2019", "#7A3E9D", "<", "--", recurrent=False,
        suits=lambda model: solvable(model, tpsgd_l2(at=Place.BEFORE)),
    ),
    "elm": Entry(
        elm, "Huang et al. 2006", "#3C3C3C", "8", "-.", recurrent=False,
        suits=lambda model: solvable(model, frozen()),
    ),
}  # fmt: skip
