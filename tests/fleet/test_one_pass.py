"""The head of a fleet is that of `tpsgd.OnePass`, which has read all samples one after another."""

import pytest
import torch
from torch import nn

pytest.importorskip("flwr", reason="Flower is not installed: pip install tpsgd-fleet")

from fleet.desk import CLASSES, INPUTS, client, run, samples

from tpsgd import OnePass, ridge
from tpsgd_streams.random_features import random_layer

COUNTS, WIDTH, ALPHA = (5, 40, 100), 20, 1e-2


def test_streamed_merged_and_of_a_fleet_are_the_same():
    def model(context=None):
        layers = random_layer(INPUTS, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES)
        return nn.Sequential(nn.Flatten(), *layers).double()

    clients = [samples(count, seed=i) for i, count in enumerate(COUNTS)]
    clients = [(x.double(), y) for x, y in clients]
    report, _ = run(client(clients, model), clients, model, rounds=0, head=ridge(ALPHA))

    def head():
        return OnePass(WIDTH, solver=ridge(ALPHA), classes=range(CLASSES))

    streamed, merged = head(), head()
    for x, y in clients:
        merged.merge(head().partial_fit(x, y))
        for i in range(len(y)):
            streamed.partial_fit(x[i], int(y[i]))
    x = torch.cat([x for x, _ in clients])
    expected = head().partial_fit(x, torch.cat([y for _, y in clients])).outputs(x)
    for out in (streamed.outputs(x), merged.outputs(x), report.model(x)):
        torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)
