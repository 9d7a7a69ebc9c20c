"""What every test shares: one thread per worker, no window, the same examples each run."""

import os
import sys
from pathlib import Path

# Read when numpy and torch are first loaded, and inherited by the processes tests start.
if "PYTEST_XDIST_WORKER" in os.environ:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = "1"
os.environ["MPLBACKEND"] = "Agg"

import pytest
import torch
from hypothesis import settings

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)

# `pytest --hypothesis-profile=explore` looks further than the fixed examples do.
settings.register_profile("fixed", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile("fixed")


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
    monkeypatch.setattr("tpsgd.engine.meter.Meter._watch", lambda self, on: None)


@pytest.fixture
def says(monkeypatch, capsys):
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
    from tpsgd.engine import replay

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
