"""By default training holds no more memory than backprop on the same net, batch and optimizer."""

from functools import partial

import pytest
import torch
from helpers import Residual, close, mlp, points, seeded, state
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

import tpsgd
from tpsgd import Recurrent, rules


def cnn():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3), nn.LeakyReLU(), nn.Conv2d(16, 32, 3), nn.LeakyReLU(),
        nn.Flatten(), nn.Linear(512, 10),
    )  # fmt: skip


def pooled():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 64, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


def deep(norm=False):
    layers, channels = [], 1
    for _ in range(7):
        norms = [nn.BatchNorm2d(16)] if norm else []
        layers += [nn.Conv2d(channels, 16, 3, padding=1), *norms, nn.LeakyReLU()]
        channels = 16
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 10))


IMAGE = 1, 8, 8
MOMENTUM = partial(torch.optim.SGD, lr=0.01, momentum=0.9)
NETS = {
    "one layer": (lambda: mlp(64, 10), (64,)),
    "one layer has nearly all weights": (lambda: mlp(784, 64, 10), (784,)),
    "slices": (lambda: mlp(784, 512, 10, activation=nn.GELU), (784,)),
    "three layers": (lambda: mlp(64, 128, 128, 10, activation=nn.Tanh), (64,)),
    "cnn": (cnn, IMAGE),
    "pooled": (pooled, IMAGE),
    "deep": (deep, IMAGE),
    "deep, with norms": (lambda: deep(norm=True), IMAGE),
    "recurrent": (lambda: nn.Sequential(Recurrent(4, 32), nn.Linear(32, 10)), (12, 4)),
    "two recurrent layers": (
        lambda: nn.Sequential(
            Recurrent(4, 32, sequence=True), Recurrent(32, 32), nn.Linear(32, 10)
        ),
        (12, 4),
    ),
    "diagonal": (lambda: nn.Sequential(Recurrent.diagonal(4, 32), nn.Linear(32, 10)), (40, 4)),
    "residual": (
        lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), Residual(64), nn.Linear(64, 10)),
        (64,),
    ),
}
SIZES = {  # samples and batch size
    "ten samples": (10, 128),
    "a few batches": (100, 32),
    "many batches": (3000, 128),
}


def data(samples, shape):
    g = torch.Generator().manual_seed(1)
    return torch.randn(samples, *shape, generator=g), torch.arange(samples) % 10


@pytest.mark.cover(1)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("net", NETS)
def test_no_more_memory_than_backprop(net, size):
    (make, shape), (samples, batch_size) = NETS[net], SIZES[size]
    settings = {"epochs": 2, "batch_size": batch_size}
    run = tpsgd.fit(seeded(make), data(samples, shape), **settings)
    plan = tpsgd.plan(make(), shape, samples=samples, **settings)
    assert 0 < run.total_bytes <= plan.backprop
    measured = tpsgd.fit_backprop(make(), data(samples, shape), **settings)
    assert run.total_bytes <= measured.total_bytes


@pytest.mark.full
def test_no_more_memory_than_backprop_with_a_hundred_thousand_samples():
    x, y = data(100_000, (16,))
    settings = {"epochs": 2, "batch_size": 128}
    run = tpsgd.fit(mlp(16, 64, 64, 10), (x, y), **settings)
    plan = tpsgd.plan(mlp(16, 64, 64, 10), (16,), samples=100_000, **settings)
    assert run.total_bytes <= plan.backprop and run.kept_bytes == 0


def test_no_more_memory_than_backprop_with_a_loader():
    def run(train):
        loader = DataLoader(TensorDataset(*data(300, (64,))), batch_size=32)
        return train(mlp(64, 128, 128, 10), loader, epochs=2)

    assert run(tpsgd.fit).total_bytes <= run(tpsgd.fit_backprop).total_bytes


def test_no_more_memory_than_backprop_with_validation():
    held_out = data(200, (64,))
    settings = {"epochs": 2, "batch_size": 32, "validation": held_out}
    run = tpsgd.fit(mlp(64, 128, 128, 10), data(64, (64,)), **settings)
    backprop = tpsgd.fit_backprop(mlp(64, 128, 128, 10), data(64, (64,)), **settings)
    assert run.total_bytes <= backprop.total_bytes


@pytest.mark.parametrize("optimizer", [tpsgd.sgd, MOMENTUM, torch.optim.Adagrad])
def test_no_more_memory_than_backprop_with_other_optimizers(optimizer):
    settings = {"epochs": 2, "batch_size": 32, "optimizer": optimizer}
    run = tpsgd.fit(mlp(64, 128, 128, 10), data(100, (64,)), **settings)
    backprop = tpsgd.fit_backprop(mlp(64, 128, 128, 10), data(100, (64,)), **settings)
    assert run.total_bytes <= backprop.total_bytes


# ---- what is chosen ------------------------------------------------------------------------------


def test_inputs_are_kept_where_they_fit_and_the_run_says_so():
    few = tpsgd.fit(deep(), data(40, IMAGE), epochs=2, batch_size=32)
    many = tpsgd.fit(deep(), data(3000, IMAGE), epochs=2, batch_size=32)
    assert few.kept_bytes >= 40 * 16 * 64 * 4 and "kept where they fit" in few.memory_choice
    assert many.kept_bytes < 3000 * 16 * 64 * 4 and str(many).splitlines()[1] == many.memory_choice


def test_fast_keeps_all_inputs():
    settings = {"epochs": 2, "batch_size": 32}
    fast = tpsgd.fit(mlp(6, 50, 40, 3), points(400), memory="fast", **settings)
    assert fast.kept_bytes == 400 * (50 + 40) * 4 and fast.memory_choice == ""
    default = tpsgd.fit(mlp(6, 50, 40, 3), points(400), **settings)
    assert default.kept_bytes == 0 and "memory='fast' keeps them" in default.memory_choice


def test_outputs_take_the_place_of_the_inputs_they_are_computed_from():
    settings = {"epochs": 2, "batch_size": 16, "memory": tpsgd.Memory(reuse=True)}
    run = tpsgd.fit(mlp(6, 50, 50, 50, 3), points(400), **settings)
    assert run.kept_bytes == 400 * 50 * 4


@pytest.mark.parametrize("widths", [(784, 64, 10), (784, 512, 10)])
def test_codes_that_learn_first_and_slices_change_no_bit(widths):
    models = [seeded(lambda: mlp(*widths)) for _ in range(2)]
    x = data(64, (784,))
    for model, memory in zip(models, (None, "fast"), strict=True):
        tpsgd.fit(model, x, epochs=3, batch_size=32, memory=memory)
    close(state(models[0]), state(models[1]))


def test_a_rule_that_waits_and_a_solved_layer_say_that_they_may_take_more():
    settings = {"epochs": 2, "batch_size": 16}
    dfa = tpsgd.fit(mlp(6, 8, 3), points(), rule=rules.dfa(), **settings)
    assert "waits for the net's output" in dfa.memory_choice
    ridge = [torch.optim.Adam, tpsgd.ridge()]
    solved = tpsgd.fit(mlp(6, 8, 3), points(), optimizer=ridge, **settings)
    assert "a solved layer's sums" in solved.memory_choice


def test_codes_that_outweigh_their_layer_are_said_to_take_more():
    many = torch.randn(200, 4), torch.arange(200) % 100
    run = tpsgd.fit(mlp(4, 256, 100), many, epochs=2, batch_size=10)
    assert "backprop's memory, or more" in run.memory_choice


def test_frozen_layers_are_not_counted_for_backprop():
    def make():
        model = deep()
        for parameter in [*model.parameters()][:-4]:
            parameter.requires_grad_(False)
        return model

    settings = {"epochs": 2, "batch_size": 32}
    run = tpsgd.fit(make(), data(60, IMAGE), **settings)
    assert run.total_bytes <= tpsgd.fit_backprop(make(), data(60, IMAGE), **settings).total_bytes


def test_a_loader_has_its_batch_size_whatever_is_asked_for():
    def loader(**options):
        return DataLoader(TensorDataset(*data(200, IMAGE)), **options)

    sampler = BatchSampler(SequentialSampler(range(200)), 4, drop_last=False)
    for options in ({"batch_size": 4}, {"batch_sampler": sampler}):
        run = tpsgd.fit(deep(), loader(**options), batch_size=128, epochs=2)
        backprop = tpsgd.fit_backprop(deep(), loader(**options), epochs=2)
        assert run.total_bytes <= backprop.total_bytes


def test_small_weights_are_not_sliced():
    run = tpsgd.fit(mlp(13, 64, 3, activation=nn.SiLU), points(features=13), epochs=2, batch_size=8)
    assert "slices" not in run.memory_choice


def test_a_plan_without_others_has_no_backprop():
    with pytest.raises(tpsgd.TpsgdError, match="others=False"):
        _ = tpsgd.plan(mlp(6, 8, 3), (6,), others=False).backprop


def test_fast_goes_with_no_budget_or_folder():
    for settings in ({"budget": "4MB"}, {"reuse": True}):
        with pytest.raises(tpsgd.TpsgdError, match="fast"):
            tpsgd.Memory(fast=True, **settings)
