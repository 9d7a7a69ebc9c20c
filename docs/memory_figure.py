"""Draw seconds and bytes against samples, depth and width, from results/memory-gpu.json.

python docs/memory_figure.py        # writes docs/assets/memory.png

`docs/fill_numbers.py` draws it too when it is out of step: the picture holds the numbers it shows.
"""

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.ticker import FuncFormatter, LogLocator
from written import shows

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "assets" / "memory.png"
INK, LINE = "#1b1f24", "#b9c0c9"
LOOKS = {
    "backprop": ("#000000", "s"),
    "readout": ("#007A5A", "o"),
    "tpsgd-l2": ("#0072B2", "^"),
    "frozen": ("#888888", "D"),
}
AXES = {"samples": "samples", "depth": "hidden layers", "width": "units per layer"}


def values(record: dict[str, Any]) -> dict[str, dict[str, list[list[float]]]]:
    """Per axis and arm: value, seconds, megabytes beyond the weights."""
    found: dict[str, dict[str, list[list[float]]]] = {}
    for row in record.get("scaling", []):
        beyond = (row["peak_bytes"] - row["weights"]) / 2**20
        arm = found.setdefault(row["axis"], {}).setdefault(row["arm"], [])
        arm.append([row["value"], round(row["seconds"], 4), round(beyond, 3)])
    return found


def stale(record: dict[str, Any]) -> bool:
    """Whether the picture shows other numbers, or is not there."""
    return not shows(PICTURE, values(record))


def draw(record: dict[str, Any]) -> None:
    """Two rows, time and memory; a column for each thing that grows."""
    plt.rcParams.update({"font.family": "DejaVu Sans"})
    figure, panels = plt.subplots(2, 3, figsize=(10, 6), layout="constrained", sharex="col")
    for column, (axis, arms) in enumerate(values(record).items()):
        for row, (title, place) in enumerate((("seconds per epoch", 1), ("MB beyond weights", 2))):
            axes = panels[row][column]
            for arm, points in arms.items():
                colour, mark = LOOKS[arm]
                xs, ys = [p[0] for p in points], [p[place] for p in points]
                axes.plot(xs, ys, f"-{mark}", color=colour, ms=6, lw=1.4, label=arm, mec="white")
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_xticks([p[0] for p in next(iter(arms.values()))])
            axes.minorticks_off()
            axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
            for side in (axes.xaxis, axes.yaxis):
                side.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,g}"))
            axes.tick_params(length=0, labelcolor=INK)
            axes.grid(color=LINE, lw=0.6)
            axes.set_axisbelow(True)
            for side in ("top", "right", "left"):
                axes.spines[side].set_visible(False)
            if not column:
                axes.set_ylabel(title, fontsize=11, color=INK)
        panels[1][column].set_xlabel(AXES[axis], fontsize=11, color=INK)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4, frameon=False)
    PICTURE.parent.mkdir(exist_ok=True)
    seen = {"Software": None, "Description": json.dumps(values(record))}
    figure.savefig(PICTURE, dpi=150, metadata=seen)
    plt.close(figure)


if __name__ == "__main__":
    draw(json.loads((ROOT / "results" / "memory-gpu.json").read_text(encoding="utf-8")))
