"""Draw the figure of the peers from results/peers.json: accuracy against seconds.

python docs/peers_figure.py        # writes docs/assets/peers.png

`docs/fill_numbers.py` draws it too when it is out of step: the picture holds the numbers it shows.
"""

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.ticker import LogLocator
from written import shows

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "assets" / "peers.png"
NET = "mlp-256-steep"
INK, QUIET, LINE = "#1b1f24", "#5b6470", "#b9c0c9"
# Colour (Okabe and Ito's) and mark: black backprop, green and blue our rules, orange closed forms
LOOKS = {
    "backprop": ("#000000", "s"),
    "readout": ("#007A5A", "o"),
    "readout, ridge head": ("#007A5A", "D"),
    "tpsgd-l2": ("#0072B2", "o"),
    "tpsgd-l2, ridge head": ("#0072B2", "D"),
    "tpsgd-l2, quick": ("#0072B2", "^"),
    "tpsgd-l2, one epoch": ("#0072B2", "v"),
    "drtp": ("#56B4E9", "o"),
    "lm-karnet": ("#D55E00", "o"),
    "zorb": ("#E69F00", "o"),
    "dladmm": ("#CC79A7", "o"),
    "dladmm, rho 1": ("#CC79A7", "v"),
    "elm": ("#888888", "D"),
    "frozen": ("#888888", "o"),
}


def values(record: dict[str, Any]) -> list[dict[str, list[float]]]:
    """On the GPU and on the CPU: each arm's seconds and accuracy in per cent."""
    found = []
    for where in (record, record.get("cpu", {})):
        arms = where.get("nets", {}).get(NET, {}).get("arms", {})
        kept = {name: arms[name] for name in LOOKS if name in arms}
        found.append(
            {k: [round(a["seconds"], 3), round(100 * a["accuracy"], 2)] for k, a in kept.items()}
        )
    return found


def stale(record: dict[str, Any]) -> bool:
    """Whether the picture shows other numbers, or is not there."""
    return not shows(PICTURE, values(record))


def draw(record: dict[str, Any]) -> None:
    """Two panels, one per machine, on a white card that reads on a dark page as well."""
    plt.rcParams.update({"font.family": "DejaVu Sans"})
    figure, panels = plt.subplots(1, 2, figsize=(10, 4.8), layout="constrained", sharey=True)
    machines = record["machine"], record.get("cpu", {}).get("machine", {"threads": "?"})
    names = machines[0]["gpu"], f"CPU, {machines[1]['threads']} threads"
    for axes, name, arms in zip(panels, names, values(record), strict=True):
        for arm, (seconds, accuracy) in arms.items():
            colour, mark = LOOKS[arm]
            top = 3 if arm.startswith("tpsgd") else 2
            axes.plot(
                seconds, accuracy, mark, color=colour, ms=9, label=arm, mec="white", zorder=top
            )
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter("")
        axes.set_title(name, fontsize=11, color=INK)
        axes.set_xlabel("seconds of training", fontsize=11, color=INK)
        axes.tick_params(length=0, labelcolor=INK, which="both")
        axes.grid(color=LINE, lw=0.6)
        axes.set_axisbelow(True)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
    panels[0].set_ylabel("test accuracy, %", fontsize=11, color=INK)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside upper center", ncols=5, frameon=False, fontsize=10.5
    )
    PICTURE.parent.mkdir(exist_ok=True)
    seen = {"Software": None, "Description": json.dumps(values(record))}
    figure.savefig(PICTURE, dpi=150, metadata=seen)
    plt.close(figure)


if __name__ == "__main__":
    draw(json.loads((ROOT / "results" / "peers.json").read_text(encoding="utf-8")))
