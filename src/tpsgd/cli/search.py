"""`tpsgd search`: which layers, on which taps of a frozen backbone; a grid."""

import json
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tpsgd.cli.adapt import AdaptTrainingOptions, BackboneOptions, ImageOptions, check_rule
from tpsgd.cli.options import (
    AsJson,
    MachineOptions,
    MemoryOptions,
    RuleWord,
    grouped,
    option,
    provenance_of,
    settings_of,
)
from tpsgd.cli.terminal import Stopped, live_bar
from tpsgd.errors import TpsgdError
from tpsgd.files import writable_folder, write_whole
from tpsgd.units import size

if TYPE_CHECKING:
    from tpsgd.adapt import Search

TRIALS = "trials.jsonl"  # the finished trials


@grouped
def search(
    data: ImageOptions,
    backbone: BackboneOptions,
    training: AdaptTrainingOptions,
    memory: MemoryOptions,
    machine: MachineOptions,
    rule: RuleWord = "tpsgd-l2",
    convs: Annotated[str, option("Numbers of convolutions to try.")] = "0,1,2",
    dense: Annotated[str, option("Numbers of dense layers to try.")] = "0,1,2",
    restarts: Annotated[int, option("Training runs of each.", min=1)] = 1,
    top: Annotated[
        int | None, option("Train only this many per tap: the best by score.", min=1)
    ] = None,
    out: Annotated[Path, option("Folder for the results.")] = Path("tpsgd-search"),
    as_json: AsJson = False,
) -> None:
    """Find layers for the taps of a frozen backbone by accuracy on held-out samples.

    With --memory, layers whose plan is above the budget are not trained.
    """
    from tpsgd import adapt
    from tpsgd.comparison.arms import arm
    from tpsgd.training.fit import fit_backprop

    check_rule(rule)
    if training.augment is not None:
        raise TpsgdError("a search trains on features, not on images: leave --augment out")
    numbers = _numbers("--convs", convs), _numbers("--dense", dense)
    settings = settings_of(training, memory)
    if rule == "backprop":
        settings["method"] = fit_backprop
    else:
        chosen = arm(rule)
        settings |= {"rule": chosen.rule, "schedule": training.schedule_of(chosen.schedule)}
    folder = writable_folder(out)
    net, taps = backbone.load(machine)
    samples = data.load(training.seed)
    with _watched(folder) as progress:
        result = adapt.search(
            net, samples.train, taps=taps, convs=numbers[0], dense=numbers[1], restarts=restarts,
            classes=samples.classes, top=top, folder=folder, progress=progress, **settings,
        )  # fmt: skip
    record = result.as_dict() | {"backbone": net.name} | provenance_of(samples, machine.device)
    files = [folder / "search.json", result.plot(folder / "heatmaps.png"), folder / TRIALS]
    write_whole(files[0], json.dumps(record, indent=1).encode())
    if as_json:
        print(json.dumps(record | {"files": [str(file) for file in files]}))
        return
    print(f"{result}\n")
    for line in _conclusion(result):
        print(textwrap.fill(line, 80))
    print(f"files: {', '.join(map(str, files))}")


def _numbers(option: str, text: str) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() for word in words):
        raise TpsgdError(f"{option} takes whole numbers such as 0,1,2, got {text!r}")
    return tuple(map(int, words))


@contextmanager
def _watched(folder: Path) -> Iterator[Callable[[str, float, float], None]]:
    """A progress function with a bar; Ctrl-C ends with how many trials are saved."""
    trials = (0, 0)
    with live_bar() as advance:

        def progress(what: str, done: float, total: float) -> None:
            nonlocal trials
            if what not in ("features", "planning"):
                trials = int(done), int(total)
            if advance is not None:
                advance(what, done / total)

        try:
            yield progress
        except KeyboardInterrupt:
            done, total = trials
            saved = f"{done} of {total} trials are in {folder}" if total else "no trial was begun"
            raise Stopped(f"interrupted; {saved}; the same command continues") from None


def _conclusion(result: "Search") -> Iterator[str]:
    """The best layers, the control, and how well the score predicts accuracy."""
    best, taps = result.best(), dict.fromkeys(row.tap for row in result.rows)
    planned = "" if best.planned_bytes is None else f", planned {size(best.planned_bytes)}"
    samples = f"{result.settings['held_out']:,} held-out samples"
    yield f"best: {best}: {best.accuracy:.1%} of {samples}{planned}"
    yield f"to train it: tpsgd adapt ... --tap {best.tap} {_as_options(best.layers)}"
    if (probe := result.control()) is not None:
        gap = (probe.accuracy or 0.0) - (best.accuracy or 0.0)
        verdict = "better" if gap > 0 else "worse" if gap < 0 else "as good"
        yield f"control: {probe}: {probe.accuracy:.1%}, {verdict}"
    by_tap = ", ".join(f"{tap} {_signed(result.rank_correlation(tap))}" for tap in taps)
    yield f"rank correlation of score and accuracy: {_signed(result.rank_correlation())}" + (
        f" ({by_tap})" if len(taps) > 1 else ""
    )


def _as_options(layers: Any) -> str:
    """Layers as options of `tpsgd adapt`, without defaults."""
    defaults = asdict(type(layers)())
    shown = {k: v for k, v in asdict(layers).items() if k in ("convs", "dense") or v != defaults[k]}
    return " ".join(f"--{name} {value}" for name, value in shown.items())


def _signed(r: float | None) -> str:
    return "unknown" if r is None else f"{r:+.2f}"
