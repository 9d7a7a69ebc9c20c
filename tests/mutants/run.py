"""Whether the quick tests find small wrong changes of the core, the mutants of `mutants.toml`.

    python tests/mutants/run.py [--only WORDS] [--jobs 2]

Each mutant is written into a copy of `src`, and the tests that it names run on that copy: it is
killed if one of them fails. The exit status is 1 if a mutant survives or cannot be applied, or if
the tests fail without any mutant.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_name("mutants.toml")
SECONDS = 300  # after which a run counts as killed: it has no end
ENDLESS = f"no end after {SECONDS} s"
KILLED, SURVIVED, BROKEN = "killed", "survived", "cannot run"


@dataclass(frozen=True)
class Mutant:
    """A wrong change of one file, and the test files that find it."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def text(self, source: str) -> str:
        """The file's text with the change in it."""
        count = source.count(self.old)
        if count != 1:
            raise ValueError(f"its old text occurs {count} times in {self.file}")
        return source.replace(self.old, self.new)


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant; `by` is the test that failed, or why nothing could run."""

    mutant: Mutant
    verdict: str
    by: str
    seconds: float


def read_mutants() -> list[Mutant]:
    """All mutants of the list."""
    entries = tomllib.loads(LIST.read_text(encoding="utf-8"))["mutant"]
    return [Mutant(**entry | {"tests": tuple(entry["tests"])}) for entry in entries]


def tests_on(src: Path, tests: Sequence[str], seconds: float | None) -> tuple[int, str]:
    """The exit status of pytest with the package in `src`, and its last words."""
    words = ["-q", "-x", "-m", "not full", "--no-header", "--tb=line", "-p", "no:cacheprovider"]
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    environment = os.environ | {"PYTHONPATH": str(src)} | threads
    command = [sys.executable, "-m", "pytest", *words, *tests]
    try:
        run = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return 1, ENDLESS
    lines = [line for line in (run.stdout + run.stderr).splitlines() if line.strip()]
    failed = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
    return run.returncode, failed[0] if failed else " ".join(lines[-1:])


def try_mutant(mutant: Mutant) -> Outcome:
    """Run a mutant's tests on a copy of the package that has it."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        src = Path(folder) / "src"
        shutil.copytree(ROOT / "src", src)
        file = src / "tpsgd" / mutant.file
        for compiled in file.parent.glob(f"__pycache__/{file.stem}.*.pyc"):
            compiled.unlink()
        try:
            file.write_text(mutant.text(file.read_text(encoding="utf-8")), encoding="utf-8")
        except (OSError, ValueError) as error:
            return Outcome(mutant, BROKEN, str(error), 0.0)
        status, words = tests_on(src, mutant.tests, SECONDS)
    failed = status < 0 or (status == 1 and words.startswith(("FAILED ", "ERROR ", ENDLESS)))
    verdict = KILLED if failed else BROKEN if status else SURVIVED
    return Outcome(mutant, verdict, words, time.perf_counter() - began)


def table_of(outcomes: Sequence[Outcome]) -> Table:
    """A row for each mutant."""
    table = Table("mutant", "verdict", "seconds", "test")
    for outcome in outcomes:
        style = "" if outcome.verdict == KILLED else "bold red"
        test = outcome.by.removeprefix("FAILED ").partition(" - ")[0]
        row = outcome.mutant.name, outcome.verdict, f"{outcome.seconds:.0f}", test
        table.add_row(*row, style=style)
    return table


def passes_without_mutants(mutants: Sequence[Mutant], console: Console) -> bool:
    """Whether the tests of these mutants pass: otherwise a failure says nothing."""
    files = sorted({test for mutant in mutants for test in mutant.tests})
    console.print(f"{len(files)} test files without any mutant ...")
    status, words = tests_on(ROOT / "src", files, None)
    console.print(words)
    return status == 0


def try_all(mutants: Sequence[Mutant], jobs: int, console: Console) -> list[Outcome]:
    """Try mutants, with a bar; on a terminal only those that are alive get a line."""
    outcomes: list[Outcome] = []
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress, ThreadPoolExecutor(jobs) as pool:
        task = progress.add_task("", total=len(mutants))
        for outcome in pool.map(try_mutant, mutants):
            outcomes.append(outcome)
            progress.advance(task)
            if outcome.verdict != KILLED or not console.is_terminal:
                console.print(f"{outcome.verdict}: {outcome.mutant.name}: {outcome.by}")
    return outcomes


def main() -> int:
    """Try the mutants; 0 if all are killed."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--only", default="", help="the mutants whose name or file has these words")
    parser.add_argument("--jobs", type=int, default=1, help="mutants that are tried at a time")
    parser.add_argument("--unchecked", action="store_true", help="skip the run without any mutant")
    options, console = parser.parse_args(), Console(soft_wrap=True)
    chosen = [m for m in read_mutants() if options.only.lower() in f"{m.name} {m.file}".lower()]
    if not chosen:
        parser.error(f"no mutant has {options.only!r} in its name or file")
    if not options.unchecked and not passes_without_mutants(chosen, console):
        return 1
    outcomes = try_all(chosen, options.jobs, console)
    console.print(table_of(outcomes))
    killed = sum(outcome.verdict == KILLED for outcome in outcomes)
    console.print(f"{killed} of {len(outcomes)} mutants were killed")
    return int(killed < len(outcomes))


if __name__ == "__main__":
    sys.exit(main())
