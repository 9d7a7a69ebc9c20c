"""Readouts that learn by plain SGD on a device: their scale."""

import pytest
import torch
from torch import nn

import tpsgd
from tpsgd import rules
from tpsgd.rules import has_default_scale, scale_of
from tpsgd_export.plain_steps import SCALE, with_plain_scales
from tpsgd_export.read_model import read_model
from tpsgd_export.to_c.compiled import CompiledNet, compiler

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
    assert deviation == pytest.approx(min(1.0, SCALE * size))
    assert (scale < SCALE) == (size > 1 / SCALE)


def test_without_samples_the_scale_is_a_constant():
    assert [scale_of(rule) for rule in plain(rules.default())] == [SCALE] * 3
    assert not any(rule.objective.calibrated for rule in plain(rules.default()))


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


def test_a_list_of_rules_changes_where_the_scale_is_the_default():
    given = [rules.readout(), rules.readout(scale=7.0), rules.readout()]
    assert [scale_of(rule) for rule in plain(given)] == [SCALE, 7.0, SCALE]


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
