"""Draw adaptors by tap, by labelled images and on shifted domains, from results/adaptors.json.

python docs/adapt_figure.py        # writes docs/assets/adaptors.png

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
PICTURE = ROOT / "docs" / "assets" / "adaptors.png"
LOOKS = {
    "backprop": ("#000000", "s"),
    "readout": ("#007A5A", "o"),
    "tpsgd-l2": ("#0072B2", "^"),
    "linear probe": ("#D55E00", "v"),
    "frozen": ("#888888", "D"),
}


def values(record: dict[str, Any]) -> dict[str, Any]:
    """Per panel and arm: places and accuracies in per cent."""
    found: dict[str, Any] = {"combined": {}, "few": {}, "shifts": {}}
    for row in record.get("combinations", []):
        best = found["combined"].setdefault(row["arm"], {})
        best[row["taps"]] = round(100 * max(row["accuracy"], best.get(row["taps"], 0) / 100), 2)
    for row in record.get("few", []):
        if row["tap"] == "pool5":
            points = found["few"].setdefault(row["arm"], [])
            points.append([row["shots"], round(100 * row["accuracy"], 2)])
    shifted = [row for row in record.get("shifts", []) if row.get("replay") == 0]
    for arm in dict.fromkeys(row["arm"] for row in shifted):
        for word in dict.fromkeys(row["domain"] for row in shifted):
            mine = [row for row in shifted if row["arm"] == arm and row["domain"] == word]
            pair = [round(100 * fmean(r[k] for r in mine), 2) for k in ("new_before", "new_after")]
            found["shifts"].setdefault(arm, {})[word] = pair
    return found


def stale(record: dict[str, Any]) -> bool:
    """Whether the picture shows other numbers, or is not there."""
    return not shows(PICTURE, values(record))


def draw(record: dict[str, Any]) -> None:
    """Three panels."""
    plt.rcParams.update({"font.family": "DejaVu Sans", "font.size": 8})
    shown = values(record)
    figure, panels = plt.subplots(
        1, 3, figsize=(11, 3.7), layout="constrained", width_ratios=(1.15, 0.9, 1.35)
    )
    _combined(panels[0], shown["combined"])
    _few(panels[1], shown["few"])
    _shifts(panels[2], shown["shifts"])
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_ylabel("test accuracy (%)")
    handles, labels = panels[1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(PICTURE, dpi=150, metadata={"Description": json.dumps(shown)})
    plt.close(figure)


def _combined(axes: Any, arms: dict[str, dict[str, float]]) -> None:
    names = list(next(iter(arms.values())))
    for i, (arm, found) in enumerate(arms.items()):
        places = [k + (i - 1) * 0.26 for k in range(len(names))]
        axes.bar(places, [found[n] for n in names], 0.24, color=LOOKS[arm][0])
    axes.set_xticks(range(len(names)), [n.replace(" + ", "\n+ ") for n in names])
    axes.set_ylim(60, 100)
    axes.set_title("Taps: L0 pool5, L1 pool4, L2 pool3", loc="left", fontsize=9)


def _few(axes: Any, arms: dict[str, list[list[float]]]) -> None:
    for arm, points in arms.items():
        colour, mark = LOOKS[arm]
        xs, ys = zip(*points, strict=True)
        axes.plot(xs, ys, f"-{mark}", color=colour, ms=5, lw=1.3, label=arm, mec="white")
    axes.set_xscale("log")
    axes.set_xticks([p[0] for p in next(iter(arms.values()))])
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.minorticks_off()
    axes.set_xlabel("labelled images a class")
    axes.set_title("Few images, pool5", loc="left", fontsize=9)


def _shifts(axes: Any, arms: dict[str, dict[str, list[float]]]) -> None:
    words = list(next(iter(arms.values())))
    for i, (arm, found) in enumerate(arms.items()):
        colour, mark = LOOKS[arm]
        for k, word in enumerate(words):
            place = k + (i - 2) * 0.16
            before, after = found[word]
            axes.plot([place, place], [before, after], color=colour, lw=1.2, alpha=0.6)
            axes.plot(place, before, mark, color="white", mec=colour, ms=5)
            axes.plot(place, after, mark, color=colour, mec="white", ms=6)
    axes.set_xticks(range(len(words)), words)
    title = "Shifted images: hollow before, full after 10 a class"
    axes.set_title(title, loc="left", fontsize=9)


if __name__ == "__main__":
    draw(json.loads((ROOT / "results" / "adaptors.json").read_text(encoding="utf-8")))
    print(PICTURE.relative_to(ROOT))
