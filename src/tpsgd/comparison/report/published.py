"""A comparison as a table to publish: CSV, LaTeX, or a frame of pandas.

Each arm has the number of its restarts beside their mean, and its differences to backprop and to
the frozen control with an interval and a test.
"""

import csv
import io
from typing import Any

from tpsgd.comparison.report.table import accuracy, difference_in
from tpsgd.comparison.results import REFERENCES, Results
from tpsgd.comparison.statistics import Difference

TABLE = r"""% {command}
\begin{{tabular}}{{lrlllrr}}
\toprule
rule & $n$ & {score} & to {first} & to {second} & memory & time \\
\midrule
{rows}
\bottomrule
\end{{tabular}}
% Differences: mean{tests}.
"""
NAMES = {"\\": "backslash", "~": "asciitilde", "^": "asciicircum", "<": "less", ">": "greater"}
SPECIAL = {c: f"\\{c}" for c in "&%$#_{}"} | {c: rf"\text{n}{{}}" for c, n in NAMES.items()}


def records(comparison: Results) -> list[dict[str, Any]]:
    """A row of plain values for each arm, in the order of the table."""
    tests, base, table = comparison.differences(), comparison.reference, []
    for result in comparison.ranked:
        name, counts = result.arm.name, result.counts
        mean, deviation = result.accuracy if counts else (None, None)
        deviation = deviation if len(result.runs) > 1 else None
        row: dict[str, Any] = {"rule": name, "n": len(result.runs), "mean": mean, "std": deviation}
        for other in REFERENCES:
            difference = tests.get(other, {}).get(name) or Difference(None)
            values = {k: v for k, v in vars(difference).items() if k != "test"}
            row |= {f"{key}_to_{other}": value for key, value in values.items()}
            row[f"test_to_{other}"] = difference.test
        costs: list[float | None] = [None] * 4
        if counts:
            costs[:2] = seconds, size = result.seconds, result.largest.total_bytes
            if base is not None:
                costs[2:] = seconds / base.seconds, size / base.largest.total_bytes
        row |= zip(("seconds", "bytes", "time_ratio", "memory_ratio"), costs, strict=True)
        table.append(row | {"lr": result.arm.lr, "error": result.error})
    return table


def as_csv(comparison: Results) -> str:
    """Lines of values with commas between, the names first."""
    table, text = records(comparison), io.StringIO()
    writer = csv.DictWriter(text, [*table[0]], lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    return text.getvalue()


def as_latex(comparison: Results) -> str:
    """A `tabular` with the rules of the package booktabs."""
    samples, numbers, lines = comparison.data["test"], comparison.numbers, []
    for row, result in zip(records(comparison), comparison.ranked, strict=True):
        if not result.counts:
            why = escaped(f"failed: {row['error']}") if row["error"] else "--"
            span = rf"\multicolumn{{5}}{{l}}{{{why}}}"
            lines.append(rf"{escaped(row['rule'])} & {row['n']} & {span} \\")
            continue
        score = f"${accuracy(result, samples, numbers)}$".replace("±", r"\pm")
        differences = (_difference(row, other, numbers) for other in REFERENCES)
        ratios = [row[key] for key in ("memory_ratio", "time_ratio")]
        ratios = ["--" if ratio is None else f"{ratio:.2f}" for ratio in ratios]
        cells = [escaped(row["rule"]), str(row["n"]), score, *differences, *ratios]
        lines.append(" & ".join(cells) + r" \\")
    kinds = {d.test for each in comparison.differences().values() for d in each.values()}
    tests = " or ".join(sorted(filter(None, kinds)))
    return TABLE.format(
        command=" ".join(comparison.command.split()),
        score="$R^2$" if numbers else r"accuracy (\%)",
        first=REFERENCES[0],
        second=REFERENCES[1],
        rows="\n".join(lines),
        tests=tests and rf" [95 \% interval]; * p < 0.05, ** p < 0.01, {tests}, Holm's correction",
    )


def escaped(text: str) -> str:
    """A text without the characters that LaTeX takes as commands.

    Examples:
        >>> escaped("50 % of a_b")
        '50 \\\\% of a\\\\_b'
    """
    return "".join(SPECIAL.get(c, c) for c in text)


def _difference(row: dict[str, Any], other: str, numbers: bool) -> str:
    mean, low, high, p = (row[f"{key}_to_{other}"] for key in ("mean", "low", "high", "p_holm"))
    if mean is None:
        return "--"
    text = f"${difference_in(mean, numbers)}$"
    if low is None:
        return text
    stars = "" if p is None or p >= 0.05 else "**" if p < 0.01 else "*"
    interval = ", ".join(difference_in(end, numbers, "") for end in (low, high))
    return f"{text}{stars} $[{interval}]$"
