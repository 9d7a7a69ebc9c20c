"""Feedback alignment and sign symmetry: backpropagation whose backward weights are others.

    d_i = (d_{i+1} * sigma'(z_{i+1})) B_{i+1},      backprop has W_{i+1} in place of B_{i+1}

| rule                 | B                                | source                                 |
|----------------------|----------------------------------|----------------------------------------|
| `feedback_alignment` | fixed random numbers             | Lillicrap et al. (2016)                |
| `sign_symmetry`      | abs(M) * sign(W), M fixed random | Liao, Leibo & Poggio (2016), "frSF"    |
| ... `uniform=True`   | sign(W) / sqrt(3 inputs)         | the same, "uSF", scaled as W at first  |

B belongs to the block in front, as class codes do: row j is a function of seed, block and unit j.
"""

from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any

from torch import Tensor

from tpsgd.common.errors import TpsgdError
from tpsgd.objectives import BlockSignal, NetSignal, Objective, Place, Site
from tpsgd.projections import uniform as uniform_numbers
from tpsgd.rules import Rule
from tpsgd_family.passes import check_number, following, forward, send_back

Matrix = Callable[[tuple[Tensor, ...], Tensor], Tensor]  # of a block's tensors and the next weight


class SentBack(NetSignal):
    """The output's error, sent back block by block through other matrices than the weights."""

    about = "the error of the whole net's output, which goes back block by block"

    def __init__(self, name: str, matrix: Matrix) -> None:
        self.name, self.matrix = name, matrix

    def __call__(self, learners: Sequence[Any], x: Any, labels: Tensor) -> Iterable[BlockSignal]:
        inputs, saved = forward(learners, x, self.name)
        direction = learners[-1].error(saved[-1], labels)
        signals = [BlockSignal(saved[-1], labels)]
        for i in range(len(learners) - 1, 0, -1):
            if not any(learner.learning for learner in learners[:i]):
                break
            matrix = self.matrix(learners[i - 1].tensors, learners[i].block.layer.weight)
            direction = send_back(learners[i], inputs[i], direction, matrix)
            signals.insert(0, BlockSignal(saved[i - 1], direction))
        return [None] * (len(learners) - len(signals)) + signals  # type: ignore[return-value]


def feedback_alignment(scale: float = 1.0) -> Rule:
    """Fixed random backward matrices (Lillicrap, Cownden, Tweed & Akerman 2016).

    B is uniform with the deviation `scale / sqrt(3 inputs)`: with 1 that of torch's weights.

    Examples:
        >>> feedback_alignment().needs_output
        True
    """
    check_number("scale", scale)

    def objective(site: Site) -> Objective:
        return following(drawn(site, scale))

    name, options = "feedback-alignment", f"uniform matrices, scale {scale:g}"
    signal = SentBack(name, lambda tensors, weight: tensors[0])
    about = "backprop with fixed random backward matrices; waits for the output"
    return Rule(name, objective, signal=signal, at=Place.END, about=about, options=options)


def sign_symmetry(uniform: bool = False) -> Rule:
    """Backward matrices with the signs of the weights (Liao, Leibo & Poggio 2016).

    Their magnitudes are fixed random numbers; with `uniform` all are equal, and nothing is stored.
    """

    def objective(site: Site) -> Objective:
        return following() if uniform else following(drawn(site).abs())

    def matrix(tensors: tuple[Tensor, ...], weight: Tensor) -> Tensor:
        signs = weight.detach().sign()
        return signs * ((3 * prod(weight.shape[1:])) ** -0.5 if uniform else tensors[0])

    name, options = "sign-symmetry", "uniform magnitudes" if uniform else "random magnitudes"
    about = "backprop with backward matrices that have the weights' signs; waits for the output"
    signal = SentBack(name, matrix)
    return Rule(name, objective, signal=signal, at=Place.END, about=about, options=options)


def drawn(site: Site, scale: float = 1.0) -> Tensor:
    """Uniform numbers in the shape of the weight behind, of the deviation of torch's weights."""
    if len(site.behind) < 2:
        raise TpsgdError(
            f"the layer behind block {site.key.block + 1} has no weight to go back through: these "
            "rules are for nn.Linear and convolutions"
        )
    outputs, *inputs = site.behind
    std = scale / (3 * prod(inputs)) ** 0.5
    return uniform_numbers(std)(inputs, outputs, site.key, site.device).to(site.dtype)
