"""What a terminal shows: tables, a comparison, a live bar. torch is not needed to import it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from tpsgd.units import as_bytes, size

if TYPE_CHECKING:
    from tpsgd.comparison.compare import Comparison
    from tpsgd.engine.record import Run
    from tpsgd.memory.plan import Line, Plan

WIDTH = 80


def table(comparison: "Comparison") -> Table:
    """A comparison for the terminal, at most 80 columns wide."""
    from tpsgd.comparison.report.table import HEAD, rows

    grid = grid_of(*HEAD)
    for column in grid.columns[1:]:
        column.justify, column.no_wrap = "right", True
    for row in rows(comparison):
        grid.add_row(*row)
    return grid


def show(comparison: "Comparison", page: Path) -> None:
    """Print the table, what it cannot say, and where the report is."""
    from tpsgd.comparison.report.table import effort, legend, remarks, title

    console = Console(highlight=False)
    console.print(f"{title(comparison)}: {effort(comparison)}", style="bold", markup=False)
    console.print(table(comparison))
    console.print(legend(comparison))
    for line in remarks(comparison):
        console.print(line, style="yellow", markup=False)
    console.print(f"report: {page}", soft_wrap=True, markup=False)


def show_plan(plan: "Plan", budget: str | None) -> None:
    """Print a plan: what a budget chose, the tables, the remarks."""
    console = Console(highlight=False)
    console.width = min(WIDTH, console.width)
    if budget is not None:
        line = f"within {size(as_bytes(budget))}: {in_words(plan.settings)}"
        console.print(line, style="bold", markup=False)
    first = plan.lines[0]
    console.print(bytes_table(plan.lines, "way to train"))
    if len(first.blocks) > 1:
        console.print()
        console.print(bytes_table(first.blocks, f"{first.name}: block"))
    for line in plan.remarks:
        console.print(line, style="yellow", markup=False)


def bytes_table(lines: "Sequence[Line]", title: str) -> Table:
    """A plan's lines, at most 80 columns wide: numbers stay whole, long names are wrapped."""
    from tpsgd.memory.plan import PARTS, short

    brief = {"gradients": "grads", "optimizer": "optim.", "activations": "activ."}
    shown = [part for part in PARTS if any(line.parts.get(part) for line in lines)]
    kept = ["inputs"] if any(line.kept for line in lines) else []
    grid = grid_of(title, *(brief.get(p, PARTS[p]) for p in shown), *kept, "total")
    grid.padding = (0, 0, 0, 0)  # a space is between columns already
    for column in grid.columns[1:]:
        column.justify, column.no_wrap = "right", True
    for line in lines:
        counts = [line.parts.get(part, 0) for part in shown]
        counts += [line.kept, line.total] if kept else [line.total]
        grid.add_row(Text(line.name), *map(short, counts))
    return grid


def in_words(settings: Mapping[str, Any]) -> str:
    """How a training keeps within its budget."""
    size_of_pieces, slices, reuse = (settings[k] for k in ("micro_batch", "slices", "reuse"))
    words = [f"micro-batches of {size_of_pieces}" if size_of_pieces else "whole batches"]
    words += [f"gradients in {slices} slices"] if slices else []
    words += ["codes redrawn"] if settings["redraw"] else []
    if reuse is not None:
        kept = "memory" if reuse is True else f"a file in {reuse}"
        words.append(f"inputs reused from {kept}" if reuse else "inputs computed again")
    return ", ".join(words)


def held(run: "Run", budget: str) -> str:
    """What a training held, beside its budget, and how."""
    kept = f", {size(run.kept_bytes)} of it kept inputs" if run.kept_bytes else ""
    total = size(run.peak_bytes + run.kept_bytes)
    return f"peak {total} of a budget of {size(as_bytes(budget))}{kept}: {in_words(run.settings)}"


def grid_of(*head: str) -> Table:
    grid = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for name in head:
        grid.add_column(name)
    return grid


@contextmanager
def live_bar() -> Iterator[Callable[..., None] | None]:
    """`advance(what, share done, comparison so far)`, a live bar; None without a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    from rich.live import Live
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    bar = Progress(TextColumn("{task.description:15}"), BarColumn(), TimeRemainingColumn())
    task, shown = bar.add_task("warming up", total=1.0), 0
    with Live(bar, console=console, transient=True, refresh_per_second=2) as live:

        def advance(what: str, share: float, comparison: "Comparison | None" = None) -> None:
            nonlocal shown
            bar.update(task, description=what, completed=share)
            if comparison is not None and comparison.finished != shown:
                shown = comparison.finished
                live.update(Group(table(comparison), "", bar))

        yield advance


@contextmanager
def waiting(text: str) -> Iterator[None]:
    """A spinner beside what is being done; nothing without a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(text):
        yield


@contextmanager
def named_bar() -> Iterator[Callable[..., Any]]:
    """`tell(what)` makes a progress function; all of them share one bar."""
    with live_bar() as advance:

        def show(what: str, done: float, total: float) -> None:
            assert advance is not None
            advance(what, done / total)

        def tell(what: str, parts: bool = False) -> Any:
            if advance is None:
                return None
            if parts:  # one that names the part it is at
                return lambda part, *done: show(f"{what}, {part}", *done)
            return lambda *done: show(what, *done)

        yield tell
