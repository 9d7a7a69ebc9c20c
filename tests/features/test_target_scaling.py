"""Labels that are numbers are standardised while a net learns, and nobody sees it afterwards."""

import pytest
import torch
from helpers import close, mlp, points, same, seeded, state
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tpsgd
from tpsgd import Checkpoint, rules
from tpsgd.features.target_scaling import TargetScaling

pytestmark = pytest.mark.usefixtures("unwatched")

X = points(64)[0]
Y = 100 * torch.tanh(X[:, :1] / 3) + 5000
BOTH = torch.cat([Y, 1e-3 * X[:, 1:2]], 1)
SETTINGS = {"epochs": 20, "batch_size": 16, "lr": 0.01}


def net(outputs=1):
    return mlp(6, 12, outputs)


def trained(data, model=None, **settings):
    model = net(data[1].shape[1]) if model is None else model
    run = tpsgd.fit(model, data, **SETTINGS | settings)
    return model, run


def test_standardised_labels_have_mean_0_and_deviation_1_in_every_number():
    scaled = TargetScaling.of(BOTH)(BOTH)
    torch.testing.assert_close(scaled.mean(0), torch.zeros(2).double(), rtol=0, atol=1e-9)
    torch.testing.assert_close(scaled.std(0, correction=0), torch.ones(2).double())


@pytest.mark.parametrize("kind", ["linear", "convolution", "no bias"])
def test_units_go_into_a_last_layer_and_out_again(kind):
    layers = {
        "linear": (lambda: nn.Linear(3, 2), torch.randn(4, 3)),
        "convolution": (lambda: nn.Conv1d(3, 2, 1), torch.randn(4, 3, 5)),
        "no bias": (lambda: nn.Linear(3, 2, bias=False), torch.randn(4, 3)),
    }
    make, x = layers[kind]
    layer = seeded(make).double()
    scaling = TargetScaling.of(BOTH, shifts=kind != "no bias")
    shape = (2, *[1] * (x.dim() - 2))
    before, weights = layer(x.double()), state(layer)
    scaling.into(layer)
    in_units = before * scaling.scale.view(shape) + scaling.shift.view(shape)
    torch.testing.assert_close(layer(x.double()), in_units)
    scaling.out_of(layer)
    close(state(layer), weights)


@pytest.mark.parametrize("name", ["readout-learned", "tpsgd-l2", "dfa", "auxiliary", "frozen"])
def test_outputs_are_in_the_units_of_the_labels(name):
    model, run = trained((X, BOTH), rule=rules.ALL[name].make(), epochs=60)
    assert tpsgd.evaluate(model, (X, BOTH)) > 0.7
    assert run.settings["targets"] == "standardised"


def test_backprop_learns_standardised_labels_too():
    model = net()
    tpsgd.fit_backprop(model, (X, Y), **SETTINGS)
    assert tpsgd.evaluate(model, (X, Y)) > 0.7


@pytest.mark.parametrize("shift", [0.0, 1e4])
def test_the_units_of_labels_change_nothing_but_the_last_layer(shift):
    plain, _ = trained((X, Y - 5000))
    shifted, _ = trained((X, 1024 * (Y - 5000) + shift))
    torch.testing.assert_close(shifted(X), 1024 * plain(X) + shift, rtol=1e-3, atol=1.0)


@pytest.mark.parametrize("optimizer", [tpsgd.ridge(), torch.optim.Adam])
def test_numbers_in_a_row_or_a_column_are_the_same(optimizer):
    model, other = net(), net()
    for m, y in ((model, Y), (other, Y[:, 0])):
        tpsgd.fit(m, (X, y), **SETTINGS | {"rule": rules.frozen(), "optimizer": optimizer})
    assert same(state(model), state(other))


@pytest.mark.parametrize("form", ["loader", "data set"])
def test_a_loader_has_the_same_statistics_as_arrays(form):
    data = TensorDataset(X, torch.cat([Y, Y], 1))
    data = data if form == "data set" else DataLoader(data, 64)
    settings = {"batch_size": 64, "epochs": 3, "optimizer": torch.optim.SGD}
    model, other = net(2), net(2)
    tpsgd.fit(model, data, rule=rules.frozen(), **settings)
    tpsgd.fit(other, (X, torch.cat([Y, Y], 1)), rule=rules.frozen(), **settings)
    close(state(model), state(other), rtol=1e-4, atol=1e-4)


def test_a_second_fit_goes_on_from_the_first():
    model, run = trained((X, Y))
    _, second = trained((X, Y), model)
    began, goes_on = (next(e for e in r.history if e.block == 2) for r in (run, second))
    last = [e for e in run.history if e.block == 2][-1]
    assert goes_on.loss < 2 * last.loss < 0.2 * began.loss
    assert tpsgd.evaluate(model, (X, Y)) > 0.9


def test_a_run_that_is_resumed_equals_one_that_was_not(tmp_path):
    class Stopped(Exception):
        pass

    def stop(epoch):
        if (epoch.block, epoch.epoch) == (2, 4):
            raise Stopped

    whole, _ = trained((X, Y), epochs=8, callbacks=[lambda epoch: None])
    checkpoint = Checkpoint(tmp_path / "run.ckpt")
    with pytest.raises(Stopped):
        trained((X, Y), epochs=8, checkpoint=checkpoint, callbacks=[stop])
    resumed, _ = trained((X, Y), epochs=8, checkpoint=checkpoint, callbacks=[lambda epoch: None])
    assert same(state(resumed), state(whole))


def test_a_run_that_breaks_leaves_the_units_of_the_labels():
    def stop(epoch):
        if epoch.block == 2 and epoch.epoch == 20:
            raise RuntimeError

    model = net()
    with pytest.raises(RuntimeError):
        trained((X, Y), model, callbacks=[stop])
    assert tpsgd.evaluate(model, (X, Y)) > 0.5


def test_callbacks_see_the_units_of_the_labels_and_change_nothing_by_looking():
    scores = []
    model = net()
    trained((X, Y), model, callbacks=[lambda _: scores.append(tpsgd.evaluate(model, (X, Y)))])
    other, _ = trained((X, Y))
    assert same(state(model), state(other))
    assert scores[-1] == tpsgd.evaluate(model, (X, Y)) > 0.5


def test_what_a_callback_writes_into_the_last_layer_is_in_the_units_of_the_labels():
    model = net()

    def set_bias(epoch):
        with torch.no_grad():
            model[-1].bias.fill_(5000.0)
            model[-1].weight.zero_()

    settings = {"rule": rules.frozen(), "lr": 1e-9, "callbacks": [set_bias]}
    trained((X, Y), model, **settings)
    torch.testing.assert_close(model(X), torch.full((64, 1), 5000.0))


def test_a_saved_model_gives_the_same_outputs(tmp_path):
    model, run = trained((X, BOTH))
    run.save(tmp_path / "model")
    loaded = tpsgd.load(tmp_path / "model")
    assert torch.equal(loaded.model(X), model(X))
    assert loaded.run.history[-1].r2 == run.history[-1].r2


def test_a_quick_step_learns_the_same(monkeypatch):
    quick, _ = trained((X, Y))
    monkeypatch.setenv("TPSGD_FAST", "0")
    plain, _ = trained((X, Y))
    assert same(state(quick), state(plain))


def test_a_constant_number_is_learned_as_it_is():
    y = torch.cat([Y, torch.full_like(Y, 0.1)], 1)
    model, _ = trained((X, y), epochs=60)
    assert torch.isfinite(model(X)).all()
    assert (model(X)[:, 1] - 0.1).abs().max() < 0.3


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_refused_and_nothing_is_lost(bad):
    y, model = Y.clone(), net()
    y[3] = bad
    before = state(model)
    with pytest.raises(tpsgd.TpsgdError, match="labels contain NaN or infinity"):
        trained((X, y), model)
    assert same(before, state(model))


AS_THEY_ARE = {
    "a sigmoid": lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1), nn.Sigmoid()),
    "a batch norm": lambda: nn.Sequential(
        nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1), nn.BatchNorm1d(1)
    ),
}


@pytest.mark.parametrize("end", AS_THEY_ARE)
def test_a_model_that_bounds_its_output_learns_labels_as_they_are(end):
    y = torch.sigmoid(X[:, :1])
    model, run = trained((X, y), seeded(AS_THEY_ARE[end]), loss="mse", epochs=100, lr=0.03)
    assert run.settings["targets"] == "as they are"
    assert tpsgd.evaluate(model, (X, y), loss="mse") < y.var() / 4


def test_a_last_layer_that_is_frozen_learns_labels_as_they_are():
    model = net()
    model[-1].requires_grad_(False)
    before = state(model[-1])
    _, run = trained((X, Y), model)
    assert same(before, state(model[-1])) and run.settings["targets"] == "as they are"


def test_looking_at_a_model_leaves_a_net_without_epochs_as_it_was():
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 1))
    before = state(model)
    tpsgd.fit(model, (X, Y), rule=rules.untrained(), epochs=1)
    assert same(before, state(model))


@pytest.mark.parametrize("stacked", [False, True])
def test_restarts_go_on_from_trained_models(stacked):
    model, _ = trained((X, Y))

    def again():
        copy = net()
        copy.load_state_dict(model.state_dict())
        return copy

    settings = SETTINGS | {"epochs": 2, "lr": 1e-6, "stacked": stacked}
    several = tpsgd.fit_many(again, (X, Y), rule=rules.tpsgd_l2(), restarts=2, **settings)
    for run in several.runs:
        assert tpsgd.evaluate(run.model, (X, Y)) == pytest.approx(
            tpsgd.evaluate(model, (X, Y)), abs=0.01
        )


def test_a_model_that_was_trained_badly_goes_on_in_its_units():
    """Worse than the mean, but still nearer in the labels' units than standardised."""
    model, _ = trained((X, Y), epochs=60)
    with torch.no_grad():
        model[-1].bias += 3 * Y.std()
    assert tpsgd.evaluate(model, (X, Y)) < 0
    weights = model[-1].weight.detach().clone()
    trained((X, Y), model, epochs=1, lr=1e-6)
    torch.testing.assert_close(model[-1].weight, weights, rtol=1e-3, atol=1e-3)


def test_whole_numbers_are_numbers_with_their_loss_and_one_output():
    y = Y.round().long().squeeze(1)
    model, run = trained((X, y), net(), epochs=60, loss="mse")
    assert tpsgd.evaluate(model, (X, y.float())) > 0.7
    assert run.settings["targets"] == "standardised" and "accuracy" not in str(run)
