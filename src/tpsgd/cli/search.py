"""`tpsgd search`: layers for the taps of a backbone, from words; a grid, or a study by Optuna."""

import json
import shlex
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tpsgd.cli.adapt import BackboneWord, EpochsOrFew, Pictures, Weights, backbone_of
from tpsgd.cli.options import (
    AsJson,
    Device,
    MaxTrain,
    Rate,
    Seed,
    Threads,
    check,
    load,
    settings_of,
)
from tpsgd.cli.terminal import live_bar
from tpsgd.comparison.arms import PEERS, RECURRENT, arm_of
from tpsgd.errors import TpsgdError
from tpsgd.units import size

if TYPE_CHECKING:
    from tpsgd.adapt import Backbone
    from tpsgd.adapt.optuna_study import Study
    from tpsgd.adapt.results import Search
    from tpsgd.data import Data

STUDY = "study.log"  # Optuna's journal, where no other storage is named


def search(
    data: Pictures,
    backbone: BackboneWord = "vgg16",
    weights: Weights = None,
    taps: Annotated[str | None, typer.Option(help="pool4,pool5; default: the last one.")] = None,
    rule: Annotated[str, typer.Option(help="See: tpsgd rules. With --trials, several.")] = (
        "tpsgd-l2"
    ),
    convs: Annotated[str, typer.Option(help="Numbers of convolutions to try.")] = "0,1,2",
    dense: Annotated[str, typer.Option(help="Numbers of dense layers to try.")] = "0,1,2",
    epochs: EpochsOrFew = None,
    restarts: Annotated[int, typer.Option(help="Trainings of each.", min=1)] = 1,
    memory_budget: Annotated[
        str | None, typer.Option(help="20MB: what plans above it is not trained.")
    ] = None,
    top: Annotated[
        int | None, typer.Option(help="Of each tap, train so many: the best by score.", min=1)
    ] = None,
    trials: Annotated[
        int | None, typer.Option(help="Instead of a grid, so many trials by Optuna.", min=1)
    ] = None,
    storage: Annotated[
        str | None, typer.Option(help="With --trials: sqlite:///FILE, or a file, to share.")
    ] = None,
    seed: Seed = 0,
    batch_size: Annotated[int | None, typer.Option(help="Samples per step: 32.", min=1)] = None,
    lr: Rate = None,
    max_train: MaxTrain = None,
    device: Device = None,
    threads: Threads = None,
    out: Annotated[Path, typer.Option(help="Folder for what is found.")] = Path("tpsgd-search"),
    as_json: AsJson = False,
) -> None:
    """Find layers for the taps of a frozen backbone by accuracy on held-out samples."""
    words = list(dict.fromkeys(word.strip() for word in rule.split(",")))
    check(words, None, None, memory_budget)
    _refuse(words, trials, storage, restarts > 1 or top is not None)
    grid = {"convs": _numbers("--convs", convs), "dense": _numbers("--dense", dense)}
    settings_of(epochs or 1, batch_size or 1, lr, None, device, threads, None, None)

    from tpsgd.files import writable_folder

    folder = writable_folder(out)
    wanted = tuple(tap.strip() for tap in taps.split(",")) if taps else ()
    net = backbone_of(backbone, weights, wanted, "float32", device, threads)
    names = wanted or tuple(net.taps)[-1:]
    samples = load(data, seed, max_train, None)
    options = _taught(words) | {"epochs": epochs, "seed": seed, "memory_budget": memory_budget}
    options |= {"taps": names, "classes": samples.classes}
    if trials is None:
        options |= {"batch_size": batch_size, "lr": lr, "restarts": restarts, "top": top}
        found = _gridded(net, samples.train, folder, options | grid)
    else:
        given = {"lr": lr and (lr, lr), "batch_size": batch_size and (batch_size,)}
        space = grid | {k: v for k, v in given.items() if v is not None}
        found = _studied(net, samples.train, storage or folder / STUDY, space, options, trials)
    _tell(found, _record(found, samples, net, device), folder, as_json)


def _refuse(words: list[str], trials: int | None, storage: str | None, of_grid: bool) -> None:
    """Words that do not go together."""
    for word in words:
        if word in (*PEERS, *RECURRENT):
            raise TpsgdError(f"{word} is no rule to train layers by: see tpsgd rules for others")
    if trials is None and len(words) > 1:
        raise TpsgdError("a grid is trained by one --rule; several are for --trials")
    if trials is None and storage is not None:
        raise TpsgdError("--storage is Optuna's: give --trials too, how many it shall have")
    if trials is not None and of_grid:
        raise TpsgdError("--restarts and --top are for the grid: leave them out, or --trials")


def _numbers(option: str, text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise TpsgdError(f"{option} takes whole numbers such as 0,1,2, got {text!r}")
    return tuple(map(int, parts))


def _taught(words: list[str]) -> dict[str, Any]:
    """What `fit` takes for rules by these words; `rule` is a list of them."""
    from tpsgd.engine.backprop import fit_backprop

    if words == ["backprop"]:
        return {"method": fit_backprop}
    arms = [arm_of(word) for word in words]
    rules, schedules = [arm.rule for arm in arms], {arm.schedule for arm in arms}
    if None in rules or len(schedules) > 1:
        raise TpsgdError(f"{', '.join(words)} are trained in different ways: search them apart")
    return {"rule": rules, "schedule": schedules.pop()}


def _gridded(net: "Backbone", data: Any, folder: Path, options: dict[str, Any]) -> "Search":
    """The grid; Ctrl-C says how to go on."""
    from tpsgd.adapt.search import search as on_grid

    options |= {"rule": options["rule"][0]} if "rule" in options else {}
    with _watched(folder) as progress:
        return on_grid(net, data, folder=folder, progress=progress, **options)


def _studied(
    net: "Backbone", data: Any, storage: Any, space: dict[str, Any], options: dict[str, Any],
    trials: int,
) -> "Study":  # fmt: skip
    """The study; Ctrl-C says how to go on."""
    from tpsgd.adapt.optuna_study import Space, study

    options |= {"rules": options.pop("rule")} if "rule" in options else {}
    with _watched(storage) as progress:
        return study(
            net, data, trials=trials, storage=storage, space=Space(**space), progress=progress,
            **options,
        )  # fmt: skip


@contextmanager
def _watched(place: Any) -> Iterator[Callable[[str, float, float], None]]:
    """A progress to call, shown as a bar; when it is interrupted, what was kept is said."""
    known = (0, 0)
    with live_bar() as advance:

        def progress(what: str, done: float, total: float) -> None:
            nonlocal known
            if what not in ("features", "planning"):
                known = int(done), int(total)
            if advance is not None:
                advance(what, done / total)

        try:
            yield progress
        except KeyboardInterrupt:
            from tpsgd.cli.app import Stopped

            done, total = known
            kept = f"{done} of {total} trials are in {place}" if total else "no new trial was begun"
            raise Stopped(f"interrupted; {kept}; run the same command again to go on") from None


def _record(
    found: "Search | Study", samples: "Data", net: "Backbone", device: str | None
) -> dict[str, Any]:
    """All of it as plain values."""
    from tpsgd.comparison import provenance

    record = {"command": shlex.join(["tpsgd", *sys.argv[1:]]), "backbone": net.name}
    record |= found.as_dict() | {"data": provenance.describe(samples)}
    return record | {"machine": provenance.machine(device), "versions": provenance.versions()}


def _tell(found: "Search | Study", record: dict[str, Any], folder: Path, as_json: bool) -> None:
    """Write the files, print the table or the record, the best, and where the files are."""
    from tpsgd.adapt.results import Search
    from tpsgd.adapt.trial_log import FILE
    from tpsgd.files import write_whole

    files = [folder / "search.json"]
    if isinstance(found, Search):
        files += [found.plot(folder / "heatmaps.png"), folder / FILE]
    write_whole(files[0], json.dumps(record, indent=1).encode())
    if as_json:
        print(json.dumps(record | {"files": [str(file) for file in files]}))
        return
    print(found)
    print()
    for line in _conclusion(found):
        print(textwrap.fill(line, 80))
    print(f"files: {', '.join(map(str, files))}")


def _conclusion(found: "Search | Study") -> Iterator[str]:
    """What was found, in a few lines."""
    from tpsgd.adapt.results import Search

    best, settings = found.best(), getattr(found, "settings", {})
    planned = "" if best.planned_bytes is None else f", planned {size(best.planned_bytes)}"
    of = f"{settings['held_out']:,}" if settings else "the"
    yield f"best: {best}: {best.accuracy:.1%} of {of} held-out samples{planned}"
    yield f"to train it: tpsgd adapt ... --tap {_tap(best)} {_as_options(best.layers)}"
    if not isinstance(found, Search):
        return
    if (probe := found.control()) is not None:
        gap = (probe.accuracy or 0.0) - (best.accuracy or 0.0)
        beside = "better" if gap > 0 else "worse" if gap < 0 else "as good"
        yield f"control: {probe}: {probe.accuracy:.1%}, {beside}"
    taps = dict.fromkeys(row.tap for row in found.rows)
    known = {tap: found.rank_correlation(tap) for tap in taps}
    each = ", ".join(f"{tap} {_signed(r)}" for tap, r in known.items()) if len(taps) > 1 else ""
    yield f"rank correlation of score and accuracy: {_signed(found.rank_correlation())}" + (
        f" ({each})" if each else ""
    )


def _tap(best: Any) -> str:
    return best.tap if hasattr(best, "tap") else best.choices["tap"]


def _as_options(layers: Any) -> str:
    """Layers as `tpsgd adapt` takes them, without what it takes anyway."""
    from dataclasses import asdict

    usual = asdict(type(layers)())
    values = {k: v for k, v in asdict(layers).items() if k in ("convs", "dense") or v != usual[k]}
    return " ".join(f"--{name} {value}" for name, value in values.items())


def _signed(r: float | None) -> str:
    return "unknown" if r is None else f"{r:+.2f}"
