"""Convolutions of integers: outputs to the bit, steps in the mean over seeds, records, accuracy."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from export.integer_twin import tanh11
from export.test_integers import SANITIZED, build, run
from helpers import with_full
from torch import nn
from torch.nn import functional

import tpsgd
from tpsgd import rules
from tpsgd.common.errors import TpsgdError
from tpsgd.projections import binary
from tpsgd_export.read_model import read_model
from tpsgd_export.recipe import Convolution
from tpsgd_export.to_c.compiled import run_program
from tpsgd_export.to_c.integer_scales import integer_net
from tpsgd_export.to_c.integer_source import integer_layout, integer_source, places

pytestmark = [
    pytest.mark.skipif(shutil.which("cc") is None, reason="no cc"),
    pytest.mark.usefixtures("unwatched"),
]
SEEDS, RATE = 600, 400  # of 65,536


def nets(name: str) -> tuple[nn.Module, tuple[int, ...]]:
    torch.manual_seed(1)
    if name == "strides":
        first = nn.Conv2d(2, 4, (3, 2), (2, 1), (1, 0), (1, 2), groups=2)
        return nn.Sequential(
            first, nn.LeakyReLU(0.1), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 3)
        ), (2, 7, 6)  # fmt: skip
    if name == "signals":
        return nn.Sequential(
            nn.Conv1d(3, 5, 4, bias=False), nn.Tanh(), nn.AvgPool1d(3), nn.Flatten(),
            nn.Linear(25, 3),
        ), (3, 20)  # fmt: skip
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 6, 3, groups=6), nn.LeakyReLU(),
        nn.Conv2d(6, 4, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3),
    ), (1, 6, 6)  # fmt: skip


NETS = ("strides", "signals", "depthwise")


def samples(shape: tuple[int, ...], signed: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(60, *shape, generator=torch.Generator().manual_seed(2))
    return (x if signed else x.abs()), torch.arange(60) % 3


def of(name: str, numbers: str = "int8"):
    model, shape = nets(name)
    recipe = read_model(model, rules.readout(projection=binary()), shape)
    x, y = samples(shape, name != "depthwise")
    return integer_net(recipe, x, y, numbers, rate=2.0**-7), (x, y), model


def outputs(net, x: np.ndarray) -> list[np.ndarray]:
    """Outputs of all layers in Python's integers, before their pools; the last: logits."""
    each, y = [], torch.tensor(net.quantised(x).astype(np.int64))
    for layer in net.layers:
        block = layer.block
        W = torch.tensor(layer.weights.astype(np.int64))
        b = None if layer.biases is None else torch.tensor(layer.biases.astype(np.int64))
        c = block.layer
        if isinstance(c, Convolution):
            W = W.view(c.filters, -1, *c.kernel)
            b = None if b is None else b.double()
            z = functional.conv2d(
                y.view(-1, c.channels, *c.size).double(), W.double(), b, c.stride, c.padding,
                c.dilation, c.groups,
            ).long()  # fmt: skip
        else:
            z = y @ W.view(layer.outputs, -1).T + (0 if b is None else b)
        if layer is net.layers[-1]:
            return [*each, z.numpy()]
        each.append(activated(layer, z.numpy()))
        y = torch.tensor(each[-1])
        for pool in block.pools:
            f = y.double()
            if pool.kind == "max":
                f = functional.max_pool2d(f, pool.kernel, pool.stride)
            else:
                kernel, stride = (
                    (pool.kernel, pool.stride) if pool.kind == "mean" else (pool.size, None)
                )
                f = functional.avg_pool2d(f, kernel, stride, divisor_override=1)
                f = (f / np.prod(kernel)).trunc()
            y = f.long()
        y = y.flatten(1)
    raise AssertionError


def activated(layer, z: np.ndarray) -> np.ndarray:
    shift = layer.sum_point - layer.output_point
    if layer.activation == 2:
        y = np.vectorize(lambda v: tanh11(int(v), layer.sum_point))(z)
    else:
        above = (z + (1 << shift >> 1)) >> shift
        below = (np.maximum(z >> shift, -65535) * layer.slope.mantissa) >> layer.slope.point
        y = np.where(z < 0, below, above)
    return np.clip(y, -2047, 2047)


FORWARD = """
#include <stdio.h>
#include "net.h"
static net_state state; static net_arena arena; static net_input x[NET_INPUT];
static int32_t logits[NET_CLASSES];
int main(int count, char **files) {
    FILE *in = fopen(files[count - 2], "rb"), *out = fopen(files[count - 1], "wb");
    net_begin(&state);
    while (fread(x, sizeof x, 1, in) == 1) {
        if (net_forward(&state, &arena, x, logits)) return 100;
        fwrite(logits, sizeof logits, 1, out);
    }
    return fclose(out);
}
"""


@pytest.mark.parametrize("name", with_full(NETS, ["signals"]))
def test_logits_are_those_of_pythons_integers(name):
    net, (x, _), _ = of(name)
    written = run_program(integer_source(net), FORWARD, net.quantised(x).tobytes())
    ours = np.frombuffer(written, np.int32).reshape(len(x), -1)
    assert np.array_equal(ours, outputs(net, x.numpy())[-1]) and len(np.unique(ours)) > 30


@pytest.mark.parametrize("name", with_full(NETS, ["signals", "depthwise"]))
def test_a_step_is_that_of_autograd_in_the_mean(name):
    net, (x, y), model = of(name)
    layer, number = net.layers[0], 5
    y[number] = int(outputs(net, x[number : number + 1].numpy())[-1].argmin())
    content = net.quantised(x[number : number + 1]).tobytes() + np.uint16(y[number]).tobytes()
    defined = f"#define SEEDS {SEEDS}\n#define RATE {RATE}\n"
    main = defined + (Path(__file__).parent / "mean_step.c").read_text()
    moved = np.frombuffer(run_program(integer_source(net), main, content))
    count, of_all = layer.weights.size, places(net)
    weights = moved[:count] / 2.0**layer.weight_point
    W = torch.tensor(np.asarray(layer.weights) / 2.0**layer.weight_point).view_as(
        next(model.parameters())
    )
    W = W.float().requires_grad_(True)
    b = None
    if layer.biases is not None:
        b = torch.tensor(layer.biases / 2.0**layer.sum_point).float().requires_grad_(True)
    block = layer.block
    c, local, codes = block.layer, block.local, layer.codes
    assert isinstance(c, Convolution) and local is not None and codes is not None
    units = np.asarray(net.quantised(x[number : number + 1]), np.float32)
    sample = torch.tensor(units / np.float32(2.0**net.input_point))
    z = functional.conv2d(
        sample.view(1, c.channels, *c.size), W.view(c.filters, -1, *c.kernel), b, c.stride,
        c.padding, c.dilation, c.groups,
    )  # fmt: skip
    maps = z.tanh() if block.activation == "tanh" else functional.leaky_relu(z, block.slope)
    features = functional.adaptive_avg_pool2d(maps, local.grid) if local.grid else maps
    signs = torch.tensor(codes.astype(np.float32) * 2 - 1)
    gain = layer.log_gain.mantissa / 2.0**layer.log_gain.point / np.log2(np.e) / 2.0**12
    logits = gain * 2.0**layer.output_point * features.flatten(1) @ signs.T
    functional.cross_entropy(logits, y[number : number + 1]).backward()
    assert W.grad is not None
    expected = -RATE / 65536 * W.grad.flatten().numpy()
    spread = np.abs(expected).max()
    assert spread * 2.0**layer.weight_point > 0.2  # units of a weight
    assert np.abs(weights - expected).max() < 0.03 * spread + 0.1 / 2.0**layer.weight_point
    if b is not None and b.grad is not None:
        biases = moved[of_all.weight_count :][: len(b)] / 2.0**layer.sum_point
        expected = -RATE / 65536 * b.grad.numpy()
        assert np.abs(biases - expected).max() < 0.03 * np.abs(expected).max()


@pytest.mark.parametrize("name", NETS)
def test_steps_have_no_undefined_behaviour(name, tmp_path):
    """A ReLU's slope of 0 has no binary point by which half of it could be shifted."""
    net, (x, y), _ = of(name)
    q = net.quantised(x)
    steps = [(q[i], int(y[i]), 2048, (1 << len(net.layers)) - 1) for i in range(20)]
    status, losses, _, _ = run(net, build(net, tmp_path, SANITIZED), steps)
    assert not status.any() and (losses[:, -1] > 0).all()


def large_maps(size: tuple[int, int], features: int, learns: bool = True):
    """A convolution of single pixels, whose readout has `features` means of its maps."""
    torch.manual_seed(0)
    first = nn.Conv2d(1, 2, 1).requires_grad_(learns)
    model = nn.Sequential(
        first, nn.LeakyReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 2)
    )
    y = torch.arange(4) % 2
    x = torch.randn(4, 1, *size) + y[:, None, None, None]
    rule = rules.readout(projection=binary(), scale=60.0, features=features)
    return integer_net(read_model(model, rule, (1, *size)), x, y, "int8"), x, y


@pytest.mark.parametrize(("size", "features"), [((256, 128), 2), ((256, 256), 8)])
def test_the_largest_maps_that_learn_stay_in_32_bits(size, features, tmp_path):
    net, x, y = large_maps(size, features)
    q = net.quantised(x)
    steps = [(q[i % 4], int(1 - y[i % 4]), 655, 3) for i in range(8)]
    assert run(net, build(net, tmp_path, SANITIZED), steps)[1].any()


@pytest.mark.parametrize(("size", "features"), [((256, 129), 2), ((256, 257), 8)])
def test_larger_maps_are_refused_unless_they_are_frozen(size, features):
    with pytest.raises(TpsgdError, match="does not learn in integers"):
        large_maps(size, features)
    net, *_ = large_maps(size, features, learns=False)
    assert not net.layers[0].learns


@pytest.mark.parametrize("name", with_full(NETS, ["signals", "strides"]))
def test_planned_bytes_and_weights_that_come_back(name, tmp_path):
    net, (x, _), model = of(name)
    text = integer_source(net)["net.h"]
    (ram,) = re.findall(r"NET_RAM_BYTES (\d+)", text)
    assert int(ram) == integer_layout(net).ram_bytes  # the compiler compares it with the structs
    saved = "static uint8_t r[NET_RECORD_BYTES]; net_save(&state, r); fwrite(r, sizeof r, 1, out);"
    main = FORWARD.replace("while (fread", f"{saved} while (0 && fread")
    record = run_program(integer_source(net), main, b"")
    assert tpsgd.export.read_weights(model, record) == 3
    with torch.no_grad():
        close = torch.tensor(outputs(net, x.numpy())[-1]).double() / 2.0 ** net.layers[-1].sum_point
        assert (model(x) - close).abs().max() < 0.1 * close.abs().max()


@pytest.mark.full
def test_a_convolution_of_bytes_learns_digits(tmp_path):
    digits = tpsgd.data.load("digits")
    x, y = (each[:500] for each in digits.train)
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 8, 3, stride=2), nn.LeakyReLU(), nn.Flatten(), nn.Linear(72, 10)]
    exported = tpsgd.export.c(
        nn.Sequential(*layers), tmp_path, shape=(1, 8, 8), rule=rules.readout(scale=4.0), samples=x,
        labels=y, numbers="int8", rate=0.02,
    )  # fmt: skip
    right, floats = map(float, re.findall(r"(\d+\.\d)%", exported.checked))
    assert right > 85 and right > floats - 3
