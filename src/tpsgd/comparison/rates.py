"""`lr="search"`: a learning rate for every arm of a comparison, by the same short search.

Successive halving on held-out training samples: all rates are tried for few epochs, the best of
them for more. The test set has no part in it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from tpsgd.comparison.equal import Allowance
from tpsgd.comparison.finished_trials import FinishedTrials
from tpsgd.comparison.trials import Trial, best, rates_of, split_training, try_values
from tpsgd.data import Data
from tpsgd.engine.optimizers import adam, sgd
from tpsgd.engine.record import Run
from tpsgd.engine.settings import Settings, listed
from tpsgd.errors import TpsgdError
from tpsgd.solvers import SOLVERS
from tpsgd.training.arm import Arm

SEARCH = "search"
HELD_OUT = 0.2
# How many rates are tried, and for which share of the epochs. Half of the epochs in the last round
# favoured rates that are too large for all of them: tpsgd-l2 on digits lost a point.
ROUNDS = ((5, 1 / 5), (2, 1))
LEFT_OUT = ("callbacks", "validation", "early_stopping")  # settings of the whole run alone
Progress = Callable[[Any, Arm, float], None]


def search_rates(
    record: Any,
    runs: Sequence[Run | None],
    data: Data,
    factory: Callable[..., Any],
    settings: Mapping[str, Any],
    finished: Any,
    progress: Progress | None,
) -> None:
    """Give each arm of a comparison that has a rate its best one; `error` if every rate fails.

    Short runs of each arm show whether any block learns by gradients. An arm that differs from one
    before it only in checkpoints or micro-batches follows the same gradients, and takes its rate.
    The trials are kept in the folder of the comparison's finished runs.
    """
    common = Settings.of("compare", settings)
    samples = split_training(data, HELD_OUT, common.seed)
    record.settings["held_out"] = len(samples[1][1])
    once = {k: v for k, v in settings.items() if k not in LEFT_OUT} | {"progress": False}
    trials = FinishedTrials(finished.checkpoint, finished.identity)

    def attempt(arm: Arm, rate: float, epochs: Any) -> Trial:
        values, tried = {"rate": rate, "epochs": epochs}, replace(arm, lr=rate, epochs=None)
        return try_values(tried, values, samples, factory, 1, once | {"epochs": epochs}, trials)

    searched: list[tuple[Arm, Any]] = []
    for number, (result, run) in enumerate(zip(record.results, runs, strict=True)):
        if not has_rate(arm := result.arm, run):
            continue
        if twin := next((r for a, r in searched if a == without_savings(arm)), None):
            result.arm, result.error = replace(arm, lr=twin.arm.lr), twin.error
            continue
        searched.append((without_savings(arm), result))
        if progress is not None:
            share = number / len(record.results)
            progress(record, replace(arm, name=f"rate of {arm.name}"), share)
        rates = rates_of(listed(arm.optimizer or common.optimizer)[0])
        epochs = epochs_of(arm, finished.allowances[arm.name], common)
        rounds = halve(rates, epochs, partial(attempt, arm))
        result.trials = [trial for tried in rounds for trial in tried]
        try:
            result.arm = replace(arm, lr=best(rounds[-1]).values["rate"])
        except TpsgdError as error:
            result.error = str(error)


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


def has_rate(arm: Arm, run: Run | None) -> bool:
    """Whether a block learns by gradients, at a rate that neither arm nor optimizer has set."""
    free = [f in (None, adam, sgd) or isinstance(f, SOLVERS) for f in listed(arm.optimizer)]
    if run is None or arm.method is not None or arm.lr is not None or not all(free):
        return False
    return any(block.learning not in ("solved", "frozen") for block in run.blocks)


def without_savings(arm: Arm) -> Arm:
    """The arm without its name and its ways to save memory, which change no gradient.

    (But for batch norm, whose statistics are those of a micro-batch.)
    """
    return replace(arm, name="", remark="", checkpointed=False, micro_batch=None)


def epochs_of(arm: Arm, allowance: Allowance, common: Settings) -> int | Sequence[int]:
    """The epochs of an arm; with equal seconds, those that all arms share."""
    epochs = arm.epochs if allowance.seconds is not None else allowance.epochs or arm.epochs
    return common.epochs if epochs is None else epochs
