"""`tpsgd search --model`: rate, scale and leak of a whole model; a grid, then one test."""

import json
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tpsgd
from tpsgd.cli import options
from tpsgd.cli.options import setting
from tpsgd.cli.resuming import Resuming
from tpsgd.cli.terminal import watched_trials, write_then_show
from tpsgd.errors import TpsgdError
from tpsgd.files import write_whole
from tpsgd.output import write_or_rescue

if TYPE_CHECKING:
    from tpsgd.comparison.search import ModelSearch, Trial

OPTIONS = {"rate": "--lr", "scale": "--readout-scale", "leak": "--leak"}
ONLY_IN_SHELL = ("schedule", "loss", "optimizer", "blocks", "precision", "augment")
LEAKY = ("rnn", "birnn")  # words of models whose cells leak


@dataclass(frozen=True)
class SearchedModel(options.Model):
    """A model, and what to try."""

    TITLE = "Model (instead of a backbone)"

    model: str | None = setting(None, options.MODELS)  # type: ignore[assignment]
    rates: str | None = setting(None, "Learning rates to try: 0.001,0.003,0.01.")
    scales: str | None = setting(None, "readout: scales to try; 12 is its own: 3,12,48.")
    leaks: str | None = setting(None, "rnn: leaks to try: 0.1,0.3,1.")
    held_out: float = setting(0.2, "Share of the training samples to choose by.")

    @property
    def leaky(self) -> bool:
        """Whether the leak of its cells can be chosen."""
        return str(self.model).partition(":")[0] in LEAKY and self.leak is None

    def lists(self) -> dict[str, list[float]]:
        """The values to try that were named."""
        from tpsgd.comparison.search import LEAKS

        if self.leaks and not self.leaky:
            raise TpsgdError(f"--leaks is for models such as rnn:512 without --leak: {self.model}")
        words = {"rates": self.rates, "scales": self.scales, "leaks": self.leaks}
        lists = {name: numbers(f"--{name}", text) for name, text in words.items() if text}
        return ({"leaks": list(LEAKS)} if self.leaky else {}) | lists


def numbers(option: str, text: str) -> list[float]:
    """The numbers of `0.1,0.3,1`."""
    try:
        return [float(word) for word in options.listed(text)]
    except ValueError:
        raise TpsgdError(f"{option} takes numbers such as 0.1,0.3,1, got {text!r}") from None


@dataclass(frozen=True)
class Searched:
    """What the command line asks for: the groups of options, the rule, and how often to train."""

    data: options.Data
    model: SearchedModel
    training: options.Training
    groups: tuple[Any, ...]
    resuming: Resuming
    rule: str
    restarts: int

    def settings(self) -> dict[str, Any]:
        """The settings of `fit`."""
        if self.training.lr is not None:
            raise TpsgdError("a search chooses the learning rate: leave --lr out, or name --rates")
        defaults = {"epochs": 10, "batch_size": 128, "schedule": self.training.chosen_schedule}
        return defaults | options.settings_of(self.training, self.model, *self.groups)


def search_model(searched: Searched, folder: Path, as_json: bool) -> None:
    """Choose values for a model, test it once with its controls, and say how to train it."""
    from tpsgd.comparison.arms import entry

    entry(searched.rule)
    settings = searched.settings()
    result, commands = _search(searched, settings)
    record = result.as_dict() | commands

    def write(folder: Path) -> Path:
        write_whole(folder / "search.json", json.dumps(record, indent=1).encode())
        return result.test.write(folder)

    def show(page: Path | None) -> None:
        if as_json:
            print(json.dumps(record | {"report": page and str(page)}), flush=True)
            return
        print(f"{result}\n")
        for line in _conclusion(result):
            print(textwrap.fill(line, 80))
        print(f"to train it: {commands['command']}", flush=True)
        if commands["python"]:
            print(f"in Python:   {commands['python']}", flush=True)
        if page is not None:
            print(f"search.json, report: {page}", flush=True)

    write_then_show(partial(write_or_rescue, write, folder), show)


def _search(searched: Searched, settings: dict[str, Any]) -> "tuple[ModelSearch, dict[str, str]]":
    """The search, and how to train with what it has chosen, in the shell and in Python."""
    from tpsgd.nets.blocks import split

    data, model, training = searched.data, searched.model, searched.training
    samples, lists = data.load(training.seed), model.lists()
    options.warn_of_loss(training, samples)
    factories = {  # made beforehand: `make` is called with the seed of a restart
        leak: replace(model, leak=leak).factory_for(samples)
        for leak in (model.leak, *lists.get("leaks", ()))
    }
    head = factories[model.leak][1]

    def make(leak: float | None = model.leak) -> Any:
        return factories[leak][0]()

    with watched_trials(searched.resuming.checkpoint) as progress:
        result = tpsgd.search(
            samples, make, searched.rule, **lists, ridge_head=head == "ridge",
            held_out=model.held_out, restarts=searched.restarts, notes=model.record(head),
            command=options.command_line(), progress=progress, **settings,
            **searched.resuming.settings(),
        )  # fmt: skip
        if result.test.interrupted:
            raise KeyboardInterrupt
    lengths = {name: settings[name] for name in ("epochs", "batch_size")}
    groups = data, model, replace(training, **lengths), *searched.groups
    rule = searched.rule
    return result, {
        "command": _command(groups, rule, result.best),
        "python": _call(model, rule, result.best, settings, len(split(make())), head),
    }


def _conclusion(result: "ModelSearch") -> Iterator[str]:
    best = result.best
    accuracy = f"{best.accuracy:.1%} of {result.held_out:,} held-out samples"
    yield f"best: {best.arm}, {best}: {accuracy}" if best.values else f"{best.arm}: {accuracy}"
    yield from result.remarks


def exact(number: float) -> str:
    """A number in few digits, or in all that it takes to be the same number.

    Examples:
        >>> exact(12.0), exact(0.00123456789)
        ('12', '0.00123456789')
    """
    return short if float(short := f"{number:g}") == number else repr(float(number))


def _command(groups: tuple[Any, ...], rule: str, best: "Trial") -> str:
    """`tpsgd train` with the values that were chosen, and with the options of the search."""
    values = {name: value for group in groups for name, value in vars(group).items()}
    usual = vars(options.Data()) | vars(options.Model()) | vars(options.FromScratch())
    words = ["tpsgd", "train", "--data", values["data"], "--model", values["model"], "--rule", rule]
    for name, value in best.values.items():
        words += [OPTIONS[name], exact(value)]
    only_searched = ("data", "model", "rates", "scales", "leaks", "held_out", "lr")
    for name, value in values.items():
        if name not in only_searched and value is not None and value != usual.get(name):
            words += [f"--{name.replace('_', '-')}", str(value)]
    return shlex.join(words)


def _call(
    model: SearchedModel,
    rule: str,
    best: "Trial",
    settings: dict[str, Any],
    blocks: int,
    head: str,
) -> str:
    """The calls that make and train the model with the values that were chosen.

    Empty if the search had other settings, which only the command for the shell has.
    """
    if any(settings.get(name) for name in ONLY_IN_SHELL) or rule not in tpsgd.rules.ALL:
        return ""
    cells = {"init": model.init, "leak": best.values.get("leak", model.leak)}
    named = [f", {name}={value!r}" for name, value in cells.items() if value is not None]
    sizes = f"data.shape, len(data.classes), {model.activation!r}{''.join(named)}"
    make = f"tpsgd.zoo.words.factory({model.model!r}, {sizes})()"
    name = f"tpsgd.rules.ALL[{rule!r}].make()"
    if "scale" in best.values:
        learned = "True, " if rule == "readout-learned" else ""
        name = f"tpsgd.rules.readout({learned}scale={exact(best.values['scale'])}, calibrate=True)"
    words = [f"epochs={settings['epochs']}", f"batch_size={settings['batch_size']}"]
    words += [f"seed={settings['seed']}"]
    rate = f"lr={exact(best.values['rate'])}" if "rate" in best.values else ""
    if head == "ridge" and rate:
        rate += f", optimizer=[*[torch.optim.Adam] * {blocks - 1}, tpsgd.ridge()]"
    words = [f"rule={name}", *filter(None, [rate]), *words]
    return f"tpsgd.fit({make}, data.train, {', '.join(words)})"
