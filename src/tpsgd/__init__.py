"""Train neural networks without backpropagation: target-projection SGD and its relatives."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import adapt, data, losses, projections, rules
    from .engine import augment
    from .engine.backprop import fit_backprop
    from .engine.check_rule import check_rule
    from .engine.evaluate import evaluate
    from .engine.fit import fit
    from .engine.optimizers import sgd, two_rates
    from .engine.record import Epoch, Run
    from .engine.restarts import Restarts, fit_many
    from .engine.schedules import sequential, simultaneous
    from .engine.trainer import EarlyStopping
    from .errors import TpsgdError
    from .losses import bce, cross_entropy, mse
    from .memory.plan import Plan, plan
    from .nets import inits
    from .nets.blocks import split
    from .nets.padded import Padded
    from .nets.recurrent import Recurrent, connect
    from .peers.dladmm import fit_dladmm
    from .peers.zorb import fit_zorb
    from .rules import Place, Rule
    from .solvers import ridge, rls
    from .zoo import resnet, vgg

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
    "augment": "engine",
    "inits": "nets",
    "resnet": "zoo",
    "vgg": "zoo",
    "split": "nets.blocks",
    "check_rule": "engine.check_rule",
    "TpsgdError": "errors",
    "evaluate": "engine.evaluate",
    "fit": "engine.fit",
    "fit_backprop": "engine.backprop",
    "bce": "losses",
    "cross_entropy": "losses",
    "mse": "losses",
    "sgd": "engine.optimizers",
    "two_rates": "engine.optimizers",
    "Padded": "nets.padded",
    "Plan": "memory.plan",
    "plan": "memory.plan",
    "Recurrent": "nets.recurrent",
    "connect": "nets.recurrent",
    "Restarts": "engine.restarts",
    "fit_many": "engine.restarts",
    "Place": "rules",
    "Rule": "rules",
    "Epoch": "engine.record",
    "Run": "engine.record",
    "ridge": "solvers",
    "rls": "solvers",
    "fit_dladmm": "peers.dladmm",
    "fit_zorb": "peers.zorb",
    "sequential": "engine.schedules",
    "simultaneous": "engine.schedules",
    "EarlyStopping": "engine.trainer",
}

if not TYPE_CHECKING:  # or a checker would believe in every name

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module 'tpsgd' has no attribute {name!r}")
        if name not in _HOMES:
            return import_module(f"tpsgd.{name}")
        home = _HOMES[name]
        if home in ("engine", "nets", "zoo"):
            return import_module(f"tpsgd.{home}.{name}")
        return getattr(import_module(f"tpsgd.{home}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
