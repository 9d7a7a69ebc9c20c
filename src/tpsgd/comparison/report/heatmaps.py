"""A search as a figure: for each tap, accuracy and memory by numbers of layers."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tpsgd import figures
from tpsgd.units import size

if TYPE_CHECKING:
    from tpsgd.adapt.search import Row, Search

CHOSEN, ABSENT, HATCH = "#00a651", "#e6e6e6", "////"


class Column(NamedTuple):
    """One of the two heatmaps of a tap."""

    title: str
    colours: str
    value: Callable[["Row"], float | None]
    text: Callable[["Row"], str]


COLUMNS = (
    Column("held-out %", "Blues", lambda r: r.accuracy, lambda r: _percent(r)),
    Column("planned memory", "Oranges", lambda r: _bytes(r), lambda r: size(_bytes(r))),
)


def draw(search: "Search", file: Path) -> Path:
    """Write the figure, as a PNG or an SVG by the suffix of the file name."""
    from matplotlib import rc_context

    figures.check_file(file, "search")
    with rc_context({**figures.LOOK, "axes.grid": False, "hatch.linewidth": 0.6}):
        return figures.write(figure(search), file)


def figure(search: "Search") -> Any:
    """Two heatmaps for every tap; the heatmaps of a column share their scale of colours."""
    from matplotlib.figure import Figure

    taps = list(dict.fromkeys(row.tap for row in search.rows))
    grids = {tap: [r for r in search.rows if r.tap == tap and not r.control] for tap in taps}
    wide, high = (max(len(_counts(rows)[i]) for rows in grids.values()) for i in (0, 1))
    plot = Figure(
        figsize=(1.2 + 2 * max(2.8, 0.95 * wide), 0.8 + len(taps) * (0.8 + 0.5 * high)),
        layout="constrained",
    )
    axes = plot.subplots(len(taps), 2, squeeze=False)
    for i, column in enumerate(COLUMNS):
        shade = _shade(column, [row for rows in grids.values() for row in rows])
        for panel, tap in zip(axes[:, i], taps, strict=True):
            _panel(panel, grids[tap], column, shade)
            _outline(panel, search, tap, grids[tap])
            panel.set_title(_title(search, tap, column))
        axes[-1, i].set_xlabel("convolutional layers")
    for panel in axes[:, 0]:
        panel.set_ylabel("dense layers")
    plot.legend(handles=list(_legend(search)), loc="outside lower center", ncols=3)
    return plot


def _panel(axes: Any, rows: "list[Row]", column: Column, shade: Callable[[float], Any]) -> None:
    """A cell with a number for every configuration."""
    from matplotlib.patches import Rectangle

    xs, ys = _counts(rows)
    for row in rows:
        x, y = _place(row, xs, ys)
        corner, value, above = (x - 0.5, y - 0.5), column.value(row), row.skipped == "over budget"
        colour, ink = (ABSENT, "#555555") if value is None or above else shade(value)
        axes.add_patch(Rectangle(corner, 1, 1, facecolor=colour, edgecolor="white", linewidth=1))
        if above:
            look = {"fill": False, "edgecolor": "#c4c4c4", "hatch": HATCH, "linewidth": 0}
            axes.add_patch(Rectangle(corner, 1, 1, **look))
        text = "" if value is None else column.text(row)
        axes.text(x, y, text, ha="center", va="center", color=ink)
    axes.set(xlim=(-0.5, len(xs) - 0.5), ylim=(-0.5, len(ys) - 0.5))
    axes.set_xticks(range(len(xs)), xs)
    axes.set_yticks(range(len(ys)), ys)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def _outline(axes: Any, search: "Search", tap: str, rows: "list[Row]") -> None:
    """A green frame around the configuration that was chosen for this tap."""
    from matplotlib.patches import Rectangle

    if not any(row.accuracies for row in rows):
        return
    x, y = _place(search.best(tap=tap), *_counts(rows))
    place, side = (x - 0.47, y - 0.46), (0.94, 0.92)
    axes.add_patch(Rectangle(place, *side, fill=False, edgecolor=CHOSEN, linewidth=3, zorder=3))


def _shade(column: Column, rows: "list[Row]") -> Callable[[float], Any]:
    """A function from a value to its colour and the colour of the text on it."""
    from matplotlib import colormaps

    fitting = [row for row in rows if row.skipped != "over budget"]
    values = [value for row in fitting if (value := column.value(row)) is not None]
    least, most = min(values, default=0.0), max(values, default=0.0)

    def colour(value: float) -> tuple[Any, str]:
        share = (value - least) / (most - least) if most > least else 0.5
        return colormaps[column.colours](0.12 + 0.68 * share), "white" if share > 0.6 else "#222222"

    return colour


def _legend(search: "Search") -> Any:
    from matplotlib.patches import Patch

    why = {row.skipped for row in search.rows if not row.control}
    yield Patch(fill=False, edgecolor=CHOSEN, linewidth=2.5, label="chosen for the tap")
    if "over budget" in why:
        label = f"over the budget of {size(search.memory_budget or 0)}"
        yield Patch(facecolor=ABSENT, edgecolor="#c4c4c4", hatch=HATCH, label=label)
    if why - {"", "over budget"}:
        yield Patch(color=ABSENT, label="not trained")


def _title(search: "Search", tap: str, column: Column) -> str:
    if column is not COLUMNS[0]:
        planned = all(row.planned_bytes is not None for row in search.rows)
        return column.title if planned else "weights"
    probe = search.control(tap)
    control = "" if probe is None else f" (linear probe {100 * (probe.accuracy or 0):.1f})"
    return f"{short_of(tap)}: {column.title}{control}"


def short_of(tap: str) -> str:
    """A tap's name in at most twelve characters."""
    return tap if len(tap) <= 12 else f"…{tap[-11:]}"


def _counts(rows: "list[Row]") -> tuple[list[int], list[int]]:
    """The numbers of convolutions and of dense layers that occur."""
    convs, dense = ([getattr(r.layers, n) for r in rows] for n in ("convs", "dense"))
    return sorted(set(convs)), sorted(set(dense))


def _place(row: "Row", xs: list[int], ys: list[int]) -> tuple[int, int]:
    layers: Any = row.layers
    return xs.index(layers.convs), ys.index(layers.dense)


def _percent(row: "Row") -> str:
    spread = f"\n± {100 * row.std:.1f}" if len(row.accuracies) > 1 else ""
    return f"{100 * (row.accuracy or 0):.1f}{spread}"


def _bytes(row: "Row") -> int:
    return row.trainable_bytes if row.planned_bytes is None else row.planned_bytes
