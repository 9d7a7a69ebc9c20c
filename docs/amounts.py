"""Claims under equal passes, reads, seconds and searched rates: the block of docs/equal.md.

docs/fill_numbers.py writes the block from results/equal.json and the `[[equal]]` tables of
claims.toml: rows `[net, arm, sign, other arm]`. Differences are paired by the seeds; the p values
of all rows that were compared in the same way are corrected together, by Holm's procedure.

- `>`: holds if the difference is above 0 and p is below 0.05, fails if it is below 0 with such a p.
- `>~ m`: holds if the 95 % interval is above -m points, fails if it is below.

Otherwise the row is undecided.
"""

import json
import tomllib
from pathlib import Path
from typing import Any

from tpsgd.comparison.statistics import Difference, difference, holm

ROOT = Path(__file__).resolve().parents[1]
LEVEL = 0.05
WAYS = {  # of experiments/equal.py, as they stand in the table
    "passes": "passes",
    "reads": "reads",
    "seconds": "seconds",
    "searched rates": "passes, rates searched",
    "reads, searched rates": "reads, rates searched",
}
NETS = {
    "digits-mlp": "digits, MLP",
    "digits-cnn": "digits, CNN",
    "digits-deep": "digits, 8-layer CNN",
    "mnist-mlp": "MNIST, MLP",
    "cifar10-cnn": "CIFAR-10, CNN",
}
Row = tuple[str, str, str, str]  # net, arm, sign, other arm


def rows_of(record: dict[str, Any], way: str, rows: list[Row]) -> list[Difference | None]:
    """The differences of the rows in one way, corrected together; None where one was not run."""
    differences: list[Difference | None] = []
    for net, arm, _, other in rows:
        arms = record["rows"].get(f"{net}, {way}", {}).get("arms", {})
        pair = [list(zip(arms[a]["seeds"], arms[a]["accuracies"], strict=True))
                for a in (arm, other) if arms.get(a, {}).get("accuracies")]  # fmt: skip
        differences.append(difference(*pair) if len(pair) == 2 else None)
    tested = [i for i, d in enumerate(differences) if d is not None and d.p is not None]
    ps = holm([d.p for i in tested if (d := differences[i]) is not None and d.p is not None])
    for i, p in zip(tested, ps, strict=True):
        differences[i] = Difference(**{**vars(differences[i]), "p_holm": p})
    return differences


def outcome(d: Difference | None, sign: str) -> str:
    """Whether a row holds."""
    if d is None or d.mean is None:
        return "not run"
    word, _, margin = sign.partition(" ")
    if d.low is None or d.high is None or d.p_holm is None:
        return "undecided"
    if word == ">":
        return "undecided" if d.p_holm >= LEVEL else "holds" if d.mean > 0 else "fails"
    if word != ">~":
        raise ValueError(f"{sign!r} is no sign of a comparison")
    points = float(margin) / 100
    return "holds" if d.low >= -points else "fails" if d.high < -points else "undecided"


def block() -> str:
    """Every claim with its rows, and what became of each in every way."""
    record = json.loads((ROOT / "results" / "equal.json").read_text(encoding="utf-8"))
    text = (ROOT / "docs" / "claims.toml").read_text(encoding="utf-8")
    claims = tomllib.loads(text)["equal"]
    rows: list[Row] = [tuple(row) for claim in claims for row in claim["rows"]]
    columns = {way: rows_of(record, way, rows) for way in WAYS}
    lines, i = [], 0
    for claim in claims:
        lines += ["", f"**{claim['title']}.** Uses: {claim['uses']}.", ""]
        lines += [f"| net | row | {' | '.join(WAYS.values())} |", f"|---|---|{'---:|' * len(WAYS)}"]
        for net, arm, sign, other in claim["rows"]:
            cells = [cell(column[i], sign) for column in columns.values()]
            words = "ahead of" if sign == ">" else f"at most {sign.split()[1]} behind"
            lines.append(f"| {NETS[net]} | `{arm}` {words} `{other}` | {' | '.join(cells)} |")
            i += 1
    arms = [arm for row in record["rows"].values() for arm in row["arms"].values()]
    restarts = sorted({len(arm["seeds"]) for arm in arms})
    machine, used = record["machine"]["cpu"], record["versions"]
    note = (
        f"Points, means of {' or '.join(map(str, restarts))} restarts; {machine}, 1 thread; Python "
        f"{used['python']}, torch {used['torch']}. Made by `{record['command']}`."
    )
    return "\n".join([*lines[1:], "", note])


def cell(d: Difference | None, sign: str) -> str:
    """The difference in points and its outcome."""
    result = outcome(d, sign)
    if d is None or d.mean is None:
        return result
    gap = f"{100 * d.mean:+.1f}".replace("-", "−")
    return f"{gap} **holds**" if result == "holds" else f"{gap} {result}"
