"""A plan as a picture: a stacked bar for every way to train, and for every block."""

from collections.abc import Sequence
from pathlib import Path
from textwrap import shorten
from typing import Any

from tpsgd.comparison.report.plots import COLOURS, LOOK
from tpsgd.files import check_picture, write_picture
from tpsgd.memory.plan import Line, Plan
from tpsgd.units import UNITS, size

KEPT = "kept inputs"
LABELS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "activations": "activations",
    "projections": "class codes",
    "workspace": "cuDNN workspace",
    KEPT: KEPT,
}
SHADES = dict(zip(LABELS, (*(COLOURS[i] for i in (0, 1, 5, 2, 3, 6)), "#b8b8b8"), strict=True))
DWARFS = 5  # times the rest: from there on, kept inputs are cut
STUB = 0.3  # of the highest peak: what is shown of them


def draw(plan: Plan, file: Path) -> Path:
    """Write the picture, as a PNG or an SVG by the file's name."""
    from matplotlib import rc_context

    check(file)
    with rc_context(LOOK):
        return write_picture(figure(plan), file)


def check(file: Path) -> None:
    """Refuse a file that no picture can be written to, as far as its name tells."""
    check_picture(file, "plan")


def figure(plan: Plan) -> Any:
    """The panels: all ways to train, and the blocks of the first where it has several."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    first = plan.lines[0]
    panels = {"memory of one training": plan.lines}
    if len(first.blocks) > 1:
        panels[f"{first.name}: while each block learns"] = first.blocks
    heights = [len(lines) + 2.2 for lines in panels.values()]
    made = Figure(figsize=(8.4, 0.3 * sum(heights) + 0.7), layout="constrained")
    axes = made.subplots(len(panels), height_ratios=heights, squeeze=False)[:, 0]
    seen = {part for lines in panels.values() for line in lines for part in _pieces(line)}
    for one, (title, lines) in zip(axes, panels.items(), strict=True):
        _bars(one, lines, title)
    made.legend(
        handles=[Patch(color=SHADES[p], label=LABELS[p]) for p in LABELS if p in seen],
        loc="outside lower center",
        ncols=4,
    )
    made.draw_without_rendering()
    for one in axes:
        _make_room(one)
    return made


def _pieces(line: Line) -> dict[str, int]:
    """What a bar is made of, in order; what there is nothing of is left out."""
    parts = {**{part: line.parts.get(part, 0) for part in LABELS if part != KEPT}, KEPT: line.kept}
    return {part: count for part, count in parts.items() if count}


def _bars(axes: Any, lines: Sequence[Line], title: str) -> None:
    """One panel: a bar for every line, the first at the top, its bytes at its end."""
    highest = max(line.peak for line in lines)
    shown = [_shown(line, highest) for line in lines]
    unit, step = _unit(max(sum(pieces.values()) for pieces in shown))
    for y, (line, pieces) in enumerate(zip(lines, shown, strict=True)):
        left = 0.0
        for part, count in pieces.items():
            width = count / step
            axes.barh(y, width, 0.66, left, color=SHADES[part], edgecolor="white", linewidth=0.5)
            left += width
        cut = pieces.get(KEPT, 0) < line.kept
        if cut:
            _mark_cut(axes, left - pieces[KEPT] / step / 2, y, 0.012 * highest / step)
        text = f"{size(line.peak)} + {size(line.kept)} kept" if cut else size(line.total)
        axes.annotate(text, (left, y), (4, 0), textcoords="offset points", va="center", fontsize=9)
    names = [shorten(line.name, 34, placeholder=" …") for line in lines]
    axes.set_yticks(range(len(lines)), names)
    axes.set(title=title, xlabel=unit, ylim=(len(lines) - 0.4, -0.6))
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")


def _shown(line: Line, highest: int) -> dict[str, int]:
    """A line's pieces; kept inputs that would leave nothing else to see are cut."""
    pieces = _pieces(line)
    if line.kept > DWARFS * line.peak and line.kept > highest:
        pieces[KEPT] = int(STUB * highest)
    return pieces


def _mark_cut(axes: Any, x: float, y: float, half: float) -> None:
    """Two white strokes across a bar: it is longer than it looks."""
    for shift in (-1.5, 1.5):
        ends = [x + (shift - 1) * half, x + (shift + 1) * half]
        axes.plot(ends, [y + 0.4, y - 0.4], color="white", linewidth=2, solid_capstyle="butt")


def _unit(most: float) -> tuple[str, int]:
    """The largest unit that the longest bar has one of."""
    name, step = next(pair for pair in reversed(UNITS.items()) if most >= pair[1] or pair[1] == 1)
    return (f"{name}B" if name else "bytes"), step


def _make_room(axes: Any) -> None:
    """Widen the axis until every number at a bar's end is inside."""
    width = axes.bbox.width
    ends = [note.xy[0] / (1 - (note.get_window_extent().width + 12) / width) for note in axes.texts]
    axes.set_xlim(0, max(ends))
