"""`search`: which layers, on which tap? A grid, trained and judged by held-out samples."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from tpsgd.adapt.backbone import Backbone
from tpsgd.adapt.heads import Layers, Probe
from tpsgd.adapt.results import Row, Search
from tpsgd.adapt.trial_log import Log
from tpsgd.adapt.trials import Judge, Tell, Trial, judge
from tpsgd.engine.fit import fit as fit_locally
from tpsgd.engine.meter import tensor_bytes
from tpsgd.engine.record import Run
from tpsgd.errors import TpsgdError
from tpsgd.rules import Rule
from tpsgd.units import as_bytes

ABOVE, BELOW, FAILED = "over budget", "left out", "failed"
OF_ONE = ("tap", "seed", "split", "data")  # in a trial's key, and not the whole search's


def search(
    backbone: Backbone,
    data: Any,
    *,
    taps: str | Sequence[str],
    convs: Sequence[int] = (0, 1, 2),
    dense: Sequence[int] = (0, 1, 2),
    layers: Layers = Layers(),  # noqa: B008 (a frozen value)
    rule: Rule | None = None,
    method: Callable[..., Run] = fit_locally,
    classes: int | Sequence[str] | None = None,
    restarts: int = 1,
    held_out: float = 0.2,
    memory_budget: str | int | None = None,
    top: int | None = None,
    folder: str | Path | None = None,
    progress: Tell | None = None,
    seed: int = 0,
    **options: Any,
) -> Search:
    """Train every number of convolutions and dense layers on every tap, and a linear probe of each.

    Args:
        backbone: see `Backbone`.
        data: what to train on, as for `adapt.fit`, or `Features`. A part of it is held out to judge
            by, so that no test set is needed.
        taps: which of the backbone's.
        convs: numbers of convolutions to try. A tap of plain vectors has none.
        dense: numbers of dense layers to try.
        layers: their `filters`, `kernel` and `width`.
        rule: as for `fit`, like `method`, `classes` and the `options` (epochs, lr, ...).
        restarts: trainings of each, with seeds from `seed` on; a probe is solved once.
        held_out: the share of the samples to judge by, the shares of the classes kept.
        memory_budget: bytes or "20MB"; what plans above it is not trained.
        top: of each tap, train only so many, those with the best score (scores of different taps
            do not compare); layers without a rectifier have none and come last.
        folder: each finished trial is kept there, in trials.jsonl, and not repeated another time.
        progress: called with (what is being done, done, total).
        seed: of the split, the weights, the projections and the order of samples.

    Examples:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU())
        >>> y = torch.arange(40) % 2
        >>> x = torch.randn(40, 6) + y[:, None]
        >>> found = search(Backbone(net, ["1"]), (x, y), taps="1", dense=(0, 1), epochs=1)
        >>> [row.layers.dense for row in found.rows if not row.control]
        [0, 1]
    """
    names = [taps] if isinstance(taps, str) else list(taps)
    _check(backbone, names, convs, dense, restarts, top)
    limit = None if memory_budget is None else as_bytes(memory_budget)
    options |= {} if rule is None else {"rule": rule}
    log = Log(folder)
    known = judge(
        backbone, data, names, classes=classes, method=method, options=options, held_out=held_out,
        seed=seed, tell=progress,
    )  # fmt: skip
    grid = list(_grid(known, names, convs, dense, layers))
    rows = []
    for tap, kind in grid:
        if progress is not None:
            progress("planning", len(rows), len(grid))
        rows.append(_planned(known, tap, kind))
    if limit is not None and any(row.planned_bytes is None for row in rows):
        raise TpsgdError("memory_budget needs a plan: train with tpsgd.fit or tpsgd.fit_backprop")
    rows = _trained(known, _chosen(rows, limit, top), restarts, log, progress)
    settings = {"taps": names, "convs": list(convs), "dense": list(dense), "restarts": restarts}
    settings |= {"top": top, "seed": seed, "held_out_share": held_out}
    settings |= {k: v for k, v in known.key(names[0], layers, seed).items() if k not in OF_ONE}
    return Search(tuple(rows), settings, limit)


def _check(
    backbone: Backbone, taps: list[str], convs: Any, dense: Any, restarts: int, top: int | None
) -> None:
    for tap in taps:
        backbone.path(tap)
    for name, values in {"taps": taps, "convs": convs, "dense": dense}.items():
        if not len(values) or len(set(values)) < len(values):
            raise TpsgdError(f"{name} must be different values, one at least, got {list(values)}")
    for name, value in {"restarts": restarts, "top": top}.items():
        if value is not None and (not isinstance(value, int) or value < 1):
            raise TpsgdError(f"{name} must be a whole number, 1 or more, got {value!r}")


def _grid(
    known: Judge, taps: list[str], convs: Sequence[int], dense: Sequence[int], layers: Layers
) -> Iterator[tuple[str, Layers | Probe]]:
    """Every configuration, tap by tap, the probe of each first."""
    for tap in taps:
        yield tap, Probe()
        for c in convs if known.train.x[tap].dim() > 2 else (0,):
            for d in dense:
                yield tap, replace(layers, convs=c, dense=d)


def _planned(known: Judge, tap: str, layers: Layers | Probe) -> Row:
    head = known.head(tap, layers)
    planned, score = known.planned(tap, head, layers), known.score(tap, head)
    return Row(tap, layers, tensor_bytes(head), planned, score)


def _chosen(rows: list[Row], limit: int | None, top: int | None) -> list[Row]:
    """The rows, with the reason why some are not to be trained."""
    if limit is not None:
        rows = [replace(r, skipped=ABOVE) if (r.planned_bytes or 0) > limit else r for r in rows]
    if top is None:
        return rows

    def rank(row: Row) -> tuple[bool, float]:
        return (row.score is not None, row.score or 0.0)

    best: set[int] = set()
    for tap in {row.tap for row in rows}:
        able = [i for i, r in enumerate(rows) if r.tap == tap and not (r.control or r.skipped)]
        best |= set(sorted(able, key=lambda i: rank(rows[i]), reverse=True)[:top])
    return [
        r if r.control or r.skipped or i in best else replace(r, skipped=BELOW)
        for i, r in enumerate(rows)
    ]


def _trained(
    known: Judge, rows: list[Row], restarts: int, log: Log, progress: Tell | None
) -> list[Row]:
    """The rows with what their trainings have shown; one that fails leaves the others alone."""
    counts = [0 if row.skipped else 1 if row.control else restarts for row in rows]
    done, finished = 0, []

    def once(row: Row, r: int) -> Trial:
        def tell(share: float) -> None:
            if progress is not None:
                progress(row.brief, done + r + share, sum(counts))

        key = known.key(row.tap, row.layers, known.seed + r)
        if (trial := log.get(key)) is None:
            tell(0)
            part = lambda _, n, of: tell(0.99 * n / of)  # noqa: E731 (it is not kept yet)
            trial = known.trial(row.tap, row.layers, known.seed + r, part)
            log.add(key, trial)
        tell(1)
        return trial

    for row, count in zip(rows, counts, strict=True):
        try:
            finished.append(_with(row, [once(row, r) for r in range(count)]))
        except TpsgdError as error:
            finished.append(replace(row, skipped=FAILED, error=str(error)))
        done += count
    errors = [row.error for row in finished if row.error]
    if errors and not any(row.accuracies for row in finished if not row.control):
        raise TpsgdError(errors[-1])
    return finished


def _with(row: Row, trials: list[Trial]) -> Row:
    if not trials:
        return row
    return replace(
        row,
        accuracies=tuple(t.accuracy for t in trials),
        seconds=fmean(t.seconds for t in trials),
        peak_bytes=max(t.peak_bytes for t in trials),
    )
