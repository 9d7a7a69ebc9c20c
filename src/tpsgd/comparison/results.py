"""What a comparison records: the restarts of each arm, and the circumstances of all."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from math import inf
from statistics import fmean, median, stdev
from typing import Any

from tpsgd.comparison.provenance import versions
from tpsgd.comparison.scores import as_json
from tpsgd.comparison.statistics import Difference, differences
from tpsgd.comparison.trials import Trial
from tpsgd.engine.arm import BACKPROP, Arm
from tpsgd.engine.confusion import Confusion
from tpsgd.engine.record import Run

R2 = "R²"
REFERENCES = (BACKPROP, "frozen")  # the arms that all others are compared with by a test
THROUGH_TIME = "backprop through time: gradients go through all layers and steps"


@dataclass
class Result:
    """An arm's finished restarts: test accuracies, 0 to 1, and runs; `error` if the arm failed.

    Where labels are numbers, R² is in place of accuracies. `trials` are the short runs by which its
    learning rate was chosen.
    """

    arm: Arm
    accuracies: list[float] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    error: str | None = None
    confusions: list[Confusion] = field(default_factory=list)
    trials: list[Trial] = field(default_factory=list)

    def add(self, values: Mapping[str, Any]) -> None:
        """Add a restart: its run, accuracy and confusion matrix as plain values, as in a file."""
        for m in values["confusion"]:
            self.confusions.append(Confusion(tuple(map(tuple, m["counts"])), tuple(m["classes"])))
        self.runs.append(Run.of(values["run"]))
        self.accuracies.append(float(values["accuracy"]))

    @property
    def counts(self) -> bool:
        """Whether all restarts succeeded: the mean of an arm without its failures would mislead."""
        return bool(self.runs) and self.error is None

    @property
    def accuracy(self) -> tuple[float, float]:
        """Mean and standard deviation of the test accuracy, or of R²."""
        values = self.accuracies
        return fmean(values), stdev(values) if len(values) > 1 else 0.0

    @property
    def seconds(self) -> float:
        """The median training time, which a single slow restart does not change."""
        return median(run.seconds for run in self.runs)

    @property
    def largest(self) -> Run:
        """The restart that took the most memory."""
        return max(self.runs, key=lambda run: run.total_bytes)

    @property
    def confusion(self) -> Confusion | None:
        """The confusion matrix of all restarts together."""
        return sum(self.confusions[1:], self.confusions[0]) if self.confusions else None

    def as_dict(self, numbers: bool = False) -> dict[str, Any]:
        """The arm, its summary and its restarts as plain values; `numbers`: of labels."""
        summary = None
        if self.counts:
            mean, std = self.accuracy
            summary = as_json({"accuracy": mean, "accuracy_std": std}, numbers)
            summary["seconds"] = self.seconds
            for name in ("total_bytes", "peak_bytes", "kept_bytes"):
                summary[name] = getattr(self.largest, name)
            summary |= self.confusion.as_dict() if self.confusion else {}
        pairs = zip(self.accuracies, self.runs, strict=True)
        restarts = [as_json({"accuracy": a}, numbers) | run.as_dict() for a, run in pairs]
        names = {"name": self.arm.name, "about": self.arm.about, "error": self.error}
        trials = [as_json(vars(trial), numbers) for trial in self.trials]
        names |= {"lr": self.arm.lr, "trials": trials}
        return {**names, "summary": summary, "restarts": restarts}


@dataclass
class Results:
    """The results of all arms, with the data, the settings and the machine they belong to."""

    data: dict[str, Any]
    settings: dict[str, Any]
    machine: dict[str, Any]
    results: list[Result]
    command: str = ""
    versions: dict[str, str] = field(default_factory=versions)
    date: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    interrupted: bool = False

    @property
    def numbers(self) -> bool:
        """Whether labels are numbers, so that models are compared by R²."""
        return self.settings.get("score") == R2

    @property
    def asked(self) -> int:
        """The number of training runs, over all arms."""
        return self.settings["restarts"] * len(self.results)

    @property
    def finished(self) -> int:
        """The number of training runs that have finished."""
        return sum(len(r.runs) for r in self.results)

    @property
    def reference(self) -> Result | None:
        """Backprop's result, if it has one."""
        return next((r for r in self.results if r.arm.reference and r.counts), None)

    @property
    def ranked(self) -> list[Result]:
        """Backprop first, its other forms next, the controls last; groups by accuracy or R²."""

        def rank(r: Result) -> tuple[int, bool, float]:
            accuracy = r.accuracy[0] if r.counts else -inf
            return r.arm.control - r.arm.backprop, not r.arm.reference, -accuracy

        return sorted(self.results, key=rank)

    @property
    def exemplars(self) -> list[Result]:
        """Backprop, the most accurate rule and the most accurate control, if they have matrices."""
        groups: dict[int, Result] = {}
        for result in (r for r in self.ranked if r.counts and r.confusions):
            groups.setdefault(result.arm.control - result.arm.backprop, result)
        return list(groups.values())

    def differences(self) -> dict[str, dict[str, Difference]]:
        """The differences to backprop and to frozen, by the name of that arm and of the other."""
        scores = {
            r.arm.name: [(run.seed, a) for run, a in zip(r.runs, r.accuracies, strict=True)]
            for r in self.results
            if r.counts
        }
        return {name: differences(scores, name) for name in REFERENCES if name in scores}

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain values."""
        plain = {k: v for k, v in vars(self).items() if k != "results"}
        counts, arms = {"asked": self.asked, "finished": self.finished}, []
        tests = self.differences()
        for r in self.results:
            each = {name: asdict(t[r.arm.name]) for name, t in tests.items() if r.arm.name in t}
            arms.append(r.as_dict(self.numbers) | {"n": len(r.runs), "differences": each})
        return {**plain, **counts, "arms": arms}
