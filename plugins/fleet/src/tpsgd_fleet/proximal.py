"""FedProx on the client: a pull of every weight towards the one that the server sent.

    loss + mu / 2 ||w - w_server||^2        (Li et al. 2020, "Federated optimization in
                                             heterogeneous networks")

The term's gradient, mu (w - w_server), is added to the gradients before each step of the optimizer,
whatever the rule. It needs a copy of the weights.
"""

from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

from tpsgd.engine.learners.optimizers import adam
from tpsgd.engine.solvers import SOLVERS


def near_the_server(factory: Any, mu: float) -> Any:
    """Optimizers (a factory, or a list of them) with the proximal term; solvers have none."""
    if isinstance(factory, Sequence):
        return [near_the_server(each, mu) for each in factory]
    if isinstance(factory, SOLVERS):
        return factory
    factory = adam if factory is None else factory

    def proximal(params: Any) -> Optimizer:
        optimizer = factory(params)
        weights = [p for group in optimizer.param_groups for p in group["params"]]
        from_server = [p.detach().clone() for p in weights]

        def pull(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            for p, start in zip(weights, from_server, strict=True):
                if p.grad is not None:
                    p.grad.add_(p.detach() - start, alpha=mu)

        optimizer.register_step_pre_hook(pull)
        return optimizer

    name = getattr(factory, "__name__", type(factory).__name__)
    proximal.__name__ = f"{name}, proximal {mu:g}"
    proximal.by_name = getattr(factory, "by_name", False)  # type: ignore[attr-defined]
    return proximal
