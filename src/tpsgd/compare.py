"""Rules side by side: the same models, data and epochs; accuracy, time and memory from one run.

Every comparison holds two arms that say what a rule's figures are worth: backprop, and the frozen
control, whose hidden blocks never learn. Restarts take turns (all arms with one seed, then all with
the next), so that a busy machine slows every arm alike and an interrupt leaves whole restarts.
"""

import os
import platform
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import torch

from . import __version__
from .data import Data
from .errors import TpsgdError
from .evaluation import evaluate
from .fitting import Schedule
from .losses import Loss
from .models import Factory
from .restarts import fit_many
from .rules import Rule, frozen
from .run import Run
from .schedules import sequential, simultaneous


@dataclass(frozen=True)
class Arm:
    """One way to train: a rule under a schedule, or backprop where the rule is None."""

    name: str
    rule: Rule | None
    schedule: Schedule = sequential

    @property
    def backprop(self) -> bool:
        """Whether this is the arm that the others are measured against."""
        return self.rule is None

    @property
    def control(self) -> bool:
        """Whether hidden blocks stay as they are."""
        return self.rule is not None and self.rule.objective is None

    @property
    def about(self) -> str:
        """What it does, in a few words."""
        return self.rule.about if self.rule else "gradients go through the whole net"


def arm(rule: Rule | None, schedule: Schedule = sequential) -> Arm:
    """A rule's arm; one that waits for the network's output learns simultaneously.

    Examples:
        >>> from tpsgd import rules
        >>> arm(rules.dfa()).schedule.__name__
        'simultaneous'
    """
    if rule is None:
        return Arm("backprop", None)
    return Arm(rule.name, rule, simultaneous if rule.needs_output else schedule)


@dataclass
class Result:
    """An arm's finished restarts: test accuracies, 0..1, and runs. `error`: why it was given up."""

    arm: Arm
    accuracies: list[float] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    error: str | None = None

    @property
    def counts(self) -> bool:
        """Whether there are figures to show: survivors of an arm that failed would flatter it."""
        return bool(self.runs) and self.error is None

    @property
    def accuracy(self) -> tuple[float, float]:
        """Mean and standard deviation of the test accuracy."""
        values = self.accuracies
        return fmean(values), stdev(values) if len(values) > 1 else 0.0

    @property
    def seconds(self) -> float:
        """The median training time, which one disturbed restart does not move."""
        return median(run.seconds for run in self.runs)

    @property
    def peak_bytes(self) -> int:
        """The largest peak of any restart."""
        return max(run.peak_bytes for run in self.runs)

    def as_dict(self) -> dict[str, Any]:
        """The arm, its summary and its restarts as plain values."""
        summary = None
        if self.counts:
            mean, std = self.accuracy
            summary = {"accuracy": mean, "accuracy_std": std, "seconds": self.seconds}
            summary["peak_bytes"] = self.peak_bytes
        restarts = [
            {"accuracy": accuracy, **run.as_dict()}
            for accuracy, run in zip(self.accuracies, self.runs, strict=True)
        ]
        named = {"name": self.arm.name, "about": self.arm.about, "error": self.error}
        return {**named, "summary": summary, "restarts": restarts}


@dataclass
class Comparison:
    """What a comparison leaves behind; `as_dict` is ready for JSON."""

    data: dict[str, Any]
    settings: dict[str, Any]
    machine: dict[str, Any]
    results: list[Result]
    command: str = ""
    versions: dict[str, str] = field(default_factory=lambda: versions())
    date: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    interrupted: bool = False

    @property
    def asked(self) -> int:
        """How many trainings were asked for, over all arms."""
        return self.settings["restarts"] * len(self.results)

    @property
    def finished(self) -> int:
        """How many of them finished."""
        return sum(len(r.runs) for r in self.results)

    @property
    def reference(self) -> Result | None:
        """Backprop's result, where it has one."""
        return next((r for r in self.results if r.arm.backprop and r.counts), None)

    @property
    def ranked(self) -> list[Result]:
        """Backprop first, the control last, the rules between by accuracy."""

        def rank(r: Result) -> tuple[int, float]:
            return r.arm.control - r.arm.backprop, -r.accuracy[0] if r.counts else 1.0

        return sorted(self.results, key=rank)

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain values."""
        plain = {k: v for k, v in vars(self).items() if k != "results"}
        counts = {"asked": self.asked, "finished": self.finished}
        return {**plain, **counts, "arms": [r.as_dict() for r in self.results]}


Progress = Callable[[Comparison, Arm, float], None]


def compare(
    data: Data,
    factory: Factory,
    arms: Sequence[Arm],
    *,
    epochs: int = 5,
    restarts: int = 3,
    seed: int = 0,
    batch_size: int = 128,
    lr: float | None = None,
    loss: Loss | None = None,
    device: str | None = None,
    notes: Mapping[str, Any] | None = None,
    command: str = "",
    progress: Progress | None = None,
    each: Callable[[Comparison], Any] | None = None,
) -> Comparison:
    """Train fresh models under every arm, backprop and the frozen control included.

    Args:
        data: what to train and to test on.
        factory: makes a fresh model.
        arms: see `arm`.
        epochs: as for `fit`, per block.
        restarts: how many models each arm trains.
        seed: of the first restart; restart r has `seed + r`.
        batch_size: as for `fit`.
        lr: as for `fit`.
        loss: as for `fit`, of every arm's last block.
        device: as for `fit`.
        notes: more settings for the record, such as the model's name.
        command: what reproduces this, for the record.
        progress: called with the record, the arm at work and the share of all work done.
        each: called with the record after every training.

    Returns:
        The record. Ctrl-C ends the comparison early: `interrupted` says so, and the restarts that
        finished are there. A rule that fails has its `error`, and the others go on.
    """
    if restarts < 1:
        raise TpsgdError(f"restarts must be 1 or more, got {restarts}")
    options = {"epochs": epochs, "batch_size": batch_size, "lr": lr, "loss": loss, "device": device}
    settings = {**(notes or {}), **options, "loss": loss and loss.name}
    settings |= {"restarts": restarts, "seed": seed}
    results = [Result(a) for a in with_controls(arms)]
    record = Comparison(describe(data), settings, machine(device), results, command)
    try:
        _warm_up(record, data, factory, options)
        for turn in range(restarts * len(results)):
            r, i = divmod(turn, len(results))
            if results[i].error is None:
                share = _share(record, turn, results[i].arm, progress)
                _train(results[i], data, factory, {**options, "seed": seed + r, "progress": share})
                if each is not None:
                    each(record)
    except KeyboardInterrupt:
        record.interrupted = True
    if not record.finished and not record.interrupted:
        raise TpsgdError(results[0].error or "nothing was trained")
    return record


def with_controls(arms: Sequence[Arm]) -> list[Arm]:
    """The arms between backprop and the frozen control, which are added where they are missing."""
    unique = list(arms)
    names = [a.name for a in unique]
    if twice := {n for n in names if names.count(n) > 1}:
        raise TpsgdError(
            f"two arms are called {min(twice)!r}; give each its own name: Arm(name, rule, schedule)"
        )
    schedule = next((a.schedule for a in unique if a.rule and not a.rule.needs_output), sequential)
    first = [a for a in unique if a.backprop] or [arm(None)]
    last = [a for a in unique if a.control] or [arm(frozen(), schedule)]
    return [*first, *(a for a in unique if not a.backprop and not a.control), *last]


def _train(result: Result, data: Data, factory: Factory, options: dict[str, Any]) -> None:
    """One restart of one arm: train, then test."""
    arm = result.arm
    options["schedule"] = arm.schedule
    try:
        made = fit_many(
            factory, data.train, restarts=1, rule=arm.rule, backprop=arm.backprop, **options
        )
        accuracy = evaluate(made.models[0], data.test)
    except TpsgdError as error:
        result.error = str(error)
        return
    result.accuracies.append(accuracy)
    result.runs.append(made.runs[0])


def _warm_up(record: Comparison, data: Data, factory: Factory, options: dict[str, Any]) -> None:
    """Two batches under every arm, so that no arm's time holds what a first step costs."""
    x, y = (t[: 2 * options["batch_size"]] for t in data.train)
    few = Data(data.name, (x, y), (x, y), data.classes, data.shape, data.note)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of classes that so few samples lack
        for result in record.results:
            _train(Result(result.arm), few, factory, {**options, "epochs": 1})


def _share(
    record: Comparison, before: int, arm: Arm, progress: Progress | None
) -> Callable[[int, int], None] | None:
    """`fit`'s progress, as a share of the whole comparison."""
    if progress is None:
        return None
    progress(record, arm, before / record.asked)
    return lambda done, total: progress(record, arm, (before + done / total) / record.asked)


def describe(data: Data) -> dict[str, Any]:
    """A data set in a few plain values."""
    sizes = {"train": len(data.train[1]), "test": len(data.test[1]), "classes": len(data.classes)}
    return {"name": data.name, "note": data.note, **sizes, "shape": list(data.shape)}


def machine(device: str | None = None) -> dict[str, Any]:
    """Where this runs: processor, cores, threads, and the GPU where it is used."""
    gpu = device is not None and torch.device(device).type == "cuda" and torch.cuda.is_available()
    return {
        "cpu": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(device) if gpu else None,
        "system": platform.system(),
    }


def versions() -> dict[str, str]:
    """Of Python, torch and this library."""
    return {"python": platform.python_version(), "torch": torch.__version__, "tpsgd": __version__}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(s.partition(":")[2].strip() for s in lines if s.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
