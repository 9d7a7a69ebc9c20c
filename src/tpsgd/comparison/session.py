"""The training runs of a comparison: short ones, a search for rates, and those of the record."""

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from tpsgd.common.errors import TpsgdError
from tpsgd.comparison import equal as equally
from tpsgd.comparison.equal import Allowance
from tpsgd.comparison.finished_runs import FAILURES, FinishedRuns, Values
from tpsgd.comparison.results import THROUGH_TIME, Result, Results
from tpsgd.comparison.scores import score, target_of
from tpsgd.comparison.trials import (
    Trial,
    best_of_arm,
    halve,
    rates_of,
    run_trials,
    split_training,
    task_of_arm,
)
from tpsgd.data import Data
from tpsgd.engine.arm import Arm
from tpsgd.engine.confusion import confusion
from tpsgd.engine.learners.optimizers import adam, sgd
from tpsgd.engine.record import Run, of_run
from tpsgd.engine.settings import Settings, listed
from tpsgd.engine.solvers import SOLVERS
from tpsgd.saved.checkpoint import readable
from tpsgd.zoo.words import Factory, is_recurrent

HELD_OUT = 0.2
MOST_CLASSES = 1000  # with a confusion matrix in the record
ALLOWANCES = {"equal": "allowances"}  # the key of what each arm may use
OF_WHOLE_RUN = ("callbacks", "validation", "early_stopping")  # settings without use in a search


@dataclass(frozen=True)
class Session:
    """The training runs of a comparison, and those before it that decide what each arm may use."""

    record: Results
    data: Data
    factory: Factory
    settings: Mapping[str, Any]
    common: Settings
    finished: FinishedRuns
    progress: Callable[[Any, Arm, float], None] | None

    def warm_up(self) -> list[Run | None]:
        """Train every arm on a batch or two, so that no arm's time includes one-time costs."""
        batches = 1 if str(self.common.device or "cpu") == "cpu" else 2  # GPU: the second is slow
        x, y = (t[: batches * self.common.batch_size] for t in self.data.train)
        settings = {k: v for k, v in self.settings.items() if k != "validation"}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about classes that are missing in these few samples
            return replace(self, settings=settings, progress=None).short_runs((x, y), 1)

    def short_runs(self, samples: tuple[Any, Any], epochs: int) -> list[Run | None]:
        """Train every arm for few epochs; None if it fails, as training it again will say.

        A method has its own number of epochs, and is trained only where one epoch is asked for.
        """
        once = {k: v for k, v in self.settings.items() if k not in ("callbacks", "early_stopping")}
        once |= {"epochs": epochs, "progress": False}
        runs: list[Run | None] = []
        for result in self.record.results:
            if self.progress is not None:
                self.progress(self.record, result.arm, 0.0)
            runs.append(None)
            if result.arm.method is None or epochs == 1:
                with suppress(*FAILURES), result.arm.in_a_sentence():
                    trained = result.arm.train(self.factory, samples, **once)
                    runs[-1] = trained.runs[0].without_model()  # which would stay in memory
        return runs

    def allowances(
        self, runs: list[Run | None], equal: str, seconds: float | None
    ) -> tuple[dict[str, Allowance], list[Run | None]]:
        """What each arm may use, by its name, and the short runs that it follows from."""
        arms = [result.arm for result in self.record.results]
        stored = self.finished.get(ALLOWANCES) or {"amount": {}, "allowances": {}}
        if any(arm.name not in stored["allowances"] for arm in arms):
            if equal == "seconds":
                runs = self.short_runs(self.data.train, equally.TIMED_EPOCHS)
            amount, each = equally.allowances(arms, runs, equal, seconds, self.common)
            plain = {name: asdict(allowance) for name, allowance in each.items()}
            stored = {"amount": amount, "allowances": stored["allowances"] | plain}
            self.finished.add(ALLOWANCES, stored)
        self.record.settings |= stored["amount"]
        return {name: Allowance.of(v) for name, v in stored["allowances"].items()}, runs

    def search_rates(self, runs: list[Run | None], allowances: Mapping[str, Allowance]) -> None:
        """Give each arm that has a rate its best one; `error` if every rate fails.

        Short runs of each arm show whether any block learns by gradients. An arm that differs from
        one before it only in checkpoints or micro-batches follows the same gradients, and takes its
        rate. The trials are stored in the folder of the comparison's finished runs.
        """
        record, common = self.record, self.common
        samples = split_training(self.data, HELD_OUT, common.seed)
        record.settings["held_out"] = len(samples[1][1])
        once = {k: v for k, v in self.settings.items() if k not in OF_WHOLE_RUN}
        trials = FinishedRuns(self.finished.checkpoint, self.finished.identity)

        def attempt(arm: Arm, rate: float, epochs: Any) -> Trial:
            values, tried = {"rate": rate, "epochs": epochs}, replace(arm, lr=rate, epochs=None)
            settings = once | {"progress": False, "epochs": epochs}
            task = task_of_arm(tried, values, samples, self.factory, 1, settings)
            run_trials([task], trials)
            return task.trial

        searched: list[tuple[Arm, Result]] = []
        for number, (result, run) in enumerate(zip(record.results, runs, strict=True)):
            if not has_rate(arm := result.arm, run):
                continue
            if twin := next((r for a, r in searched if a == without_savings(arm)), None):
                result.arm, result.error = replace(arm, lr=twin.arm.lr), twin.error
                continue
            searched.append((without_savings(arm), result))
            if self.progress is not None:
                share = number / len(record.results)
                self.progress(record, replace(arm, name=f"rate of {arm.name}"), share)
            rates = rates_of(listed(arm.optimizer or common.optimizer)[0])
            epochs = epochs_of(arm, allowances[arm.name], common)
            rounds = halve(rates, epochs, partial(attempt, arm))
            result.trials = [trial for tried in rounds for trial in tried]
            try:
                result.arm = replace(arm, lr=best_of_arm(rounds[-1]).values["rate"])
            except TpsgdError as error:
                result.error = str(error)

    def train(self, result: Result, turn: int, seed: int, allowance: Allowance) -> None:
        """One restart of one arm: train and test, unless it has finished before."""

        def measure(seed: int, checkpoint: Values) -> Values:
            settings = of_run(self.settings, result.arm.name, seed)
            settings["progress"] = self._share(turn, result.arm)
            settings = allowance.within(settings) | checkpoint
            with result.arm.in_a_sentence():
                trained = result.arm.train(self.factory, self.data.train, **settings)
                model, run = trained.models[0], trained.runs[0].as_dict()
                tested = _test(model, self.data, self.common.loss)
            if result.arm.backprop and not result.arm.remark and is_recurrent(model):
                result.arm = replace(result.arm, remark=THROUGH_TIME)
            return {"run": run, **tested}

        if result.error is None:
            key = {"rule": result.arm.name, "values": {}}
            runs, result.error = self.finished.train_missing(key, [seed], measure)
            with readable(self.finished.folder):
                for values in runs:
                    result.add(values)

    def _share(self, before: int, arm: Arm) -> Callable[[int, int], None] | None:
        """`fit`'s progress, of samples or of time, as a share of the whole comparison."""
        record, progress = self.record, self.progress
        if progress is None:
            return None
        progress(record, arm, before / record.asked)
        began, seconds = time.perf_counter(), record.settings.get("seconds")

        def share(done: int, total: int) -> None:
            passed = min(1.0, (time.perf_counter() - began) / seconds) if seconds else done / total
            progress(record, arm, (before + passed) / record.asked)

        return share


def _test(model: Any, data: Data, loss: Any) -> Values:
    """Accuracy and, for labels of one class out of not too many, the confusion matrix; or R²."""
    if data.test[1].is_floating_point() or len(data.classes) > MOST_CLASSES:
        target = target_of(data.train[1], loss)
        return {"accuracy": score(model, data.test, target), "confusion": []}
    matrix = confusion(model, data.test)
    if len(matrix.classes) == len(data.classes):  # a model may have more outputs than classes
        matrix = replace(matrix, classes=data.classes)
    return {"accuracy": matrix.accuracy, "confusion": [vars(matrix)]}


def has_rate(arm: Arm, run: Run | None) -> bool:
    """Whether a block learns by gradients, at a rate that neither arm nor optimizer has set."""
    free = [f in (None, adam, sgd) or isinstance(f, SOLVERS) for f in listed(arm.optimizer)]
    if run is None or arm.method is not None or arm.lr is not None or not all(free):
        return False
    return any(block.learning not in ("solved", "frozen") for block in run.blocks)


def without_savings(arm: Arm) -> Arm:
    """The arm without name and memory settings, which change no gradient except of batch norm."""
    return replace(arm, name="", remark="", checkpointed=False, micro_batch=None)


def epochs_of(arm: Arm, allowance: Allowance, common: Settings) -> int | Sequence[int]:
    """The epochs of an arm; with equal seconds, those that all arms share."""
    epochs = arm.epochs if allowance.seconds is not None else allowance.epochs or arm.epochs
    return common.epochs if epochs is None else epochs
