"""What every test shares: one thread per worker, no window, the same examples each run."""

import gc
import os
import sys
import zlib
from collections import defaultdict
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

# Read when numpy and torch are first loaded, and inherited by the processes tests start.
if "PYTEST_XDIST_WORKER" in os.environ:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = os.environ.get("TEST_THREADS", "1")
os.environ["MPLBACKEND"] = "Agg"

import numpy as np
import pytest
import torch
from hypothesis import settings
from left_behind import untracked
from skipped import skipped_lines

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(int(os.environ.get("TEST_THREADS", "1")))

# Every torch.manual_seed would format a stack for each kind of device that is not there.
for device in (torch.cuda, torch.xpu, torch.mtia):
    if not device.is_available():
        device._lazy_call = lambda function, **options: None

# `pytest --hypothesis-profile=explore` looks further than the fixed examples do.
settings.register_profile("fixed", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile("fixed")

# `TEST_SEED=7 make units` draws other samples than the fixed ones.
SEED = int(os.environ.get("TEST_SEED", "0"))
torch.manual_seed(SEED)  # for samples that test modules draw while they are imported

BEFORE = pytest.StashKey[set[str] | None]()  # what lay in the checkout
LEFT = pytest.StashKey[list[str]]()  # what the tests have left there


def pytest_sessionstart(session: pytest.Session) -> None:
    """Look at the checkout before the first test; not in each of several workers."""
    worker = "PYTEST_XDIST_WORKER" in os.environ
    session.config.stash[BEFORE] = None if worker else untracked(session.config.rootpath)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail if a test has left something in the checkout."""
    stash = session.config.stash
    before = stash.get(BEFORE, None)
    after = None if before is None else untracked(session.config.rootpath)
    stash[LEFT] = sorted((after or set()) - (before or set()))
    if stash[LEFT] and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """List what was skipped with what would let it run, and what was left in the checkout."""
    if lines := skipped_lines(terminalreporter.getreports("skipped")):
        terminalreporter.section("skipped tests, and what would let them run")
        terminalreporter.write_line("\n".join(lines))
    for name in config.stash.get(LEFT, []):
        terminalreporter.write_line(f"FAILED: the tests have left {name} in the checkout", red=True)


@pytest.hookimpl(tryfirst=True)  # before pytest's own hook selects with -m
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as `full` tests on real data, and combinations that `cover(n)` does not need.

    The other combinations have every n values of the test's parameters together.
    """
    products: dict[tuple, dict[pytest.Item, set]] = defaultdict(dict)
    for item in items:
        if item.get_closest_marker("real_data") is not None:
            item.add_marker(pytest.mark.full)
        mark = item.get_closest_marker("cover")
        if mark is not None and item.get_closest_marker("full") is None:
            values = [
                (k, v if isinstance(v, str) else id(v)) for k, v in item.callspec.params.items()
            ]
            tuples = set(combinations(values, mark.args[0]))
            products[item.parent, item.originalname][item] = tuples
    for product in products.values():
        missing = set().union(*product.values())
        while missing:  # greedily; of equals, the first
            best = max(product, key=lambda item: len(product[item] & missing))
            missing -= product.pop(best)
        for item in product:
            item.add_marker(pytest.mark.full)


def pytest_collection_finish() -> None:
    """Spare the garbage collector the walk over all test modules and libraries."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seeded(request: pytest.FixtureRequest) -> None:
    """Every test draws the same samples in every run, in whatever order the workers take them."""
    seed = zlib.crc32(request.node.name.encode()) ^ SEED
    torch.manual_seed(seed)
    np.random.seed(seed)


@pytest.fixture
def data_root() -> Path:
    """The folder of real data sets, TPSGD_DATA; the test is skipped where there is none."""
    root = os.environ.get("TPSGD_DATA")
    if not root or not Path(root).is_dir():
        pytest.skip("TPSGD_DATA names no folder of real data")
    return Path(root)


@pytest.fixture(autouse=True)
def _real_data(request: pytest.FixtureRequest) -> None:
    """Skip a test marked `real_data("mnist")` where TPSGD_DATA/mnist is not there."""
    for mark in request.node.iter_markers("real_data"):
        folder = request.getfixturevalue("data_root") / mark.args[0]
        if not folder.is_dir():
            pytest.skip(f"TPSGD_DATA has no {mark.args[0]}")


@pytest.fixture
def unwatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is not looked at: on nets this small that takes longer than learning."""
    monkeypatch.setattr("tpsgd.memory.meter.Meter._watch", lambda self, on: None)


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A comparison's plots are not drawn, which takes longer than training so small a net."""
    plots = dict.fromkeys(("memory", "time", "curves"), b"\x89PNG")
    monkeypatch.setattr("tpsgd.comparison.report.plots.draw", lambda comparison: plots)


@pytest.fixture(scope="session", autouse=True)
def _unsynced():
    """Nothing waits for the disk; tests/test_files.py looks at what would."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="session")
def _commands():
    """The commands are built once; typer would build them anew in every call."""
    from typer import main

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(main, "get_command", cache(main.get_command))
        yield


@pytest.fixture
def says(monkeypatch, capsys, _commands):
    """Run the command line in this process: its exit status, output and errors."""
    from tpsgd.cli import app as cli

    def call(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["tpsgd", *words])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        return (int(caught.value.code or 0), *capsys.readouterr())

    return call


@pytest.fixture
def tapes(monkeypatch: pytest.MonkeyPatch) -> list:
    """The tapes of recorded steps; `count` says how often each is replayed."""
    from tpsgd.engine.fast import replay

    tapes = []

    class Counted(replay.Tape):
        count = 0

        def __init__(self, *args: object) -> None:
            super().__init__(*args)
            tapes.append(self)
            self.compiled = self.replay
            del self.replay  # so that the method is called

        def replay(self, *args: object) -> object:
            self.count += 1
            return self.compiled(*args)

    monkeypatch.setattr(replay, "Tape", Counted)
    return tapes
