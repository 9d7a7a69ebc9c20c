"""A class that one client has gets its row on all of them; old rows stay as they are."""

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed: pip install tpsgd-fleet")

from fleet.desk import average, client, context, message, net, run, samples
from flwr.app import Array, ArrayRecord
from flwr.serverapp.strategy import FedAdam

import tpsgd
from tpsgd_fleet.classes import samples_of
from tpsgd_fleet.shared_model import arrays_of, with_rows

CLIENTS = [samples(60, seed=1), samples(80, seed=2, classes=4)]  # the second has class 3


def test_a_class_is_announced_and_learned_from_the_next_round_on():
    report, desk = run(client(CLIENTS, epochs=5, lr=0.02), CLIENTS, rounds=6)
    assert [r.new_classes for r in report.rounds] == [["3"]] + [[]] * 5
    assert report.classes == ["0", "1", "2", "3"]
    asked = [config["classes"] for config in desk.configs]
    assert asked[:2] == [["0", "1", "2"]] * 2 and asked[2:] == [report.classes] * 10
    new = samples(40, seed=3, classes=4)
    of_new = new[0][new[1] == 3]
    assert (report.model(of_new).argmax(1) == 3).float().mean() > 0.7


def test_old_rows_stay_bit_for_bit_and_the_new_row_is_zero():
    report, _ = run(client(CLIENTS), CLIENTS, rounds=1)
    y = CLIENTS[1][1]
    without = [CLIENTS[0], (CLIENTS[1][0][y < 3], y[y < 3])]
    expected, _ = run(client(without), without, rounds=1)
    head, before = report.model[2], expected.model[2]
    assert torch.equal(head.weight[:3], before.weight) and torch.equal(head.bias[:3], before.bias)
    assert not head.weight[3].any() and not head.bias[3]
    assert torch.equal(report.model[0].weight, expected.model[0].weight)


def test_other_clients_get_the_row():
    grown = {
        name: Array(with_rows(array.numpy(), 4)) if name.startswith("2.") else array
        for name, array in arrays_of(net()).items()
    }
    asked = message(ArrayRecord(grown), classes=["0", "1", "2", "3"])
    reply = client(CLIENTS)(asked, context(0))
    assert reply.content["arrays"]["2.weight"].shape == (4, 8)


def test_the_state_of_fedadam_grows_too():
    report, _ = run(client(CLIENTS), CLIENTS, strategy=average(FedAdam, eta=0.1), rounds=3)
    assert report.model[2].weight.shape == (4, 8) and report.model[2].weight[3].any()


def test_names_mean_the_same_class_on_every_client():
    words = np.array(["cat", "dog", "cow", "emu"])
    clients = [(x, words[y].tolist()) for x, y in CLIENTS]
    named, _ = run(client(clients), clients, rounds=2, classes=["cat", "dog", "cow"])
    plain, _ = run(client(CLIENTS), CLIENTS, rounds=2)
    assert named.classes == ["cat", "dog", "cow", "emu"]
    assert torch.equal(named.model[2].weight, plain.model[2].weight)


def test_a_client_with_new_classes_alone_announces_them_and_learns_later():
    x, y = CLIENTS[1]
    clients = [CLIENTS[0], (x[y == 3], y[y == 3])]
    report, _ = run(client(clients), clients, rounds=2)
    alone, _ = run(client(clients[:1]), clients[:1], rounds=1)
    assert report.rounds[0].refused == {} and report.rounds[0].new_classes == ["3"]
    assert report.rounds[0].loss == alone.rounds[0].loss
    assert report.model[2].weight[3].any()


def test_accuracy_counts_unknown_classes_as_wrong():
    test = samples(80, classes=4)
    report, _ = run(client(CLIENTS), CLIENTS, rounds=1, evaluate=lambda context: test)
    listed = test[1] < 3
    right = tpsgd.evaluate(report.model, (test[0][listed], test[1][listed])) * 60
    assert report.rounds[0].accuracy <= 0.75
    assert report.rounds[0].accuracy == pytest.approx(right / 80, abs=0.05)


def test_rows_of_numbers_are_taken_as_they_are():
    x, y = samples()
    rows = torch.eye(3)[y]
    assert samples_of((x, rows), ["0", "1", "2"]).count == 60
    report, _ = run(client([(x, rows)]), [(x, rows)], rounds=1)
    assert not report.rounds[0].refused
