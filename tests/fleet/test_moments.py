"""A ridge head of a fleet is the ridge head of all samples in one place, after one round."""

import pytest
import torch
from torch import nn

pytest.importorskip("flwr", reason="Flower is not installed: pip install tpsgd-fleet")

from fleet.desk import Desk, average, client, context, net, run, samples

import tpsgd
from tpsgd import TpsgdError, fleet, rules

COUNTS = 5, 40, 100


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def clients_of(classes):
    return [samples(count, seed=i, classes=classes) for i, count in enumerate(COUNTS)]


def central(clients, alpha, outputs=3, model=net, seed=0):
    """`fit` with a ridge head on all samples, hidden layers as they are."""
    data = tuple(torch.cat(column) for column in zip(*clients, strict=True))
    torch.manual_seed(seed)
    model = model()
    if outputs > 3:
        tpsgd.nets.new_classes.add_output(model)
    tpsgd.fit(model, data, rule=rules.frozen(), optimizer=tpsgd.ridge(alpha), epochs=1)
    return model


@pytest.mark.parametrize("alpha", [None, 1e-3, 0.1])
@pytest.mark.parametrize("bias", [True, False])
def test_one_round_equals_a_central_ridge(alpha, bias):
    def model(context=None):
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3, bias=bias))

    clients = [(x + 5, y) for x, y in clients_of(3)]  # means that must not be lost
    report, _ = run(client(clients, model), clients, model, rounds=0, head=tpsgd.ridge(alpha))
    expected = central(clients, alpha, model=model)
    close(report.model[2].weight, expected[2].weight)
    if bias:
        close(report.model[2].bias, expected[2].bias)


def test_a_class_of_one_client_is_in_the_solution_of_the_same_round():
    clients = [*clients_of(3)[:2], samples(100, seed=2, classes=4)]
    report, _ = run(client(clients), clients, rounds=0, head=tpsgd.ridge(1e-3))
    expected = central(clients, 1e-3, outputs=4)
    assert report.classes == ["0", "1", "2", "3"]
    close(report.model[2].weight, expected[2].weight)


def test_two_clients_with_different_new_classes():
    x, y = samples(100, classes=5)
    clients = [(x[y != 3], y[y != 3]), (x[y != 4], y[y != 4])]
    report, _ = run(client(clients), clients, rounds=0, head=tpsgd.ridge(1e-3))
    data = tuple(torch.cat(column) for column in zip(*clients, strict=True))
    torch.manual_seed(0)
    model = net()
    for _ in range(2):
        tpsgd.nets.new_classes.add_output(model)
    tpsgd.fit(model, data, rule=rules.frozen(), optimizer=tpsgd.ridge(1e-3), epochs=1)
    close(report.model[2].weight, model[2].weight)


def test_the_head_is_solved_on_the_features_of_the_last_round():
    clients = clients_of(3)
    report, _ = run(client(clients), clients, rounds=2, head=tpsgd.ridge(1e-3))
    without, _ = run(client(clients), clients, rounds=2)
    assert torch.equal(report.model[0].weight, without.model[0].weight)
    assert len(report.rounds) == 3
    data = tuple(torch.cat(column) for column in zip(*clients, strict=True))
    settings = {"rule": rules.frozen(), "optimizer": tpsgd.ridge(1e-3), "epochs": 1}
    tpsgd.fit(without.model, data, **settings)
    close(report.model[2].weight, without.model[2].weight)


def test_a_head_that_cannot_be_solved_is_refused_before_the_rounds():
    def model(context=None):
        return nn.Sequential(nn.Linear(6, 3), nn.Softmax(1))

    desk = Desk(client([samples()], model), 1)
    app = fleet.server(model, strategy=average(), rounds=1, head=tpsgd.ridge())
    with pytest.raises(TpsgdError, match="cannot solve the last block"):
        app(desk, context(-1))
    assert not desk.configs
