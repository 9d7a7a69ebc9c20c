"""`compare`: the same models, data and epochs under several rules; accuracy or R², time, memory.

Every comparison has two reference arms: backprop, and the frozen control, whose hidden blocks are
never trained. Restarts take turns (all arms with one seed, then all with the next), so that a busy
machine slows all arms alike and an interrupt leaves complete restarts.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tpsgd.common.errors import TpsgdError
from tpsgd.common.files import writable_folder
from tpsgd.common.units import columns
from tpsgd.comparison import equal as equally
from tpsgd.comparison.arms import arm, suited, with_controls
from tpsgd.comparison.finished_runs import COMPARISON, FinishedRuns
from tpsgd.comparison.provenance import describe, machine
from tpsgd.comparison.report import published, table
from tpsgd.comparison.results import R2, Result, Results
from tpsgd.comparison.scores import as_data, target_of
from tpsgd.comparison.session import Session
from tpsgd.comparison.trials import SEARCH
from tpsgd.data import Data
from tpsgd.engine.arm import Arm
from tpsgd.engine.lengths import with_lengths
from tpsgd.engine.record import of_run
from tpsgd.engine.restarts import make_model
from tpsgd.engine.settings import Settings
from tpsgd.features.run_identity import checksum
from tpsgd.losses import cross_entropy
from tpsgd.rules import Rule
from tpsgd.saved.checkpoint import claimed
from tpsgd.zoo.words import Factory


class Comparison(Results):
    """The record of a comparison; `print` shows the table, `write` makes a report."""

    def __str__(self) -> str:
        lines = [columns([table.head(self), *table.rows(self)]), *table.failures(self)]
        if tests := table.differences(self):
            lines += ["", columns(tests), table.tested(self)]
        lines += self.settings.get("unsuited", [])
        if self.settings.get("equal", "passes") != "passes":
            lines.append(table.effort(self))
        return "\n".join(lines)

    def to_frame(self) -> Any:
        """A `pandas.DataFrame` with a row for each arm: means, differences, tests, costs."""
        try:
            from pandas import DataFrame
        except ImportError as error:
            raise TpsgdError("to_frame needs pandas: pip install pandas") from error
        return DataFrame(published.records(self)).set_index("rule")

    def to_latex(self) -> str:
        """A LaTeX table of the same, for the package booktabs."""
        return published.as_latex(self)

    def to_csv(self) -> str:
        """The same as comma-separated values."""
        return published.as_csv(self)

    def write(self, folder: Path | str) -> Path:
        """Write `report.html`, its plots and `results.json`; returns the file of the page."""
        from tpsgd.comparison import report

        return report.write(self, writable_folder(Path(folder)))


Progress = Callable[[Comparison, Arm, float], None]


def compare(
    data: Data | Sequence[Any],
    factory: Factory,
    arms: Sequence[str | Rule | Arm],
    *,
    restarts: int = 3,
    equal: str = "passes",
    seconds: float | None = None,
    notes: Mapping[str, Any] | None = None,
    command: str = "",
    progress: Progress | None = None,
    each: Callable[[Comparison], Any] | None = None,
    **settings: Any,
) -> Comparison:
    """Train fresh models under every arm, and under backprop and the frozen control.

    Args:
        data: the training and the test set, as from `tpsgd.data.load`, or ((x, y), (x_test,
            y_test)). Labels may be all that `fit` takes: of numbers, R² is in place of accuracy; of
            steps or pixels, those with a label count.
        factory: makes a fresh model.
        arms: words of `tpsgd rules` such as "readout", rules, or arms such as `tpsgd.peers.zorb()`.
        restarts: the number of models that each arm trains.
        equal: what all arms have in equal amounts: "passes" (the number of epochs per block), so
            that every block learns from as many samples; "reads": every arm goes through the
            training samples as often as the arm that does so most, so that backprop and
            `simultaneous` have an epoch for each epoch of each block that `sequential` trains; or
            "seconds": every arm trains until its time is over, and ends with the epoch in which it
            is. Solved blocks read the samples once; an arm with a `method` has its own epochs.
        seconds: with equal "seconds", the time of each training run. Default: that of the slowest
            arm with `epochs` epochs per block.
        notes: more settings for the record, such as the model's name.
        command: the command that reproduces the comparison, for the record.
        progress: called with the record, the arm that is training, and the share of all work done.
        each: called with the record after every training run.
        **settings: those of `fit`. Restart r has the seed `seed + r`; a memory budget does not hold
            for backprop and for methods that are no rules. With `checkpoint`, finished runs are
            read from their records when the comparison is resumed. lr="search" chooses a learning
            rate for every arm, backprop and controls alike, by short training runs on held-out
            training samples: five rates for a fifth of the epochs, the best two for all of them.
            An arm with its own `lr` or optimizer keeps it; solved arms and methods have no rate.
            The rows of `tpsgd.logs` have the arm and the seed: each training run has the callback
            that the method `of_run(arm, seed)` of a callback returns, if it has one.

    Returns:
        The record: `print` shows a table, `record.write(folder)` writes a report. Ctrl-C ends the
        comparison early: `interrupted` is then True, and the restarts that finished are in the
        record. An arm that fails has its `error`, and the others go on; "backprop-checkpointed" is
        left out, with a remark, if the net cannot be cut into segments, and so are arms that need
        one class for each sample, if labels are others.

    Examples:
        >>> import tpsgd
        >>> digits = tpsgd.data.load("digits", max_train=200)
        >>> net = tpsgd.zoo.words.factory("mlp:16", digits.shape, 10)
        >>> record = compare(digits, net, ["readout", "tpsgd-l2"], restarts=1, epochs=1)
        >>> [result.arm.name for result in record.results]
        ['backprop', 'readout', 'tpsgd-l2', 'frozen']
    """
    data = check(data, arms, restarts, factory, settings.get("loss"))
    common = with_lengths(Settings.of("compare", settings), data.train)
    settings |= {"epochs": common.epochs, "batch_size": common.batch_size}
    equally.check(equal, seconds, common.epochs)
    left_out = ("checkpoint", "lr") if common.lr == SEARCH else ("checkpoint",)
    settings = {k: v for k, v in settings.items() if k not in left_out}
    compared = with_controls([arm(a, common.order, factory) for a in arms])
    compared, unsuited = suited(compared, factory, data, common)
    described = {**(notes or {}), **shared_settings(common, compared)}
    described |= {"restarts": restarts, "equal": equal}
    described |= {"score": R2} if target_of(data.train[1], common.loss).numbers else {}
    results = [Result(a) for a in compared]
    record = Comparison(describe(data), described, machine(common.device), results, command)
    identity = _identity(record, factory, data, seconds)
    of_run(settings, compared[0].name, common.seed)  # logs that cannot tell arms apart are refused
    record.settings |= {"unsuited": unsuited} if unsuited else {}
    with claimed(common.checkpoint) as checkpoint:
        finished = FinishedRuns(checkpoint, identity, COMPARISON, "a comparison")
        for a in compared:
            values = {f"{name} of {a.name}": value for name, value in a.describe().items()}
            finished.check_same({"arm": a.name}, values)
        session = Session(record, data, factory, settings, common, finished, progress)
        try:
            allowances, runs = session.allowances(session.warm_up(), equal, seconds)
            if common.lr == SEARCH:
                session.search_rates(runs, allowances)
            for turn in range(restarts * len(results)):
                r, i = divmod(turn, len(results))
                allowance = allowances[results[i].arm.name]
                session.train(results[i], turn, common.seed + r, allowance)
                if each is not None:
                    each(record)
        except KeyboardInterrupt:
            record.interrupted = True
    if not record.finished and not record.interrupted:
        raise TpsgdError(results[0].error or "nothing was trained")
    return record


def check(data: Any, arms: Any, restarts: int, factory: Factory, loss: Any) -> Data:
    """The data as a data set; bad arguments are refused."""
    if restarts < 1:
        raise TpsgdError(f"restarts must be 1 or more, got {restarts}")
    if isinstance(arms, str):
        raise TpsgdError(f"arms must be a list such as [{arms!r}]")
    return as_data(data, loss, factory)


def shared_settings(settings: Settings, arms: Sequence[Arm]) -> dict[str, Any]:
    """The settings that all arms share, as plain values."""
    values = settings.describe("", settings.loss or cross_entropy)
    for name in ("rule", "options", "threads", "torch", *([] if settings.loss else ["loss"])):
        del values[name]  # different for each arm, or in the record already
    values["order"] = values["order"] or "by the net and the rule"
    if settings.memory.budget is not None:
        values["without_budget"] = ", ".join(a.name for a in arms if not a.budgeted)
    return {name: value for name, value in values.items() if value is not None}


def _identity(
    record: Comparison, factory: Factory, data: Data, seconds: float | None
) -> dict[str, Any]:
    """What a comparison that is resumed must have in common; more rules and restarts may follow.

    Not so where all rules decide what each may use.
    """
    names = [result.arm.name for result in record.results]
    values = {**record.settings, "restarts": None, "seconds": seconds}
    values["rules"] = None if record.settings["equal"] == "passes" else ", ".join(names)
    return values | model_and_data(factory, data)


def model_and_data(factory: Factory, data: Data) -> dict[str, Any]:
    """A model of the factory and the samples, as plain values."""
    model = make_model(factory, 0)
    samples = {"training samples": data.train, "test samples": data.test}
    return {"model": str(model).splitlines(), "data": describe(data)} | {
        name: checksum(*pair) for name, pair in samples.items()
    }
