"""Periodic codes: against the published formula, by autograd."""

import pytest
import torch
from torch.nn import functional as F

import tpsgd
from tpsgd import TpsgdError, check_rule, rules
from tpsgd.maths.random import Key
from tpsgd.objectives import Site

INDEX = torch.tensor([0, 1, 2, 1, 0])


def published(y, s, classes, temperature, side):
    """Formula (3) of the paper as its program computes it."""
    f = (F.adaptive_avg_pool2d(y, side) if y.dim() == 4 else y).flatten(1)
    frequencies = torch.linspace(50, 512, classes, dtype=torch.float64)[:, None]
    basis = torch.sin(frequencies * torch.arange(f.shape[1], dtype=torch.float64))
    return F.cross_entropy(F.normalize(f, dim=1) @ basis.T / temperature, s)


@pytest.mark.parametrize("temperature", [1.0, 0.2])
@pytest.mark.parametrize("shape", [(7,), (3, 8, 8), (3, 4, 4)])
def test_it_is_the_published_loss_and_its_derivative(shape, temperature):
    g = torch.Generator().manual_seed(0)
    y = torch.randn(5, *shape, generator=g, dtype=torch.float64).requires_grad_()
    site = Site(shape, 3, Key(1), len(shape) > 1, dtype=torch.float64)
    objective = rules.lls(temperature).objective(site)
    wanted = published(y, INDEX, 3, temperature, 4)
    wanted.backward()
    local = objective(y.detach(), INDEX)
    torch.testing.assert_close(local.loss, wanted.detach())
    torch.testing.assert_close(local.dy, y.grad)


def test_it_keeps_the_contract_of_a_rule():
    check_rule(rules.lls())


def test_outputs_of_zero_have_a_derivative():
    site = Site((4,), 3, Key(1), dtype=torch.float64)
    local = rules.lls().objective(site)(torch.zeros(5, 4, dtype=torch.float64), INDEX)
    assert torch.isfinite(local.dy).all()


def test_it_learns():
    x = torch.randn(120, 6, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
    tpsgd.fit(model, (x, y), rule="lls", epochs=30, lr=0.01)
    assert tpsgd.evaluate(model, (x, y)) > 0.85


@pytest.mark.parametrize("wrong", [0, -1.0, float("inf"), "a"])
def test_what_makes_no_sense_is_refused(wrong):
    with pytest.raises(TpsgdError, match="temperature must be a number above 0"):
        rules.lls(wrong)
