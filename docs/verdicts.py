"""A verdict on every claim of claims.toml, from results/*.json: the block of docs/verdicts.md.

docs/fill_numbers.py writes the block. A claim is a list of comparisons, `[left, sign, right]`. Each
side is a path, as in fill_numbers.py, or a number. Accuracies are compared in points.

- `>` and `<`: left is higher, or lower; where both sides have a spread, Welch's test must agree.
- `= m`: left is the figure of right: no further than m from it, or not significantly so. It
  exceeds the figure where it is significantly higher, by more than m.
- `>~ m`: left is at most m below right. It exceeds the claim where it is significantly higher.
- `~ m`: the two are no further than m from each other.

A claim holds where all comparisons that were run hold, or as many as `need` says. It is exceeded
where all of them exceed it, and not run where none has its numbers.
"""

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from fill_numbers import look_up, unbroken, written
from scipy.stats import ttest_ind_from_stats

from tpsgd.common.units import size

CLAIMS = Path(__file__).with_name("claims.toml")
LEVEL = 0.05  # of significance
PAPER_RESTARTS = 25
SHARES = ("zeros", "accuracy")  # keys of a number from 0 to 1
UNITS = {"seconds": "s", "seconds_each": "s"}
EXCEEDS, HOLDS, FAILS = "exceeds", "holds", "fails"
WORDS = {  # of a claim of the paper, and of one of ours
    EXCEEDS: ("exceeded", "holds"),
    HOLDS: ("reproduced", "holds"),
    FAILS: ("not reproduced", "does not hold"),
    None: ("not run", "not run"),
}


@dataclass(frozen=True)
class Value:
    """Restarts as their mean and standard deviation; a single number has no spread."""

    mean: float
    std: float = 0.0
    n: int = 1
    unit: str = ""

    def __str__(self) -> str:
        if self.unit == "bytes":
            return size(round(self.mean))
        digits = 2 if self.unit in ("%", "") and abs(self.mean) > 0.1 else 3
        text = f"{self.mean:.{digits}f}" if abs(self.mean) >= 1e-3 else f"{self.mean:.1e}"
        text += f" ± {self.std:.{digits}f}" if self.n > 1 else ""
        return unbroken(f"{text} {self.unit}".strip())


def read(side: str) -> Value | None:
    """The value of a path or a number; None where the files do not have it."""
    try:
        return Value(float(side))
    except ValueError:
        pass
    try:
        value, key = look_up(side), side.rpartition("/")[2]
    except (LookupError, OSError, ValueError, TypeError):
        return None
    if isinstance(value, str):
        return printed(value)
    if isinstance(value, dict):
        value, key = value["accuracies"], "accuracy"
    many = value if isinstance(value, list) else [value]
    is_share = key in SHARES or "held_out" in side or "accuracies" in key
    unit = "%" if is_share else "bytes" if key.endswith("bytes") else UNITS.get(key, "")
    many = [100 * v for v in many] if is_share else many
    return Value(fmean(many), stdev(many) if len(many) > 1 else 0.0, len(many), unit)


def printed(text: str) -> Value:
    """A figure of the paper, in per cent: `88.3 ± 0.25`, `78 (1.4)` or `9.58`.

    Examples:
        >>> printed("78 (1.4)")
        Value(mean=78.0, std=1.4, n=25, unit='%')
    """
    mean, *std = map(float, re.findall(r"\d+(?:\.\d+)?", text))
    return Value(mean, std[0], PAPER_RESTARTS, "%") if std else Value(mean, unit="%")


def welch(a: Value, b: Value) -> float | None:
    """The probability of a difference this large by chance; None where a side has no spread."""
    if a.n < 2 or b.n < 2:
        return None
    if a.std == b.std == 0:
        return float(a.mean == b.mean)
    return float(ttest_ind_from_stats(a.mean, a.std, a.n, b.mean, b.std, b.n, False)[1])


def outcome(left: Value, sign: str, right: Value) -> str:
    """Whether a comparison exceeds the claim, holds or fails."""
    word, _, number = sign.partition(" ")
    margin, gap, p = float(number or 0), left.mean - right.mean, welch(left, right)
    clear = gap != 0 and (p is None or p < LEVEL)
    if word in "><":
        return HOLDS if clear and (gap > 0) == (word == ">") else FAILS
    if word == "~":
        return HOLDS if abs(gap) <= margin else FAILS
    if word == ">~":
        if p is not None and clear and gap > 0:
            return EXCEEDS
        return HOLDS if gap >= -margin else FAILS
    if word != "=":
        raise ValueError(f"{sign!r} is no sign of a comparison")
    if abs(gap) <= margin or not clear:
        return HOLDS
    return EXCEEDS if gap > 0 else FAILS


def judge(outcomes: Sequence[str | None], need: int | None = None) -> str | None:
    """The outcome of a claim from those of its comparisons."""
    ran = [each for each in outcomes if each is not None]
    if not ran:
        return None
    holding = [each for each in ran if each != FAILS]
    if len(holding) < (len(ran) if need is None else need):
        return FAILS
    return EXCEEDS if all(each == EXCEEDS for each in ran) else HOLDS


def verdict(claim: dict[str, Any]) -> str:
    """The verdict on a claim, in words."""
    outcomes = []
    for left, sign, right, *_ in claim["compare"]:
        a, b = read(left), read(right)
        outcomes.append(None if a is None or b is None else outcome(a, sign, b))
    word = WORDS[judge(outcomes, claim.get("need"))]["ours" in claim]
    ran = len(outcomes) - outcomes.count(None)
    return f"{word}, on {ran} of {len(outcomes)} rows" if 0 < ran < len(outcomes) else word


# ---- the page ------------------------------------------------------------------------------------


def claims() -> list[dict[str, Any]]:
    """All claims, in order."""
    return tomllib.loads(CLAIMS.read_text(encoding="utf-8"))["claim"]


def block() -> str:
    """All verdicts in a table, then each claim with its numbers."""
    listed = claims()
    lines = ["| claim | where | verdict |", "|---|---|---|"]
    for claim in listed:
        where = "ours" if "ours" in claim else claim["source"]
        title = f"[{claim['title']}](#{anchor(claim['title'])})"
        lines.append(f"| {title} | {where} | **{verdict(claim)}** |")
    return "\n\n".join(["\n".join(lines), *map(section, listed)])


def anchor(title: str) -> str:
    """The address of a heading, as mkdocs writes it."""
    return re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", title.lower())).strip("-")


def section(claim: dict[str, Any]) -> str:
    """A claim: the sentence, the numbers, the explanation and the control."""
    who = "Ours" if "ours" in claim else f"The paper, {claim['source']}"
    parts = [f"### {claim['title']}", f"{who}: {claim.get('paper') or claim['ours']}"]
    need = f" {claim['need']} have to hold." if "need" in claim else ""
    result = verdict(claim)
    parts += [f"**Verdict: {result}.**{need}", comparisons(claim["compare"])]
    if result == WORDS[None][0]:
        return "\n\n".join([*parts, claim.get("absent", "")]).rstrip()
    for key, word in (("why", "Explanation"), ("control", "Control")):
        try:
            parts.append(f"{word}: {written(claim[key])}")
        except (LookupError, OSError):
            parts.append(f"{word}: not run.")
    return "\n\n".join(parts)


def comparisons(rows: Sequence[Sequence[str]]) -> str:
    """The comparisons of a claim as a table."""
    lines = ["| this | | that | p | |", "|---|---|---|---:|---|"]
    for left, sign, right, *label in rows:
        a, b = read(left), read(right)
        both = None if a is None or b is None else (a, b)
        p = welch(*both) if both else None
        chance = "–" if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}"
        result = outcome(both[0], sign, both[1]) if both else "not run"
        named = f"{label[0]} – {a}" if label else cell(left, a)
        cells = [named, spoken(sign), cell(right, b), chance, result]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def cell(side: str, value: Value | None) -> str:
    """A path in words and its value."""
    if re.fullmatch(r"[\d.e-]+", side):
        return side
    file, _, rest = side.partition("/")
    words = re.sub(r"\b(rows|table|tables|arms)/", "", rest).replace("/", ", ")
    words = words.removesuffix(", accuracy").removesuffix("_each")
    name = f"the paper's {words.partition(', ')[2]}" if file == "paper" else f"`{file}`: {words}"
    return f"{name} – not run" if value is None else f"{name} – {value}"


def spoken(sign: str) -> str:
    """The sign of a comparison in words."""
    word, _, margin = sign.partition(" ")
    names = {">": "higher than", "<": "lower than", "=": "the same as", "~": "close to"}
    text = names.get(word, "not far below")
    return (
        f"{text} (± {margin})"
        if margin and word != ">~"
        else text + f" ({margin})" * (word == ">~")
    )
