"""FedProx on the client: a pull of every weight towards the one that the server sent.

    loss + mu / 2 ||w - w_server||^2        (Li et al. 2020, "Federated optimization in
                                             heterogeneous networks")

The term's gradient, mu (w - w_server), is added to the local gradient before each step of the
optimizer, so every rule, and backprop, learns with it. A block keeps a copy of its weights for it.
"""

from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

from tpsgd.engine.optimizers import adam
from tpsgd.solvers import SOLVERS


class Proximal:
    """A factory of optimizers that stay near the weights with which they are made."""

    def __init__(self, factory: Any, mu: float) -> None:
        self.factory, self.mu = factory, mu
        self.by_name = getattr(factory, "by_name", False)

    @property
    def __name__(self) -> str:
        name = getattr(self.factory, "__name__", type(self.factory).__name__)
        return f"{name}, proximal {self.mu:g}"

    def __call__(self, params: Any) -> Optimizer:
        """The factory's optimizer, with a hook that adds the gradient of the proximal term."""
        optimizer = self.factory(params)
        weights = [p for group in optimizer.param_groups for p in group["params"]]
        from_server = [p.detach().clone() for p in weights]

        def pull(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            for p, start in zip(weights, from_server, strict=True):
                if p.grad is not None:
                    p.grad.add_(p.detach() - start, alpha=self.mu)

        optimizer.register_step_pre_hook(pull)
        return optimizer


def near_the_server(optimizer: Any, mu: float) -> Any:
    """The optimizers of a client, one or a list, with the proximal term; solvers have none."""
    if isinstance(optimizer, Sequence):
        return [near_the_server(each, mu) for each in optimizer]
    if isinstance(optimizer, SOLVERS):
        return optimizer
    return Proximal(adam if optimizer is None else optimizer, mu)
