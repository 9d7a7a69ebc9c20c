"""Ways to train one net, timed in turns: seconds, ratios to the best peer, and stored goals."""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import nn

from tpsgd import Run

PLAIN, FIT_BACKPROP, WRITTEN_OUT = "plain loop", "fit_backprop", "written-out backprop"
MARGIN = 0.15  # how much worse than its goal a figure may be, as a share of the goal
Arm = Callable[[nn.Module], Any]
Row = dict[str, Any]


@dataclass(frozen=True)
class Contest:
    """A net, the ways to train it, and the peers whose fastest one has the ratio 1.

    A way to train is a function of a fresh model. `PLAIN` may be there several times, in different
    memory formats ("plain loop, channels last"): the fastest of them counts.
    """

    name: str
    model: Callable[[], nn.Module]
    arms: dict[str, Arm]
    settings: Row
    peers: tuple[str, ...] = (PLAIN, FIT_BACKPROP)
    score: Callable[[nn.Module], float] | None = None


def cpu_clock() -> float:
    """CPU seconds of this thread, the only one that computes: other programs do not add to them."""
    return time.thread_time()


def gpu_clock() -> float:
    """Seconds by the wall, with all the work of the GPU done."""
    torch.cuda.synchronize()
    return time.perf_counter()


def compete(contest: Contest, turns: int, clock: Callable[[], float]) -> Row:
    """Every arm once in each turn, after a turn that warms up; medians over the turns.

    The seconds are those of the whole call, so that what a `fit` prepares is in them.
    """
    seconds: dict[str, list[float]] = {arm: [] for arm in contest.arms}
    runs: dict[str, list[Run]] = {arm: [] for arm in contest.arms}
    accuracies: dict[str, Row] = {arm: {} for arm in contest.arms}
    for turn in range(turns + 1):
        gc.collect()
        for name, arm in contest.arms.items():
            torch.manual_seed(0)
            model = contest.model()
            began = clock()
            result = arm(model)
            took = clock() - began
            if turn:
                seconds[name].append(took)
                runs[name] += [result] if isinstance(result, Run) else []
            if contest.score is not None:
                accuracies[name]["accuracy"] = contest.score(model)
            del model, result
    arms = figures(seconds, contest.peers)
    for name, row in arms.items():
        row |= of_runs(runs[name], runs.get(FIT_BACKPROP, [])) | accuracies[name]
    return {"settings": contest.settings, "peers": list(contest.peers), "arms": arms}


def of_runs(runs: list[Run], backprop: list[Run]) -> Row:
    """What the records of `fit` know: seconds without the set-up, bytes, and these over backprop's.

    `kept_bytes` are the inputs that a sequential run keeps for its next block.
    """
    if not runs:
        return {}
    row = {
        "loop_seconds": median(run.seconds for run in runs),
        "peak_bytes": runs[-1].peak_bytes,
        "kept_bytes": runs[-1].kept_bytes,
        "sample_passes": runs[-1].sample_passes,
    }
    if backprop and runs[-1].peak_bytes:
        row["memory_ratio"] = runs[-1].total_bytes / backprop[-1].total_bytes
    return row


def figures(seconds: dict[str, list[float]], peers: tuple[str, ...]) -> dict[str, Row]:
    """Median seconds of every arm, and medians of its ratios to the peers in the same turn.

    `ratio` is to the fastest peer of each turn; `over` has the ratio to each peer by its name.
    """
    turns = range(len(next(iter(seconds.values()))))

    def fastest(names: tuple[str, ...]) -> list[float]:
        return [min(s[t] for arm, s in seconds.items() if arm.startswith(names)) for t in turns]

    known = [p for p in dict.fromkeys((*peers, PLAIN, FIT_BACKPROP, WRITTEN_OUT)) if p in seconds]
    bases = {peer: fastest((peer,)) for peer in known}
    best = fastest(peers)

    def ratio(arm: str, base: list[float]) -> float:
        return median(seconds[arm][t] / base[t] for t in turns)

    return {
        arm: {
            "seconds": median(each),
            "ratio": ratio(arm, best),
            "over": {peer: ratio(arm, base) for peer, base in bases.items()},
            "each": each,
        }
        for arm, each in seconds.items()
    }


def missed(measured: dict[str, Row], goals: dict[str, dict[str, Row]]) -> list[str]:
    """A line for every figure that is worse than its goal by more than the margin.

    Goals of nets that were not measured are passed over; of a measured net, every goal must have
    its figure.
    """
    lines = []
    for net, arms in goals.items():
        for arm, limits in arms.items() if net in measured else ():
            for figure, goal in limits.items():
                value = measured[net]["arms"].get(arm, {}).get(figure)
                if value is None:
                    lines.append(f"{net}: {arm}: {figure} was not measured, its goal is {goal:g}")
                elif value > goal * (1 + MARGIN):
                    lines.append(
                        f"{net}: {arm}: {figure} is {value:.3g}, its goal {goal:g} "
                        f"(with the margin {goal * (1 + MARGIN):.3g})"
                    )
    return lines
