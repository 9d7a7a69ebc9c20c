"""The results of a search as heatmaps. Only drawing needs matplotlib."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tpsgd.adapt.trials import Candidate
from tpsgd.common import figures
from tpsgd.common.units import size

CHOSEN, GREY = "#00a651", "#e6e6e6"
HATCH: dict[str, Any] = {"edgecolor": "#c4c4c4", "hatch": "////"}


def draw_heatmaps(
    rows: Sequence[Candidate], best: Mapping[str, Candidate], budget: int | None, file: Path
) -> Path:
    """Write the heatmaps of a search, as a PNG or an SVG by the suffix of the file name."""
    from matplotlib import rc_context

    figures.check_file(file, "search")
    with rc_context({**figures.LOOK, "axes.grid": False, "hatch.linewidth": 0.6}):
        return figures.write(heatmaps(rows, best, budget), file)


def heatmaps(rows: Sequence[Candidate], best: Mapping[str, Candidate], budget: int | None) -> Any:
    """Two heatmaps for every tap, with a green frame around its best layers.

    The heatmaps of a column share their scale of colours.
    """
    from matplotlib.figure import Figure

    taps = list(dict.fromkeys(row.tap for row in rows))
    grids = {tap: [r for r in rows if r.tap == tap and not r.control] for tap in taps}
    wide, high = (max(len(_counts(grid)[i]) for grid in grids.values()) for i in (0, 1))
    plot = Figure(
        figsize=(1.2 + 2 * max(2.8, 0.95 * wide), 0.8 + len(taps) * (0.8 + 0.5 * high)),
        layout="constrained",
    )
    axes = plot.subplots(len(taps), 2, squeeze=False)
    trainable = [row for grid in grids.values() for row in grid if row.skipped != "over budget"]
    accuracy = _shade("Blues", [r.accuracy for r in trainable if r.accuracy is not None])
    memory = _shade("Oranges", [r.planned_bytes for r in trainable])
    for (left, right), (tap, grid) in zip(axes, grids.items(), strict=True):
        accuracies = [(row, row.accuracy, _percent(row)) for row in grid]
        sizes = [(row, row.planned_bytes, size(row.planned_bytes)) for row in grid]
        _panel(left, accuracies, accuracy, best.get(tap))
        _panel(right, sizes, memory, best.get(tap))
        probes = [r.accuracies[0] for r in rows if r.tap == tap and r.control and r.accuracies]
        control = f" (linear probe {100 * probes[0]:.1f})" if probes else ""
        left.set(title=f"{short_name(tap)}: held-out %{control}", ylabel="dense layers")
        right.set_title("planned memory")
    for panel in axes[-1]:
        panel.set_xlabel("convolutional layers")
    handles = _legend({row.skipped for row in rows if not row.control}, budget)
    plot.legend(handles=handles, loc="outside lower center", ncols=3)
    return plot


def _panel(
    axes: Any,
    cells: Sequence[tuple[Candidate, float | None, str]],
    shade: Callable[[float], Any],
    best: Candidate | None,
) -> None:
    """A cell with a number for every configuration."""
    from matplotlib.patches import Rectangle

    xs, ys = _counts([row for row, _, _ in cells])
    for row, value, text in cells:
        layers: Any = row.layers
        x, y = xs.index(layers.convs), ys.index(layers.dense)
        corner, above = (x - 0.5, y - 0.5), row.skipped == "over budget"
        colour, ink = (GREY, "#555555") if value is None or above else shade(value)
        axes.add_patch(Rectangle(corner, 1, 1, facecolor=colour, edgecolor="white", linewidth=1))
        if above:
            axes.add_patch(Rectangle(corner, 1, 1, fill=False, linewidth=0, **HATCH))
        if row is best:
            frame = {"fill": False, "edgecolor": CHOSEN, "linewidth": 3, "zorder": 3}
            axes.add_patch(Rectangle((x - 0.47, y - 0.46), 0.94, 0.92, **frame))
        axes.text(x, y, text, ha="center", va="center", color=ink)
    axes.set(xlim=(-0.5, len(xs) - 0.5), ylim=(-0.5, len(ys) - 0.5))
    axes.set_xticks(range(len(xs)), xs)
    axes.set_yticks(range(len(ys)), ys)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def _shade(colours: str, values: list[Any]) -> Callable[[float], Any]:
    """A function from a value to its colour and the colour of the text on it."""
    from matplotlib import colormaps

    least, most = min(values, default=0.0), max(values, default=0.0)

    def colour(value: float) -> tuple[Any, str]:
        share = (value - least) / (most - least) if most > least else 0.5
        return colormaps[colours](0.12 + 0.68 * share), "white" if share > 0.6 else "#222222"

    return colour


def _legend(reasons: set[str], budget: int | None) -> list[Any]:
    from matplotlib.patches import Patch

    patches = [Patch(fill=False, edgecolor=CHOSEN, linewidth=2.5, label="chosen for the tap")]
    if "over budget" in reasons:
        label = f"over the budget of {size(budget or 0)}"
        patches.append(Patch(facecolor=GREY, label=label, **HATCH))
    if reasons - {"", "over budget"}:
        patches.append(Patch(color=GREY, label="not trained"))
    return patches


def _counts(rows: list[Candidate]) -> tuple[list[int], list[int]]:
    """The numbers of convolutions and of dense layers that occur."""
    convs, dense = ({getattr(row.layers, name) for row in rows} for name in ("convs", "dense"))
    return sorted(convs), sorted(dense)


def _percent(row: Candidate) -> str:
    if row.accuracy is None:
        return ""
    spread = f"\n± {100 * row.std:.1f}" if len(row.accuracies) > 1 else ""
    return f"{100 * row.accuracy:.1f}{spread}"


def short_name(tap: str) -> str:
    """A tap's name in at most twelve characters."""
    return tap if len(tap) <= 12 else f"…{tap[-11:]}"
