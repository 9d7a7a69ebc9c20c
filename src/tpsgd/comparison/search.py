"""`search`: rates, lengths and fields of rules, chosen on held-out training samples; then one test.

Backprop and the frozen control are searched in the same way, so that no arm is better only because
more was tried for it. The test set is not looked at before every choice is made.
"""

import json
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from typing import Any

from torch import nn

from tpsgd.common.errors import TpsgdError
from tpsgd.common.units import columns
from tpsgd.comparison.arms import arm as arm_of
from tpsgd.comparison.arms import entry, scaled, with_controls, with_ridge
from tpsgd.comparison.compare import Comparison, check, compare, model_and_data, shared_settings
from tpsgd.comparison.fields import with_fields
from tpsgd.comparison.finished_runs import FinishedRuns, Values
from tpsgd.comparison.scores import as_json, target_of
from tpsgd.comparison.trials import (
    Progress,
    Trial,
    best_of_arm,
    in_short,
    rates_of,
    run_trials,
    split_training,
    task_of_arm,
)
from tpsgd.data import Data
from tpsgd.engine.arm import BACKPROP, Arm
from tpsgd.engine.lengths import with_lengths
from tpsgd.engine.settings import Settings
from tpsgd.rules import OF_NUMBERS, Rule, has_default_scale, scale_of
from tpsgd.saved.checkpoint import claimed

SCALES = (1, 1 / 4, 4)  # times the own one of the readout, which goes before equal ones
LEAKS = (0.1, 0.3, 1.0)
LENGTHS = ("epochs", "batch_size")


@dataclass
class ModelSearch:
    """The trials of each arm, the best of each, and the test of these; `print` shows tables."""

    trials: list[Trial]
    chosen: dict[str, Trial]  # by the name of the arm
    held_out: int  # samples
    test: Comparison
    searched: str  # the name of the arm that the search was for

    @property
    def best(self) -> Trial:
        """The best trial of the rule that was searched for."""
        return self.chosen[self.searched]

    @property
    def arm(self) -> Arm:
        """The arm that was searched for, with its best values: what was tested.

        `result.arm.train(factory, data.train, seed=0, ...)` trains it again, with the other
        settings of the search, and `epochs` and `batch_size` as in `result.test.settings`.
        """
        return next(r.arm for r in self.test.results if r.arm.name == self.searched)

    @property
    def remarks(self) -> list[str]:
        """Values at the end of what was tried: better ones may lie beyond."""
        lines = []
        for trial in self.chosen.values():
            for name, value in trial.values.items():
                of_arm = (t.values for t in self.trials if t.arm == trial.arm)
                tried = sorted({v[name] for v in of_arm if type(v[name]) in (int, float)})
                if len(tried) > 1 and value in (tried[0], tried[-1]):
                    end = "smallest" if value == tried[0] else "largest"
                    what = f"{in_short(value)} is the {end} {name}"
                    lines.append(f"{trial.arm}: {what} that was tried")
        return lines

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain values."""
        numbers = self.test.numbers
        trials = [as_json(asdict(t) | {"accuracy": t.accuracy}, numbers) for t in self.trials]
        chosen = {name: trial.values for name, trial in self.chosen.items()}
        return {
            "held_out": self.held_out,
            "trials": trials,
            "chosen": chosen,
            "test": self.test.as_dict(),
        }

    def __str__(self) -> str:
        names = list(dict.fromkeys(name for t in self.trials for name in t.values))
        rows = [self._row(trial, names) for trial in self.trials]
        held_out = "held-out R²" if self.test.numbers else "held-out %"
        table = columns([("rule", *names, held_out, "seconds", ""), *rows])
        failed = [f"\n{t.arm} ({t}) failed: {t.error}" for t in self.trials if t.error]
        return f"{table}{''.join(failed)}\n\ntest samples, with the values chosen (*):\n{self.test}"

    def _row(self, trial: Trial, names: list[str]) -> tuple[str, ...]:
        values = [in_short(trial.values[n]) if n in trial.values else "–" for n in names]
        shown = "failed" if trial.accuracy is None else f"{100 * trial.accuracy:.1f}"
        if self.test.numbers and trial.accuracy is not None:
            shown = f"{trial.accuracy:.3f}"
        best = "*" if trial is self.chosen.get(trial.arm) else ""
        return (trial.arm, *values, shown, f"{trial.seconds:.2f}", best)


def search(
    data: Data | Sequence[Any],
    factory: Callable[..., nn.Module],
    rule: str | Rule | Arm | Callable[..., Rule] = "readout-learned",
    *,
    fields: Mapping[str, Sequence[Any]] | None = None,
    rates: Sequence[float] | None = None,
    scales: Sequence[float] | None = None,
    leaks: Sequence[float] = (),
    ridge_head: bool = False,
    held_out: float = 0.2,
    restarts: int = 1,
    notes: Mapping[str, Any] | None = None,
    command: str = "",
    progress: Progress | None = None,
    **settings: Any,
) -> ModelSearch:
    """Choose values on held-out training samples, for a rule and its controls.

    Every combination of values is tried for the rule; for backprop and the frozen control, every
    combination of those that apply to them. Then each is trained on all training samples with
    its best values, and tested: the test samples have no part in the choice.

    Args:
        data: as for `compare`. Part of its training samples are held out.
        factory: makes a fresh model. With `leaks`, it is called with `leak=`, one of them.
        rule: a word of `tpsgd rules`, `FILE.py:FUNCTION`, a rule, an arm, or a function that makes
            a rule.
        fields: values to try for fields of the rule: `{"features": [64, 256]}`. They are arguments
            of its function, or fields of the rule and of its objective.
        rates: learning rates. Default: 0.0003 to 0.03, and 0.01 to 1 for `tpsgd.sgd`.
        scales: of a readout. Default: a fourth, one and four times the rule's own; `()`: none.
        leaks: of leaky recurrent cells. Default: that of the factory.
        ridge_head: solve the last layer by `tpsgd.ridge`, except under backprop.
        held_out: the share of training samples, or their number, to choose by.
        restarts: training runs per trial and for the test.
        notes: more settings for the record of the test, such as the model's name.
        command: the command that reproduces the search, for the record of the test.
        progress: called with (arm, training runs done, all training runs).
        **settings: those of `fit`, except `lr`; `epochs` and `batch_size` may be lists of values
            to try, for every arm. With `checkpoint`, training runs that have
            finished are in trials.jsonl, and a search that is resumed does not repeat them.

    Returns:
        The trials, what was `chosen`, and `test`, a comparison: `search.test.write(folder)`.

    Examples:
        >>> import tpsgd
        >>> digits = tpsgd.data.load("digits", max_train=200)
        >>> net = tpsgd.zoo.words.factory("mlp:16", digits.shape, 10)
        >>> result = search(digits, net, rates=[0.0001, 0.01], scales=[12], epochs=20)
        >>> result.best.values, len(result.trials)
        ({'rate': 0.01, 'scale': 12}, 6)
    """
    if "lr" in settings:
        raise TpsgdError("a search chooses the learning rate: leave lr out, or give rates=[...]")
    data = check(data, [rule], restarts, factory, settings.get("loss"))
    many = [name for name in LENGTHS if isinstance(settings.get(name), list | tuple)]
    lengths = {name: _numbers(name, settings.pop(name), int) for name in many}
    if empty := [name for name, values in lengths.items() if not values]:
        raise TpsgdError(f"{empty[0]} needs a value to try, or more, got an empty list")
    common = with_lengths(Settings.of("search", settings), data.train)
    settings |= {"epochs": common.epochs, "batch_size": common.batch_size}
    settings = {k: v for k, v in settings.items() if k != "checkpoint"}
    leaks = _numbers("leaks", leaks)
    make = partial(factory, leak=leaks[0]) if leaks else factory
    maker = entry(rule).make if isinstance(rule, str) else None
    if not isinstance(rule, str | Rule | Arm):
        rule, maker = _made(rule), rule
    searched = arm_of(rule, common.order, make)
    scale = scale_of(searched.rule)
    if target_of(data.train[1], common.loss).numbers and has_default_scale(searched.rule):
        scale = OF_NUMBERS
    if scales and not scale:
        raise TpsgdError(f"scales are for a readout, which {searched.name} is not: leave them out")
    if scales is None:
        scales = [scale * factor for factor in SCALES] if scale else []
    rates = _numbers("rates", rates_of(common.optimizer) if rates is None else rates)
    lists = {"rate": rates, "scale": _numbers("scales", scales), "leak": leaks, **lengths}
    if not isinstance(fields or {}, Mapping):
        raise TpsgdError(f"fields must be a dict of lists by their names, got {fields!r}")
    tried = {name: _by_word(name, values) for name, values in (fields or {}).items()}
    if repeated := tried.keys() & {"rate", *(name for name, values in lists.items() if values)}:
        raise TpsgdError(f"{min(repeated)} has a list of its own: leave it out of fields")
    lists |= {name: [*values] for name, values in tried.items()}

    def with_values(arm: Arm, values: Values) -> Arm:
        if of_rule := {name: tried[name][values[name]] for name in values if name in tried}:
            arm = with_fields(arm, of_rule, maker)
        arm = replace(arm, **{name: values[name] for name in LENGTHS if name in values})
        if "leak" in values and "leak" not in tried:
            arm = replace(arm, factory=partial(factory, leak=values["leak"]))
        if "scale" in values and "scale" not in tried:
            arm = scaled(arm, values["scale"])
        if "rate" in values:
            arm = replace(arm, lr=values["rate"])
        return with_ridge(arm, arm.factory or factory, settings) if ridge_head else arm

    arms = with_controls([searched])
    samples = split_training(data, held_out, common.seed)
    identity = shared_settings(common, arms) | {"ridge_head": ridge_head, "held_out": held_out}
    identity |= model_and_data(make, data) | {f"rule {a.name}": a.describe() for a in arms}
    tasks = [
        task_of_arm(with_values(a, values), values, samples, factory, restarts, settings)
        for a in arms
        for values in _grid(a, lists, ridge_head, tried.keys() if a.name == searched.name else ())
    ]
    trials = [task.trial for task in tasks]
    with claimed(common.checkpoint) as checkpoint:
        run_trials(tasks, FinishedRuns(checkpoint, identity), progress)
        chosen = {a.name: best_of_arm([t for t in trials if t.arm == a.name]) for a in arms}
        final = [with_values(a, chosen[a.name].values) for a in arms]
        if leaks:  # backprop, with which the others are compared, has the model of all arms
            make = partial(factory, leak=chosen[BACKPROP].values["leak"])
            final = [replace(a, factory=None) if a.name == BACKPROP else a for a in final]
        of_rule = chosen[searched.name].values
        settings |= {name: of_rule[name] for name in LENGTHS if name in of_rule}
        described = {**(notes or {}), **{f"chosen for {n}": str(t) for n, t in chosen.items()}}
        if checkpoint is not None:
            values = {name: trial.values for name, trial in chosen.items()}
            code = zlib.crc32(json.dumps(values, sort_keys=True).encode())
            settings["checkpoint"] = checkpoint.within(f"test-{code:08x}")
        record = compare(
            data, make, final, restarts=restarts, notes=described, command=command, **settings
        )
    return ModelSearch(trials, chosen, len(samples[1][1]), record, searched.name)


def _grid(
    arm: Arm, lists: Mapping[str, Sequence[Any]], ridge_head: bool, of_rule: Collection[str]
) -> Iterator[Values]:
    """All combinations of the values that make a difference to an arm."""
    solved = arm.optimizer is not None or (ridge_head and arm.control)
    matters = {
        "rate": not solved and arm.method is None,
        "scale": scale_of(arm.rule) is not None,
        "leak": True,
        **dict.fromkeys(LENGTHS, arm.method is None),
        **dict.fromkeys(of_rule, True),
    }
    names = [name for name, values in lists.items() if values and matters.get(name)]
    for values in product(*(lists[name] for name in names)):
        yield dict(zip(names, values, strict=True))


def _numbers(name: str, values: Sequence[Any], kind: Any = int | float) -> list[Any]:
    if isinstance(values, str) or not all(isinstance(v, kind) and v > 0 for v in values):
        words = "whole numbers" if kind is int else "numbers"
        raise TpsgdError(f"{name} must be a list of {words} above 0, got {values!r}")
    return list(dict.fromkeys(values))


def _by_word(name: str, values: Sequence[Any]) -> dict[Any, Any]:
    """Values to try by what stands for them in a record: themselves, or a name.

    A name that came before gets a number: normal codes of two deviations are two values.
    """
    if not isinstance(values, list | tuple) or not values:
        raise TpsgdError(f"the field {name} needs a list of values to try, got {values!r}")
    named: dict[Any, Any] = {}
    for v in values:
        if isinstance(v, bool | int | float | str | None):
            named[v] = v
            continue
        word = getattr(v, "name", str(v))
        named[f"{word} {len(named) + 1}" if word in named else word] = v
    return named


def _made(function: Any) -> Rule:
    """The rule that a function makes with its own values."""
    try:
        rule = function()
    except Exception as error:
        raise TpsgdError(f"rule must be a rule or a function that makes one: {error}") from error
    if not isinstance(rule, Rule):
        raise TpsgdError(f"a function of a rule must return one, got a {type(rule).__name__}")
    return rule
