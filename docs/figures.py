"""Draw the figures of the pages from results/*.json; docs/fill_numbers.py calls this.

A figure stores the numbers it shows in the PNG's description, and is drawn again when they change.
"""

import json
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, median
from textwrap import fill
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator
from PIL import Image

from tpsgd.comparison.arms import ALL as ARMS
from tpsgd.rules import ALL

ROOT = Path(__file__).resolve().parents[1]
ASSETS = ROOT / "docs" / "assets"
Record = dict[str, Any]
INK, QUIET, LINE = "#1b1f24", "#5b6470", "#b9c0c9"
GREEN, BLUE, SKY, GREY, ORANGE, PINK = (  # Okabe and Ito's, for every kind of colour vision
    "#007A5A", "#0072B2", "#56B4E9", "#888888", "#D55E00", "#CC79A7",
)  # fmt: skip
LOOKS = {
    "backprop": ("#000000", "s"),
    "readout": (GREEN, "o"),
    "tpsgd-l2": (BLUE, "^"),
    "linear probe": (ORANGE, "v"),
    "frozen": (GREY, "D"),
}


def load(name: str) -> Record:
    """A file of results."""
    return json.loads((ROOT / "results" / f"{name}.json").read_text(encoding="utf-8"))


def redraw(check: bool = False) -> list[str]:
    """The figures whose numbers changed; they are drawn unless they are only checked."""
    stale = []
    for name, (source, values, draw) in FIGURES.items():
        if not (ROOT / "results" / f"{source}.json").is_file():
            continue
        record = load(source)
        shown, file = values(record), ASSETS / f"{name}.png"
        if stored(file) != json.dumps(shown):
            stale.append(f"docs/assets/{file.name}")
            if not check:
                save(draw(shown, record), file, shown)
    return stale


def stored(file: Path) -> str | None:
    """The numbers that a figure shows, as JSON."""
    if not file.is_file():
        return None
    with Image.open(file) as image:
        return image.info.get("Description")


def save(figure: Figure, file: Path, values: Any) -> None:
    """Write a figure with its numbers."""
    description = {"Software": None, "Description": json.dumps(values)}
    figure.savefig(file, dpi=150, metadata=description)
    plt.close(figure)


def plain(axes: Axes, grid: str = "both") -> None:
    """Grid lines in place of a frame and ticks."""
    axes.tick_params(length=0, labelcolor=INK, which="both")
    axes.grid(axis=grid, color=LINE, lw=0.6)  # type: ignore[arg-type]
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)


# ---- recurrent nets ------------------------------------------------------------------------------

SETS = {
    "seq-mnist-rows": "MNIST rows\n28 steps of 28",
    "seq-mnist-pixels": "MNIST pixels\n49 steps of 1",
    "eeg": "EEG by recording\n45 steps of 1",
    "tweets": "tweets\n15 words, one-hot",
    "tweets-vectors": "tweets\n15 word vectors",
}
BARS: list[tuple[str, tuple[str, ...], str]] = [  # label, arms (the better is shown), colour
    ("DRTP", ("drtp",), SKY),
    ("tpSGD l1", ("tpsgd-l1",), BLUE),
    ("reservoir: random, solved head", ("reservoir",), "#c9ced6"),
    ("readout", ("readout",), GREEN),
    ("backprop through time, better of two cells", ("backprop", "backprop-leaky"), ORANGE),
]


def sequence_values(record: Record) -> list[list[tuple[float, float | None]]]:
    """For each bar and set: our mean accuracy and the paper's, in per cent."""
    paper = load("paper")["recurrent"]

    def pair(table: str, arms: tuple[str, ...]) -> tuple[float, float | None]:
        rows = record["tables"][table]["arms"]
        best = max(fmean(rows[arm]["accuracies"]) for arm in arms if arm in rows)
        printed = paper[table].get(arms[0])
        return round(100 * best, 1), float(printed) if printed else None

    return [[pair(f"{name}, single", arms) for name in SETS] for _, arms, _ in BARS]


def draw_sequences(values: Any, record: Record) -> Figure:
    """Bars of our accuracies, marks of the paper's."""
    figure, axes = plt.subplots(figsize=(10, 5.2), layout="constrained")
    wide = 0.165
    for i, ((label, _, colour), row) in enumerate(zip(BARS, values, strict=True)):
        ink = INK if colour in (SKY, "#c9ced6") else "white"
        for group, (ours, paper) in enumerate(row):
            x = group + (i - 2) * wide
            axes.bar(x, ours, wide * 0.9, color=colour, label=label if not group else None)
            axes.text(x, 2, f"{ours:.1f}", ha="center", fontsize=8.5, color=ink)
            if paper is not None:
                mark = "the paper's figure" if not group and not i else None
                ends = [x - 0.45 * wide, x + 0.45 * wide]
                axes.plot(ends, [paper] * 2, color=INK, lw=2.2, label=mark)
    axes.set_xticks(range(len(SETS)), SETS.values(), fontsize=11, color=INK)
    axes.set(ylim=(0, 102), xlim=(-0.55, len(SETS) - 0.45), yticks=range(0, 101, 20))
    axes.set_ylabel("test accuracy, %", fontsize=11, color=INK)
    plain(axes, "y")
    figure.legend(loc="outside upper center", ncols=3, frameon=False, fontsize=10.5)
    return figure


# ---- closed forms and peers ----------------------------------------------------------------------

PEERS = {
    "backprop": ("#000000", "s"),
    "readout": (GREEN, "o"),
    "readout, ridge head": (GREEN, "D"),
    "tpsgd-l2": (BLUE, "o"),
    "tpsgd-l2, ridge head": (BLUE, "D"),
    "tpsgd-l2, quick": (BLUE, "^"),
    "tpsgd-l2, one epoch": (BLUE, "v"),
    "drtp": (SKY, "o"),
    "lm-karnet": (ORANGE, "o"),
    "zorb": ("#E69F00", "o"),
    "dladmm": (PINK, "o"),
    "dladmm, rho 1": (PINK, "v"),
    "elm": (GREY, "D"),
    "frozen": (GREY, "o"),
}


def peer_values(record: Record) -> list[dict[str, list[float]]]:
    """On the GPU and on the CPU: each arm's seconds and accuracy in per cent."""
    machines = [where["nets"]["mlp-256-steep"]["arms"] for where in (record, record["cpu"])]
    return [
        {
            name: [round(arms[name]["seconds"], 3), round(100 * arms[name]["accuracy"], 2)]
            for name in PEERS
            if name in arms
        }
        for arms in machines
    ]


def draw_peers(values: Any, record: Record) -> Figure:
    """Accuracy against seconds, a panel per machine."""
    figure, panels = plt.subplots(1, 2, figsize=(10, 4.8), layout="constrained", sharey=True)
    titles = record["machine"]["gpu"], f"CPU, {record['cpu']['machine']['threads']} threads"
    for axes, title, arms in zip(panels, titles, values, strict=True):
        for arm, (seconds, accuracy) in arms.items():
            colour, mark = PEERS[arm]
            top = 3 if arm.startswith("tpsgd") else 2
            axes.plot(seconds, accuracy, mark, c=colour, ms=9, label=arm, mec="white", zorder=top)
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter("")
        axes.set_title(title, fontsize=11, color=INK)
        axes.set_xlabel("seconds of training", fontsize=11, color=INK)
        plain(axes)
    panels[0].set_ylabel("test accuracy, %", fontsize=11, color=INK)
    handles = panels[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside upper center", ncols=5, frameon=False, fontsize=10.5)
    return figure


# ---- memory --------------------------------------------------------------------------------------

GROWS = {"samples": "samples", "depth": "hidden layers", "width": "units per layer"}


def memory_values(record: Record) -> dict[str, dict[str, list[list[float]]]]:
    """Per axis and arm: value, seconds, megabytes beyond the weights."""
    values: dict[str, dict[str, list[list[float]]]] = {}
    for row in record["scaling"]:
        beyond = (row["peak_bytes"] - row["weights"]) / 2**20
        arm = values.setdefault(row["axis"], {}).setdefault(row["arm"], [])
        arm.append([row["value"], round(row["seconds"], 4), round(beyond, 3)])
    return values


def draw_memory(values: Any, record: Record) -> Figure:
    """Time above memory, a column for each thing that grows."""
    figure, panels = plt.subplots(2, 3, figsize=(10, 6), layout="constrained", sharex="col")
    for column, (axis, arms) in enumerate(values.items()):
        for row, title in enumerate(("seconds per epoch", "MB beyond weights")):
            axes = panels[row][column]
            for arm, points in arms.items():
                colour, mark = LOOKS[arm]
                xs, ys = [p[0] for p in points], [p[row + 1] for p in points]
                axes.plot(xs, ys, f"-{mark}", color=colour, ms=6, lw=1.4, label=arm, mec="white")
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_xticks([p[0] for p in next(iter(arms.values()))])
            axes.minorticks_off()
            axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
            for side in (axes.xaxis, axes.yaxis):
                side.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,g}"))
            plain(axes)
            if not column:
                axes.set_ylabel(title, fontsize=11, color=INK)
        panels[1][column].set_xlabel(GROWS[axis], fontsize=11, color=INK)
    handles = panels[0][0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside upper center", ncols=4, frameon=False)
    return figure


# ---- adaptors ------------------------------------------------------------------------------------


def adaptor_values(record: Record) -> Record:
    """Accuracies in per cent by taps, by labelled images, and before and after a shift."""
    values: Record = {"combined": {}, "few": {}, "shifts": {}}
    for row in record["combinations"]:
        best = values["combined"].setdefault(row["arm"], {})
        best[row["taps"]] = round(100 * max(row["accuracy"], best.get(row["taps"], 0) / 100), 2)
    for row in record["few"]:
        if row["tap"] == "pool5":
            points = values["few"].setdefault(row["arm"], [])
            points.append([row["shots"], round(100 * row["accuracy"], 2)])
    rows = [row for row in record["shifts"] if row.get("replay") == 0]
    for arm, word in dict.fromkeys((row["arm"], row["domain"]) for row in rows):
        mine = [row for row in rows if (row["arm"], row["domain"]) == (arm, word)]
        pair = [round(100 * fmean(r[k] for r in mine), 2) for k in ("new_before", "new_after")]
        values["shifts"].setdefault(arm, {})[word] = pair
    return values


def draw_adaptors(values: Any, record: Record) -> Figure:
    """Three panels: taps, few images, shifted images."""
    with plt.rc_context({"font.size": 8}):
        figure, (taps, few, shifts) = plt.subplots(
            1, 3, figsize=(11, 3.7), layout="constrained", width_ratios=(1.15, 0.9, 1.35)
        )
        names = list(values["combined"]["backprop"])
        for i, (arm, accuracies) in enumerate(values["combined"].items()):
            places = [k + (i - 1) * 0.26 for k in range(len(names))]
            taps.bar(places, accuracies.values(), 0.24, color=LOOKS[arm][0])
        taps.set_xticks(range(len(names)), [name.replace(" + ", "\n+ ") for name in names])
        taps.set_ylim(60, 100)
        taps.set_title("Taps: L0 pool5, L1 pool4, L2 pool3", loc="left", fontsize=9)
        for arm, points in values["few"].items():
            colour, mark = LOOKS[arm]
            xs, ys = zip(*points, strict=True)
            few.plot(xs, ys, f"-{mark}", color=colour, ms=5, lw=1.3, label=arm, mec="white")
        few.set_xscale("log")
        few.set_xticks([shots for shots, _ in values["few"]["backprop"]])
        few.xaxis.set_major_formatter("{x:.0f}")
        few.minorticks_off()
        few.set_xlabel("labelled images per class")
        few.set_title("Few images, pool5", loc="left", fontsize=9)
        for i, (arm, words) in enumerate(values["shifts"].items()):
            colour, mark = LOOKS[arm]
            for k, (before, after) in enumerate(words.values()):
                place = k + (i - 2) * 0.16
                shifts.plot([place] * 2, [before, after], color=colour, lw=1.2, alpha=0.6)
                shifts.plot(place, before, mark, color="white", mec=colour, ms=5)
                shifts.plot(place, after, mark, color=colour, mec="white", ms=6)
        shifts.set_xticks(range(6), values["shifts"]["backprop"])
        title = "Shifted images: hollow before, full after 10 per class"
        shifts.set_title(title, loc="left", fontsize=9)
        for axes in (taps, few, shifts):
            axes.spines[["top", "right"]].set_visible(False)
            axes.set_ylabel("test accuracy (%)")
        handles = few.get_legend_handles_labels()
        figure.legend(*handles, loc="outside lower center", ncols=5, frameon=False)
    return figure


# ---- deep nets -----------------------------------------------------------------------------------

CUTS = {"a layer per block": "o", "4 blocks": "s", "2 blocks": "^", "the whole net": "*"}
VARIANTS = (", no convolution", ", published")
SHOWN_FROM = 70.0  # per cent of accuracy; less accurate methods are named below the axis


def cut_rule_and_variant(arm: str) -> tuple[str, str, str]:
    """How a net is cut, by which rule its blocks learn, and the variant of the rule.

    Examples:
        >>> cut_rule_and_variant("4 blocks, predsim, no convolution")
        ('4 blocks', 'predsim', ', no convolution')
    """
    if arm == "backprop":
        return "the whole net", arm, ""
    cut, comma, rule = arm.partition(" blocks, ")
    cut, rule = (f"{cut} blocks", rule) if comma else ("a layer per block", arm)
    variant = next((v for v in VARIANTS if rule.endswith(v)), "")
    return cut, rule.removesuffix(variant), variant


def deep_values(record: Record) -> Record:
    """Of each arm of VGG11: accuracy in per cent, megabytes, and the accuracy by seconds."""
    values: Record = {}
    for arm, row in record["nets"]["vgg11"]["arms"].items():
        if "accuracy" in row and "peak_bytes" in row:
            seconds = row["epoch_seconds"]
            values[arm] = {
                "accuracy": round(100 * row["accuracy"], 2),
                "memory": round(row["peak_bytes"] / 2**20),
                "curve": [
                    [round(seconds * epoch, 2), round(100 * share, 2)]
                    for epoch, share in enumerate(row["curve"], 1)
                ],
            }
    return values


def colour_of(rule: str) -> str:
    """The colour of a rule in all plots; backprop is black."""
    return ALL[rule].colour if rule in ALL else "#000000"


def draw_deep(values: Any, record: Record) -> Figure:
    """Accuracy against peak memory, and against seconds of training."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 5.2), layout="constrained")
    shown = {arm: row for arm, row in values.items() if row["accuracy"] >= SHOWN_FROM}
    looks: dict[str, Any] = {}
    for arm, row in shown.items():
        cut, rule, variant = cut_rule_and_variant(arm)
        colour, mark = colour_of(rule), CUTS[cut]
        top, size = (4, 16) if rule == "backprop" else (3, 9)
        look = {"color": colour, "mfc": "white" if variant else colour, "ms": size, "zorder": top}
        left.plot(row["memory"], row["accuracy"], mark, mec=colour, mew=1.6, **look)
        if not variant:
            xs, ys = zip(*row["curve"], strict=True)
            right.plot(xs, ys, dash(cut), color=colour, lw=2.4 if rule == "backprop" else 1.5)
            right.plot(xs[-1], ys[-1], mark, mec="white", **look)
            looks[rule] = plt.Line2D([], [], color=colour, lw=3)
    for cut in {cut_rule_and_variant(arm)[0]: 0 for arm in shown}:
        look = {"marker": CUTS[cut], "ms": 12 if cut == "the whole net" else 8, "ls": dash(cut)}
        looks[cut] = plt.Line2D([], [], color=QUIET, **look)
    variants = [v.removeprefix(", ") for v in VARIANTS if any(arm.endswith(v) for arm in shown)]
    hollow = f"hollow: {' or '.join(variants)}"
    looks[hollow] = plt.Line2D([], [], color=QUIET, marker="o", mfc="white", ls="", ms=8)
    left.set_ylim(bottom=min(row["accuracy"] for row in shown.values()) - 1.5)
    below = [f"{arm} {row['accuracy']:.0f} %" for arm, row in values.items() if arm not in shown]
    left.set_title(f"below the axis: {', '.join(below)}" if below else "", fontsize=10, color=QUIET)
    left.set_xlabel("peak memory, MB", fontsize=11, color=INK)
    left.set_ylabel("test accuracy after the last epoch, %", fontsize=11, color=INK)
    right.set(ylim=(45, None), xlim=(0, None))
    right.set_xlabel("seconds of training", fontsize=11, color=INK)
    right.set_ylabel("test accuracy after each epoch, %", fontsize=11, color=INK)
    for axes in (left, right):
        plain(axes)
    where = {"loc": "outside upper center", "ncols": 5, "frameon": False, "fontsize": 10}
    figure.legend(list(looks.values()), list(looks), **where)
    return figure


def dash(cut: str) -> str:
    """Lines of blocks of several layers are dashed."""
    return "--" if "blocks" in cut else "-"


# ---- probes --------------------------------------------------------------------------------------

PROBED = {
    "backprop": ("#000000", "s"),
    "readout-learned": (PINK, "o"),
    "tpsgd-l2": (BLUE, "^"),
    "dfa": ("#E69F00", "v"),
    "frozen": (GREY, "D"),
}
PROBE_PANELS = {  # key, and a factor for per cent
    "linear probe of the block, %": ("probe", 100),
    "effective rank": ("rank", 1),
    "CKA with a restart of backprop": ("cka", 1),
}


def probe_values(record: Record) -> Record:
    """By arm: each measure by block, and the angle of the hidden blocks by epoch, as means.

    Backprop is compared with another restart of backprop: its first one is the reference.
    """
    values: Record = {}
    for arm in PROBED:
        each = record["rows"][arm]["each"]
        row: Record = {}
        for key, factor in PROBE_PANELS.values():
            runs = each[1:] if key == "cka" else each
            row[key] = [
                round(factor * fmean(v), 3) for v in zip(*(r[key] for r in runs), strict=True)
            ]
        hidden = [run["angles"][:-1] for run in each]
        if arm != "frozen" and all(hidden):
            epochs = zip(*(block for run in hidden for block in run), strict=True)
            row["angle"] = [round(fmean(epoch), 2) for epoch in epochs]
        values[arm] = row
    return values


def draw_probes(values: Any, record: Record) -> Figure:
    """Three measures by block at the end of training, and the angle by epoch."""
    figure, panels = plt.subplots(1, 4, figsize=(12, 3.9), layout="constrained")
    for arm, row in values.items():
        colour, mark = PROBED[arm]
        look = {"color": colour, "marker": mark, "ms": 7, "lw": 1.5, "mec": "white", "label": arm}
        for axes, (key, _) in zip(panels, PROBE_PANELS.values(), strict=False):
            axes.plot(range(1, len(row[key]) + 1), row[key], **look)
        if "angle" in row:
            panels[3].plot(range(1, len(row["angle"]) + 1), row["angle"], **look)
    panels[3].axhline(90, color=QUIET, lw=1, ls=":")
    titles = [*PROBE_PANELS, "angle to backprop's gradient, degrees"]
    for axes, title in zip(panels, titles, strict=True):
        axes.set_title(title, fontsize=10, color=INK, loc="left")
        axes.set_xlabel("epoch" if axes is panels[3] else "block", fontsize=10, color=INK)
        axes.set_xticks(range(1, 6))
        plain(axes)
    handles = panels[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside upper center", ncols=5, frameon=False, fontsize=10.5)
    return figure


# ---- cost ----------------------------------------------------------------------------------------

COSTS = {  # net of cost.json or deep.json, title, points of accuracy that the axis shows
    "mnist-mlp": ("MNIST, MLP 256-256", 12),
    "cifar10-cnn": ("CIFAR-10, CNN of 2 layers", 20),
    "vgg11": ("Imagenette, VGG11", 20),
    "resnet18-sgd": ("CIFAR-10, ResNet18", 8),
    "vit": ("CIFAR-10, ViT of 8 layers", 8),
}
OF_DEFAULT_HEAD = {  # arms of deep nets, by their rule; a net of stages is shown in these
    "small head": "auxiliary",
    "2 blocks, small head": "2 blocks, auxiliary",
    "4 blocks, small head": "4 blocks, auxiliary",
    "4 stages, two layers": "4 blocks, auxiliary",
}
COST_TICKS = (0.1, 0.2, 0.5, 0.7, 1, 1.4, 2, 4, 10, 20)
COST_AXES = ("time over backprop's", "memory over backprop's")


def cost_values(record: Record) -> Record:
    """By net and arm: accuracy in per cent, time and memory over backprop's.

    Rows of the deep nets that say that they are of an earlier run are left out.
    """
    values: Record = {}
    nets = {name: row["arms"] for name, row in record["rows"].items()}
    for name, row in load("deep")["nets"].items():
        rows = {arm: r for arm, r in row["arms"].items() if "note" not in r}
        nets[name] = {OF_DEFAULT_HEAD.get(arm, arm): r for arm, r in rows.items()}
        nets[name] = {arm: r for arm, r in nets[name].items() if "small head" not in arm}
    for name in COSTS:
        for arm, row in nets.get(name, {}).items():
            base = nets[name].get("backprop", {})
            pairs = [(cost_of(row, key), cost_of(base, key)) for key in ("seconds", "bytes")]
            ratios = [round(a / b, 3) if a and b else None for a, b in pairs]
            if "accuracies" in row and any(ratios):
                mean = round(100 * fmean(row["accuracies"]), 2)
                values.setdefault(name, {})[arm] = [mean, *ratios]
    return values


def cost_of(row: Record, key: str) -> float | None:
    """The median seconds of a row, or its bytes with the inputs that were kept."""
    if key == "seconds":
        return median(row["seconds_each"]) if row.get("seconds_each") else row.get("seconds")
    return row.get("total_bytes") or row.get("peak_bytes")


def cost_block() -> str:
    """The numbers of the figure as a table, the small nets' rules first."""
    record = load("cost")
    values = cost_values(record)
    nets = [net for net in COSTS if net in values]
    arms = list(dict.fromkeys(arm for net in nets for arm in values[net]))
    lines = [
        f"| rule | {' | '.join(COSTS[net][0] for net in nets)} |",
        f"|---|{'---:|' * len(nets)}",
    ]
    for arm in arms:
        cells = []
        for net in nets:
            accuracy, *ratios = values[net].get(arm, [None])
            costs = ", ".join("–" if ratio is None else f"{ratio:.2f}" for ratio in ratios)
            cells.append("–" if accuracy is None else f"{accuracy:.1f} ({costs})")
        lines.append(f"| `{arm}` | {' | '.join(cells)} |")
    small = []
    for name, row in record["rows"].items():
        chosen = row["settings"]
        images = f"{chosen['max_train']:,}" if chosen["max_train"] else "all"
        epochs = f"{chosen['epochs']} epochs, {chosen['restarts']} restarts"
        small.append(f"{COSTS[name][0]}: {images} images, {epochs}")
    used = record["versions"]
    where = f"{record['machine']['cpu']}, 1 thread; torch {used['torch']}"
    note = (
        f"Accuracy in per cent (time, memory, both over backprop's). {'; '.join(small)}: {where}."
    )
    return "\n".join(
        [*lines, "", f"{note} Made by `{record['command']}`; deep nets: [here](deep.md)."]
    )


def draw_cost(values: Any, record: Record) -> Figure:
    """A column for each net: accuracy against time, and against memory."""
    size = (3.1 * len(values), 6.6)
    figure, panels = plt.subplots(2, len(values), figsize=size, layout="constrained", squeeze=False)
    looks: dict[str, Any] = {}
    for column, (net, arms) in enumerate(values.items()):
        title, points = COSTS[net]
        floor = arms["backprop"][0] - points
        below = [f"{arm} {row[0]:.0f}" for arm, row in arms.items() if row[0] < floor]
        for line, axes in enumerate(panels[:, column]):
            for arm, row in sorted(arms.items(), key=lambda pair: pair[0] == "backprop"):
                if row[0] < floor or row[1 + line] is None:
                    continue
                cut, rule, variant = cut_rule_and_variant(arm)
                entry = ARMS.get(rule) or ARMS.get(arm)
                colour, mark = (entry.colour, entry.marker) if entry else ("#000000", "o")
                several = " blocks" in cut
                look = {"color": colour, "ms": 12 if arm == "backprop" else 8, "zorder": 3}
                look |= {"mfc": "white" if variant else colour, "mew": 1.6 if variant else 0.7}
                look |= {"mec": INK if several else colour if variant else "white"}
                axes.plot(row[1 + line], row[0], "*" if arm == "backprop" else mark, **look)
                if several:
                    axes.annotate(
                        cut.partition(" ")[0], (row[1 + line], row[0]), xytext=(5, 3),
                        textcoords="offset points", fontsize=8, color=QUIET,
                    )  # fmt: skip
                shape = "*" if arm == "backprop" else mark
                looks[rule] = plt.Line2D([], [], color=colour, marker=shape, ls="", ms=9)
            axes.axvline(1, color=QUIET, lw=1, ls=":")
            axes.set_xscale("log")
            axes.set_xticks(COST_TICKS, list(map(str, COST_TICKS)))
            axes.minorticks_off()
            axes.margins(x=0.15, y=0.1)
            axes.set_xlabel(COST_AXES[line], fontsize=10, color=INK)
            shown = [row[1 + line] for row in arms.values() if row[1 + line] and row[0] >= floor]
            if shown:
                axes.set_xlim(min(shown) / 1.25, max(shown) * 1.25)
            plain(axes)
        panels[0, column].set_title(
            title, fontsize=11, color=INK, loc="left", pad=20 if below else 6
        )
        if below:
            note = "below: " + ", ".join(below)
            panels[0, column].annotate(
                fill(note, 42), (0, 1.02), xycoords="axes fraction", fontsize=7.5, color=QUIET
            )
    for axes in panels[:, 0]:
        axes.set_ylabel("test accuracy, %", fontsize=10, color=INK)
    where = {"loc": "outside lower center", "ncols": 6, "frameon": False, "fontsize": 10}
    figure.legend(list(looks.values()), list(looks), **where)
    return figure


# ---- streams -------------------------------------------------------------------------------------

STREAMS = {
    "backprop": "backprop",
    "readout": "readout",
    "frozen": "random layers",
    "rls": "random layers, rls",
    "backprop, buffer": "backprop + buffer",
    "readout, buffer": "readout + buffer",
    "frozen, buffer": "random layers + buffer",
}


def stream_values(record: Record) -> Record:
    """For each task and arm: sample counts, the accuracy of each class then, the mean at last."""

    def of_arm(row: Record) -> Record:
        times, shares = zip(*((c["samples"], c["classes"]) for c in row["curve"]), strict=True)
        return {"samples": times, "classes": shares, "mean": round(100 * row["accuracy"], 1)}

    tasks = [task for task in ("digits", "photos") if task in record]
    return {t: {arm: of_arm(record[t]["arms"][arm]) for arm in STREAMS} for t in tasks}


def draw_streams(values: Any, record: Record) -> Figure:
    """A map for each arm: a row per class, time from left to right, dark where it is recognised."""
    rows = 2 * len(values)
    figure, axes = plt.subplots(rows, 4, figsize=(11, 2.5 * rows), layout="constrained")
    image: Any = None
    for task, lines in zip(values, axes.reshape(-1, 8), strict=True):
        for panel, arm in zip((*lines[:4], *lines[4:7]), STREAMS, strict=True):
            row = values[task][arm]
            grid = list(zip(*row["classes"], strict=True))
            edges = [0, *row["samples"]]
            names = record[task]["settings"].get("classes", range(len(grid)))
            image = panel.pcolormesh(
                edges, range(len(grid) + 1), grid, cmap="Blues", vmin=0, vmax=1
            )
            solved = task == "photos" and arm == "rls"
            label = "average of pool5, rls" if solved else STREAMS[arm]
            title = f"{label}: {row['mean']:.1f} %"
            panel.set_title(title, fontsize=10.5, color=INK, loc="left")
            leftmost = panel in (lines[0], lines[4])
            panel.set_yticks([c + 0.5 for c in range(len(grid))], map(str, names))
            panel.tick_params(labelleft=leftmost)
            panel.tick_params(length=0, labelcolor=QUIET, labelsize=8)
            panel.invert_yaxis()
            panel.spines[:].set_color(LINE)
        lines[7].axis("off")
        for panel in (lines[0], lines[4]):
            panel.set_ylabel(task, color=INK)
        for panel in lines[4:7]:
            panel.set_xlabel("samples so far", color=INK)
    bar = figure.colorbar(image, ax=axes[:, 3], fraction=0.12)
    bar.set_label("test accuracy of the class", color=INK)
    bar.outline.set_visible(False)  # type: ignore[operator]
    return figure


# ---- edge ----------------------------------------------------------------------------------------

PARTS = {
    "weights": BLUE,
    "moments of Adam": SKY,
    "arena": GREEN,
    "samples of a batch": ORANGE,
    "stack": INK,
}
DEVICES = (  # net, batch, optimizer
    ("64-32-10", 1, "sgd"),
    ("head 512-10", 1, "sgd"),
    ("CNN 28x28: 8x5 s2, 16x3 s2", 1, "sgd"),
    ("64-32-10", 16, "adam"),
    ("head 1280-10", 1, "sgd"),
    ("784-32-10", 1, "sgd"),
    ("head 512-64-10", 1, "sgd"),
    ("CNN 28x28: 8x5 s2, 16x3 s2", 16, "sgd"),
)
ARENAS = {  # key, colour, mark
    "local rule": ("local_arena_bytes", GREEN, "o"),
    "backprop, update fused too": ("backprop_arena_bytes", "#000000", "s"),
    "backprop, outputs computed twice": ("recomputing_backprop_arena_bytes", GREY, "D"),
}


def edge_values(record: Record) -> Record:
    """Bytes of some nets by part, and of arenas by depth and by length."""
    rows = {(r["net"], r["batch"], r["optimizer"]): r for r in record["sizes"]["rows"]}
    bars = {_device(*key): _edge_parts(rows[key]) for key in DEVICES}
    arenas: Record = {}
    for row in (*record["split"]["by_depth"], *record["split"]["by_length"]):
        if row.get("batch", 1) == 1:
            for label, (key, _, _) in ARENAS.items():
                points = arenas.setdefault(row["net"], {}).setdefault(label, [])
                points.append([row.get("convolutions") or row["steps"], row[key]])
    return {"bars": bars, "arenas": arenas}


def _device(net: str, batch: int, optimizer: str) -> str:
    adam = ", Adam" if optimizer == "adam" else ""
    return f"{net.replace(': ', chr(10))}{f', batch {batch}' if batch > 1 else ''}{adam}"


def _edge_parts(row: Record) -> list[int]:
    """Bytes in the order of `PARTS`."""
    ram = dict(row["ram"])
    weights, moments = ram.pop("weights"), ram.pop("moments of the optimizer", 0)
    return [weights, moments, sum(ram.values()), row["samples_bytes"], row["stack_bytes"]]


def draw_edge(values: Any, record: Record) -> Figure:
    """RAM by part; arenas by depth and by length."""
    figure, (left, depth, length) = plt.subplots(
        1, 3, figsize=(12.5, 4.4), layout="constrained", width_ratios=(1.4, 1, 1)
    )
    _draw_edge_bars(left, values["bars"])
    _draw_arenas(depth, values["arenas"], {"pictures": "-", "keywords": "--"})
    _draw_arenas(length, values["arenas"], {"cell 1-32-2": "-"})
    depth.set(xticks=[x for x, _ in values["arenas"]["pictures"]["local rule"]], ylim=(2.4, 400))
    depth.set_xlabel("convolutions", color=INK)
    depth.set_ylabel("arena, KB (computed)", color=INK)
    for x, y, text in ((12, 265, "pictures 32 x 32"), (12, 12.2, "dashed: keywords 49 x 10")):
        depth.text(x, y, text, color=QUIET, fontsize=9.5, ha="right")
    depth.legend(loc="lower right", framealpha=1, edgecolor="none", fontsize=9.5)
    depth.set_title("By depth", fontsize=10.5, loc="left", color=INK)
    length.set(xscale="log", ylim=(3, 200))
    length.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,g}"))
    length.minorticks_off()
    length.set_xlabel("time steps of a sequence", color=INK)
    length.set_title("By length: recurrent cell 1-32-2", fontsize=10.5, loc="left", color=INK)
    return figure


def _draw_arenas(axes: Axes, arenas: Record, dashes: dict[str, str]) -> None:
    """A line for each way to learn and each net."""
    for name, dash in dashes.items():
        for i, (label, (_, colour, mark)) in enumerate(ARENAS.items()):
            xs, ys = zip(*arenas[name][label], strict=True)
            look = {"color": colour, "marker": mark, "mec": "white", "ms": 6.5, "lw": 1.5}
            shown = label if dash == "-" else None
            axes.plot(xs, [y / 1024 for y in ys], dash, label=shown, zorder=5 - i, **look)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,g}"))
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
    axes.minorticks_off()
    plain(axes)


def _draw_edge_bars(axes: Axes, bars: dict[str, list[int]]) -> None:
    """A bar for each net, the smallest on top."""
    places = range(len(bars), 0, -1)
    for i, (part, colour) in enumerate(PARTS.items()):
        begins = [sum(row[:i]) / 1024 for row in bars.values()]
        widths = [row[i] / 1024 for row in bars.values()]
        axes.barh(places, widths, 0.62, left=begins, color=colour, label=part)
    for place, row in zip(places, bars.values(), strict=True):
        box = {"fc": "white", "ec": "none", "pad": 1}
        total = sum(row) / 1024
        axes.text(total + 4, place, f"{total:.1f} KB", va="center", fontsize=9, bbox=box)
    for limit in (16, 64, 256):
        axes.axvline(limit, color=QUIET, lw=1, ls=":", zorder=0)
    axes.legend(loc="upper right", bbox_to_anchor=(0.95, 0.98), fontsize=9.5, edgecolor="none")
    axes.set_yticks(places, bars, fontsize=9.5)
    axes.set(xlim=(0, 265), xticks=(16, 64, 128, 192, 256), ylim=(0.4, len(bars) + 0.6))
    axes.set_xlabel("RAM, KB", color=INK)
    axes.set_title("RAM on a Cortex-M4F", fontsize=10.5, loc="left", color=INK)
    plain(axes, "x")
    axes.grid(False)


# ---- the paper's figures: filter sampling, CIFAR-10 scaling --------------------------------------

SAMPLING = {  # colour, mark, dash
    "backprop": ("#000000", "s", "-"),
    "readout": (GREEN, "o", "-"),
    "filter-based": (BLUE, "^", "-"),
    "naive": (ORANGE, "v", "-"),
    "naive, small": (ORANGE, "v", ":"),
    "frozen": (GREY, "D", "--"),
}
SAMPLED = {"mnist": "MNIST", "cifar10": "CIFAR-10", "digits": "digits"}
HEATMAPS = {"tpsgd-l2": "tpSGD", "backprop": "Adam, backprop"}


def filter_values(record: Record) -> Record:
    """For each data set and arm: filters, mean accuracy and its deviation in per cent."""
    values: Record = {}
    for row in record["rows"].values():
        settings = row["settings"]
        points = values.setdefault(settings["data"], {}).setdefault(settings["arm"], [])
        shares = (round(100 * row[k], 2) for k in ("accuracy", "deviation"))
        points.append([settings["filters"], *shares])
    return {
        data: {arm: sorted(arms[arm]) for arm in SAMPLING if arm in arms}
        for data, arms in values.items()
    }


def draw_filters(values: Any, record: Record) -> Figure:
    """Accuracy against the number of filters, a panel per data set."""
    figure, panels = plt.subplots(
        1, len(values), figsize=(5 * len(values), 4.6), layout="constrained", squeeze=False
    )
    for axes, (data, arms) in zip(panels[0], values.items(), strict=True):
        for arm, points in arms.items():
            colour, mark, dashes = SAMPLING[arm]
            xs, ys, spread = zip(*points, strict=True)
            look = {"color": colour, "ls": dashes, "lw": 1.5, "marker": mark, "ms": 6}
            axes.errorbar(xs, ys, spread, label=arm, mec="white", elinewidth=1, **look)
        axes.set_xscale("log", base=2)
        axes.set_xticks([point[0] for point in next(iter(arms.values()))])
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.minorticks_off()
        axes.set_title(SAMPLED[data], fontsize=11, color=INK)
        axes.set_xlabel("filters of the convolution", fontsize=11, color=INK)
        plain(axes)
    panels[0][0].set_ylabel("test accuracy, %", fontsize=11, color=INK)
    handles = panels[0][0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside upper center", ncols=6, frameon=False, fontsize=10.5)
    return figure


def scaling_values(record: Record) -> Record:
    """Of each arm: accuracy in per cent and seconds, a row per number of dense layers."""
    values: Record = {}
    most = max(row["settings"]["dense"] for row in record["rows"].values())
    empty = [[None] * (most + 1) for _ in range(most + 1)]
    for row in record["rows"].values():
        settings = row["settings"]
        maps = values.setdefault(
            settings["arm"], {k: [list(line) for line in empty] for k in ("accuracy", "seconds")}
        )
        place = settings["dense"], settings["convolutions"]
        maps["accuracy"][place[0]][place[1]] = round(100 * row["accuracy"], 1)
        maps["seconds"][place[0]][place[1]] = round(row["seconds"], 2)
    return values


def draw_scaling(values: Any, record: Record) -> Figure:
    """The paper's four heatmaps: accuracy above seconds, tpSGD left of Adam."""
    figure, panels = plt.subplots(2, 2, figsize=(9.4, 8), layout="constrained")
    for row, (kind, title, colours) in enumerate(
        (("accuracy", "test accuracy, %", "Blues"), ("seconds", "seconds of training", "Oranges"))
    ):
        maps = [values[arm][kind] for arm in HEATMAPS]
        numbers = [n for grid in maps for line in grid for n in line if n is not None]
        for axes, arm, grid in zip(panels[row], HEATMAPS, maps, strict=True):
            small = arm == "tpsgd-l2" and kind == "accuracy" and "frozen" in values
            below = values["frozen"][kind] if small else None
            heatmap(axes, grid, (min(numbers), max(numbers)), colours, below)
            note = "; small: random layers" if small else ""
            axes.set_title(f"{HEATMAPS[arm]}: {title}{note}", fontsize=10.5, color=INK, loc="left")
            axes.set_ylabel("dense layers of 256" if arm == "tpsgd-l2" else "", color=INK)
            axes.set_xlabel("convolutions of 16 filters" if row else "", color=INK)
    return figure


def heatmap(axes: Axes, grid: Any, limits: Any, colours: str, below: Any) -> None:
    """Cells with their numbers, dense layers upwards; perhaps with a second, smaller number."""
    low, high = limits
    cells = [[float("nan") if n is None else n for n in line] for line in grid]
    axes.imshow(cells, cmap=colours, vmin=low, vmax=high + (high - low) / 4, origin="lower")
    for y, line in enumerate(grid):
        for x, number in enumerate(line):
            if number is None:
                continue
            ink = "white" if number > low + 0.75 * (high - low) else INK
            second = below[y][x] if below else None
            lift = 0.12 if second is not None else 0
            where = {"ha": "center", "va": "center", "color": ink}
            axes.text(x, y + lift, f"{number:.1f}", fontsize=10.5, **where)
            if second is not None:
                axes.text(x, y - 0.24, f"{second:.1f}", fontsize=7.5, **where)
    axes.set_xticks(range(len(grid)))
    axes.set_yticks(range(len(grid)))
    axes.tick_params(length=0, labelcolor=INK)
    axes.spines[:].set_visible(False)


# ---- many machines -------------------------------------------------------------------------------

RANKED = {  # colour, mark, dash
    "data-parallel local": (GREEN, "o", "-"),
    "pipelined local": (GREEN, "^", "--"),
    "data-parallel backprop": ("#000000", "s", "-"),
    "pipelined backprop": ("#000000", "v", "--"),
}
SCALED = {"mlp": "MLP, 16 layers", "vgg11": "VGG11"}


def many_values(record: Record) -> Record:
    """By net, place and way: ranks, and speed; of two orders of backprop the better one."""
    values: Record = {}
    for row in record["scale"]["rows"]:
        lines = values.setdefault(row["net"], {}).setdefault(row["place"], {})
        line = lines.setdefault(row["way"].partition(",")[0], {})
        line[row["ranks"]] = max(line.get(row["ranks"], 0.0), float(f"{row['relative']:.3g}"))
    return values


def draw_many(values: Any, record: Record) -> Figure:
    """Speed by ranks: a row per net, a panel per place."""
    places = list(next(iter(values.values())))
    figure, panels = plt.subplots(
        len(values), len(places), figsize=(11, 6.4), layout="constrained", sharex=True, sharey=True
    )
    for line, (net, by_place) in zip(panels, values.items(), strict=True):
        for axes, place in zip(line, places, strict=True):
            for way, (colour, mark, dashes) in RANKED.items():
                xs, ys = list(by_place[place][way]), list(by_place[place][way].values())
                look = {"color": colour, "marker": mark, "ls": dashes, "mec": "white"}
                axes.plot(xs, ys, label=way, lw=1.5, ms=6.5, **look)
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set(ylim=(0.008, 2), xticks=(1, 8, 64, 512, 4096))
            for side in (axes.xaxis, axes.yaxis):
                side.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,g}"))
            axes.minorticks_off()
            plain(axes)
        line[0].set_ylabel(SCALED[net], fontsize=11, color=INK)
    for axes, place in zip(panels[0], places, strict=True):
        link = record["scale"]["places"][place]["link"]
        bits, delay = 8 * link["bandwidth"], link["latency"]
        speed = f"{bits / 1e9:g} Gb/s" if bits >= 1e9 else f"{bits / 1e6:g} Mb/s"
        speed += f", {delay * 1e6:g} µs" if delay < 1e-3 else f", {delay * 1e3:g} ms"
        axes.set_title(f"{place}: {speed}", fontsize=10.5, color=INK)
    figure.supylabel("samples per second and rank, over backprop on one rank", fontsize=10.5)
    figure.supxlabel("ranks", fontsize=11, color=INK)
    handles = panels[0][0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside upper center", ncols=4, frameon=False, fontsize=10.5)
    return figure


# ---- memory of deep nets -------------------------------------------------------------------------

WAYS = {  # colour, marker, by how much the label is higher
    "backprop": ("#000000", "s", 0),
    "backprop, checkpointed": (GREY, "D", 5),
    "backprop, micro-batches of 8": (ORANGE, "v", -5),
    "two layers per block, simultaneous": (SKY, "o", 0),
    "two layers per block, sequential": (GREEN, "o", 0),
}


def depth_values(record: Record) -> dict[str, dict[str, float]]:
    """Megabytes beyond data and weights, by way and depth."""
    return {
        way: {n: round(row["beyond_weights"] / 2**20, 1) for n, row in record["depth"][way].items()}
        for way in WAYS
    }


def draw_depth(values: dict[str, dict[str, float]], record: Record) -> Figure:
    """Lines by depth, both axes logarithmic."""
    figure, axes = plt.subplots(figsize=(8, 4.2), layout="constrained")
    for way, line in values.items():
        colour, marker, up = WAYS[way]
        axes.plot([*map(int, line)], [*line.values()], marker=marker, color=colour)
        axes.annotate(
            f"{way} ({line['64']:,.0f} MB)", (64, line["64"]), (8, up), fontsize=9.5, color=colour,
            textcoords="offset points", va="center",
        )  # fmt: skip
    axes.set(xscale="log", yscale="log", xlim=(7, 330), ylim=(10, 1200))
    axes.set_xticks([8, 16, 32, 64], ["8", "16", "32", "64 layers"], color=INK)
    axes.set_yticks([10, 100, 1000], ["10 MB", "100 MB", "1,000 MB"])
    axes.minorticks_off()
    plain(axes, "y")
    return figure


FIGURES: dict[str, tuple[str, Callable[..., Any], Callable[..., Figure]]] = {
    "sequences": ("recurrent", sequence_values, draw_sequences),
    "peers": ("peers", peer_values, draw_peers),
    "memory": ("memory-gpu", memory_values, draw_memory),
    "adaptors": ("adaptors", adaptor_values, draw_adaptors),
    "deep": ("deep", deep_values, draw_deep),
    "streams": ("streams", stream_values, draw_streams),
    "edge": ("edge", edge_values, draw_edge),
    "filter-sampling": ("filters", filter_values, draw_filters),
    "cifar-scaling": ("scaling", scaling_values, draw_scaling),
    "many": ("many", many_values, draw_many),
    "deep-memory": ("deep_memory", depth_values, draw_depth),
    "probes": ("probes", probe_values, draw_probes),
    "cost": ("cost", cost_values, draw_cost),
}
