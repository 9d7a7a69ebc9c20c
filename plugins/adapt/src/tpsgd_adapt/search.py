"""`search`: which layers, on which tap? A grid, trained and judged by held-out samples."""

import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from statistics import correlation
from typing import Any

from tpsgd.common.errors import TpsgdError
from tpsgd.common.units import as_bytes, columns, size
from tpsgd.comparison.finished_runs import FinishedRuns
from tpsgd.comparison.trials import Progress, best, run_trials
from tpsgd.engine.fit import fit as fit_locally
from tpsgd.engine.record import Run
from tpsgd.engine.settings import Memory
from tpsgd.memory.plan import short
from tpsgd.saved.checkpoint import Checkpoint, claimed
from tpsgd_adapt import figures
from tpsgd_adapt.backbone import Backbone
from tpsgd_adapt.fitting import tap_names
from tpsgd_adapt.heads import Layers, Probe, recipe
from tpsgd_adapt.trials import Candidate, layer_trials

HEAD = ("tap", "conv", "dense", "weights", "planned", "peak", "score", "held-out %", "s")


@dataclass(frozen=True)
class AdaptorSearch:
    """The result of a search; `print` it, `plot` it."""

    rows: tuple[Candidate, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    memory_budget: int | None = None

    def best(self, memory: str | int | None = None, tap: str | None = None) -> Candidate:
        """The most accurate layers (no probe) that plan within a budget; of equal, the smallest."""
        limit = self.memory_budget if memory is None else as_bytes(memory)
        rows = [r for r in self.rows if not r.control and tap in (None, r.tap)]
        rows.sort(key=lambda r: r.planned_bytes)
        if row := best(r for r in rows if limit is None or r.planned_bytes <= limit):
            return row
        least = rows[0].planned_bytes if rows else 0
        within = "" if limit is None else f" within {size(limit)}"
        raise TpsgdError(f"nothing was trained{within}: the smallest plans {size(least)}")

    def control(self, tap: str | None = None) -> Candidate | None:
        """The best linear probe."""
        return best(r for r in self.rows if r.control and tap in (None, r.tap))

    def rank_correlation(self, tap: str | None = None) -> float | None:
        """Spearman's, of score and held-out accuracy; None if there is too little to compare."""
        rows = [r for r in self.rows if r.accuracy is not None and tap in (None, r.tap)]
        pairs = [(r.score, r.accuracy or 0.0) for r in rows if r.score is not None]
        return spearman(*zip(*pairs, strict=True)) if pairs else None

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain values, ready for JSON."""
        return {
            "rows": [row.as_dict() for row in self.rows],
            "settings": self.settings,
            "memory_budget": self.memory_budget,
            "rank_correlation": self.rank_correlation(),
        }

    def plot(self, file: Path | str) -> Path:
        """Heatmaps of accuracy and memory for each tap, as FILE.png or FILE.svg."""
        taps = {row.tap for row in self.rows if row.accuracy is not None and not row.control}
        best = {tap: self.best(tap=tap) for tap in taps}
        return figures.draw_heatmaps(self.rows, best, self.memory_budget, Path(file))

    def __str__(self) -> str:
        failed = [f"{row} failed: {row.error}" for row in self.rows if row.error]
        table = columns([HEAD, *map(_cells, self.rows)])
        return "\n".join([table, *(textwrap.fill(line, 80) for line in failed)])


def _cells(row: Candidate) -> tuple[str, ...]:
    layers = row.layers
    counts = ("probe", "") if isinstance(layers, Probe) else (str(layers.convs), str(layers.dense))
    sizes = (row.trainable_bytes, row.planned_bytes, row.peak_bytes)
    score = "-" if row.score is None else f"{row.score:.1f}"
    result = row.skipped or figures.percent(row).replace("\n", " ")
    seconds = f"{row.seconds:.{0 if row.seconds >= 100 else 1}f}" if row.accuracies else "-"
    return (figures.short_name(row.tap), *counts, *map(short, sizes), score, result, seconds)


def spearman(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Rank correlation, ties at their mean rank; None for fewer than three pairs, or all ties.

    Examples:
        >>> spearman([1, 2, 3], [10, 30, 20])
        0.5
    """
    u, v = ([sum(x < y for x in s) + sum(x == y for x in s) / 2 for y in s] for s in (a, b))
    if len(u) < 3 or len(set(u)) == 1 or len(set(v)) == 1:
        return None
    return correlation(u, v)


def search(
    backbone: Backbone,
    data: Any,
    *,
    taps: str | Sequence[str],
    convs: Sequence[int] = (0, 1, 2),
    dense: Sequence[int] = (0, 1, 2),
    layers: Layers = Layers(),  # noqa: B008 (a frozen value)
    method: Callable[..., Run] = fit_locally,
    classes: int | Sequence[str] | None = None,
    restarts: int = 1,
    held_out: float = 0.2,
    memory: str | int | Memory | None = None,
    top: int | None = None,
    folder: str | Path | Checkpoint | None = None,
    progress: Progress | None = None,
    seed: int = 0,
    **settings: Any,
) -> AdaptorSearch:
    """Train every number of convolutions and dense layers on every tap, and a linear probe of each.

    Args:
        backbone: see `Backbone`.
        data: what to train on, as for `adapt.fit`, or `Features`. Some of it is held out to judge
            by, so that no test set is needed.
        taps: which of the backbone's.
        convs: numbers of convolutions to try. A tap of plain vectors has none.
        dense: numbers of dense layers to try.
        layers: their `filters`, `kernel` and `width`.
        method: `tpsgd.fit` or `tpsgd.fit_backprop`.
        classes: as for `adapt.fit`.
        restarts: how often each is trained, with seeds from `seed` on; a probe is solved once.
        held_out: the share of the samples of each class to judge by.
        memory: a budget ("20MB"): configurations that plan above it are not trained. Or `Memory`
            settings for the training.
        top: train only this many per tap, those with the best score (scores of different taps
            do not compare); layers without a rectifier have no score and come last.
        folder: finished trials are stored there, in trials.jsonl, and not repeated by a later
            search of the same data with the same settings, which may try more taps, layers and
            restarts; `tpsgd.Checkpoint(folder)` refuses a folder that holds some.
        progress: called with (what is being done, done, total).
        seed: of the split, the weights, the projections and the order of samples.
        **settings: those of `adapt.fit`: rule, epochs, lr, ...

    Examples:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU())
        >>> y = torch.arange(40) % 2
        >>> x = torch.randn(40, 6) + y[:, None]
        >>> result = search(Backbone(net, ["1"]), (x, y), taps="1", dense=(0, 1), epochs=1)
        >>> [row.layers.dense for row in result.rows if not row.control]
        [0, 1]
    """
    names = tap_names(backbone, taps)
    for name, values in {"convs": convs, "dense": dense}.items():
        if not len(values) or len(set(values)) < len(values):
            raise TpsgdError(f"{name} must be different values, at least one, got {list(values)}")
    for name, value in {"restarts": restarts, "top": top}.items():
        if value is not None and (not isinstance(value, int) or value < 1):
            raise TpsgdError(f"{name} must be a whole number, 1 or more, got {value!r}")
    budget = Memory.of(memory).budget
    limit = None if budget is None else as_bytes(budget)
    settings |= {"memory": memory} if isinstance(memory, Memory) and budget is None else {}
    if folder is not None and not isinstance(folder, Checkpoint):
        folder = Checkpoint(Path(folder), resume=True)
    with claimed(folder) as checkpoint:
        trials = layer_trials(
            backbone, data, names, classes=classes, method=method, settings=settings,
            held_out=held_out, seed=seed, progress=progress,
        )  # fmt: skip
        finished = FinishedRuns(checkpoint, trials.identity)
        grid: list[tuple[str, Layers | Probe]] = []
        for tap in names:
            numbers = product(convs if trials.train.x[tap].dim() > 2 else (0,), dense)
            choices = (replace(layers, convs=c, dense=d) for c, d in numbers)
            grid += [(tap, Probe()), *((tap, choice) for choice in choices)]
        rows = []
        for i, choice in enumerate(grid):
            if progress is not None:
                progress("planning", i, len(grid))
            rows.append(trials.candidate(*choice))
        _skip(rows, limit, top)
        tasks = [trials.task(row, restarts) for row in rows if not row.skipped]
        run_trials(tasks, finished, progress)
    failed = [row for row in rows if row.error]
    for row in failed:
        row.skipped = "failed"
    if failed and not any(row.accuracy is not None for row in rows if not row.control):
        raise TpsgdError(str(failed[-1].error))
    record = {"taps": list(names), "convs": list(convs), "dense": list(dense), "restarts": restarts}
    record |= {"top": top, "held_out_share": held_out, "layers": recipe(layers)}
    return AdaptorSearch(tuple(rows), record | trials.identity, limit)


def _skip(rows: list[Candidate], limit: int | None, top: int | None) -> None:
    """Note on some of the rows the reason why they are not to be trained."""
    counts = Counter()
    for row in sorted(rows, key=lambda r: (r.score is not None, r.score or 0.0), reverse=True):
        above = limit is not None and row.planned_bytes > limit
        counts[row.tap] += not (row.control or above)
        left_out = not row.control and top is not None and counts[row.tap] > top
        row.skipped = "over budget" if above else "left out" if left_out else ""
