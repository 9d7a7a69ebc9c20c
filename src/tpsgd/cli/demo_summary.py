"""What the demo shows, in three lines: accuracy, memory and time of a local rule over backprop's.

The lines are computed from the comparisons, and say so where the rule is behind.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tpsgd.comparison.results import Result, Results

RULE = "readout-learned"
LEVEL = 1.0  # points of accuracy within which two arms are level, unless their restarts differ more


@dataclass(frozen=True)
class Versus:
    """The rule, backprop and the most accurate control on one net, which all were trained."""

    ours: "Result"
    backprop: "Result"
    control: "Result | None"
    in_micro_batches: float | None = None  # memory over backprop's, both in equal micro-batches

    def ratio(self, cost: "Callable[[Result], float]") -> float:
        """The cost of the rule over backprop's."""
        return cost(self.ours) / cost(self.backprop)

    def points(self, result: "Result") -> float:
        """How many points of accuracy a result is ahead of backprop."""
        return 100 * (result.accuracy[0] - self.backprop.accuracy[0])

    @property
    def verdict(self) -> str:
        """`level`, `ahead` or `behind`."""
        spread = 100 * max(self.ours.accuracy[1], self.backprop.accuracy[1])
        gap = self.points(self.ours)
        return "level" if abs(gap) <= max(LEVEL, spread) else "ahead" if gap > 0 else "behind"


def versus(record: "Results", micro_batch_bytes: int) -> Versus | None:
    """The rule and backprop in a comparison; None if one of them failed.

    `micro_batch_bytes` is the memory of the rule in the micro-batches of `backprop-micro`.
    """
    done = {result.arm.name: result for result in record.ranked if result.counts}
    if RULE not in done or "backprop" not in done:
        return None
    control = next((result for result in done.values() if result.arm.control), None)
    micro = done.get("backprop-micro")
    ratio = micro and micro_batch_bytes / micro.largest.total_bytes
    return Versus(done[RULE], done["backprop"], control, ratio)


def summary(nets: Mapping[str, Versus]) -> list[str]:
    """A title and three lines about nets, by their names; nothing if there are none."""
    if not nets:
        return []
    micro = {name: v.in_micro_batches for name, v in nets.items() if v.in_micro_batches}
    equal = f"; both in micro-batches: {_listed(micro)}" if micro else ""
    return [
        f"{RULE} against backprop, at rates searched on held-out samples:",
        f"accuracy: {_accuracy(nets)}",
        f"memory: {_less(nets, lambda result: result.largest.total_bytes)}{equal}",
        f"time: {_less(nets, lambda result: result.seconds)}",
    ]


def _accuracy(nets: Mapping[str, Versus]) -> str:
    """On how many nets the rule is level with backprop, ahead or behind, and by how many points."""
    verdicts = [v.verdict for v in nets.values()]
    level, ahead, behind = (verdicts.count(word) for word in ("level", "ahead", "behind"))
    points = ", ".join(f"{name} {v.points(v.ours):+.1f}" for name, v in nets.items())
    controls = ", ".join(f"{v.points(v.control):+.1f}" for v in nets.values() if v.control)
    random = f"; random layers at best {controls}" if controls else ""
    counts = f"level with backprop on {level} of {len(nets)} nets, ahead on {ahead}, behind on"
    return f"{counts} {behind} ({points} points{random})".replace("-", "\N{MINUS SIGN}")


def _less(nets: Mapping[str, Versus], cost: "Callable[[Result], float]") -> str:
    """On how many nets the rule takes less than backprop, and its costs over backprop's."""
    ratios = {name: v.ratio(cost) for name, v in nets.items()}
    less = sum(round(ratio, 2) < 1 for ratio in ratios.values())
    return f"less than backprop's on {less} of {len(nets)} nets ({_listed(ratios)})"


def _listed(ratios: Mapping[str, float]) -> str:
    return ", ".join(f"{name} ×{ratio:.2f}" for name, ratio in ratios.items())
