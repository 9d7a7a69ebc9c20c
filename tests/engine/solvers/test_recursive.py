"""Recursive least squares: after every batch, the weights that the batch form gives."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tpsgd
from tpsgd import Place, TpsgdError, ridge, rls, rules
from tpsgd.engine.solvers.least_squares import MomentSums

torch.manual_seed(0)
X = torch.randn(120, 7, dtype=torch.float64) * torch.tensor([1.0, 3.0, 0.1, 2.0, 1.0, 5.0, 1.0]) + 4
Y = ((X - 4) @ torch.randn(7, 3, dtype=torch.float64)).argmax(1)
ONEHOT = F.one_hot(Y, 3).double()
BEFORE = rules.tpsgd_l2(at=Place.BEFORE)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("sizes", [[1] * 120, [5, 50, 5, 60], [120], [7, 8, 105]])
def test_after_every_block_it_is_the_batch_solution(bias, sizes):
    sums, start = MomentSums(X, ONEHOT, bias), 0
    for size in sizes:
        x, y = X[start : start + size], ONEHOT[start : start + size]
        start += size
        sums.add(x, y)
        batch = MomentSums(X, ONEHOT, bias)
        batch.add(X[:start], ONEHOT[:start])
        weight, shift, *_ = batch.solve(0.5 / start)
        found = sums.so_far(0.5)
        torch.testing.assert_close(found[0], weight, rtol=1e-7, atol=1e-9)
        if bias:
            torch.testing.assert_close(found[1], shift, rtol=1e-7, atol=1e-8)


def test_the_printed_recursion():
    """R <- R - R X^T K X R, W <- W + R X^T (Y - X W), without means, written as it stands."""
    R, W = torch.eye(7).double() / 0.2, torch.zeros(7, 3).double()
    sums = MomentSums(X, ONEHOT, False)
    for x, y in zip(X.split(6), ONEHOT.split(6), strict=True):
        K = torch.linalg.inv(torch.eye(6).double() + x @ R @ x.T)
        R = R - R @ x.T @ K @ x @ R
        W = W + R @ x.T @ (y - x @ W)
        sums.add(x, y)
        torch.testing.assert_close(sums.so_far(0.2)[0], W.T, rtol=1e-8, atol=1e-10)
    A = sums.xx + 0.2 * torch.eye(7).double()
    torch.testing.assert_close(torch.linalg.inv(A), R, rtol=1e-8, atol=1e-10)
    held = sum(t.nbytes for t in vars(sums).values() if isinstance(t, torch.Tensor))
    assert held == 8 * (7 * 7 + 7 * 3 + 3 * 3 + 7 + 3)  # whatever it was given


@pytest.mark.parametrize("batch", [8, 64])
def test_dependent_inputs_do_not_let_errors_grow(batch):
    """40 inputs of rank 20, as large as pixels, many rows: the printed recursion fails here."""
    torch.manual_seed(0)
    x = (torch.randn(20_000, 20).double() @ torch.randn(20, 40).double()) * 255
    y = (x @ torch.randn(40, 3).double() > 0).double()
    sums = MomentSums(x, y, True)
    for a, b in zip(x.split(batch), y.split(batch), strict=True):
        sums.add(a, b)
    weight, shift = sums.so_far(1e-3)
    all_at_once = MomentSums(x, y, True)
    all_at_once.add(x, y)
    expected, other, *_ = all_at_once.solve(1e-3 / 20_000)
    torch.testing.assert_close(x @ weight.T + shift, x @ expected.T + other, rtol=0, atol=1e-3)


@pytest.mark.parametrize("batch_size", [1, 9, 200])
def test_every_block_of_a_net_as_ridge_solves_it(batch_size):
    """LM-KARnet in one batch and by recursion: the same net."""
    nets = []
    for solver in (ridge(0.3 / 120), rls(0.3)):
        torch.manual_seed(1)
        net = nn.Sequential(
            nn.Linear(7, 9), nn.LeakyReLU(), nn.Linear(9, 5), nn.Tanh(), nn.Linear(5, 3)
        )
        tpsgd.fit(net.double(), (X, Y), rule=BEFORE, optimizer=solver, batch_size=batch_size)
        nets.append(net)
    for p, q in zip(*(net.parameters() for net in nets), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-8)


def test_convolutions_too():
    x, y = torch.randn(50, 2, 5, 5).double(), torch.arange(50) % 3
    nets = []
    for solver in (ridge(0.3 / (50 * 9)), rls(0.3)):
        torch.manual_seed(1)
        net = nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.LeakyReLU(), nn.Flatten(), nn.Linear(36, 3)
        ).double()
        tpsgd.fit(net, (x, y), rule=BEFORE, optimizer=[solver, ridge(1e-3)], batch_size=7)
        nets.append(net)
    for p, q in zip(*(net.parameters() for net in nets), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-8)


def test_stacked_restarts():
    def make():
        return nn.Sequential(nn.Linear(7, 9), nn.LeakyReLU(), nn.Linear(9, 3)).double()

    options = {"rule": BEFORE, "optimizer": rls(), "restarts": 2, "batch_size": 32}
    one = tpsgd.fit_many(make, (X, Y), stacked=False, **options)
    many = tpsgd.fit_many(make, (X, Y), stacked=True, **options)
    for a, b in zip(one.models, many.models, strict=True):
        for p, q in zip(a.parameters(), b.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-7, atol=1e-9)


class Live(torch.utils.data.IterableDataset):
    """A stream that is read once, and the model's accuracy on all of it as it goes."""

    def __init__(self, model, times=1):
        self.model, self.times, self.seen = model, times, []

    def __iter__(self):
        for _ in range(self.times):
            for i, (x, y) in enumerate(zip(X, Y, strict=True)):
                if i % 40 == 39:
                    self.seen.append(tpsgd.evaluate(self.model, (X, Y)))
                yield x, y


def test_a_model_can_be_used_while_it_learns_from_a_stream():
    peaks = []
    for times in (1, 6):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(7, 40), nn.Tanh(), nn.Linear(40, 3)).double()
        stream = Live(model, times)
        run = tpsgd.fit(
            model, stream, rule=rules.frozen(), optimizer=rls(1e-3), epochs=3, batch_size=8,
            order=tpsgd.simultaneous,
        )  # fmt: skip
        assert stream.seen[-1] > 0.9 > stream.seen[0]
        assert run.sample_passes == 120 * times  # once, whatever the epochs
        assert 0 < run.history[-1].accuracy < 1  # of each batch before it is learned from
        peaks.append(run.peak_bytes)
    assert peaks[0] == peaks[1]


def test_refusals():
    for gamma in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(TpsgdError, match="gamma must be a"):
            rls(gamma)
    net = nn.Sequential(nn.Linear(7, 9), nn.ELU(), nn.Linear(9, 3)).double()
    with pytest.raises(TpsgdError, match="no closed form; take ridge"):
        tpsgd.fit(net, (X, Y), rule=BEFORE, optimizer=rls())
    tpsgd.fit(net, (X, Y), rule=BEFORE, optimizer=ridge())
    hidden = nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 3)).double()
    for optimizer in ([torch.optim.Adam, rls()], rls()):
        with pytest.raises(TpsgdError, match="its inputs change while it is solved"):
            tpsgd.fit(hidden, (X, Y), rule=BEFORE, optimizer=optimizer, order=tpsgd.simultaneous)
    with pytest.raises(TpsgdError, match="got a NoneType"):
        rls(None)
    with pytest.raises(TpsgdError, match=r"became inf .* too large for its equations"):
        tpsgd.fit(
            nn.Sequential(nn.Linear(7, 3)).double(), (X * 1e160, Y), optimizer=rls(), batch_size=128
        )
    run = tpsgd.fit(net, (X, Y), rule=rules.frozen(), optimizer=rls(2.0))
    assert run.settings["optimizer"] == "rls(2)"
    assert [b.learning for b in run.blocks] == ["frozen", "solved"]


def test_what_rides_in_front_of_a_solved_block_does_not_train():
    """Dropout and normalisation are as they are in use, while it learns and between epochs."""
    nets = []
    for solver in (ridge(0.3 / 120), rls(0.3)):
        torch.manual_seed(1)
        norm = nn.BatchNorm1d(9, affine=False)
        net = nn.Sequential(nn.Linear(7, 9), nn.Tanh(), norm, nn.Dropout(0.5), nn.Linear(9, 3))
        net = net.double()
        norm.running_mean += 0.5
        tpsgd.fit(
            net, (X, Y), rule=rules.frozen(), optimizer=solver, batch_size=9, validation=(X, Y)
        )
        assert net.training and net[3].training
        nets.append(net[4])
    for p, q in zip(*(net.parameters() for net in nets), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-8)
