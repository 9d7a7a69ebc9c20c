"""examples/edge: its Makefile builds and runs a net on an emulated board, with the bits of a PC."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from export.machines import MACHINES

from benchmarks import emulated

FOLDER = Path(__file__).parent.parent.parent / "examples" / "edge"


def said(target: str, build: Path, board: str = "m4f") -> dict[str, str]:
    """The first number of each line, by the word in front of it."""
    command = ["make", "-s", "-C", str(FOLDER), f"BUILD={build}", f"BOARD={board}", "EPOCHS=1"]
    ran = subprocess.run(
        [*command, f"PYTHON={sys.executable}", target],
        capture_output=True, text=True, check=True, timeout=300,
    )  # fmt: skip
    lines = [line.split() for line in (ran.stdout + ran.stderr).splitlines()]
    return {words[0]: words[1] for words in lines if len(words) in (2, 4)}


@pytest.mark.full
@pytest.mark.skipif(shutil.which("make") is None, reason="make not installed")
@pytest.mark.skipif(bool(emulated.missing()), reason=str(emulated.missing()))
@pytest.mark.parametrize("board", ["m0", "m4f"])
def test_the_makefile_runs_a_net_on_a_board_with_the_bits_of_this_machine(board, tmp_path):
    there, here = said("run", tmp_path, board), said("host", tmp_path)
    assert there["weights"] == here["weights"] and there["right"] == here["right"]
    assert int(there["right"]) > 250 and 100 < int(there["stack"]) < 1024


@pytest.mark.full
@pytest.mark.skipif(shutil.which("make") is None, reason="make not installed")
@pytest.mark.skipif(bool(MACHINES["RV32IMC"].missing), reason=MACHINES["RV32IMC"].missing)
def test_the_makefile_runs_a_net_on_risc_v_with_the_bits_of_this_machine(tmp_path):
    there, here = said("run", tmp_path, "riscv"), said("host", tmp_path)
    assert there["weights"] == here["weights"] and there["right"] == here["right"]
    assert int(there["right"]) > 250
