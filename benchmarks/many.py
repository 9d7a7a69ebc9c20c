"""`results/many.json`: a section for each benchmark of many machines, with its commit."""

import json
import os
import sys
from pathlib import Path
from typing import Any

from tpsgd.comparison.provenance import machine, versions

FILE = "many.json"
ROOT = Path(__file__).resolve().parents[1]
SECTIONS = ("data_parallel", "pipeline", "scale", "fleet")
COMMANDS = "; ".join(f"python benchmarks/{name}.py --out results" for name in SECTIONS)


def write_section(folder: Path, section: str, content: dict[str, Any]) -> None:
    """Write what a benchmark has measured into its section; the other sections stay.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_section(Path(folder), "pipeline", {"rows": [1]})
        ...     write_section(Path(folder), "scale", {"rows": [2]})
        ...     record = read(Path(folder))
        >>> record["pipeline"]["rows"], record["scale"]["rows"]
        ([1], [2])
    """
    place = {"machine": machine(), "versions": versions() | {"commit": commit()}}
    record = {"benchmark": "many", "command": COMMANDS} | read(folder) | place
    command = " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    load = os.getloadavg()[0]  # processes that want a core, those of the benchmark included
    record[section] = {"command": command, **place, "load": load, **content}
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(record, indent=1) + "\n"
    (folder / FILE).write_text(text, encoding="utf-8")


def read(folder: Path) -> dict[str, Any]:
    """All sections that a folder has."""
    file = folder / FILE
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def commit() -> str | None:
    """The commit that is measured, as the experiments name it."""
    sys.path.append(str(ROOT))
    from experiments.common import commit

    return commit()
