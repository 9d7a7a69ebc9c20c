"""What the local rule saves: the memory model by hand, by the compiler, and by backprop itself."""

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tpsgd
from tpsgd_export.read_model import read_model
from tpsgd_export.to_c.compiled import CompiledNet, CompiledReader, compiler
from tpsgd_export.to_c.memory import layout
from tpsgd_export.to_c.source import sources

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import edge
import edge_nets
import edge_passes
import edge_split
import edge_table
import emulated

RESULTS = Path(__file__).parents[2] / "results" / "edge.json"
CODES = {"hash": "normal", "flash": "table", "binary": "bits"}


def convolutions() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1), nn.LeakyReLU(), nn.Conv2d(2, 3, 3), nn.LeakyReLU(),
        nn.Flatten(), nn.Linear(12, 5),
    )  # fmt: skip


def cell() -> nn.Sequential:
    return nn.Sequential(tpsgd.Recurrent(2, 3, leak=0.5), nn.Linear(3, 2))


def test_arenas_of_a_tiny_net_by_hand():
    recipe = read_model(convolutions(), edge_split.RULE, (1, 4, 4))
    outputs, one_map, logits = (2 * 16, 3 * 4, 5), 16, 5
    local = edge_split.local_arena(layout(recipe))
    assert local == outputs[0] + outputs[1] + one_map + logits
    assert edge_split.backprop_arena(recipe) == sum(outputs) + one_map
    stored = min(sum(outputs), 12 + 5 + 32, 5 + 32 + 12)  # every output, every 2nd, only the last
    assert edge_split.recomputing_arena(recipe) == stored + one_map


def test_a_backward_pass_needs_outputs_before_and_after_a_pool():
    model, shape = edge_split.keywords(2)
    maps, pooled, logits, one_map = 16 * 25 * 5, 16, 10, 25 * 5
    arena = edge_split.backprop_arena(read_model(model, edge_split.RULE, shape))
    assert arena == 2 * maps + pooled + logits + one_map


def test_arenas_of_a_tiny_cell_by_hand():
    recipe = read_model(cell(), edge_split.RULE, (7, 2))
    sums, states, inputs = 3 * 2 + 3 * 3 + 3, 7 * 3, 7 * 2
    both_derivatives, logits = 2 * 3, 2
    arena = edge_split.through_time_arena(recipe, steps=7, states=7)
    assert arena == sums + states + inputs + both_derivatives + logits
    assert [edge_split.recomputed_states(steps) for steps in (1, 9, 100)] == [1, 5, 19]
    longer = read_model(cell(), edge_split.RULE, (700, 2))
    assert layout(longer).ram == layout(recipe).ram


@pytest.mark.full
@pytest.mark.skipif(compiler() is None, reason="no C compiler")
@pytest.mark.parametrize("build", [convolutions, cell])
def test_local_arenas_are_those_of_the_compiler(build, tmp_path):
    recurrent = build is cell
    recipe = read_model(build(), edge_split.RULE, (7, 2) if recurrent else (1, 4, 4))
    places = layout(recipe)
    for name, text in sources(recipe).items():
        (tmp_path / name).write_text(text)
    kind = CompiledReader if recurrent else CompiledNet
    assert len(kind(tmp_path).arena) == 4 * edge_split.local_arena(places)


@pytest.mark.full
def test_backprop_learns_within_the_arena_that_is_computed_for_it():
    """Its arena must be enough, and what was stored in it must be gone after the step."""
    model, lr = convolutions(), 0.1
    recipe = read_model(model, edge_split.RULE, (1, 4, 4))
    x, label = torch.randn(1, 1, 4, 4), torch.tensor([3])
    arena = torch.full((edge_split.backprop_arena(recipe),), float("nan"))
    y1, y2, logits = arena[:32].view(1, 2, 4, 4), arena[32:44], arena[44:49]
    scratch, (one, two, head) = arena[49:], (model[0], model[2], model[5])
    expected = nn.Sequential(*convolutions())
    F.cross_entropy(expected(x), label).backward()
    with torch.no_grad():
        y1.copy_(F.leaky_relu(one(x)))
        y2.copy_(F.leaky_relu(two(y1)).flatten())
        logits.copy_(head(y2).softmax(0) - F.one_hot(label[0], 5))  # dz in place of the outputs
        for k in range(12):  # the dense layer, one input at a time
            scratch[0] = head.weight[:, k] @ logits
            head.weight[:, k] -= lr * logits * y2[k]
            y2[k] = scratch[0] * (1.0 if y2[k] > 0 else 0.01)
        head.bias -= lr * logits
        for c in range(2):  # the convolution, one input map at a time
            dz, own, weight = y2.view(1, 3, 2, 2), y1[:, c : c + 1], two.weight[:, c : c + 1]
            scratch.copy_(F.conv_transpose2d(dz, weight).flatten())
            weight -= lr * F.conv2d(own, dz.transpose(0, 1)).transpose(0, 1)
            own.copy_(scratch.view(1, 1, 4, 4) * torch.where(own > 0, 1.0, 0.01))
        two.bias -= lr * y2.view(3, 4).sum(1)
        one.weight -= lr * F.conv2d(F.pad(x, (1,) * 4), y1.transpose(0, 1)).transpose(0, 1)
        one.bias -= lr * y1.sum((0, 2, 3))
        for ours, p in zip(model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(ours, p - lr * p.grad)
    assert arena.isfinite().all()  # all of it was used


def test_a_net_of_the_table_has_the_codes_that_it_says():
    kinds = {codes: edge_nets.Case("64-32-10", codes=codes).recipe() for codes in CODES}
    drawn = {codes: recipe.blocks[0].local.codes.distribution for codes, recipe in kinds.items()}
    assert drawn == CODES


@pytest.mark.full
def test_measured_bytes_are_the_planned_ones_and_bits_are_the_same():
    record = json.loads(RESULTS.read_text(encoding="utf-8"))
    rows = [*record["sizes"]["rows"], *record["digits"]["rows"], *record["digits"]["boards"]]
    assert {row["board"] for row in rows} == set(edge.emulated.BOARDS)
    for row in rows:
        case = edge_nets.Case(*(row[k] for k in ("net", "rule", "codes", "batch", "optimizer")))
        planned = layout(case.recipe()).ram_bytes
        assert row["placed_bytes"] == row["ram_bytes"] == planned, case
        assert row["same_bits_as_this_machine"]
    text = edge.table(record)
    assert all(name in text for name in (*edge_nets.NETS, "ridge", "backprop", "Cortex-M0"))


@pytest.mark.full
@pytest.mark.skipif(bool(emulated.missing()), reason=str(emulated.missing()))
def test_a_rival_is_measured_as_our_own_arms_are(tmp_path):
    net, arm = "64-32-10", "backprop"
    folder = tmp_path / "ours again" / edge_table.folder_name(net)
    folder.mkdir(parents=True)
    for name, text in sources(edge_passes.recipe_of(net, arm, 0)).items():
        (folder / name).write_text(text)
    (rival,) = edge_table.rivals(tmp_path)
    assert rival | {"arm": arm} == edge_table.ours(net, arm)
    assert rival["ram_bytes"] < 10_300 and rival["step_instructions"] < 21_000


@pytest.mark.skipif(compiler() is None, reason="no C compiler")
def test_the_program_of_passes_learns_what_python_does():
    torch.manual_seed(0)
    x = torch.randn(120, 64)
    y = x[:, :10].argmax(1)
    counts = edge_passes.right("64-32-10", "backprop", 0, ((x, y), (x, y)), rates=(0.0001, 0.03))
    assert counts.shape == (2, 3)
    assert counts[0, 0] < 0.5 and counts[1, 2] == 1.0
