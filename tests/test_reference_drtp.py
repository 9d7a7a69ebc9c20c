"""DRTP, DFA, sDFA and backprop against the gradients of DRTP's reference program.

One step of plain SGD at rate 1 on the whole batch moves every weight by minus its gradient, so
these tests go through `fit` from end to end. Conventions are mapped here and nowhere else:

- theirs does not divide the projected signal by the batch size: ours times the batch is theirs;
- their DRTP projects +y*, which descends *away* from P y*: their B is our -P;
- their squared error and binary cross-entropy are means over the outputs, ours are sums (and ours
  has the factor 1/2 that makes the derivative y - y*).
"""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import fixed, state
from torch import nn

import tpsgd
from tpsgd import rules

FIXTURES = Path(__file__).parent / "fixtures"
HIDDEN = {"DFA": (rules.dfa, 1), "sDFA": (rules.sdfa, 1), "DRTP": (rules.drtp, -1)}
STEP = partial(torch.optim.SGD, lr=1.0)

# one of their batches happens to lack two classes
pytestmark = pytest.mark.filterwarnings("ignore:2 of 5 classes have no samples")


def mlp_bce():
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(18, 9),
        nn.Tanh(),
        nn.Linear(9, 7),
        nn.Tanh(),
        nn.Linear(7, 4),
        nn.Sigmoid(),
    )


def mlp_ce():
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Sigmoid(), nn.Linear(8, 5))


def cnn_mse():
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1),
        nn.Tanh(),
        nn.MaxPool2d(2),
        nn.Conv2d(3, 4, 3, padding=1),
        nn.Tanh(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16, 6),
        nn.Tanh(),
        nn.Linear(6, 3),
    )


# our loss, and what turns its derivative and value into theirs
CASES = {
    "drtp_mlp_bce": (mlp_bce, tpsgd.bce, 1 / 4),
    "drtp_mlp_ce": (mlp_ce, tpsgd.cross_entropy, 1.0),
    "drtp_cnn_mse": (cnn_mse, tpsgd.mse, 2 / 3),
}


@pytest.fixture(params=CASES)
def case(request):
    """The reference's numbers, its net with its weights, our loss and the factor to theirs."""
    make, loss, factor = CASES[request.param]
    numbers = {
        k: torch.from_numpy(v) for k, v in np.load(FIXTURES / f"{request.param}.npz").items()
    }
    model = make().double()
    layers = [m for m in model if hasattr(m, "weight")]
    with torch.no_grad():
        for i, layer in enumerate(layers):
            layer.weight.copy_(numbers[f"{i}.weight"])
            layer.bias.copy_(numbers[f"{i}.bias"])
    return numbers, model, layers, loss, factor


def gradients(layers, numbers, train):
    """Minus the steps that `train` takes at rate 1, per layer: (weight, bias)."""
    before = [state(layer) for layer in layers]
    run = train()
    after = [state(layer) for layer in layers]
    return run, [
        {k: b[k] - a[k] for k in ("weight", "bias")} for b, a in zip(before, after, strict=True)
    ]


def expect(found, numbers, mode, i, factor):
    for kind in ("weight", "bias"):
        theirs = numbers[f"{mode}.{i}.{kind}_grad"]
        assert theirs.abs().max() > 1e-3  # else the comparison below would say nothing
        torch.testing.assert_close(found[kind] * factor, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("mode", HIDDEN)
def test_one_step_is_the_reference_programs(case, mode):
    numbers, model, layers, loss, factor = case
    rule, sign = HIDDEN[mode]
    n, hidden = len(numbers["x"]), range(len(layers) - 1)
    codes = fixed({i: sign * numbers[f"{i}.B"] for i in hidden})
    data = numbers["x"], numbers["labels"]
    run, found = gradients(
        layers,
        numbers,
        lambda: tpsgd.fit(
            model,
            data,
            rule=rule(codes),
            loss=loss,
            order=tpsgd.simultaneous,
            optimizer=STEP,
            epochs=1,
            batch_size=n,
        ),
    )
    for i in hidden:
        expect(found[i], numbers, mode, i, n)
    expect(found[-1], numbers, mode, len(layers) - 1, factor)
    assert run.loss * factor == pytest.approx(float(numbers[f"{mode}.loss"]), rel=1e-6)


def test_drtp_takes_the_same_steps_block_by_block_from_the_same_inputs(case):
    """The first block sees the same inputs under both orders, so its step is the same."""
    numbers, model, layers, loss, _ = case
    codes = fixed({i: -numbers[f"{i}.B"] for i in range(len(layers) - 1)})
    data, n = (numbers["x"], numbers["labels"]), len(numbers["x"])
    _, found = gradients(
        layers,
        numbers,
        lambda: tpsgd.fit(
            model, data, rule=rules.drtp(codes), loss=loss, optimizer=STEP, epochs=1, batch_size=n
        ),
    )
    expect(found[0], numbers, "DRTP", 0, n)


def test_backprop_is_the_reference_programs(case):
    numbers, model, layers, loss, factor = case
    run, found = gradients(
        layers,
        numbers,
        lambda: tpsgd.fit_backprop(
            model,
            (numbers["x"], numbers["labels"]),
            loss=loss,
            optimizer=STEP,
            epochs=1,
            batch_size=len(numbers["x"]),
        ),
    )
    for i in range(len(layers)):
        expect(found[i], numbers, "BP", i, factor)
    assert run.loss * factor == pytest.approx(float(numbers["BP.loss"]), rel=1e-6)


def test_the_opposite_sign_would_be_noticed(case):
    """DRTP with B itself, unmapped, steps the other way: the mapping above is not vacuous."""
    numbers, model, layers, loss, _ = case
    n = len(numbers["x"])
    codes = fixed({i: numbers[f"{i}.B"] for i in range(len(layers) - 1)})
    _, found = gradients(
        layers,
        numbers,
        lambda: tpsgd.fit(
            model,
            (numbers["x"], numbers["labels"]),
            rule=rules.drtp(codes),
            loss=loss,
            order=tpsgd.simultaneous,
            optimizer=STEP,
            epochs=1,
            batch_size=n,
        ),
    )
    expect(found[0], numbers, "DRTP", 0, -n)
