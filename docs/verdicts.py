"""A verdict on every claim of claims.toml, from results/*.json: the block of docs/verdicts.md.

docs/fill_numbers.py writes the block. A claim is a list of comparisons, `[left, sign, right]`. Each
side is a path, as in fill_numbers.py, or a number. Accuracies are compared in points.

- `>` and `<`: left is higher, or lower; where both sides have a spread, Welch's test must agree.
- `~ m`: the two are no further than m from each other.
- `= m`: the same, of a figure that is to be reproduced. It is exceeded by more than m above it.
- `>~ m`: left is at most m below right. It exceeds the claim where it is significantly higher.

Where both sides have a spread, a margin is met if the 90 % interval of the difference is within it
(two one-sided tests), and missed if the interval is outside; between the two it is undecided.
Without a spread the difference decides. Rows whose samples were prepared in different ways are not
comparable, and hold nothing.

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
from tpsgd.comparison.student import quantile

CLAIMS = Path(__file__).with_name("claims.toml")
LEVEL = 0.05  # of significance
PAPER_RESTARTS = 25
SHARES = ("zeros", "accuracy")  # keys of a number from 0 to 1
UNITS = {"seconds": "s", "seconds_each": "s"}
EXCEEDS, HOLDS, FAILS = "exceeds", "holds", "fails"
UNDECIDED, APART = "undecided", "not comparable"
PREPARED = ("data", "note", "augment", "train", "size")  # keys about the samples of a row
WORDS = {  # of a claim of the paper, and of one of ours
    EXCEEDS: ("exceeded", "holds"),
    HOLDS: ("reproduced", "holds"),
    FAILS: ("not reproduced", "does not hold"),
    UNDECIDED: ("undecided", "undecided"),
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
        text = f"{text} {self.unit}".strip()
        return unbroken(f"{text} (n = {self.n})" if self.n > 1 else text)


def read(side: str) -> Value | None:
    """The value of a path or a number; None where the files do not have it."""
    try:
        return Value(float(side))
    except ValueError:
        pass
    try:
        value, key = measured(side), side.rpartition("/")[2]
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


def measured(side: str) -> Any:
    """What the files have at a path; `total_bytes` is the peak with the inputs that were kept."""
    row, _, key = side.rpartition("/")
    if key != "total_bytes" or key in (found := look_up(row)):
        return look_up(side)
    kept = found.get("kept_bytes")
    if kept is None and found["settings"]["order"] != "simultaneous" and "backprop" not in row:
        raise KeyError("the file does not say which inputs were kept")
    return found["peak_bytes"] + (kept or 0)


def prepared(side: str) -> dict[str, Any]:
    """What the file says on the way to a number about its samples; the paper says nothing."""
    known: dict[str, Any] = {}
    words = side.split("/")
    for end in range(1, len(words) + 1) if words[0] != "paper" and len(words) > 1 else ():
        try:
            level = look_up("/".join(words[:end]))
        except (LookupError, OSError, ValueError, TypeError):
            continue
        for values in (level, level.get("settings")) if isinstance(level, dict) else ():
            if isinstance(values, dict):
                known |= {key: values[key] for key in PREPARED if key in values}
    return known


def same_preparation(left: str, right: str) -> bool:
    """Whether the samples of two numbers were prepared alike, as far as the files say.

    The paper says little, and a plain number has no samples. Numbers of different tables must say
    how their samples were prepared.
    """
    tables = [side.split("/")[:2] for side in (left, right)]
    if any(len(table) < 2 or table[0] == "paper" for table in tables):
        return True
    a, b = prepared(left), prepared(right)
    if not (a and b):
        return tables[0] == tables[1]
    return all(a.get(key) == b.get(key) for key in PREPARED)


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
    if word not in ("~", "=", ">~"):
        raise ValueError(f"{sign!r} is no sign of a comparison")
    half = half_interval(left, right)
    low, high = gap - half, gap + half
    if word == ">~" and p is not None and clear and gap > 0:
        return EXCEEDS
    if low >= -margin and (word == ">~" or high <= margin):
        return HOLDS
    if high < -margin:
        return FAILS
    if low > margin and word != ">~":
        return EXCEEDS if word == "=" else FAILS
    return UNDECIDED


def half_interval(a: Value, b: Value) -> float:
    """Half of the 90 % interval of a difference, as in Welch's test; 0 where a side has no spread.

    Both one-sided tests at a level of 5 % agree with it.
    """
    if a.n < 2 or b.n < 2 or a.std == b.std == 0:
        return 0.0
    u, v = a.std**2 / a.n, b.std**2 / b.n
    freedom = (u + v) ** 2 / (u**2 / (a.n - 1) + v**2 / (b.n - 1))
    return quantile(1 - 2 * LEVEL, freedom) * (u + v) ** 0.5


def judge(outcomes: Sequence[str | None], need: int | None = None) -> str | None:
    """The outcome of a claim from those of its comparisons."""
    ran = [each for each in outcomes if each is not None]
    if not ran:
        return None
    need = len(ran) if need is None else need
    holding = sum(each in (EXCEEDS, HOLDS) for each in ran)
    if holding < need:
        return UNDECIDED if holding + ran.count(UNDECIDED) >= need else FAILS
    return EXCEEDS if all(each == EXCEEDS for each in ran) else HOLDS


def compared(left: str, sign: str, right: str) -> str | None:
    """The outcome of a comparison of two paths; None where one of them was not run."""
    a, b = read(left), read(right)
    if a is None or b is None:
        return None
    return outcome(a, sign, b) if same_preparation(left, right) else APART


def verdict(claim: dict[str, Any]) -> str:
    """The verdict on a claim, in words."""
    outcomes = [compared(left, sign, right) for left, sign, right, *_ in claim["compare"]]
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
    equal = f" Equal for both sides: {claim['equal']}." if "equal" in claim else ""
    parts += [f"**Verdict: {result}.**{need}{equal}", comparisons(claim["compare"])]
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
        result = compared(left, sign, right) or "not run"
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
