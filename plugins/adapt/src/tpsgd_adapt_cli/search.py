"""`tpsgd search`: layers for the taps of a frozen backbone; with `--model` values of a rule."""

import json
import shlex
import textwrap
from collections.abc import Callable
from dataclasses import MISSING, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import tpsgd
from tpsgd.cli import options
from tpsgd.cli.options import AsJson, Overwrite, option, setting
from tpsgd.cli.resuming import Resuming
from tpsgd.cli.rule_list import DEFAULT
from tpsgd.cli.terminal import watched_trials, write_then_show
from tpsgd.common.errors import TpsgdError
from tpsgd.common.files import write_whole
from tpsgd.common.output import output_folder, write_or_rescue
from tpsgd.common.units import size
from tpsgd_adapt_cli import adapt

RESULTS, HEATMAPS, TRIALS = "search.json", "heatmaps.png", "trials.jsonl"
LEAKY = ("rnn", "birnn")  # words of models whose cells leak
TRAIN_OPTIONS = {"rate": "lr", "scale": "readout_scale", "leak": "leak"}
NUMBERS = {int: "whole numbers such as 0,1,2", float: "numbers such as 0.1,0.3,1"}
# A record, lines to print, and a function that writes further files into a folder: it returns their
# names for the JSON object, and a line about them.
SearchReport = tuple[dict[str, Any], list[str], Callable[[Path], tuple[dict[str, Any], str]]]


@dataclass(frozen=True)
class SearchedData:
    """Samples to train on."""

    TITLE = "Data"

    data: str = setting(MISSING, f"{adapt.IMAGES} With --model: as for tpsgd train.")
    max_train: int | None = setting(None, "Use only this many training samples.", min=1)
    task: str | None = setting(
        None, "With --model: labels are classes, or numbers to predict.",
        choices=("classification", "regression"), show_default="classification",
    )  # fmt: skip
    label: str | None = setting(None, "FILE.csv: the label column; of numbers, perhaps several.")
    drop: str | None = setting(None, "FILE.csv: columns to leave out: id,time.")
    impute: str | None = setting(None, "FILE.csv: fill blank cells by mean or median.")

    def load(self, seed: int) -> "tpsgd.data.Data":
        """The data set."""
        return options.DataOptions(**vars(self)).load(seed)


@dataclass(frozen=True)
class SearchedLayers(adapt.BackboneAtTaps):
    """A backbone, and the layers to try on its taps."""

    convs: str = setting("0,1,2", "Numbers of convolutions to try.")
    dense: str = setting("0,1,2", "Numbers of dense layers to try.")
    top: int | None = setting(None, "Train only this many per tap: the best by score.", min=1)


@dataclass(frozen=True)
class SearchedModel:
    """A model, and what to try."""

    TITLE = "Model (instead of a backbone)"

    model: str | None = setting(None, options.MODELS)
    rates: str | None = setting(None, "Learning rates to try: 0.001,0.003,0.01.")
    scales: str | None = setting(None, "readout: scales to try; 12 is its own: 3,12,48.")
    leaks: str | None = setting(None, "rnn: leaks to try: 0.1,0.3,1.")
    fields: str | None = setting(
        None, "Values to try, in quotes: 'features=64,256 epochs=5,10 batch_size=32,128'."
    )

    def lists(self) -> dict[str, list[float]]:
        """The values to try that were named, and the default leaks of a model that has some."""
        from tpsgd.comparison.search import LEAKS

        leaky = str(self.model).partition(":")[0] in LEAKY
        if self.leaks and not leaky:
            raise TpsgdError(f"--leaks is for models such as rnn:512, not for {self.model}")
        words = {"rates": self.rates, "scales": self.scales, "leaks": self.leaks}
        lists = {name: _numbers(name, text, float) for name, text in words.items() if text}
        return ({"leaks": list(LEAKS)} if leaky else {}) | lists


@dataclass(frozen=True)
class SearchTraining(adapt.LayerTraining):
    """How to train, on features or from scratch."""

    epochs: int | None = setting(
        None, "Epochs per block.", show_default="as of tpsgd adapt; with --model as of train", min=1
    )
    batch_size: int | None = setting(
        None, "Samples per step.", show_default="32; with --model as of train", min=1
    )
    lr: float | None = setting(None, "Learning rate of layers on a backbone.", show_default="0.001")


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
        option("A rule, or FILE.py:FUNCTION; see: tpsgd rules.", show_default=DEFAULT),
    ] = None,
    restarts: Annotated[int, option("Training runs per configuration.", min=1)] = 1,
    memory: Annotated[str | None, option("The most memory of a training run: 64MB, 1.5GB.")] = None,
    out: Annotated[Path, option("Folder for the results.")] = Path("tpsgd-search"),
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Find layers for the taps of a frozen backbone, or with --model values of a rule.

    Held-out training samples decide. On a backbone, layers whose plan is above --memory are not
    trained; trials that the folder of --checkpoint holds, or else that of --out, are not repeated
    (--overwrite replaces the results, not the trials). With --model, the best values are tested
    once, with backprop and the frozen control; --checkpoint keeps its trials.
    """
    read = (data.data, model.model, backbone.backbone, backbone.weights)
    options.keep_apart(*read, out=out, checkpoint=resuming.checkpoint)
    if model.model is not None and (named := options.changed(backbone)):
        raise TpsgdError(f"--model searches no backbone: leave {', '.join(named)} out")
    if model.model is None and (named := options.changed(model) + ["--task"] * bool(data.task)):
        raise TpsgdError(f"{', '.join(named)} needs --model, such as --model rnn:256")
    settings: dict[str, Any] = {"restarts": restarts} | ({"memory": memory} if memory else {})
    if model.model is not None:
        if training.lr is not None:
            raise TpsgdError("a search chooses the learning rate: leave --lr out, or name --rates")
        settings |= training.settings(batch_size=None) | options.settings_of(machine, resuming)
        run = partial(_search_model, data, model, rule or DEFAULT, machine, settings)
        interruptible = resuming.interruptible()
    else:
        settings |= training.settings() | adapt.settings_of_rule(rule or DEFAULT)
        settings |= {"folder": resuming.settings().get("checkpoint", out), "top": backbone.top}
        run = partial(_search_layers, data, backbone, rule or DEFAULT, machine, settings)
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


def _command(name: str, *choices: dict[str, Any]) -> str:
    """The command that trains by these choices; what is None has not been chosen."""
    chosen = {k: v for choice in choices for k, v in choice.items() if v is not None}
    words = [word for k, v in chosen.items() for word in (f"--{k.replace('_', '-')}", str(v))]
    return shlex.join(["tpsgd", name, *words])


def _numbers(name: str, text: str, kind: type) -> list[Any]:
    """The numbers of `0.1,0.3,1`."""
    try:
        return [kind(word) for word in options.listed(text)]
    except ValueError:
        raise TpsgdError(f"--{name} takes {NUMBERS[kind]}, got {text!r}") from None


def _search_layers(
    data: SearchedData,
    backbone: SearchedLayers,
    rule: str,
    machine: options.Machine,
    settings: dict[str, Any],
) -> SearchReport:
    """Search layers for the taps of a backbone, and say how to train the best ones."""
    grid = {name: _numbers(name, getattr(backbone, name), int) for name in ("convs", "dense")}
    net, taps = backbone.load(machine)
    samples, trials = data.load(settings["seed"]), settings["folder"]
    trials = getattr(trials, "folder", trials)
    with watched_trials(trials) as progress:
        result = tpsgd.adapt.search(
            net, samples.train, taps=taps, classes=samples.classes, progress=progress, **grid,
            **settings,
        )  # fmt: skip
    best, layers = result.best(), vars(result.best().layers)
    train = _command(
        "adapt", {"data": data.data, "max_train": data.max_train},
        {name: getattr(backbone, name) for name in ("backbone", "weights", "quantize")},
        {"tap": best.tap, "convs": layers["convs"], "dense": layers["dense"], "rule": rule},
        {name: result.settings[name] for name in ("epochs", "batch_size")},
        {name: settings.get(name) for name in ("lr", "seed")}, vars(machine),
    )  # fmt: skip
    record = result.as_dict() | {"backbone": net.name, "to_train": train}
    record |= options.provenance_of(samples, machine.device)

    def write(folder: Path) -> tuple[dict[str, Any], str]:
        files = [folder / RESULTS, result.plot(folder / HEATMAPS), trials / TRIALS]
        names = ", ".join(file.name for file in files if file.parent == folder)
        return {"files": list(map(str, files))}, f"{names}: {folder}"

    held_out = f"{result.settings['held_out']:,} held-out samples"
    lines = [
        f"best: {best}: {best.accuracy:.1%} of {held_out}, planned {size(best.planned_bytes)}",
    ]
    if (probe := result.control()) is not None:
        lines.append(f"control: {probe}: {probe.accuracy:.1%}")
    correlations = {"": result.rank_correlation()}
    if len(taps) > 1:
        correlations |= {f"{tap} ": result.rank_correlation(tap) for tap in taps}
    words = [f"{tap}{'unknown' if r is None else f'{r:+.2f}'}" for tap, r in correlations.items()]
    lines.append(f"rank correlation of score and accuracy: {', '.join(words)}")
    text = [f"{result}\n", *(textwrap.fill(line, 80) for line in lines)]
    return record, [*text, f"to train it: {train}"], write


def _search_model(
    data: SearchedData,
    model: SearchedModel,
    rule: str,
    machine: options.Machine,
    settings: dict[str, Any],
) -> SearchReport:
    """Choose values for a model, test it once with its controls, and say how to train it."""
    from tpsgd.comparison.arms import entry
    from tpsgd.comparison.search import LENGTHS

    entry(rule)
    samples, lists = data.load(settings["seed"]), model.lists()
    tried = options.fields_of(model.fields or "")
    settings |= {name: tried.pop(name) for name in LENGTHS if name in tried}
    settings |= {"loss": "mse"} if samples.targets else {}
    leaks = (None, *lists.get("leaks", ()))
    models = {leak: options.Model(str(model.model), leak=leak) for leak in leaks}
    # made beforehand: `make` is called with the seed of a restart
    factories = {leak: words.factory_for(samples) for leak, words in models.items()}
    head = factories[None][1]

    def make(leak: float | None = None) -> Any:
        return factories[leak][0]()

    checkpoint = settings.get("checkpoint")
    with watched_trials(checkpoint and checkpoint.folder) as progress:
        result = tpsgd.search(
            samples, make, rule, **lists, fields=tried, ridge_head=head == "ridge",
            notes=models[None].record(head), command=options.command_line(), progress=progress,
            **settings,
        )  # fmt: skip
        if result.test.interrupted:
            raise KeyboardInterrupt
    best = result.best
    of_rule = " ".join(f"{n}={_word(v)}" for n, v in best.values.items() if n in tried)
    command = _command(
        "train", {TRAIN_OPTIONS[n]: repr(v) for n, v in best.values.items() if n in TRAIN_OPTIONS},
        vars(data), {"model": model.model, "rule": rule, "fields": of_rule or None}, vars(machine),
        {name: settings.get(name) for name in ("memory", "seed")},
        {name: result.test.settings[name] for name in LENGTHS},
    )  # fmt: skip
    record = result.as_dict() | {"command": command}
    shown = f"R² {best.accuracy:.3f}" if result.test.numbers else f"{best.accuracy:.1%}"
    accuracy = f"{shown} of {result.held_out:,} held-out samples"
    first = f"best: {best.arm}, {best}: {accuracy}" if best.values else f"{best.arm}: {accuracy}"
    lines = [f"{result}\n", *(textwrap.fill(line, 80) for line in (first, *result.remarks))]

    def write(folder: Path) -> tuple[dict[str, Any], str]:
        page = str(result.test.write(folder))
        return {"report": page}, f"{RESULTS}, report: {page}"

    lines.append(f"to train it: {command}")
    return record, lines, write


def _word(value: Any) -> str:
    """A value of `--fields`."""
    return value if isinstance(value, str) else json.dumps(value)
