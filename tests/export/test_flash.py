"""Weights in two slots of flash: a cut of the power at any byte keeps the last good ones."""

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from helpers import with_full
from torch import nn

import tpsgd
from tpsgd import rules

pytestmark = [
    pytest.mark.skipif(shutil.which("cc") is None, reason="no cc"),
    pytest.mark.usefixtures("unwatched"),
]
STRICT = ["-std=c99", "-pedantic", "-Wall", "-Wextra", "-Wconversion", "-Wshadow", "-Werror"]
PROGRAM = Path(__file__).parent / "flash.c"
NUMBERS = ("float32", "int8")


def exported(folder: Path, numbers: str, **options) -> Path:
    torch.manual_seed(0)
    y = torch.arange(200) % 3
    x = torch.randn(200, 6)
    x[:, :3] += 4 * nn.functional.one_hot(y, 3)
    model = nn.Sequential(nn.Linear(6, 5), nn.LeakyReLU(), nn.Linear(5, 3))
    tpsgd.export.c(
        model, folder, shape=(6,), rule=rules.readout(), samples=x, labels=y, numbers=numbers,
        **options,
    )  # fmt: skip
    return folder


def cuts(folder: Path) -> list[int]:
    """How often old weights were loaded, new ones, others: after single cuts, after a chain."""
    program = str(folder / "flash")
    sources = [str(folder / "net.c"), str(PROGRAM)]
    command = ["cc", *STRICT, "-O2", f"-I{folder}", *sources, "-o", program]
    subprocess.run(command, check=True)
    ran = subprocess.run([program], capture_output=True, text=True, timeout=60)
    return [] if ran.returncode else [int(word) for word in ran.stdout.split()]


@pytest.mark.parametrize("numbers", NUMBERS)
def test_a_cut_at_any_byte_keeps_the_old_weights_or_the_new_ones(numbers, tmp_path):
    old, new, others, *chain = cuts(exported(tmp_path, numbers))
    assert others == chain[2] == 0
    assert old > 500 and new >= 4 and chain[0] > 500 and chain[1] > 500


MUTANTS = {
    "over the newer slot": ("? 1 - newer : newer;", "? newer : 1 - newer;"),
    "without its checksum": (" && tps_checksum_fits(in)", ""),
    "without its complement": ("number == ~complement ? number : 0", "number"),
    "from the older slot": ("(flash, 1) > tps_seq", "(flash, 1) < tps_seq"),
}


@pytest.mark.parametrize("mutant", with_full(MUTANTS, list(MUTANTS)[1:]))
def test_a_mutant_loses_weights(mutant, tmp_path):
    right, wrong = MUTANTS[mutant]
    program = exported(tmp_path, "float32") / "net.c"
    assert right in program.read_text()
    program.write_text(program.read_text().replace(right, wrong))
    ran = cuts(tmp_path)
    assert not ran or ran[2] or ran[5]


@pytest.mark.parametrize("numbers", NUMBERS)
def test_saving_takes_no_second_copy_of_the_weights(numbers, tmp_path):
    exported(tmp_path, numbers, spare=40)
    program = str(tmp_path / "net.o")
    command = [
        "gcc",
        *STRICT,
        "-Os",
        "-fno-pie",
        "-fstack-usage",
        "-c",
        str(tmp_path / "net.c"),
        "-o",
        program,
    ]
    subprocess.run(command, cwd=tmp_path, check=True)
    lines = (tmp_path / "net.su").read_text().splitlines()
    stack = {line.split(":")[3].split()[0]: int(line.split()[1]) for line in lines}
    assert "net_save_to" in stack and sum(sorted(stack.values())[-5:]) < 1024
    sizes = subprocess.run(["size", program], capture_output=True, text=True, check=True).stdout
    assert sizes.splitlines()[1].split()[1:3] == ["0", "0"]  # no data, no bss
