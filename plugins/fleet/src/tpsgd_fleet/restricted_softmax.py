"""Restricted softmax: a client's cross-entropy compares the classes that the client has.

A client with few classes would lower the logits of all others in every step, and nothing on the
client raises them again. Here absent classes are left out of the softmax, so their logits have no
gradient. FedRS (Li & Zhan 2021, "FedRS: Federated learning with restricted softmax for label
distribution non-IID data") scales them down instead.
"""

import math
from typing import Any

import torch
from torch import Tensor

from tpsgd.common.errors import TpsgdError
from tpsgd.losses import Loss, cross_entropy, resolve


def restricted_to(y: Tensor, classes: int) -> Loss:
    """Cross-entropy over the classes that these labels have.

    Examples:
        >>> loss = restricted_to(torch.tensor([0, 2]), 3)
        >>> loss.grad(torch.zeros(1, 3), torch.tensor([2]))
        tensor([[ 0.5000,  0.0000, -0.5000]])
    """
    absent = torch.bincount(y.flatten(), minlength=classes) == 0

    def masked(logits: Tensor) -> Tensor:
        return logits.masked_fill(absent.to(logits.device), -math.inf)

    return Loss(
        "restricted cross_entropy",
        lambda logits: cross_entropy.link(masked(logits)),
        lambda logits, labels: cross_entropy.value(masked(logits), labels),
    )


def restricted_loss(loss: Loss | None, data: Any, classes: int) -> Loss:
    """The restricted loss of a client's data; other losses and labels are refused."""
    loss = resolve(loss)
    if loss not in (None, cross_entropy):
        raise TpsgdError(f"restricted_softmax=True needs loss=tpsgd.cross_entropy, got {loss.name}")
    if not isinstance(data, tuple) or data[1].is_floating_point():
        raise TpsgdError("restricted_softmax=True needs data (x, y) with a class for each sample")
    return restricted_to(data[1], classes)
