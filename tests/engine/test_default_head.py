"""The default optimizer: Adam, and ridge for the last layer of a recurrent net."""

import json
from functools import partial

import numpy as np
import pytest
import torch
from helpers import mlp, points, same, seeded, sequences, state
from torch import nn

import tpsgd
from tpsgd import Recurrent, rules, sequential, simultaneous
from tpsgd.engine.learners.optimizers import adam

CLOSED, SOLVED = "closed form", "solved"


def net(units=8, **options):
    return nn.Sequential(Recurrent(4, units, **options), nn.Linear(units, 3)).double()


def learning(model, **settings):
    run = tpsgd.fit(model, sequences(), epochs=2, **settings)
    return [block.learning for block in run.blocks], run.settings["optimizer"]


def test_the_classifier_of_a_recurrent_net_is_solved():
    assert learning(net()) == ([CLOSED, SOLVED], "['adam', 'ridge()']")
    assert learning(net(), order=sequential)[0][-1] == SOLVED
    assert learning(net(), lr=0.01)[0][-1] == SOLVED
    assert learning(net(), rule=rules.frozen())[0] == ["frozen", SOLVED]
    both = nn.Sequential(nn.RNN(4, 8, batch_first=True), nn.Linear(8, 3)).double()
    assert learning(both)[0][-1] == SOLVED


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"optimizer": adam}, "adam"),
        ({"optimizer": tpsgd.sgd}, "sgd"),
        ({"optimizer": partial(torch.optim.SGD, lr=0.1)}, "SGD {'lr': 0.1}"),
        ({"order": simultaneous}, "adam"),
        ({"rule": rules.dfa()}, "adam"),
        ({"rule": rules.untrained()}, "adam"),
    ],
)
def test_an_optimizer_or_a_schedule_that_is_chosen_is_used(settings, name):
    ways, optimizer = learning(net(), **settings)
    assert ways[-1] in (CLOSED, "frozen") and optimizer == name


def test_a_classifier_that_cannot_be_solved_is_trained():
    model = nn.Sequential(Recurrent(4, 8), nn.Linear(8, 3), nn.Sigmoid()).double()
    assert learning(model, loss=tpsgd.mse)[0][-1] == CLOSED
    frozen = net()
    frozen[1].bias.requires_grad_(False)
    assert learning(frozen)[0][-1] == CLOSED


def test_nets_without_recurrent_layers_and_backprop_have_adam():
    run = tpsgd.fit(mlp(6, 8, 3), points(), epochs=1)
    assert run.settings["optimizer"] == "adam" and run.blocks[-1].learning == CLOSED
    assert tpsgd.fit_backprop(net(), sequences(), epochs=1).settings["optimizer"] == "adam"
    chosen, default = mlp(6, 8, 3), mlp(6, 8, 3)
    default.load_state_dict(chosen.state_dict())
    tpsgd.fit(chosen, points(), epochs=1, optimizer=adam)
    tpsgd.fit(default, points(), epochs=1)
    assert same(state(chosen), state(default))


def test_restarts_have_the_same_default():
    many = tpsgd.fit_many(net, sequences(), restarts=2, epochs=1)
    stacked = tpsgd.fit_many(net, sequences(), restarts=2, epochs=1, stacked=True)
    assert {run.blocks[-1].learning for run in [*many.runs, *stacked.runs]} == {SOLVED}


def test_python_and_the_command_line_agree(says, tmp_path):
    """`fit` and `tpsgd train` on the rows of small images."""
    images = tpsgd.data.load("digits", max_train=200)
    arrays = {"x": images.train[0][:, 0], "y": images.train[1]}
    arrays |= {"x_test": images.test[0][:, 0], "y_test": images.test[1]}
    np.savez(tmp_path / "rows.npz", **{name: t.numpy() for name, t in arrays.items()})
    words = ("--data", str(tmp_path / "rows.npz"), "--model", "rnn:16", "--epochs", "2")
    digits = tpsgd.data.load(words[1])
    factory = tpsgd.zoo.words.factory("rnn:16", digits.shape, 10)
    run = tpsgd.fit(seeded(factory), digits.train, epochs=2)
    record = json.loads(says("train", *words, "--json")[1])
    assert record["blocks"][-1]["learning"] == run.blocks[-1].learning == SOLVED
    assert record["settings"]["optimizer"] == run.settings["optimizer"]
    assert record["accuracy"] == tpsgd.evaluate(run.model, digits.test)


def test_a_small_set_of_series_is_learned_by_default():
    """Two daily curves, 60 samples: five steps of Adam are too few, one pass of ridge is not."""
    g = torch.Generator().manual_seed(0)
    t, y = torch.linspace(0, 6.28, 24), torch.arange(560) % 2
    x = torch.sin(t - 2) + 0.3 * torch.sin(2 * t - 0.8 * y[:, None])
    x = (x + 0.25 * torch.randn(x.shape, generator=g)).unsqueeze(-1)
    accuracies = {}
    for optimizer in (None, adam):
        model = seeded(lambda: nn.Sequential(Recurrent(1, 64), nn.Linear(64, 2)))
        tpsgd.fit(model, (x[:60], y[:60]), optimizer=optimizer, epochs=5, batch_size=60)
        accuracies[optimizer] = tpsgd.evaluate(model, (x[60:], y[60:]))
    assert accuracies[None] > 0.8 > accuracies[adam] + 0.1
