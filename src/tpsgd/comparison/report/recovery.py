"""What a shifted domain costs each arm, and what adapting wins back, as a picture."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tpsgd.files import write_whole

if TYPE_CHECKING:
    from tpsgd.adapt.recovery import Recovery

BARS = (
    ("known domain, before", "known_before", "#9aa5b1"),
    ("new domain, before", "new_before", "#d1495b"),
    ("new domain, after", "new_after", "#2a9d8f"),
    ("known domain, after", "known_after", "#5f6c7b"),
)
NARROWEST = 6.8  # inches: the legend is one line


def draw(rows: "Sequence[Recovery]", file: Path, title: str) -> Path:
    """Four bars for each arm, as a PNG file that is whole or not there."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    size = (max(NARROWEST, 1.6 + 1.75 * len(rows)), 3.6)
    figure = Figure(figsize=size, layout="constrained", dpi=150)
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    width = 0.2
    for i, (label, name, colour) in enumerate(BARS):
        places = [k + (i - 1.5) * width for k in range(len(rows))]
        heights = [100 * getattr(row, name) for row in rows]
        bars = axes.bar(places, heights, width * 0.92, label=label, color=colour)
        axes.bar_label(bars, fmt="%.0f", fontsize=7, padding=1)
    axes.set_xticks(range(len(rows)), [row.arm for row in rows])
    beside = max(0.0, (3 - len(rows)) / 2)  # few arms have no fatter bars
    axes.set_xlim(-0.6 - beside, len(rows) - 0.4 + beside)
    axes.set_ylim(0, 112)
    axes.set_yticks(range(0, 101, 20))
    axes.set_ylabel("test accuracy (%)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(title, fontsize=10, loc="left", pad=24)
    axes.legend(ncols=4, fontsize=7, frameon=False, loc="lower left", bbox_to_anchor=(0, 1.0),
                borderaxespad=0.2, columnspacing=1.0, handlelength=1.0)  # fmt: skip
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    return write_whole(file, picture.getvalue())
