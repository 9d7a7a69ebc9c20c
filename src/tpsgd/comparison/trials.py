"""The engine of every search: trials, trained and measured on held-out training samples.

`tpsgd.search` tries values for arms, `tpsgd.adapt.search` layers on taps, and `lr="search"` in a
comparison learning rates, by successive halving: all rates are tried for few epochs, the best of
them for more. A finished trial is in a file and is not repeated. The test set has no part in any.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from tpsgd.common.errors import TpsgdError
from tpsgd.comparison.finished_runs import FinishedRuns, Key, Values
from tpsgd.comparison.scores import score, target_of
from tpsgd.data import Data
from tpsgd.data.split import hold_out
from tpsgd.engine.arm import Arm
from tpsgd.engine.learners.optimizers import sgd
from tpsgd.engine.record import of_run
from tpsgd.engine.settings import listed

RATES = (0.0003, 0.001, 0.003, 0.01, 0.03)  # of Adam
SGD_RATES = (0.01, 0.03, 0.1, 0.3, 1.0)
SEARCH = "search"
# How many rates are tried, and for which share of the epochs. Half of the epochs in the last round
# favoured rates that are too large for all of them: tpsgd-l2 on digits lost a point.
ROUNDS = ((5, 1 / 5), (2, 1))
Progress = Callable[[str, float, float], None]


@dataclass(kw_only=True)
class TrialResult:
    """Accuracies on the held-out samples, one per restart, and the cost of a training run.

    Where labels are numbers, R² is in place of accuracies.
    """

    accuracies: list[float] = field(default_factory=list)
    seconds: float = 0.0  # the mean over restarts
    peak_bytes: int = 0  # the largest of all restarts
    error: str | None = None

    @property
    def accuracy(self) -> float | None:
        """The mean over restarts; None if it was not trained, or if training failed."""
        return fmean(self.accuracies) if self.accuracies and self.error is None else None

    @property
    def std(self) -> float:
        """The standard deviation of the accuracy over restarts."""
        return stdev(self.accuracies) if len(self.accuracies) > 1 else 0.0


T = TypeVar("T", bound=TrialResult)


@dataclass
class Trial(TrialResult):
    """An arm with values such as its rate, and what they led to."""

    arm: str
    values: Values

    def __str__(self) -> str:
        return ", ".join(f"{name} {in_short(value)}" for name, value in self.values.items())


def in_short(value: Any) -> str:
    """A value that is tried, in a table: numbers with few digits."""
    return f"{value:g}" if isinstance(value, int | float) else str(value)


@dataclass(frozen=True)
class Task(Generic[T]):
    """How a trial is trained: `train(seed, settings)` gives accuracy, seconds and peak_bytes."""

    trial: T
    label: str
    key: Key
    seeds: range
    train: Callable[[int, Values], Values]


def run_trials(
    tasks: Sequence[Task[Any]], finished: FinishedRuns, progress: Progress | None = None
) -> None:
    """Train all trials with all their seeds; if one fails, it has its error and the others go on.

    `progress` is called with (the label of a trial, training runs done, all training runs).
    """
    done, total = 0, sum(len(task.seeds) for task in tasks)
    for task in tasks:

        def report(runs: int, label: str = task.label, before: int = done) -> None:
            if progress is not None:
                progress(label, before + runs, total)

        report(0)
        runs, error = finished.train_missing(task.key, task.seeds, task.train, report)
        trial = task.trial
        trial.error, trial.accuracies = error, [run["accuracy"] for run in runs]
        if runs:
            trial.seconds = fmean(run["seconds"] for run in runs)
            trial.peak_bytes = max(run.get("peak_bytes", 0) for run in runs)
        done += len(task.seeds)


def task_of_arm(
    arm: Arm,
    values: Values,
    samples: tuple[Any, Any],
    factory: Callable[..., nn.Module],
    restarts: int,
    settings: Mapping[str, Any],
) -> Task[Trial]:
    """The trial of an arm that has these values, on samples to train on and held-out ones."""
    train, held_out = samples
    target = target_of(train[1], settings.get("loss"))
    name = " ".join([arm.name, *(f"{k} {v}" for k, v in values.items())])

    def measure(seed: int, checkpoint: Values) -> Values:
        with arm.in_a_sentence():
            trained = arm.train(factory, train, **(of_run(settings, name, seed) | checkpoint))
            accuracy, run = score(trained.models[0], held_out, target), trained.runs[0]
        return {"accuracy": accuracy, "seconds": run.seconds, "peak_bytes": run.peak_bytes}

    key, seed = {"rule": arm.name, "values": values}, settings.get("seed", 0)
    return Task(Trial(arm.name, values), arm.name, key, range(seed, seed + restarts), measure)


def best(trials: Iterable[T]) -> T | None:
    """The most accurate trial, the first of equal ones; None if none has finished."""
    finished = [trial for trial in trials if trial.accuracy is not None]
    return max(finished, key=lambda trial: trial.accuracy or 0.0, default=None)


def best_of_arm(trials: Sequence[Trial]) -> Trial:
    """The most accurate trial of an arm; an error if all have failed."""
    if (trial := best(trials)) is None:
        raise TpsgdError(f"{trials[0].arm} failed with every setting: {trials[0].error}")
    return trial


def rates_of(optimizer: Any) -> Sequence[float]:
    """The learning rates to try with an optimizer."""
    return SGD_RATES if optimizer is sgd else RATES


def split_rows(y: Tensor, size: float, seed: int, name: str = "the data") -> tuple[Tensor, Tensor]:
    """The indices of samples to train on, and of those that are held out; classes keep shares."""
    if not 0 < size < (len(y) if isinstance(size, int) else 1):
        raise TpsgdError(f"held_out must be a share between 0 and 1, or a number, got {size!r}")
    train = torch.from_numpy(hold_out(y.cpu().numpy(), size, seed, name)).to(y.device)
    return train.nonzero().flatten(), (~train).nonzero().flatten()


def split_training(data: Data, size: float, seed: int) -> tuple[Any, Any]:
    """Training samples to train on, and those that are held out.

    Classes keep their shares, if a sample has one; otherwise all samples are alike.
    """
    x, y = data.train
    one_class = not y.is_floating_point() and y.numel() == len(y)
    like = y.flatten() if one_class else torch.zeros(len(y), dtype=torch.long)
    train, held_out = ((x[rows], y[rows]) for rows in split_rows(like, size, seed, data.name))
    return train, held_out


def halve(
    rates: Sequence[float], epochs: int | Sequence[int], attempt: Callable[[float, Any], Trial]
) -> list[list[Trial]]:
    """The trials of each round: the best rates of a round are tried again, for more epochs.

    Examples:
        >>> accuracy = {0.1: 0.5, 0.2: 0.7, 0.3: 0.6, 0.4: 0.2, 0.5: 0.1}
        >>> def attempt(rate, epochs):
        ...     return Trial("a", {"rate": rate}, accuracies=[accuracy[rate]], seconds=epochs)
        >>> [(t.values["rate"], t.seconds) for t in halve([*accuracy], 10, attempt)[-1]]
        [(0.2, 10), (0.3, 10)]
    """
    rounds: list[list[Trial]] = []
    shares = [[n and max(1, round(share * n)) for n in listed(epochs)] for _, share in ROUNDS]
    for (count, _), share in zip(ROUNDS, shares, strict=True):
        rates = rates[:count]
        rounds.append([attempt(r, share[0] if isinstance(epochs, int) else share) for r in rates])
        rounds[-1].sort(key=lambda t: math.inf if t.accuracy is None else -t.accuracy)
        rates = [trial.values["rate"] for trial in rounds[-1]]
        if share == shares[-1]:
            break
    return rounds
