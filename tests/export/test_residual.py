"""Blocks that are more than a layer, in C: equal to `fit`, by the byte, and back into the model."""

import re
import shutil
import subprocess
import warnings
from pathlib import Path

import pytest
import torch
from export.joined_nets import MAPS, NETS, Around, Basic, net, seen, stacked
from helpers import with_full
from torch import nn

import tpsgd
from benchmarks import emulated
from tpsgd import rules
from tpsgd.common.errors import TpsgdError
from tpsgd_export.heads.compiled import CompiledHead
from tpsgd_export.heads.source import encoded
from tpsgd_export.read_model import read_model
from tpsgd_export.to_c.check import distances, samples
from tpsgd_export.to_c.compiled import CompiledNet, compiler
from tpsgd_export.to_c.memory import layout
from tpsgd_export.to_c.names import named
from tpsgd_export.to_c.source import sources

pytestmark = [
    pytest.mark.skipif(compiler() is None, reason="no C compiler"),
    pytest.mark.usefixtures("unwatched"),
]
STRICT = ["-std=c99", "-pedantic", "-Wall", "-Wextra", "-Wconversion", "-Wshadow", "-Werror"]
WATCHED = ["-std=c99", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
RULES = {
    "readout": rules.readout(),
    "learned": rules.default(),
    "scaled": rules.readout(True, scale=3.0),
    "l2": rules.tpsgd_l2(),
    "l1": rules.tpsgd_l1(),
}
STEPS = [("sgd", 1), ("sgd", 2), ("momentum", 3), ("adam", 2)]


def recipe_of(name, rule="scaled", **options):
    model, shape, blocks = net(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model, read_model(model, RULES[rule], shape, blocks=blocks, **options)


def compiled(folder: Path, recipe, **options) -> CompiledNet:
    for name, text in sources(recipe).items():
        (folder / name).write_text(text)
    return CompiledNet(folder, **options)


def apart(model, recipe, rule="scaled", texts=None, steps=8, **options):
    texts = texts or sources(recipe)
    return distances(model, recipe, texts, tpsgd.simultaneous, steps, rule=RULES[rule], **options)


CASES = [(name, *step, list(RULES)[i % 3]) for name in NETS for i, step in enumerate(STEPS)]
CASES += [("basic", "sgd", 1, "l2"), ("inverted", "sgd", 1, "l1"), ("separable", "sgd", 3, "l2")]
QUICK = [case for i, case in enumerate(CASES) if i % 4 == i // 4 % 2 or i >= 4 * len(NETS)]


@pytest.mark.parametrize("case", with_full(CASES, [c for c in CASES if c not in QUICK]))
def test_weights_are_those_of_autograd_inside_each_block(case):
    name, optimizer, batch, rule = case
    model, recipe = recipe_of(name, rule, optimizer=optimizer, batch=batch, seed=5)
    distance = apart(model, recipe, rule)
    assert distance.equal, distance
    assert distance.ours < 1e-5 * max(1.0, distance.largest)


def test_the_net_as_one_block_learns_by_backprop(tmp_path):
    model, recipe = recipe_of("whole")
    board, (x, labels) = compiled(tmp_path, recipe), samples(recipe, 9)
    with pytest.raises(TpsgdError, match="other layers, or pass the blocks= of the export"):
        tpsgd.export.read_weights(model, board.save())
    tpsgd.export.read_weights(model, board.save(), blocks=1)  # with its norms folded
    model = model.double()
    learned = [p for name, p in model.named_parameters() if not re.search(r"bn\d|\.1\.", name)]
    learned += [norm.bias for norm in model.modules() if isinstance(norm, nn.BatchNorm2d)]
    for sample, label in zip(x.double().split(1), labels.split(1), strict=True):
        board.step(sample, label, 0.1)
        loss = nn.functional.cross_entropy(model(sample), label)
        with torch.no_grad():
            for p, gradient in zip(learned, torch.autograd.grad(loss, learned), strict=True):
                p -= 0.1 * gradient
    for sample in x.split(1):
        with torch.no_grad():
            logits = model(sample.double())[0].float()
        assert torch.allclose(board.forward(sample), logits, atol=1e-5)


MUTANTS = {
    "an activation before the sum": ("if (TPS_ADDS(b)) z[l] += y", "if (TPS_ADDS(b)) z[l] -= y"),
    "a shortcut without derivative": ("+ k] += d[k];", "+ k] += 0.0f * d[k];"),
    "derivatives of the step before": ("row->clears & 1u; k++)", "row->clears & 4u; k++)"),
    "a shortcut's of the step before": ("row->clears & 2u; k++)", "row->clears & 4u; k++)"),
    "no slope inside": ("dz[i] *= tps_slope(b, y[i]);", "(void)i;"),
    "the first sample alone": ("e += b->pooled)", "e += 0)"),
    "half a block": ("for (i = end; i-- > first;)", "for (i = end; i-- > first + 1;)"),
    "nothing goes back": ("if (!of_x) continue;", "continue;"),
    "the smallest of a pool": ("map[at] > map[largest])", "map[at] < map[largest])"),
    "sums for means": ("d[at] += share;", "d[at] += *error;"),
    "a shortcut that is not there": ("if (b->adds && row->added != b->output)", "if (0)"),
}  # fmt: skip


@pytest.mark.parametrize("mutant", with_full(MUTANTS, list(MUTANTS)[::2]))
def test_a_mutant_does_not_pass(mutant):
    right, wrong = MUTANTS[mutant]
    for name in ("basic", "pooled", "means"):
        model, recipe = recipe_of(name, batch=2)
        texts = sources(recipe)
        if right in texts["tpsgd.h"]:
            texts["tpsgd.h"] = texts["tpsgd.h"].replace(right, wrong)
            if not apart(model, recipe, texts=texts).equal:
                return
    pytest.fail("no net differs from fit")


def test_weights_that_move_before_the_derivative_has_passed_are_noticed():
    model, recipe = recipe_of("basic")
    texts = sources(recipe)
    head, carries, tail = re.split(
        r"(            if \(b->convolution\) tps_carry_filter\(.*?\n            else\n)",
        texts["tpsgd.h"], maxsplit=1, flags=re.DOTALL,
    )  # fmt: skip
    moves = "tps_move_filter(b, r, weights, unit, x, dz, net->batch);\n"
    early = carries.replace("if (b->conv", f"if (b->convolution) {moves}            if (b->conv")
    texts["tpsgd.h"] = head + early + tail.replace(f"if (b->convolution) {moves}", "if (0) {}\n", 1)
    assert not apart(model, recipe, texts=texts).equal


@pytest.mark.parametrize("name", with_full(NETS, ["zoo", "halves", "cells", "means"]))
def test_planned_bytes_are_those_of_the_structs(name, tmp_path):
    for options in ({}, {"optimizer": "adam", "batch": 3, "spare": 2}):
        _, recipe = recipe_of(name, "learned", **options)
        assert compiled(tmp_path, recipe).ram == layout(recipe).ram_bytes


@pytest.mark.parametrize("name", with_full(NETS, ["zoo", "halves", "cells"]))
def test_outputs_are_the_models_whatever_lay_in_the_arena(name, tmp_path):
    model, recipe = recipe_of(name)
    board, (x, labels) = compiled(tmp_path, recipe), samples(recipe, 6)
    clean = compiled(tmp_path, recipe)
    for i, sample in enumerate(x):
        board.arena[:] = b"\xff\x7f\xc0\x7f" * (len(board.arena) // 4)  # no numbers
        clean.arena[:] = bytes(len(clean.arena))
        with torch.no_grad():
            assert torch.allclose(board.forward(sample), model(sample[None])[0], atol=1e-4) or i
        assert torch.equal(board.forward(sample), clean.forward(sample))
        board.arena[:] = b"\xff\x7f\xc0\x7f" * (len(board.arena) // 4)
        losses = [each.step(sample, labels[i : i + 1], 0.02) for each in (board, clean)]
        assert torch.equal(*losses) and torch.equal(board.weights, clean.weights)


@pytest.mark.parametrize("name", with_full(["inverted", "pooled"], ["pooled"]))
def test_every_compiler_and_level_gives_the_same_bits(name, tmp_path):
    _, recipe = recipe_of(name, "learned", optimizer="adam", batch=2)
    (x, labels), weights = samples(recipe, 10), []
    builds = [(["gcc"], ("-O0",)), (["gcc"], ("-O3", "-march=native", "-std=gnu11"))]
    builds += [(["clang"], ("-O2",))] if shutil.which("clang") else []
    for command, flags in builds:
        machine = compiled(tmp_path, recipe, command=command, flags=flags)
        for batch, label in zip(x.split(2), labels.split(2), strict=True):
            machine.step(batch, label, 0.01)
        weights.append(machine.weights)
    assert all(torch.equal(weights[0], other) for other in weights[1:])


@pytest.mark.parametrize("name", with_full(["basic", "means"], ["means"]))
def test_no_compiler_and_no_sanitizer_complains(name, tmp_path):
    model, recipe = recipe_of(name, "learned", batch=2)
    for text, content in named(sources(recipe), "gait").items():
        (tmp_path / text).write_text(content)
    for flags in (STRICT, ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-x", "c++"]):
        command = ["gcc", "-O2", *flags, "-c", "gait.c", "-o", "gait.o"]
        subprocess.run(command, cwd=tmp_path, check=True)
    own = re.findall(r"^static const \w+ \**(\w+)", (tmp_path / "gait.c").read_text(), re.MULTILINE)
    assert len(own) > 9 and all(word.startswith("gait_") for word in own)
    assert apart(model, recipe, "learned", flags=WATCHED).equal


PARTS = Path(__file__).parent / "parts.c"


@pytest.mark.parametrize("options", [{}, {"optimizer": "adam", "batch": 3}])
def test_a_step_in_parts_learns_the_same_bits(options, tmp_path):
    tpsgd.export.c(seen(stacked()), tmp_path, shape=MAPS, rule=RULES["scaled"], **options)
    program, sources_ = str(tmp_path / "parts"), [str(tmp_path / "net.c"), str(PARTS)]
    subprocess.run(["gcc", "-O2", f"-I{tmp_path}", *sources_, "-o", program], check=True)
    assert subprocess.run([program], capture_output=True).returncode == 0


@pytest.mark.parametrize("name", ["basic", "inverted", "halves"])
def test_weights_come_back_with_a_new_class_and_norms_become_identities(name, tmp_path):
    model, shape, blocks = net(name)
    options = {"shape": shape, "rule": RULES["learned"], "spare": 1, "blocks": blocks}
    exported = tpsgd.export.c(model, tmp_path, **options, samples=torch.randn(9, *shape))
    assert "run beside tpsgd.fit" in exported.checked
    board = CompiledNet(tmp_path)
    board.add_class()
    for sample, label in zip(torch.randn(8, *shape), range(8), strict=True):
        board.step(sample, [label % 4], 0.02)
    other = seen(Around(Basic(4, 5), channels=5))
    with pytest.raises(TpsgdError, match="other layers"):
        tpsgd.export.read_weights(other, board.save())
    assert tpsgd.export.read_weights(model, board.save(), blocks=blocks) == 4
    with torch.no_grad():
        for sample in torch.randn(5, *shape):
            assert torch.allclose(board.forward(sample), model(sample[None])[0], atol=1e-4)


def frozen_but(model, *learning: nn.Module):
    model.requires_grad_(False)
    for module in learning:
        module.requires_grad_(True)
    return model


@pytest.mark.parametrize("numbers", ["float32", "int8"])
def test_a_frozen_body_is_in_flash_and_what_follows_learns(numbers, tmp_path):
    model, shape, blocks = net("inverted")
    model = frozen_but(model, model.fc)
    sizes = {}
    for name, learning in {"head": [model.fc], "last": [model.fc, model.body[1]]}.items():
        options = {"rule": RULES["scaled"], "shape": shape, "blocks": blocks, "frozen": numbers}
        exported = tpsgd.export.c(frozen_but(model, *learning), tmp_path / name, **options)
        assert "run beside tpsgd.fit" in exported.checked
        sizes[name] = exported.memory
        board, x = CompiledNet(tmp_path / name), torch.randn(shape)
        with torch.no_grad():
            logits = model(x[None])[0]
        error = (board.forward(x) - logits).abs().max()
        assert error < 1e-5 if numbers == "float32" else 0 < error < 0.1 * logits.abs().max()
    learned = sum(p.numel() for p in model.fc.parameters())
    assert sizes["head"].ram["weights"] == 4 * learned < sizes["last"].ram["weights"]
    byte = sizes["head"].flash.get("weights of a byte", 0)
    assert (byte > 0) == (numbers == "int8")


def test_a_head_of_one_pass_reads_a_residual_encoder(tmp_path):
    torch.manual_seed(0)
    encoder = seen(stacked())[:-1]
    exported = tpsgd.export.one_pass(tmp_path, model=encoder, shape=MAPS, classes=3, features=0)
    assert "from ridge regression" in exported.checked
    texts = {path.name: path.read_text() for path in exported.paths}
    head, x = CompiledHead(texts, "head"), torch.randn(50, *MAPS)
    head.learn_all(x.flatten(1).numpy(), (torch.arange(50) % 3).numpy())
    features = encoded(encoder, x)
    assert features.shape == (50, 6) and head.weights.shape[-1] == 7


@pytest.mark.parametrize("blocks", ["layers", 1])
def test_a_residual_net_learns_numbers(blocks, tmp_path):
    model, shape, _ = net("stacked")
    x, celsius = torch.randn(60, *shape), 20 + 5 * torch.randn(60, 3)
    options = {"shape": shape, "rule": rules.tpsgd_l2(), "blocks": blocks, "optimizer": "adam"}
    exported = tpsgd.export.c(model, tmp_path, **options, samples=x, labels=celsius)
    assert "run beside tpsgd.fit" in exported.checked
    board = CompiledNet(tmp_path)
    for sample, label in zip(x, celsius, strict=True):
        board.step(sample, label, 0.003)
    assert tpsgd.export.read_weights(model, board.save(), blocks=blocks) == 3
    with torch.no_grad():
        for sample in x[:5]:
            assert torch.allclose(board.forward(sample), model(sample[None])[0], atol=1e-3)


@pytest.mark.full
@pytest.mark.skipif(bool(emulated.missing()), reason=str(emulated.missing()))
@pytest.mark.parametrize("board", ["Cortex-M0", "Cortex-M4F"])
def test_an_emulated_microcontroller_learns_the_same_bits(board, tmp_path):
    body = seen(nn.Sequential(nn.Unflatten(1, (1, 4, 4)), nn.Conv2d(1, 4, 3, padding=1), nn.ReLU()))
    tail = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)]
    model = nn.Sequential(*body, seen(Basic(4, 4)), seen(Basic(4, 4)), *tail)
    model[3].requires_grad_(False)
    exported = tpsgd.export.c(model, tmp_path, shape=(16,), rule=RULES["scaled"], frozen="int8")
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 17, (20, 16), generator=generator, dtype=torch.uint8)
    y = torch.randint(0, 3, (20,), generator=generator)
    numbers = {"EPOCHS": "2", "RATE": "0.01f", "SCALE": "0.0625f"}
    emulated.write_data(tmp_path, (x, y), (x[:9], y[:9]), **numbers)
    here, there = emulated.on_host(tmp_path), emulated.on_board(tmp_path, board)
    assert there["weights"] == here["weights"] and there["right"] == here["right"]
    assert int(there["placed"]) == int(there["ram"]) == exported.memory.ram_bytes
