"""Rows of a result file that is written after every restart, so that a stopped run goes on.

A row holds the restarts of one setting: seeds, accuracies, seconds and peak memory of each, and the
machine, versions and commit that measured it. A second call adds the restarts that are missing; a
row whose settings have changed is measured again. Smoke runs have a file of their own,
`NAME-smoke.json`, so that they never mix with results.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from experiments.common import Row, Samples, accuracies, arguments, commit, origin, result_file
from tpsgd.comparison.provenance import machine
from tpsgd.engine.restarts import Restarts

ALONE = 2  # restarts that are trained one by one, for the seconds, before others are stacked
EACH = ("seeds", "seconds_each", "alone_each", "peak_bytes_each")
Fit = Callable[..., Restarts]  # (seed=, restarts=, stacked=) -> trained models


def row_arguments(doc: str | None, restarts: int = 5) -> argparse.ArgumentParser:
    """A parser with the arguments of experiments whose rows are restarts."""
    parser = arguments(doc)
    parser.add_argument("--restarts", type=int, default=restarts)
    parser.add_argument("--smoke", action="store_true", help="a few samples and settings: seconds")
    parser.add_argument(
        "--shared", action="store_true", help="other runs share the device: seconds say little"
    )
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="begin no row after that"
    )
    return parser


@dataclass
class Rows:
    """The rows of one result file, by name."""

    name: str
    options: argparse.Namespace
    settings: Row = field(default_factory=dict)
    words: tuple[str, ...] = ()
    began: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        if self.options.smoke:
            self.options.restarts = min(self.options.restarts, 2)
        self.record, self.save = result_file(self.options, self.name)
        self.origin = {"machine": machine(self.options.device), "commit": commit()}
        words = (*self.words, *["--smoke"] * self.options.smoke)
        self.record |= origin(self.name, self.options.device, *words)
        self.record |= {"commit": self.origin["commit"], "settings": self.settings}
        self.rows: dict[str, Row] = self.record.setdefault("rows", {})
        self.again = set(self.rows) if self.options.again else set()

    @property
    def late(self) -> bool:
        """Whether the time of this call is over, so that no row may begin."""
        return time.perf_counter() - self.began > self.options.seconds

    def begun(self, name: str, settings: Row) -> Row:
        """The row so far; empty if it has other settings, or is to be measured again."""
        row = self.rows.get(name, {})
        if name in self.again or row.get("settings") != settings:
            self.again.discard(name)
            return {}
        return row

    def measure(self, name: str, settings: Row, compute: Callable[[], Row]) -> Row | None:
        """A row that is computed in one go, unless it is there; None where it is too late."""
        if row := self.begun(name, settings):
            return row
        if self.late:
            return None
        began = time.perf_counter()
        row = {"settings": settings} | compute()
        row = {"seconds": time.perf_counter() - began} | row | self.origin
        self.rows[name] = row
        self.save()
        return row

    def each(self, name: str, settings: Row, compute: Callable[[int], Row]) -> Row | None:
        """A row with a record of each restart, from its seed; those that are there stay."""
        row = self.begun(name, settings) or {"settings": settings, "seeds": [], "each": []}
        for seed in range(len(row["seeds"]), self.options.restarts):
            if self.late:
                break
            began = time.perf_counter()
            one = compute(seed)
            row["each"].append({"seconds": time.perf_counter() - began} | one)
            row["seeds"].append(seed)
            self.rows[name] = row | self.origin
            self.save()
        return self.rows.get(name)

    def restart(
        self, name: str, settings: Row, fit: Fit, test: Samples, stack: bool = False
    ) -> Row | None:
        """A row with as many restarts as are asked for; those that are there stay.

        Restarts are trained one by one. With `stack`, only the first ones are, to have the seconds
        of one, and the others are trained together.
        """
        row = self.begun(name, settings) or {"settings": settings} | {k: [] for k in EACH}
        while (missing := self.options.restarts - len(row["seeds"])) > 0 and not self.late:
            seed = len(row["seeds"])
            count = missing if stack and seed >= ALONE else 1
            many = fit(seed=seed, restarts=count, stacked=count > 1)
            _add(row, many, many.evaluate(test), not self.options.shared)
            self.rows[name] = row | self.origin
            self.save()
        return self.rows.get(name)


def _add(row: Row, many: Restarts, shares: list[float], alone: bool) -> None:
    """Add restarts to a row; its seconds are of restarts that had the device for themselves."""
    row["seeds"] += [run.seed for run in many.runs]
    row |= accuracies(shares, row if "accuracies" in row else None)
    if not many.stacked:
        row["seconds_each"] += [run.seconds for run in many.runs]
        row["peak_bytes_each"] += [run.peak_bytes for run in many.runs]
        row["alone_each"] += [alone] * len(many)
    pairs = list(zip(row["seconds_each"], row["alone_each"], strict=True))
    timed = [seconds for seconds, free in pairs if free] or row["seconds_each"]
    row["seconds"] = median(timed[1:] or timed)  # the first one also warms up the device
    row["alone"] = any(row["alone_each"])
    row["peak_bytes"] = max(row["peak_bytes_each"])
    row["sample_passes"], row["fit"] = many.runs[0].sample_passes, many.runs[0].settings


def shown(row: Row) -> str:
    """A row of restarts for the terminal."""
    share = f"{row['accuracy']:.2%} ± {row['deviation']:.2%} of {len(row['accuracies'])}"
    return f"{share}  {row['seconds']:6.2f} s  {row['peak_bytes'] / 2**20:8.1f} MiB"


def leave_out(what: str, error: Exception) -> Any:
    """Say in one sentence why something is not measured."""
    print(f"{what} is left out: {error}", flush=True)
