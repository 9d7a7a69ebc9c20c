"""Accuracy on a shifted domain before and after adaptation, as a figure."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tpsgd import figures

if TYPE_CHECKING:
    from tpsgd.adapt.recovery import Recovery

BARS = (
    ("known domain, before", "known_before", "#9aa5b1"),
    ("new domain, before", "new_before", "#d1495b"),
    ("new domain, after", "new_after", "#2a9d8f"),
    ("known domain, after", "known_after", "#5f6c7b"),
)
MIN_WIDTH = 6.8  # inches: the legend fits in one line


def draw(rows: "Sequence[Recovery]", file: Path, title: str) -> Path:
    """Write a PNG file with four bars for each arm."""
    from matplotlib.figure import Figure

    size = (max(MIN_WIDTH, 1.6 + 1.75 * len(rows)), 3.6)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.add_subplot()
    width = 0.2
    for i, (label, name, colour) in enumerate(BARS):
        places = [k + (i - 1.5) * width for k in range(len(rows))]
        heights = [100 * getattr(row, name) for row in rows]
        bars = axes.bar(places, heights, width * 0.92, label=label, color=colour)
        axes.bar_label(bars, fmt="%.0f", fontsize=7, padding=1)
    axes.set_xticks(range(len(rows)), [row.arm for row in rows])
    margin = max(0.0, (3 - len(rows)) / 2)  # so that few arms do not get wider bars
    axes.set_xlim(-0.6 - margin, len(rows) - 0.4 + margin)
    axes.set_ylim(0, 112)
    axes.set_yticks(range(0, 101, 20))
    axes.set_ylabel("test accuracy (%)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(title, fontsize=10, loc="left", pad=24)
    axes.legend(ncols=4, fontsize=7, frameon=False, loc="lower left", bbox_to_anchor=(0, 1.0),
                borderaxespad=0.2, columnspacing=1.0, handlelength=1.0)  # fmt: skip
    return figures.write(figure, file)
