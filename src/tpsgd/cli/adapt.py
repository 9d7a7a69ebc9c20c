"""`tpsgd adapt`: layers on a frozen backbone, from words."""

import json
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from tpsgd.cli import adapt_plan as foretold
from tpsgd.cli import adapt_shift as shifted
from tpsgd.cli.options import (
    AsJson,
    BatchSize,
    Budget,
    Device,
    MaxTrain,
    OnDisk,
    Rate,
    Seed,
    Threads,
    check,
    known,
    load,
)
from tpsgd.cli.terminal import grid_of, named_bar
from tpsgd.comparison.arms import PEERS, RECURRENT
from tpsgd.errors import TpsgdError
from tpsgd.units import size

if TYPE_CHECKING:
    from tpsgd.adapt import Adaptor, Backbone
    from tpsgd.data import Data

PICTURES = "A folder of images, a subfolder a class (FOLDER@160: their size), imagenette, FILE.npz."
BACKBONES = (
    "vgg11, vgg16, vgg11-bn, vgg16-bn, resnet18, resnet34, or FILE.py:FUNCTION, which returns a "
    "module."
)
BackboneWord = Annotated[str, typer.Option("--backbone", help=BACKBONES)]
Weights = Annotated[
    Path | None,
    typer.Option("--weights", help="FILE.pth, .safetensors or .npz with torchvision's names."),
]
Pictures = Annotated[str, typer.Option("--data", help=PICTURES)]
EpochsOrFew = Annotated[
    int | None, typer.Option("--epochs", help="Per block; default: 8, more for few samples.", min=1)
]
PRECISIONS = ("float32", "bf16", "int8")
COMBINE = ("summed", "averaged", "learned")
SHIFTED = ("grey", "edges", "blur", "noise", "invert", "dim")


@dataclass(frozen=True)
class Wanted:
    """What the words ask for, as values."""

    backbone: "Backbone"
    taps: tuple[str, ...]
    data: "Data"
    fitting: dict[str, Any]
    arms: dict[str, dict[str, Any]]  # the first is the rule that was asked for
    seed: int

    @property
    def streamed(self) -> bool:
        """Whether the backbone runs again as the layers learn."""
        return not {"keep", "memory_budget"}.isdisjoint(self.fitting)


def adapt(
    data: Pictures,
    backbone: BackboneWord = "vgg16",
    weights: Weights = None,
    tap: Annotated[
        str | None, typer.Option(help="pool5; pool4,pool5: several; default: the last one.")
    ] = None,
    rule: Annotated[str, typer.Option(help="See: tpsgd rules.")] = "readout",
    convs: Annotated[int, typer.Option(help="Convolutions of the adaptor.", min=0)] = 1,
    dense: Annotated[int, typer.Option(help="Its hidden dense layers.", min=0)] = 1,
    filters: Annotated[int, typer.Option(help="Of each convolution.", min=1)] = 64,
    kernel: Annotated[int, typer.Option(help="Of each convolution; odd.", min=1)] = 5,
    width: Annotated[int, typer.Option(help="Of each dense layer.", min=1)] = 256,
    combine: Annotated[str, typer.Option(help=f"Several taps: {', '.join(COMBINE)}.")] = "averaged",
    precision: Annotated[
        str, typer.Option(help=f"Of the backbone: {', '.join(PRECISIONS)}.")
    ] = "float32",
    epochs: EpochsOrFew = None,
    batch_size: BatchSize = 32,
    lr: Rate = None,
    seed: Seed = 0,
    no_controls: Annotated[
        bool, typer.Option("--no-controls", help="Leave backprop and a frozen adaptor out.")
    ] = False,
    keep: Annotated[
        str | None,
        typer.Option(help="Features: memory, again (computed for every epoch), or a folder."),
    ] = None,
    memory_budget: Budget = None,
    shift: Annotated[
        str | None, typer.Option(help=f"A new domain: {', '.join(SHIFTED)}; or several.")
    ] = None,
    shots: Annotated[
        int | None, typer.Option(help="With --shift: labelled samples a class; 10.", min=1)
    ] = None,
    replay: Annotated[
        int | None, typer.Option(help="With --shift: old samples a class beside them; 0.", min=0)
    ] = None,
    max_train: MaxTrain = None,
    max_test: Annotated[int | None, typer.Option(help="Test on that many samples.", min=1)] = None,
    on_disk: OnDisk = None,
    device: Device = None,
    threads: Threads = None,
    out: Annotated[Path, typer.Option(help="Folder for the adaptor and the record.")] = Path(
        "tpsgd-adaptor"
    ),
    as_json: AsJson = False,
) -> None:
    """Train an adaptor on a frozen backbone, or show what a shifted domain does to one."""
    shifts = [word.strip() for word in shift.split(",")] if shift else []
    taps = tuple(word.strip() for word in tap.split(",")) if tap else ()
    check([rule], None, None, memory_budget)
    known("combination", combine, COMBINE)
    known("precision", precision, PRECISIONS)
    _refuse(rule, lr, shifts, taps, keep, memory_budget)
    if not shifts and (shots is not None or replay is not None):
        raise TpsgdError("--shots and --replay go with --shift")
    layers = _layers(convs, dense, filters, kernel, width)
    shots, replay = shots or 10, replay or 0
    kept = _kept(keep, memory_budget)
    from tpsgd.files import writable_folder

    folder = writable_folder(out)
    frozen = backbone_of(backbone, weights, taps, precision, device, threads)
    fitting = {"epochs": epochs, "batch_size": batch_size, "lr": lr, "seed": seed}
    wanted = Wanted(
        frozen,
        taps or tuple(frozen.taps)[-1:],
        _thinned(load(data, seed, max_train, on_disk), max_test, seed),
        fitting | kept | _combined(combine),
        _arms(rule, layers, not no_controls and not memory_budget),
        seed,
    )
    more = len(shifts) * (shots * len(wanted.data.classes) + len(wanted.data.test[1]))
    record: dict[str, Any] = {"planned": foretold.planned(wanted, more)}
    if not as_json:
        foretold.foretell(record["planned"], rule)
    if shifts:
        record |= shifted.recovered(wanted, shifts, shots, replay, epochs, folder)
    else:
        record |= _adapted(wanted, folder)
    record |= {"command": shlex.join(["tpsgd", *sys.argv[1:]])} | _about(wanted, device)
    _tell(record | {"precision": precision, "out": str(folder)}, wanted, folder, as_json)


def _refuse(
    rule: str, lr: float | None, shifts: list[str], taps: tuple[str, ...], keep: Any, budget: Any
) -> None:
    """Words that mean nothing here, or not together."""
    for word in shifts:
        known("shift", word, SHIFTED)
    if rule in PEERS or rule in RECURRENT:
        raise TpsgdError(f"an adaptor is trained by a rule or by backprop, not by {rule}")
    if lr is not None and not 0 < lr < float("inf"):
        raise TpsgdError(f"--lr must be more than 0, got {lr:g}")
    for given, words in (("--tap", taps), ("--shift", shifts)):
        if len(set(words)) < len(words):
            raise TpsgdError(f"{given} {','.join(words)}: name each one once")
    if shifts and (budget or keep):
        raise TpsgdError("--shift keeps the features in memory: leave --memory-budget, --keep out")
    if not shifts and find_spec("safetensors") is None:  # now, not after an hour
        raise TpsgdError("to save and load adaptors, run: pip install safetensors")
    if budget and rule == "backprop":
        raise TpsgdError("--memory-budget is for what is trained block by block, not for backprop")


def backbone_of(
    word: str,
    weights: Path | None,
    taps: tuple[str, ...],
    precision: str,
    device: str | None,
    threads: int | None,
) -> "Backbone":
    """A backbone from words, where it is to compute."""
    import torch

    from tpsgd.adapt import pretrained as backbones
    from tpsgd.engine.device import resolve_device

    place = resolve_device(device or "cpu")
    if threads is not None:
        torch.set_num_threads(threads)
    found = backbones.backbone(word, weights, taps)
    if precision != "float32":
        from tpsgd.adapt import quantize as lighter

        made = {"int8": lighter.int8, "bf16": lighter.bf16}[precision](found.model)
        found = found.like(made, f"{found.name} in {precision}")
    return found.to(place)


def _thinned(data: "Data", max_test: int | None, seed: int) -> "Data":
    """The data with fewer test samples, the shares of the classes kept."""
    from dataclasses import replace

    import torch

    from tpsgd.data.split import stratified
    from tpsgd.nets.padded import Padded

    x, y = data.test
    if isinstance(x, Padded) or isinstance(data.train[0], Padded):
        raise TpsgdError("a backbone takes samples of one shape, not sequences of any length")
    if max_test is None or max_test >= len(y):
        return data
    chosen = torch.from_numpy(stratified(y.numpy(), max_test, seed))
    note = f"{data.note}; {max_test} of {len(y)} test samples, stratified, seed {seed}"
    return replace(data, test=(x[chosen], y[chosen]), note=note)


def _kept(keep: str | None, budget: str | None) -> dict[str, Any]:
    if budget and keep:
        raise TpsgdError("--memory-budget decides what is kept: give it or --keep")
    if budget:
        return {"memory_budget": budget}
    if keep is None or keep == "memory":
        return {}
    if keep == "again":
        return {"keep": False}
    if not Path(keep).expanduser().is_dir():
        raise TpsgdError(f"--keep {keep}: write memory, again, or a folder that is there")
    return {"keep": Path(keep).expanduser()}


def _layers(convs: int, dense: int, filters: int, kernel: int, width: int) -> Any:
    from tpsgd.adapt import Layers

    return Layers(convs, dense, filters, kernel, width)


def _arms(rule: str, layers: Any, controls: bool) -> dict[str, dict[str, Any]]:
    """What is trained: the rule, and what stands beside it."""
    from tpsgd import rules
    from tpsgd.adapt import Probe
    from tpsgd.comparison.arms import arm_of
    from tpsgd.engine.backprop import fit_backprop
    from tpsgd.engine.schedules import sequential, simultaneous
    from tpsgd.solvers import ridge

    def one(word: str) -> dict[str, Any]:
        if word == "backprop":
            return {"layers": layers, "method": fit_backprop}
        made = rules.frozen() if word == "frozen" else arm_of(word).rule
        assert made is not None
        order = simultaneous if made.needs_output else sequential
        return {"layers": layers, "rule": made, "schedule": order}

    words = [rule, *(("backprop", "frozen") if controls else ())]
    arms = {word: one(word) for word in dict.fromkeys(words)}
    return arms | {"linear probe": {"layers": Probe(), "optimizer": ridge(), "lr": None}}


def _combined(word: str) -> dict[str, Any]:
    from tpsgd.adapt.adaptor import COMBINATIONS

    return {"combine": COMBINATIONS[word]}


def _adapted(wanted: Wanted, folder: Path) -> dict[str, Any]:
    """Train every arm on the data itself; the first one is kept."""
    from tpsgd import adapt

    source: Any = wanted.data.train
    test: Any = wanted.data.test

    def trained() -> Iterator[dict[str, Any]]:
        nonlocal source, test
        with named_bar() as tell:
            if not wanted.streamed:
                encode = partial(adapt.encode, wanted.backbone, taps=wanted.taps)
                source = encode(source, progress=tell("features"))
                test = encode(test, progress=tell("test features"))
            for i, (name, arm) in enumerate(wanted.arms.items()):
                made = adapt.fit(
                    wanted.backbone, source, taps=wanted.taps, classes=wanted.data.classes,
                    progress=tell(name, parts=True), **(wanted.fitting | arm),
                )  # fmt: skip
                if i == 0:
                    made.save(folder)
                row = _row(name, made)
                yield row  # kept even if the test is interrupted
                row["accuracy"] = made.evaluate(test)

    rows, interrupted = shifted.until_interrupted(trained())
    kept = 0 if wanted.streamed else source.nbytes + test.nbytes
    return {
        "arms": rows, "features_bytes": kept, "adaptor": str(folder), "interrupted": interrupted
    }  # fmt: skip


def _row(name: str, made: "Adaptor") -> dict[str, Any]:
    runs = list(made.runs.values())
    return {
        "arm": name,
        "accuracy": None,
        "trained_bytes": made.nbytes,
        "peak_bytes": max(run.peak_bytes for run in runs),
        "kept_bytes": max(run.kept_bytes for run in runs),
        "seconds": sum(run.seconds for run in runs),
        "settings": runs[0].settings,
    }


def _about(wanted: Wanted, device: str | None) -> dict[str, Any]:
    from tpsgd.adapt.quantize import weight_bytes
    from tpsgd.comparison import provenance

    return {
        "backbone": wanted.backbone.name,
        "backbone_bytes": weight_bytes(wanted.backbone.model),
        "taps": list(wanted.taps),
        "data": provenance.describe(wanted.data),
        "machine": provenance.machine(device),
        "versions": provenance.versions(),
    }


def _tell(record: dict[str, Any], wanted: Wanted, folder: Path, as_json: bool) -> None:
    """Write the record, print it or its table, and say if that is not all."""
    from tpsgd.files import write_whole

    write_whole(folder / "record.json", json.dumps(record, indent=1).encode())
    if as_json:
        print(json.dumps(record))
    else:
        _show(record, wanted, folder)
    if record["interrupted"]:
        from tpsgd.cli.app import Stopped

        rows = record.get("arms") or next(iter(record["shifts"].values()))["arms"]
        whose = f"{rows[0]['arm']}'s adaptor and record.json"
        files = whose if "arms" in record else "record.json and pictures"
        done = f"{len(rows)} of {len(wanted.arms)} trainings are done"
        raise Stopped(f"interrupted; {done}; {files} are in {folder}")


def _show(record: dict[str, Any], wanted: Wanted, folder: Path) -> None:
    console = Console(highlight=False)
    taps = " and ".join(wanted.taps)
    heading = f"{record['backbone']} ({size(record['backbone_bytes'])}, frozen) at {taps}"
    console.print(f"{heading}: {wanted.data.name}", style="bold", markup=False)
    if "shifts" in record:
        shifted.show(console, record, folder)
        return
    grid = grid_of("arm", "test accuracy", "trained", "peak", "seconds")
    for column in grid.columns[1:]:
        column.justify = "right"
    for row in record["arms"]:
        held = size(row["peak_bytes"]) + (f" + {size(row['kept_bytes'])}" * bool(row["kept_bytes"]))
        right = "-" if row["accuracy"] is None else f"{row['accuracy']:.2%}"
        numbers = (right, size(row["trained_bytes"]), held)
        grid.add_row(row["arm"], *numbers, f"{row['seconds']:.1f}")
    console.print(grid)
    if record["features_bytes"]:
        kept = size(record["features_bytes"])
        console.print(f"peak: of training the layers; their features, kept, are {kept} more")
    else:
        console.print("peak: of training the layers behind their backbone, which is in it")
    if "memory_budget" in wanted.fitting:
        console.print("within a budget backprop and a frozen adaptor are not trained beside it")
    console.print(f"{record['arms'][0]['arm']}'s adaptor and record.json: {folder}", markup=False)
