"""What the commands print: tables, progress bars, and `Stopped` for Ctrl-C."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tpsgd.common.errors import TpsgdError
from tpsgd.common.names import printable

if TYPE_CHECKING:
    from tpsgd.comparison.compare import Comparison

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
    """A table whose first column stays whole; with `numbers`, all others are to the right."""
    grid = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for i, name in enumerate(head):
        right = numbers and i > 0
        grid.add_column(name, justify="right" if right else "left", no_wrap=right or i == 0)
    for row in rows:
        grid.add_row(*(Text(printable(cell)) for cell in row))
    return grid


def fitting(names: Sequence[str], cells: Sequence[Sequence[str]], width: int) -> Table:
    """A table; where the terminal is narrow, the last columns are left out."""

    def first(count: int) -> Table:
        return grid_of(*names[:count], rows=[row[:count] for row in cells], numbers=True)

    console, counts = Console(width=1000), range(len(names), 2, -1)
    return first(next((n for n in counts if console.measure(first(n)).maximum <= width), 2))


def show(comparison: "Comparison", page: Path | None) -> None:
    """Print the table, remarks, and where the report is, if it could be written."""
    from tpsgd.comparison.report.table import differences, legend, mistakes, remarks, tested

    show_table(comparison)
    console = Console(highlight=False)
    console.print(legend(comparison))
    if tests := differences(comparison):
        console.print("", fitting(tests[0], tests[1:], console.width), tested(comparison), sep="\n")
    best = [r for r in comparison.exemplars if not r.arm.reference and not r.arm.control]
    for line in (*remarks(comparison), *filter(None, map(mistakes, best))):
        console.print(printable(line), markup=False)
    if page is not None:
        console.print(f"report: {page}", soft_wrap=True, markup=False)


def show_table(comparison: "Comparison", *_: Any) -> None:
    """Print what was compared, the table and failures."""
    from tpsgd.comparison.report.table import effort, failures, head, rows, title

    console = Console(highlight=False)
    heading = printable(f"{title(comparison)}: {effort(comparison)}")
    console.print(heading, style="bold", markup=False)
    console.print(fitting(head(comparison), rows(comparison), console.width))
    for line in failures(comparison):
        console.print(printable(line), style="red", markup=False)


@contextmanager
def live_bar() -> Iterator[Callable[[str, float, float], None]]:
    """A progress bar on a terminal, as a function `advance(task, done, total)`."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda *_: None
        return
    columns = (TextColumn("{task.description:15}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, refresh_per_second=2) as bar:
        row = bar.add_task("warming up", total=1.0)

        def advance(task: str, done: float, total: float) -> None:
            bar.update(row, description=task, completed=done, total=total)

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
