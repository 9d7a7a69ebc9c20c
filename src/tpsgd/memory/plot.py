"""A plan as a figure: a stacked bar for every way to train, and for every block."""

from collections.abc import Sequence
from pathlib import Path
from textwrap import shorten
from typing import Any

from tpsgd.common import figures
from tpsgd.common.figures import COLOURS, LOOK
from tpsgd.common.units import UNITS, size
from tpsgd.memory.meter import PARTS

KEPT = "kept inputs"
LABELS = {part: label for part, (_, label) in PARTS.items()} | {KEPT: KEPT}
SHADES = dict(zip(LABELS, (*(COLOURS[i] for i in (0, 1, 5, 2, 3, 6)), "#b8b8b8"), strict=True))
CUT_ABOVE = 5  # kept inputs that are more than this many times the rest are cut, and hatched
CUT_TO = 0.3  # of the highest peak


def draw(plan: Any, file: Path) -> Path:
    """Write the figure, as a PNG or an SVG by the suffix of the file name."""
    from matplotlib import rc_context

    figures.check_file(file, "plan")
    with rc_context(LOOK):
        return figures.write(figure(plan), file)


def figure(plan: Any) -> Any:
    """A panel for all ways to train, and one for the blocks of the first if it has several."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    first = plan.lines[0]
    panels = {"memory of one training run": plan.lines}
    if len(first.blocks) > 1:
        panels[f"{first.name}: while each block learns"] = first.blocks
    heights = [len(lines) + 2.2 for lines in panels.values()]
    plot = Figure(figsize=(8.4, 0.3 * sum(heights) + 0.7), layout="constrained")
    axes = plot.subplots(len(panels), height_ratios=heights, squeeze=False)[:, 0]
    shown = {part for lines in panels.values() for line in lines for part in _pieces(line)}
    for panel, (title, lines) in zip(axes, panels.items(), strict=True):
        _bars(panel, lines, title)
    plot.legend(
        handles=[Patch(color=SHADES[p], label=LABELS[p]) for p in LABELS if p in shown],
        loc="outside lower center",
        ncols=4,
    )
    plot.draw_without_rendering()
    for panel in axes:
        _make_room(panel)
    return plot


def _pieces(line: Any) -> dict[str, int]:
    """The pieces of a bar in order, without empty ones."""
    parts = line.parts | {KEPT: line.kept}
    return {part: parts[part] for part in LABELS if parts.get(part)}


def _bars(axes: Any, lines: Sequence[Any], title: str) -> None:
    """One panel: a bar for every line, from top to bottom, with its bytes at the end.

    Kept inputs are cut where the other pieces would be too small to see.
    """
    highest, bars = max(line.peak for line in lines), list(map(_pieces, lines))
    cut = [line.kept > max(CUT_ABOVE * line.peak, highest) for line in lines]
    for pieces in (bars[y] for y in range(len(lines)) if cut[y]):
        pieces[KEPT] = int(CUT_TO * highest)
    unit, step = _unit(max(sum(pieces.values()) for pieces in bars))
    for y, (line, pieces) in enumerate(zip(lines, bars, strict=True)):
        left = 0.0
        for part, count in pieces.items():
            look = {"color": SHADES[part], "hatch": "///" if part == KEPT and cut[y] else None}
            axes.barh(y, count / step, 0.66, left, edgecolor="white", linewidth=0.5, **look)
            left += count / step
        text = f"{size(line.total)}, {size(line.kept)} kept" if cut[y] else size(line.total)
        axes.annotate(text, (left, y), (4, 0), textcoords="offset points", va="center", fontsize=9)
    names = [shorten(line.name, 34, placeholder=" …") for line in lines]
    axes.set_yticks(range(len(lines)), names)
    axes.set(title=title, xlabel=unit, ylim=(len(lines) - 0.4, -0.6))
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")


def _unit(most: float) -> tuple[str, int]:
    """The unit of the axis and its bytes: the longest bar is at least 1 unit long."""
    name, step = next(pair for pair in reversed(UNITS.items()) if most >= pair[1] or pair[1] == 1)
    return (f"{name}B" if name else "bytes"), step


def _make_room(axes: Any) -> None:
    """Widen the axis until the numbers at the ends of all bars fit."""
    width = axes.bbox.width
    ends = [note.xy[0] / (1 - (note.get_window_extent().width + 12) / width) for note in axes.texts]
    axes.set_xlim(0, max(ends))
