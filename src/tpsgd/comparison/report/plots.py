"""The plots of a comparison: accuracy against memory and time, learning curves per block."""

import math
from collections.abc import Callable, Sequence
from statistics import fmean
from textwrap import shorten
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np

from tpsgd.common import figures
from tpsgd.common.figures import LOOK
from tpsgd.comparison.arms import ALL
from tpsgd.comparison.results import Result, Results
from tpsgd.engine.confusion import heat_map

OTHER_COLOURS = (  # of arms without a word; no word has one of them
    *("#1B9E77", "#B2182B", "#4D4DFF", "#B8860B", "#C71585", "#2F6F2F", "#008B8B", "#A0522D"),
)
MARKERS = "sD^vPXp"
MOST_CLASSES = 40  # of a heat map
Line = list[tuple[float, float, float]]  # per epoch: mean, least and most of the restarts


class Style(NamedTuple):
    """How an arm looks in every plot."""

    colour: str
    marker: str
    dash: Any = "-"


def draw(comparison: Results) -> dict[str, bytes]:
    """Every plot as a PNG, by name."""
    from matplotlib import rc_context

    def seconds(result: Result) -> list[float]:
        return [run.seconds for run in result.runs]

    def megabytes(result: Result) -> list[float]:
        return [result.largest.total_bytes / 2**20]

    def peak(result: Result) -> float:
        return result.largest.peak_bytes / 2**20

    with rc_context(LOOK):
        plots = {
            "memory": scatter(comparison, "memory (MB)", megabytes, peak),
            "time": scatter(comparison, "training time (s)", seconds),
            "curves": curves(comparison),
            "confusion": confusions(comparison),
        }
        return {name: figures.as_bytes(plot) for name, plot in plots.items() if plot is not None}


def styles(comparison: Results) -> dict[str, Style]:
    """A style for each arm: that of its word, or one that follows from the name of another arm.

    So an arm looks the same in every report, unless two such names have the same colour there.
    """
    looks: dict[str, Style] = {}
    for name in (result.arm.name for result in comparison.results):
        if entry := ALL.get(name):
            looks[name] = Style(entry.colour, entry.marker, entry.dash)
            continue
        first, taken = crc32(name.encode()), {look.colour for look in looks.values()}
        spare = [OTHER_COLOURS[(first + i) % len(OTHER_COLOURS)] for i in range(len(OTHER_COLOURS))]
        colour = next((colour for colour in spare if colour not in taken), spare[0])
        looks[name] = Style(colour, MARKERS[first // 8 % len(MARKERS)], ":")
    return looks


def scatter(
    comparison: Results,
    label: str,
    costs: Callable[[Result], list[float]],
    least: Callable[[Result], float] | None = None,
) -> Any:
    """Test accuracy (mean and standard deviation) against a cost (median and range).

    A thin line leads to the `least` cost, which is a part of it.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2, 5.0), layout="constrained")
    axes = figure.add_subplot(xlabel=label, ylabel="test accuracy (%)")
    looks, medians, accuracies, highest, right = styles(comparison), [], [], 0.0, 0.0
    for result in [r for r in comparison.ranked if r.counts]:
        cost, look = costs(result), looks[result.arm.name]
        x, (y, dy) = float(np.median(cost)), (100 * a for a in result.accuracy)
        axes.errorbar(
            x, y, dy, [[x - min(cost)], [max(cost) - x]], look.marker, color=look.colour, ms=8,
            mec="white", mew=0.6, clip_on=False, label=result.arm.name,
        )  # fmt: skip
        if least is not None and least(result) < x:
            axes.plot([least(result), x], [y, y], "|-", color=look.colour, lw=0.8, zorder=1)
            medians.append(least(result))
        if result.arm.reference:
            axes.axvline(x, color="#000000", linewidth=0.8, linestyle=(0, (2, 4)), zorder=0)
        medians.append(x)
        accuracies.append(y)
        highest, right = max(highest, y + dy), max(right, *cost)
    if medians and 0 < 10 * min(medians) < max(medians):
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_xlim(min(medians) / 2, max(2 * max(medians), 1.1 * right))
    else:
        axes.set_xlim(0, 1.1 * (right or 1.0))
    _scale(axes, accuracies, highest)
    longest = max((len(result.arm.name) for result in comparison.results), default=0)
    figure.legend(loc="outside lower center", ncols=3 if longest < 18 else 2)
    return figure


def _scale(axes: Any, values: Sequence[float], top: float) -> None:
    """If one arm is far behind, use a log scale of the error, so that the others stay apart."""
    least = max((100 - top) / 2, 0.01)  # the smallest error shown
    if not values or max(values) - min(values) < 20 or max(values) < 90:
        axes.margins(y=0.12)
        axes.set_ylim(top=min(100, axes.get_ylim()[1]))
        return
    ticks = [t for t in (10, 50, 80, 90, 95, 98, 99, 99.5, 99.8) if t < 100 - least]
    axes.set_yscale(
        "function",
        functions=(
            lambda y: -np.log10(np.maximum(100 - np.asarray(y), least)),
            lambda u: 100 - 10 ** -np.asarray(u),
        ),
    )
    axes.set_yticks(ticks, [f"{t:g}" for t in ticks])
    axes.set_ylim(0, 100 - least)


def curves(comparison: Results) -> Any:
    """Training accuracy per block if the block has a classifier, else its scaled local loss."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    panels, looks, handles = _panels(comparison), styles(comparison), {}
    # a method may have hundreds of iterations: the epochs of the rules set the scale
    iterative = {r.arm.name for r in comparison.results if r.arm.method}
    panels = {title: lines for title, lines in panels.items() if set(lines) - iterative}
    rows = math.ceil(len(panels) / 3) or 1
    figure = Figure(figsize=(9.3, 2.5 * rows + 0.8), layout="constrained")
    for number, (title, lines) in enumerate(panels.items(), 1):
        axes = figure.add_subplot(rows, 3, number)
        longest = max(len(line) for name, line in lines.items() if name not in iterative)
        axes.set(title=title, xlabel="epoch", xlim=(0.5, longest + 0.5))
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1))
        for name, line in lines.items():
            look, (mean, least, most) = looks[name], zip(*line[:longest], strict=True)
            epochs = range(1, len(mean) + 1)
            mark: dict[str, Any] = {"color": look.colour, "linewidth": 1.6, "linestyle": look.dash}
            if len(mean) == 1:
                mark |= {"marker": look.marker, "linestyle": ""}
            (handles[name],) = axes.plot(epochs, mean, label=name, **mark)
            axes.fill_between(epochs, least, most, color=look.colour, alpha=0.12, linewidth=0)
    ordered = [handles[name] for name in looks if name in handles]
    figure.legend(handles=ordered, loc="outside lower center", ncols=5)
    return figure


def confusions(comparison: Results) -> Any:
    """Confusion matrices of backprop, the best rule and the best control; None if too large."""
    from matplotlib.figure import Figure

    shown = comparison.exemplars
    if not shown or len(shown[0].confusions[0].classes) > MOST_CLASSES:
        return None
    figure = Figure(figsize=(9.3, 3.6), layout="constrained")
    for axes, result in zip(figure.subplots(1, 3, squeeze=False)[0], shown, strict=False):
        if (matrix := result.confusion) is not None:
            heat_map(axes, matrix, result.arm.name)
    for axes in figure.axes[len(shown) :]:
        axes.remove()
    return figure


def _panels(comparison: Results) -> dict[str, dict[str, Line]]:
    """Titles and lines of all panels that are not empty: first accuracies, then local losses."""
    done = [r for r in comparison.results if r.counts]
    blocks = max((r.runs[0].blocks for r in done), key=len, default=[])
    panels = {}
    for what, lines in (("training accuracy (%)", _accuracies), ("local loss, scaled", _losses)):
        for number, block in enumerate(blocks, 1):
            arms = {r.arm.name: lines(r, number, len(blocks)) for r in done}
            layer = shorten(block.name.partition(": ")[2] or block.name, 22, placeholder=" …")
            panels[f"block {number} ({layer})\n{what}"] = {k: v for k, v in arms.items() if v}
    return {title: lines for title, lines in panels.items() if lines}


def _accuracies(result: Result, block: int, last: int) -> Line:
    """The accuracy of a block's classifier, if it has one; backprop counts as the last block."""
    runs = [[e for e in run.history if (e.block or last) == block] for run in result.runs]
    return _line([[100 * e.accuracy for e in run if e.accuracy is not None] for run in runs])


def _losses(result: Result, block: int, last: int) -> Line:
    """Local losses, scaled to 0..1 within each run: different rules have different units.

    The losses of DFA and sDFA are left out: they follow the output error, so that their values have
    no meaning.
    """
    if (result.arm.rule and result.arm.rule.needs_output) or _accuracies(result, block, last):
        return []
    runs = [[e.loss for e in run.history if (e.block or last) == block] for run in result.runs]
    if all(len(run) < 2 for run in runs):  # solved: a single number
        return []
    return _line(
        [[(v - min(run)) / ((max(run) - min(run)) or 1) for v in run] for run in runs if run]
    )


def _line(runs: list[list[float]]) -> Line:
    return [(fmean(v), min(v), max(v)) for v in zip(*runs, strict=False)]
