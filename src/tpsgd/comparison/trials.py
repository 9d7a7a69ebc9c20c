"""A trial: an arm with values that are tried, trained and measured on held-out training samples.

`lr="search"` in a comparison gives every arm a learning rate by the same short search, successive
halving: all rates are tried for few epochs, the best of them for more. The test set has no part in
any trial.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import torch
from torch import nn

from tpsgd.common.errors import TpsgdError
from tpsgd.comparison.finished_runs import FinishedRuns, Values
from tpsgd.data import Data
from tpsgd.data.split import hold_out
from tpsgd.engine.arm import Arm
from tpsgd.engine.evaluate import evaluate
from tpsgd.engine.learners.optimizers import sgd
from tpsgd.engine.settings import listed

RATES = (0.0003, 0.001, 0.003, 0.01, 0.03)  # of Adam
SGD_RATES = (0.01, 0.03, 0.1, 0.3, 1.0)
SEARCH = "search"
# How many rates are tried, and for which share of the epochs. Half of the epochs in the last round
# favoured rates that are too large for all of them: tpsgd-l2 on digits lost a point.
ROUNDS = ((5, 1 / 5), (2, 1))


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
    finished: FinishedRuns,
) -> Trial:
    """Train an arm that has these values, and measure it on the held-out samples."""
    train, held_out = samples

    def measure(seed: int, checkpoint: Values) -> Values:
        trained = arm.train(factory, train, **{**settings, "seed": seed, **checkpoint})
        accuracy = evaluate(trained.models[0], held_out)
        return {"accuracy": accuracy, "seconds": trained.runs[0].seconds}

    key, first = {"rule": arm.name, "values": values}, settings.get("seed", 0)
    results, error = finished.train_missing(key, range(first, first + restarts), measure)
    accuracies = [result["accuracy"] for result in results]
    return Trial(arm.name, values, accuracies, sum(result["seconds"] for result in results), error)


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


def halve(
    rates: Sequence[float], epochs: int | Sequence[int], attempt: Callable[[float, Any], Trial]
) -> list[list[Trial]]:
    """The trials of each round: the best rates of a round are tried again, for more epochs.

    Examples:
        >>> accuracy = {0.1: 0.5, 0.2: 0.7, 0.3: 0.6, 0.4: 0.2, 0.5: 0.1}
        >>> rounds = halve([*accuracy], 10, lambda r, n: Trial("a", {"rate": r}, [accuracy[r]], n))
        >>> [(trial.values["rate"], trial.seconds) for trial in rounds[-1]]
        [(0.2, 10), (0.3, 10)]
    """
    rounds: list[list[Trial]] = []
    shares = [[n and max(1, round(share * n)) for n in listed(epochs)] for _, share in ROUNDS]
    for (count, _), share in zip(ROUNDS, shares, strict=True):
        rates = rates[:count]
        rounds.append([attempt(r, share[0] if isinstance(epochs, int) else share) for r in rates])
        rounds[-1].sort(key=lambda trial: 1.0 if trial.accuracy is None else -trial.accuracy)
        rates = [trial.values["rate"] for trial in rounds[-1]]
        if share == shares[-1]:
            break
    return rounds
