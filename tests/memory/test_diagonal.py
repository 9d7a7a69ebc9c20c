"""The memory of diagonal recurrences: flat in the length, planned to the byte, kept to a budget."""

import pytest
import torch
from helpers import with_full
from torch import nn

import tpsgd
from tpsgd import Recurrent

CLASSES = 3
ORDERS = {"sequential": tpsgd.sequential, "simultaneous": tpsgd.simultaneous}


def pixels(at, layers, units=16):
    each = (
        Recurrent.diagonal(1 if i == 0 else units, units, loss_at=at, sequence=i < layers - 1)
        for i in range(layers)
    )
    return nn.Sequential(*each, nn.Linear(units, CLASSES))


@pytest.mark.cover(1)
@pytest.mark.parametrize("at", ["last", "mean", "every"])
@pytest.mark.parametrize("layers", with_full([1, 2], [2]))
def test_memory_is_flat_in_the_length_and_planned(at, layers):
    peaks = []
    settings = {"batch_size": 8, "epochs": 1, "order": tpsgd.simultaneous, "window": 7}
    for steps in (21, 63):
        x, y = torch.rand(24, steps, 1), torch.arange(24) % CLASSES
        run = tpsgd.fit(pixels(at, layers), (x, y), **settings)
        plan = tpsgd.plan(pixels(at, layers), (steps, 1), samples=24, others=False, **settings)
        assert plan.lines[0].peak == run.peak_bytes
        peaks.append(run.peak_bytes)
    assert peaks[1] <= 1.03 * peaks[0]


@pytest.mark.parametrize("order", with_full(ORDERS, ["simultaneous"]))
def test_plans_are_what_will_be_measured(order, steps=10):
    x, y = torch.rand(24, steps, 1), torch.arange(24) % CLASSES
    settings = {"batch_size": 8, "epochs": 2, "order": ORDERS[order]}
    settings["memory"] = tpsgd.Memory(reuse=False)
    run = tpsgd.fit(pixels("mean", 2), (x, y), **settings)
    plan = tpsgd.plan(pixels("mean", 2), (steps, 1), samples=24, **settings)
    assert plan.lines[0].peak == run.peak_bytes
    backprop = tpsgd.fit_backprop(pixels("mean", 2), (x, y), batch_size=8, epochs=2)
    assert plan["backprop"].peak == backprop.peak_bytes


def leaky_first(at):
    return Recurrent(50, 16, sequence=True), Recurrent.diagonal(16, 16, loss_at=at)


def diagonal_first(at):
    return Recurrent.diagonal(50, 16, loss_at=at, sequence=True), Recurrent(16, 16)


@pytest.mark.cover(1)
@pytest.mark.parametrize("at", ["last", "mean", "every"])
@pytest.mark.parametrize(
    "layers", [lambda at: [Recurrent.diagonal(50, 16, loss_at=at)], leaky_first, diagonal_first],
    ids=["diagonal", "leaky, diagonal", "diagonal, leaky"],
)  # fmt: skip
def test_plans_of_tokens_are_what_will_be_measured(at, layers):
    def net():
        return nn.Sequential(*layers(at), nn.Linear(16, CLASSES))

    x, y = torch.arange(24 * 20).view(24, 20) * 7 % 50, torch.arange(24) % CLASSES
    settings = {"batch_size": 8, "epochs": 1}
    run = tpsgd.fit(net(), (x, y), **settings)
    plan = tpsgd.plan(net(), (20,), dtype=x.dtype, samples=24, others=False, **settings)
    assert plan.lines[0].peak == run.peak_bytes


@pytest.mark.full
def test_a_budget_is_kept():
    x, y = torch.rand(64, 8, 1), torch.arange(64) % CLASSES
    plain = tpsgd.fit(pixels("mean", 1), (x, y), batch_size=32, epochs=1).peak_bytes
    memory = tpsgd.Memory(budget=plain // 2)
    run = tpsgd.fit(pixels("mean", 1), (x, y), batch_size=32, epochs=1, memory=memory)
    assert run.peak_bytes <= plain // 2
