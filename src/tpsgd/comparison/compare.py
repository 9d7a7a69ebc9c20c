"""Rules side by side: the same models, data and epochs; accuracy, time and memory from one run.

Every comparison holds two arms that say what a rule's figures are worth: backprop, and the frozen
control, whose hidden blocks never learn. Two more controls may be asked for: the net as it begins,
`arm(rules.untrained())`, and for recurrent nets a `reservoir`. Restarts take turns (all arms with
one seed, then all with the next), so that a busy machine slows every arm alike and an interrupt
leaves whole restarts.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from statistics import fmean, median, stdev
from typing import Any

import torch

from tpsgd.comparison.provenance import describe, machine, versions
from tpsgd.data import Data
from tpsgd.engine.evaluate import evaluate
from tpsgd.engine.optimizers import OptimizerFactory, adam, sgd
from tpsgd.engine.record import Run
from tpsgd.engine.restarts import Restarts, fit_many, make_model
from tpsgd.engine.schedules import sequential, simultaneous
from tpsgd.engine.settings import Schedule
from tpsgd.errors import TpsgdError
from tpsgd.losses import Loss
from tpsgd.nets.blocks import split
from tpsgd.rules import Rule, frozen
from tpsgd.solvers.ridge import ridge
from tpsgd.zoo.words import Factory, is_recurrent
from tpsgd.zoo.words import reservoir as reservoir_like

RESERVOIR = replace(
    frozen(), name="reservoir", about="control: random leaky cells, head by least squares"
)
THROUGH_TIME = "backprop through time: gradients go through all layers and steps"


@dataclass(frozen=True)
class Arm:
    """One way to train: a rule under a schedule, a `method`, or backprop where there is neither.

    The rest is what it has of its own in place of what all arms share: an `optimizer`, as for `fit`
    (the shared learning rate is not for it), a `factory` of models, `epochs`, and a `remark`. A
    method is a function such as `tpsgd.fit_zorb`, which has no epochs, batches or rates to share.
    """

    name: str
    rule: Rule | None
    schedule: Schedule = sequential
    optimizer: OptimizerFactory | Sequence[Any] | None = None
    factory: Factory | None = None
    epochs: int | None = None
    remark: str = ""
    method: Callable[..., Run] | None = None

    @property
    def backprop(self) -> bool:
        """Whether this is the arm that the others are measured against."""
        return self.rule is None and self.method is None

    @property
    def control(self) -> bool:
        """Whether hidden blocks stay as they are."""
        return self.rule is not None and self.rule.objective is None

    @property
    def budgeted(self) -> bool:
        """Whether `fit` trains it, so that it can keep within a memory budget."""
        return self.rule is not None

    @property
    def about(self) -> str:
        """What it does, in a few words."""
        if self.remark or self.method:
            return self.remark or "a method of its own"
        return self.rule.about if self.rule else "gradients go through the whole net"


def arm(rule: Rule | None, schedule: Schedule = sequential) -> Arm:
    """A rule's arm; one that waits for the network's output learns simultaneously.

    Where nothing learns, no epochs are run, and no block's outputs are made for the next.

    Examples:
        >>> from tpsgd import rules
        >>> arm(rules.dfa()).schedule.__name__
        'simultaneous'
    """
    if rule is None:
        return Arm("backprop", None)
    if not rule.head:
        return Arm(rule.name, rule, simultaneous, epochs=0)
    return Arm(rule.name, rule, simultaneous if rule.needs_output else schedule)


def reservoir(factory: Factory) -> Arm:
    """A recurrent net's control: leaky cells of its sizes stay random, the head is solved for.

    Whatever cells the net has, these are well scaled, and where a perceptron stands before the
    classifier, the reservoir's states are read without it.
    """
    make = reservoir_like(factory)
    optimizer = [*[adam] * (len(split(make())) - 1), ridge()]
    return Arm("reservoir", RESERVOIR, optimizer=optimizer, factory=make)


def solved(
    arm: Arm, factory: Factory, lr: float | None = None, optimizer: OptimizerFactory = adam
) -> Arm:
    """The arm with its last block in closed form, if it learns block by block by an optimizer."""
    free = arm.rule is not None and arm.rule.head and arm.optimizer is None
    if not free or arm.schedule is not sequential:
        return arm
    kinds: dict[Any, Any] = {adam: torch.optim.Adam, sgd: torch.optim.SGD}
    below = optimizer if lr is None else partial(kinds.get(optimizer, optimizer), lr=lr)
    return replace(arm, optimizer=[*[below] * (len(split(factory())) - 1), ridge()])


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
        """Backprop first, the controls last, the rules between by accuracy."""

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
    window: int | None = None,
    optimizer: OptimizerFactory = adam,
    memory_budget: str | int | None = None,
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
        window: as for `fit`, of recurrent nets.
        optimizer: as for `fit`, of every arm that has none of its own.
        memory_budget: as for `fit`, of the arms that it trains: backprop and methods have none.
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
    options |= {} if window is None else {"window": window}
    named = {"loss": loss and loss.name, "optimizer": getattr(optimizer, "__name__", "its own")}
    settings = {**(notes or {}), **options, **named, "restarts": restarts, "seed": seed}
    options |= {} if optimizer is adam else {"optimizer": optimizer}
    results = [Result(a) for a in with_controls(arms)]
    if memory_budget is not None:
        options |= {"memory_budget": memory_budget}
        free = [r.arm.name for r in results if not r.arm.budgeted]
        settings |= {"memory_budget": memory_budget, "without_budget": ", ".join(free)}
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
    """The arms between backprop and the frozen control, which are added where they are missing.

    Other controls come last.
    """
    unique = list(arms)
    names = [a.name for a in unique]
    if twice := {n for n in names if names.count(n) > 1}:
        raise TpsgdError(
            f"two arms are called {min(twice)!r}; give each its own name: Arm(name, rule, schedule)"
        )
    rules = [a for a in unique if not a.backprop and not a.control]
    schedule = next((a.schedule for a in rules if a.rule and not a.rule.needs_output), sequential)
    first = [a for a in unique if a.backprop] or [arm(None)]
    last = [a for a in unique if _is_frozen(a)] or [arm(frozen(), schedule)]
    return [*first, *rules, *last, *(a for a in unique if a.control and a not in last)]


def _is_frozen(arm: Arm) -> bool:
    """Whether an arm is the control: the models compared, their hidden blocks as they begin."""
    return arm.rule is not None and arm.rule.name == frozen().name


def train(arm: Arm, factory: Factory, data: Any, **options: Any) -> Restarts:
    """One model under an arm, by `fit_many` with these options and the arm's own."""
    options["schedule"] = arm.schedule
    if arm.epochs is not None:
        options["epochs"] = arm.epochs
    if arm.optimizer is not None:
        options |= {"optimizer": arm.optimizer, "lr": None}
    if not arm.budgeted:
        options.pop("memory_budget", None)
    make = arm.factory or factory
    if arm.method is not None:
        model = make_model(make, options.get("seed", 0))
        shared = ("seed", "device", "progress", "validation", "callbacks")
        own = {k: options[k] for k in shared if k in options}
        return Restarts([model], [arm.method(model, data, **own)], False)
    return fit_many(make, data, restarts=1, rule=arm.rule, backprop=arm.backprop, **options)


def _train(result: Result, data: Data, factory: Factory, options: dict[str, Any]) -> None:
    """One restart of one arm: train, then test."""
    try:
        made = train(result.arm, factory, data.train, **options)
        accuracy = evaluate(made.models[0], data.test)
    except TpsgdError as error:
        result.error = str(error)
        return
    if result.arm.backprop and not result.arm.remark and is_recurrent(made.models[0]):
        result.arm = replace(result.arm, remark=THROUGH_TIME)
    result.accuracies.append(accuracy)
    result.runs.append(made.runs[0])


def _warm_up(record: Comparison, data: Data, factory: Factory, options: dict[str, Any]) -> None:
    """A batch or two under every arm, so that no arm's time holds what a first step costs."""
    batches = 1 if options["device"] in (None, "cpu") else 2  # a GPU gets ready in two
    x, y = (t[: batches * options["batch_size"]] for t in data.train)
    few = replace(data, train=(x, y), test=(x, y))
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
