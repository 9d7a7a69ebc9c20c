"""The progress bar: after two seconds, on a terminal alone, with the time left; then it is gone."""

import io
from types import SimpleNamespace

import pytest
from helpers import mlp, points

import tpsgd
from tpsgd import TpsgdError
from tpsgd.features import progress_bar
from tpsgd.features.progress_bar import Bar, bar_unless


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    screen = Terminal()
    monkeypatch.setattr(progress_bar, "sys", SimpleNamespace(stderr=screen))
    monkeypatch.setattr(progress_bar, "automatic", True)
    return screen


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress_bar.time, "monotonic", lambda: now[0])
    return now


def test_the_bar_waits_two_seconds_and_says_the_time_left(clock):
    screen = io.StringIO()
    bar = Bar(screen)
    bar(0, 100)
    clock[0] = 1.9
    bar(10, 100)
    assert screen.getvalue() == ""
    clock[0] = 20.0
    bar(25, 100)
    assert "#######" in screen.getvalue() and screen.getvalue().endswith(" 25%, 1:00 left")
    clock[0] = 20.1
    bar(26, 100)
    assert "26%" not in screen.getvalue()  # not at every step
    bar.close()
    assert screen.getvalue().endswith("\r\x1b[K")


def test_what_an_earlier_run_has_done_does_not_make_the_time_left_shorter(clock):
    bar = Bar(screen := io.StringIO())
    clock[0] = 5.0  # inputs are computed again
    bar(80, 100)
    clock[0] = 15.0
    bar(85, 100)
    assert screen.getvalue().endswith(" 85%, 0:30 left")


def test_a_loader_that_does_not_know_its_length_shows_nothing(clock):
    bar = Bar(screen := io.StringIO())
    clock[0] = 9.0
    bar(25, 0)
    bar.close()
    assert screen.getvalue() == ""


def test_fit_shows_it_on_a_terminal_unless_it_is_told_not_to(terminal, monkeypatch):
    monkeypatch.setattr(progress_bar, "PATIENCE", 0.0)
    monkeypatch.setattr(progress_bar, "PAUSE", 0.0)
    tpsgd.fit(mlp(6, 8, 3), points(), epochs=2)
    assert "100%" in terminal.getvalue() and terminal.getvalue().endswith("\r\x1b[K")
    length = len(terminal.getvalue())
    tpsgd.fit(mlp(6, 8, 3), points(), epochs=2, progress=False)
    calls = []
    tpsgd.fit(mlp(6, 8, 3), points(), epochs=2, progress=lambda *done: calls.append(done))
    assert len(terminal.getvalue()) == length and calls[-1] == (192, 192)


def test_without_a_terminal_there_is_none(monkeypatch):
    monkeypatch.setattr(progress_bar, "sys", SimpleNamespace(stderr=io.StringIO()))
    with bar_unless(None) as progress:
        assert progress is None


def test_a_word_is_no_progress():
    with pytest.raises(TpsgdError, match="progress must be a function, True or False"):
        tpsgd.fit(mlp(6, 8, 3), points(), progress="yes")
