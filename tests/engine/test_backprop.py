"""Backprop's own ways to save memory: the same weights in float64, with less held."""

import copy
from functools import partial

import pytest
import torch
from helpers import (
    Residual,
    close,
    folded,
    images,
    mlp,
    points,
    ragged,
    same,
    seeded,
    sequences,
    state,
)
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import tpsgd
from tpsgd import Memory, Recurrent, TpsgdError
from tpsgd.engine.sources.batches import ArraySource, BatchForm

momentum = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


def cnn(inplace=False):
    return nn.Sequential(
        nn.Conv2d(2, 5, 3, padding=1),
        nn.ReLU(inplace),
        nn.MaxPool2d(2),
        nn.Conv2d(5, 4, 2),
        nn.ReLU(inplace),
        nn.Flatten(),
        nn.Linear(16, 3),
    )


def in_place():
    return nn.Sequential(
        nn.Linear(6, 9), nn.ReLU(True), nn.Linear(9, 7), nn.ReLU(True), nn.Linear(7, 3)
    )


def residual():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), Residual(8), nn.Linear(8, 3))


def with_dropout():
    return nn.Sequential(
        nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.5), nn.Linear(16, 9), nn.Dropout(0.3), nn.Tanh(),
        nn.Linear(9, 3),
    )  # fmt: skip


def recurrent():
    return nn.Sequential(Recurrent(4, 6, sequence=True), Recurrent(6, 5), nn.Linear(5, 3))


NETS = {
    "mlp": (lambda: mlp(6, 9, 7, 3), lambda: points(30)),
    "cnn": (cnn, lambda: images(30)),
    "cnn in place": (lambda: cnn(True), lambda: images(30)),
    "in place": (in_place, lambda: points(30)),
    "residual": (residual, lambda: points(30)),
    "recurrent": (recurrent, lambda: sequences(30)),
    "nn.RNN": (
        lambda: nn.Sequential(nn.RNN(4, 5, 2, batch_first=True), nn.Linear(5, 3)),
        lambda: sequences(30),
    ),
}
WAYS = {
    "pieces": {"micro_batch": 4},
    "pieces of 1": {"micro_batch": 1},
    "a piece larger than the batch": {"micro_batch": 99},
    "checkpoint": {"segments": True},
    "one segment": {"segments": 1},
    "two segments": {"segments": 2},
    "pieces, checkpoint": {"micro_batch": 4, "segments": True},
}
PLAIN = {"epochs": 1, "batch_size": 11, "seed": 3}


def trained(make, data, **settings):
    model = seeded(make).double()
    run = tpsgd.fit_backprop(model, (data[0].double(), data[1]), **folded(**(PLAIN | settings)))
    return state(model), run


def agree(make, data, way, **settings):
    expected, plain = trained(make, data, **settings)
    found, run = trained(make, data, **settings, **way)
    assert not same(expected, state(seeded(make).double()))
    close(found, expected)
    assert run.sample_passes == plain.sample_passes
    for a, b in zip(run.history, plain.history, strict=True):
        assert (a.block, a.epoch, a.accuracy) == (b.block, b.epoch, b.accuracy)
        assert a.loss == pytest.approx(b.loss, rel=2e-6)


ALL = [
    (kind, way)
    for kind in NETS
    for way in WAYS
    if kind not in ("recurrent", "nn.RNN") or "segments" not in WAYS[way]
]


@pytest.mark.usefixtures("unwatched")
@pytest.mark.parametrize(("kind", "way"), ALL)
def test_less_memory_the_same_weights(kind, way):
    make, data = NETS[kind]
    agree(make, data(), WAYS[way])


@pytest.mark.usefixtures("unwatched")
@pytest.mark.parametrize("way", ["pieces", "two segments"])
@pytest.mark.parametrize("optimizer", [tpsgd.sgd, momentum, torch.optim.RMSprop])
def test_less_memory_the_same_weights_for_other_optimizers(optimizer, way):
    agree(cnn, images(30), WAYS[way], optimizer=optimizer)


@pytest.mark.usefixtures("unwatched")
@pytest.mark.parametrize("way", ["pieces", "checkpoint"])
@pytest.mark.parametrize("loss", [tpsgd.mse, tpsgd.bce, tpsgd.cross_entropy])
def test_less_memory_the_same_weights_for_every_loss_and_rows_of_labels(loss, way):
    x, y = points(30)
    y = F.one_hot(y, 3).double() if loss is not tpsgd.mse else y
    agree(lambda: mlp(6, 9, 7, 3), (x, y), WAYS[way], loss=loss)


@pytest.mark.usefixtures("unwatched")
@pytest.mark.parametrize("way", ["pieces", "checkpoint"])
def test_the_weights_are_those_of_a_loop_by_hand(way):
    make, data = NETS["mlp"]
    x, y = data()
    x = x.double()
    model = seeded(make).double()
    optimizer = momentum(model.parameters())
    order = ArraySource(x, y, BatchForm(torch.device("cpu"), torch.float64, 11, (3,)))
    for epoch in range(1):
        for index in order.indices(0, epoch):
            optimizer.zero_grad()
            F.cross_entropy(model(x[index]), y[index]).backward()
            optimizer.step()
    close(trained(make, data(), optimizer=momentum, **WAYS[way])[0], state(model))


@pytest.mark.usefixtures("unwatched")
@pytest.mark.parametrize("segments", [True, 1, 2, 3])
def test_dropout_drops_the_same_when_it_is_computed_again(segments):
    agree(with_dropout, points(30), {"segments": segments})


@pytest.mark.usefixtures("unwatched")
def test_dropout_drops_something():
    """Otherwise nothing above has tested it."""
    dropped, kept = (
        trained(make, points(30))[0]["0.weight"]
        for make in (with_dropout, lambda: with_dropout().apply(_no_dropout))
    )
    assert not torch.allclose(dropped, kept)


def _no_dropout(module):
    if isinstance(module, nn.Dropout):
        module.p = 0.0


def test_batch_norm_with_checkpoints_is_the_same():
    def make():
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))

    agree(make, points(30), {"segments": True}, optimizer=tpsgd.sgd)


@pytest.mark.usefixtures("unwatched")
@pytest.mark.parametrize("way", WAYS)
def test_less_memory_the_same_weights_from_a_loader(way):
    x, y = points(30)

    def weights(**settings):
        model = mlp(6, 9, 3).double()
        loader = DataLoader(TensorDataset(x.double(), y), batch_size=7)
        tpsgd.fit_backprop(model, loader, **PLAIN, **folded(**settings))
        return state(model)

    close(weights(**WAYS[way]), weights())


@pytest.mark.parametrize("way", WAYS)
def test_frozen_parameters_stay_and_nothing_is_left(way):
    def weights(**settings):
        model = cnn().double()
        model.load_state_dict(seeded(cnn).double().state_dict())
        model[0].requires_grad_(False)
        x, y = images(30)
        tpsgd.fit_backprop(model, (x.double(), y), **PLAIN, **folded(**settings))
        return model

    plain, model = weights(), weights(**WAYS[way])
    close(state(model), state(plain))
    assert torch.equal(model[0].weight, seeded(cnn).double()[0].weight)
    assert [p.requires_grad for p in model.parameters()] == [False] * 2 + [True] * 4
    assert all(p.grad is None for p in model.parameters())
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    assert [type(m) for m in model] == [type(m) for m in cnn()]


@pytest.mark.parametrize("way", WAYS)
def test_the_model_is_itself_afterwards(way):
    model = seeded(in_place)
    kept = copy.deepcopy(model.eval())
    tpsgd.fit_backprop(model, points(30), epochs=1, **folded(**WAYS[way]))
    assert str(model) == str(kept) and not model.training
    assert model.state_dict().keys() == kept.state_dict().keys()


def test_the_record_says_how():
    run = tpsgd.fit_backprop(
        mlp(6, 8, 3), points(), epochs=1, segments=2, memory=Memory(micro_batch=3)
    )
    assert run.settings["segments"] == 2 and run.settings["micro_batch"] == 3


# ---- memory --------------------------------------------------------------------------------------


def deep(width=24, blocks=9):
    """Many layers of the same width."""
    return mlp(*[width] * blocks, 3, activation=nn.Tanh)


def peak(model, batch=128, width=24, **settings):
    run = tpsgd.fit_backprop(
        model, points(2 * batch, width), epochs=1, batch_size=batch, **folded(**settings)
    )
    return run.peak_bytes


def test_micro_batches_hold_the_activations_of_a_piece():
    whole, four, many = (peak(deep(), **s) for s in ({}, {"micro_batch": 32}, {"micro_batch": 8}))
    layers = 8 * 24 * 4  # bytes of a sample's activations
    assert whole - four > 0.9 * 96 * layers
    assert four - many > 0.9 * 24 * layers


def test_checkpoints_hold_one_activation_a_segment():
    """Of a block: what it begins with, and the insides of one."""

    def wide():
        layers = [m for _ in range(8) for m in (nn.Linear(24, 24), nn.Tanh(), nn.Sigmoid())]
        return seeded(lambda: nn.Sequential(*layers, nn.Linear(24, 3)))

    plain, segments, two = (peak(wide(), **s) for s in ({}, {"segments": True}, {"segments": 3}))
    one = 128 * 24 * 4
    assert plain - segments > 6 * one
    assert plain - two > 6 * one


# ---- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [-1, 4, 100])
def test_there_are_no_more_segments_than_blocks(count):
    with pytest.raises(TpsgdError, match="segments must be between 1 and 3"):
        tpsgd.fit_backprop(mlp(6, 8, 7, 3), points(), segments=count)


@pytest.mark.parametrize("value", [0, -1, 1.5])
def test_micro_batch_is_a_whole_number(value):
    with pytest.raises(TpsgdError, match="micro_batch must be a whole number"):
        tpsgd.fit_backprop(mlp(6, 8, 3), points(), memory=Memory(micro_batch=value))


class Last(nn.Module):
    """The output of a recurrent layer of torch's after the last step."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)[0][:, -1]


class Whole(nn.Module):
    """A net whose order of layers is in its forward method."""

    def __init__(self, body):
        super().__init__()
        self.body, self.head = body, nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.body(x))


GRU, LSTM = (kind(4, 6, batch_first=True) for kind in (nn.GRU, nn.LSTM))
CELLS = Last(GRU), Last(LSTM), tpsgd.Recurrent(4, 6)


@pytest.mark.parametrize("cell", CELLS, ids=["GRU", "LSTM", "Recurrent"])
def test_a_class_with_a_recurrent_layer_is_trained_by_both(cell):
    model, data = Whole(cell), (torch.randn(8, 5, 4), torch.arange(8) % 3)
    for train in (tpsgd.fit, tpsgd.fit_backprop):
        assert train(model, data, epochs=1).history


class DependsOnData(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(x.mean(1)) * (2 if x.sum() > 0 else 3)


def test_what_fit_sends_to_backprop_is_trained_by_it():
    model, data = DependsOnData(), (torch.randn(8, 5, 4), torch.arange(8) % 3)
    with pytest.raises(TpsgdError, match=r"cannot cut DependsOnData.*tpsgd\.fit_backprop"):
        tpsgd.fit(model, data)
    assert tpsgd.fit_backprop(model, data, epochs=1).history


def test_what_backprop_cannot_train_as_it_is_is_not_sent_to_it_as_it_is():
    with pytest.raises(TpsgdError, match=r"ModuleList has no forward method: pass nn\.Sequential"):
        tpsgd.fit(nn.ModuleList([nn.Linear(4, 3)]), (torch.randn(8, 4), torch.arange(8) % 3))


def test_a_budget_is_refused_with_what_backprop_takes_instead():
    with pytest.raises(TpsgdError, match=r"tpsgd\.Memory\(micro_batch=8\)"):
        tpsgd.fit_backprop(mlp(6, 8, 3), points(), memory="1MB")
    tpsgd.fit_backprop(mlp(6, 8, 3), points(), epochs=1, memory=Memory(micro_batch=8))


def test_only_a_sequential_has_segments():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x):
            return self.layer(x)

    with pytest.raises(TpsgdError):
        tpsgd.fit_backprop(Net(), points(), segments=2)
    tpsgd.fit_backprop(Net(), points(), epochs=1, memory=Memory(micro_batch=5))


def test_sequences_of_different_lengths_are_not_cut():
    x, y = sequences(12)
    model = nn.Sequential(Recurrent(4, 5), nn.Linear(5, 3)).double()
    with pytest.raises(TpsgdError, match="lengths cannot be cut"):
        tpsgd.fit_backprop(model, (ragged(x), y), memory=Memory(micro_batch=4))


@pytest.mark.parametrize("layer", [Recurrent(4, 5), nn.RNN(4, 5, batch_first=True)])
def test_recurrent_layers_have_no_segments(layer):
    with pytest.raises(TpsgdError, match="segments are for models without recurrent layers"):
        tpsgd.fit_backprop(nn.Sequential(layer, nn.Linear(5, 3)), sequences(), segments=True)
