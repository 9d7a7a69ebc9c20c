"""Differences between arms over restarts: the mean, its 95 % interval, and a test.

Restarts with the same seed begin with the same weights, so they are paired where two arms have the
same seeds; where they do not, the test is Welch's. Holm's procedure corrects the p values of all
arms that are compared with the same one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from statistics import fmean, stdev, variance

from tpsgd.comparison.student import quantile, two_sided

PAIRED, WELCH = "paired t", "Welch"
LEVEL = 0.95  # of an interval
ROUNDING = 1e-12  # times the largest score: a standard error below it is no spread
Scores = Sequence[tuple[int, float]]  # the seed and the score of each restart


@dataclass(frozen=True)
class Difference:
    """The mean score of an arm minus that of another; `p` is None where there is no test."""

    mean: float | None
    low: float | None = None
    high: float | None = None
    p: float | None = None
    p_holm: float | None = None
    test: str = ""


def difference(arm: Scores, other: Scores) -> Difference:
    """The difference of two arms, with a test if both have two restarts or more, and a spread.

    Examples:
        >>> d = difference([(0, 0.92), (1, 0.95), (2, 0.95)], [(2, 0.91), (1, 0.92), (0, 0.9)])
        >>> f"{d.test}: {d.mean:.3f}, {d.low:.3f} to {d.high:.3f}, p = {d.p:.3f}"
        'paired t: 0.030, 0.005 to 0.055, p = 0.035'
    """
    a, b = ([score for _, score in sorted(scores)] for scores in (arm, other))
    seeds, others = ([seed for seed, _ in sorted(scores)] for scores in (arm, other))
    mean, n = fmean(a) - fmean(b), len(a)
    if min(n, len(b)) < 2:
        return Difference(mean)
    u, v = variance(a) / n, variance(b) / len(b)
    paired = seeds == others and len(set(seeds)) == n
    error = sqrt(u + v)
    if paired:
        error = stdev(x - y for x, y in zip(a, b, strict=True)) / sqrt(n)
    if not error > ROUNDING * max(1.0, *map(abs, a + b)):
        return Difference(mean)
    freedom = n - 1 if paired else (u + v) ** 2 / (u**2 / (n - 1) + v**2 / (len(b) - 1))
    p, half = two_sided(mean / error, freedom), quantile(LEVEL, freedom) * error
    return Difference(mean, mean - half, mean + half, p, p, PAIRED if paired else WELCH)


def differences(scores: Mapping[str, Scores], other: str) -> dict[str, Difference]:
    """The differences of all arms to one of them, by name; the p values are corrected together."""
    every = {name: difference(s, scores[other]) for name, s in scores.items() if name != other}
    ps = {name: d.p for name, d in every.items() if d.p is not None}
    for (name, _), p in zip(ps.items(), holm([*ps.values()]), strict=True):
        every[name] = replace(every[name], p_holm=p)
    return every


def holm(ps: Sequence[float]) -> list[float]:
    """Holm's correction: the smallest p times their number, the next times one less, and so on.

    Examples:
        >>> holm([0.04, 0.01, 0.03])
        [0.06, 0.03, 0.06]
    """
    corrected, least = dict.fromkeys(range(len(ps)), 0.0), 0.0
    for rank, i in enumerate(sorted(corrected, key=ps.__getitem__)):
        corrected[i] = least = max(least, min(1.0, (len(ps) - rank) * ps[i]))
    return [*corrected.values()]
