"""What a terminal shows: tables, a comparison, a live bar. torch is not needed to import it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console, Group
from rich.table import Table

if TYPE_CHECKING:
    from .compare import Comparison


def table(comparison: "Comparison") -> Table:
    """A comparison for the terminal, at most 80 columns wide."""
    from .report.table import HEAD, rows

    grid = grid_of(*HEAD)
    for column in grid.columns[1:]:
        column.justify, column.no_wrap = "right", True
    for row in rows(comparison):
        grid.add_row(*row)
    return grid


def show(comparison: "Comparison", page: Path) -> None:
    """Print the table, what it cannot say, and where the report is."""
    from .report.table import effort, legend, remarks, title

    console = Console(highlight=False)
    console.print(f"{title(comparison)}: {effort(comparison)}", style="bold", markup=False)
    console.print(table(comparison))
    console.print(legend(comparison))
    for line in remarks(comparison):
        console.print(line, style="yellow", markup=False)
    console.print(f"report: {page}", soft_wrap=True, markup=False)


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
