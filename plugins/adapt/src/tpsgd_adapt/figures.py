"""The results of a search as heatmaps. Only drawing needs matplotlib."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tpsgd.common import figures
from tpsgd.common.units import size
from tpsgd_adapt.trials import Candidate

CHOSEN, GREY = "#00a651", "#e6e6e6"
HATCH: dict[str, Any] = {"edgecolor": "#c4c4c4", "hatch": "////"}
OVER = "over budget"


def draw_heatmaps(
    rows: Sequence[Candidate], best: Mapping[str, Candidate], budget: int | None, file: Path
) -> Path:
    """Write the heatmaps of a search, as a PNG or an SVG by the suffix of the file name."""
    from matplotlib import rc_context

    figures.check_file(file, "search")
    with rc_context({**figures.LOOK, "axes.grid": False, "hatch.linewidth": 0.6}):
        return figures.write(heatmaps(rows, best, budget), file)


def heatmaps(rows: Sequence[Candidate], best: Mapping[str, Candidate], budget: int | None) -> Any:
    """Held-out accuracy and planned memory of every tap, a green frame around its best layers.

    The heatmaps of a column share their scale of colours.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    taps = list(dict.fromkeys(row.tap for row in rows))
    layers = [row for row in rows if not row.control]
    high = len({_counts(row)[1] for row in layers})
    plot = Figure(figsize=(6.8, 0.8 + len(taps) * (0.8 + 0.5 * high)), layout="constrained")
    axes = plot.subplots(len(taps), 2, squeeze=False)
    accuracy = {id(row): row.accuracy for row in layers if row.accuracy is not None}
    memory = {id(row): row.planned_bytes for row in layers if row.skipped != OVER}
    for (left, right), tap in zip(axes, taps, strict=True):
        grid = [row for row in layers if row.tap == tap]
        _panel(left, grid, "Blues", accuracy, list(map(percent, grid)), best.get(tap))
        sizes = [size(row.planned_bytes) for row in grid]
        _panel(right, grid, "Oranges", memory, sizes, best.get(tap))
        probe = next((row for row in rows if row.tap == tap and row.control), None)
        control = f" (linear probe {percent(probe)})" if probe and probe.accuracies else ""
        left.set(title=f"{short_name(tap)}: held-out %{control}", ylabel="dense layers")
        right.set_title("planned memory")
    for panel in axes[-1]:
        panel.set_xlabel("convolutional layers")
    reasons = {row.skipped for row in layers}
    handles = [Patch(fill=False, edgecolor=CHOSEN, linewidth=2.5, label="chosen for the tap")]
    if OVER in reasons:
        label = f"over the budget of {size(budget or 0)}"
        handles.append(Patch(facecolor=GREY, label=label, **HATCH))
    if reasons - {"", OVER}:
        handles.append(Patch(color=GREY, label="not trained"))
    plot.legend(handles=handles, loc="outside lower center", ncols=3)
    return plot


def _panel(
    axes: Any,
    rows: Sequence[Candidate],
    colours: str,
    values: Mapping[int, float],
    texts: Sequence[str],
    best: Candidate | None,
) -> None:
    """A cell for every configuration, with a text, and coloured if it has a value."""
    from matplotlib import colormaps
    from matplotlib.patches import Rectangle

    least, most = min(values.values(), default=0.0), max(values.values(), default=0.0)
    xs, ys = (sorted({_counts(row)[i] for row in rows}) for i in (0, 1))
    for row, text in zip(rows, texts, strict=True):
        x, y = xs.index(_counts(row)[0]), ys.index(_counts(row)[1])
        value = values.get(id(row))
        share = 0.5 if value is None or most == least else (value - least) / (most - least)
        colour = GREY if value is None else colormaps[colours](0.12 + 0.68 * share)
        corner, hatch = (x - 0.5, y - 0.5), HATCH if row.skipped == OVER else {}
        axes.add_patch(Rectangle(corner, 1, 1, facecolor=colour, linewidth=0, **hatch))
        if row is best:
            frame = {"fill": False, "edgecolor": CHOSEN, "linewidth": 3, "zorder": 3}
            axes.add_patch(Rectangle((x - 0.47, y - 0.46), 0.94, 0.92, **frame))
        axes.text(x, y, text, ha="center", va="center", color="white" if share > 0.6 else "#222222")
    axes.set(xlim=(-0.5, len(xs) - 0.5), ylim=(-0.5, len(ys) - 0.5))
    axes.set_xticks(range(len(xs)), xs)
    axes.set_yticks(range(len(ys)), ys)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def _counts(row: Candidate) -> tuple[int, int]:
    layers: Any = row.layers
    return layers.convs, layers.dense


def percent(row: Candidate) -> str:
    """The accuracy in per cent, and its standard deviation in a second line."""
    if row.accuracy is None:
        return ""
    spread = f"\n± {100 * row.std:.1f}" if len(row.accuracies) > 1 else ""
    return f"{100 * row.accuracy:.1f}{spread}"


def short_name(tap: str) -> str:
    """A tap's name in at most twelve characters."""
    return tap if len(tap) <= 12 else f"…{tap[-11:]}"
