"""bfloat16: the gradients of float32 up to rounding, as good a net, fewer bytes."""

import pytest
import torch
from helpers import DRAWN, folded, images, mlp, points, same, seeded, sequences, state, with_full
from torch import nn

import tpsgd
from tpsgd import Place, Recurrent, TpsgdError, rules
from tpsgd.engine.learners.backprop import Backprop
from tpsgd.engine.settings import Settings
from tpsgd.engine.sources.augment import flip
from tpsgd.maths.random import Key
from tpsgd.memory.rehearse import Inputs, rehearse
from tpsgd.nets.precision import rounded
from tpsgd.projections import Redrawn, normal
from tpsgd.zoo.resnet import Residual

HALF = torch.bfloat16
SHORT = {"epochs": 1, "batch_size": 16}
RULES = DRAWN | {"predsim": rules.predsim, "auxiliary": rules.auxiliary}


def convnet(*between: type[nn.Module], act=nn.ReLU):
    return seeded(
        lambda: nn.Sequential(
            nn.Conv2d(2, 8, 3, padding=1), *(m(8) for m in between), act(),
            nn.Conv2d(8, 8, 3, padding=1), *(m(8) for m in between), act(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Dropout(0.1), nn.Linear(72, 3),
        )
    )  # fmt: skip


NETS = {
    "linear": (lambda: mlp(72, 16, 3), True),
    "conv": (convnet, False),
    "conv + batch norm": (lambda: convnet(nn.BatchNorm2d), False),
}


def first_step(make, rule, precision, flat, **settings):
    """The first block's gradients, and the tensors on the way."""
    x, y = images(64)
    kept: list = []
    x = x.flatten(1) if flat else x
    tpsgd.fit(
        make(), (x, y), rule=rule, order=kept.append, batch_size=64, precision=precision,
        **settings,
    )  # fmt: skip
    learner = kept[0].learners[0]
    learner.start()
    batch, labels = next(kept[0].source.batches()).load()
    s = labels
    if rule.needs_output:
        s = torch.randn(64, 3, generator=torch.Generator().manual_seed(1)).to(batch.dtype)
    with torch.no_grad():
        saved = learner.forward(batch)
        out = learner.output(saved)
        local, parts = learner.gradient.gradients(learner.params, saved, s, learner.tensors)
        grads = {k: g for part in parts for k, g in part.items()}
    grads |= {f"objective.{i}": g for i, g in enumerate(local.dtensors)}
    return learner.gradient.objective.loss_of(local, s), grads, batch, out


def near(found, wanted, share):
    """Each gradient within a share of its length; one that ought to be zero may be small."""
    assert found.keys() == wanted.keys()
    longest = max(float(g.norm()) for g in wanted.values())
    for key, grad in wanted.items():
        off = float((found[key].float() - grad).norm())
        assert off < share * float(grad.norm()) + 3e-3 * longest, key


@pytest.mark.parametrize("name", sorted(set(RULES) - {"sdfa"}))
@pytest.mark.parametrize("net", ["linear", "conv", "conv + batch norm"])
def test_gradients_are_those_of_float32_up_to_rounding(net, name):
    make, flat = NETS[net]
    settings = {"loss": tpsgd.cross_entropy}
    wanted = first_step(make, RULES[name](), None, flat, **settings)
    found = first_step(make, RULES[name](), HALF, flat, **settings)
    assert float(found[0]) == pytest.approx(float(wanted[0]), rel=0.05)
    near(found[1], wanted[1], 0.08 if name == "tpsgd_l1" else 0.04)  # l1: some signs change
    assert found[2].dtype is found[3].dtype is HALF


@pytest.mark.parametrize("name", ["readout", "predsim", "auxiliary"])
def test_a_traced_blocks_gradients_too(name):
    def make():
        return seeded(lambda: nn.Sequential(Residual(2, 4), nn.Flatten(), nn.Linear(144, 3)))

    wanted = first_step(make, RULES[name](), None, False)
    found = first_step(make, RULES[name](), HALF, False)
    near(found[1], wanted[1], 0.06)
    assert found[2].dtype is found[3].dtype is HALF


@pytest.mark.parametrize("at", list(Place))
@pytest.mark.parametrize(
    "act", [nn.Tanh, nn.Sigmoid, nn.SiLU, nn.LeakyReLU, nn.GELU, nn.Softplus, nn.PReLU]
)
@pytest.mark.usefixtures("unwatched")
def test_every_activation_and_place(act, at):
    rule, found = rules.tpsgd_l2(at=at), []
    for precision in (None, HALF):
        _, grads, *_ = first_step(lambda: convnet(act=act), rule, precision, False)
        found.append(grads)
    near(found[1], found[0], 0.04)


@pytest.mark.parametrize(
    ("name", "order"),
    [("tpsgd_l2", tpsgd.sequential), ("predsim", tpsgd.simultaneous), ("dfa", tpsgd.simultaneous)],
)
def test_the_model_stays_in_float32_and_the_seed_decides(name, order):
    found = []
    for precision in (HALF, HALF, None):
        model = convnet(nn.BatchNorm2d)  # its num_batches_tracked is a whole number
        run = tpsgd.fit(
            model, images(), rule=RULES[name](), order=order, precision=precision,
            validation=images(seed=1), **SHORT,
        )  # fmt: skip
        kinds = {t.dtype for t in model.state_dict().values()}
        assert kinds == {torch.float32, torch.long}
        assert run.settings["precision"] == (None if precision is None else "bfloat16")
        found.append(state(model))
    assert same(found[0], found[1]) and not same(found[0], found[2])


def test_optimizer_state_and_learned_codes_stay_in_float32():
    kept: list = []
    tpsgd.fit(convnet(), images(), rule=rules.predsim(), order=kept.append, precision=HALF, **SHORT)
    learner = kept[0].learners[0]
    learner.start()
    batch, labels = next(kept[0].source.batches()).load()
    with torch.no_grad():
        learner.update(learner.forward(batch), labels, labels)
    assert {t.dtype for t in learner.tensors} == {torch.float32}
    states = learner.updater.optimizer.state.values()
    assert {t.dtype for s in states for t in s.values()} == {torch.float32}
    assert len(states) == len(learner.params)


def test_codes_of_feature_maps_are_rounded_once():
    kept: list = []
    tpsgd.fit(
        convnet(), images(), rule=rules.tpsgd_l2(), order=kept.append, precision=HALF, **SHORT
    )
    learner = kept[0].learners[0]
    learner.start()
    assert [t.dtype for t in learner.tensors] == [HALF]


def test_bfloat16_takes_fewer_bytes():
    """Weights and Adam's state stay; activations, codes and kept inputs halve."""
    x, y = images(64, 2, 16)

    def make():
        return seeded(
            lambda: nn.Sequential(
                nn.Conv2d(2, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(),
                nn.MaxPool2d(4), nn.Flatten(), nn.Linear(128, 3),
            )
        )  # fmt: skip

    ways = [
        (tpsgd.fit, {"rule": rules.tpsgd_l2()}),
        (tpsgd.fit, {"rule": rules.readout()}),
        (tpsgd.fit, {"rule": rules.predsim(), "order": tpsgd.simultaneous}),
    ]
    for fit, how in [*ways, (tpsgd.fit_backprop, {})]:
        full, half = (
            fit(make(), (x, y), batch_size=32, epochs=1, precision=p, **how) for p in (None, HALF)
        )
        assert half.peak_bytes < 0.7 * full.peak_bytes, how
        assert 2 * half.kept_bytes == full.kept_bytes


@pytest.mark.parametrize("fit", [tpsgd.fit, tpsgd.fit_backprop])
def test_a_rehearsal_knows_the_precision(fit):
    data, model, inputs = images(64), convnet(nn.BatchNorm2d), Inputs((2, 6, 6), samples=64)
    run = fit(model, data, batch_size=16, epochs=2, precision=HALF)
    how = rules.default() if fit is tpsgd.fit else Backprop()
    found = rehearse(model, inputs, how, Settings(batch_size=16, epochs=2, precision=HALF))
    assert found.peak == pytest.approx(run.peak_bytes, rel=0.05)
    assert found.kept == run.kept_bytes


def test_a_plan_with_fewer_activations():
    model = nn.Sequential(nn.Conv2d(2, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 3))
    full, half = (
        tpsgd.plan(
            model,
            (2, 6, 6),
            batch_size=64,
            order=tpsgd.sequential,
            precision=p,
            others=False,
            samples=128,
        )
        for p in (None, HALF)
    )
    parts = [one.lines[0].parts for one in (full, half)]
    assert parts[0]["weights"] == parts[1]["weights"]
    assert parts[1]["activations"] < 0.8 * parts[0]["activations"]


@pytest.mark.parametrize(
    "settings",
    [
        {"micro_batch": 5},
        {"slices": 3},
        {"redraw": True, "rule": rules.tpsgd_l2()},
        {"reuse": "folder"},
        {"reuse": False},
        {"augment": flip()},
    ],
    ids=lambda settings: " ".join(f"{k}={settings[k]!s:.5}" for k in settings if k != "rule"),
)
def test_bfloat16_with_every_other_way_to_save_memory(settings, tmp_path):
    if settings.get("reuse") == "folder":
        settings = {"reuse": str(tmp_path)}
    losses = []
    for precision in (None, HALF):
        model = convnet()
        run = tpsgd.fit(
            model, images(), epochs=2, batch_size=16, precision=precision, **folded(**settings)
        )
        losses.append(run.history[-1].loss)
    assert losses[1] == pytest.approx(losses[0], rel=0.03)


def test_an_objectives_vectors_and_noise_keys_are_not_rounded():
    P, vector, gain, key = torch.rand(3, 4), torch.rand(4), torch.rand(()), torch.tensor([1, 2])
    redrawn = Redrawn(normal(), (4,), 3, Key(), "cpu", torch.float32)
    for shape, expected in (((2, 4, 3, 3), HALF), ((2, 4), torch.float32)):
        y, s, *tensors = rounded(HALF, torch.rand(shape), key, (P, vector, gain, key, redrawn))
        assert y.dtype is expected and s is key
        kinds = [expected, torch.float32, expected, torch.int64, expected]
        assert [t.dtype for t in tensors] == kinds and tensors[1] is vector


def test_scales_and_shifts_of_a_local_net_learn_in_float32():
    kept: list = []
    rule = rules.auxiliary()
    tpsgd.fit(convnet(), images(64), rule=rule, order=kept.append, precision=HALF, batch_size=64)
    learner = kept[0].learners[0]
    learner.start()
    K, scale, shift, R = learner.tensors
    with torch.no_grad():
        scale += 2.0**-10  # half of bfloat16's step at 1 is 2^-9
        x, labels = next(kept[0].source.batches()).load()
        saved = learner.forward(x)
        losses = [
            float(learner.gradient.measure(learner.params, saved, labels, (K, each, shift, R)).loss)
            for each in (scale, scale.bfloat16().float())
        ]
    assert losses[0] != losses[1]


@pytest.mark.parametrize("settings", [{}, {"segments": True}], ids=str)
def test_backprop_in_bfloat16(settings):
    found = []
    for precision in (None, HALF):
        model = convnet(nn.BatchNorm2d)
        run = tpsgd.fit_backprop(
            model, images(), epochs=3, batch_size=16, precision=precision, **settings
        )
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        found.append(run.history[-1].loss)
    assert found[1] == pytest.approx(found[0], rel=0.05) and found[0] != found[1]


def test_labels_in_rows():
    """Several classes at once, read out with the same loss at every block."""
    x, y = images(48)
    rows = nn.functional.one_hot(y, 3).float()
    run = tpsgd.fit(convnet(), (x, rows), loss=tpsgd.bce, precision=HALF, **SHORT)
    again = tpsgd.fit(convnet(), (x, rows), loss=tpsgd.bce, **SHORT)
    assert run.history[-1].loss == pytest.approx(again.history[-1].loss, rel=0.02)


@pytest.fixture(scope="module")
def digits():
    return tpsgd.data.load("digits")


@pytest.mark.parametrize("kind", with_full(["mlp", "cnn"], ["cnn"]))
@pytest.mark.usefixtures("unwatched")
def test_as_good_on_digits(kind, digits):
    def make():
        if kind == "mlp":
            return nn.Sequential(nn.Flatten(), mlp(64, 64, 10))
        return seeded(
            lambda: nn.Sequential(
                nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
                nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(256, 10),
            )
        )  # fmt: skip

    found = []
    for precision in (None, HALF):
        model = make()
        tpsgd.fit(model, digits.train, epochs=2, batch_size=32, lr=1e-2, precision=precision)
        found.append(tpsgd.evaluate(model, digits.test))
    assert found[0] > 0.9 and found[1] > found[0] - 0.02


def test_restarts_are_made_one_by_one():
    def make():
        return mlp(6, 8, 3)

    many = tpsgd.fit_many(make, points(), restarts=2, precision=HALF, **SHORT)
    assert not many.stacked
    with pytest.raises(TpsgdError, match="one model at a time"):
        tpsgd.fit_many(make, points(), restarts=2, precision=HALF, stacked=True, **SHORT)


REFUSED = {
    r"torch\.bfloat16 or None \(float16 needs its loss scaled": {"precision": torch.float16},
    r"must be torch\.bfloat16 or None .*, got 'bf16'": {"precision": "bf16"},
    "a solver's equations need full precision": {"precision": HALF, "optimizer": tpsgd.ridge()},
}


@pytest.mark.parametrize("message", REFUSED)
def test_a_precision_that_cannot_work_is_refused_in_one_sentence(message):
    with pytest.raises(TpsgdError, match=message):
        tpsgd.fit(mlp(6, 8, 3), points(), **REFUSED[message])


@pytest.mark.parametrize("fit", [tpsgd.fit, tpsgd.fit_backprop])
def test_models_that_bfloat16_is_not_for(fit):
    with pytest.raises(TpsgdError, match=r"for models in float32.*is in float64"):
        fit(mlp(6, 8, 3).double(), points(), precision=HALF)
    recurrent = nn.Sequential(Recurrent(4, 6), nn.Linear(6, 3))
    with pytest.raises(TpsgdError, match="without recurrent layers"):
        fit(recurrent, sequences(), precision=HALF)
