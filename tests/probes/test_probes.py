"""Probes: every measure against a second method, rows of every kind of training, and sinks."""

import sys
from math import acos, degrees, exp
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge
from torch import nn
from torch.nn import functional as F

import tpsgd
from tpsgd.train import Epoch
from tpsgd_probes import (
    Probes,
    alignment,
    block_outputs,
    cka,
    effective_rank,
    halves,
    linear_cka,
    linear_probe,
    probe_accuracy,
    rank_of,
    tensorboard,
    wandb,
)

G = torch.Generator().manual_seed(0)
X, Y = torch.randn(96, 6, generator=G), torch.arange(96) % 3
X[:, 0] += Y


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


# ---- measures ------------------------------------------------------------------------------------


@pytest.mark.parametrize("features", [4, 200])
def test_a_linear_probe_is_ridge_regression(features):
    x = torch.randn(60, features, generator=G)
    y, x_test = torch.arange(60) % 4, torch.randn(50, features, generator=G)
    strength = 0.1 * 60 / features * float(x.double().var(0, correction=0).sum())
    ridge = Ridge(alpha=strength).fit(x.double(), np.eye(4)[y])
    expected = torch.from_numpy(ridge.predict(x_test.double())).argmax(1)
    for right in (expected, (expected + 1) % 4):
        accuracy = probe_accuracy(x, y, x_test, right, ridge=0.1)
        assert accuracy == float((expected == right).double().mean())


def test_the_rank_counts_directions():
    basis = np.linalg.qr(np.random.default_rng(0).normal(size=(8, 8)))[0]
    x = torch.from_numpy(np.vstack([basis[:3], -basis[:3]]))  # centred, three directions alike
    assert rank_of(x) == pytest.approx(3) and rank_of(5 * x + 1) == pytest.approx(3)
    assert rank_of(torch.ones(4, 3)) == 0.0
    values = np.linalg.svd((X - X.mean(0)).double().numpy(), compute_uv=False)
    shares = values / values.sum()
    assert rank_of(X) == pytest.approx(exp(-sum(shares * np.log(shares))))


def test_cka_is_the_published_ratio_and_invariant():
    a, b = X.double().numpy(), torch.randn(96, 9, generator=G).double().numpy()
    centring = np.eye(96) - 1 / 96
    k, l = centring @ a @ a.T @ centring, centring @ b @ b.T @ centring  # noqa: E741
    expected = np.trace(k @ l) / np.sqrt(np.trace(k @ k) * np.trace(l @ l))
    assert linear_cka(*map(torch.from_numpy, (a, b))) == pytest.approx(expected)
    turned = 3 * a @ np.linalg.qr(np.random.default_rng(1).normal(size=(6, 6)))[0] + 7
    assert linear_cka(X, torch.from_numpy(turned)) == pytest.approx(1)
    assert linear_cka(X, torch.zeros(96, 2)) == 0.0


@pytest.mark.parametrize("rule", ["tpsgd-l2", "drtp"])
def test_the_angle_is_that_of_both_gradients(rule):
    """Oracle: both losses written out for the first block."""
    angles = []

    def by_hand(moment):
        if moment.block:
            return None
        w1, b1, *others = [p.detach().clone().requires_grad_() for p in moment.model.parameters()]
        (target,) = (P[Y] for P in moment.net.learners[0].tensors)
        with torch.enable_grad():
            h = torch.tanh(F.linear(X, w1, b1))
            out = F.linear(torch.tanh(F.linear(h, *others[:2])), *others[2:])
            theirs = torch.autograd.grad(F.cross_entropy(out, Y), (w1, b1), retain_graph=True)
            distance = {"tpsgd-l2": (h - target).square().sum() / 2, "drtp": -(h * target).sum()}
            ours = torch.autograd.grad(distance[rule], (w1, b1))
        a, b = (torch.cat([g.flatten() for g in pair]).double() for pair in (ours, theirs))
        angles.append(degrees(acos(float(a @ b / a.norm() / b.norm()))))
        return angles[-1]

    watch = Probes(X, Y, {"angle": alignment(), "hand": by_hand})
    tpsgd.fit(net(), (X, Y), rule=rule, epochs=3, batch_size=32, callbacks=[watch])
    assert watch.series("angle", 1) == pytest.approx(angles, abs=1e-3) and len(angles) == 3
    assert watch.series("angle", 3) == [None] * 3


def test_the_last_hidden_block_under_its_own_head_is_aligned():
    """A block whose loss is the net's loss has the net's gradient: no angle."""
    model = net()
    head = model[4]

    def objective(site):
        def loss(y, s, *_):
            if site.shape == (4,):
                return F.cross_entropy(F.linear(y, head.weight, head.bias), s)
            return (y**2).sum()

        return tpsgd.objectives.Objective(loss)

    rule = tpsgd.Rule("of-the-net", objective)
    watch = Probes(X, Y, {"angle": alignment()})
    order = {"order": tpsgd.simultaneous}
    tpsgd.fit(model, (X, Y), rule=rule, epochs=2, batch_size=32, callbacks=[watch], **order)
    assert watch.series("angle", 2) == pytest.approx([0, 0], abs=0.05)
    assert min(watch.series("angle", 1)) > 1 and watch.series("angle", 3) == [None, None]


# ---- the callback --------------------------------------------------------------------------------


def test_training_is_what_it_is_without_probes():
    plain, watched = net(), net()
    tpsgd.fit(plain, (X, Y), epochs=3, batch_size=32)
    measures = [linear_probe(), effective_rank(), alignment(), cka(net(1))]
    watch = Probes(X, Y, measures)
    tpsgd.fit(watched, (X, Y), epochs=3, batch_size=32, callbacks=[watch])
    for a, b in zip(plain.parameters(), watched.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    assert [(r["block"], r["epoch"]) for r in watch.rows] == [
        (block, epoch) for block in (1, 2, 3) for epoch in (1, 2, 3)
    ]
    features = block_outputs(watched, X)[2]
    assert watch.rows[-1]["effective_rank"] == pytest.approx(rank_of(features))
    one, other = halves(len(Y))
    assert sorted([*one.tolist(), *other.tolist()]) == list(range(len(Y)))
    expected = probe_accuracy(features[one], Y[one], features[other], Y[other])
    assert watch.rows[-1]["linear_probe"] == expected
    reference = block_outputs(net(1), X)[2]
    assert watch.rows[-1]["cka"] == pytest.approx(linear_cka(features, reference))


def test_all_blocks_of_backprop_are_measured_and_the_rows_are_of_the_last_run():
    watch = Probes(X, Y, [effective_rank()], every=2)
    for _ in range(2):
        tpsgd.fit_backprop(net(), (X, Y), epochs=5, callbacks=[watch])
    assert [(r["block"], r["epoch"]) for r in watch.rows] == [
        (block, epoch) for epoch in (2, 4) for block in (1, 2, 3)
    ]
    assert all(row["loss"] > 0 and row["accuracy"] is not None for row in watch.rows)


def test_dfa_has_angles_of_its_error_signal():
    watch = Probes(X, Y, [alignment()])
    tpsgd.fit(net(), (X, Y), rule="dfa", epochs=6, batch_size=8, lr=0.01, callbacks=[watch])
    angles = watch.series("alignment", 2)
    assert all(0 < angle < 180 for angle in angles) and angles[-1] < 90


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((X, Y[:3], [linear_probe()]), "got 96 and 3"),
        ((X[:1], Y[:1], [linear_probe()]), "2 samples or more and a label y for each, got 1 and 1"),
        ((X / 0, Y, [effective_rank()]), "x contains NaN or infinity"),
        ((X, Y, [linear_probe(), linear_probe()]), "different names"),
        ((X, Y, [3]), "must be functions"),
        ((X, Y, [linear_probe()], 0), "every must be a whole number of epochs"),
        ((X, Y, [linear_probe()], 1.5), "every must be a whole number of epochs"),
        ((X.numpy(), Y, [linear_probe()]), "need tensors"),
        ((X, Y, None), "must be functions or a dict"),
        ((X, Y, [linear_probe()], 1, 3), "to must be a list"),
    ],
)
def test_mistakes_are_refused(arguments, said):
    with pytest.raises(tpsgd.TpsgdError, match=said):
        Probes(*arguments)


@pytest.mark.parametrize(
    ("x", "y", "said"),
    [
        (X[:, :4], Y, r"cannot compute the x of the probes, of shape \(96, 4\)"),
        (X, Y + 59, "the y of the probes: label 61 is out of range"),
        (X, Y - 1, "the y of the probes: label -1 is out of range"),
    ],
)
def test_a_batch_of_another_net_is_refused_before_the_training(x, y, said):
    model = net()
    before = [p.clone() for p in model.parameters()]
    for train in (tpsgd.fit, tpsgd.fit_backprop):
        with pytest.raises(tpsgd.TpsgdError, match=said):
            train(model, (X, Y), epochs=1, callbacks=[Probes(x, y, [effective_rank()])])
    assert all(map(torch.equal, before, model.parameters()))


def test_a_reference_with_other_blocks_is_refused():
    watch = Probes(X, Y, [cka(nn.Sequential(nn.Linear(6, 3)))])
    with pytest.raises(tpsgd.TpsgdError, match="reference has 1 blocks, the model 3"):
        tpsgd.fit(net(), (X, Y), epochs=1, callbacks=[watch])
    with pytest.raises(TypeError, match="callback of fit"):
        Probes(X, Y, [linear_probe()])(Epoch(1, 1, 0.5))


# ---- sinks ---------------------------------------------------------------------------------------


def test_rows_go_to_tensorboard_and_wandb(monkeypatch):
    scalars, logged = [], []
    writer = SimpleNamespace(add_scalar=lambda *a: scalars.append(a), flush=lambda: None)
    board = SimpleNamespace(SummaryWriter=lambda folder: writer)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)
    run = SimpleNamespace(log=logged.append)
    client = SimpleNamespace(run=None, init=lambda **settings: run if settings else None)
    monkeypatch.setitem(sys.modules, "wandb", client)
    sinks = [tensorboard("runs"), wandb(project="p")]
    watch = Probes(X, Y, [effective_rank(), alignment()], to=sinks)
    tpsgd.fit(net(), (X, Y), epochs=1, callbacks=[watch])
    first = watch.rows[0]
    assert ("effective_rank/block 1", first["effective_rank"], 1) in scalars
    assert logged[0]["block 1/effective_rank"] == first["effective_rank"]
    assert "block 3/alignment" not in logged[-1] and logged[-1]["epoch"] == 1


def test_probes_of_a_comparison_tell_runs_apart(monkeypatch):
    writers, runs = [], []

    def nothing(*_):
        pass

    def writer(folder):
        writers.append(folder)
        return SimpleNamespace(add_scalar=nothing, flush=nothing, close=nothing)

    class Run:
        def __init__(self, **settings):
            self.settings, self.rows, self.ended = settings, [], False
            self.log = self.rows.append
            runs.append(self)

        def finish(self):
            self.ended = True

    board = SimpleNamespace(SummaryWriter=writer)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)
    active = SimpleNamespace(log=pytest.fail)
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=active, init=Run))
    sinks = [tensorboard("runs"), wandb(project="p", config={"net": "a"})]
    watch = Probes(X, Y, [effective_rank()], to=sinks)
    once = {"epochs": 2, "batch_size": 16, "restarts": 1}
    tpsgd.compare(((X, Y), (X, Y)), net, ["drtp"], callbacks=[watch], **once)
    names = ["backprop", "drtp", "frozen"]
    assert list(dict.fromkeys(row["arm"] for row in watch.rows)) == names
    assert len(watch.series("effective_rank", 1, arm="drtp", seed=0)) == 2
    assert [Path(folder).as_posix() for folder in writers] == [f"runs/{n}-seed-0" for n in names]
    assert [run.settings["name"] for run in runs] == [f"{name} seed 0" for name in names]
    assert runs[1].settings["config"] == {"net": "a", "arm": "drtp", "seed": 0}
    assert [run.ended for run in runs] == [True, True, False] and all(run.rows for run in runs)


@pytest.mark.parametrize(
    ("make", "word"), [(lambda: tensorboard("x"), "tensorboard"), (wandb, "wandb")]
)
def test_a_missing_package_is_one_sentence(make, word, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(tpsgd.TpsgdError, match=f"pip install {word}"):
        make()
