"""Nets that learn in integers: C against a twin in Python, against float, and refusals."""

import copy
import json
import math
import re
import shutil
import struct
import subprocess
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from export.integer_twin import EXP2, TANH, Twin
from helpers import with_full
from torch import nn

import tpsgd
import tpsgd_export
from tpsgd import projections, rules
from tpsgd.common.errors import TpsgdError
from tpsgd.maths.random import Key, permutation
from tpsgd_export.integer_records import HEAD, ROW, RecordRow, packed_head, read_integer_record
from tpsgd_export.read_model import read_model
from tpsgd_export.to_c.compiled import CompiledNet
from tpsgd_export.to_c.integer_scales import code_bits, factor, integer_net
from tpsgd_export.to_c.integer_source import integer_source, places, record_head
from tpsgd_export.to_c.source import sources

BINARY = rules.readout(projection=projections.binary())
STRICT = ["-std=c99", "-pedantic", "-Wall", "-Wextra", "-Wconversion", "-Wshadow", "-Werror"]
SANITIZED = [*STRICT, "-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
HARNESS = Path(__file__).with_name("integer_harness.c")
gcc = pytest.mark.skipif(not shutil.which("gcc"), reason="gcc is not installed")
pytestmark = gcc


def model(*layers, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(*layers)


def small(activation=None, inputs=12, classes=3, bias=True):
    activation = activation or nn.LeakyReLU()
    return model(
        nn.Linear(inputs, 7, bias=bias), activation, nn.Linear(7, 5, bias=bias), activation,
        nn.Linear(5, classes, bias=bias),
    )  # fmt: skip


def samples(count=60, inputs=12, classes=3, signed=True, seed=0):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, count)
    centres = rng.normal(size=(classes, inputs))
    x = centres[labels] + 0.5 * rng.normal(size=(count, inputs))
    return torch.tensor(x if signed else np.abs(x), dtype=torch.float32), torch.tensor(labels)


def net_of(net, x, y, numbers, rule=BINARY, **settings):
    return integer_net(read_model(net, rule, x.shape[1:], **settings), x, y, numbers)


def build(net, folder, flags=(*STRICT, "-O2"), compiler="gcc"):
    """The harness around a net, as a program."""
    for name, text in integer_source(net).items():
        (folder / name).write_text(text)
    program = folder / "harness"
    command = [compiler, *flags, f"-I{folder}", folder / "net.c", HARNESS, "-o", program]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return program


def run(net, program, steps, added=0):
    """Statuses, losses, logits and the record after these steps of (x, label, rate, blocks)."""
    folder, blocks = program.parent, len(net.layers)
    rows = [
        x.tobytes() + int(label).to_bytes(2, "little") + rate.to_bytes(2, "little")
        + mask.to_bytes(4, "little") for x, label, rate, mask in steps
    ]  # fmt: skip
    (folder / "in").write_bytes(len(rows).to_bytes(4, "little") + b"".join(rows))
    done = subprocess.run(
        [program, folder / "in", folder / "out", str(added)], capture_output=True, text=True
    )
    assert not done.returncode, done.stderr
    out = (folder / "out").read_bytes()
    size = 4 * (blocks + 1) * len(rows)
    numbers = np.frombuffer(out[:size], "<i4").reshape(-1, blocks + 1)
    end = size + 4 * net.recipe.outputs
    logits = np.frombuffer(out[size:end], "<i4")
    return numbers[:, 0], numbers[:, 1:], logits, out[end:]


def any_steps(net, x, y, count=100, classes=None, seed=1):
    """Samples in turn, with rates from the smallest to the largest and any blocks."""
    rng = np.random.default_rng(seed)
    rates = [1, 37, 655, 655, 512, 2048, 9000, 65535]
    q = net.quantised(x)
    labels = y.numpy() if classes is None else rng.integers(0, classes, len(y))
    return [
        (q[i % len(q)], labels[i % len(q)], int(rng.choice(rates)), int(rng.choice([7, 7, 3, 4])))
        for i in range(count)
    ]


CASES = {
    "leaky": (small(), BINARY, {}, True),
    "relu, bytes from 0": (small(nn.ReLU()), BINARY, {}, False),
    "tanh": (small(nn.Tanh()), BINARY, {}, True),
    "no bias": (small(bias=False), BINARY, {}, True),
    "spare class": (small(), BINARY, {"spare": 2}, True),
    "frozen hidden": (small(), rules.frozen(), {}, True),
    "head alone": (model(nn.Linear(12, 3)), BINARY, {}, True),
    "first layer frozen": (small(), BINARY, {"freeze": True}, True),
}


def case(name, numbers):
    net, rule, settings, signed = CASES[name]
    settings = dict(settings)
    if settings.pop("freeze", False):
        net = small()
        net[0].requires_grad_(False)
    x, y = samples(signed=signed)
    return net_of(net, x, y, numbers, rule, **settings), x, y


def floats_of(twin, i):
    """The weights and the biases of a layer of the twin, as floats."""
    layer = twin.net.layers[i]
    arrays = [(twin.weights[i], layer.weight_point), (twin.biases[i], layer.sum_point)]
    return [(np.array(a) * 2.0**-p).astype(np.float32) for a, p in arrays if a is not None]


@pytest.mark.cover(1)
@pytest.mark.parametrize("numbers", ["int8", "int16"])
@pytest.mark.parametrize("name", with_full(CASES, list(CASES)[::2]))
def test_c_takes_the_steps_of_the_twin_bit_for_bit(name, numbers, tmp_path):
    net, x, y = case(name, numbers)
    added = net.recipe.spare
    steps = any_steps(net, x, y, classes=net.recipe.outputs)
    status, losses, logits, record = run(net, build(net, tmp_path, SANITIZED), steps, added)
    twin = Twin(net)
    twin.classes += added
    for i, (q, label, rate, mask) in enumerate(steps):
        assert twin.step(q, label, rate, mask) == losses[i].tolist(), i
    assert not status.any()
    assert logits.tolist() == twin.forward(steps[-1][0].tolist())
    assert HEAD.unpack_from(record)[-1] == twin.random
    *_, classes, weights = read_integer_record(record)
    assert classes == net.recipe.outputs
    for i, layer in enumerate(net.layers):
        assert (i in weights) == layer.learns
        if layer.learns:
            assert len(weights[i]) == (1 if layer.biases is None else 2)
            for ours, theirs in zip(weights[i], floats_of(twin, i), strict=True):
                assert (ours.numpy() == theirs).all()
            assert (np.array(twin.weights[i]) != layer.weights).any()
    assert (places(net).weight_count < sum(la.weights.size for la in net.layers)) == (
        name in ("frozen hidden", "first layer frozen")
    )


@pytest.mark.full
def test_nearest_rounding_is_that_of_the_twin(tmp_path):
    net, x, y = case("leaky", "int8")
    steps = any_steps(net, x, y, 20)
    record = run(net, build(net, tmp_path, [*SANITIZED, "-DTPS_ROUND_TO_NEAREST"]), steps)[-1]
    twin = Twin(net, nearest=True)
    for step in steps:
        twin.step(*step)
    assert (read_integer_record(record)[-1][0][0].numpy() == floats_of(twin, 0)[0]).all()


@pytest.mark.full
@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_the_bits_are_the_same_with_every_compiler_and_level(compiler, tmp_path):
    if not shutil.which(compiler):
        pytest.skip(f"{compiler} is not installed")
    net, x, y = case("tanh", "int8")
    steps = any_steps(net, x, y, 40)
    outputs = []
    for i, flags in enumerate(([*STRICT, "-O0"], [*STRICT, "-O3"], ["-std=gnu11", "-Ofast"])):
        folder = tmp_path / str(i)
        folder.mkdir()
        outputs.append(run(net, build(net, folder, flags, compiler), steps)[-1])
    reference = tmp_path / "gcc"
    reference.mkdir()
    assert set(outputs) == {run(net, build(net, reference), steps)[-1]}


@pytest.mark.full
def test_extreme_weights_inputs_and_rates_do_not_overflow(tmp_path):
    for numbers in ("int8", "int16"):
        net = case("leaky", numbers)[0]
        layers = tuple(
            replace(
                la,
                weights=np.where(la.weights >= 0, la.limit, -la.limit).astype(np.int32),
                biases=np.where(la.biases >= 0, 2**30 - 1, 1 - 2**30).astype(np.int32),
            )
            for la in net.layers
        )
        net = replace(net, layers=layers)
        steps = [
            (np.full(12, v, np.int8), c, r, 7)
            for v in (-128, 127)
            for c in range(3)
            for r in (65535, 1)
        ]
        folder = tmp_path / numbers
        folder.mkdir()
        _, losses, _, record = run(net, build(net, folder, SANITIZED), steps)
        twin = Twin(net)
        assert [twin.step(*step) for step in steps] == losses.tolist()
        assert HEAD.unpack_from(record)[-1] == twin.random


def test_refused_steps_leave_the_net_as_it_was(tmp_path):
    net, x, _ = case("spare class", "int8")
    program, q = build(net, tmp_path, SANITIZED), net.quantised(x)
    before = run(net, program, [])[-1]
    status, _, _, after = run(
        net, program, [(q[0], 3, 655, 7), (q[0], 65535, 655, 7), (q[0], 0, 0, 7)]
    )
    assert status.tolist() == [3, 3, 2]
    assert after == before
    assert run(net, program, [(q[0], 3, 655, 7)], added=1)[0].tolist() == [0]


def loaded(program, record):
    """Whether the C takes a record."""
    folder = program.parent
    (folder / "record").write_bytes(record)
    command = [program, folder / "in", folder / "out", "0", folder / "record"]
    return {0: True, 7: False}[subprocess.run(command).returncode]


def with_crc(body):
    return body + zlib.crc32(body).to_bytes(4, "little")


def with_word(record, place, value):
    """A record with another number at a place, and a checksum that fits."""
    return with_crc(record[:place] + struct.pack("<I", value) + record[place + 4 : -4])


def state_of(net):
    return {name: p.clone() for name, p in net.state_dict().items()}


def unchanged(net, before):
    after = net.state_dict()
    return after.keys() == before.keys() and all(torch.equal(after[k], before[k]) for k in before)


def learned(name, numbers, folder, added=0):
    """A float model, the program of its integer net and a record that has learned."""
    net, x, y = case(name, numbers)
    program = build(net, folder)
    record = run(net, program, any_steps(net, x, y, 5), added)[-1]
    return copy.deepcopy(CASES[name][0]), net, program, record


@pytest.mark.cover(1)
@pytest.mark.parametrize("numbers", ["int8", "int16"])
@pytest.mark.parametrize("name", ["leaky", "no bias", "frozen hidden", "head alone"])
def test_python_reads_the_record_of_a_device(name, numbers, tmp_path):
    net, x, y = case(name, numbers)
    program = build(net, tmp_path)
    steps = [(q, int(label), 512, 7) for q, label in zip(net.quantised(x), y, strict=True)]
    logits, record = run(net, program, steps)[2:]
    assert record[: HEAD.size - 12] == record_head(net)[: HEAD.size - 12]
    back = copy.deepcopy(CASES[name][0])
    before = state_of(back)
    (tmp_path / "weights.bin").write_bytes(record)
    assert tpsgd.export.read_weights(back, tmp_path / "weights.bin") == 3
    hidden_moved = not torch.equal(back[0].weight, before["0.weight"])
    assert hidden_moved == (name != "frozen hidden")
    x = torch.tensor(steps[-1][0] * 2.0**-net.input_point, dtype=torch.float32)
    theirs = back(x).detach().numpy()
    ours = logits * 2.0 ** -net.layers[-1].sum_point
    assert np.abs(ours - theirs).max() < 0.05 * np.abs(theirs).max()


@pytest.mark.parametrize("numbers", ["int8", "int16"])
def test_a_batch_norm_is_folded_before_anything_is_compared(numbers, tmp_path):
    x, y = samples(200)
    net = model(
        nn.Linear(12, 7), nn.BatchNorm1d(7), nn.LeakyReLU(), nn.Dropout(0.9), nn.Linear(7, 3)
    )
    tpsgd.fit(net, (x, y), rule=BINARY, epochs=5, batch_size=16)
    exported = tpsgd.export.c(
        net, tmp_path / "net", shape=(12,), numbers=numbers, samples=x, labels=y, rule=BINARY
    )
    assert "float32 100.0%" in exported.checked  # without the dropout, which the C has not
    integers = net_of(net, x, y, numbers)
    program = build(integers, tmp_path)
    steps = [(q, int(label), 512, 3) for q, label in zip(integers.quantised(x), y, strict=True)]
    record = run(integers, program, steps)[-1]
    tpsgd.export.read_weights(net, record)
    assert tpsgd.evaluate(net, (x, y)) > 0.95


def test_new_classes_of_a_device_reach_the_model(tmp_path):
    back, _, program, record = learned("spare class", "int8", tmp_path, added=1)
    assert loaded(program, record)
    assert tpsgd.export.read_weights(back, record) == 4 == len(back[-1].weight)
    assert not loaded(program, with_word(record, 16, 2))  # fewer than the model came with
    with pytest.raises(TpsgdError, match="2 classes of at most 5, the model 4 outputs"):
        tpsgd.export.read_weights(back, with_word(record, 16, 2))


def test_a_record_of_another_net_is_refused(tmp_path):
    _, net, program, record = learned("leaky", "int8", tmp_path)
    assert loaded(program, record)
    last = replace(net.layers[-1], weight_point=net.layers[-1].weight_point + 1)
    other = replace(net, layers=(*net.layers[:-1], last))
    assert not loaded(build(other, tmp_path), record)
    for strange in (small(bias=False), small(inputs=13), model(nn.Linear(12, 3))):
        before = state_of(strange)
        with pytest.raises(TpsgdError, match="other layers"):
            tpsgd.export.read_weights(strange, record)
        assert unchanged(strange, before)


@pytest.mark.full
def test_every_flip_of_a_bit_is_refused(tmp_path):
    back, _, _, record = learned("leaky", "int8", tmp_path)
    before = state_of(back)
    for bit in range(8 * len(record)):
        damaged = bytearray(record)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(TpsgdError, match=r"damaged|no record"):
            tpsgd.export.read_weights(back, bytes(damaged))
    for length in range(len(record)):
        with pytest.raises(TpsgdError, match=r"damaged|no record"):
            tpsgd.export.read_weights(back, record[:length])
    assert unchanged(back, before)
    driver = FLIPS.replace("{RECORD", "{" + ", ".join(map(str, record)))
    (tmp_path / "flips.c").write_text(driver)
    command = ["gcc", *SANITIZED, "flips.c", "net.c", "-o", "flips"]
    subprocess.run(command, cwd=tmp_path, check=True)
    assert subprocess.run([tmp_path / "flips"]).returncode == 0


FLIPS = r"""
#include "net.h"
static uint8_t record[NET_RECORD_BYTES] = {RECORD};
static net_state state;
int main(void)
{
    uint32_t bit;
    for (bit = 0; bit < 8 * NET_RECORD_BYTES; bit++) {
        record[bit / 8] = (uint8_t)(record[bit / 8] ^ 1u << bit % 8);
        if (net_load(&state, record) != NET_BAD_RECORD || state.random) return 1;
        record[bit / 8] = (uint8_t)(record[bit / 8] ^ 1u << bit % 8);
    }
    return net_load(&state, record);
}
"""
HUGE = (0, 1, 2, 3, 8, 16, 24, 25, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1)


@pytest.mark.parametrize("name", ["leaky", "frozen hidden"])
def test_forged_numbers_with_a_right_checksum_are_refused(name, tmp_path):
    back, net, program, record = learned(name, "int8", tmp_path)
    assert loaded(program, with_word(record, 0, int.from_bytes(record[:4], "little")))
    before = state_of(back)
    rows = sum(layer.learns for layer in net.layers)
    points = {HEAD.size + ROW.size * i + 4 * k for i in range(rows) for k in (3, 4)}
    for place in range(0, HEAD.size + ROW.size * rows, 4):
        value = int.from_bytes(record[place : place + 4], "little")
        for forged in {*HUGE, value + 1, value ^ 4} - {value}:
            data = with_word(record, place, forged)
            if place == 24 and forged:  # any other state of the random numbers is valid
                continue
            if place in points and forged <= 24:  # Python cannot know the points of the device
                continue
            with pytest.raises(TpsgdError):
                tpsgd.export.read_weights(back, data)
    assert unchanged(back, before)
    for place in (4, 8, 12, 16, 20, 24, *points):
        assert not loaded(program, with_word(record, place, 0 if place == 24 else 23))


def test_records_of_swapped_or_missing_sizes_are_refused(tmp_path):
    back, _, _, record = learned("head alone", "int8", tmp_path)
    before, row = state_of(back), list(ROW.unpack_from(record, HEAD.size))
    assert row[:2] == [12, 3]
    swapped = ROW.pack(3, 12, *row[2:])
    biases = record[: HEAD.size] + swapped + record[HEAD.size + ROW.size : -4] + bytes(36)
    with pytest.raises(TpsgdError, match="other shapes"):
        tpsgd.export.read_weights(back, with_crc(biases))
    with pytest.raises(TpsgdError, match="describes 100 bytes and has 101"):
        tpsgd.export.read_weights(back, with_crc(record[:-4] + b"x"))
    two = with_word(record, 8, 3)[: HEAD.size] + record[HEAD.size :][: ROW.size] * 2
    with pytest.raises(TpsgdError, match="other layers"):
        tpsgd.export.read_weights(back, with_crc(two + bytes(2 * 36 + 2 * 12)))
    assert unchanged(back, before)


def test_outputs_of_a_last_layer_that_does_not_learn_are_limited():
    net, row = small(), RecordRow(12, 7, 1, 0, 3)
    first = zlib.crc32(json.dumps([[tuple(p.shape) for p in net[0].parameters()]]).encode())
    for outputs, sentence in ((3, ""), (1003, ""), (1004, "new classes"), (65535, "new classes")):
        head = packed_head(first, 1, outputs, 8, [row]) + bytes(range(84)) + bytes(28)
        words = with_word(head + bytes(4), 24, 1)
        before = state_of(net)
        if sentence:
            with pytest.raises(TpsgdError, match=sentence):
                tpsgd.export.read_weights(net, with_word(words, 16, outputs))
            assert unchanged(net, before)
        else:
            assert tpsgd.export.read_weights(net, with_word(words, 16, 3)) == 3
            assert (net[0].weight.detach().flatten() == torch.arange(84.0)).all()


def test_the_compiler_checks_the_bytes_of_ram(tmp_path):
    net, _, _ = case("leaky", "int8")
    build(net, tmp_path)
    at = places(net)
    assert at.state_bytes + at.arena_bytes == 4 * 15 + 8 + 136 + 4 * 3 + 2 * 12  # 134 weights
    header = (tmp_path / "net.h").read_text()
    (tmp_path / "net.h").write_text(header.replace("uint32_t classes;", "uint32_t classes, more;"))
    command = ["gcc", "-std=c99", "-c", tmp_path / "net.c", "-o", tmp_path / "net.o"]
    assert b"net_ram_is_as_planned" in subprocess.run(command, capture_output=True).stderr


ROUNDING = r"""
#include <stdint.h>
#include <stdio.h>
#define TPS_WEIGHT int8_t
#define TPS_INPUT int8_t
#include "tpsgd.h"
int main(void)
{
    uint32_t random = 2463534242u;
    int32_t v, i;
    for (v = -2500; v <= 2500; v += 250) {
        double sum = 0;
        for (i = 0; i < 100000; i++) sum += tps_round(v, 10, &random);
        printf("%d %.9f\n", (int)v, sum / 100000);
    }
    return 0;
}
"""


def test_stochastic_rounding_is_right_on_average(tmp_path):
    net, _, _ = case("leaky", "int8")
    (tmp_path / "tpsgd.h").write_text(integer_source(net)["tpsgd.h"])
    (tmp_path / "main.c").write_text(ROUNDING)
    means = {}
    for flag in ("-DSTOCHASTIC", "-DTPS_ROUND_TO_NEAREST"):
        subprocess.run(["gcc", "-O1", flag, "main.c", "-o", "main"], cwd=tmp_path, check=True)
        text = subprocess.run([tmp_path / "main"], capture_output=True, text=True).stdout
        means[flag] = np.array([[float(n) for n in line.split()] for line in text.splitlines()])
    for flag, bound in (("-DSTOCHASTIC", 0.0), ("-DTPS_ROUND_TO_NEAREST", 0.4)):
        v, mean = means[flag].T
        fraction = v / 1024 - np.floor(v / 1024)
        error = np.abs(mean - v / 1024)
        if bound:
            assert error.max() > bound
        else:
            assert (error <= 4.5 * np.sqrt(fraction * (1 - fraction) / 100000) + 1e-9).all()


def test_tables_of_exp_and_tanh_are_those_of_their_formulas():
    text = (Path(tpsgd_export.__file__).parent / "to_c/kernels/integers/layers.h").read_text()
    for name, values in (("tps_exp2_table", EXP2), ("tps_tanh_table", TANH)):
        numbers = text.split(f"{name}[", 1)[1].split("{", 1)[1].split("}", 1)[0]
        assert [int(n) for n in numbers.split(",")] == values


def test_softmax_and_loss_are_close_to_those_of_floats():
    net = case("leaky", "int16")[0]
    twin, rng = Twin(net), np.random.default_rng(0)
    for _ in range(200):
        z = rng.normal(0, rng.choice([0.1, 1, 4]), 5)
        scale = factor(math.log2(math.e) * 2.0 ** (12 - 16))
        e, loss = twin.softmax([round(v * 65536) for v in z], 1, scale)
        p = np.exp(z) / np.exp(z).sum()
        assert np.abs(np.array(e) / 2**15 - (p - np.eye(5)[1])).max() < 3e-4
        assert abs(loss / 4096 + math.log(p[1])) < 0.01 if p[1] > 1e-4 else loss > 3 * 4096


def test_bits_of_codes_are_the_signs_of_the_projection():
    recipe = read_model(small(), BINARY, (12,), seed=5)
    for i, block in enumerate(recipe.blocks[:2]):
        assert block.local is not None
        P = projections.binary()((block.size,), 3, Key(5, i))
        assert (code_bits(block.local.codes) * 2.0 - 1 == P.numpy()).all()


def float_twin(seed=0, scale=3.0):
    """A float net with a fixed gain, its data and its integer net."""
    rule = rules.readout(projection=projections.binary(), scale=scale)
    net = model(nn.Linear(12, 8), nn.LeakyReLU(), nn.Linear(8, 3), seed=seed)
    x, y = samples(count=24, seed=seed)
    return rule, net, x, y


def test_int16_follows_float_over_a_few_steps(tmp_path):
    rule, net, x, y = float_twin()
    integers = net_of(net, x, y, "int16", rule)
    q = integers.quantised(x)
    x = torch.tensor(q * 2.0**-integers.input_point, dtype=torch.float32)  # the same inputs
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    tpsgd.fit(
        net, (x, y), rule=rule, order=tpsgd.simultaneous, optimizer=torch.optim.SGD,
        lr=2.0**-6, epochs=1, batch_size=1, seed=0, progress=False,
    )  # fmt: skip
    order = torch.cat(list(permutation(len(x), Key(0, 0, 0)))).tolist()
    steps = [(q[i], int(y[i]), 1024, 3) for i in order]
    learned_in_c = copy.deepcopy(net)
    tpsgd.export.read_weights(learned_in_c, run(integers, build(integers, tmp_path), steps)[-1])
    weights = learned_in_c.state_dict()
    for name, p in net.named_parameters():
        moved = (p.detach() - before[name]).square().mean().sqrt()
        apart = (p.detach() - weights[name]).square().mean().sqrt()
        assert apart < 0.03 * moved, name


@pytest.mark.filterwarnings("ignore:.* classes have no samples")
def test_int8_moves_as_float_on_average():
    rule, net, x, y = float_twin()
    integers = net_of(net, x, y, "int8", rule)
    q = integers.quantised(x)
    with torch.no_grad():  # the weights that int8 can hold
        for layer, module in zip(integers.layers, (net[0], net[2]), strict=True):
            module.weight.copy_(torch.tensor(layer.weights * 2.0**-layer.weight_point))
            module.bias.copy_(torch.tensor(layer.biases * 2.0**-layer.sum_point))
    one = torch.tensor(q[:1] * 2.0**-integers.input_point, dtype=torch.float32)
    before = [net[0].weight.detach().clone(), net[2].weight.detach().clone()]
    tpsgd.fit(
        net, (one, y[:1]), rule=rule, order=tpsgd.simultaneous, optimizer=torch.optim.SGD,
        lr=2.0**-5, epochs=1, batch_size=1, progress=False,
    )  # fmt: skip
    sums, runs = [0.0, 0.0], 1500
    for seed in range(runs):
        twin = Twin(integers)
        twin.random = seed * 2654435761 % 2**32 or 1
        for _ in range(10):
            twin.xorshift()  # seeds that are small numbers
        twin.step(q[0], int(y[0]), 2048, 3)
        for i in range(2):
            sums[i] = sums[i] + (np.array(twin.weights[i]) - integers.layers[i].weights)
    for i, module in enumerate((net[0], net[2])):
        unit = 2.0 ** -integers.layers[i].weight_point
        moved = (module.weight.detach() - before[i]).numpy()
        error = sums[i] * unit / runs - moved
        assert np.abs(error).max() < 4.5 * 0.5 * unit / runs**0.5 + 0.02 * np.abs(moved).max()
        assert np.abs(moved).max() > 0.1 * unit


def test_c_quantises_numbers_as_python_does(tmp_path):
    for signed in (True, False):
        x, y = samples(signed=signed)
        net = net_of(model(nn.Linear(12, 3)), x, y, "int8")
        folder = tmp_path / str(signed)
        folder.mkdir()
        for name, text in integer_source(net).items():
            (folder / name).write_text(text)
        rng = np.random.default_rng(0)
        values = rng.normal(0, 3, (500, 12)).astype(np.float32)
        values[0] = [0.5, -0.5, 1.5, -1.5, np.inf, -np.inf, np.nan, 1e30, -1e30, 0, 127.5, 255.4]
        values[1] = values[0] / 2**net.input_point
        (folder / "in").write_bytes(values.tobytes())
        (folder / "main.c").write_text(
            '#include <stdio.h>\n#include "net.h"\nint main(void) { float v[NET_INPUT];'
            " net_input x[NET_INPUT]; while (fread(v, sizeof v, 1, stdin)) {"
            " net_quantise(v, x); fwrite(x, sizeof x, 1, stdout); } return 0; }"
        )
        command = ["gcc", *SANITIZED, "main.c", "net.c", "-o", "main"]
        subprocess.run(command, cwd=folder, check=True)
        with (folder / "in").open("rb") as file:
            out = subprocess.run([folder / "main"], stdin=file, capture_output=True).stdout
        expected = net.quantised(values)
        assert out == expected.tobytes()


@pytest.mark.full
def test_int8_learns_digits_better_than_with_nearest_rounding(tmp_path):
    data = tpsgd.data.load("digits")
    (x, y), (test_x, test_y) = ((x.flatten(1), y) for x, y in (data.train, data.test))
    net = model(nn.Linear(64, 32), nn.LeakyReLU(), nn.Linear(32, 10))
    integers = net_of(net, x, y, "int8")
    q, rate = integers.quantised(x), 512
    order = [i for e in range(5) for i in torch.cat(list(permutation(len(x), Key(0, 0, e))))]
    steps = [(q[i], int(y[i]), rate, 3) for i in order]
    accuracy = {}
    for flag in ("-DSTOCHASTIC", "-DTPS_ROUND_TO_NEAREST"):
        program = build(integers, tmp_path, ["-O2", flag])
        tpsgd.export.read_weights(net, run(integers, program, steps)[-1])
        accuracy[flag] = tpsgd.evaluate(net, (test_x, test_y))
    assert accuracy["-DSTOCHASTIC"] > 0.9
    assert accuracy["-DTPS_ROUND_TO_NEAREST"] < accuracy["-DSTOCHASTIC"] - 0.05


def refused(match, net=None, rule=BINARY, shape=(12,), numbers="int8", x=None, y=None, **settings):
    a, b = samples()
    recipe = read_model(net or small(), rule, shape, **settings)
    with pytest.raises(TpsgdError, match=match):
        integer_net(recipe, a if x is None else x, b if y is None else y, numbers)


@pytest.mark.filterwarnings("ignore:.*without bound")
def test_what_integers_cannot_do_is_refused_in_one_sentence():
    refused("int8 or int16", numbers="int4")
    refused("plain sgd", optimizer="adam")
    refused("plain sgd", batch=2)
    refused("mse needs floats", loss=tpsgd.losses.mse)
    refused("readout with cross_entropy only", rule=rules.tpsgd_l2())
    refused("readout with cross_entropy only", rule=rules.drtp())
    refused("codes of \\+1 and -1", rule=rules.readout())
    refused("fixed codes of", rule=rules.readout(True, projections.binary()))
    refused("sigmoid needs floats", small(nn.Sigmoid()))
    refused("slope", small(nn.LeakyReLU(0.0001)))
    refused("relu6 needs floats", small(nn.ReLU6()))
    recurrent = model(nn.RNN(12, 4, batch_first=True), nn.Linear(4, 3))
    refused("dense layers and convolutions only", recurrent, shape=(5, 12))
    refused("leave 32 bits", model(nn.Linear(70000, 3)), shape=(70000,), x=torch.ones(60, 70000))


def test_calibration_samples_are_checked():
    x, y = samples()
    refused("samples of 12 numbers", x=x[:, :5])
    refused("for each of the samples", y=y[:5])
    refused("not finite", x=x / 0)
    refused("a class from 0 to 2", y=y + 1)
    refused("divide them", x=x * 1e4)


FACE = r"""
#include "net.h"
static net_state state;
static net_arena arena;
int main(void)
{
    const uint16_t labels[1] = {3};
    net_input x[NET_INPUT] = {0};
    int32_t loss[NET_BLOCKS];
    volatile double nothing = 0.0, one = 1.0;
    net_begin(&state);
    if (net_classes(&state) != 3 || NET_ALL_BLOCKS != 7) return 1;
    if (net_step(&state, &arena, x, labels, NET_RATE(0.01), NET_ALL_BLOCKS, loss) != NET_BAD_LABEL)
        return 2;
    if (net_add_class(&state) || net_add_class(&state) || net_add_class(&state) != NET_NO_SPACE)
        return 3;
    if (net_classes(&state) != NET_CLASSES) return 4;
    if (net_step(&state, &arena, x, labels, NET_RATE(0.01), NET_ALL_BLOCKS, loss)) return 5;
    if (NET_RATE(0.01) != 655 || NET_RATE(0.5f) != 32768 || NET_RATE(1e-9) != 0) return 6;
    if (NET_RATE(1.0) != 65535 || NET_RATE(1) != 65535 || NET_RATE(one) != 65535) return 7;
    if (NET_RATE(65534.4 / 65536) != 65534 || NET_RATE(65535.9 / 65536) != 65535) return 8;
    if (NET_RATE(-0.1) || NET_RATE(nothing / nothing)) return 9;
    return 0;
}
"""


def test_the_c_face_is_that_of_floats(tmp_path):
    net = case("spare class", "int8")[0]
    build(net, tmp_path)
    (tmp_path / "face.c").write_text(FACE)
    overflow = "-fsanitize=float-cast-overflow"
    command = ["gcc", *SANITIZED, overflow, "face.c", "net.c", "-o", "face"]
    subprocess.run(command, cwd=tmp_path, check=True)
    assert subprocess.run([tmp_path / "face"]).returncode == 0
    ours, theirs = (s["net.h"] for s in (integer_source(net), sources(net.recipe)))
    errors = re.findall(r"#define NET_(?:OK|NO_\w+|BAD_\w+|DIVERGED) \d+", theirs)
    assert len(errors) == 9 and all(line in ours for line in errors)
    names = set(re.findall(r"\b(?:net_|NET_)\w+", theirs))
    assert names - set(re.findall(r"\b(?:net_|NET_)\w+", ours)) == set()


def test_the_compiled_net_of_floats_refuses_integers(tmp_path):
    build(case("leaky", "int8")[0], tmp_path)
    with pytest.raises(TpsgdError, match="net of integers"):
        CompiledNet(tmp_path)


def test_codes_in_flash_or_by_a_hash_are_refused_with_integers(tmp_path):
    x, y = samples()
    for codes in ("flash", "hash"):
        with pytest.raises(TpsgdError, match=f"codes='{codes}' is for floats: int8"):
            tpsgd.export.c(
                small(), tmp_path / "net", shape=(12,), samples=x, labels=y, numbers="int8",
                codes=codes,
            )  # fmt: skip
    assert not (tmp_path / "net").exists()


@pytest.mark.full
def test_the_program_needs_no_library(tmp_path):
    net, _, _ = case("tanh", "int16")
    build(net, tmp_path)
    command = ["gcc", "-std=c99", "-O3", "-ffreestanding", "-c", "net.c", "-o", "net.o"]
    subprocess.run(command, cwd=tmp_path, check=True)
    undefined = subprocess.run(["nm", "-u", "net.o"], cwd=tmp_path, capture_output=True, text=True)
    assert set(undefined.stdout.split()) <= {"U", "_GLOBAL_OFFSET_TABLE_"}


@pytest.mark.parametrize("numbers", ["int8", "int16"])
def test_the_limit_of_weights_keeps_every_sum_within_30_bits(numbers):
    x, y = samples(inputs=900)
    net = net_of(model(nn.Linear(900, 300), nn.ReLU(), nn.Linear(300, 3)), x, y, numbers)
    for layer, largest_input in zip(net.layers, (128, 2047), strict=True):
        assert np.abs(layer.weights).max() <= layer.limit
        assert (layer.limit + 1) * layer.inputs * largest_input < 2**30
    assert net.layers[0].limit == (127 if numbers == "int8" else (2**30 - 1) // (900 * 128) - 1)


def test_the_size_of_codes_is_in_the_gain():
    (x, y), net = samples(), small()
    gains = [
        net_of(net, x, y, "int8", rules.readout(projection=projections.binary(std))).layers[0].gain
        for std in (1.0, 0.5)
    ]
    assert gains[1].mantissa == gains[0].mantissa and gains[1].point == gains[0].point + 1
