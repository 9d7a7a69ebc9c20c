"""By default training holds no more memory than backprop on the same net, batch and optimizer."""

from functools import partial
from itertools import product

import pytest
import torch
from helpers import Residual, close, mlp, points, seeded, state
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

import tpsgd
from tpsgd import Recurrent, rules
from tpsgd.common.units import size


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
@pytest.mark.parametrize("activation", [nn.Tanh, nn.Hardtanh])  # in closed form, by autograd
def test_codes_that_learn_first_and_slices_change_no_bit(widths, activation):
    models = [seeded(lambda: mlp(*widths, activation=activation)) for _ in range(2)]
    x = data(64, (784,))
    for model, memory in zip(models, (None, "fast"), strict=True):
        tpsgd.fit(model, x, epochs=3, batch_size=32, memory=memory)
    close(state(models[0]), state(models[1]))


def test_a_rule_that_waits_and_a_solved_layer_say_that_they_take_more():
    settings = {"epochs": 2, "batch_size": 16}
    dfa = tpsgd.fit(mlp(6, 8, 8, 8, 3), points(), rule=rules.dfa(), **settings)
    assert "% less: the rule waits for the net's output" in dfa.memory_choice
    ridge = [torch.optim.Adam, tpsgd.ridge()]
    solved = tpsgd.fit(mlp(6, 8, 3), points(), optimizer=ridge, **settings)
    assert "% less" not in solved.memory_choice  # its sums are small
    flat = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 3))
    solved = tpsgd.fit(flat, points(), optimizer=[tpsgd.sgd, tpsgd.ridge()], **settings)
    assert "% less: a solved layer's sums are in memory" in solved.memory_choice


def said(run, make, shape, samples, **settings):
    """Backprop's bytes by the plan, if the run says them."""
    count = tpsgd.plan(make(), shape, samples=samples, **settings).backprop
    return count if f"backprop would take {size(count)}" in run.memory_choice else None


SMALL = {
    "convolutions": (
        lambda: nn.Sequential(
            nn.Unflatten(1, (1, 32)), nn.Conv1d(1, 8, 5), nn.ReLU(),
            nn.Conv1d(8, 8, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(104, 10),
        ),
        (32,), 100, 10, 1.06,
    ),
    "codes are drawn a few at a time": (
        lambda: mlp(4, 256, 10, activation=nn.ReLU), (4,), 30, 10, 1.03
    ),
    "iris": (lambda: mlp(4, 64, 3, activation=nn.ReLU), (4,), 150, 3, 1.0),
    "autograd": (lambda: mlp(64, 256, 10, activation=nn.Hardtanh), (64,), 30, 10, 1.0),
    "few steps": (
        lambda: nn.Sequential(Recurrent(4, 32), nn.Linear(32, 10)), (5, 4), 1000, 10, 1.0
    ),
    "half a gradient": (
        lambda: nn.Sequential(
            nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10)
        ),
        (64,), 1000, 10, 1.01,
    ),
    "a norm": (
        lambda: nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.SiLU(), nn.Linear(64, 10)),
        (8,), 30, 10, 1.08,
    ),
    "few weights": (lambda: mlp(8, 8, 10, activation=nn.Sigmoid), (8,), 100, 10, 1.03),
    "many classes": (lambda: mlp(64, 256, 100, activation=nn.ReLU), (64,), 1000, 100, 1.12),
}  # fmt: skip


@pytest.mark.parametrize("net", SMALL)
def test_small_nets_take_no_more_or_say_how_much(net):
    """Class codes of a small net may outweigh what it saves: by how much at most is known."""
    make, shape, samples, classes, most = SMALL[net]
    x, y = data(samples, shape)[0], torch.arange(samples) % classes
    run = tpsgd.fit(seeded(make), (x, y), epochs=2)
    backprop = said(run, make, shape, samples, epochs=2)
    assert backprop is not None and run.total_bytes <= most * backprop
    over = run.total_bytes > backprop
    assert over == (most > 1) == ("% less: block" in run.memory_choice)


def ratio(model, shape, samples):
    """The memory of a default run over backprop's."""
    plan = tpsgd.plan(model, shape, samples=samples, epochs=2)
    return plan.peak_bytes / plan.backprop


@pytest.mark.full
@pytest.mark.parametrize("classes", [3, 10, 100])
@pytest.mark.parametrize("units", [8, 64, 256])
def test_nets_of_one_hidden_layer_take_little_more(units, classes):
    """The survey of docs/memory.md."""
    kinds = product((4, 8, 64, 784), (30, 1000), (nn.ReLU, nn.SiLU, nn.ELU), (False, True))
    for inputs, samples, activation, norm in kinds:
        if samples < classes:
            continue
        norms = [nn.BatchNorm1d(units)] if norm else []
        layers = nn.Linear(inputs, units), *norms, activation(), nn.Linear(units, classes)
        plain = activation is nn.ReLU and not norm
        most = (1.03, 1.16) if plain else (1.12, 1.19)
        assert ratio(nn.Sequential(*layers), (inputs,), samples) <= most[classes == 100]


@pytest.mark.full
@pytest.mark.parametrize("units", [16, 64])
def test_short_sequences_take_hardly_more(units):
    for steps, features, samples in product((5, 12, 50), (1, 4), (100, 1000)):
        model = nn.Sequential(Recurrent(features, units), nn.Linear(units, 10))
        assert ratio(model, (steps, features), samples) <= (1.06 if units == 16 else 1)


def test_a_run_below_backprop_says_what_that_takes():
    ridge = [torch.optim.Adam, tpsgd.ridge()]
    rnn = lambda: nn.Sequential(Recurrent(4, 32), nn.Linear(32, 10))  # noqa: E731
    for make, shape, optimizer in ((cnn, IMAGE, None), (rnn, (12, 4), ridge)):
        settings = {"epochs": 2, "batch_size": 16, "optimizer": optimizer}
        run = tpsgd.fit(make(), data(100, shape), **settings)
        assert run.total_bytes < said(run, make, shape, 100, **settings)
        assert "less" not in run.memory_choice


def test_a_model_that_cannot_be_rehearsed_is_trained():
    class Strict(nn.Module):
        def forward(self, x):
            return x if x.detach().tolist() else x + 1

    model = nn.Sequential(nn.Linear(6, 8), Strict(), nn.ReLU(), nn.Linear(8, 3))
    run = tpsgd.fit(model, points(), epochs=2, batch_size=16)
    assert "tpsgd.plan counts backprop's memory" in run.memory_choice


def test_codes_that_outweigh_their_layer_are_said_to_take_more():
    many = torch.randn(200, 4), torch.arange(200) % 100
    run = tpsgd.fit(mlp(4, 256, 100), many, epochs=2, batch_size=10)
    assert "% less: block 1 has class codes" in run.memory_choice


@pytest.mark.parametrize("net", SMALL)
def test_low_memory_takes_no_more_than_the_default(net):
    make, shape, samples, *_ = SMALL[net]
    low, default = (
        tpsgd.plan(make(), shape, samples=samples, epochs=2, memory=m, others=False).peak_bytes
        for m in ("low", None)
    )
    assert low <= default


@pytest.mark.parametrize("units", [64, 128, 256])
def test_low_memory_takes_no_more_than_backprop_where_the_default_does_not(units):
    plan = tpsgd.plan(mlp(64, units, 10, activation=nn.ReLU), (64,), samples=1000, memory="low")
    assert plan.peak_bytes <= plan.backprop


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
