"""Nets that learn in integers: C against a twin in Python, against float, and refusals."""

import math
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from export.integer_twin import EXP2, TANH, Twin
from torch import nn

import tpsgd
from tpsgd import projections, rules
from tpsgd.errors import TpsgdError
from tpsgd.export.read_model import read_model
from tpsgd.export.to_c.integer_scales import code_bits, factor, integer_net
from tpsgd.export.to_c.integer_source import integer_source, places, record_weights
from tpsgd.maths.random import Key, permutation

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


@pytest.mark.parametrize("numbers", ["int8", "int16"])
@pytest.mark.parametrize("name", CASES)
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
    assert int.from_bytes(record[8:12], "little") == twin.random
    weights = record_weights(net, record)
    for i, (block, layer) in enumerate(zip(net.recipe.blocks, net.layers, strict=True)):
        if layer.learns:
            expected = np.array(twin.weights[i]) * 2.0**-layer.weight_point
            assert (weights[f"{block.module}.weight"] == expected.astype(np.float32)).all()
            if layer.biases is not None:
                expected = np.array(twin.biases[i]) * 2.0**-layer.sum_point
                assert (weights[f"{block.module}.bias"] == expected.astype(np.float32)).all()
            assert (np.array(twin.weights[i]) != layer.weights).any()
    assert (places(net).weight_count < sum(la.weights.size for la in net.layers)) == (
        name in ("frozen hidden", "first layer frozen")
    )


def test_nearest_rounding_is_that_of_the_twin(tmp_path):
    net, x, y = case("leaky", "int8")
    steps = any_steps(net, x, y, 20)
    record = run(net, build(net, tmp_path, [*SANITIZED, "-DTPS_ROUND_TO_NEAREST"]), steps)[-1]
    twin = Twin(net, nearest=True)
    for step in steps:
        twin.step(*step)
    expected = np.array(twin.weights[0]) * 2.0 ** -net.layers[0].weight_point
    assert (record_weights(net, record)["0.weight"] == expected).all()


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
        assert int.from_bytes(record[8:12], "little") == twin.random


def test_refused_steps_leave_the_net_as_it_was(tmp_path):
    net, x, _ = case("spare class", "int8")
    program, q = build(net, tmp_path, SANITIZED), net.quantised(x)
    before = run(net, program, [])[-1]
    status, _, _, after = run(
        net, program, [(q[0], 3, 655, 7), (q[0], 65535, 655, 7), (q[0], 0, 0, 7)]
    )
    assert status.tolist() == [2, 2, 1]
    assert after == before
    assert run(net, program, [(q[0], 3, 655, 7)], added=1)[0].tolist() == [0]


def test_a_record_that_is_damaged_or_of_another_net_is_refused(tmp_path):
    net, x, y = case("leaky", "int8")
    program = build(net, tmp_path)
    record = run(net, program, any_steps(net, x, y, 3))[-1]
    (tmp_path / "record").write_bytes(record)
    command = [program, tmp_path / "in", tmp_path / "out", "0", tmp_path / "record"]
    assert subprocess.run(command).returncode == 0
    other = replace(net, input_point=net.input_point + 1)
    assert subprocess.run([build(other, tmp_path), *command[1:]]).returncode == 7
    for i in (0, 20, len(record) - 1):
        damaged = bytes(b ^ (k == i) for k, b in enumerate(record))
        with pytest.raises(TpsgdError, match="damaged"):
            record_weights(net, damaged)
    with pytest.raises(TpsgdError, match="bytes"):
        record_weights(net, record[:-1])
    with pytest.raises(TpsgdError, match="another net"):
        record_weights(other, record)


def test_the_compiler_checks_the_bytes_of_ram(tmp_path):
    net, _, _ = case("leaky", "int8")
    build(net, tmp_path)
    at = places(net)
    assert at.state_bytes + at.arena_bytes == 4 * 15 + 8 + 136 + 4 * 3 + 2 * 12  # 134 weights
    header = (tmp_path / "net.h").read_text()
    (tmp_path / "net.h").write_text(header.replace("uint32_t classes;", "uint32_t classes, more;"))
    command = ["gcc", "-std=c99", "-c", tmp_path / "net.c", "-o", tmp_path / "net.o"]
    assert b"net_ram_as_planned" in subprocess.run(command, capture_output=True).stderr


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
    text = (Path(tpsgd.__file__).parent / "export/to_c/kernels/integer.h").read_text()
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
        net, (x, y), rule=rule, schedule=tpsgd.simultaneous, optimizer=torch.optim.SGD,
        lr=2.0**-6, epochs=1, batch_size=1, seed=0, progress=False,
    )  # fmt: skip
    order = torch.cat(list(permutation(len(x), Key(0, 0, 0)))).tolist()
    steps = [(q[i], int(y[i]), 1024, 3) for i in order]
    weights = record_weights(integers, run(integers, build(integers, tmp_path), steps)[-1])
    for name, p in net.named_parameters():
        moved = (p.detach() - before[name]).square().mean().sqrt()
        apart = (p.detach() - torch.tensor(weights[name])).square().mean().sqrt()
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
        net, (one, y[:1]), rule=rule, schedule=tpsgd.simultaneous, optimizer=torch.optim.SGD,
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


def test_int8_learns_digits_and_nearest_rounding_does_not(tmp_path):
    data = tpsgd.data.load("digits")
    (x, y), (test_x, test_y) = ((x.flatten(1), y) for x, y in (data.train, data.test))
    net = model(nn.Linear(64, 32), nn.LeakyReLU(), nn.Linear(32, 10))
    integers = net_of(net, x, y, "int8")
    q, rate = integers.quantised(x), 512
    order = [i for e in range(5) for i in torch.cat(list(permutation(len(x), Key(0, 0, e))))]
    steps = [(q[i], int(y[i]), rate, 3) for i in order]
    accuracy = {}
    for flag in ("-DSTOCHASTIC", "-DTPS_ROUND_TO_NEAREST"):
        weights = record_weights(
            integers, run(integers, build(integers, tmp_path, ["-O2", flag]), steps)[-1]
        )
        net.load_state_dict({name: torch.tensor(w) for name, w in weights.items()})
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
    refused("sigmoid needs floats", small(nn.Sigmoid()))
    refused("slope", small(nn.LeakyReLU(0.0001)))
    convolution = model(nn.Conv1d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(20, 3))
    refused("dense layers only", convolution, shape=(1, 12))
    recurrent = model(nn.RNN(12, 4, batch_first=True), nn.Linear(4, 3))
    refused("dense layers only", recurrent, shape=(5, 12))
    refused("leave 32 bits", model(nn.Linear(70000, 3)), shape=(70000,), x=torch.ones(60, 70000))


def test_calibration_samples_are_checked():
    x, y = samples()
    refused("samples of 12 numbers", x=x[:, :5])
    refused("samples of 12 numbers", y=y[:5])
    refused("not finite", x=x / 0)
    refused("classes from 0 to 2", y=y + 1)
    refused("divide them", x=x * 1e4)


def test_a_name_of_ones_own(tmp_path):
    net, _, _ = case("leaky", "int8")
    sources = integer_source(net, "waves")
    assert set(sources) == {"waves.h", "waves.c", "tpsgd.h"}
    for name, text in sources.items():
        (tmp_path / name).write_text(text)
    command = ["gcc", *STRICT, "-c", tmp_path / "waves.c", "-o", tmp_path / "waves.o"]
    subprocess.run(command, check=True)
    assert "WAVES_RAM_BYTES" in sources["waves.h"] and "NET_" not in sources["waves.c"]
    with pytest.raises(TpsgdError, match="name in C"):
        integer_source(net, "a-b")


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
        assert layer.limit * layer.inputs * largest_input < 2**30
    assert net.layers[0].limit == (127 if numbers == "int8" else (2**30 - 1) // (900 * 128))


def test_the_size_of_codes_is_in_the_gain():
    x, y = samples()
    gains = [
        net_of(small(), x, y, "int8", rules.readout(projection=projections.binary(std)))
        .layers[0]
        .gain
        for std in (1.0, 0.5)
    ]
    assert gains[1].mantissa == gains[0].mantissa and gains[1].point == gains[0].point + 1
