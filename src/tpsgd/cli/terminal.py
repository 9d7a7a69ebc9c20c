"""What the commands print: tables, progress bars, and `Stopped` for Ctrl-C."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from tpsgd.common.errors import TpsgdError
from tpsgd.common.names import printable
from tpsgd.common.units import size

if TYPE_CHECKING:
    from tpsgd.comparison.compare import Comparison
    from tpsgd.engine.record import Run
    from tpsgd.memory.plan import Line, Plan

WIDTH = 80
NOTHING_DONE = "interrupted before the first training run was done; nothing was written"
INTERRUPTED = 130  # the exit status after Ctrl-C
T = TypeVar("T")


class Stopped(Exception):
    """Ctrl-C, after all that had finished was saved; `status` is that of the command."""

    def __init__(self, text: str, status: int = INTERRUPTED) -> None:
        super().__init__(text)
        self.status = status


def write_then_show(write: Callable[[], T], show: Callable[[T | None], None]) -> None:
    """Write results, then show them: a reader that ends early, such as `head`, loses none of them.

    `show` gets what was written, or None where that failed, as on a full disk: the error comes
    after what is shown.
    """
    written, error = None, None
    try:
        written = write()
    except (OSError, TpsgdError) as problem:
        error = problem
    show(written)
    if error is not None:
        raise error


def until_interrupted(rows: Iterable[T]) -> tuple[list[T], bool]:
    """All rows, or those before Ctrl-C; and whether there was one."""
    finished: list[T] = []
    try:
        for row in rows:
            finished.append(row)
    except KeyboardInterrupt:
        if not finished:
            raise Stopped(NOTHING_DONE) from None
        return finished, True
    return finished, False


def grid_of(*head: str, rows: Iterable[Sequence[Any]] = (), numbers: bool = False) -> Table:
    """A table; with `numbers`, all columns except the first are aligned to the right."""
    grid = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for i, name in enumerate(head):
        right = numbers and i > 0
        grid.add_column(name, justify="right" if right else "left", no_wrap=right)
    for row in rows:
        grid.add_row(*(Text(printable(cell)) for cell in row))
    return grid


def table(comparison: "Comparison", width: int = WIDTH) -> Table:
    """A comparison as a table; where the terminal is narrow, the last columns are left out."""
    from tpsgd.comparison.report.table import head, rows

    def first(count: int) -> Table:
        return grid_of(*names[:count], rows=[row[:count] for row in cells], numbers=True)

    names, cells, console = head(comparison), rows(comparison), Console(width=1000)
    count = len(names)
    while count > 2 and console.measure(first(count)).maximum > width:
        count -= 1
    return first(count)


def show(comparison: "Comparison", page: Path | None) -> None:
    """Print the table, remarks, and where the report is, if it could be written."""
    from tpsgd.comparison.report.table import legend, mistakes, remarks

    show_table(comparison)
    console = Console(highlight=False)
    console.print(legend(comparison))
    best = [r for r in comparison.exemplars if not r.arm.reference and not r.arm.control]
    for line in (*remarks(comparison), *filter(None, map(mistakes, best))):
        console.print(printable(line), markup=False)
    if page is not None:
        console.print(f"report: {page}", soft_wrap=True, markup=False)


def show_table(comparison: "Comparison", *_: Any) -> None:
    """Print what was compared, the table and failures."""
    from tpsgd.comparison.report.table import effort, failures, title

    console = Console(highlight=False)
    heading = printable(f"{title(comparison)}: {effort(comparison)}")
    console.print(heading, style="bold", markup=False)
    console.print(table(comparison, console.width))
    for line in failures(comparison):
        console.print(printable(line), style="red", markup=False)


def show_plan(plan: "Plan") -> None:
    """Print a plan: the settings that fit a budget, the tables, remarks."""
    from tpsgd.engine.settings import Memory

    console = Console(highlight=False)
    console.width = min(WIDTH, console.width)
    if plan.budget is not None:
        settings = in_words(vars(plan.settings["memory"]))
        budget = Memory(plan.budget).budget_in_words
        console.print(f"{budget}: {settings}", style="bold")
    first = plan.lines[0]
    console.print(bytes_table(plan.lines, "way to train"))
    if len(first.blocks) > 1:
        console.print()
        console.print(bytes_table(first.blocks, f"{first.name}: block"))
    if plan.pipeline is not None:
        head, *rows = plan.pipeline.cells()
        console.print()
        console.print(grid_of(*head, rows=rows, numbers=True))
    for line in plan.remarks:
        console.print(line, style="yellow", markup=False)


def bytes_table(lines: "Sequence[Line]", title: str) -> Table:
    """The lines of a plan as a table of at most 80 columns; long names are wrapped."""
    from tpsgd.memory.plan import cells

    head, *rows = cells(lines, title)
    grid = grid_of(*head, rows=rows, numbers=True)
    grid.padding = (0, 0, 0, 0)  # there is a space between columns already
    return grid


def in_words(settings: Mapping[str, Any]) -> str:
    """The memory settings of a run in words."""
    from tpsgd.engine.settings import memory_in_words

    return memory_in_words(settings)


def peak_within(run: "Run") -> str:
    """The memory of a run compared with its budget, and the settings that made it fit."""
    from tpsgd.engine.settings import Memory

    inputs = f", {size(run.kept_bytes)} of it kept inputs" if run.kept_bytes else ""
    total, words = size(run.total_bytes), Memory(run.settings["memory_budget"]).budget_in_words
    return f"{words}: {total}{inputs}; {in_words(run.settings)}"


@contextmanager
def live_bar() -> Iterator[Callable[..., None]]:
    """A progress bar on a terminal, as a function `advance(task, done, total, comparison)`."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda *_: None
        return
    from rich.live import Live
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    bar = Progress(TextColumn("{task.description:15}"), BarColumn(), TimeRemainingColumn())
    row, shown = bar.add_task("warming up", total=1.0), 0
    with Live(bar, console=console, transient=True, refresh_per_second=2) as live:

        def advance(
            task: str, done: float, total: float, comparison: "Comparison | None" = None
        ) -> None:
            nonlocal shown
            bar.update(row, description=task, completed=done, total=total)
            if comparison is not None and comparison.finished != shown:
                shown = comparison.finished
                live.update(Group(table(comparison, console.width), "", bar))

        yield advance


@contextmanager
def watched_trials(folder: Path | None) -> Iterator[Callable[[str, float, float], None]]:
    """A progress function with a bar; Ctrl-C ends with how many trials the folder has."""
    saved = "no trial was begun"
    with live_bar() as advance:

        def progress(task: str, done: float, total: float) -> None:
            nonlocal saved
            if task not in ("features", "planning"):
                saved = f"{int(done)} of {int(total)} trials are in {folder}"
            advance(task, done, total)

        try:
            yield progress
        except KeyboardInterrupt:
            if folder is None:
                raise
            raise Stopped(f"interrupted; {saved}") from None


def waiting(text: str) -> AbstractContextManager[Any]:
    """A spinner with a text; nothing if there is no terminal."""
    return Console(stderr=True).status(text)
