"""The HSIC bottleneck: a block's output depends on the label, and little on the net's input.

    J_i = nHSIC(y_i, x) - beta * nHSIC(y_i, y*),     nHSIC(A, B) = tr(K~_A K~_B),
    K~ = K H (K H + epsilon n 1)^-1,   H = 1 - 1/n,   K_ij = exp(-|a_i - a_j|^2 / (2 sigma^2 d))

Ma, Lewis & Kleijn, "The HSIC bottleneck: deep learning without back-propagation" (2020). It
compares the samples of a batch; d is the number of units. Labels are one-hot rows, not projected.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tpsgd.common.errors import TpsgdError
from tpsgd.objectives import BlockSignal, NetSignal, Objective, Site
from tpsgd.rules import Rule
from tpsgd_family.passes import check_number

EPSILON = 1e-5


class InputAndLabel(NetSignal):
    """The net's input and the label, for every hidden block."""

    about = "the net's input, and all blocks see the same batch"
    needs_output = False

    def __call__(self, learners: Sequence[Any], x: Any, labels: Tensor) -> Iterable[BlockSignal]:
        if labels.is_floating_point() or labels.dim() > 1 or not isinstance(x, Tensor):
            raise TpsgdError("hsic-bottleneck needs samples in one tensor, and a class for each")
        signal = x.flatten(1), F.one_hot(labels, learners[-1].outputs).to(x.dtype)
        for learner in learners[:-1]:
            saved = learner.forward(x)
            yield BlockSignal(saved, signal)
            x = learner.output(saved)
        yield BlockSignal(learners[-1].forward(x), labels)


def kernel(a: Tensor, sigma: float) -> Tensor:
    """The centred and normalised kernel of the samples of a batch, K~."""
    n, squares = len(a), a.square().sum(1)
    distances = (squares[:, None] + squares - 2 * a @ a.T).clamp(min=0)
    K = torch.exp(-distances / (2 * sigma**2 * a.shape[1]))
    centred = K - K.mean(1, keepdim=True)
    return torch.linalg.solve(centred + EPSILON * n * torch.eye(n).to(a), centred)


def hsic_bottleneck(beta: float = 500.0, sigma: float = 5.0) -> Rule:
    """Output that depends on the label and not on the input (Ma, Lewis & Kleijn 2020)."""

    check_number("beta", beta, zero=True)
    check_number("sigma", sigma)

    def loss(y: Tensor, s: tuple[Tensor, Tensor]) -> Tensor:
        own = kernel(y.flatten(1), sigma)
        of_input, of_label = ((own * kernel(part, sigma).T).sum() for part in s)
        return of_input - beta * of_label

    def objective(site: Site) -> Objective:
        return Objective(loss)

    about, options = "dependence on labels and input", f"beta {beta:g}, sigma {sigma:g}"
    signal = InputAndLabel()
    return Rule("hsic-bottleneck", objective, signal=signal, about=about, options=options)
