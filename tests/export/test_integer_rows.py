"""Rows of integer weights: moves without bias, saturation, and the same bits on every processor."""

import importlib
import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from export.test_integer_maps import of as maps_of
from export.test_integers import STRICT, build, case, net_of, run, small
from torch import nn

from benchmarks import emulated
from tpsgd_export.to_c.integer_source import integer_source

pytestmark = pytest.mark.skipif(not shutil.which("gcc"), reason="gcc is not installed")
MAIN = Path(emulated.__file__).with_name("integer_steps.c")
INPUTS = [5, 0, -128, 127, 1, -2, 64, 31, -31, 90, 3, -7, 17]
SEEDS = 40_000

MOVES = """
#include <stdint.h>
#include <stdio.h>
#define TPS_WEIGHT int8_t
#define TPS_INPUT int8_t
#include "tpsgd.h"
static const int8_t x[COUNT] = {INPUTS};
int main(void)
{
    static const int32_t d[CASES] = {D}, shift[CASES] = {SHIFT};
    double sum[CASES][COUNT] = {{0}};
    int i, k, seed;
    for (i = 0; i < CASES; i++) {
        uint32_t random = 2463534242u;
        tps_rows rows = {COUNT, 16, 0, 127};
        rows.shift = shift[i];
        rows.bits = tps_move_by_inputs_bits(x, COUNT);
        for (seed = 0; seed < SEEDS; seed++) {
            int8_t w[COUNT + 1] = {0};
            random = tps_move_by_inputs(w, x, &rows, d + i, 1, random);
            for (k = 0; k < COUNT; k++) sum[i][k] += w[k];
            if (w[COUNT]) return 1;
        }
        for (k = 0; k < COUNT; k++) printf("%.9f ", sum[i][k] / SEEDS);
        printf("\\n");
    }
    return 0;
}
"""


def test_every_move_is_right_on_average(tmp_path):
    """Rare ones that share a random number, and each for itself, by small and large shifts."""
    net, _, _ = case("leaky", "int8")
    (tmp_path / "tpsgd.h").write_text(integer_source(net)["tpsgd.h"])
    D = [1, -3, 30, -100, 127, 400, -5000, 20000, 5, -9]
    shifts = [16] * 8 + [4, 3]
    text = MOVES.replace("{INPUTS}", f"{{{', '.join(map(str, INPUTS))}}}")
    text = text.replace("{D}", f"{{{', '.join(map(str, D))}}}")
    text = text.replace("{SHIFT}", f"{{{', '.join(map(str, shifts))}}}")
    (tmp_path / "main.c").write_text(text)
    sizes = {"COUNT": len(INPUTS), "CASES": len(D), "SEEDS": SEEDS}
    flags = ["-O1", *(f"-D{name}={value}" for name, value in sizes.items())]
    for flag, random in (("-DSTOCHASTIC", True), ("-DTPS_ROUND_TO_NEAREST", False)):
        subprocess.run(["gcc", *flags, flag, "main.c", "-o", "main"], cwd=tmp_path, check=True)
        said = subprocess.run([tmp_path / "main"], capture_output=True, text=True, check=True)
        moved = np.array([[float(v) for v in line.split()] for line in said.stdout.splitlines()])
        exact = -np.outer(np.array(D) / 2.0 ** np.array(shifts), INPUTS)
        exact = np.clip(exact, -128, 127)
        fraction = exact - np.floor(exact)
        spread = np.sqrt(fraction * (1 - fraction) / SEEDS)
        if random:
            assert (np.abs(moved - exact) <= 4.5 * spread + 1e-9).all()
            assert (moved[3] != 0).sum() == 12  # all inputs but the one of 0
        else:
            assert (moved == np.floor(exact + 0.5)).all() and not moved[0].any()


def test_weights_saturate_at_both_ends_of_their_limit(tmp_path):
    net, x, _ = case("no bias", "int8")
    q = net.quantised(x)
    steps = [(q[0], int(label), 65535, 7) for label in (0, 1, 2) for _ in range(40)]
    record = run(net, build(net, tmp_path), steps)[-1]
    weights = np.frombuffer(record[-4 - sum(la.weights.size for la in net.layers) : -4], np.int8)
    assert weights.min() == -128 and weights.max() == 127


def data(folder, net, x, y):
    samples = torch.from_numpy(net.quantised(x).view(np.uint8).reshape(len(x), -1)), y
    numbers = {"EPOCHS": "2", "RATE": "900"}
    emulated.write_data(folder, samples, (samples[0][:5], samples[1][:5]), **numbers)


def nets(name):
    """Nets of integers with their samples; the sizes of rows are no multiples of four."""
    if name in ("strides", "signals", "depthwise"):
        net, (x, y), _ = maps_of(name)
        return net, x, y
    numbers = "int16" if "int16" in name else "int8"
    x = torch.randn(60, 13, generator=torch.Generator().manual_seed(3))
    y = torch.arange(60) % 3
    x = x.abs() if "bytes" in name else x + 0.3 * y[:, None]
    torch.manual_seed(0)
    return net_of(small(nn.Tanh() if "tanh" in name else None, inputs=13), x, y, numbers), x, y


@pytest.mark.full
@pytest.mark.skipif(bool(emulated.missing()), reason=str(emulated.missing()))
@pytest.mark.parametrize(
    "name", ["int8", "int8, bytes from 0, tanh", "int16", "strides", "signals", "depthwise"]
)
def test_microcontrollers_learn_the_bits_of_this_machine(name, tmp_path):
    """With the DSP instructions of a Cortex-M4, by plain C there, and on smaller ones."""
    net, x, y = nets(name)
    for file, text in integer_source(net).items():
        (tmp_path / file).write_text(text)
    data(tmp_path, net, x, y)
    here = emulated.on_host(tmp_path, main=MAIN)["weights"]
    boards = ("Cortex-M4F", "Cortex-M3", "Cortex-M0, counted")
    hashes = [emulated.on_board(tmp_path, b, main=MAIN)["weights"] for b in boards]
    assert "pkhtb" in disassembled(tmp_path, "-mcpu=cortex-m4") or name == "int16"
    source = (tmp_path / "net.c").read_text()
    (tmp_path / "net.c").write_text("#define TPS_PLAIN\n" + source)
    assert "pkhtb" not in disassembled(tmp_path, "-mcpu=cortex-m4")
    hashes.append(emulated.on_board(tmp_path, "Cortex-M4F", main=MAIN)["weights"])
    assert set(hashes) == {here}


def disassembled(folder, *flags):
    command = ["arm-none-eabi-gcc", "-mthumb", *flags, "-Os", "-S", "-o", "-", folder / "net.c"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.full
@pytest.mark.skipif(
    not (shutil.which("powerpc-linux-gnu-gcc") and shutil.which("qemu-ppc")),
    reason="powerpc-linux-gnu-gcc and qemu-ppc are not installed",
)
def test_a_processor_with_the_highest_byte_first_learns_the_same_bits(tmp_path):
    net, x, y = nets("int8, bytes from 0")
    data(tmp_path, net, x, y)
    for file, text in integer_source(net).items():
        (tmp_path / file).write_text(text)
    here = emulated.on_host(tmp_path, main=MAIN)["weights"]
    sources = [tmp_path / "net.c", MAIN, emulated.PROGRAM / "host.c"]
    include = [f"-I{tmp_path}", f"-I{emulated.PROGRAM}"]
    compiler = ["powerpc-linux-gnu-gcc", "-static", "-O2", *include]
    subprocess.run([*compiler, *map(str, sources), "-o", tmp_path / "ppc"], check=True)
    said = subprocess.run(["qemu-ppc", tmp_path / "ppc"], capture_output=True, text=True).stdout
    assert f"weights {here}\n" in said


@pytest.mark.skipif(not shutil.which("g++"), reason="g++ is not installed")
def test_the_kernels_are_cpp_too(tmp_path):
    for name in ("strides", "int8"):
        net, _, _ = nets(name)
        for file, text in integer_source(net).items():
            (tmp_path / file).write_text(text)
        strict = [flag for flag in STRICT if flag != "-std=c99"]
        command = ["g++", "-x", "c++", "-std=c++17", *strict, "-O2", "-c", tmp_path / "net.c"]
        subprocess.run([*command, "-o", tmp_path / "net.o"], check=True)


@pytest.mark.full
@pytest.mark.skipif(bool(emulated.missing()), reason=str(emulated.missing()))
def test_a_counted_step_in_int8_is_no_longer_than_one_in_floats(monkeypatch):
    """The mean of the benchmark's steps of 64-32-10; compilers differ by a few per cent."""
    monkeypatch.syspath_prepend(str(MAIN.parent))
    steps = importlib.import_module("integer_steps")
    net, board = steps.NETS[0], "Cortex-M4F"
    floats = int(steps.of_floats(net, board)["step"])
    assert 0 < int(steps.of_integers(net, "int8", board)["step"]) <= 1.1 * floats


def test_a_measured_step_in_int8_takes_no_more_instructions_than_one_in_floats():
    results = Path(emulated.__file__).parent.parent / "results" / "integer_steps.json"
    rows = json.loads(results.read_text(encoding="utf-8"))["rows"]
    steps = {
        (row["net"], row["numbers"], board): row[board]["step_instructions"]
        for row in rows
        for board in ("m4f", "m3", "m0")
    }
    for (net, numbers, board), count in steps.items():
        if numbers == "int8":
            assert count <= steps[net, "float32", board], (net, board)
            assert count < steps[net, "int16", board]
            assert 10 * count < steps[net, "float32", board] or board == "m4f"
    assert len(steps) == 18
