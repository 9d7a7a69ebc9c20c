"""ZORB against its authors' program, the inverses, and small problems that it must solve."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import tpsgd
from tpsgd import Place, TpsgdError, ridge, rules
from tpsgd_peers import fit_zorb
from tpsgd_peers.inverses import EPSILON, inverse, pseudo_inverse

FIXTURES = Path(__file__).parents[1] / "fixtures"
torch.manual_seed(0)
X = torch.randn(80, 6, dtype=torch.float64)
Y = (X[:, 0] * X[:, 1] > 0).long() + (X[:, 2] > 1).long()


def reference(name):
    """The program's own net and numbers; its matrices have the bias as their last row."""
    with np.load(FIXTURES / f"zorb_{name}.npz") as file:
        kept = {k: file[k] for k in file.files}
    modules = []
    for i, act in enumerate(kept["activations"]):
        W = torch.tensor(kept[f"{i}.initial"])
        layer = nn.Linear(len(W) - 1, W.shape[1]).double()
        layer.load_state_dict({"weight": W[:-1].T, "bias": W[-1]})
        modules += [layer, nn.Sigmoid()] if act == "sigmoid" else [layer]
    return nn.Sequential(*modules), kept


@pytest.mark.parametrize("name", ["linear_output", "sigmoid"])
def test_the_authors_program(name):
    """With the scaling undone: weights, scales and predictions are the program's."""
    model, kept = reference(name)
    x, y = torch.tensor(kept["x"]), torch.tensor(kept["labels"])
    run = fit_zorb(model, (x, y), unscale=True, batch_size=17)
    layers = [m for m in model.modules() if isinstance(m, nn.Linear)]
    for i, layer in enumerate(layers):
        W = torch.cat([layer.weight.T, layer.bias[None]]).detach()
        torch.testing.assert_close(W, torch.tensor(kept[f"{i}.solved"]), rtol=1e-6, atol=1e-7)
    prediction = model(x).detach()
    torch.testing.assert_close(prediction, torch.tensor(kept["prediction"]), rtol=1e-7, atol=1e-8)
    for (gain, shift), (low, high) in zip(run.settings["scales"], kept["scales"], strict=True):
        assert gain * EPSILON + shift == pytest.approx(low, abs=1e-9)
        assert gain * (1 - EPSILON) + shift == pytest.approx(high, abs=1e-9)


@pytest.mark.parametrize("name", ["linear_output", "sigmoid"])
def test_without_the_scaling_the_next_layer_absorbs_it(name):
    model, kept = reference(name)
    x, y = torch.tensor(kept["x"]), torch.tensor(kept["labels"])
    run = fit_zorb(model, (x, y))
    out, (gain, shift) = model(x).detach(), run.settings["scales"][-1]
    out = gain * out + shift if name == "sigmoid" else out
    torch.testing.assert_close(out, torch.tensor(kept["prediction"]), rtol=1e-7, atol=1e-8)
    assert [type(m) for m in model][:2] == [nn.Linear, nn.Sigmoid]  # plain, as it was


def test_a_net_by_hand():
    """Three layers, each from its definition: pinv([x, 1]) times the label taken back."""
    model = nn.Sequential(
        nn.Linear(6, 5), nn.LeakyReLU(0.2), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)
    ).double()
    W = [(m.weight.detach().T.clone(), m.bias.detach().clone()) for m in model[::2]]
    T2 = torch.eye(3).double()[Y]
    T1 = (T2 - W[2][1]) @ torch.linalg.pinv(W[2][0])
    low, high = T1.min(), T1.max()
    T1 = torch.atanh(((T1 - low) / (high - low) * (1 - 2 * EPSILON) + EPSILON) * 2 - 1)
    T0 = (T1 - W[1][1]) @ torch.linalg.pinv(W[1][0])
    T0 = torch.where(T0 >= 0, T0, T0 / 0.2)
    x, ones = X, torch.ones(80, 1).double()
    run = fit_zorb(model, (X, Y))
    for layer, act, T in zip(model[::2], (model[1], model[3], None), (T0, T1, T2), strict=True):
        solved = torch.linalg.pinv(torch.cat([x, ones], 1)) @ T
        given = torch.cat([x, ones], 1) @ solved  # the same for all weights that fit best
        torch.testing.assert_close(layer(x).detach(), given, rtol=1e-6, atol=1e-7)
        x = layer(x).detach() if act is None else act(layer(x)).detach()
    assert run.rule == "zorb" and run.sample_passes == 3 * 80
    rest = x - T2
    assert run.loss == pytest.approx(float(rest.square().sum(1).mean() / 2), rel=1e-5)


def test_it_is_target_projection_with_codes_of_its_own():
    """The first block, solved as LM-KARnet solves it for the same codes."""
    net = nn.Sequential(nn.Linear(6, 5), nn.LeakyReLU(0.5), nn.Linear(5, 3)).double()
    P = (torch.eye(3).double() - net[2].bias) @ torch.linalg.pinv(net[2].weight.T)
    P = torch.where(P >= 0, P, P / 0.5).detach()
    rule = tpsgd.Rule("same", lambda site: tpsgd.objectives.l2(P), at=Place.BEFORE)
    other = nn.Sequential(nn.Linear(6, 5), nn.LeakyReLU(0.5), nn.Linear(5, 3)).double()
    fit_zorb(net, (X, Y))
    tpsgd.fit(other, (X, Y), rule=rule, optimizer=ridge(0.0))
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("act", [nn.LeakyReLU(0.1), nn.ReLU(), nn.Tanh(), nn.Sigmoid()])
@pytest.mark.parametrize("last", [None, nn.Sigmoid(), nn.Tanh(), nn.Softmax(1)])
def test_a_small_problem_is_interpolated(act, last):
    """More units than samples: the last layer can give every label exactly.

    The hidden layer has the rank of three classes, so a piecewise linear one needs many units.
    """
    x, y = X[:12], Y[:12]
    modules = [nn.Linear(6, 200), act, nn.Linear(200, 3)] + ([last] if last else [])
    model = nn.Sequential(*modules).double()
    fit_zorb(model, (x, y))
    assert tpsgd.evaluate(model, (x, y)) == 1.0
    if last is None:
        torch.testing.assert_close(model(x).detach(), torch.eye(3).double()[y], rtol=0, atol=1e-4)


MODULES = [
    (nn.Linear(7, 4), (7,)),  # wide enough to answer anything
    (nn.Linear(4, 4, bias=False), (3, 4)),
    (nn.LeakyReLU(0.01), (5,)),
    (nn.Flatten(), (2, 3, 4)),
    (nn.Unflatten(1, (2, 3)), (6,)),
    (nn.Dropout(0.5).eval(), (4,)),
    (nn.Identity(), (4,)),
    (nn.AvgPool2d(2), (3, 6, 4)),
    (nn.MaxPool2d((3, 2)), (3, 6, 4)),
    (nn.AdaptiveAvgPool2d(2), (3, 6, 4)),
    (nn.AdaptiveMaxPool1d(3), (2, 6)),
    (nn.AvgPool1d(3), (2, 6)),
    (nn.Conv2d(4, 3, 1), (4, 3, 5)),
    (nn.Conv2d(3, 4, (2, 3), stride=(2, 3)), (3, 4, 6)),  # patches that do not overlap
    (nn.Conv1d(3, 2, 2, stride=2), (3, 8)),
    (nn.Conv1d(1, 2, 2, stride=2, dilation=2, padding=1, bias=False), (1, 7)),
    (nn.Conv1d(2, 2, 1, stride=3), (2, 8)),  # pixels that no patch meets
    (nn.LeakyReLU(0.0), (5,)),
]


@pytest.mark.parametrize(("module", "shape"), MODULES)
def test_inverses_give_what_was_asked_for(module, shape):
    """module(inverse(y)) = y for a y that the module can give."""
    module = module.double()
    y = module(torch.randn(5, *shape).double()).detach()
    if isinstance(module, (nn.MaxPool2d, nn.AdaptiveMaxPool1d)):
        y = y.sign() * y
    back, scale = inverse(module, y, torch.Size(shape))
    assert back.shape == (5, *shape) and scale is None
    torch.testing.assert_close(module(back).detach(), y, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("module", [nn.Sigmoid(), nn.Tanh()])
def test_bounded_activations_after_scaling(module):
    y = torch.randn(5, 4).double() * 30
    back, scale = inverse(module, y, torch.Size((4,)))
    assert torch.isfinite(back).all()
    torch.testing.assert_close(scale.gain * module(back) + scale.shift, y, rtol=1e-7, atol=1e-7)
    flat, _ = inverse(module, torch.ones(2, 2).double(), torch.Size((2,)))
    assert torch.isfinite(flat).all()  # one value: nothing to scale


def test_overlapping_patches_are_averaged():
    """A kernel that copies its pixels: where patches disagree about one, the mean is taken."""
    conv = nn.Conv1d(1, 2, 2).double()
    with torch.no_grad():
        conv.weight.copy_(torch.eye(2).view(2, 1, 2))
        conv.bias.zero_()
    y = torch.tensor([[[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]]).double()
    back, _ = inverse(conv, y, torch.Size((1, 4)))
    torch.testing.assert_close(back, torch.tensor([[[1.0, 3.0, 4.0, 6.0]]]).double())


def test_pseudo_inverses_of_singular_weights():
    W = torch.randn(5, 1).double() @ torch.randn(1, 7).double()
    back = pseudo_inverse(W)
    torch.testing.assert_close(W @ back @ W, W, rtol=1e-9, atol=1e-12)
    assert back.abs().max() < 1e3


def cnn():
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1), nn.LeakyReLU(0.3), nn.MaxPool2d(2), nn.Dropout(0.1),
        nn.Conv2d(6, 8, 3), nn.Tanh(), nn.Flatten(), nn.Linear(32, 4),
    )  # fmt: skip


def test_convolutions_learn():
    digits = tpsgd.data.load("digits")
    x, y = digits.train
    x, y = x[y < 4], y[y < 4]
    torch.manual_seed(0)
    model = cnn()
    run = fit_zorb(model, (x, y), validation=(x, y))
    assert [e.block for e in run.history] == [1, 2, 3]
    assert run.history[-1].val_accuracy == tpsgd.evaluate(model, (x, y)) > 0.9
    assert all(m.training for m in model.modules())  # as it came


@pytest.mark.parametrize(
    "x",
    [
        torch.cat([X, X[:, :1], torch.ones(80, 2).double()], 1),  # constant and repeated inputs
        X[:1].repeat(80, 1) + 1e-3 * X,
        X[:5],
    ],
)
def test_ill_conditioned_inputs(x):
    model = nn.Sequential(nn.Linear(x.shape[1], 9), nn.LeakyReLU(), nn.Linear(9, 3)).double()
    fit_zorb(model, (x, torch.arange(len(x)) % 3))
    assert all(torch.isfinite(p).all() and p.abs().max() < 1e6 for p in model.parameters())


def test_float32_and_batches_of_any_size_agree():
    nets = []
    for size, dtype in ((3, torch.float64), (500, torch.float64), (64, torch.float32)):
        torch.manual_seed(5)
        net = nn.Sequential(nn.Linear(6, 12), nn.LeakyReLU(0.3), nn.Linear(12, 3)).to(dtype)
        fit_zorb(net, (X, Y), batch_size=size)
        nets.append(net(X.to(dtype)).detach().double())
    torch.testing.assert_close(nets[0], nets[1], rtol=1e-7, atol=1e-8)
    torch.testing.assert_close(nets[0], nets[2], rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ([nn.Linear(6, 5), nn.GELU(), nn.Linear(5, 3)], "no inverse for GELU"),
        ([nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)], "for BatchNorm1d"),
        ([nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 3)], "cannot take an input of shape"),
        ([nn.Linear(6, 5), nn.Softmax(1), nn.Linear(5, 3)], "no inverse for Softmax"),
        ([nn.Unflatten(1, (2, 3)), nn.Conv1d(2, 2, 2, groups=2), nn.Flatten(), nn.Linear(4, 3)],
         "convolution with groups"),
    ],
)  # fmt: skip
def test_refusals(model, message):
    with pytest.raises(TpsgdError, match=message):
        fit_zorb(nn.Sequential(*model).double(), (X, Y))


def test_bad_data_and_a_memory_that_is_too_small(monkeypatch):
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).double()
    with pytest.raises(TpsgdError, match="label 5"):
        fit_zorb(model, (X, Y.clamp(min=0) + 3))
    with pytest.raises(TpsgdError, match="empty"):
        fit_zorb(model, (X[:0], Y[:0]))
    monkeypatch.setattr("tpsgd.engine.learners.solved.available", lambda device: 100)
    with pytest.raises(TpsgdError, match=r"block 1 .* cannot be solved here"):
        fit_zorb(model, (X, Y))


def test_rules_that_name_their_last_objective_must_be_linear_there():
    """`Rule.last`: the last block's wish in place of its loss."""
    codes = torch.randn(3, 3).double()
    rule = tpsgd.Rule(
        "own", None, rules.mse, at=Place.BEFORE, last=lambda s: tpsgd.objectives.l2(codes)
    )
    model = nn.Sequential(nn.Linear(6, 3), nn.Tanh()).double()
    tpsgd.fit(model, (X, Y), rule=rule, optimizer=ridge(0.0))
    W = torch.linalg.pinv(torch.cat([X, torch.ones(80, 1).double()], 1)) @ codes[Y]
    torch.testing.assert_close(model[0].weight.detach(), W[:-1].T, rtol=1e-7, atol=1e-9)


def test_options_reach_the_solver():
    def net():
        torch.manual_seed(2)
        return nn.Sequential(nn.Linear(6, 12), nn.LeakyReLU(0.3), nn.Linear(12, 3)).double()

    plain, shrunk, seen, epochs = net(), net(), [], []
    fit_zorb(plain, (X, Y))
    run = fit_zorb(
        shrunk, (X, Y), alpha=10.0, memory=tpsgd.Memory(reuse=False), callbacks=[epochs.append],
        progress=lambda done, total: seen.append((done, total)),
    )  # fmt: skip
    assert shrunk[0].weight.norm() < 0.5 * plain[0].weight.norm()
    assert run.kept_bytes == 0 and len(epochs) == 2 and seen[-1] == (160, 160)
    assert run.settings["optimizer"] == "ridge(10)" and run.seconds > 0


def test_settings_that_zorb_does_not_take_are_refused():
    model = nn.Sequential(nn.Linear(6, 3)).double()
    for name, value in (("optimizer", ridge()), ("epochs", 2), ("reuse", False)):
        with pytest.raises(TpsgdError, match=f"fit_zorb has no argument '{name}'"):
            fit_zorb(model, (X, Y), **{name: value})


def test_nothing_is_appended_where_training_fails():
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    with pytest.raises(TpsgdError, match="out of range"):
        fit_zorb(model, (X, Y + 7), unscale=True)
    assert [type(m) for m in model] == [nn.Linear, nn.Tanh, nn.Linear]
    fit_zorb(model, (X, Y), unscale=True)
    share = tpsgd.evaluate(model, (X, Y))
    fit_zorb(model, (X, Y))  # again, through what was appended
    assert tpsgd.evaluate(model, (X, Y)) > share - 0.2


def test_more_refusals():
    with pytest.raises(TpsgdError, match="no layer with parameters"):
        fit_zorb(nn.Sequential(nn.Flatten()), (X, Y))
    with pytest.raises(TpsgdError, match="an output for each class"):
        fit_zorb(nn.Sequential(nn.Linear(6, 1)).double(), (X, Y.clamp(max=1)))
    frozen = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3)).double()
    frozen[0].requires_grad_(False)
    with pytest.raises(TpsgdError, match=r"block 1 .* may not learn"):
        fit_zorb(frozen, (X, Y))


def test_the_last_layers_link_is_left_alone():
    found = []
    for link in (nn.Identity(), nn.Softmax(1), nn.LogSoftmax(1)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 30), nn.Tanh(), nn.Linear(30, 3), link).double()
        fit_zorb(model, (X, Y))
        found.append(model[2].weight.detach())
    torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-9)
    assert torch.equal(found[1], found[2])
