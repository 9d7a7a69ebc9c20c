"""Train neural networks without backpropagation: target-projection SGD and its relatives."""

from . import data, losses, projections, rules
from .blocks import split
from .check import check_rule
from .errors import TpsgdError
from .evaluation import evaluate
from .fitting import fit, fit_backprop
from .losses import bce, cross_entropy, mse
from .restarts import Restarts, fit_many
from .rules import Place, Rule
from .run import Epoch, Run
from .schedules import sequential, simultaneous
from .trainer import EarlyStopping

__version__ = "0.1.0"

__all__ = [
    "EarlyStopping",
    "Epoch",
    "Place",
    "Restarts",
    "Rule",
    "Run",
    "TpsgdError",
    "bce",
    "check_rule",
    "cross_entropy",
    "data",
    "evaluate",
    "fit",
    "fit_backprop",
    "fit_many",
    "losses",
    "mse",
    "projections",
    "rules",
    "sequential",
    "simultaneous",
    "split",
]
