"""The table of a comparison as text, for the terminal and for the page."""

from tpsgd.comparison.results import THROUGH_TIME, Result, Results
from tpsgd.engine.settings import Memory
from tpsgd.units import size

HEAD = ("rule", "accuracy %", "seconds", "", "memory", "", "kept", "passes")
NONE = "–"


def rows(comparison: Results) -> list[tuple[str, ...]]:
    """A row per arm, as in `HEAD`; an unnamed column is the one before it relative to backprop."""
    return [_row(result, comparison) for result in comparison.ranked]


def failures(comparison: Results) -> list[str]:
    """What went wrong: failed arms, and whether the comparison was interrupted."""
    lines = [f"{r.arm.name} failed: {r.error}" for r in comparison.ranked if r.error]
    if comparison.interrupted:
        lines.append(
            f"interrupted: {comparison.finished} of {comparison.asked} training runs finished"
        )
    return lines


def remarks(comparison: Results) -> list[str]:
    """What the table does not show: solved heads, iterations, budgets, arms left out."""
    lines = []
    if comparison.settings.get("head") == "ridge":
        arms = [r.arm for r in comparison.ranked]
        trained = [a.name for a in arms if a.optimizer is None and a.method is None]
        lines.append(f"last layers are solved in closed form, except of {', '.join(trained)}")
    once = [r.arm.name for r in comparison.ranked if r.counts and _in_one_pass(r)]
    if once:
        lines.append(f"solved in one pass, without epochs: {', '.join(once)}")
    for r in comparison.ranked:
        if r.counts and (count := r.runs[0].settings.get("iterations")):
            lines.append(f"{r.arm.name}: {count} iterations over all samples, not epochs")
    if (free := comparison.settings.get("without_budget")) is not None:
        budget = Memory(comparison.settings["memory_budget"]).budget_in_words
        lines.append(f"each training run {budget}, except for {free}")
    if left := comparison.settings.get("left_out"):
        lines.append(f"not trained: {', '.join(left)}; name them in --rules to train them")
    return lines


def _in_one_pass(result: Result) -> bool:
    """Whether every trained block was solved."""
    ways = {block.learning for block in result.runs[0].blocks} - {"frozen"}
    return ways == {"solved"}


def title(comparison: Results) -> str:
    """Data and model, in a few words."""
    return ", ".join(filter(None, (comparison.data["name"], comparison.settings.get("model"))))


def effort(comparison: Results) -> str:
    """Epochs and restarts, in a few words."""
    settings = comparison.settings
    return f"epochs per block: {settings['epochs']}, restarts: {settings['restarts']}"


def legend(comparison: Results) -> str:
    """The table's columns, in two lines."""
    base = comparison.reference
    over = "backprop through time" if base and base.arm.remark == THROUGH_TIME else "backprop"
    columns = "memory: the peak and kept inputs; kept: these inputs; passes: sample passes"
    return f"× is relative to {over}\n{columns}"


def accuracy(result: Result, samples: int) -> str:
    """Mean ± standard deviation in per cent, with as many digits as the test samples allow."""
    digits = 2 if samples >= 5000 else 1
    mean, std = (f"{100 * value:.{digits}f}" for value in result.accuracy)
    return f"{mean} ± {std}" if len(result.runs) > 1 else mean


def _row(result: Result, comparison: Results) -> tuple[str, ...]:
    if not result.counts:
        return (result.arm.name, "failed" if result.error else NONE, *[NONE] * (len(HEAD) - 2))
    run, base, seconds = result.largest, comparison.reference, result.seconds
    base_bytes = base.largest.total_bytes if base else 0
    return (
        result.arm.name,
        accuracy(result, comparison.data["test"]),
        f"{seconds:.2f}" if seconds < 100 else f"{seconds:.0f}",
        f"×{seconds / base.seconds:.2f}" if base else NONE,
        size(run.total_bytes) if run.peak_bytes else NONE,
        f"×{run.total_bytes / base_bytes:.2f}" if base_bytes and run.peak_bytes else NONE,
        size(run.kept_bytes) if run.kept_bytes else NONE,
        _short(result.runs[-1].sample_passes),
    )


def _short(count: int) -> str:
    for unit, step in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= step:
            return f"{count / step:.{1 if count < 99.95 * step else 0}f}{unit}"
    return str(count)
