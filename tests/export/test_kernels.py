"""The fast kernels of the exported C beside plain ones: the same sums, in the same order."""

import re
import warnings
from pathlib import Path

import pytest
import torch
from helpers import with_full
from torch import nn

from benchmarks import random_nets
from tpsgd import rules
from tpsgd_export.read_model import read_model
from tpsgd_export.to_c.check import samples
from tpsgd_export.to_c.codes import with_binary_codes, with_codes
from tpsgd_export.to_c.compiled import CompiledNet, compiler
from tpsgd_export.to_c.memory import layout
from tpsgd_export.to_c.source import sources

pytestmark = [
    pytest.mark.skipif(compiler() is None, reason="no C compiler"),
    pytest.mark.usefixtures("unwatched"),
]
PLAIN = Path(__file__).with_name("plain.h").read_text()
NET = "/* ---- a net: forward, and one step of learning ---- */"
STEPS = 4
CLOSE = 3e-6  # of the largest weight, after some steps


def compiled(folder: Path, texts: dict[str, str]) -> CompiledNet:
    folder.mkdir()
    for name, text in texts.items():
        (folder / name).write_text(text)
    return CompiledNet(folder, flags=("-std=c99", "-O1", "-ffp-contract=off"))


def plainly(texts: dict[str, str]) -> dict[str, str]:
    """The same net with plain kernels, its blocks in a loop instead of each with its constants."""
    assert NET in texts["tpsgd.h"]
    return texts | {"tpsgd.h": texts["tpsgd.h"].replace(NET, PLAIN + NET)}


def recipe_of(seed: int):
    case = random_nets.draw(seed)
    rule = with_binary_codes(case.rule) if case.codes == "binary" else case.rule
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        recipe = read_model(case.model, rule, case.shape, loss=case.loss, **case.options)
    return with_codes(recipe, case.codes)


@pytest.mark.parametrize("seed", with_full(range(60), range(8, 60)))
def test_fast_kernels_give_the_bits_of_plain_ones(seed, tmp_path):
    recipe = recipe_of(seed)
    texts = sources(recipe)
    fast, plain = compiled(tmp_path / "fast", texts), compiled(tmp_path / "plain", plainly(texts))
    x, labels = samples(recipe, STEPS)
    for sample in x:
        assert torch.equal(fast.forward(sample), plain.forward(sample))
    for batch, label in zip(x.split(recipe.batch), labels.split(recipe.batch), strict=True):
        fast.step(batch, label, 0.003)
        plain.step(batch, label, 0.003)
    apart = (fast.weights - plain.weights).abs().max()
    assert apart <= CLOSE * plain.weights.abs().max()
    for sample in x:
        fast.load(plain.save())
        assert torch.equal(fast.forward(sample), plain.forward(sample))


def test_a_sum_in_another_order_is_noticed(tmp_path):
    recipe = recipe_of(next(s for s in range(60) if len(random_nets.draw(s).shape) == 1))
    texts = sources(recipe)
    backwards = re.sub(
        r"z \+= w\[k\] \* x\[k\]", "z += w[b->inputs - 1 - k] * x[b->inputs - 1 - k]", PLAIN
    )
    assert backwards != PLAIN
    turned = texts | {"tpsgd.h": texts["tpsgd.h"].replace(NET, backwards + NET)}
    fast, other = compiled(tmp_path / "fast", texts), compiled(tmp_path / "other", turned)
    x, _ = samples(recipe, 40)
    assert any(not torch.equal(fast.forward(s), other.forward(s)) for s in x)


@pytest.mark.parametrize("net", ["dense", "maps"])
def test_binary_codes_are_bits_with_the_numbers_of_a_table(net, tmp_path):
    torch.manual_seed(0)
    layers = {
        "dense": [nn.Linear(7, 9), nn.ReLU(), nn.Linear(9, 4)],
        "maps": [nn.Conv1d(1, 5, 2), nn.ReLU(), nn.Flatten(), nn.Linear(30, 4)],
    }[net]
    model, shape = nn.Sequential(*layers), (7,) if net == "dense" else (1, 7)
    rule = with_binary_codes(rules.readout(scale=3.0))
    step = read_model(model, rule, shape)
    recipes = {codes: with_codes(step, codes) for codes in ("binary", "flash", "hash")}
    machines = [compiled(tmp_path / codes, sources(recipe)) for codes, recipe in recipes.items()]
    x, labels = samples(step, 10)
    for sample, label in zip(x, labels, strict=True):
        for machine in machines:
            machine.step(sample, label[None], 0.05)
    bits, table, hashed = (machine.weights for machine in machines)
    assert torch.equal(bits, hashed) and torch.allclose(bits, table, atol=1e-7)
    local = step.blocks[0].local
    numbers = 4 * local.codes.size if local else 0
    words = layout(recipes["binary"]).flash["class codes"] // 4
    assert layout(recipes["flash"]).flash["class codes"] == 4 * numbers
    assert words == -(-numbers // 32)
