"""What a stream must have in common with the one whose state it goes on from."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from tpsgd.engine.optimizers import make_optimizer
from tpsgd.engine.settings import Settings, listed
from tpsgd.errors import TpsgdError
from tpsgd.solvers import SOLVERS
from tpsgd.training.run_identity import difference


def stream_identity(models: Sequence[nn.Module], rule: Any, settings: Settings) -> dict[str, Any]:
    """Rule, optimizers, seed and the shapes of the weights, by name; a learning rate may change."""
    tensors = [(name, t) for model in models for name, t in model.state_dict().items()]
    return {
        "rule": [getattr(r, "name", str(r)) for r in listed(rule)],
        "options": [str(r) for r in listed(rule)],
        "optimizer": [_optimizer(factory) for factory in listed(settings.optimizer)],
        "seed": settings.seed,
        "model": [f"{name} of shape {tuple(t.shape)}" for name, t in tensors],
    }


def _optimizer(factory: Any) -> str:
    """The name of a solver, or of the optimizer that a factory makes."""
    if isinstance(factory, SOLVERS):
        return type(factory).__qualname__
    if factory is None:
        return "none"
    return type(make_optimizer(factory, {"weight": torch.zeros(1)}, None)).__name__


def check_same_stream(before: Any, now: dict[str, Any]) -> None:
    """Refuse the state of a stream with another model, rule, optimizer or seed."""
    if not isinstance(before, dict):
        raise TpsgdError("this is no state of a stream: pass what state_dict() returned")
    if problem := difference(before, now):
        raise TpsgdError(
            f"the state is of another stream: {problem}; go on with a stream like that one"
        )
