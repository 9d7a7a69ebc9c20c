"""`tpsgd search`: which layers, on which taps of a frozen backbone; a grid. Or `--model`."""

import json
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tpsgd
from tpsgd.cli import adapt, options
from tpsgd.cli.options import AsJson, Overwrite, option, setting
from tpsgd.cli.resuming import Resuming
from tpsgd.cli.rule_list import DEFAULT
from tpsgd.cli.search_model import Searched, SearchedModel, search_model
from tpsgd.cli.terminal import watched_trials, write_then_show
from tpsgd.errors import TpsgdError
from tpsgd.files import write_whole
from tpsgd.output import output_folder, write_or_rescue
from tpsgd.units import size

if TYPE_CHECKING:
    from tpsgd.adapt import Search

RESULTS, HEATMAPS = "search.json", "heatmaps.png"
TRIALS = "trials.jsonl"  # the finished trials


@dataclass(frozen=True)
class Samples(options.Data):
    """Samples to train on."""

    data: str = setting(MISSING, f"{adapt.IMAGES} With --model: as for tpsgd train.")


@dataclass(frozen=True)
class SearchTraining(options.Training):
    """How to train, on features or from scratch."""

    epochs: int | None = setting(
        None, "Epochs per block.", show_default="8, more for few samples; with --model 10", min=1
    )
    batch_size: int | None = setting(  # type: ignore[assignment]
        None, "Samples per step.", show_default="32; with --model 128", min=1
    )


@options.grouped
def search(
    data: Samples,
    model: SearchedModel,
    backbone: adapt.BackboneAtTaps,
    training: SearchTraining,
    memory: options.Memory,
    machine: options.Machine,
    resuming: Resuming,
    rule: Annotated[
        str | None,
        option("A rule; see: tpsgd rules.", show_default=f"tpsgd-l2; with --model {DEFAULT}"),
    ] = None,
    convs: Annotated[
        str | None, option("Numbers of convolutions to try.", show_default="0,1,2")
    ] = None,
    dense: Annotated[
        str | None, option("Numbers of dense layers to try.", show_default="0,1,2")
    ] = None,
    restarts: Annotated[int, option("Training runs per configuration.", min=1)] = 1,
    top: Annotated[
        int | None, option("Train only this many per tap: the best by score.", min=1)
    ] = None,
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
    again = overwrite or resuming.goes_on
    if model.model is not None:
        only = {"--convs": convs, "--dense": dense, "--top": top}
        refused = options.changed(backbone) + [name for name in only if only[name] is not None]
        if refused:
            raise TpsgdError(f"--model searches no backbone: leave {', '.join(refused)} out")
        chosen, groups = rule or DEFAULT, (memory, machine)
        searched = Searched(data, model, training, groups, resuming, chosen, restarts)
        with resuming.interruptible(), output_folder(out, (RESULTS,), again) as folder:
            search_model(searched, folder, as_json)
        return
    if refused := options.changed(model):
        raise TpsgdError(f"{', '.join(refused)} needs --model, such as --model rnn:256")
    rule = rule or "tpsgd-l2"
    adapt.check_rule(rule)
    if training.augment is not None:
        raise TpsgdError("a search trains on features, not on images: leave --augment out")
    numbers = {"convs": _numbers("--convs", convs), "dense": _numbers("--dense", dense)}
    settings = options.settings_of(training, memory) | adapt.settings_of_rule(rule, training)
    settings.setdefault("batch_size", 32)
    trials = _trials_folder(resuming, out)
    interruptible = resuming.interruptible("the same command continues")
    with interruptible, output_folder(out, (RESULTS,), again) as folder:
        net, taps = backbone.load(machine)
        samples = data.load(training.seed)
        options.warn_of_loss(training, samples)
        with watched_trials(trials) as progress:
            result = tpsgd.adapt.search(
                net, samples.train, taps=taps, **numbers, restarts=restarts, top=top,
                classes=samples.classes, folder=trials, progress=progress, **settings,
            )  # fmt: skip
        record = result.as_dict() | {"backbone": net.name}
        record |= options.provenance_of(samples, machine.device)
        write = partial(write_or_rescue, partial(_write, result, record), folder)
        write_then_show(write, partial(_show, result, record, trials, as_json))


def _trials_folder(resuming: Resuming, out: Path) -> Path:
    """Where finished trials are kept; trials of an earlier search are not added to unasked."""
    resuming.settings()  # refuses --resume alone
    if resuming.checkpoint is None:
        return out
    folder = resuming.checkpoint.expanduser()
    if (folder / TRIALS).exists() and not resuming.resume:
        from tpsgd.saved.checkpoint import refuse_to_replace

        refuse_to_replace(folder, "the trials of a search")
    return folder


def _show(
    result: "Search", record: dict[str, Any], trials: Path, as_json: bool, folder: Path | None
) -> None:
    """Print the results, and the files if they could be written to a folder."""
    files = [trials / TRIALS]
    if folder is not None:
        files = [folder / RESULTS, folder / HEATMAPS, *files]
    if as_json:
        print(json.dumps(record | {"files": [str(file) for file in files]}), flush=True)
        return
    print(f"{result}\n")
    for line in _conclusion(result):
        print(textwrap.fill(line, 80))
    if folder is not None:
        names = [file.name for file in files if file.parent == folder]
        print(f"{', '.join(names)}: {folder}", flush=True)


def _write(result: "Search", record: dict[str, Any], folder: Path) -> Path:
    write_whole(folder / RESULTS, json.dumps(record, indent=1).encode())
    result.plot(folder / HEATMAPS)
    return folder


def _numbers(option: str, text: str | None) -> tuple[int, ...]:
    words = options.listed("0,1,2" if text is None else text)
    if not all(word.isascii() and word.isdigit() for word in words):
        raise TpsgdError(f"{option} takes whole numbers such as 0,1,2, got {text!r}")
    return tuple(map(int, words))


def _conclusion(result: "Search") -> Iterator[str]:
    """The best layers, the control, and how well the score predicts accuracy."""
    best, taps = result.best(), dict.fromkeys(row.tap for row in result.rows)
    layers: Any = best.layers
    planned = "" if best.planned_bytes is None else f", planned {size(best.planned_bytes)}"
    samples = f"{result.settings['held_out']:,} held-out samples"
    yield f"best: {best}: {best.accuracy:.1%} of {samples}{planned}"
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
