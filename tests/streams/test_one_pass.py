"""`OnePass` against closed forms, and the order, the batches and the places samples come in."""

import copy

import numpy as np
import pytest
import torch
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from streams.nets import X, Y

import tpsgd
from tpsgd import OnePass, TpsgdError, lda, ridge, rls
from tpsgd_streams.random_features import random_layer
from tpsgd_streams.solved_heads import HELD_OUT, PENALTIES, is_held_out

SOLVERS = {"ridge": ridge(), "ridge(0.01)": ridge(0.01), "rls": rls(0.5), "lda": lda(0.01)}


def learned(x=X, y=Y, size=None, width=40, **settings):
    """A model that has read samples, a few at a time."""
    model, size = OnePass(width, **settings), size or len(y)
    for start in range(0, len(y), size):
        model.partial_fit(x[start : start + size], y[start : start + size])
    return model


def by_class(model, x=X):
    """Outputs, sorted by their class."""
    return model.outputs(x)[:, sorted(range(len(model.classes)), key=model.classes.__getitem__)]


def close(a, b, within=1e-9):
    torch.testing.assert_close(a, b, rtol=within, atol=within)


def features(x=X, width=40, seed=0):
    """Random features in float64, by their definition."""
    x = x.flatten(1).double()
    return (x @ random_layer(x.shape[1], width, seed).weight.mT.double()).relu()


def one_hot(y=Y):
    return torch.nn.functional.one_hot(y, int(Y.max()) + 1).double()


def ridge_outputs(h, targets, gamma, at):
    """Ridge regression by torch.linalg, with a bias that has no penalty."""
    mean, target = h.mean(0), targets.mean(0)
    matrix = (h - mean).mT @ (h - mean) + gamma * torch.eye(h.shape[1]).double()
    weight = torch.linalg.solve(matrix, (h - mean).mT @ (targets - target))
    return (at - mean) @ weight + target


def test_ridge_is_the_closed_form():
    h = features()
    expected = ridge_outputs(h, one_hot(), 0.01 * len(h), h)
    close(by_class(learned(solver=ridge(0.01), size=17)), expected)


def test_the_penalty_has_the_smallest_error_of_samples_that_are_held_out():
    h, apart = features(), is_held_out(X)
    assert abs(float(apart.double().mean()) - 1 / HELD_OUT) < 0.05
    errors = {}
    for penalty in PENALTIES:
        gamma = penalty * float(h[~apart].var(0, correction=0).mean()) * int((~apart).sum())
        out = ridge_outputs(h[~apart], one_hot()[~apart], gamma, h[apart])
        errors[penalty] = float((out - one_hot()[apart]).square().sum())
    best = min(errors, key=errors.__getitem__)
    assert PENALTIES[0] < best < PENALTIES[-1]
    gamma = best * float(h.var(0, correction=0).mean()) * len(h)
    close(by_class(learned(size=50)), ridge_outputs(h, one_hot(), gamma, h), 1e-7)


def test_rls_is_batch_ridge():
    h = torch.nn.functional.pad(features(), (0, 1), value=1.0)
    matrix = h.mT @ h + 0.5 * torch.eye(h.shape[1]).double()
    expected = h @ torch.linalg.solve(matrix, h.mT @ one_hot())
    for size in (1, 30, None):
        close(by_class(learned(solver=rls(0.5), size=size)), expected)


@pytest.mark.parametrize("shrinkage", [1e-3, 0.2])
def test_lda_is_that_of_scikit_learn(shrinkage):
    h = features().numpy()
    peer = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=shrinkage).fit(h, Y.numpy())
    model = learned(solver=lda(shrinkage), size=25)
    order = sorted(range(len(model.classes)), key=model.classes.__getitem__)
    ours = model.probabilities(X)[:, order]
    np.testing.assert_allclose(ours.numpy(), peer.predict_proba(h), atol=1e-9)


@pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS)
def test_classes_one_after_another_are_the_same_as_all_together(solver):
    together, order = learned(solver=solver), Y.argsort(descending=True, stable=True)
    apart = learned(X[order], Y[order], size=13, solver=solver)
    assert apart.classes != together.classes and set(apart.classes) == set(together.classes)
    close(by_class(apart), by_class(together), 1e-7)
    assert apart.samples == together.samples == len(Y)


@pytest.mark.parametrize("solver", [s for s in SOLVERS.values() if s != rls(0.5)], ids=str)
def test_merged_models_are_the_model_of_all_samples(solver):
    first, second = Y < 6, Y >= 4  # classes that both have, and those that one has
    half = torch.arange(len(Y)) % 2 == 0
    parts = [(Y < 4) | (first & half), (Y > 5) | (second & ~half)]
    assert (parts[0] ^ parts[1]).all()
    a, b = (learned(X[part], Y[part], 20, solver=solver) for part in parts)
    whole = OnePass(40, solver=solver)
    for model in (b, a):
        assert whole.merge(model) is whole
    close(by_class(whole), by_class(learned(solver=solver)), 1e-6)
    assert whole.samples == len(Y) and a.samples + b.samples == len(Y)
    a.merge(OnePass(40, solver=solver))  # nothing to add
    more = torch.cat([X, X[:9]]), torch.cat([Y, Y[:9]])
    close(by_class(whole.partial_fit(X[:9], Y[:9])), by_class(learned(*more, solver=solver)), 1e-6)


def test_it_learns_digits_and_forgets_no_class():
    digits = tpsgd.data.load("digits")
    (x, y), test = digits.train, digits.test
    order = y.argsort(stable=True)
    model = learned(x[order], y[order], size=10, width=500, solver=rls())
    assert model.evaluate(test) > 0.96
    zeros = test[1] == 0
    assert model.evaluate((test[0][zeros], test[1][zeros])) > 0.97


def test_names_of_any_kind_and_single_samples():
    names = [f"digit {label}" for label in Y.tolist()]
    model = learned(y=names, classes=["digit 7"])
    assert model.classes[0] == "digit 7" and len(model.classes) == 10
    assert model.evaluate((X, names)) == learned(classes=[7]).evaluate((X, Y)) > 0.85
    model.partial_fit(X[0], "something new")
    assert model.classes[-1] == "something new" and model.samples == len(Y) + 1
    assert model.outputs(X[:1])[0, -1].abs() > 0


def test_an_encoder_is_averaged_over_its_maps():
    maps = torch.nn.Conv2d(1, 6, 3).requires_grad_(False)
    images = X.float().reshape(-1, 1, 8, 8)
    means = maps(images).mean((2, 3))
    expected = learned(means, solver=ridge(0.01)).outputs(means)
    for encoder in (maps, lambda x: {"tap": maps(x)}):
        close(learned(images, solver=ridge(0.01), encoder=encoder).outputs(images), expected)
    backbone = tpsgd.adapt.Backbone(torch.nn.Sequential(maps, torch.nn.ReLU()), ["0"])
    close(learned(images, solver=ridge(0.01), encoder=backbone).outputs(images), expected)


def test_direct_links_are_the_inputs_beside_the_random_features():
    h = torch.cat([X.flatten(1).double(), features()], 1)
    expected = ridge_outputs(h, one_hot(), 0.01 * len(h), h)
    close(by_class(learned(solver=ridge(0.01), direct=True, size=100)), expected)


@pytest.mark.parametrize("width, direct", [(0, False), (40, False), (40, True)])
def test_its_layers_are_a_plain_model(width, direct):
    model = learned(width=width, direct=direct, solver=ridge(0.01))
    layers = model.layers()
    close(layers(X.float()).double(), model.outputs(X), 1e-4)
    labels = torch.tensor([model.classes.index(label) for label in Y.tolist()])
    assert tpsgd.evaluate(layers, (X.float(), labels)) == pytest.approx(model.evaluate((X, Y)))


@pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS)
def test_another_process_goes_on(solver, tmp_path):
    model = learned(X[:100], Y[:100], solver=solver)
    torch.save(model.state_dict(), tmp_path / "state.pt")
    again = OnePass(40, solver=solver)
    again.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for each in (model, again):
        each.partial_fit(X[100:], Y[100:])
    assert again.outputs(X).equal(model.outputs(X)) and again.classes == model.classes
    assert again.nbytes == model.nbytes > 40 * 41 * 8
    state = model.state_dict()
    first = next(iter(state["head"]))
    state["head"][first] = None
    with pytest.raises(TpsgdError, match="the state is damaged"):
        again.load_state_dict(state)
    assert again.outputs(X).equal(model.outputs(X))


def test_refused_samples_settle_nothing():
    model = OnePass(5, encoder=lambda x: x.flatten(1).float().log())
    with pytest.raises(TpsgdError, match="encoder gives numbers that are NaN"):
        model.partial_fit(torch.zeros(2, 3), [0, 1])
    assert model.partial_fit(torch.ones(2, 4), [0, 1]).outputs(torch.ones(1, 4)).shape == (1, 2)


REFUSED = {
    "features must be": lambda: OnePass(-1),
    "features must be a whole number from 0 to 1,048,576": lambda: OnePass(10**12),
    "seed must be": lambda: OnePass(seed="a"),
    "classes must be a list": lambda: OnePass(classes=3),
    r"evaluate takes \(x, y\)": lambda: learned().evaluate(3),
    "the state is of 3": lambda: OnePass().load_state_dict(
        OnePass().state_dict() | {"identity": 3}
    ),
    "encoder gives no row for each sample, got .3, 1. of": lambda: learned(encoder=lambda x: x[:3]),
    "there are no numbers": lambda: OnePass().learn_one({}, 1),
    "solver must be": lambda: OnePass(solver="ridge"),
    "encoder must be": lambda: OnePass(encoder=3),
    "bound is of": lambda: OnePass(forgetting=0.9, bound=3),
    "forgetting must be": lambda: OnePass(solver=rls(), forgetting=0),
    "bound must be": lambda: OnePass(solver=rls(), bound=-1),
    "shrinkage must be": lambda: lda(2),
    "nothing was learned yet": lambda: OnePass().predict(X),
    "merge takes": lambda: learned().merge(3),
    "merged with itself": lambda: (lambda m: m.merge(m))(learned()),
    "different features cannot be merged": lambda: learned().merge(learned(width=30)),
    "different seed cannot be merged": lambda: OnePass(40, seed=1).merge(learned()),
    "different shape": lambda: learned().merge(learned(X.reshape(-1, 8, 8))),
    "different inputs": lambda: learned().merge(learned(encoder=lambda x: x[:, 0, :4])),
    "no sums that can be merged": lambda: learned(solver=rls()).merge(learned(solver=rls())),
    "no state of a OnePass": lambda: OnePass().load_state_dict({}),
    "the state is of": lambda: OnePass(30).load_state_dict(learned().state_dict()),
    "encoder gives numbers that are NaN": lambda: learned(encoder=lambda x: x * torch.inf),
    "samples have numbers that are": lambda: learned(X.double() * 1e99),
    "covariance of the features": lambda: learned(X[:5], Y[:5], solver=lda(0)).predict(X),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_refused(words):
    with pytest.raises(TpsgdError, match=words):
        REFUSED[words]()


@pytest.mark.parametrize(
    "x, y, words",
    [
        (X[:2], one_hot()[:2], "not rows of numbers"),
        (X[:2], [3], "x has 2 samples but y has 1"),
        (X[:2] * torch.nan, [3, 99], "NaN"),
        (X[:2, :, :7], [3, 99], "samples have shape"),
        (X[:2], [3, "new"], "pass labels by their names"),
        (X[:0], [], "there are no samples"),
        ([X[0, 0], X[0, 0, :3]], [3, 99], "one tensor"),
    ],
)
def test_bad_samples_change_nothing(x, y, words):
    model = learned()
    before = copy.deepcopy(model)
    with pytest.raises((TpsgdError, ValueError), match=words):
        model.partial_fit(x, y)
    assert model.classes == before.classes and model.samples == before.samples
    assert model.outputs(X).equal(before.outputs(X))


def test_forgetting_counts_later_samples_of_the_same_class():
    """The weighted ridge regression by torch.linalg."""
    h, later = features(), torch.zeros(len(Y)).double()
    for label in range(10):
        members = (label == Y).nonzero().flatten()
        later[members] = torch.arange(len(members) - 1, -1, -1).double()
    weight = 0.98**later
    mean = weight @ h / weight.sum()
    target = weight @ one_hot() / weight.sum()
    root = weight.sqrt()[:, None]
    expected = ridge_outputs(
        torch.cat([(h - mean) * root, -(h - mean) * root]),  # whose mean is 0
        torch.cat([(one_hot() - target) * root, -(one_hot() - target) * root]),
        0.02 * weight.sum(), h - mean,
    )  # fmt: skip
    for size in (1, 90):
        model = learned(size=size, solver=ridge(0.01), forgetting=0.98)
        close(by_class(model), expected + target, 1e-7)


@pytest.mark.parametrize("solver", [ridge(), lda()], ids=str)
def test_forgetting_in_a_class_keeps_the_others(solver):
    model = learned(width=64, solver=solver, forgetting=0.99)
    before, zeros = model.evaluate((X, Y)), X[Y == 0]
    for _ in range(3000 // len(zeros)):
        model.partial_fit(zeros, [0] * len(zeros))
    assert model.evaluate((X, Y)) > before - 0.03 > 0.85
    changed = (Y + 1) % 10
    model.partial_fit(X, changed).partial_fit(X, changed)
    assert model.evaluate((X, changed)) > before - 0.05


def test_sums_that_forget_can_be_merged_and_saved():
    first = torch.arange(len(Y)) < 300
    a, b = (learned(X[part], Y[part], forgetting=0.99) for part in (first, ~first))
    again = OnePass(40, forgetting=0.99)
    again.load_state_dict(a.state_dict())
    assert again.outputs(X).equal(a.outputs(X))
    total = again.merge(b)._head.learned.total()
    parts = [model._head.learned.total() for model in (a, b)]
    assert total.count == pytest.approx(sum(part.count for part in parts))
    close(total.count * total.x, sum(part.count * part.x for part in parts))
