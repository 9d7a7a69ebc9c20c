"""A confusion matrix as a heat map: each row is the shares of one true class."""

from pathlib import Path
from textwrap import shorten
from typing import Any

from tpsgd import figures
from tpsgd.figures import LOOK
from tpsgd.names import printable

NUMBERED = 15  # so many classes at most have their numbers in the cells
NAMED = 40  # and so many their names at the axes


def write(confusion: Any, file: Path) -> Path:
    """Draw the matrix into a file of its own."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figures.check_file(file, "confusion matrix")
    side = min(12.0, max(4.0, 1.8 + 0.42 * len(confusion.classes)))
    with rc_context(LOOK):
        figure = Figure(figsize=(side, side), layout="constrained")
        heat_map(figure.add_subplot(), confusion)
        return figures.write(figure, file)


def heat_map(axes: Any, confusion: Any, title: str = "") -> None:
    """Draw the matrix into axes; numbers are per cent of the true class."""
    counts, names = confusion.counts, [printable(name) for name in confusion.classes]
    shares = [[100 * count / (sum(row) or 1) for count in row] for row in counts]
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=100)
    axes.grid(False)
    axes.set(title=title, xlabel="predicted class", ylabel="true class")
    if len(names) <= NAMED:
        ticks, words = range(len(names)), [shorten(name, 16, placeholder="…") for name in names]
        turned = 90 if max(map(len, words)) > 2 else 0
        plain = {"fontsize": 9 if len(names) <= NUMBERED else 6, "parse_math": False}
        axes.set_xticks(ticks, words, rotation=turned, **plain)
        axes.set_yticks(ticks, words, **plain)
    if len(names) > NUMBERED:
        return
    for i, row in enumerate(shares):
        for j, share in enumerate(row):
            if counts[i][j]:
                colour = "white" if share > 60 else "#333333"
                text = "<1" if share < 0.5 else f"{share:.0f}"
                axes.text(j, i, text, ha="center", va="center", color=colour, fontsize=7)
