"""Activations and their derivatives, fresh and in place."""

import pytest
import torch
from torch import nn

from tpsgd.nets.activations import activation, derivative_known

KNOWN = {
    "LeakyReLU": nn.LeakyReLU(),
    "LeakyReLU(0.3)": nn.LeakyReLU(0.3),
    "LeakyReLU(0)": nn.LeakyReLU(0.0),
    "LeakyReLU(-0.2)": nn.LeakyReLU(-0.2),
    "ReLU": nn.ReLU(),
    "Tanh": nn.Tanh(),
    "Sigmoid": nn.Sigmoid(),
    "GELU": nn.GELU(),
    "GELU tanh": nn.GELU(approximate="tanh"),
    "SiLU": nn.SiLU(),
    "Softplus": nn.Softplus(),
    "Softplus(2, 1)": nn.Softplus(beta=2.0, threshold=1.0),
}
Z = torch.linspace(-3, 3, 30, dtype=torch.float64).view(5, 6)
G = torch.linspace(1, -2, 30, dtype=torch.float64).view(5, 6)


@pytest.mark.parametrize("name", KNOWN)
def test_the_derivative_is_autograds(name):
    module, act = KNOWN[name], activation(KNOWN[name])
    z = Z.clone().requires_grad_()
    y = module(z)
    y.backward(G)
    with torch.no_grad():
        torch.testing.assert_close(act.forward(Z), y)
        kept = y if act.from_output else Z
        torch.testing.assert_close(act.backward(G, kept), z.grad)


@pytest.mark.parametrize("name", KNOWN)
def test_in_place_gives_the_same_and_a_fresh_one_overwrites_nothing(name):
    act = activation(KNOWN[name])
    with torch.no_grad():
        y = act.forward(Z.clone())
        kept = y if act.from_output else Z.clone()
        before, g = kept.clone(), G.clone()
        fresh = act.backward(g, kept)
        assert torch.equal(g, G) and torch.equal(kept, before)
        written = act.backward(g, kept, g)
        assert written.data_ptr() == g.data_ptr()
        assert torch.equal(written, fresh) and torch.equal(kept, before)
        if act.forward_ is not None:
            z = Z.clone()
            assert torch.equal(act.forward_(z), y) and torch.equal(z, y)


def test_what_is_known():
    assert derivative_known(None) and activation(None) is None
    assert all(map(derivative_known, KNOWN.values()))


@pytest.mark.parametrize(
    "module", [nn.PReLU(), nn.ELU(), nn.Softmax(1), nn.RReLU(), nn.Linear(1, 1)]
)
def test_other_modules_are_left_to_autograd(module):
    assert not derivative_known(module)


def test_a_subclass_may_compute_anything():
    class Odd(nn.ReLU):
        def forward(self, x):
            return super().forward(x) + x

    assert not derivative_known(Odd())
