"""The tables of a comparison as text, for the terminal and for the page."""

from collections import Counter
from collections.abc import Sequence

from tpsgd.common.units import size
from tpsgd.comparison.results import THROUGH_TIME, Result, Results
from tpsgd.comparison.scores import in_words
from tpsgd.comparison.statistics import Difference
from tpsgd.comparison.trials import SEARCH
from tpsgd.engine.settings import Memory

HEAD = ("rule", "accuracy %", "n", "seconds", "", "memory", "", "kept", "passes")
NONE = "–"


def rows(comparison: Results) -> list[tuple[str, ...]]:
    """A row per arm, as in `head`; an unnamed column is the one before it relative to backprop."""
    return [
        head(comparison, _row(r, comparison), NONE if r.arm.lr is None else f"{r.arm.lr:g}")
        for r in comparison.ranked
    ]


def head(comparison: Results, names: Sequence[str] = HEAD, rate: str = "rate") -> tuple[str, ...]:
    """The names of the columns, with one for the learning rates if they were searched."""
    names = [in_words(name, comparison.numbers) for name in names]
    return (*names[:3], rate, *names[3:]) if comparison.settings.get("lr") == SEARCH else (*names,)


def failures(comparison: Results) -> list[str]:
    """What went wrong: failed arms, and whether the comparison was interrupted."""
    lines = [f"{r.arm.name} failed: {r.error}" for r in comparison.ranked if r.error]
    if comparison.interrupted:
        count = f"{comparison.finished} of {comparison.asked}"
        lines.append(f"interrupted: {count} training runs finished")
    return lines


def remarks(comparison: Results) -> list[str]:
    """What the table does not show: searches, solved heads, iterations, budgets, arms left out."""
    settings, ranked = comparison.settings, comparison.ranked
    trained = [r for r in ranked if r.counts]
    lines = [*settings.get("unsuited", []), *_search(comparison)]
    if settings.get("head") == "ridge":
        arms = [r.arm for r in ranked if r.arm.optimizer is None and r.arm.method is None]
        names = ", ".join(arm.name for arm in arms)
        lines.append(f"last layers are solved in closed form, except of {names}")
    if once := [r.arm.name for r in trained if _in_one_pass(r)]:
        lines.append(f"solved in one pass, without epochs: {', '.join(once)}")
    if settings.get("equal", "passes") != "passes":
        arms = [f"{r.arm.name} {_epochs(r)}" for r in trained if not r.arm.method and _epochs(r)]
        lines.append(f"epochs of the blocks: {', '.join(arms)}")
    for r in trained:
        if count := r.runs[0].settings.get("iterations"):
            lines.append(f"{r.arm.name}: {count} iterations over all samples, not epochs")
    if (free := settings.get("without_budget")) is not None:
        budget = Memory(settings["memory_budget"]).budget_in_words
        lines.append(f"each training run {budget}, except for {free}")
    if left := settings.get("left_out"):
        lines.append(f"not trained: {', '.join(left)}; name them in --rules to train them")
    return lines


def differences(comparison: Results) -> list[tuple[str, ...]]:
    """The head and a row per arm: differences to backprop and to the frozen control, with tests.

    Empty without a test, as after a single restart.
    """
    tests, numbers = comparison.differences(), comparison.numbers
    if not any(d.test for each in tests.values() for d in each.values()):
        return []
    lines = [("rule", *(cell for other in tests for cell in (f"to {other}", "95 %", "p")))]
    for name in (r.arm.name for r in comparison.ranked if r.counts):
        cells = (difference_cells(each.get(name), numbers) for each in tests.values())
        lines.append((name, *(cell for three in cells for cell in three)))
    return lines


def difference_cells(d: Difference | None, numbers: bool) -> tuple[str, str, str]:
    """A difference in words: the mean, its interval, and p after Holm's correction."""
    if d is None or d.mean is None:
        return NONE, NONE, NONE
    if d.low is None or d.high is None or d.p_holm is None:
        return difference_in(d.mean, numbers), NONE, NONE
    interval = f"{difference_in(d.low, numbers)} to {difference_in(d.high, numbers)}"
    p = f"{d.p_holm:.3f}" if d.p_holm >= 0.001 else "< 0.001"
    return difference_in(d.mean, numbers), interval, p


def tested(comparison: Results) -> str:
    """The test behind the differences, in a line; empty without one."""
    every = comparison.differences().values()
    kinds = " or ".join(sorted({d.test for each in every for d in each.values() if d.test}))
    unit = "R²" if comparison.numbers else "points"
    arms = max((sum(d.p is not None for d in each.values()) for each in every), default=0)
    return kinds and f"differences in {unit}; p: {kinds} test, Holm's correction for {arms} arms"


def difference_in(score: float, numbers: bool, sign: str = "+") -> str:
    """A difference of accuracies in points, or of R², with its sign."""
    return f"{score:{sign}.3f}" if numbers else f"{100 * score:{sign}.1f}"


def _search(comparison: Results) -> list[str]:
    """How learning rates were chosen, and whose is the smallest or the largest that was tried."""
    trials = [trial for result in comparison.results for trial in result.trials]
    if not trials:
        return []
    runs = f"{len(trials)} short training runs, {sum(t.seconds for t in trials):.2g} s"
    samples = f"{comparison.settings['held_out']:,} held-out training samples"
    line = f"rates: chosen on {samples} by {runs} that the seconds do not include"
    rates = sorted({trial.values["rate"] for trial in trials})
    ends = [r.arm.name for r in comparison.ranked if r.arm.lr in (rates[0], rates[-1])]
    outside = f"better rates may lie outside of those tried: {', '.join(ends)}"
    return [line, outside] if ends else [line]


def mistakes(result: Result, most: int = 3) -> str:
    """The pairs of classes that an arm confuses most, in one line; empty if there are none."""
    pairs = result.confusion.mistakes(most) if result.confusion else []
    words = [f"{p.true} as {p.predicted} ({p.share:.1%} of {p.true})" for p in pairs]
    return f"most confused by {result.arm.name}: {', '.join(words)}" if words else ""


def _epochs(result: Result) -> str:
    """The epochs of each block that was trained, in the first restart: 10+10, or 20 for all."""
    counts = Counter(epoch.block for epoch in result.runs[0].history)
    sequential = result.runs[0].settings.get("order") == "sequential"
    each = [str(counts[block]) for block in sorted(counts)]
    return "+".join(each if sequential else each[:1])


def _in_one_pass(result: Result) -> bool:
    return {block.learning for block in result.runs[0].blocks} - {"frozen"} == {"solved"}


def title(comparison: Results) -> str:
    """Data and model, in a few words."""
    return ", ".join(filter(None, (comparison.data["name"], comparison.settings.get("model"))))


def effort(comparison: Results) -> str:
    """What was equal for all arms, and restarts, in a few words."""
    settings = comparison.settings
    amounts = {"passes": f"epochs per block: {settings['epochs']}"}
    if "reads" in settings:
        amounts["reads"] = f"equal reads of the data: {settings['reads']} each"
    if "seconds" in settings:
        amounts["seconds"] = f"equal time: {settings['seconds']:.3g} s each"
    equal = amounts.get(settings.get("equal", "passes"), "interrupted")
    return f"{equal}, restarts: {settings['restarts']}"


def legend(comparison: Results) -> str:
    """The table's columns, in two lines."""
    base = comparison.reference
    over = "backprop through time" if base and base.arm.remark == THROUGH_TIME else "backprop"
    columns = "memory: the peak and kept inputs; kept: these inputs; passes: sample passes"
    return f"× is relative to {over}\n{columns}"


def accuracy(result: Result, samples: int, numbers: bool = False) -> str:
    """Mean ± standard deviation in per cent, with as many digits as the test samples allow; R²."""
    digits = 3 if numbers else 2 if samples >= 5000 else 1
    mean, std = (f"{(1 if numbers else 100) * v:.{digits}f}" for v in result.accuracy)
    return f"{mean} ± {std}" if len(result.runs) > 1 else mean


def _row(result: Result, comparison: Results) -> tuple[str, ...]:
    if not result.counts:
        count, shown = str(len(result.runs)), "failed" if result.error else NONE
        return (result.arm.name, shown, count, *[NONE] * (len(HEAD) - 3))
    run, base, seconds = result.largest, comparison.reference, result.seconds
    base_bytes = base.largest.total_bytes if base else 0
    return (
        result.arm.name,
        accuracy(result, comparison.data["test"], comparison.numbers),
        str(len(result.runs)),
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
