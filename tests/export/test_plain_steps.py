"""Readouts that learn by plain SGD on a device: their scale."""

import pytest
import torch
from torch import nn

import tpsgd
from tpsgd import projections, rules
from tpsgd.common.errors import TpsgdError
from tpsgd.rules import has_default_scale, scale_of
from tpsgd_export.plain_steps import (
    LEARNED_GAIN,
    LEARNED_SCALE,
    SCALE,
    with_plain_scales,
)
from tpsgd_export.read_model import read_model
from tpsgd_export.to_c.codes import drawn, with_binary_codes
from tpsgd_export.to_c.compiled import CompiledNet, compiler
from tpsgd_export.to_c.memory import CODES, layout

pytestmark = pytest.mark.usefixtures("unwatched")


def net(*widths: int) -> nn.Sequential:
    torch.manual_seed(0)
    first, second, last = widths
    return nn.Sequential(
        nn.Linear(first, second), nn.LeakyReLU(), nn.Linear(second, 16), nn.Tanh(),
        nn.Linear(16, last),
    )  # fmt: skip


def plain(rule, samples=None, **options):
    """The rules after these samples, or after none."""
    recipe = read_model(net(12, 32, 4), rule, (12,), samples=samples, **options)
    return with_plain_scales(rule, recipe)


@pytest.mark.parametrize("factor", [0.01, 1.0, 30.0])
@pytest.mark.parametrize("learned", [False, True])
def test_the_first_logits_are_not_larger_than_one(factor, learned):
    x = factor * torch.randn(64, 12, generator=torch.Generator().manual_seed(1))
    first, *_ = plain(rules.readout(learned), x)
    features = net(12, 32, 4)[:2](x)
    size, scale = float(features.detach().square().mean().sqrt()), scale_of(first) or 0.0
    deviation = scale * size  # of f P' scale / sqrt(d), where P has deviation 1
    largest = LEARNED_SCALE if learned else SCALE
    assert deviation == pytest.approx(min(1.0, largest * size))
    assert (scale < largest) == (size > 1 / largest)


@pytest.mark.parametrize("learned, scale", [(False, SCALE), (True, LEARNED_SCALE)])
def test_without_samples_the_scale_is_a_constant(learned, scale):
    assert [scale_of(rule) for rule in plain(rules.readout(learned))] == [scale] * 3
    assert not any(rule.objective.calibrated for rule in plain(rules.readout(learned)))


def test_learned_codes_have_a_constant_gain_and_begin_so_that_the_scale_is_theirs():
    local = read_model(net(12, 32, 4), plain(rules.default()), (12,)).blocks[0].local
    assert (local.gain, local.codes.size) == (LEARNED_GAIN, 32)
    assert local.gain * local.codes.std == pytest.approx(LEARNED_SCALE / 32**0.5)


def test_the_learned_codes_of_recurrent_blocks_have_the_scale_of_fixed_ones():
    model, rule = nn.Sequential(tpsgd.Recurrent(3, 8), nn.Linear(8, 2)), rules.default()
    chosen = with_plain_scales(rule, read_model(model, rule, (5, 3)))
    local = read_model(model, chosen, (5, 3)).blocks[0].local
    assert (local.gain, local.codes.std) == (pytest.approx(SCALE / 8**0.5), 1.0)


@pytest.mark.parametrize("projection", [projections.binary(), projections.uniform(0.5)])
def test_a_chosen_distribution_of_codes_stays(projection):
    recipe = read_model(net(12, 32, 4), plain(rules.readout(True, projection)), (12,))
    codes = recipe.blocks[0].local.codes
    assert codes.distribution == projection.name
    std = projection.std * LEARNED_SCALE / 32**0.5
    assert codes.std * LEARNED_GAIN == pytest.approx(std)


@pytest.mark.parametrize(
    "rule, options",
    [
        (rules.readout(scale=7.0), {}),
        (rules.readout(scale=7.0, calibrate=True), {}),
        (rules.tpsgd_l2(), {}),
        (rules.default(), {"optimizer": "adam"}),
    ],
)
def test_what_somebody_has_chosen_stays(rule, options):
    assert plain(rule, **options) is rule
    assert has_default_scale(rule) == bool(options)


@pytest.mark.parametrize("learned, scale", [(False, SCALE), (True, LEARNED_SCALE)])
def test_binary_codes_keep_the_default_scale_and_the_deviation(learned, scale):
    rule = with_binary_codes(rules.readout(learned, projections.uniform(0.5)))
    assert [scale_of(each) for each in plain(rule)] == [scale] * 3
    codes = read_model(net(12, 32, 4), rule, (12,)).blocks[0].local.codes
    assert (codes.distribution, codes.std) == ("binary", 0.5)
    assert scale_of(with_binary_codes(rules.readout(scale=7.0))) == 7.0
    with pytest.raises(TpsgdError, match="tpsgd-l2 is no readout"):
        rules.with_projection(rules.tpsgd_l2(), projections.binary)


@pytest.mark.skipif(compiler() is None, reason="no C compiler")
@pytest.mark.parametrize(
    "options", [{"numbers": "int8"}, {"numbers": "int16"}, {"codes": "binary"}]
)
def test_integers_and_binary_codes_learn_with_the_scale_of_plain_steps(options, tmp_path):
    generator = torch.Generator().manual_seed(1)
    y = torch.arange(60) % 4
    x = 0.3 * torch.eye(12)[y] + 0.01 * torch.randn(60, 12, generator=generator)
    texts = []
    for scale in (None, SCALE, 2 * SCALE):
        tpsgd.export.c(
            net(12, 32, 4), tmp_path / str(scale), shape=(12,), rule=rules.readout(scale=scale),
            samples=x, labels=y, rate=0.05, least=0, **options,
        )  # fmt: skip
        texts.append((tmp_path / str(scale) / "net.c").read_text())
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.full
@pytest.mark.skipif(compiler() is None, reason="no C compiler")
def test_a_convolution_of_bytes_is_accepted_with_the_default_scale(tmp_path):
    x, y = (each[:600] for each in tpsgd.data.load("digits").train)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(), nn.Flatten(), nn.Linear(256, 10),
    )  # fmt: skip
    exported = tpsgd.export.c(
        model, tmp_path, shape=(1, 8, 8), rule="readout", numbers="int8", samples=x, labels=y,
        least=0.85,
    )  # fmt: skip
    assert "600 of your samples, 5 epochs at the rate 0.0078125" in exported.checked


def test_a_list_of_rules_changes_where_the_scale_is_the_default():
    each = [rules.readout(), rules.readout(scale=7.0), rules.readout()]
    assert [scale_of(rule) for rule in plain(each)] == [SCALE, 7.0, SCALE]


@pytest.mark.skipif(compiler() is None, reason="no C compiler")
def test_with_the_gain_one_codes_learn_as_the_weights_of_the_output_layer_behind_them(tmp_path):
    """An output layer without a bias that begins with the codes has theirs after every step."""
    torch.manual_seed(0)
    layers = nn.Linear(12, 32), nn.LeakyReLU(), nn.Linear(32, 4, bias=False)
    model, x = nn.Sequential(*layers), torch.randn(20, 12)
    rule = rules.readout(True, scale=LEARNED_SCALE, gain=1.0)
    recipe = read_model(model, rule, (12,))
    P = drawn(recipe.blocks[0].local.codes, 4)
    layers[2].weight.data.copy_(P)
    tpsgd.export.c(model, tmp_path / "net", shape=(12,), rule=rule)
    board, places = CompiledNet(tmp_path / "net"), layout(recipe).lasting
    for i, sample in enumerate(x):
        board.step(sample, [i % 4], 0.1)
    codes, head = (
        board.weights[place : place + 4 * 32].view(4, 32)
        for place in (places[0][CODES], places[1]["weight"])
    )
    torch.testing.assert_close(codes, head, rtol=1e-5, atol=1e-6)
    assert (codes - P).abs().max() > 0.1


@pytest.mark.full
@pytest.mark.skipif(compiler() is None, reason="no C compiler")
def test_the_default_learns_more_of_digits_in_one_pass_than_the_calibrated_one(tmp_path):
    data = tpsgd.data.load("digits")
    (x, y), (x_test, y_test) = ((x.flatten(1), y) for x, y in (data.train, data.test))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    right, calibrated = {}, rules.readout(True, scale=12, calibrate=True)
    for name, rule in {"default": None, "calibrated": calibrated}.items():
        folder = tmp_path / name
        tpsgd.export.c(net(64, 64, 10), folder, shape=(64,), rule=rule, samples=x[:256])
        board = CompiledNet(folder)
        for i in order.tolist():
            board.step(x[i], y[i : i + 1], 0.01)
        guesses = torch.stack([board.forward(sample) for sample in x_test]).argmax(1)
        right[name] = float((guesses == y_test).float().mean())
    assert right["default"] > right["calibrated"] + 0.05, right
