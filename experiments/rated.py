"""SGD and Adam with a learning rate per stacked restart, so that a whole search is one training."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

BETAS, EPS = (0.9, 0.999), 1e-8


@dataclass(frozen=True)
class Rates:
    """Restart r moves at `rates[r]`, W_X and b_X at `ratios[r]` times as much."""

    rates: tuple[float, ...]
    ratios: tuple[float, ...]
    adam: bool
    by_name = True
    elementwise = True

    @property
    def __name__(self) -> str:
        alike = len(set(zip(self.rates, self.ratios, strict=True))) == 1
        shown = f"{self.rates[0]:g}, ratio {self.ratios[0]:g}" if alike else "a rate per restart"
        return f"{'Adam' if self.adam else 'SGD'} ({shown})"

    def __call__(self, params: Mapping[str, Tensor]) -> Optimizer:
        """An optimizer over parameters by name; torch's fused Adam where one rate is enough."""
        first = next(iter(params.values()))
        if self.adam and len(set(self.rates)) == 1 and set(self.ratios) == {1.0}:
            rate = torch.tensor(self.rates[0], device=first.device)
            lr = rate if first.is_cuda else self.rates[0]
            return torch.optim.Adam(params.values(), lr=lr, fused=True, capturable=first.is_cuda)
        of_input = [n for n in params if n.endswith(("weight_x", "bias_x"))]
        rates = torch.tensor(self.rates, device=first.device)
        ratios = torch.tensor(self.ratios, device=first.device)
        groups = [
            {"params": [params[n] for n in of_input], "rates": rates * ratios},
            {"params": [p for n, p in params.items() if n not in of_input], "rates": rates},
        ]
        return Rated([g for g in groups if g["params"]], self.adam)


class Rated(Optimizer):
    """A group's `rates`, one per restart, times its `lr`, which a schedule may change."""

    def __init__(self, groups: Sequence[dict[str, Any]], adam: bool) -> None:
        device = groups[0]["params"][0].device
        super().__init__(groups, {"lr": torch.ones((), device=device), "capturable": True})
        self.adam = adam

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step of every restart."""
        for group in self.param_groups:
            rates = group["rates"] * group["lr"]
            for p in group["params"]:
                if p.grad is not None:
                    many = len(rates) > 1
                    rate = rates.view(-1, *[1] * (p.dim() - 1)) if many else rates
                    p.addcmul_(self._adam(p) if self.adam else p.grad, rate, value=-1)

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
