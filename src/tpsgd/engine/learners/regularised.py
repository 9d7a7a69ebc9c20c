"""Weight decay on matrices, and gradients of limited norm, around any optimizer."""

from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from tpsgd.common.errors import TpsgdError


@dataclass(frozen=True)
class Regularised:
    """A factory's optimizer, whose matrices decay, or which limits the norm of its gradients.

    Biases, scales and shifts do not decay. Adam's decay, and NAdam's and RAdam's, is that of AdamW:
    no part of the gradient (Loshchilov & Hutter, "Decoupled weight decay regularization", 2019).
    The norm is that of all gradients of a block, its local classifier's included; under backprop,
    of the net.
    """

    factory: Any
    weight_decay: float = 0.0
    clip: float | None = None

    @property
    def by_name(self) -> bool:
        """Whether the factory gets the parameters in a dictionary."""
        return getattr(self.factory, "by_name", False)

    @property
    def sets_rates(self) -> bool:
        """Whether the factory refuses another learning rate."""
        return getattr(self.factory, "sets_rates", False)

    def __call__(self, params: Any) -> Any:
        optimizer = self.factory(params)
        if not isinstance(optimizer, Optimizer):  # which the caller refuses
            return optimizer
        if self.weight_decay:
            _decay(optimizer, self.weight_decay)
        if self.clip is not None:
            optimizer.register_step_pre_hook(_Limit(self.clip))
        return optimizer


@dataclass(frozen=True)
class _Limit:
    """A hook before each step: gradients of a larger norm are scaled to this one."""

    norm: float

    def __call__(self, optimizer: Optimizer, *_: Any) -> None:
        params = [p for group in optimizer.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(params, self.norm)


def _decay(optimizer: Optimizer, weight_decay: float) -> None:
    """Split the optimizer's groups: matrices, which decay, and vectors, which do not."""
    if "weight_decay" not in optimizer.defaults:
        raise TpsgdError(f"{type(optimizer).__name__} has no weight decay: leave weight_decay out")
    groups = []
    for group in optimizer.param_groups:
        if "decoupled_weight_decay" in group:
            group["decoupled_weight_decay"] = True
        vectors = [p for p in group["params"] if p.dim() < 2]
        matrices = [p for p in group["params"] if p.dim() >= 2]
        groups += [{**group, "params": matrices, "weight_decay": weight_decay}] if matrices else []
        groups += [{**group, "params": vectors, "weight_decay": 0.0}] if vectors else []
    optimizer.param_groups[:] = groups
