"""The plots of a comparison: accuracy against memory and time, learning curves, confusions."""

import math
from collections.abc import Callable
from statistics import fmean
from textwrap import shorten
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np

from tpsgd.common import figures
from tpsgd.comparison.arms import ALL
from tpsgd.comparison.results import Result, Results
from tpsgd.comparison.scores import in_words
from tpsgd.engine.confusion import heat_map

OTHER_COLOURS = (  # of arms without a word; no word has one of them
    *("#1B9E77", "#B2182B", "#4D4DFF", "#B8860B", "#C71585", "#2F6F2F", "#008B8B", "#A0522D"),
)
MARKERS = "sD^vPXp"
MOST_CLASSES = 40  # of a heat map
TICKS = (10, 50, 80, 90, 95, 98, 99, 99.5, 99.8)  # per cent, where one arm is far behind
Line = list[tuple[float, float, float]]  # per epoch: mean, least and most of the restarts


class Style(NamedTuple):
    """How an arm looks in every plot."""

    colour: str
    marker: str
    dash: Any = "-"


def draw(comparison: Results) -> dict[str, bytes]:
    """Every plot as a PNG, by name."""
    from matplotlib import rc_context

    with rc_context(figures.LOOK):
        plots = {
            "memory": scatter(comparison, "memory (MB)", lambda r: [r.largest.total_bytes / 2**20]),
            "time": scatter(
                comparison, "training time (s)", lambda r: [run.seconds for run in r.runs]
            ),
            "curves": curves(comparison),
            "confusion": confusions(comparison),
        }
        return {name: figures.as_bytes(plot) for name, plot in plots.items() if plot is not None}


def style(name: str) -> Style:
    """The style of an arm, which depends on its name alone: it is the same in every report."""
    if entry := ALL.get(name):
        return Style(entry.colour, entry.marker, entry.dash)
    number = crc32(name.encode())
    return Style(OTHER_COLOURS[number % 8], MARKERS[number // 8 % len(MARKERS)], ":")


def scatter(comparison: Results, label: str, costs: Callable[[Result], list[float]]) -> Any:
    """Test accuracy or R² (mean and standard deviation) against a cost (median and range)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2, 5.0), layout="constrained")
    axes = figure.add_subplot(
        xlabel=label, ylabel=in_words("test accuracy (%)", comparison.numbers)
    )
    unit = 1 if comparison.numbers else 100
    medians, right = [], 0.0
    for result in [r for r in comparison.ranked if r.counts]:
        cost, look = costs(result), style(result.arm.name)
        x, (y, dy) = float(np.median(cost)), (unit * a for a in result.accuracy)
        axes.errorbar(
            x, y, dy, [[x - min(cost)], [max(cost) - x]], look.marker, color=look.colour, ms=8,
            mec="white", mew=0.6, clip_on=False, label=result.arm.name,
        )  # fmt: skip
        if result.arm.reference:
            axes.axvline(x, color="#000000", linewidth=0.8, linestyle=(0, (2, 4)), zorder=0)
        medians.append(x)
        right = max(right, *cost)
    if medians and 0 < 10 * min(medians) < max(medians):
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_xlim(min(medians) / 2, max(2 * max(medians), 1.1 * right))
    else:
        axes.set_xlim(0, 1.1 * (right or 1.0))
    _scale_accuracy(axes, comparison)
    longest = max((len(result.arm.name) for result in comparison.results), default=0)
    figure.legend(loc="outside lower center", ncols=3 if longest < 18 else 2)
    return figure


def _scale_accuracy(axes: Any, comparison: Results) -> None:
    """If one arm is far behind, use a log scale of the error, so that the others stay apart.

    Of numbers, the scale is that of R².
    """
    if comparison.numbers:
        axes.margins(y=0.12)
        return
    values = [[100 * a for a in r.accuracy] for r in comparison.results if r.counts]
    means = [mean for mean, _ in values] or [0.0]
    if max(means) - min(means) < 20 or max(means) < 90:
        axes.margins(y=0.12)
        axes.set_ylim(top=min(100, axes.get_ylim()[1]))
        return
    least = max((100 - max(map(sum, values))) / 2, 0.01)  # the smallest error shown
    axes.set_yscale(
        "function",
        functions=(
            lambda y: -np.log10(np.maximum(100 - np.asarray(y), least)),
            lambda u: 100 - 10 ** -np.asarray(u),
        ),
    )
    ticks = [tick for tick in TICKS if tick < 100 - least]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_ylim(0, 100 - least)


def curves(comparison: Results) -> Any:
    """Training accuracy per block if the block has a classifier, else its scaled local loss."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    # a method may have hundreds of iterations: the epochs of the rules set the scale
    iterative = {r.arm.name for r in comparison.results if r.arm.method}
    panels = {t: lines for t, lines in _panels(comparison).items() if set(lines) - iterative}
    rows, handles = math.ceil(len(panels) / 3) or 1, {}
    figure = Figure(figsize=(9.3, 2.5 * rows + 0.8), layout="constrained")
    for number, (title, lines) in enumerate(panels.items(), 1):
        axes = figure.add_subplot(rows, 3, number)
        longest = max(len(line) for name, line in lines.items() if name not in iterative)
        axes.set(title=title, xlabel="epoch", xlim=(0.5, longest + 0.5))
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1))
        for name, line in lines.items():
            look, (mean, least, most) = style(name), zip(*line[:longest], strict=True)
            epochs = range(1, len(mean) + 1)
            mark: dict[str, Any] = {"ls": look.dash}
            if len(mean) == 1:
                mark = {"ls": "", "marker": look.marker}
            (handles[name],) = axes.plot(
                epochs, mean, label=name, color=look.colour, linewidth=1.6, **mark
            )
            axes.fill_between(epochs, least, most, color=look.colour, alpha=0.12, linewidth=0)
    names = [r.arm.name for r in comparison.results if r.arm.name in handles]
    figure.legend(handles=[handles[n] for n in names], loc="outside lower center", ncols=5)
    return figure


def confusions(comparison: Results) -> Any:
    """Confusion matrices of backprop, the best rule and the best control; None if too large."""
    from matplotlib.figure import Figure

    matrices = [(r.confusion, r.arm.name) for r in comparison.exemplars]
    matrices = [(m, name) for m, name in matrices if m and len(m.classes) <= MOST_CLASSES]
    if not matrices:
        return None
    figure = Figure(figsize=(9.3, 3.6), layout="constrained")
    for number, (matrix, name) in enumerate(matrices, 1):
        heat_map(figure.add_subplot(1, 3, number), matrix, name)
    return figure


def _panels(comparison: Results) -> dict[str, dict[str, Line]]:
    """Titles and lines of all panels that are not empty: accuracies or R², then local losses."""
    done = [r for r in comparison.results if r.counts]
    blocks = max((r.runs[0].blocks for r in done), key=len, default=[])
    panels = {}
    words = in_words("training accuracy (%)", comparison.numbers)
    for kind, lines in ((words, _accuracies), ("local loss, scaled", _losses)):
        for number, block in enumerate(blocks, 1):
            arms = {r.arm.name: lines(r, number, len(blocks)) for r in done}
            layer = shorten(block.name.partition(": ")[2] or block.name, 22, placeholder=" …")
            panels[f"block {number} ({layer})\n{kind}"] = {k: v for k, v in arms.items() if v}
    return {title: lines for title, lines in panels.items() if lines}


def _accuracies(result: Result, block: int, last: int) -> Line:
    """The accuracy of a block's classifier, or R² if it predicts numbers.

    Backprop counts as the last block.
    """
    runs = [[e for e in run.history if (e.block or last) == block] for run in result.runs]
    shares = [[100 * e.accuracy for e in run if e.accuracy is not None] for run in runs]
    return _line(shares) or _line([[e.r2 for e in run if e.r2 is not None] for run in runs])


def _losses(result: Result, block: int, last: int) -> Line:
    """Local losses, scaled to 0..1 within each run: different rules have different units.

    Those of DFA and sDFA, which follow the output error, have no meaning; a solved block has one.
    """
    if (result.arm.rule and result.arm.rule.needs_output) or _accuracies(result, block, last):
        return []
    runs = [[e.loss for e in run.history if (e.block or last) == block] for run in result.runs]
    if all(len(run) < 2 for run in runs):
        return []
    return _line(
        [[(v - min(run)) / ((max(run) - min(run)) or 1) for v in run] for run in runs if run]
    )


def _line(runs: list[list[float]]) -> Line:
    return [(fmean(v), min(v), max(v)) for v in zip(*runs, strict=False)]
