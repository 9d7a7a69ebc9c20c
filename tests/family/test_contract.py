"""The family in the contract of all rules: blocks, memory, locking, refusals, random numbers."""

import io
import math
import pickle
from dataclasses import replace

import pytest
import torch
from helpers import Residual, close, images, mlp, points, same, seeded, sequences, state
from torch import nn

import tpsgd
from tpsgd import Recurrent, TpsgdError, check_rule, rules
from tpsgd.comparison.arms import arm
from tpsgd.maths import noise
from tpsgd.maths.random import Key
from tpsgd.objectives import BlockSignal, NetSignal, Objective
from tpsgd.train import sequential, simultaneous

family = pytest.importorskip("tpsgd_family")

RULES = family.ALL
BLOCKS = {
    "linear": (points, lambda: [nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 7), nn.Tanh()]),
    "conv2d": (
        images,
        lambda: [
            nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Tanh(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Linear(16, 8), nn.Tanh(),
        ],
    ),
}  # fmt: skip


def build(kind, x):
    def whole():
        model = nn.Sequential(*BLOCKS[kind][1](), nn.LazyLinear(3))
        model(x)
        return model

    return seeded(whole)


def train(model, data, rule, **settings):
    chosen = {"epochs": 2, "batch_size": 16, "lr": 0.003, "progress": False} | settings
    return tpsgd.fit(model, data, rule=rule, **chosen)


@pytest.mark.parametrize("word", RULES)
def test_every_rule_passes_check_rule(word):
    check_rule(RULES[word]())


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("word", RULES)
def test_every_rule_trains_every_block_and_leaves_the_model_clean(word, kind):
    x, y = BLOCKS[kind][0]()
    rule = RULES[word]()
    model = build(kind, x)
    before, copies = state(model), (x.clone(), y.clone())
    run = train(model, (x, y), rule)
    blocks = tpsgd.split(model)
    moved = [
        any(
            not torch.equal(p, before[name])
            for name, p in model.named_parameters()
            if any(p is q for q in block.named_parameters().values())
        )
        for block in blocks
    ]
    assert moved == [True] * (len(blocks) - 1) + [rule.head]
    learning = [i + 1 for i, learns in enumerate(moved) if learns]
    assert sorted((e.block, e.epoch) for e in run.history) == [
        (block, epoch) for block in learning for epoch in (1, 2)
    ]
    assert all(math.isfinite(e.loss) for e in run.history)
    assert all(torch.isfinite(t).all() for t in state(model).values())
    assert run.settings["order"] == ("simultaneous" if rule.needs_net else "sequential")
    assert run.sample_passes == len(x) * 2 * len(learning) and run.peak_bytes > 0
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert torch.equal(x, copies[0]) and torch.equal(y, copies[1])
    torch.save(model, io.BytesIO())
    again = build(kind, x)
    train(again, (x, y), rule)
    assert same(state(model), state(again))  # bit for bit
    other = build(kind, x)
    train(other, (x, y), rule, seed=1)
    assert not same(state(model), state(other))


LOCKED = {
    **dict.fromkeys(RULES, True),
    **dict.fromkeys(("forward-forward", "forward-gradient-local", "hsic-bottleneck"), False),
}


@pytest.mark.parametrize("word", RULES)
def test_update_locking_is_declared(word):
    rule = RULES[word]()
    assert rule.needs_output is LOCKED[word] and rule.name == word
    if word == "forward-gradient-local":
        train(mlp(6, 5, 3), points(), rule, order=sequential)
        return
    with pytest.raises(TpsgdError, match=f"{word} cannot learn block by block: its signal is"):
        train(mlp(6, 5, 3), points(), rule, order=sequential)


@pytest.mark.parametrize("word", RULES)
def test_memory_is_planned_to_the_byte(word):
    rule, data = RULES[word](), points(n=128, features=32)
    how = {"epochs": 1, "batch_size": 64, "order": simultaneous}
    plan = tpsgd.plan(mlp(32, 64, 48, 3), (32,), rule=rule, samples=128, others=False, **how)
    run = train(mlp(32, 64, 48, 3), data, rule, **how)
    assert plan.lines[0].peak == run.peak_bytes


MEANS = "feedback-alignment", "sign-symmetry", "pepita"  # over samples, and nothing is drawn


@pytest.mark.parametrize("word", MEANS)
def test_micro_batches_change_nothing_that_is_learned(word):
    whole, parts = (mlp(6, 8, 7, 3).double() for _ in range(2))
    data = points()[0].double(), points()[1]
    train(whole, data, RULES[word]())
    train(parts, data, RULES[word](), memory=tpsgd.Memory(micro_batch=4))
    close(state(parts), state(whole), rtol=1e-7, atol=1e-9)


def test_what_these_rules_cannot_do_is_refused():
    refused = [
        ([family.pepita(), rules.readout()], mlp(6, 5, 3), points(), "makes the signals"),
        (
            family.feedback_alignment(),
            nn.Sequential(Recurrent(4, 5), nn.Linear(5, 3)),
            (sequences()[0].float(), sequences()[1]),
            "for nets without recurrent layers",
        ),
        (
            family.feedback_alignment(),
            nn.Sequential(*mlp(6, 5, 5), nn.Tanh(), nn.Dropout(0.5), nn.Linear(5, 3)),
            points(),
            "dropout would draw another mask",
        ),
        (
            family.forward_forward(),
            mlp(6, 5, 3),
            (points()[0], torch.rand(48, 3).softmax(1)),
            "a class for each",
        ),
        (family.forward_forward(), mlp(2, 5, 3), points(features=2), "no room for 3 labels"),
        (
            family.target_propagation(),
            nn.Sequential(nn.Conv1d(1, 2, 3), nn.Tanh(), nn.Conv1d(2, 2, 2), nn.Tanh(),
                          nn.Flatten(), nn.Linear(6, 3)),
            (points()[0][:, None], points()[1]),
            "needs an nn.Linear behind block 1",
        ),
        (
            family.feedback_alignment(),
            nn.Sequential(nn.Linear(6, 5), nn.Tanh(), Residual(5), nn.Tanh(), nn.Linear(5, 3)),
            points(),
            "the layer behind block 1 has no weight",
        ),
    ]  # fmt: skip
    for rule, model, data, words in refused:
        with pytest.raises(TpsgdError, match=words):
            train(model, data, rule)
    half = torch.bfloat16
    for word in RULES.keys() - {"forward-gradient-local"}:
        with pytest.raises(TpsgdError, match=f"{word} computes in its model's number format"):
            train(mlp(6, 5, 3), points(), RULES[word](), precision=half)
    train(mlp(6, 5, 3), points(), family.local_forward_gradient(), precision=half)
    with pytest.raises(TpsgdError, match="sigma must be a number above 0"):
        family.weight_perturbation(0.0)


@pytest.mark.parametrize(
    ("rule", "setting"),
    [
        ("feedback_alignment", {"scale": "1"}),
        ("pepita", {"scale": -1}),
        ("forward_forward", {"threshold": float("nan")}),
        ("weight_perturbation", {"sigma": 0.0}),
        ("target_propagation", {"noise": -0.1}),
        ("hsic_bottleneck", {"sigma": 0}),
    ],
)
def test_settings_that_are_no_such_number_are_refused(rule, setting):
    with pytest.raises(TpsgdError, match=f"{next(iter(setting))} must be a number"):
        getattr(family, rule)(**setting)


def test_random_numbers_depend_on_seed_block_epoch_and_batch_alone():
    def drawn(seed=0, block=0, epoch=0, batch=0):
        key = noise.noise_key(Key(seed, block))
        noise.renew(key, key.clone(), epoch)
        key[1].add_(batch)
        return noise.normal(key, (3, 50))

    base = drawn()
    assert torch.equal(base, drawn()) and base.shape == (3, 50)
    for other in (drawn(seed=1), drawn(block=1), drawn(epoch=1), drawn(batch=1), drawn(epoch=2)):
        assert (other != base).float().mean() > 0.99
    many = noise.normal(noise.noise_key(Key(5)), (200_000,))
    assert abs(many.mean()) < 0.01 and abs(many.std() - 1) < 0.01
    whole = noise.below(noise.noise_key(Key(5)), (9_000,), 3)
    counts = whole.bincount()
    assert len(counts) == 3 and (counts - 3_000).abs().max() < 200


def test_every_batch_has_other_random_numbers():
    keys = []

    class Watched(NetSignal):
        def __call__(self, learners, x, labels):
            keys.extend(learner.noise.clone() for learner in learners)
            return family.pepita().signal(learners, x, labels)

    def drawing(site):
        def loss(y, s, key):
            keys.append(key.clone())
            return (y * noise.normal(key, y.shape)).sum()

        return Objective(loss, tensors=(site.noise(),), noise_at=0)

    train(mlp(6, 8, 7, 3), points(), replace(family.pepita(), signal=Watched()))
    train(mlp(6, 8, 7, 3), points(), rules.Rule("drawn", drawing), order=simultaneous, seed=9)
    numbers = {tuple(key.tolist()) for key in keys}
    assert len(keys) == len(numbers) == 2 * 3 * (3 + 2)  # epochs, batches, blocks that draw


RANDOM = "forward-gradient-local", "forward-forward", "target-propagation"


@pytest.mark.parametrize("word", RANDOM)
def test_a_run_that_goes_on_from_a_checkpoint_has_the_same_random_numbers(word, tmp_path):
    class Stop(Exception):
        pass

    def stop(epoch):
        if epoch.epoch == 2:
            raise Stop

    how = {"epochs": 4, "checkpoint": tpsgd.Checkpoint(tmp_path, every=0, resume=True)}
    whole = mlp(6, 8, 8, 3)
    train(whole, points(), RULES[word](), epochs=4)
    with pytest.raises(Stop):
        train(mlp(6, 8, 8, 3), points(), RULES[word](), callbacks=[stop], **how)
    resumed = mlp(6, 8, 8, 3, seed=3)
    train(resumed, points(), RULES[word](), **how)
    assert same(state(whole), state(resumed))


def test_compare_and_fit_many_predict_by_the_goodness():
    data = points(n=96, features=12)
    rule = family.forward_forward()
    record = tpsgd.compare((data, data), lambda: mlp(12, 16, 16, 3), [rule], epochs=3, restarts=1)
    result = next(r for r in record.results if r.arm.name == "forward-forward")
    many = tpsgd.fit_many(
        lambda: mlp(12, 16, 16, 3), data, rule=rule, restarts=1, epochs=3, progress=False
    )
    run = many.runs[0]
    assert run.predictor is not run.model and run.model is many.models[0]
    expected = tpsgd.evaluate(many.models[0], data, rule=rule)
    assert many.evaluate(data) == [expected] == [tpsgd.evaluate(run.predictor, data)]
    assert expected > 0.5 > tpsgd.evaluate(run.model, data)
    assert result.accuracies == pytest.approx([expected], abs=0.2)


def test_a_rule_that_predicts_in_its_own_way_is_nowhere_used_by_the_last_layer_unsaid(tmp_path):
    rule = family.forward_forward()
    run = train(mlp(6, 8, 8, 3), points(), rule)
    with pytest.warns(UserWarning, match="forward-forward by something else: after tpsgd.load"):
        run.save(tmp_path / "saved")
    assert pickle.loads(pickle.dumps(run)).blocks == run.blocks
    assert run.without_model().predictor is None
    loaded = tpsgd.load(tmp_path / "saved").model
    assert torch.equal(rule.predictor(loaded)(points()[0]), run.predictor(points()[0]))
    with pytest.raises(TpsgdError, match="a stream predicts by the model's output"):
        tpsgd.Stream(mlp(6, 8, 3), rule=rule)
    with pytest.raises(TpsgdError, match="forward-forward does not predict by the model's output"):
        tpsgd.TPSGDClassifier(rule=rule, epochs=1).fit(*(t.numpy() for t in points()))
    with pytest.raises(TpsgdError, match=r"rule must be a tpsgd.Rule, .* got 'forward-forward'"):
        tpsgd.evaluate(loaded, points(), rule="forward-forward")  # type: ignore[arg-type]


def test_a_plan_says_that_micro_batches_draw_other_random_numbers():
    how = {"samples": 48, "batch_size": 16, "memory": tpsgd.Memory(micro_batch=4), "others": False}
    said = str(tpsgd.plan(mlp(6, 8, 3), (6,), rule=family.local_forward_gradient(), **how))
    assert "the rule's random numbers" in said
    said = str(tpsgd.plan(mlp(6, 8, 3), (6,), rule=family.feedback_alignment(), **how))
    assert "change what is learned" not in said


def test_a_second_training_has_the_random_numbers_of_the_first():
    nets, model = [], mlp(6, 8, 8, 3)

    def twice(net):
        nets.append(net)
        for _ in range(2):
            simultaneous(net)

    train(model, points(), family.target_propagation(), order=twice, epochs=1)
    for learner in nets[0].learners:
        assert torch.equal(learner.first_noise, noise.noise_key(Key(0, learner.block.key)))


def test_streams_take_signals_of_the_whole_net():
    x, y = points()
    rule = family.feedback_alignment()
    stream = tpsgd.Stream(mlp(6, 8, 3), rule=rule, classes=[0, 1, 2], lr=0.05)
    for _ in range(20):
        stream.partial_fit(x, y)
    assert (stream.predict(x) == y.numpy()).mean() > 0.9


class Dishonest(NetSignal):
    needs_output = False

    def __call__(self, learners, x, labels):
        saved = []
        for learner in learners:
            saved.append(learner.forward(x))
            x = learner.output(saved[-1])
        for value in saved[:-1]:
            yield BlockSignal(value, value.y.clone())
        yield BlockSignal(saved[-1], labels)


class Impure(NetSignal):
    def __call__(self, learners, x, labels):
        for learner in learners[:-1]:
            saved = learner.forward(x)
            yield BlockSignal(saved, torch.randn_like(saved.y))
            x = learner.output(saved)
        yield BlockSignal(learners[-1].forward(x), labels)


def test_check_rule_finds_a_signal_that_lies_or_repeats_nothing():
    def objective(site):
        return Objective(lambda y, s: -(y * s).sum() / len(y))

    with pytest.raises(TpsgdError, match="asks blocks behind, and needs_output is False"):
        check_rule(rules.Rule("dishonest", objective, signal=Dishonest()))
    with pytest.raises(TpsgdError, match="its signal gives other numbers for the same batch"):
        check_rule(rules.Rule("impure", objective, signal=Impure()))


def test_the_orders_that_suit_the_rules_are_chosen():
    run = train(mlp(6, 5, 3), points(), family.hsic_bottleneck())
    assert run.settings["order"] == simultaneous.__name__


@pytest.mark.parametrize("word", RULES)
def test_a_comparison_trains_every_rule(word):
    chosen = arm(RULES[word](), sequential)
    assert chosen.epochs is None  # those of all arms, also where the last layer does not learn
    assert chosen.order is (simultaneous if chosen.rule.needs_net else sequential)
