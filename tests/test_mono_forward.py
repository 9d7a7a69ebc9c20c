"""Mono-Forward (Gong, Li & Abdulla 2025) written out, and as the learned readout that it is."""

import pytest
import torch
from helpers import mlp, points, state
from torch.nn import functional as F

import tpsgd
from tpsgd import rules
from tpsgd.maths.random import Key
from tpsgd.projections import uniform

WIDTHS = 6, 8, 5, 3
STEPS, RATE, SEED = 6, 0.02, 3


def projection(units):
    """M as torch initialises a linear layer's weight: uniform up to 1 / sqrt(units)."""
    return uniform((3 * units) ** -0.5)


def as_a_readout(units):
    """The goodness M a of a layer: scale / sqrt(units) is 1, all outputs are read."""
    return rules.readout(True, projection(units), features=units, scale=units**0.5)


def mono_forward(model, x, y, optimizer):
    """Each layer and its M lower the cross-entropy of the goodness a M^T; nothing else passes."""
    layers = [model[:2], model[2:4]]
    M = [
        projection(units)((units,), 3, Key(SEED, block)).double().requires_grad_()
        for block, units in enumerate(WIDTHS[1:-1])
    ]
    steppers = [optimizer([*a.parameters(), m]) for a, m in zip(layers, M, strict=True)]
    last = optimizer(model[4:].parameters())
    for _ in range(STEPS):
        a = x
        for layer, m, stepper in zip(layers, M, steppers, strict=True):
            a = layer(a.detach())
            stepper.zero_grad()
            F.cross_entropy(a @ m.T, y).backward()
            stepper.step()
        last.zero_grad()
        F.cross_entropy(model[4:](a.detach()), y).backward()
        last.step()


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD])
def test_mono_forward_is_the_learned_readout(kind):
    def optimizer(params):
        return kind(params, lr=RATE)

    x, y = points()
    models = [mlp(*WIDTHS).double() for _ in range(2)]
    mono_forward(models[0], x.double(), y, optimizer)
    tpsgd.fit(
        models[1], (x.double(), y), rule=[*map(as_a_readout, WIDTHS[1:-1]), rules.readout()],
        order=tpsgd.simultaneous, optimizer=optimizer, epochs=STEPS, batch_size=len(x),
        seed=SEED,
    )  # fmt: skip
    assert not torch.equal(models[0][0].weight, mlp(*WIDTHS).double()[0].weight)
    for name, weight in state(models[0]).items():
        torch.testing.assert_close(state(models[1])[name], weight, rtol=1e-9, atol=1e-11)
