"""The peers as arms of a comparison, and what they have in common with the rules."""

import json
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tpsgd
from tpsgd import Place, TpsgdError, ridge, rules
from tpsgd.comparison.arms import ALL, arm
from tpsgd.comparison.closed_forms import elm, lm_karnet
from tpsgd.comparison.compare import compare
from tpsgd.zoo.words import factory
from tpsgd_peers import arms as peers

PEERS = [word for word, entry in ALL.items() if entry.suits]
BEFORE = rules.tpsgd_l2(at=Place.BEFORE)
X = torch.randn(60, 6, generator=torch.Generator().manual_seed(1))
Y = (X[:, 0] * X[:, 1] > 0).long() + (X[:, 2] > 1).long()


@pytest.fixture(scope="module")
def digits():
    return tpsgd.data.load("digits", max_train=400)


def net(width=24):
    return nn.Sequential(nn.Linear(6, width), nn.LeakyReLU(), nn.Linear(width, 3))


@pytest.mark.full
def test_peers_are_compared_with_backprop_and_the_frozen_control(digits):
    record = compare(
        digits,
        factory("mlp:48", digits.shape, 10),
        PEERS,
        epochs=2,
        restarts=2,
        batch_size=64,
    )
    by_name = {r.arm.name: r for r in record.results}
    assert set(by_name) == {"backprop", "frozen", *PEERS}
    assert record.reference is by_name["backprop"]
    assert {r.arm.name for r in record.ranked[-2:]} == {"elm", "frozen"}  # the controls
    for name, result in by_name.items():
        assert result.error is None and len(result.runs) == 2, name
        assert all(run.seconds > 0 and run.peak_bytes > 0 and run.history for run in result.runs)
        assert result.accuracy[0] > 0.6 or name not in PEERS
        assert [run.seed for run in result.runs] == [0, 1]
    assert json.dumps(record.as_dict())


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("lm-karnet", {"rule": BEFORE, "optimizer": ridge()}),
        ("elm", {"rule": rules.frozen(), "optimizer": ridge()}),
    ],
)
def test_the_closed_forms_are_a_rule_and_a_solver(name, options):
    made = ALL[name].make().train(net, (X, Y), seed=3)
    torch.manual_seed(3)
    model = net()
    run = tpsgd.fit(model, (X, Y), seed=3, **options)
    for p, q in zip(made.models[0].parameters(), model.parameters(), strict=True):
        assert torch.equal(p, q)
    assert made.runs[0].sample_passes == run.sample_passes


def test_zorb_as_an_arm_starts_from_the_same_weights_as_fit_zorb():
    made = peers.zorb().train(net, (X, Y), seed=3, epochs=7, batch_size=5, lr=9.0)
    torch.manual_seed(3)
    model = net()
    run = tpsgd.peers.fit_zorb(model, (X, Y), seed=3)
    for p, q in zip(made.models[0].parameters(), model.parameters(), strict=True):
        assert torch.equal(p, q)
    assert made.runs[0].rule == run.rule == "zorb"
    method = peers.zorb(alpha=0.5).describe()["method"]  # that a resumed comparison has again
    assert "fit_zorb" in method and "0.5" in method and "0x" not in method


def test_a_deep_elm_keeps_all_but_its_head():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 9), nn.ReLU(), nn.Linear(9, 3)
    ).double()
    before = [p.clone() for p in model[:4].parameters()]
    tpsgd.fit(model, (X.double(), Y), rule=rules.frozen(), optimizer=ridge(0.0))
    assert all(map(torch.equal, before, model[:4].parameters()))
    h = torch.cat([model[:4](X.double()), torch.ones(60, 1)], 1).detach()
    solved = torch.linalg.pinv(h) @ F.one_hot(Y, 3).double()
    torch.testing.assert_close(model(X.double()).detach(), h @ solved, rtol=1e-6, atol=1e-7)


def test_kpnet_as_rules_and_a_solver():
    """Modules of a random layer and a solved one; the random ones stay, the solved are solved."""
    torch.manual_seed(0)
    widths = [6, 40, 8, 40, 3]
    layers = [nn.Linear(a, b) for a, b in pairwise(widths)]
    model = nn.Sequential(
        layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2], nn.Tanh(), layers[3]
    ).double()
    before = [m.weight.detach().clone() for m in layers]
    cascade = [rules.frozen(), BEFORE, rules.frozen(), BEFORE]
    tpsgd.fit(model, (X.double(), Y), rule=cascade, optimizer=ridge())
    same = [torch.equal(a, m.weight) for a, m in zip(before, layers, strict=True)]
    assert same == [True, False, True, False]
    linear = nn.Sequential(nn.Linear(6, 3)).double()
    tpsgd.fit(linear, (X.double(), Y), optimizer=ridge())
    share = tpsgd.evaluate(model, (X.double(), Y))
    assert share > tpsgd.evaluate(linear, (X.double(), Y)) + 0.05


@pytest.mark.parametrize("name", PEERS)
@pytest.mark.parametrize("kind", ["constant", "repeated", "few"])
def test_ill_conditioned_inputs(name, kind):
    x, y = X, Y
    if kind == "constant":
        x = torch.cat([X, torch.full((60, 3), 0.7), torch.zeros(60, 2)], 1)
    elif kind == "repeated":
        x, y = torch.cat([X[:20]] * 3), torch.cat([Y[:20]] * 3)
        x = torch.cat([x, x], 1)
    else:
        x, y = torch.cat([X, X * X], 1)[:9], Y[:9]
    made = (
        ALL[name]
        .make()
        .train(
            lambda: nn.Sequential(nn.Linear(x.shape[1], 64), nn.LeakyReLU(0.3), nn.Linear(64, 3)),
            (x, y),
            seed=0,
        )
    )
    model = made.models[0]
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert tpsgd.evaluate(model, (x, y)) > 0.6


def test_lm_karnet_interpolates_a_small_problem():
    model = net(300).double()
    tpsgd.fit(model, (X[:12].double(), Y[:12]), rule=BEFORE, optimizer=ridge(0.0))
    wanted = F.one_hot(Y[:12], 3).double()
    torch.testing.assert_close(model(X[:12].double()).detach(), wanted, rtol=0, atol=1e-4)


def test_a_solved_hidden_layer_has_the_rank_of_the_classes():
    model = net(50).double()
    tpsgd.fit(model, (X.double(), Y), rule=BEFORE, optimizer=ridge())
    assert torch.linalg.matrix_rank(model[0].weight) <= 3


@pytest.mark.parametrize(
    ("model", "able"),
    [
        (net(), {"lm-karnet", "zorb", "dladmm", "elm"}),
        (
            nn.Sequential(nn.Linear(6, 4), nn.GELU(), nn.Linear(4, 3)),
            {"lm-karnet", "elm"},
        ),
        (
            nn.Sequential(nn.Conv1d(2, 4, 2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)),
            {"lm-karnet", "zorb", "elm"},
        ),
        (
            nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3)),
            {"elm"},
        ),
        (nn.Sequential(tpsgd.Recurrent(3, 4), nn.Linear(4, 3)), {"elm"}),
        (
            nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3), nn.Softmax(1)),
            {"zorb"},
        ),
        (
            nn.Sequential(nn.Conv1d(2, 4, 2, groups=2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)),
            {"elm"},
        ),
    ],
)
def test_a_peer_suits_a_model_that_it_can_train(model, able):
    assert {word for word in PEERS if ALL[word].suits(model)} == able


def test_a_peer_that_cannot_train_a_model_says_why_and_the_others_go_on(digits):
    record = compare(
        digits, factory("cnn:4x3", digits.shape, 10), [peers.dladmm(), elm()], epochs=1,
        restarts=1,
    )  # fmt: skip
    errors = {r.arm.name: r.error for r in record.results}
    assert "Conv2d" in errors.pop("dladmm") and set(errors.values()) == {None}


def test_every_word_has_its_arm():
    for word in ALL:
        assert arm(word).name == word and arm(word).about
    assert arm("backprop").backprop and not peers.zorb().backprop


def test_the_head_in_one_pass_on_learned_features(digits):
    """At least as good as the squared-error head that Adam trains on the same l2 features."""
    x, y = digits.train
    shares = {}
    for name, optimizer in (("adam", torch.optim.Adam), ("ridge", ridge())):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.LeakyReLU(), nn.Linear(128, 10))
        tpsgd.fit(
            model, (x, y), rule=rules.tpsgd_l2(), epochs=10, batch_size=32,
            optimizer=[torch.optim.Adam, optimizer],
        )  # fmt: skip
        shares[name] = tpsgd.evaluate(model, digits.test)
    assert shares["ridge"] >= shares["adam"]


def test_refusals_of_options():
    with pytest.raises(TpsgdError, match="alpha must be"):
        lm_karnet(alpha=-1.0)


def test_what_later_layers_are_reaches_zorb_and_not_lm_karnet():
    """LM-KARnet is local: no later layer touches a hidden one. ZORB's targets come through them."""
    first = {}
    for name in ("lm-karnet", "zorb"):
        for scale in (1.0, 3.0):

            def make(scale=scale):
                model = net()
                model[2].weight.data.mul_(scale)
                return model

            made = ALL[name].make().train(make, (X, Y), seed=0)
            first[name, scale] = made.models[0][0].weight
    assert torch.equal(first["lm-karnet", 1.0], first["lm-karnet", 3.0])
    assert not torch.allclose(first["zorb", 1.0], first["zorb", 3.0])


@pytest.mark.parametrize("word", ALL)
def test_an_arm_is_described_alike_in_every_process(word):
    """So that a comparison with it can be resumed: no address of a function is in it."""
    assert "0x" not in json.dumps(arm(word).describe(), default=str)
