"""A trial: an arm with values that are tried, trained and measured on held-out training samples."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import torch
from torch import nn

from tpsgd.comparison.finished_trials import FinishedTrials
from tpsgd.data import Data
from tpsgd.data.split import hold_out
from tpsgd.engine.optimizers import sgd
from tpsgd.errors import TpsgdError, shortened
from tpsgd.training.arm import Arm
from tpsgd.training.evaluate import evaluate

FAILURES = (TpsgdError, RuntimeError, MemoryError)  # of an arm: a GPU without memory left, say
RATES = (0.0003, 0.001, 0.003, 0.01, 0.03)  # of Adam
SGD_RATES = (0.01, 0.03, 0.1, 0.3, 1.0)
Values = dict[str, Any]


@dataclass
class Trial:
    """One setting of one arm: its accuracies on the held-out samples, one per restart."""

    arm: str
    values: Values
    accuracies: list[float] = field(default_factory=list)
    seconds: float = 0.0  # of training, over all restarts
    error: str | None = None

    @property
    def accuracy(self) -> float | None:
        """The mean accuracy; None if training failed."""
        return fmean(self.accuracies) if self.accuracies and self.error is None else None

    def __str__(self) -> str:
        return ", ".join(f"{name} {value:g}" for name, value in self.values.items())


def try_values(
    arm: Arm,
    values: Values,
    samples: tuple[Any, Any],
    factory: Callable[..., nn.Module],
    restarts: int,
    settings: Mapping[str, Any],
    finished: FinishedTrials,
) -> Trial:
    """Train an arm that has these values, and measure it on the held-out samples."""
    trial, (train, held) = Trial(arm.name, values), samples
    for r in range(restarts):
        seed = settings.get("seed", 0) + r
        key = {"rule": arm.name, "values": values, "seed": seed}
        if (result := finished.get(key)) is None:
            once = {**settings, "seed": seed, **finished.settings(key)}
            try:
                trained = arm.train(factory, train, **once)
                result = evaluate(trained.models[0], held), trained.runs[0].seconds
            except FAILURES as error:
                trial.error = reason(error)
                return trial
            finished.keep(key, *result)
        trial.accuracies.append(result[0])
        trial.seconds += result[1]
    return trial


def reason(error: Exception) -> str:
    """Why an arm has failed, in a line."""
    if isinstance(error, TpsgdError):
        return str(error)
    return shortened(f"{type(error).__name__}: {error}", 200)


def best(trials: Sequence[Trial]) -> Trial:
    """The trial of an arm with the highest accuracy, the first one of several."""
    finished = [trial for trial in trials if trial.accuracy is not None]
    if not finished:
        raise TpsgdError(f"{trials[0].arm} failed with every setting: {trials[0].error}")
    return max(finished, key=lambda trial: trial.accuracy or 0.0)


def rates_of(optimizer: Any) -> Sequence[float]:
    """The learning rates to try with an optimizer."""
    return SGD_RATES if optimizer is sgd else RATES


def split_training(data: Data, size: float, seed: int) -> tuple[Any, Any]:
    """Training samples to train on, and those that are held out; classes keep their shares."""
    x, y = data.train
    if y.is_floating_point():
        raise TpsgdError("a search needs one class per sample, as class indices")
    if not 0 < size < (len(y) if isinstance(size, int) else 1):
        raise TpsgdError(f"held_out must be a share between 0 and 1, or a number, got {size!r}")
    mask = torch.from_numpy(hold_out(y.numpy(), size, seed, data.name))
    rows = [torch.nonzero(m).flatten() for m in (mask, ~mask)]
    return (x[rows[0]], y[rows[0]]), (x[rows[1]], y[rows[1]])
