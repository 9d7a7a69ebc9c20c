"""`Arm`: one way to train, as a value that `compare` can train next to others."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from inspect import Parameter, signature
from typing import Any

import torch
from torch import nn

from tpsgd.common.errors import TpsgdError, is_users, reason, user_line
from tpsgd.engine.learners.backprop import Backprop
from tpsgd.engine.learners.optimizers import OptimizerFactory, describe_optimizer
from tpsgd.engine.lengths import with_lengths
from tpsgd.engine.record import Run
from tpsgd.engine.restarts import Restarts, fit_many, make_model
from tpsgd.engine.settings import Memory, Order, Settings, listed, name_of
from tpsgd.rules import Rule, resolve

BACKPROP = "backprop"  # the name of the arm with which the others are compared
ALWAYS = ("epochs", "batch_size", "seed")  # settings that every method is called with


@dataclass(frozen=True)
class Arm:
    """A rule with its order, or a `method`; backpropagation if it has neither.

    Args:
        name: unique in a comparison; the arm "backprop" is the one that others are compared with.
        rule: as for `fit`.
        order: as for `fit`.
        optimizer: as for `fit`, instead of the one that all arms share (and its learning rate).
        factory: makes the models, instead of the factory that all arms share.
        epochs: as for `fit`, instead of the number that all arms share.
        remark: what the arm does, instead of the rule's description.
        lr: as for `fit`, instead of the learning rate that all arms share.
        method: a function `(model, data, **settings)` that trains the model in place and returns a
            `Run` or nothing; its time is measured from outside. It is called with the settings of
            `fit` that are set, `epochs`, `batch_size` and `seed` always, as far as it takes them.
        checkpointed: as `segments` of `fit_backprop`: a number, or one per block.
        micro_batch: as in `tpsgd.Memory`, if the arms do not share one.
        of_classes: its method needs one class for each sample.
        batch_size: as for `fit`, instead of the one that all arms share.
    """

    name: str
    rule: Rule | None  # or a word of `rules.ALL`; None is backprop, or `method`
    order: Order | None = None
    optimizer: OptimizerFactory | Sequence[Any] | None = None
    factory: Callable[[], nn.Module] | None = None
    epochs: int | None = None
    remark: str = ""
    method: Callable[..., Run | None] | None = None
    lr: float | None = None
    checkpointed: int | bool = False
    micro_batch: int | None = None
    of_classes: bool = False
    batch_size: int | None = None

    def __post_init__(self) -> None:
        if self.rule is not None:
            object.__setattr__(self, "rule", resolve(self.rule))

    @property
    def backprop(self) -> bool:
        """Whether it is trained by backpropagation."""
        return self.rule is None and self.method is None

    @property
    def reference(self) -> bool:
        """Whether the other arms are compared with it; an arm may be backprop on another model."""
        return self.backprop and self.name == BACKPROP and self.factory is None

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
        batches = {} if self.batch_size is None else {"batch_size": self.batch_size}
        return batches | {
            "rule": rule and str(rule),
            "order": getattr(self.order, "__name__", None),
            "optimizer": optimizers and [_optimizer(factory) for factory in optimizers],
            "lr": self.lr,
            "epochs": self.epochs,
            "method": self.method and name_of(self.method),
            "checkpointed": self.checkpointed,
            "micro_batch": self.micro_batch,
            "model": self.factory and str(make_model(self.factory, 0)).splitlines(),
        }

    def train(self, factory: Callable[[], nn.Module], data: Any, **settings: Any) -> Restarts:
        """Train one model by `fit_many`; the arm's settings replace those of `fit`."""
        settings["order"] = self.order
        if self.optimizer is not None:
            settings |= {"optimizer": self.optimizer, "lr": None}
        of_arm = {"epochs": self.epochs, "lr": self.lr, "batch_size": self.batch_size}
        settings |= {name: value for name, value in of_arm.items() if value is not None}
        memory = Memory.of(settings.get("memory"))
        if not self.budgeted:
            memory = replace(memory, budget=None)
        if memory.micro_batch is None:
            memory = replace(memory, micro_batch=self.micro_batch)
        if "memory" in settings or self.micro_batch is not None:
            settings["memory"] = memory
        make = self.factory or factory
        if self.method is None:
            backprop = self.backprop and Backprop(self.checkpointed)
            trained = fit_many(
                make, data, restarts=1, rule=self.rule, backprop=backprop, **settings
            )
            return replace(trained, models=[run.predictor for run in trained.runs])
        model = make_model(make, settings.get("seed", 0))
        return Restarts([model], [self._by_method(self.method, model, data, settings)], False)

    @contextmanager
    def in_a_sentence(self) -> Iterator[None]:
        """Let errors of a user's code be one sentence with its file and line; others stay."""
        try:
            yield
        except (TpsgdError, RuntimeError, MemoryError, OSError, Warning):
            raise
        except Exception as error:
            place = user_line(error) or defined_at(self.rule)
            if not place:  # a mistake of tpsgd's, whose traceback says more
                raise
            raise TpsgdError(reason(error, place)) from error

    def _by_method(
        self, method: Callable[..., Run | None], model: nn.Module, data: Any, settings: Any
    ) -> Run:
        """Train by a method, and measure its time."""
        common = with_lengths(Settings.of(self.name, settings), data)
        parameters = signature(method).parameters
        takes_all = any(p.kind is Parameter.VAR_KEYWORD for p in parameters.values())
        fixed = getattr(method, "keywords", {})  # by functools.partial
        settings = settings | {name: getattr(common, name) for name in ALWAYS}
        settings = {
            name: value
            for name, value in settings.items()
            if value is not None and name not in fixed and (takes_all or name in parameters)
        }
        began = time.perf_counter()
        try:
            run = method(model, data, **settings)
        except TpsgdError:
            raise
        except Exception as error:  # whatever a user's function may raise
            raise TpsgdError(reason(error)) from error
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        run = Run(self.name, common.seed, {}) if run is None else run
        if not isinstance(run, Run):
            raise TpsgdError(
                f"the method of the arm {self.name} must return a tpsgd.Run or None, got a "
                f"{type(run).__name__}"
            )
        run.seconds = seconds - run.setup_seconds
        return run


def defined_at(rule: Rule | None) -> str:
    """Where the functions of a user's rule begin: `rule.py, line 7`; "" of other rules."""
    for part in (rule.objective, rule.predictor, rule.last, rule.signal) if rule else ():
        code = getattr(part, "__code__", None) or getattr(type(part).__call__, "__code__", None)
        if code is not None and is_users(str(getattr(part, "__module__", "tpsgd"))):
            return f"{code.co_filename}, line {code.co_firstlineno}"
    return ""


def _optimizer(factory: Any) -> str:
    """An optimizer with its numbers; by its name if it cannot do with a single parameter."""
    try:
        return describe_optimizer(factory, {"weight": nn.Parameter(torch.zeros(1))})
    except Exception:  # a factory of the user's, which training will call again
        return str(name_of(factory))
