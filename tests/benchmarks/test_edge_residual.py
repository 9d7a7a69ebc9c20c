"""The benchmark of residual nets: its bytes are those of the code, and its program learns."""

import json
import sys
from pathlib import Path

import pytest
import torch
from helpers import with_full

from tpsgd_export.to_c.compiled import compiler
from tpsgd_export.to_c.memory import FLOAT, layout

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import edge_residual as benchmark

ROOT = Path(__file__).parents[2]
RECORD = json.loads((ROOT / "results" / "edge_residual.json").read_text(encoding="utf-8"))
ARENAS = {
    "frozen": "frozen_arena_bytes",
    "readout": "local_arena_bytes",
    "backprop": "backprop_arena_bytes",
}
SLOW = ["ResNet-18, 8 filters", "ResNet-8"]


@pytest.mark.parametrize("net", with_full(benchmark.NETS, SLOW))
def test_recorded_arenas_are_those_of_today(net):
    (row,) = (row for row in RECORD["arenas"] if row["net"] == net)
    for arm, name in ARENAS.items():
        recipe = benchmark.recipe_of(benchmark.NETS[net](), arm, benchmark.PICTURE)
        assert row[name] == FLOAT * layout(recipe).arena, arm


def test_a_frozen_body_of_inverted_residuals_by_hand():
    """At the depthwise convolution: the input, which is added later, and both wide outputs."""
    maps = 16 * 16 * 16
    (row,) = (row for row in RECORD["arenas"] if row["net"] == "4 inverted residuals")
    assert row["frozen_arena_bytes"] == FLOAT * ((1 + 4 + 4) * maps + 1)


@pytest.mark.skipif(compiler() is None, reason="no C compiler")
@pytest.mark.parametrize("net", benchmark.DIGITS)
def test_every_arm_learns_the_digits_of_one_class_from_the_others(net):
    x = torch.rand(40, *benchmark.DIGIT)
    y = torch.arange(40) % 2
    x[y == 1, :, :4] += 2
    for arm in benchmark.ARMS if net == "pixels" else ["backprop"]:
        counts = benchmark.right(net, arm, 0, ((x, y), (x, y)), (1e-6, 0.01))
        assert counts.shape == (2, 3) and counts[1, 2] > 0.9 > counts[0, 0], arm


def test_rows_say_which_rate_was_chosen():
    assert {(row["net"], row["arm"]) for row in RECORD["digits"]} == set(benchmark.CASES)
    for row in RECORD["digits"]:
        recipe = benchmark.recipe_of(benchmark.DIGITS[row["net"]](), row["arm"], benchmark.DIGIT)
        assert row["ram_bytes"] == layout(recipe).ram_bytes
        for each in row["passes"].values():
            assert each["lr"] in benchmark.RATES and len(each["accuracies"]) == benchmark.SEEDS
