"""The closed-form head against direct solutions, and the penalty that it chooses."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tpsgd
from tpsgd import TpsgdError, ridge, rules
from tpsgd.solvers.ridge import ALPHAS, Moments

torch.manual_seed(0)
X = torch.randn(90, 6, dtype=torch.float64) * torch.tensor([1.0, 3.0, 0.1, 2.0, 1.0, 5.0]) + 7
Y = ((X - 7) @ torch.randn(6, 3, dtype=torch.float64)).argmax(1)


def head(**options):
    return nn.Sequential(nn.Linear(6, 3, **options)).double()


def by_hand(x, y, alpha, bias=True):
    """Centred, then the normal equations."""
    mx, my = (x.mean(0), y.mean(0)) if bias else (0 * x[0], 0 * y[0])
    a, b = x - mx, y - my
    W = torch.linalg.solve(a.T @ a / len(x) + alpha * torch.eye(x.shape[1]).double(), a.T @ b)
    return (W / len(x)).T, my - mx @ (W / len(x))


@pytest.mark.parametrize("alpha", [1e-6, 0.1, 10.0])
@pytest.mark.parametrize("bias", [True, False])
def test_it_is_the_normal_equations(alpha, bias):
    model = head(bias=bias)
    tpsgd.fit(model, (X, Y), optimizer=ridge(alpha), batch_size=20)
    weight, shift = by_hand(X, F.one_hot(Y, 3).double(), alpha, bias)
    torch.testing.assert_close(model[0].weight.detach(), weight, rtol=1e-8, atol=1e-10)
    if bias:
        torch.testing.assert_close(model[0].bias.detach(), shift, rtol=1e-8, atol=1e-8)


def test_the_penalty_is_that_of_generalised_cross_validation():
    """Against the hat matrix, written out."""
    x, y = X[:20], torch.randn(20, 2).double()
    sums = Moments(x, y, True)
    sums.add(x, y)
    a = x - x.mean(0)
    scale = (a.square().sum() / 20 / 6).item()
    best = None
    for alpha in ALPHAS:
        hat = a @ torch.linalg.solve(
            a.T @ a + 20 * alpha * scale * torch.eye(6).double(), a.T
        ) + torch.full((20, 20), 1 / 20, dtype=torch.float64)
        rest = (y - hat @ y).square().sum() / 20
        score = float(rest / (1 - hat.trace() / 20) ** 2)
        best = (score, alpha) if best is None or score < best[0] else best
    weight, _ = sums.solve(None)
    expected, _ = by_hand(x, y, best[1] * scale)
    torch.testing.assert_close(weight, expected, rtol=1e-6, atol=1e-9)


def test_noise_is_shrunk_and_signal_is_not():
    x = torch.randn(60, 50).double()
    y = (x[:, 0] > 0).long()
    new = torch.randn(2000, 50).double()
    shares = []
    for alpha in (1e-12, None):
        model = nn.Sequential(nn.Linear(50, 2)).double()
        tpsgd.fit(model, (x, y), optimizer=ridge(alpha))
        shares.append(tpsgd.evaluate(model, (new, (new[:, 0] > 0).long())))
    assert shares[1] > shares[0]


def test_constant_and_repeated_inputs_and_few_samples():
    for x in (torch.cat([X, X[:, :1], torch.ones(90, 1).double()], 1), X[:4]):
        model = nn.Sequential(nn.Linear(x.shape[1], 3)).double()
        tpsgd.fit(model, (x, torch.arange(len(x)) % 3), optimizer=ridge(), loss=tpsgd.mse)
        assert all(torch.isfinite(p).all() for p in model.parameters())


def test_yes_or_no_answers_are_cut_in_the_middle():
    labels = torch.stack([X[:, 1] > 7, X[:, 3] > 8], 1).double()
    model = nn.Sequential(nn.Linear(6, 2)).double()
    run = tpsgd.fit(model, (X, labels), optimizer=ridge(), loss=tpsgd.bce)
    assert tpsgd.evaluate(model, (X, labels)) > 0.8
    assert run.history[-1].accuracy == pytest.approx(tpsgd.evaluate(model, (X, labels)))


def test_its_passes_and_progress():
    seen = []
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    run = tpsgd.fit(
        model, (X, Y), epochs=3, optimizer=[torch.optim.Adam, ridge()], reuse=False,
        progress=lambda done, total: seen.append((done, total)),
    )  # fmt: skip
    assert seen[-1] == (4 * 90, 4 * 90) and run.sample_passes == 4 * 90
    assert run.forward_passes == 2 * 90
    assert run.settings["optimizer"] == "['Adam', 'ridge()']"


@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": ridge()},  # a block that is not the last
        {"optimizer": [torch.optim.Adam, ridge()], "schedule": tpsgd.simultaneous},
    ],
)
def test_refusals(options):
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    with pytest.raises(TpsgdError, match="solves the last block"):
        tpsgd.fit(model, (X, Y), **options)


def test_more_refusals():
    for last in ([nn.Linear(6, 3), nn.Tanh()], [nn.Linear(6, 3), nn.Softmax(1)]):
        with pytest.raises(TpsgdError, match="solves the last block"):
            tpsgd.fit(nn.Sequential(*last).double(), (X, Y), optimizer=ridge())
    frozen = head()
    frozen[0].bias.requires_grad_(False)
    with pytest.raises(TpsgdError, match="solves the last block"):
        tpsgd.fit(frozen, (X, Y), optimizer=ridge())
    for alpha in (-1.0, float("nan"), float("inf")):
        with pytest.raises(TpsgdError, match="alpha must be a number, 0 or more"):
            ridge(alpha)


def test_two_rates_reach_their_groups():
    x, y = torch.randn(32, 5, 3), torch.arange(32) % 2
    for layer in (tpsgd.Recurrent(3, 4), nn.RNN(3, 4, batch_first=True)):
        model = nn.Sequential(layer, nn.Linear(4, 2))
        before = {k: p.clone() for k, p in model.state_dict().items()}
        rates = [tpsgd.two_rates(x=0.5, h=0.0), torch.optim.Adam]
        tpsgd.fit(model, (x, y), rule=rules.drtp(), optimizer=rates, epochs=1)
        for name, p in model.state_dict().items():
            state = name.endswith(("weight_h", "bias_h")) or "_hh_" in name
            assert torch.equal(before[name], p) == state, name
    with pytest.raises(TpsgdError, match="leave lr out"):
        tpsgd.fit(model, (x, y), optimizer=rates, lr=0.1)
    for bad in (-1.0, float("inf")):
        with pytest.raises(TpsgdError, match="learning rates must be numbers"):
            tpsgd.two_rates(x=bad, h=1.0)
