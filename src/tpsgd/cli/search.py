"""`tpsgd search`: layers for the taps of a frozen backbone; with `--model` rate, scale and leak."""

import json
import shlex
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tpsgd
from tpsgd.cli import adapt, options
from tpsgd.cli.options import AsJson, Overwrite, option, setting
from tpsgd.cli.resuming import Resuming
from tpsgd.cli.rule_list import DEFAULT
from tpsgd.cli.terminal import watched_trials, write_then_show
from tpsgd.common.errors import TpsgdError
from tpsgd.common.files import write_whole
from tpsgd.common.output import output_folder, write_or_rescue
from tpsgd.common.units import size

if TYPE_CHECKING:
    from tpsgd.adapt import AdaptorSearch
    from tpsgd.comparison.search import Trial

RESULTS, HEATMAPS, TRIALS = "search.json", "heatmaps.png", "trials.jsonl"
LEAKY = ("rnn", "birnn")  # words of models whose cells leak
# A record, lines to print, and a function that writes further files into a folder: it returns their
# names for the JSON object, and a line about them.
SearchReport = tuple[dict[str, Any], list[str], Callable[[Path], tuple[dict[str, Any], str]]]
TRAIN_OPTIONS = {"rate": "--lr", "scale": "--readout-scale", "leak": "--leak"}


@dataclass(frozen=True)
class SearchedData(options.DataOptions):
    """Samples to train on."""

    data: str = setting(MISSING, f"{adapt.IMAGES} With --model: as for tpsgd train.")


@dataclass(frozen=True)
class SearchedLayers(adapt.BackboneAtTaps):
    """A backbone, and the layers to try on its taps."""

    convs: str | None = setting(None, "Numbers of convolutions to try.", show_default="0,1,2")
    dense: str | None = setting(None, "Numbers of dense layers to try.", show_default="0,1,2")
    top: int | None = setting(None, "Train only this many per tap: the best by score.", min=1)

    def grid(self) -> dict[str, Any]:
        """The arguments of `adapt.search` in this group."""
        words = {"convs": self.convs or "0,1,2", "dense": self.dense or "0,1,2"}
        numbers = {name: _numbers(f"--{name}", text, int) for name, text in words.items()}
        return {**numbers, "top": self.top}


@dataclass(frozen=True)
class SearchedModel:
    """A model, and what to try."""

    TITLE = "Model (instead of a backbone)"

    model: str | None = setting(None, options.MODELS)
    activation: str = setting("leaky-relu", "Of hidden layers; see: tpsgd train.")
    rates: str | None = setting(None, "Learning rates to try: 0.001,0.003,0.01.")
    scales: str | None = setting(None, "readout: scales to try; 12 is its own: 3,12,48.")
    leaks: str | None = setting(None, "rnn: leaks to try: 0.1,0.3,1.")

    def with_leak(self, leak: float | None) -> options.Model:
        """The model with one of the leaks."""
        return options.Model(str(self.model), self.activation, leak=leak)

    def lists(self) -> dict[str, list[float]]:
        """The values to try that were named."""
        from tpsgd.comparison.search import LEAKS

        leaky = str(self.model).partition(":")[0] in LEAKY
        if self.leaks and not leaky:
            raise TpsgdError(f"--leaks is for models such as rnn:512, not for {self.model}")
        words = {"rates": self.rates, "scales": self.scales, "leaks": self.leaks}
        lists = {name: _numbers(f"--{name}", text, float) for name, text in words.items() if text}
        return ({"leaks": list(LEAKS)} if leaky else {}) | lists


@dataclass(frozen=True)
class SearchTraining:
    """How to train, on features or from scratch."""

    TITLE = "Training"

    epochs: int | None = setting(
        None, "Epochs per block.", show_default="8, more for few samples; with --model 10", min=1
    )
    batch_size: int | None = setting(
        None, "Samples per step.", show_default="32; with --model 128", min=1
    )
    lr: float | None = setting(None, "Learning rate of layers on a backbone.", show_default="0.001")
    seed: int = setting(0, "Seed of weights, class codes and sample order.", min=0, max=2**63 - 1)

    def settings(self, epochs: int | None, batch_size: int) -> dict[str, Any]:
        """The settings of `fit`, with these defaults."""
        chosen = epochs if self.epochs is None else self.epochs
        group = options.Training(chosen, self.batch_size or batch_size, self.lr, self.seed)
        return group.settings()


@options.grouped
def search(
    data: SearchedData,
    model: SearchedModel,
    backbone: SearchedLayers,
    training: SearchTraining,
    machine: options.Machine,
    resuming: Resuming,
    rule: Annotated[
        str | None,
        option("A rule; see: tpsgd rules.", show_default=f"tpsgd-l2; with --model {DEFAULT}"),
    ] = None,
    restarts: Annotated[int, option("Training runs per configuration.", min=1)] = 1,
    memory: Annotated[str | None, option("The most memory of a training run: 64MB, 1.5GB.")] = None,
    out: Annotated[Path, option("Folder for the results.")] = Path("tpsgd-search"),
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Find layers for the taps of a frozen backbone, or with --model the rate, scale and leak.

    Held-out training samples decide. On a backbone, layers whose plan is above --memory are not
    trained; trials that the folder of --checkpoint holds, or else that of --out, are not repeated
    (--overwrite replaces the results, not the trials). With --model, the best values are tested
    once, with backprop and the frozen control; --checkpoint keeps its trials.
    """
    read = (data.data, model.model, backbone.backbone, backbone.weights)
    options.keep_apart(*read, out=out, checkpoint=resuming.checkpoint)
    if model.model is not None and (named := options.changed(backbone)):
        raise TpsgdError(f"--model searches no backbone: leave {', '.join(named)} out")
    if model.model is None and (named := options.changed(model)):
        raise TpsgdError(f"{', '.join(named)} needs --model, such as --model rnn:256")
    settings = options.MemoryOptions(memory).settings() | {"restarts": restarts}
    if model.model is not None:
        if training.lr is not None:
            raise TpsgdError("a search chooses the learning rate: leave --lr out, or name --rates")
        settings |= training.settings(10, 128) | options.settings_of(machine, resuming)
        shell = vars(data) | vars(machine) | {"memory": memory}
        run = partial(_search_model, data, model, rule or DEFAULT, settings, shell)
        interruptible = resuming.interruptible()
    else:
        adapt.check_rule(rule := rule or "tpsgd-l2")
        settings |= training.settings(None, 32) | backbone.grid()
        settings |= {"folder": resuming.settings().get("checkpoint", out)}
        if rule == "backprop":
            settings["method"] = tpsgd.fit_backprop
        else:
            settings["rule"] = tpsgd.rules.ALL[rule].make()
        run = partial(_search_layers, data, backbone, machine, settings)
        interruptible = resuming.interruptible("the same command continues")
    with interruptible, output_folder(out, (RESULTS,), overwrite or resuming.goes_on) as folder:
        record, lines, write = run()

        def write_all(folder: Path) -> tuple[dict[str, Any], str]:
            write_whole(folder / RESULTS, json.dumps(record, indent=1).encode())
            return write(folder)

        def show(written: tuple[dict[str, Any], str] | None) -> None:
            names, *line = written or ({},)
            print(json.dumps(record | names) if as_json else "\n".join([*lines, *line]), flush=True)

        write_then_show(partial(write_or_rescue, write_all, folder), show)


def _numbers(name: str, text: str, kind: Callable[[str], Any]) -> list[Any]:
    """The numbers of `0.1,0.3,1`; whole ones, 0 or more, if they are of the kind `int`."""
    words = options.listed(text)
    try:
        if kind is int and not all(word.isascii() and word.isdigit() for word in words):
            raise ValueError
        return [kind(word) for word in words]
    except ValueError:
        kinds = "whole numbers such as 0,1,2" if kind is int else "numbers such as 0.1,0.3,1"
        raise TpsgdError(f"{name} takes {kinds}, got {text!r}") from None


# ---- layers for the taps of a backbone -----------------------------------------------------------


def _search_layers(
    data: SearchedData,
    backbone: SearchedLayers,
    machine: options.Machine,
    settings: dict[str, Any],
) -> SearchReport:
    """Search layers for the taps of a backbone."""
    net, taps = backbone.load(machine)
    samples, trials = data.load(settings["seed"]), settings["folder"]
    trials = getattr(trials, "folder", trials)
    with watched_trials(trials) as progress:
        result = tpsgd.adapt.search(
            net, samples.train, taps=taps, classes=samples.classes, progress=progress, **settings
        )
    record = result.as_dict() | {"backbone": net.name}
    record |= options.provenance_of(samples, machine.device)

    def write(folder: Path) -> tuple[dict[str, Any], str]:
        files = [folder / RESULTS, result.plot(folder / HEATMAPS), trials / TRIALS]
        names = ", ".join(file.name for file in files if file.parent == folder)
        return {"files": list(map(str, files))}, f"{names}: {folder}"

    lines = [f"{result}\n", *(textwrap.fill(line, 80) for line in _best_layers(result))]
    return record, lines, write


def _best_layers(result: "AdaptorSearch") -> Iterator[str]:
    """The best layers, the control, and how well the score predicts accuracy."""
    best, taps = result.best(), dict.fromkeys(row.tap for row in result.rows)
    layers: Any = best.layers
    samples = f"{result.settings['held_out']:,} held-out samples"
    yield f"best: {best}: {best.accuracy:.1%} of {samples}, planned {size(best.planned_bytes)}"
    chosen = f"--tap {best.tap} --convs {layers.convs} --dense {layers.dense}"
    yield f"to train it: tpsgd adapt ... {chosen}"
    if (probe := result.control()) is not None:
        yield f"control: {probe}: {probe.accuracy:.1%}"
    correlations = [_signed(result.rank_correlation())]
    if len(taps) > 1:
        correlations += [f"{tap} {_signed(result.rank_correlation(tap))}" for tap in taps]
    yield f"rank correlation of score and accuracy: {', '.join(correlations)}"


def _signed(r: float | None) -> str:
    return "unknown" if r is None else f"{r:+.2f}"


# ---- rate, scale and leak of a model -------------------------------------------------------------


def _search_model(
    data: SearchedData,
    model: SearchedModel,
    rule: str,
    settings: dict[str, Any],
    shell: dict[str, Any],
) -> SearchReport:
    """Choose values for a model, test it once with its controls, and say how to train it."""
    from tpsgd.comparison.arms import entry
    from tpsgd.nets.blocks import split

    entry(rule)
    samples, lists = data.load(settings["seed"]), model.lists()
    factories = {  # made beforehand: `make` is called with the seed of a restart
        leak: model.with_leak(leak).factory_for(samples) for leak in (None, *lists.get("leaks", ()))
    }
    head = factories[None][1]

    def make(leak: float | None = None) -> Any:
        return factories[leak][0]()

    checkpoint = settings.get("checkpoint")
    with watched_trials(checkpoint and checkpoint.folder) as progress:
        result = tpsgd.search(
            samples, make, rule, **lists, ridge_head=head == "ridge",
            notes=model.with_leak(None).record(head), command=options.command_line(),
            progress=progress, **settings,
        )  # fmt: skip
        if result.test.interrupted:
            raise KeyboardInterrupt
    command = _train_command(shell, model, rule, result.best, settings)
    call = _python_call(model, rule, result.best, settings, len(split(make())), head)
    record = result.as_dict() | {"command": command, "python": call}
    best = result.best
    accuracy = f"{best.accuracy:.1%} of {result.held_out:,} held-out samples"
    first = f"best: {best.arm}, {best}: {accuracy}" if best.values else f"{best.arm}: {accuracy}"
    lines = [f"{result}\n", *(textwrap.fill(line, 80) for line in (first, *result.remarks))]
    lines += [f"to train it: {command}", *([f"in Python:   {call}"] if call else [])]

    def write(folder: Path) -> tuple[dict[str, Any], str]:
        page = str(result.test.write(folder))
        return {"report": page}, f"{RESULTS}, report: {page}"

    return record, lines, write


def exact(number: float) -> str:
    """A number in few digits, or in all that it takes to be the same number.

    Examples:
        >>> exact(12.0), exact(0.00123456789)
        ('12', '0.00123456789')
    """
    return short if float(short := f"{number:g}") == number else repr(float(number))


def _train_command(
    shell: dict[str, Any], model: SearchedModel, rule: str, best: "Trial", settings: dict[str, Any]
) -> str:
    """`tpsgd train` with the values that were chosen, and with the options of the search."""
    words = ["tpsgd", "train", "--data", shell["data"], "--model", str(model.model), "--rule", rule]
    for name, value in best.values.items():
        words += [TRAIN_OPTIONS[name], exact(value)]
    usual = {"data": shell["data"], "seed": 0, "activation": options.Model().activation}
    shell = shell | {name: settings[name] for name in ("epochs", "batch_size", "seed")}
    for name, value in (shell | {"activation": model.activation}).items():
        if value is not None and value != usual.get(name):
            words += [f"--{name.replace('_', '-')}", str(value)]
    return shlex.join(words)


def _python_call(
    model: SearchedModel,
    rule: str,
    best: "Trial",
    settings: dict[str, Any],
    blocks: int,
    head: str,
) -> str:
    """The calls that make and train the model with the values that were chosen; "" for backprop."""
    if rule not in tpsgd.rules.ALL:
        return ""
    leak = f", leak={best.values['leak']!r}" if "leak" in best.values else ""
    sizes = f"data.shape, len(data.classes), {model.activation!r}{leak}"
    make = f"tpsgd.zoo.words.factory({model.model!r}, {sizes})()"
    name = f"tpsgd.rules.ALL[{rule!r}].make()"
    if "scale" in best.values:
        learned = "True, " if rule == "readout-learned" else ""
        name = f"tpsgd.rules.readout({learned}scale={exact(best.values['scale'])}, calibrate=True)"
    words = [f"rule={name}"]
    if "rate" in best.values:
        words += [f"lr={exact(best.values['rate'])}"]
    if head == "ridge" and "rate" in best.values:
        words += [f"optimizer=[*[torch.optim.Adam] * {blocks - 1}, tpsgd.ridge()]"]
    words += [f"{name}={settings[name]}" for name in ("epochs", "batch_size", "seed")]
    return f"tpsgd.fit({make}, data.train, {', '.join(words)})"
