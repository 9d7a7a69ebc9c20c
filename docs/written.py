"""How a record is read and a figure is written, for all pages."""

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

NUMBER = re.compile(r"[\d*×–−+±]")  # how a cell of figures starts
IN_PAPER = "*in the paper*"
Record = dict[str, Any]

# The files, and what makes them.
FILES = {
    "demo-mlp": "make demo (demo/mlp/results.json)",
    "demo-cnn": "make demo (demo/cnn/results.json)",
    "shallow": "python -m experiments.shallow --out results",
    "speed": "python benchmarks/speed.py --out results",
    "gpu": "python benchmarks/gpu.py --out results",
    "recurrent": "python -m experiments.recurrent --out results",
    "sequences": "python benchmarks/sequences.py --out results",
    "peers": "python -m experiments.peers --out results",
    "memory-cpu": "python benchmarks/memory.py --out results",
    "memory-gpu": "python benchmarks/memory.py --device cuda --out results",
    "vgg-memory": "python benchmarks/vgg.py --images FILE --encoder FILE --out results",
    "adaptors": "python -m experiments.adaptors --out results",
    "deep": "python -m experiments.deep --out results",
    "search": "tpsgd search (see its command)",
    "backbones": "python benchmarks/backbones.py --weights FILE --images FOLDER --out results",
}


class Missing(Exception):
    """A file that has not been made yet."""


class Results:
    """The records in a folder, read when asked for."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __getitem__(self, name: str) -> Record:
        path = self.folder / f"{name}.json"
        if not path.is_file():
            raise Missing(name)
        return json.loads(path.read_text(encoding="utf-8"))


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table, columns of numbers to the right."""
    rows = list(rows)
    sides = [
        "---:" if all(NUMBER.match(c) for c in col) else "---" for col in zip(*rows, strict=True)
    ]
    lines = [head, sides, *([whole(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def whole(text: str) -> str:
    """Figures that no line break may part."""
    return re.sub(r" (?=±|[KMG]?B\b|M\b|ms\b)|(?<=±) ", "\N{NO-BREAK SPACE}", text)


def percent(values: Sequence[float], digits: int) -> str:
    """Mean ± standard deviation in per cent."""
    mean = f"{100 * fmean(values):.{digits}f}"
    return f"{mean} ± {100 * stdev(values):.{digits}f}" if len(values) > 1 else mean


def cell(arm: Record | None) -> str:
    """The accuracy of an arm; 10,000 test images allow two digits."""
    return percent(arm["accuracies"], 2) if arm else "–"


def count(number: int, thing: str) -> str:
    """`1 epoch`, `2 epochs`."""
    return f"{number} {thing}{'s' * (number != 1)}"


def origin(*records: Record) -> str:
    """Machine, versions and command, under every table."""
    machine, versions = records[0]["machine"], records[0]["versions"]
    cpu = re.sub(r"\((R|TM)\)", "", machine["cpu"])
    where = machine["gpu"] or f"{cpu}, {count(machine['threads'], 'thread')}"
    commands = " and ".join(f"`{r['command']}`" for r in records)
    return f"{where}; Python {versions['python']}, torch {versions['torch']}. Made by {commands}."


def shows(picture: Path, values: Any) -> bool:
    """Whether a picture is there and was drawn from these values, which it holds."""
    from PIL import Image

    if not picture.is_file():
        return False
    with Image.open(picture) as opened:
        return opened.info.get("Description") == json.dumps(values)
