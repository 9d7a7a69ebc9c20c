"""Fill in the numbers of README.md and docs/*.md from results/*.json, and redraw the figures.

    python docs/fill_numbers.py             # write what changed
    python docs/fill_numbers.py --check     # write nothing; exit 1 where something is out of date

In a sentence, `<!-- numbers: FORMAT PATH -->93.38<!-- end -->` is a value: `FORMATS` has the
formats, and a path is the name of a file and the keys inside it, `shallow/mnist-mlp/tpsgd-l2`.
The keys `tables`, `nets` and `arms` may be left out. In a list of numbers, a key is a place, from 0
on. In a list of rows, a key is a column, and any other word (or `key=word`) keeps the rows that
have it: `adaptors/few/pool5/shots=10/readout`. Several paths are joined by " and ".

Where the mark ends its line, `<!-- numbers: NAME/WORDS -->` is a table of tables.toml, in which
the words replace $1, $2 and so on. `rows` are names, a path to them, or labels and names; names
that are in `first` come first, in its order. `columns` are titles and cells, or `across` has the
names of the columns and `cell` the cell of each. In a cell, @ is the row and # the column; what is
in braces is a value, as above, and {?...} one that may be missing. `from` are the files whose
machine and command stand below the table.
"""

import argparse
import json
import re
import sys
import tomllib
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from scipy.stats import spearmanr

from tpsgd.common.units import size
from tpsgd.engine.record import Run

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results"
MARK = re.compile(r"<!-- numbers: (?P<name>.+?) -->(?P<old>.*?)<!-- end -->", re.DOTALL)
RENAMED = {"tpsgd.experiments": "experiments", "--memory-budget": "--memory"}  # since measured
NUMBER = re.compile(r"[\d*×–−+±]")  # the start of a cell with a number


# ---- values --------------------------------------------------------------------------------------


@cache
def load(file: Path) -> Any:
    """The content of a JSON file."""
    return json.loads(file.read_text(encoding="utf-8"))


def look_up(path: str) -> Any:
    """What the files have at a path."""
    name, *words = path.split("/")
    value = load(RESULTS / f"{name}.json")
    for word in words:
        value = step(value, word)
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def step(value: Any, word: str) -> Any:
    """One step along a path."""
    if value is None:
        raise KeyError(word)
    if isinstance(value, dict):
        if word == "seconds" and (value.get("busy") or not value.get("alone", True)):
            raise KeyError("the machine did other work in these seconds")
        outer = next((key for key in ("tables", "nets", "arms") if key in value), word)
        return value[word] if word in value or outer == word else step(value[outer], word)
    if not isinstance(value[0], dict):
        return value[int(word)]
    if word in value[0]:
        column = [row[word] for row in value]
        return column[0] if len(column) == 1 else column
    key, equals, text = word.rpartition("=")
    rows = [r for r in value if text in map(str, [r.get(key)] if equals else r.values())]
    if not rows:
        raise KeyError(word)
    return rows


def mean(values: Any) -> float:
    """The mean of numbers, or of a row's accuracies."""
    values = values["accuracies"] if isinstance(values, dict) else values
    return fmean(values) if isinstance(values, list) else values


def percent(values: Any, digits: int = 2) -> str:
    """Mean ± standard deviation in per cent."""
    values = values["accuracies"] if isinstance(values, dict) else values
    text = f"{100 * mean(values):.{digits}f}"
    several = isinstance(values, list) and len(values) > 1
    return f"{text} ± {100 * stdev(values):.{digits}f}" if several else text


def relative(write: Callable[[Any], str]) -> Callable[..., str]:
    """A format that adds how large the value is relative to a second one."""
    return lambda value, base=None: write(value) + (f" (×{value / base:.2f})" if base else "")


def gap(ours: Any, theirs: Any) -> str:
    """`0.8 points behind`."""
    points = round(100 * (mean(ours) - mean(theirs)), 1)
    return f"{abs(points):.1f} points {'ahead of' if points > 0 else 'behind'}"


def signed(ours: Any, theirs: Any) -> str:
    """A difference in points, `−0.8`."""
    return f"{100 * (mean(ours) - mean(theirs)):+.1f}".replace("-", "−")


def rank(xs: list[Any], ys: list[Any]) -> str:
    """Spearman's rank correlation, where both are known."""
    pairs = [(x, y) for x, y in zip(xs, ys, strict=True) if None not in (x, y)]
    return f"{spearmanr(pairs)[0]:+.2f}"


def notes(rows: dict[str, Any]) -> str:
    """Sentences with what the file notes about some of its rows."""
    named: dict[str, list[str]] = {}
    for name, row in rows.items():
        if "note" in row:
            named.setdefault(row["note"], []).append(f"`{name}`")
    return "".join(f" {n[0].upper()}{n[1:]}: {'; '.join(who)}." for n, who in named.items())


FORMATS: dict[str, Callable[..., str]] = {
    "percent": percent,
    "count": lambda listed: str(len(listed)),
    "largest": lambda values: size(max(values if isinstance(values, list) else [values])),
    "percent1": lambda values: percent(values, 1),
    "points": lambda values: f"{100 * mean(values):.1f}",
    "gap": gap,
    "signed": signed,
    "seconds": relative(lambda v: f"{v:.3f}" if v < 1 else f"{v:#.3g}".rstrip(".")),
    "time": relative(lambda v: f"{1000 * v:.0f} ms" if v < 1 else f"{v:#.3g} s"),
    "size": relative(size),
    "total": lambda *values: size(sum(values)),
    "rate": lambda lr: "–" if lr is None else f"{lr:g}",
    "ratio": lambda value, base=1.0: f"{value / base:.2f}",
    "spread": lambda values: f"{min(values):.3f} to {max(values):.3f}",
    "rank": rank,
    "notes": notes,
    "highest": lambda rows: f"{100 * max(row['accuracy'] for row in rows.values()):.1f}",
    "best": lambda trials: percent(max(score for _, score in trials), 1),
    "due": lambda due: "due" if due else "not due",
    "text": str,
    "bracketed": lambda text: f" ({text})",
    "command": lambda text: f"`{re.sub('|'.join(RENAMED), lambda old: RENAMED[old[0]], text)}`",
}


def evaluate(expression: str) -> str:
    """A format and its paths, as text; a format that is not in the list is one of Python's."""
    word, _, paths = expression.partition(" ")
    write = FORMATS.get(word) or (lambda value: format(value, word))
    return write(*map(look_up, paths.split(" and ")))


# ---- tables --------------------------------------------------------------------------------------


def written(template: str) -> str:
    """A template with its values."""

    def put(match: re.Match[str]) -> str:
        try:
            return evaluate(match[2])
        except LookupError:
            if match[1]:
                return ""
            raise

    return re.sub(r"\{(\??)(.+?)\}", put, template)


def names(listed: Any, first: Sequence[str] = ()) -> dict[str, str]:
    """Labels and names of rows or columns, those in `first` before all others."""
    if isinstance(listed, dict):
        return listed
    listed = look_up(listed) if isinstance(listed, str) else listed
    place = {name: i for i, name in enumerate(first)}
    listed = sorted(listed, key=lambda name: place.get(name, len(place)))
    return {f"`{name}`": str(name) for name in listed}


def table(mark: str) -> str:
    """A table of tables.toml as Markdown, with its note and its origin."""
    name, *words = mark.split("/")
    tables = tomllib.loads((ROOT / "docs" / "tables.toml").read_text(encoding="utf-8"))
    text = json.dumps(tables[name])
    for i, word in enumerate(words, 1):
        text = text.replace(f"${i}", word)
    spec = json.loads(text)
    columns = spec.get("columns", {})
    columns |= {k: spec["cell"].replace("#", v) for k, v in names(spec.get("across", {})).items()}
    rows = []
    for label, row in names(spec["rows"], spec.get("first", ())).items():
        cells = []
        for template in columns.values():
            try:
                cells.append(unbroken(written(template.replace("@", row))))
            except LookupError:
                cells.append("–")
        if set(cells) != {"–"}:
            rows.append([*label.split(" | "), *cells])
    head = [*spec.get("head", "").split(" | "), *columns]
    keep = [i for i in range(len(head)) if any(row[i] != "–" for row in rows)]
    rows = [[row[i] for i in keep] for row in rows]
    sides = ["---:" if all(map(NUMBER.match, c)) else "---" for c in zip(*rows, strict=True)]
    lines = [[head[i] for i in keep], sides, *rows]
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{text}\n\n{written(spec['note'])} {origin(spec['from'])}"


def unbroken(text: str) -> str:
    """A number with its unit or its deviation on one line."""
    return re.sub(r" (?=±|[KMG]?B\b|ms\b)|(?<=±) ", "\N{NO-BREAK SPACE}", text)


def origin(paths: list[str]) -> str:
    """Machine, versions and commands of records."""
    commands: dict[str, list[str]] = {}
    for path in paths:
        machine, versions = look_up(f"{path}/machine"), look_up(f"{path}/versions")
        cpu, threads = re.sub(r"\((R|TM)\)", "", machine["cpu"]), machine["threads"]
        where = machine["gpu"] or f"{cpu}, {threads} thread{'s' * (threads > 1)}"
        where += f"; Python {versions['python']}, torch {versions['torch']}"
        commands.setdefault(where, []).append(evaluate(f"command {path}/command"))
    made = {where: " and ".join(dict.fromkeys(each)) for where, each in commands.items()}
    return " ".join(f"{where}. Made by {each}." for where, each in made.items())


def run(mark: str) -> str:
    """What the README's first program prints: docs/readme_example.py has run it."""
    return f"```text\n{Run.of(look_up('readme/run'))}\n{look_up('readme/last_line')}\n```"


def verdicts(mark: str) -> str:
    """What docs/verdicts.py says about every claim."""
    from verdicts import block  # beside this file

    return block()


def amounts(mark: str) -> str:
    """What docs/amounts.py says about claims under equal passes, reads, seconds."""
    from amounts import block  # beside this file

    return block()


def cost(mark: str) -> str:
    """The numbers of the figure of docs/cost.md."""
    from figures import cost_block  # beside this file

    return cost_block()


BLOCKS = {
    "cost": cost,
    "run": run,
    "verdicts": verdicts,
    "amounts": amounts,
}  # blocks that are no tables of tables.toml


# ---- pages ---------------------------------------------------------------------------------------


def fill(text: str) -> str:
    """A page with all its numbers."""
    if text.count("<!-- numbers: ") != len(MARK.findall(text)):
        raise SystemExit("a mark <!-- numbers: ... --> has no <!-- end -->")

    def put(match: re.Match[str]) -> str:
        name, block = match["name"], match["old"].startswith("\n")
        gap = "\n\n" if block else ""
        write = BLOCKS.get(name, table) if block else evaluate
        try:
            new = write(name)
        except (LookupError, TypeError, ValueError, OSError) as error:
            raise SystemExit(f"{name!r} cannot be filled in: {error!r}") from error
        return f"<!-- numbers: {name} -->{gap}{new}{gap}<!-- end -->"

    return MARK.sub(put, text)


def main() -> None:
    """Fill in the pages, or name those that are out of date."""
    import figures  # beside this file
    import tradeoffs

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if out of date")
    check = parser.parse_args().check
    stale = figures.redraw(check) + tradeoffs.redraw(check)
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = page.read_text(encoding="utf-8")
        filled = fill(text)
        if filled != text:
            stale.append(page.relative_to(ROOT).as_posix())
            if not check:
                page.write_text(filled, encoding="utf-8")
    for name in stale:
        print(f"{name}: {'out of date; run python docs/fill_numbers.py' if check else 'written'}")
    sys.exit(bool(stale) and check)


if __name__ == "__main__":
    main()
