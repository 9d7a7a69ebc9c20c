"""Measures of a block's features: a linear probe, the effective rank, similarity to another net.

Each function of a `Moment` has a plain function of matrices behind it, with a row for each sample.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tpsgd import TpsgdError
from tpsgd_probes.probes import Moment, block_outputs

Measure = Callable[[Moment], float | None]


def linear_probe(ridge: float = 1e-2) -> Measure:
    """The accuracy of a linear classifier of the block's features (Alain & Bengio 2016).

    It is solved by least squares on one half of the batch, and tested on the other.
    """

    def linear_probe(moment: Moment) -> float:
        x, y = moment.features, moment.y
        one, other = halves(len(y))
        return probe_accuracy(x[one], y[one], x[other], y[other], ridge)

    return linear_probe


def halves(samples: int) -> tuple[Tensor, Tensor]:
    """The indices of both halves of a batch, always shuffled in the same way."""
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(0))
    return order[: samples // 2], order[samples // 2 :]


def probe_accuracy(
    x: Tensor, y: Tensor, x_test: Tensor, y_test: Tensor, ridge: float = 1e-2
) -> float:
    """The accuracy of ridge regression onto the classes, features centred; `ridge` is relative.

    It is added to the diagonal of the covariance, as a share of the mean variance of a feature.
    """
    x, x_test = x.detach().double(), x_test.detach().double()
    mean = x.mean(0)
    a, b = x - mean, x_test - mean
    targets = F.one_hot(y, int(max(y.max(), y_test.max())) + 1).double()
    offset = targets.mean(0)
    kernel = a @ a.T  # samples x samples: a batch is small, features may be many
    kernel.diagonal().add_(ridge * a.square().sum() / a.shape[1] + 1e-12)
    scores = b @ (a.T @ torch.linalg.solve(kernel, targets - offset)) + offset
    return float((scores.argmax(1) == y_test).double().mean())


def effective_rank() -> Measure:
    """How many directions the block's features fill (Roy & Vetterli 2007): `rank_of`."""

    def effective_rank(moment: Moment) -> float:
        return rank_of(moment.features)

    return effective_rank


def rank_of(x: Tensor) -> float:
    """The exponential of the entropy of the singular values of centred features.

    Examples:
        >>> round(rank_of(torch.cat([torch.eye(4), -torch.eye(4)])), 6)
        4.0
    """
    x = x.detach().double()
    values = torch.linalg.svdvals(x - x.mean(0))
    if not values.sum() > 0:
        return 0.0
    shares = values / values.sum()
    return float(torch.special.entr(shares).sum().exp())


def cka(reference: nn.Module) -> Measure:
    """How alike the features are to those of the same block of another, trained model: 0 to 1.

    The reference is trained by backprop, or is another restart. Both are cut into the same blocks.
    """

    def cka(moment: Moment) -> float:
        training = reference.training
        with torch.no_grad():
            others = block_outputs(reference.eval().to(moment.x.device), moment.x)
        reference.train(training)
        if len(others) != len(moment.outputs):
            counts = f"{len(others)} blocks, the model {len(moment.outputs)}"
            raise TpsgdError(f"cka compares block by block, and the reference has {counts}")
        return linear_cka(moment.features, others[moment.block].flatten(1))

    return cka


def linear_cka(x: Tensor, y: Tensor) -> float:
    """Centred kernel alignment with linear kernels (Kornblith et al. 2019).

    It does not change with rotations and the overall scale of either matrix.

    Examples:
        >>> x = torch.eye(4)
        >>> round(linear_cka(x, 3 * x.flip(1)), 6)
        1.0
    """
    a, b = (z - z.mean(0) for z in (x.detach().double(), y.detach().double()))
    of_x, of_y = a @ a.T, b @ b.T
    norms = of_x.norm() * of_y.norm()
    return float((of_x * of_y).sum() / norms) if norms > 0 else 0.0
