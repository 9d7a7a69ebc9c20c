"""Least squares with labels of every step or pixel, and with numbers."""

from functools import partial

import pytest
import torch
from torch import nn

import tpsgd
from tpsgd import Place, TpsgdError, ridge, rls, rules

STEPS = torch.randn(40, 5, 6, generator=torch.Generator().manual_seed(0)).double()
PIXELS = torch.randn(30, 2, 6, 6, generator=torch.Generator().manual_seed(1)).double()


def with_gaps(x: torch.Tensor) -> torch.Tensor:
    """Three classes, and some positions without one."""
    return (x > -0.5).long() + (x > 0.5) - 102 * (x > 1.5)


def least_squares(rows: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Weights and bias for the rows that have a class."""
    rows, y = rows.flatten(0, -2), y.flatten()
    rows = torch.cat([rows, torch.ones(len(rows), 1).double()], 1)[y >= 0]
    return torch.linalg.lstsq(rows, torch.eye(3).double()[y[y >= 0]]).solution


@pytest.mark.parametrize("solver", [ridge(0.0), rls(1e-8)], ids=["ridge", "rls"])
def test_every_step_with_a_label_is_an_equation(solver):
    y = with_gaps(STEPS[..., 0])
    assert (y == -100).any()
    model = nn.Sequential(nn.Linear(6, 3)).double()
    run = tpsgd.fit(model, (STEPS, y), optimizer=solver, batch_size=7)
    W = least_squares(STEPS, y)
    torch.testing.assert_close(model[0].weight.T, W[:-1], rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(model[0].bias, W[-1], rtol=1e-6, atol=1e-7)
    if isinstance(solver, type(ridge())):
        errors = (model(STEPS).detach()[y >= 0] - torch.eye(3).double()[y[y >= 0]]).square().sum(1)
        assert run.loss == pytest.approx(float(errors.mean()) / 2, rel=1e-6)


def test_every_pixel_with_a_label_is_an_equation():
    y = with_gaps(PIXELS[:, 0])
    model = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1)).double()
    tpsgd.fit(model, (PIXELS, y), optimizer=ridge(0.0), batch_size=7)
    patches = nn.functional.unfold(PIXELS, 3, padding=1).mT
    W = least_squares(patches, y)
    torch.testing.assert_close(model[0].weight.flatten(1).T, W[:-1], rtol=1e-6, atol=1e-7)


def test_hidden_blocks_are_solved_for_the_labels_of_their_positions():
    y = (PIXELS[:, 0] > 0).long()
    model = nn.Sequential(
        nn.Conv2d(2, 12, 3, padding=1), nn.LeakyReLU(0.2), nn.MaxPool2d(2),
        nn.Conv2d(12, 12, 3, padding=1), nn.LeakyReLU(0.2), nn.Upsample(scale_factor=2),
        nn.Conv2d(12, 2, 1),
    ).double()  # fmt: skip
    before = rules.tpsgd_l2(at=Place.BEFORE)
    run = tpsgd.fit(model, (PIXELS, y), rule=before, optimizer=ridge(), batch_size=7)
    assert [block.learning for block in run.blocks] == ["solved"] * 3
    assert tpsgd.evaluate(model, (PIXELS, y)) > 0.6


@pytest.mark.parametrize("solver", [ridge(0.0), rls(1e-9)], ids=["ridge", "rls"])
def test_numbers_are_solved_in_their_units(solver):
    y = 200 + 30 * STEPS[..., :2]
    for x, labels, outputs in ((STEPS, y, 2), (STEPS, y[..., 0], 1), (STEPS[:, 0], y[:, 0], 2)):
        model = nn.Sequential(nn.Linear(6, outputs)).double()
        tpsgd.fit(model, (x, labels), optimizer=solver, batch_size=7)
        out = model(x).detach()
        torch.testing.assert_close(out, labels.view(out.shape), rtol=1e-5, atol=1e-4)


def test_restarts_with_labels_of_positions_are_solved_one_by_one():
    def make(outputs=3):
        return nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, outputs)).double()

    settings = {"rule": rules.frozen(), "optimizer": ridge(), "restarts": 2}
    with pytest.raises(TpsgdError, match="solved for labels of every position"):
        tpsgd.fit_many(make, (STEPS, with_gaps(STEPS[..., 0])), stacked=True, **settings)
    data = STEPS[:, 0], 50 + 9 * STEPS[:, 0, :1]
    each, together = (
        tpsgd.fit_many(partial(make, 1), data, stacked=stacked, **settings).evaluate(data)
        for stacked in (False, True)
    )
    assert each == pytest.approx(together) and min(each) > 0.3


def test_a_batch_without_any_label_adds_no_equation():
    y = with_gaps(STEPS[..., 0])
    y[7:14] = -100  # a whole batch
    model = nn.Sequential(nn.Linear(6, 3)).double()
    tpsgd.fit(model, (STEPS, y), optimizer=ridge(0.0), batch_size=7)
    W = least_squares(STEPS, y)
    torch.testing.assert_close(model[0].weight.T, W[:-1], rtol=1e-6, atol=1e-7)
    with pytest.raises(TpsgdError, match="no position has a label"):
        none = torch.utils.data.TensorDataset(STEPS, torch.full_like(y, -100))
        tpsgd.fit(model, torch.utils.data.DataLoader(none, 7), optimizer=ridge())


def test_solving_for_some_positions_is_planned():
    y, make = with_gaps(STEPS[..., 0]), partial(nn.Sequential, nn.Linear(6, 3))
    planned = tpsgd.plan(make(), (5, 6), y=y, samples=40, optimizer=ridge(), others=False)
    assert planned.lines[0].peak > 0
    run = tpsgd.fit(make(), (STEPS, y), optimizer=ridge(), memory="1MB")
    assert run.blocks[0].learning == "solved"
