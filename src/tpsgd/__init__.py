"""Train neural networks without backpropagation: target-projection SGD and its relatives."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import adapt, augment, data, inits, losses, projections, resnet, rules, vgg
    from .backprop import fit_backprop
    from .blocks import split
    from .check import check_rule
    from .errors import TpsgdError
    from .evaluation import evaluate
    from .fitting import fit
    from .losses import bce, cross_entropy, mse
    from .optimizers import sgd, two_rates
    from .padded import Padded
    from .planning import Plan, plan
    from .recurrent import Recurrent, connect
    from .restarts import Restarts, fit_many
    from .rules import Place, Rule
    from .run import Epoch, Run
    from .schedules import sequential, simultaneous
    from .solvers import ridge, rls
    from .solvers.dladmm import fit_dladmm
    from .solvers.zorb import fit_zorb
    from .trainer import EarlyStopping

__version__ = "0.1.0"

__all__ = [
    "EarlyStopping",
    "Epoch",
    "Padded",
    "Place",
    "Plan",
    "Recurrent",
    "Restarts",
    "Rule",
    "Run",
    "TpsgdError",
    "adapt",
    "augment",
    "bce",
    "check_rule",
    "connect",
    "cross_entropy",
    "data",
    "evaluate",
    "fit",
    "fit_backprop",
    "fit_dladmm",
    "fit_many",
    "fit_zorb",
    "inits",
    "losses",
    "mse",
    "plan",
    "projections",
    "resnet",
    "ridge",
    "rls",
    "rules",
    "sequential",
    "sgd",
    "simultaneous",
    "split",
    "two_rates",
    "vgg",
]

# A name is loaded, and torch with it, when it is first used: `tpsgd --help` need not wait.
_HOMES = {
    "split": "blocks",
    "check_rule": "check",
    "TpsgdError": "errors",
    "evaluate": "evaluation",
    "fit": "fitting",
    "fit_backprop": "backprop",
    "bce": "losses",
    "cross_entropy": "losses",
    "mse": "losses",
    "sgd": "optimizers",
    "two_rates": "optimizers",
    "Padded": "padded",
    "Plan": "planning",
    "plan": "planning",
    "Recurrent": "recurrent",
    "connect": "recurrent",
    "Restarts": "restarts",
    "fit_many": "restarts",
    "Place": "rules",
    "Rule": "rules",
    "Epoch": "run",
    "Run": "run",
    "ridge": "solvers",
    "rls": "solvers",
    "fit_dladmm": "solvers.dladmm",
    "fit_zorb": "solvers.zorb",
    "sequential": "schedules",
    "simultaneous": "schedules",
    "EarlyStopping": "trainer",
}

if not TYPE_CHECKING:  # or a checker would believe in every name

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module 'tpsgd' has no attribute {name!r}")
        if name not in _HOMES:
            return import_module(f"tpsgd.{name}")
        return getattr(import_module(f"tpsgd.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
