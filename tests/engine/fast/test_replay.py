"""A recorded step gives the weights of a plain one, for every rule, layer and optimizer."""

import gc
import weakref
from dataclasses import replace
from functools import partial

import pytest
import torch
from helpers import distance, images, mlp, points, same, seeded, state
from slow_path import ADAM, slow_fit
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR

import tpsgd
from tpsgd import Recurrent, rules
from tpsgd.engine.fast import wrapper

RULES = {
    "readout": rules.readout(),
    "readout, learned": rules.readout(learned=True),
    "readout, before": rules.readout(at=rules.Place.BEFORE),
    "tpsgd-l2": rules.tpsgd_l2(),
    "tpsgd-l1": rules.tpsgd_l1(),
    "drtp": rules.drtp(),
    "standardised": rules.tpsgd_l2(features=4, standardise=True),
    "predsim": rules.predsim(),
    "auxiliary": rules.auxiliary(),
    "auxiliary, as published": rules.auxiliary(kernels=(1, 3), share=0),
    "dfa": rules.dfa(),
    "sdfa": rules.sdfa(),
    "frozen": rules.frozen(),
}
NETS = {
    "mlp": (
        lambda: points(50),
        lambda: [nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.LeakyReLU(), nn.Linear(8, 3)],
    ),
    "cnn": (
        lambda: images(50),
        lambda: [
            *(nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)),  # its gradient is 0
            *(nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(4, 5, 2, stride=2), nn.GELU(), nn.Flatten(), nn.LazyLinear(3)),
        ],
    ),
}
ORDERS = {"sequential": tpsgd.sequential, "simultaneous": tpsgd.simultaneous}
OPTIMIZERS = {
    "adam": partial(torch.optim.Adam, lr=2e-3),
    "adamw": partial(torch.optim.AdamW, lr=2e-3, weight_decay=0.1),
    "amsgrad": partial(torch.optim.Adam, lr=2e-3, amsgrad=True),
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adagrad": partial(torch.optim.Adagrad, lr=0.01),
    "rmsprop": partial(torch.optim.RMSprop, lr=1e-3),
    "nadam": partial(torch.optim.NAdam, lr=1e-3),
}


def build(net, dtype):
    """Data, and two equal models."""
    data, make = NETS[net]
    (x, y), models = data(), []
    for _ in range(2):

        def whole():
            model = nn.Sequential(*make()).to(dtype)
            model(x[:2].to(dtype))
            return model

        models.append(seeded(whole))
    return (x.to(dtype), y), *models


@pytest.mark.cover(2)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("net", NETS)
def test_fit_has_the_weights_of_the_slow_path(net, name, order, tapes):
    rule = RULES[name]
    if rule.needs_output and order == "sequential":
        pytest.skip("it needs the net's output")
    data, fast, slow = build(net, torch.float64)
    settings = {"epochs": 5, "batch_size": 8, "loss": tpsgd.cross_entropy}
    tpsgd.fit(fast, data, rule=rule, order=ORDERS[order], **settings)
    slow_fit(slow, data, rule, ORDERS[order], **settings)
    assert tapes
    assert distance(fast, slow) < 1e-9


@pytest.mark.cover(1)
@pytest.mark.parametrize("name", ["readout", "tpsgd-l2", "dfa"])
@pytest.mark.parametrize("net", NETS)
def test_in_float32_too(net, name, tapes):
    data, fast, slow = build(net, torch.float32)
    settings = {"epochs": 5, "batch_size": 8, "loss": tpsgd.cross_entropy}
    tpsgd.fit(fast, data, rule=RULES[name], order=tpsgd.simultaneous, **settings)
    slow_fit(slow, data, RULES[name], tpsgd.simultaneous, **settings)
    assert tapes and distance(fast, slow) < 1e-6


@pytest.mark.cover(1)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("order", ORDERS)
def test_every_optimizer_takes_its_own_steps(name, order):
    data, fast, slow = build("mlp", torch.float64)
    settings = {"epochs": 5, "batch_size": 8, "optimizer": OPTIMIZERS[name]}
    tpsgd.fit(fast, data, order=ORDERS[order], **settings)
    slow_fit(slow, data, rules.default(), ORDERS[order], **settings)
    assert distance(fast, slow) < 1e-9


class Own(torch.optim.SGD):
    """SGD of the user's own, whose steps are never recorded."""


@pytest.mark.parametrize(
    ("kind", "count"),
    [
        (torch.optim.SGD, 1),
        (torch.optim.Adam, 1),
        (torch.optim.Adagrad, 1),
        (torch.optim.RMSprop, 6),
    ],
)
def test_a_learning_rate_that_changes_is_followed(kind, count, tapes):
    """Fused kernels get it as an argument; for others the step is recorded anew."""
    own = type("Own", (kind,), {})  # of the user's own: never recorded
    data, fast, slow = build("mlp", torch.float64)
    settings = {"epochs": 6, "batch_size": 8, "lr_schedule": partial(ExponentialLR, gamma=0.5)}
    settings["order"] = tpsgd.simultaneous
    tpsgd.fit(fast, data, optimizer=partial(kind, lr=0.02), **settings)
    assert len(tapes) == count
    tapes.clear()
    tpsgd.fit(slow, data, optimizer=partial(own, lr=0.02), **settings)
    assert not tapes
    assert distance(fast, slow) < 1e-9


def swap_weights(model, optimizer):
    with torch.no_grad():
        for p in model.parameters():
            p.data = p.detach().flip(0).clone()


def clear_state(model, optimizer):
    optimizer.state.clear()


def change_dropout(model, optimizer):
    model[2].p = 0.9


@pytest.mark.parametrize("change", [swap_weights, clear_state, change_dropout])
def test_what_a_callback_changes_is_followed(change, tapes):
    """Against an optimizer of the user's own, whose steps are never recorded."""
    (x, y), models = points(400), []
    for kind in (torch.optim.SGD, Own):
        optimizers: list[torch.optim.Optimizer] = []

        def whole():
            layers = [nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3)]
            return nn.Sequential(*layers).double()

        model = seeded(whole)

        def factory(params, kind=kind, optimizers=optimizers):
            optimizers.append(kind(params, lr=0.05, momentum=0.9))
            return optimizers[-1]

        def callback(record, model=model, optimizers=optimizers):
            if record.epoch == 2 and record.block == 1:
                change(model, optimizers[-2])

        settings = {"order": tpsgd.simultaneous, "epochs": 4, "batch_size": 8}
        tpsgd.fit(model, (x.double(), y), callbacks=[callback], optimizer=factory, **settings)
        assert bool(tapes) is (kind is torch.optim.SGD)
        tapes.clear()
        models.append(model)
    assert distance(*models) < 1e-9


def test_the_record_is_that_of_the_slow_path():
    data, fast, slow = build("mlp", torch.float64)
    settings = {"epochs": 5, "batch_size": 10, "order": tpsgd.simultaneous}
    run = tpsgd.fit(fast, data, **settings)
    losses = slow_fit(slow, data, rules.default(), **settings)
    wanted = torch.tensor(losses).view(5, 5).mean(1).tolist()
    found = [e.loss for e in run.history if e.block == 3]
    assert found == pytest.approx(wanted, rel=1e-6)
    accuracy = (slow(data[0]).argmax(1) == data[1]).double().mean()
    again = tpsgd.fit(fast, data, epochs=1, lr=0.0, order=tpsgd.simultaneous)
    assert again.history[-1].accuracy == pytest.approx(float(accuracy))


def test_a_run_of_few_steps_is_not_recorded(tapes):
    data, model, _ = build("mlp", torch.float32)
    tpsgd.fit(model, data, epochs=1, batch_size=8)
    assert not tapes


def test_a_rule_of_the_users_own_is_not_replayed(tapes):
    """Its Python may count, read values, draw numbers: a tape would not repeat that."""
    calls = []

    def objective(site):
        made = rules.readout().objective(site)

        def closed_form(y, s, *tensors):
            calls.append(1)
            return made.closed_form(y, s, *tensors)

        return replace(made, closed_form=closed_form)

    rule = replace(rules.readout(), objective=objective)
    data, model, _ = build("mlp", torch.float64)
    tpsgd.fit(model, data, rule=rule, epochs=5, batch_size=8, order=tpsgd.simultaneous)
    assert not tapes and len(calls) == 2 * 5 * 7


@pytest.mark.filterwarnings("ignore:the model ends in nn.Sigmoid")
@pytest.mark.parametrize("last", [nn.Tanh, nn.Sigmoid, nn.ReLU, nn.Identity])
def test_the_record_of_a_last_block_with_an_activation(last):
    """Its output, which is the logits, must not be overwritten before the record reads it."""
    x, y = points(64)[0].double(), points(64)[1]
    model = seeded(lambda: nn.Sequential(nn.Linear(6, 3), last()).double())
    run = tpsgd.fit(model, (x, y), epochs=2, batch_size=64, lr=0.0)
    logits = model(x).detach()
    assert run.history[-1].loss == pytest.approx(float(tpsgd.cross_entropy.value(logits, y)))
    assert run.history[-1].accuracy == pytest.approx(float((logits.argmax(1) == y).double().mean()))


def test_the_logits_of_many_classes_are_not_stored():
    x, y = torch.randn(512, 8), torch.arange(512) % 500
    peaks = []
    for batch_size in (128, 256):
        model = seeded(lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 500)))
        run = tpsgd.fit(model, (x, y), epochs=1, batch_size=batch_size, memory=recompute())
        peaks.append(run.peak_bytes)
    logits = 128 * 500 * 4
    assert peaks[1] - peaks[0] < 4.5 * logits  # themselves, softmax, copies with classes first


def recompute():
    return tpsgd.Memory(reuse=False)


def test_a_tape_is_freed_with_its_stage(tapes):
    data, model, _ = build("mlp", torch.float64)
    tpsgd.fit(model, data, epochs=5, batch_size=8)
    kept = [weakref.ref(tape) for tape in tapes]
    gc.disable()
    try:
        tapes.clear()
        assert kept and not any(tape() for tape in kept)
    finally:
        gc.enable()


def test_restarts_are_recorded_as_one(tapes):
    data, _, _ = build("mlp", torch.float64)

    def make():
        return nn.Sequential(*NETS["mlp"][1]()).double()

    settings = {"epochs": 5, "batch_size": 8, "order": tpsgd.simultaneous}
    many = tpsgd.fit_many(make, data, restarts=2, **settings)
    assert tapes
    for seed, model in enumerate(many.models):
        alone = tpsgd.fit_many(make, data, restarts=1, seed=seed, **settings).models[0]
        assert distance(model, alone) < 1e-9


def test_the_default_is_adam(tapes):
    data, fast, slow = build("mlp", torch.float64)
    tpsgd.fit(fast, data, epochs=4, batch_size=8)
    slow_fit(slow, data, rules.default(), tpsgd.sequential, optimizer=ADAM, epochs=4)
    assert tapes and distance(fast, slow) < 1e-9


def one_way(steps=4):
    return torch.randn(64, steps, 4).double(), torch.arange(64) % 3


def tokens_of_five():
    return torch.randint(0, 5, (64, 4)), torch.arange(64) % 3


def series():
    return torch.randn(64, 2, 12).double(), torch.arange(64) % 3


OTHER_NETS = {
    "recurrent": (one_way, lambda: [Recurrent(4, 6), nn.Linear(6, 3)]),
    "two layers": (
        one_way,
        lambda: [Recurrent(4, 6, sequence=True), Recurrent(6, 5), nn.Linear(5, 3)],
    ),
    "both ways": (one_way, lambda: [Recurrent(4, 6, bidirectional=True), nn.Linear(12, 3)]),
    "tokens": (tokens_of_five, lambda: [Recurrent(5, 6), nn.Linear(6, 3)]),
    "conv1d": (series, lambda: [nn.Conv1d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(40, 3)]),
    "dropout": (
        lambda: (points(64)[0].double(), points(64)[1]),
        lambda: [nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 3)],
    ),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("net", OTHER_NETS)
def test_other_layers_have_the_weights_of_plain_steps(net, order, tapes, monkeypatch):
    data, make = OTHER_NETS[net]
    torch.manual_seed(3)
    samples, models = data(), []
    for replays in (True, False):
        if not replays:
            monkeypatch.setattr(wrapper, "replayed", lambda step, *_: step)
        model = seeded(lambda: nn.Sequential(*make()).double())
        settings = {"epochs": 4, "batch_size": 8, "order": ORDERS[order]}
        tpsgd.fit(model, samples, **settings)
        assert bool(tapes) is replays
        tapes.clear()
        models.append(model)
    assert distance(*models) == 0


def test_every_call_of_an_optimizer_follows_its_schedule(monkeypatch):
    """Codes that learn first, and slices, make several calls of one optimizer in a step."""
    weights = []
    for fast in ("1", "0"):
        monkeypatch.setenv("TPSGD_FAST", fast)
        model = seeded(lambda: mlp(8, 16, 3))
        schedule = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5)
        settings = {"order": tpsgd.sequential, "batch_size": 8, "epochs": 5, "lr": 0.01}
        tpsgd.fit(model, points(64, 8), lr_schedule=schedule, **settings)
        weights.append(state(model))
    assert same(*weights)
