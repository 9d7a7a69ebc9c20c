"""Accuracy against seconds and bytes: a figure for each data set, from results/*.json.

docs/fill_numbers.py calls this. A row of panels has the seconds of a training, another the peak
memory and, as a line to the right, the inputs that are kept for the next block; a column is a net.
Restarts that shared a device, or ran on another machine than the rest of their table, have no
seconds here, unless the row has those of an earlier run that had the device to itself (`timed`).
The memory of stacked restarts is divided by their number. A panel needs three arms, one of them
backprop.
"""

import json
from collections.abc import Iterable
from typing import Any

from figures import (
    ASSETS,
    GREY,
    INK,
    ORANGE,
    PINK,
    QUIET,
    ROOT,
    Record,
    load,
    plain,
    plt,
    save,
    stored,
)
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from tpsgd.rules import ALL

SHAPES = {"one layer": "single", "two layers": "stacked", "both directions": "bidirectional"}
DATA: dict[str, dict[str, tuple[str, str]]] = {  # data set -> net -> file and table
    "mnist": {
        "MLP": ("shallow", "mnist-mlp"),
        "MLP, Tanh": ("shallow", "mnist-mlp-tanh"),
        "CNN": ("shallow", "mnist-cnn"),
        "MLP, slope 0.3": ("peers", "mlp-256-steep"),
    },
    "cifar10": {
        "CNN": ("shallow", "cifar10-cnn"),
        "CNN, 3 epochs": ("shallow", "cifar10-cnn-short"),
        "VGG8": ("deep", "vgg8"),
        "ResNet18": ("deep", "resnet18"),
    },
    "imagenette": {
        "VGG11": ("deep", "vgg11"),
        "adaptor at pool5": ("adaptors", "pool5"),
        "adaptor at pool4": ("adaptors", "pool4"),
        "adaptor at pool3": ("adaptors", "pool3"),
    },
    **{
        name: {net: ("recurrent", f"{name}, {shape}") for net, shape in SHAPES.items()}
        | ({"diagonal recurrence": ("pixels", pixels)} if pixels else {})
        for name, pixels in {
            "seq-mnist-rows": "rows", "seq-mnist-pixels": "49-pixels", "eeg": "eeg",
            "tweets": "tweets", "tweets-vectors": "",
        }.items()
    },
}  # fmt: skip
KINDS = {"seconds": "seconds of training", "bytes": "peak memory, MB"}
COLOURS = {
    "backprop": "#000000", "lm-karnet": ORANGE, "zorb": "#E69F00", "dladmm": PINK, "elm": GREY,
    "linear probe": ORANGE, "reservoir": QUIET, "transfer": "#000000",
}  # fmt: skip
MARKS = "osD^vPXhd<>p"


def redraw(check: bool = False) -> list[str]:
    """The figures whose numbers changed; they are drawn unless they are only checked."""
    stale = []
    for data in DATA:
        shown, file = values(data), ASSETS / f"tradeoff-{data}.png"
        if shown and stored(file) != json.dumps(shown):
            stale.append(f"docs/assets/{file.name}")
            if not check:
                save(draw(shown), file, shown)
    return stale


def values(data: str) -> Record:
    """Of each net and arm: accuracy and deviation in per cent, seconds, megabytes."""
    nets: Record = {}
    for net, (file, table) in DATA[data].items():
        if not (ROOT / "results" / f"{file}.json").is_file():
            continue
        rows = {arm: figures_of(row) for arm, row in rows_of(file, table).items()}
        arms = {arm: row for arm, row in rows.items() if row}
        for kind in KINDS:
            shown = [arm for arm, row in arms.items() if row[kind]]
            if len(shown) < 3 or not any("backprop" in arm for arm in shown):
                arms = {arm: row | {kind: 0.0} for arm, row in arms.items()}  # nothing to compare
        if arms := {arm: row for arm, row in arms.items() if row["seconds"] or row["bytes"]}:
            nets[net] = arms
    return nets


def rows_of(file: str, table: str) -> Record:
    """The arms of a table; those of another machine lose their seconds."""
    record = load(file)
    if file == "adaptors":
        return {row["arm"]: row for row in record["table"] if row["tap"] == table}
    tables = record.get("tables") or record.get("nets") or {}
    arms = tables.get(table, {}).get("arms", {})
    here = tables.get(table, {}).get("machine", record["machine"])["gpu"]
    return {
        arm: row if row.get("machine", {"gpu": here})["gpu"] == here else row | {"busy": True}
        for arm, row in arms.items()
    }


def figures_of(row: Record) -> Record | None:
    """The numbers of one mark; None for rows without a training."""
    if not row.get("accuracy") or not (row.get("seconds") or row.get("peak_bytes")):
        return None
    shared = row.get("busy") or not row.get("alone", True)
    timed = row.get("timed", {} if shared else row)
    together = len(row["accuracies"]) if row.get("stacked") else 1
    return {
        "accuracy": round(100 * row["accuracy"], 2),
        "deviation": round(100 * row.get("deviation", 0.0), 2),
        "seconds": round(timed.get("seconds") or 0.0, 3),
        "bytes": round((row.get("peak_bytes") or 0) / 2**20 / together, 2),
        "kept": round((row.get("kept_bytes") or 0) / 2**20, 2),
    }


def draw(nets: Record) -> Figure:
    """A column for each net, a row for seconds and one for bytes if there are any."""
    kinds = [k for k in KINDS if any(row[k] for arms in nets.values() for row in arms.values())]
    looks = looks_of(dict.fromkeys(arm for arms in nets.values() for arm in arms))
    shape = {"figsize": (3.4 * len(nets) + 2.6, 3.3 * len(kinds) + 0.4), "squeeze": False}
    figure, panels = plt.subplots(
        len(kinds), len(nets), layout="constrained", sharey="col", **shape
    )
    for column, (net, arms) in enumerate(nets.items()):
        for row, kind in enumerate(kinds):
            axes = panels[row][column]
            scatter(axes, arms, kind, looks)
            axes.set_xlabel(KINDS[kind], fontsize=10, color=INK)
            if not column:
                axes.set_ylabel("test accuracy, %", fontsize=10, color=INK)
        panels[0][column].set_title(net, fontsize=11, color=INK)
    handles = [
        plt.Line2D([], [], color=colour, marker=mark, ls="", ms=8, mec="white")
        for colour, mark in looks.values()
    ]
    where = {"loc": "outside right upper", "frameon": False, "fontsize": 9}
    figure.legend(handles, list(looks), **where)
    return figure


def scatter(axes: Any, arms: Record, kind: str, looks: Record) -> None:
    """The arms of one net; the axis of costs is logarithmic."""
    shown = {arm: row for arm, row in arms.items() if row[kind]}
    if not shown:
        axes.axis("off")
        axes.text(0.5, 0.5, "not measured", ha="center", color=QUIET, transform=axes.transAxes)
    for arm, row in shown.items():
        colour, mark = looks[arm]
        look = {"color": colour, "mec": "white", "ms": 9, "elinewidth": 1}
        if kind == "bytes" and row["kept"]:
            ends = [row["bytes"], row["bytes"] + row["kept"]]
            axes.plot(ends, [row["accuracy"]] * 2, color=colour, lw=0.8, alpha=0.5)
        axes.errorbar(row[kind], row["accuracy"], row["deviation"], fmt=mark, **look)
    axes.set_xscale("log")
    axes.margins(x=0.12)
    low, high = axes.get_xlim()
    subs = (1.0,) if high / low > 1000 else (1.0, 3.0) if high / low > 30 else (1.0, 2.0, 5.0)
    few = high / low < 8  # a logarithmic axis would have one tick or two
    axes.xaxis.set_major_locator(MaxNLocator(4) if few else LogLocator(subs=subs))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.tick_params(labelsize=8)
    plain(axes)


def looks_of(arms: Iterable[str]) -> dict[str, tuple[str, str]]:
    """A colour for each rule, and a mark that tells the arms of one rule apart."""
    looks: dict[str, tuple[str, str]] = {}
    used: dict[str, int] = {}
    for arm in arms:
        colour = colour_of(arm)
        mark = MARKS[used.get(colour, 0) % len(MARKS)]
        used[colour] = used.get(colour, 0) + 1
        looks[arm] = colour, mark
    return looks


def colour_of(arm: str) -> str:
    """The colour of the longest name of a rule or peer in an arm's name.

    Examples:
        >>> colour_of("4 blocks, predsim") == colour_of("predsim, no convolution")
        True
    """
    colours = {name: rule.colour for name, rule in ALL.items()} | COLOURS
    names = [name for name in colours if name in arm]
    return colours[max(names, key=len)] if names else GREY
