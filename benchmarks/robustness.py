"""`results/robustness.json`: a section for each benchmark of robustness, with its commit."""

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tpsgd.comparison.provenance import machine, versions

FILE = "robustness.json"
COMMANDS = (
    "python benchmarks/fuzz.py --out results; python benchmarks/kill_and_resume.py --out results"
)


def add_figures(folder: Path, section: str, figures: Mapping[str, Mapping[str, Any]]) -> None:
    """Add the figures of some runs, by name, to a section.

    Pieces of one benchmark may be run one after another: at the same commit, counts are added, and
    of figures that are named `most_...` the larger one is kept. Figures of other commits go.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for cases in (2, 3):
        ...         add_figures(Path(folder), "fuzz", {"csv": {"cases": cases, "most_mb": cases}})
        ...     json.loads((Path(folder) / FILE).read_text())["fuzz"]["figures"]
        {'csv': {'cases': 5, 'most_mb': 3}}
    """
    file = folder / FILE
    record = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    place = {"machine": machine(), "versions": versions()}
    record = {"benchmark": "robustness", "command": COMMANDS, **place} | record
    before = record.get(section, {})
    added = dict(before["figures"]) if before.get("commit") == commit() else {}
    for name, numbers in figures.items():
        old = added.get(name, {})
        added[name] = {
            key: max(value, old.get(key, 0)) if key.startswith("most_") else value + old.get(key, 0)
            for key, value in numbers.items()
        }
    record[section] = {"commit": commit(), **place, "figures": added}
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def commit() -> str:
    """The commit of this repository that is measured; "" if it is none."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short=12", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()
