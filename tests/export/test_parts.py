"""A step in parts, and numbers that are refused whatever a compiler assumes of them."""

import re
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
PROGRAM = Path(__file__).parent / "parts.c"
NETS = {
    "readout": {"rule": rules.readout()},
    "learned, adam": {"rule": rules.default(), "optimizer": "adam", "batch": 3},
    "targets, momentum": {"rule": rules.tpsgd_l2(), "optimizer": "momentum"},
    "int8": {"rule": rules.readout(), "numbers": "int8"},
    "maps": {"rule": rules.readout()},
}


def exported(folder: Path, net: str) -> None:
    torch.manual_seed(0)
    y, options = torch.arange(200) % 3, NETS[net]
    x = torch.randn(200, 8)
    x[:, :3] += 4 * nn.functional.one_hot(y, 3)
    layers = [nn.Linear(8, 6), nn.LeakyReLU(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)]
    if net == "maps":
        pools = [nn.Conv1d(1, 4, 3), nn.ReLU(), nn.MaxPool1d(2), nn.Flatten(), nn.Linear(12, 3)]
        layers = [nn.Unflatten(1, (1, 8)), *pools]
    model = nn.Sequential(*layers)
    tpsgd.export.c(model, folder, shape=(8,), samples=x, labels=y, **options)


@pytest.mark.parametrize("net", with_full(NETS, ["learned, adam", "targets, momentum", "maps"]))
def test_a_step_in_parts_learns_the_same_bits(net, tmp_path):
    exported(tmp_path, net)
    sources = [str(tmp_path / "net.c"), str(PROGRAM)]
    for flags in (["-std=c99", "-O2"], ["-std=gnu11", "-Ofast"]):
        program = str(tmp_path / "parts")
        subprocess.run(["gcc", *flags, f"-I{tmp_path}", *sources, "-o", program], check=True)
        assert subprocess.run([program], capture_output=True).returncode == 0


@pytest.mark.parametrize("net", ["readout", "int8"])
def test_no_function_calls_itself(net, tmp_path):
    exported(tmp_path, net)
    calls: dict[str, set[str]] = {}
    command = ["gcc", "-O0", "-fdump-rtl-expand", "-fcallgraph-info", "-c", "net.c", "-o", "net.o"]
    subprocess.run(command, cwd=tmp_path, check=True)
    edges = re.findall(
        r'edge: { sourcename: "([^"]+)" targetname: "([^"]+)"', (tmp_path / "net.ci").read_text()
    )
    for caller, called in edges:
        calls.setdefault(caller, set()).add(called)
    assert len(calls) > 15
    for start in calls:
        reached, waiting = set(), [start]
        while waiting:
            for called in calls.get(waiting.pop(), set()) - reached:
                reached.add(called)
                waiting.append(called)
        assert start not in reached
