"""Draw the figure of the recurrent nets from results/recurrent.json.

python docs/sequences_figure.py        # writes docs/assets/sequences.png

`docs/fill_numbers.py` draws it too when it is out of step: the picture holds the numbers it shows.
"""

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from written import shows

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "assets" / "sequences.png"
INK, QUIET, LINE = "#1b1f24", "#5b6470", "#b9c0c9"
PALE = ("#56B4E9", "#c9ced6")
SETS = {
    "seq-mnist-rows": "MNIST rows\n28 steps of 28",
    "seq-mnist-pixels": "MNIST pixels\n49 steps of 1",
    "eeg": "EEG by recording\n45 steps of 1",
    "tweets": "tweets\n15 words, one-hot",
    "tweets-vectors": "tweets\n15 word vectors",
}
# What a bar shows (the better of several arms), its colour (Okabe and Ito's), and where the paper's
# figure stands in its table.
BARS: list[tuple[str, tuple[str, ...], str, int | None]] = [
    ("DRTP", ("drtp",), "#56B4E9", 2),
    ("tpSGD l1", ("tpsgd-l1",), "#0072B2", 3),
    ("reservoir: random, solved head", ("reservoir",), "#c9ced6", None),
    ("readout", ("readout",), "#007A5A", None),
    ("backprop through time, better of two cells", ("backprop", "backprop-leaky"), "#D55E00", 4),
]


def values(record: dict[str, Any]) -> list[list[tuple[float | None, float | None]]]:
    """For each bar, over the sets: our mean accuracy and the paper's, in per cent."""
    found = []
    for _, arms, _, place in BARS:
        row: list[tuple[float | None, float | None]] = []
        for name in SETS:
            table = record["tables"].get(f"{name}, single", {"arms": {}})
            means = [fmean(table["arms"][a]["accuracies"]) for a in arms if a in table["arms"]]
            ours = round(100 * max(means), 1) if means else None
            row.append((ours, table["paper"][place] if means and place is not None else None))
        found.append(row)
    return found


def stale(record: dict[str, Any]) -> bool:
    """Whether the picture shows other numbers, or is not there."""
    return not shows(PICTURE, values(record))


def draw(record: dict[str, Any]) -> None:
    """Bars of ours, marks of the paper's, on a white card that reads on a dark page as well."""
    plt.rcParams.update({"font.family": "DejaVu Sans"})
    figure, axes = plt.subplots(figsize=(10, 5.2), layout="constrained")
    found, wide = values(record), 0.165
    for i, ((label, _, colour, _), row) in enumerate(zip(BARS, found, strict=True)):
        for group, (ours, paper) in enumerate(row):
            x = group + (i - 2) * wide
            if ours is None:
                axes.text(x, 1.5, "–", ha="center", color=QUIET)
                continue
            axes.bar(x, ours, wide * 0.9, color=colour, label=label if not group else None)
            at = {"ha": "center", "fontsize": 8.5, "color": INK if colour in PALE else "white"}
            axes.text(x, 2, f"{ours:.1f}", **at)
            if paper is not None:
                mark = "the paper's figure" if not group and not i else None
                half = 0.45 * wide
                axes.plot([x - half, x + half], [paper] * 2, color=INK, lw=2.2, label=mark)
    axes.set_xticks(range(len(SETS)), SETS.values(), fontsize=11, color=INK)
    axes.set(ylim=(0, 102), xlim=(-0.55, len(SETS) - 0.45))
    axes.set_yticks(range(0, 101, 20))
    axes.set_ylabel("test accuracy, %", fontsize=11, color=INK)
    axes.tick_params(length=0, labelcolor=INK)
    axes.grid(axis="y", color=LINE, lw=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    figure.legend(loc="outside upper center", ncols=3, frameon=False, fontsize=10.5)
    PICTURE.parent.mkdir(exist_ok=True)
    seen = {"Software": None, "Description": json.dumps(found)}
    figure.savefig(PICTURE, dpi=150, metadata=seen)
    plt.close(figure)


if __name__ == "__main__":
    draw(json.loads((ROOT / "results" / "recurrent.json").read_text(encoding="utf-8")))
