"""One contract for rule x block x projection x schedule."""

import copy
import io
import math

import pytest
import torch
from helpers import DRAWN, LOCKED, Residual, images, points, seeded, sequences, state
from torch import nn

import tpsgd
from tpsgd import Recurrent, TpsgdError, projections, rules

SCHEDULES = {"sequential": tpsgd.sequential, "simultaneous": tpsgd.simultaneous}
PROJECTIONS = ["normal", "uniform", "binary", "orthogonal", "per_filter"]
RULES = {**DRAWN, "frozen": lambda projection: rules.frozen()}
PAIRS = [(r, p) for r in DRAWN for p in PROJECTIONS] + [("frozen", "normal")]  # it projects nothing
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


CASES = [
    (rule, projection, kind)
    for rule, projection in PAIRS
    for kind in BLOCKS
    if kind != "recurrent" or projection in ("normal", "orthogonal")  # as any other vector's
]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("rule", "projection", "kind"), CASES)
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
def test_the_contract(rule, projection, kind, schedule):
    data, make = BLOCKS[kind]
    x, y = data()
    model = build(make, x)
    model[1].eval()  # a mode of the user's own
    chosen = RULES[rule](projection=getattr(projections, projection)())
    run_it = lambda: tpsgd.fit(  # noqa: E731
        model,
        (x, y),
        rule=chosen,
        schedule=SCHEDULES[schedule],
        epochs=EPOCHS,
        batch_size=16,
        lr=0.01,
    )
    if rule in LOCKED and schedule == "sequential":
        with pytest.raises(TpsgdError, match=f"^{chosen.name} cannot learn block by block"):
            run_it()
        return
    before = state(model)
    hung, plain = attributes(model), [settings_of(m) for m in model.modules()]
    copies = x.clone(), y.clone()

    run = run_it()

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
    assert moved == [rule != "frozen"] * len(hidden) + [True]
    assert all(torch.isfinite(t).all() for t in state(model).values())
    # every epoch is on record, with finite losses that fall
    learning = [i + 1 for i in hidden if rule != "frozen"] + [len(hidden) + 1]
    assert sorted((e.block, e.epoch) for e in run.history) == [
        (block, epoch) for block in learning for epoch in range(1, EPOCHS + 1)
    ]
    assert all(math.isfinite(e.loss) for e in run.history)
    for block in learning:
        losses = [e.loss for e in run.history if e.block == block]
        last = block == learning[-1]
        if last or rule not in LOCKED:  # DFA's inner product is of no fixed direction
            assert losses[-1] < losses[0], (block, losses)
    known = {e.block for e in run.history if e.accuracy is not None}
    assert known == (set(learning) if rule.startswith("readout") else {learning[-1]})
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


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_different_blocks_may_have_different_rules(schedule):
    x, y = points()
    model = build(BLOCKS["linear"][1], x)
    mixed = [rules.drtp(), rules.readout(learned=True), rules.tpsgd_l2()]
    run = tpsgd.fit(model, (x, y), rule=mixed, schedule=SCHEDULES[schedule], epochs=1)
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
    tpsgd.fit(model, (x, y), rule=mixed, schedule=tpsgd.simultaneous, epochs=1)
    assert all(not torch.equal(before[k], v) for k, v in state(model).items())
