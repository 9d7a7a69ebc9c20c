"""`Arm`: one way to train, as a value that `compare` can train next to others."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from tpsgd.engine.optimizers import OptimizerFactory
from tpsgd.engine.record import Run
from tpsgd.engine.settings import Memory, Schedule, listed
from tpsgd.rules import Rule
from tpsgd.training.restarts import Restarts, fit_many, make_model
from tpsgd.training.run_identity import describe_optimizer

METHOD_SETTINGS = ("seed", "device", "progress", "validation", "callbacks")


@dataclass(frozen=True)
class Arm:
    """A rule with its schedule, or a `method`; backpropagation if it has neither.

    Args:
        name: unique in a comparison.
        rule: as for `fit`.
        schedule: as for `fit`.
        optimizer: as for `fit`, instead of the one that all arms share (and its learning rate).
        factory: makes the models, instead of the factory that all arms share.
        epochs: as for `fit`, instead of the number that all arms share.
        remark: what the arm does, instead of the rule's description.
        lr: as for `fit`, instead of the learning rate that all arms share.
        method: a function such as `tpsgd.peers.fit_zorb`, without epochs, batches or rates.
    """

    name: str
    rule: Rule | None
    schedule: Schedule | None = None
    optimizer: OptimizerFactory | Sequence[Any] | None = None
    factory: Callable[[], nn.Module] | None = None
    epochs: int | None = None
    remark: str = ""
    method: Callable[..., Run] | None = None
    lr: float | None = None

    @property
    def backprop(self) -> bool:
        """Whether this is backpropagation, with which the other arms are compared."""
        return self.rule is None and self.method is None

    @property
    def control(self) -> bool:
        """Whether hidden blocks are not trained."""
        return self.rule is not None and self.rule.objective is None

    @property
    def budgeted(self) -> bool:
        """Whether `fit` trains it, so that it can keep within a memory budget."""
        return self.rule is not None

    @property
    def about(self) -> str:
        """What the arm does, in a few words."""
        if self.remark or self.method:
            return self.remark or "not a rule: a training method for the whole net"
        return self.rule.about if self.rule else "gradients go through the whole net"

    def describe(self) -> dict[str, Any]:
        """What makes it another arm than one of the same name, as plain values.

        Functions go by their names, optimizers by the numbers that they begin with.
        """
        rule, optimizers = self.rule, None if self.optimizer is None else listed(self.optimizer)
        return {
            "rule": rule and f"{rule.name}, {rule.options}, {rule.at.value}, {rule.loss.name}",
            "schedule": getattr(self.schedule, "__name__", None),
            "optimizer": optimizers and [_optimizer(factory) for factory in optimizers],
            "lr": self.lr,
            "epochs": self.epochs,
            "method": getattr(self.method, "__name__", self.method and str(self.method)),
            "model": self.factory and str(make_model(self.factory, 0)).splitlines(),
        }

    def train(self, factory: Callable[[], nn.Module], data: Any, **settings: Any) -> Restarts:
        """Train one model by `fit_many`; the arm's settings replace those of `fit`."""
        settings["schedule"] = self.schedule
        if self.epochs is not None:
            settings["epochs"] = self.epochs
        if self.lr is not None:
            settings["lr"] = self.lr
        if self.optimizer is not None:
            settings |= {"optimizer": self.optimizer, "lr": None}
        if not self.budgeted and "memory" in settings:
            settings["memory"] = replace(Memory.of(settings["memory"]), budget=None)
        make = self.factory or factory
        if self.method is None:
            return fit_many(
                make, data, restarts=1, rule=self.rule, backprop=self.backprop, **settings
            )
        model = make_model(make, settings.get("seed", 0))
        shared = {name: settings[name] for name in METHOD_SETTINGS if name in settings}
        return Restarts([model], [self.method(model, data, **shared)], False)


def _optimizer(factory: Any) -> str:
    """An optimizer with its numbers; by its name if it cannot do with a single parameter."""
    try:
        return describe_optimizer(factory, {"weight": nn.Parameter(torch.zeros(1))})
    except Exception:  # a factory of the user's, which training will call again
        return str(getattr(factory, "__name__", factory))
