"""What a search has found: a row for every configuration, and the table of them."""

import math
import textwrap
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from tpsgd.adapt.heads import Layers, Probe, recipe
from tpsgd.adapt.naswot import spearman
from tpsgd.errors import TpsgdError
from tpsgd.memory.plan import short
from tpsgd.units import as_bytes, columns, size

HEAD = ("tap", "conv", "dense", "weights", "planned", "peak", "score", "held-out %", "s")


@dataclass(frozen=True)
class Row:
    """One configuration: layers on a tap, what they cost and what they have shown.

    Attributes:
        planned_bytes: the peak of one training, features and kept inputs not counted.
        score: see `activation_overlap`; None without a rectifier.
        accuracies: on the held-out samples, one per restart; none if it was not trained.
        peak_bytes: as it was measured.
        skipped: why it was not trained, if it was not.
    """

    tap: str
    layers: Layers | Probe
    trainable_bytes: int
    planned_bytes: int | None
    score: float | None
    accuracies: tuple[float, ...] = ()
    seconds: float | None = None
    peak_bytes: int | None = None
    skipped: str = ""
    error: str = ""

    @property
    def control(self) -> bool:
        """Whether it is a linear probe."""
        return isinstance(self.layers, Probe)

    @property
    def accuracy(self) -> float | None:
        """The mean over restarts."""
        return fmean(self.accuracies) if self.accuracies else None

    @property
    def std(self) -> float:
        """The deviation over restarts."""
        return stdev(self.accuracies) if len(self.accuracies) > 1 else 0.0

    @property
    def brief(self) -> str:
        """Tap, convolutions and dense layers, in few characters."""
        if isinstance(self.layers, Probe):
            return f"{self.tap} probe"
        return f"{self.tap} {self.layers.convs}+{self.layers.dense}"

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain values."""
        score = None if self.score == -math.inf else self.score  # JSON knows no infinity
        found = {"layers": recipe(self.layers), "score": score}
        return asdict(self) | found | {"accuracy": self.accuracy, "std": self.std}

    def __str__(self) -> str:
        if isinstance(self.layers, Probe):
            return f"{self.tap}, linear probe"
        return f"{self.tap}, {self.layers.convs} convolutional and {self.layers.dense} dense layers"


@dataclass(frozen=True)
class Search:
    """What a search has found; `print` it, `plot` it."""

    rows: tuple[Row, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    memory_budget: int | None = None

    def best(self, memory_budget: str | int | None = None, tap: str | None = None) -> Row:
        """The most accurate layers that plan within a budget; of equal ones, the smallest.

        Linear probes are controls and cannot be chosen: see `control`.
        """
        limit = self.memory_budget if memory_budget is None else as_bytes(memory_budget)
        able = [r for r in self.rows if not r.control and tap in (None, r.tap)]
        inside = [r for r in able if r.accuracies and (r.planned_bytes or 0) <= (limit or math.inf)]
        if not inside:
            least = min((r.planned_bytes or 0 for r in able), default=0)
            within = "" if limit is None else f" within {size(limit)}"
            raise TpsgdError(f"nothing was trained{within}: the smallest plans {size(least)}")
        return max(inside, key=lambda r: (r.accuracy or 0.0, -(r.planned_bytes or 0)))

    def control(self, tap: str | None = None) -> Row | None:
        """The best linear probe."""
        probes = [r for r in self.rows if r.control and r.accuracies and tap in (None, r.tap)]
        return max(probes, key=lambda r: r.accuracy or 0.0, default=None)

    def rank_correlation(self, tap: str | None = None) -> float | None:
        """Spearman's, of score and held-out accuracy; None where there is too little to compare."""
        known = [r for r in self.rows if r.accuracies and tap in (None, r.tap)]
        pairs = [(r.score, fmean(r.accuracies)) for r in known if r.score is not None]
        return spearman([s for s, _ in pairs], [a for _, a in pairs])

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain values, ready for JSON."""
        rows = [row.as_dict() for row in self.rows]
        found = {"rows": rows, "settings": self.settings, "memory_budget": self.memory_budget}
        return found | {"rank_correlation": self.rank_correlation()}

    def plot(self, file: Path | str) -> Path:
        """Heatmaps of accuracy and memory for each tap, as FILE.png or FILE.svg."""
        from tpsgd.comparison.report.heatmaps import draw

        return draw(self, Path(file))

    def __str__(self) -> str:
        failed = [f"{row} failed: {row.error}" for row in self.rows if row.error]
        return "\n".join([columns([HEAD, *map(_cells, self.rows)]), *_wrapped(failed)])


def _cells(row: Row) -> tuple[str, ...]:
    """A row of the table."""
    from tpsgd.comparison.report.heatmaps import short_of

    counts = (
        ("probe", "") if isinstance(row.layers, Probe) else (row.layers.convs, row.layers.dense)
    )
    sizes = (row.trainable_bytes, row.planned_bytes or 0, row.peak_bytes or 0)
    score = "-" if row.score is None else f"{row.score:.1f}"
    found = row.skipped or f"{row.accuracy or 0:.1%}".rstrip("%")
    found += f" ± {100 * row.std:.1f}" if len(row.accuracies) > 1 else ""
    seconds = "-" if row.seconds is None else f"{row.seconds:.{0 if row.seconds >= 100 else 1}f}"
    return (short_of(row.tap), *map(str, counts), *map(short, sizes), score, found, seconds)


def _wrapped(lines: list[str]) -> list[str]:
    return [textwrap.fill(line, 80) for line in lines]
