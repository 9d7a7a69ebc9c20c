"""A progress bar with the time left, on a terminal, for training of more than two seconds."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

PATIENCE, PAUSE = 2.0, 0.2  # seconds before the bar appears, and between two drawings
WIDTH = 30
Progress = Callable[[int, int], None]
automatic = True  # the command line, which has bars of its own, sets it to False


class Bar:
    """Is called with what is done and the total; draws one line on a stream, and removes it."""

    def __init__(self, stream: Any = None) -> None:
        self.stream = stream or sys.stderr
        self.began = self.drawn = time.monotonic()
        self.first: tuple[float, int] | None = None  # the time of the first call, what was done
        self.shown = False

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        start, at_start = self.first = self.first or (now, done)  # more than 0 in a resumed run
        if now - self.began < PATIENCE or now - self.drawn < PAUSE or not at_start < done <= total:
            return
        filled = WIDTH * done // total
        left = (now - start) * (total - done) / (done - at_start)
        bar = "#" * filled + "." * (WIDTH - filled)
        self.stream.write(f"\r\x1b[K[{bar}] {done / total:4.0%}, {duration(left)} left")
        self.stream.flush()
        self.drawn, self.shown = now, True

    def close(self) -> None:
        if self.shown:
            self.stream.write("\r\x1b[K")
            self.stream.flush()


@contextmanager
def bar_unless(progress: Progress | bool | None) -> Iterator[Progress | None]:
    """The caller's own function; without one a bar, if there is a terminal to show it on."""
    if callable(progress):
        yield progress
    elif progress is False or not (automatic and sys.stderr and sys.stderr.isatty()):
        yield None
    else:
        bar = Bar()
        try:
            yield bar
        finally:
            bar.close()


def duration(seconds: float) -> str:
    """Seconds in hours, minutes and seconds.

    Examples:
        >>> duration(9.2), duration(75), duration(7384)
        ('0:09', '1:15', '2:03:04')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
