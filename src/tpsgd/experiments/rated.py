"""SGD and Adam with a learning rate per stacked restart, so that a whole search is one training."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

BETAS, EPS = (0.9, 0.999), 1e-8


class Rated(Optimizer):
    """Restart r moves at `rates[r]`, times the group's `lr`, which a schedule may change.

    With one rate it is plain SGD, or Adam, as torch has them.
    """

    elementwise = True

    def __init__(self, params: Iterable[Tensor], rates: Sequence[float], adam: bool) -> None:
        params = list(params)
        lr = torch.ones((), device=params[0].device)
        super().__init__(params, {"lr": lr, "capturable": True})
        self.rates, self.adam = torch.tensor(rates, device=params[0].device), adam

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step of every restart."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    many = len(self.rates) > 1
                    rate = self.rates.view(-1, *[1] * (p.dim() - 1)) if many else self.rates
                    move = self._adam(p) if self.adam else p.grad
                    p.addcmul_(move, rate * group["lr"], value=-1)

    def _adam(self, p: Tensor) -> Tensor:
        state = self.state[p]
        if not state:
            state["m"], state["v"] = torch.zeros_like(p), torch.zeros_like(p)
            state["t"] = torch.zeros((), device=p.device)
        m, v, t = state["m"], state["v"], state["t"]
        t.add_(1)
        m.lerp_(p.grad, 1 - BETAS[0])  # type: ignore[arg-type]
        v.lerp_(p.grad.square(), 1 - BETAS[1])  # type: ignore[union-attr]
        root = (v / (1 - BETAS[1] ** t)).sqrt_().add_(EPS)
        return m / (1 - BETAS[0] ** t) / root
