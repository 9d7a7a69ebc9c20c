"""One contract for rule x block x projection x order; the rules are those of `rules.ALL`."""

import copy
import inspect
import io
import math

import pytest
import torch
from helpers import Residual, images, points, quartic, seeded, sequences, state
from torch import nn

import tpsgd
from tpsgd import Recurrent, TpsgdError, projections, rules
from tpsgd.engine.learners.optimizers import adam

ORDERS = {"sequential": tpsgd.sequential, "simultaneous": tpsgd.simultaneous}
PROJECTIONS = ["normal", "uniform", "binary", "orthogonal", "per_filter"]
RULES = {word: entry.make for word, entry in rules.ALL.items()}
RULES["tpsgd"] = lambda projection: rules.tpsgd(quartic, projection)  # any other loss
CLASSIFIERS = ("readout", "readout-learned", "predsim", "auxiliary", "lls")  # one in every block
EPOCHS = 2


def series():
    x, y = images()
    return x.flatten(2)[:, :, :12], y


BLOCKS = {
    "linear": (points, lambda: [nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Sigmoid()]),
    "linear on tokens": (
        lambda: (points(features=12)[0].view(-1, 3, 4), points(features=12)[1]),
        lambda: [nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Flatten()],
    ),
    "conv1d": (
        series,
        lambda: [
            nn.Conv1d(2, 4, 3),
            nn.Tanh(),
            nn.MaxPool1d(2),
            nn.Conv1d(4, 6, 3, stride=2, padding=1, groups=2),
            nn.Tanh(),
            nn.Flatten(),
        ],
    ),
    "conv2d": (
        images,
        lambda: [
            nn.Conv2d(2, 4, 3),
            nn.BatchNorm2d(4),
            nn.Tanh(),
            nn.MaxPool2d(2),
            nn.Dropout(0.2),
            nn.Conv2d(4, 4, 2, padding="same", bias=False),
            nn.Tanh(),
            nn.Flatten(),
        ],
    ),
    "recurrent": (
        lambda: (sequences(n=32, steps=3)[0].float(), sequences(n=32)[1]),
        lambda: [
            Recurrent(4, 6, sequence=True),
            nn.Dropout(0.1),
            Recurrent(6, 8, bidirectional=True, leak=1.0),
        ],
    ),
    "custom": (points, lambda: [Residual(6), nn.Tanh(), Residual(6), nn.LayerNorm(6), nn.Tanh()]),
}


def build(make, x):
    def whole():
        model = nn.Sequential(*make(), nn.LazyLinear(3))
        model(x)
        return model

    return seeded(whole)


def attributes(model):
    """The names of everything that hangs on a model's modules."""
    return [(name, sorted(vars(m))) for name, m in model.named_modules()]


def settings_of(module):
    """A module's plain values: numbers, words, tuples."""
    return {k: v for k, v in vars(module).items() if isinstance(v, (int, float, str, tuple))}


def projects(word):
    return "projection" in inspect.signature(RULES[word]).parameters


CASES = [
    (word, projection, kind)
    for word in RULES
    for projection in (PROJECTIONS if projects(word) else [None])
    for kind in BLOCKS
    if kind != "recurrent" or projection in (None, "normal", "orthogonal")  # as other vectors
]


@pytest.mark.cover(2)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("word", "projection", "kind"), CASES)
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
def test_every_rule_trains_every_block_and_leaves_the_model_clean(word, projection, kind, order):
    data, make = BLOCKS[kind]
    x, y = data()
    model = build(make, x)
    model[1].eval()  # a mode that the user has chosen
    options = {"projection": getattr(projections, projection)()} if projection else {}
    rule = RULES[word](**options)

    def train():
        lr = 0.003 if word == "auxiliary" else 0.01  # a fresh net of 128 filters overshoots
        how = {"order": ORDERS[order], "epochs": EPOCHS, "batch_size": 16, "lr": lr}
        how["optimizer"] = adam  # for the last layer of recurrent nets too
        return tpsgd.fit(model, (x, y), rule=rule, **how)

    if rule.needs_output and order == "sequential":
        with pytest.raises(TpsgdError, match=f"^{rule.name} cannot learn block by block"):
            train()
        return
    before = state(model)
    hung, plain = attributes(model), [settings_of(m) for m in model.modules()]
    copies = x.clone(), y.clone()

    run = train()

    # it learned, where it should
    hidden = list(range(len(tpsgd.split(model)) - 1))
    moved = [
        any(
            not torch.equal(p, before[name])
            for name, p in model.named_parameters()
            if any(p is q for q in block.named_parameters().values())
        )
        for block in tpsgd.split(model)
    ]
    assert moved == [rule.objective is not None] * len(hidden) + [rule.head]
    assert all(torch.isfinite(t).all() for t in state(model).values())
    # every epoch is on record, with finite losses that fall
    learning = [i + 1 for i, learns in enumerate(moved) if learns]
    assert sorted((e.block, e.epoch) for e in run.history) == [
        (block, epoch) for block in learning for epoch in range(1, EPOCHS + 1)
    ]
    assert all(math.isfinite(e.loss) for e in run.history)
    for block in learning:
        losses = [e.loss for e in run.history if e.block == block]
        last = block == len(hidden) + 1
        if last or not rule.needs_output:  # the inner product with an error has no fixed direction
            assert losses[-1] < losses[0], (block, losses)
    with_accuracy = {e.block for e in run.history if e.accuracy is not None}
    classifiers = set(learning) if word in CLASSIFIERS else set(learning) & {len(hidden) + 1}
    assert with_accuracy == classifiers
    # the costs are on record
    assert run.sample_passes == len(x) * EPOCHS * len(learning)
    assert run.seconds > 0 and run.peak_bytes > 0
    assert len(run.blocks) == len(hidden) + 1
    # and the model is still the user's: nothing hangs on it, nothing is left behind
    assert attributes(model) == hung
    assert [settings_of(m) for m in model.modules()] == plain
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert torch.equal(x, copies[0]) and torch.equal(y, copies[1])
    torch.save(model, io.BytesIO())
    assert state(copy.deepcopy(model)).keys() == before.keys()


@pytest.mark.parametrize("order", ORDERS)
def test_different_blocks_may_have_different_rules(order):
    x, y = points()
    model = build(BLOCKS["linear"][1], x)
    mixed = [rules.drtp(), rules.readout(learned=True), rules.tpsgd_l2()]
    run = tpsgd.fit(model, (x, y), rule=mixed, order=ORDERS[order], epochs=1)
    assert [b.rule for b in run.blocks] == ["drtp", "readout-learned", "head"]
    assert run.settings["loss"] == "mse"
    assert run.rule == "drtp + readout-learned + tpsgd-l2"


def test_all_kinds_of_signal_in_one_net():
    x, y = points()
    model = nn.Sequential(
        *[m for _ in range(3) for m in (nn.Linear(6, 6), nn.Tanh())], nn.Linear(6, 3)
    )
    before = state(model)
    mixed = [rules.dfa(), rules.readout(), rules.sdfa(), rules.frozen()]
    tpsgd.fit(model, (x, y), rule=mixed, order=tpsgd.simultaneous, epochs=1)
    assert all(not torch.equal(before[k], v) for k, v in state(model).items())
