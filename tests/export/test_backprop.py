"""Exported backprop, the control of a step on a device: equal to autograd, by the byte."""

from itertools import count

import pytest
import torch
from helpers import with_full
from torch import nn

import tpsgd
from benchmarks import random_nets
from tpsgd.common.errors import TpsgdError
from tpsgd_export.read_model import BACKPROP, read_model
from tpsgd_export.to_c.check import distances, samples
from tpsgd_export.to_c.compiled import CompiledNet, compiler
from tpsgd_export.to_c.memory import layout
from tpsgd_export.to_c.source import sources

pytestmark = [
    pytest.mark.skipif(compiler() is None, reason="no C compiler"),
    pytest.mark.usefixtures("unwatched"),
]
CARRIES = "if (error) tps_add_columns(w, b->inputs, units, y, b->inputs, error);"


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 9), nn.LeakyReLU(), nn.Linear(9, 5), nn.Tanh(), nn.Linear(5, 3)
    )


def without_pools(seed: int):
    """A random net; convolutions of it have no pools, which backprop is not exported with."""
    for s in count(1000 * seed):
        case = random_nets.draw(s)
        if not any("Pool" in type(module).__name__ for module in case.model.modules()):
            return case
    raise AssertionError


def apart(model, recipe, texts=None, steps=6):
    texts = texts or sources(recipe)
    flags = random_nets.FLAGS
    return distances(model, recipe, texts, tpsgd.simultaneous, steps, flags, rule=BACKPROP)


def compiled(folder, recipe) -> CompiledNet:
    for name, text in sources(recipe).items():
        (folder / name).write_text(text)
    return CompiledNet(folder)


@pytest.mark.parametrize("seed", with_full(range(40), range(4, 40)))
def test_weights_are_those_of_autograd(seed):
    case = without_pools(seed)
    for p in case.model.parameters():
        p.requires_grad_(True)
    recipe = read_model(case.model, BACKPROP, case.shape, loss=case.loss, **case.options)
    assert apart(case.model, recipe).equal


def test_weights_that_move_before_the_error_has_passed_are_noticed():
    recipe = read_model(mlp(), BACKPROP, (6,))
    texts = sources(recipe)
    first, second = texts["tpsgd.h"].split(CARRIES)
    moves = "units, x, b->inputs, y);\n"
    head, tail = second.split(f"{moves}}}", 1)
    restored = "    for (unit = 0; unit < units; unit++) y[unit] /= r->lr;\n"
    late = f"{first}{head}{moves}{restored}    {CARRIES}\n}}{tail}"
    assert apart(mlp(), recipe, steps=20).equal
    assert not apart(mlp(), recipe, texts | {"tpsgd.h": late}, steps=20).equal


def test_the_error_passes_a_layer_that_does_not_learn():
    model = mlp()
    model[2].requires_grad_(False)
    assert apart(model, read_model(model, BACKPROP, (6,))).equal


def test_a_block_that_is_left_out_keeps_its_weights_and_hands_the_error_on(tmp_path):
    recipe = read_model(mlp(), BACKPROP, (6,))
    net, (x, labels) = compiled(tmp_path, recipe), samples(recipe, 1)
    before = net.weights
    net.step(x, labels, 0.1, blocks=0b101)
    moved = (net.weights != before).split([6 * 9 + 9, 9 * 5 + 5, 5 * 3 + 3])
    assert moved[0].any() and not moved[1].any() and moved[2].any()


@pytest.mark.parametrize("optimizer, batch", [("sgd", 1), ("adam", 3)])
def test_planned_bytes_are_those_of_the_structs(optimizer, batch, tmp_path):
    recipe = read_model(mlp(), BACKPROP, (6,), optimizer=optimizer, batch=batch)
    memory = layout(recipe)
    assert compiled(tmp_path, recipe).ram == memory.ram_bytes
    outputs, widest, dz = 9 + 5 + 3, 9, 1
    assert memory.arena == batch * (outputs + widest + dz)


def test_it_is_exported_by_its_name(tmp_path):
    exported = tpsgd.export.c(mlp(), tmp_path, shape=(6,), rule="backprop")
    assert "backprop" in (tmp_path / "net.h").read_text()
    assert "outputs of all blocks" in str(exported)


def test_blocks_of_several_layers_point_to_one_block_of_all(tmp_path):
    with pytest.raises(TpsgdError, match=r"take blocks=1 and .*, which is backprop"):
        tpsgd.export.c(mlp(), tmp_path, shape=(6,), rule="backprop", blocks=2)
    exported = tpsgd.export.c(mlp(), tmp_path, shape=(6,), rule="readout", blocks=1)
    assert "run beside tpsgd.fit" in exported.checked


def test_pools_and_sequences_are_refused(tmp_path):
    pools = nn.Sequential(
        nn.Conv1d(1, 2, 3), nn.ReLU(), nn.MaxPool1d(2), nn.Flatten(), nn.Linear(6, 2)
    )
    with pytest.raises(TpsgdError, match="without pools"):
        tpsgd.export.c(pools, tmp_path, shape=(1, 8), rule="backprop")
    cell = nn.Sequential(tpsgd.Recurrent(1, 4), nn.Linear(4, 2))
    with pytest.raises(TpsgdError, match="stores every time step"):
        tpsgd.export.c(cell, tmp_path, shape=(5, 1), rule="backprop")
