"""`fit_many`: stacked restarts equal those made one by one."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from helpers import DRAWN, LOCKED, folded, mlp, points, same, seeded, sequences, state, tokens
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import ExponentialLR

import tpsgd
from tpsgd import EarlyStopping, Place, Recurrent, TpsgdError, bce, cross_entropy, mse, rules

pytestmark = pytest.mark.usefixtures("unwatched")

X, Y = points()
DATA = X.double(), Y
SETTINGS = {"restarts": 3, "epochs": 2, "batch_size": 20, "seed": 4, "memory": "fast"}


def factory(activation=nn.Tanh):
    layers = nn.Linear(6, 8), activation(), nn.Linear(8, 7), activation(), nn.Linear(7, 3)
    return nn.Sequential(*layers).double()


def both(make=factory, data=DATA, **settings):
    """The same restarts stacked and one by one, held equal; both are returned."""
    settings = folded(**(SETTINGS | settings))
    together = tpsgd.fit_many(make, data, stacked=True, **settings)
    apart = tpsgd.fit_many(make, data, stacked=False, **settings)
    assert together.stacked and not apart.stacked
    for (a, first), (b, second) in zip(together, apart, strict=True):
        for p, q in zip(a.parameters(), b.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-11)
        assert [(e.block, e.epoch) for e in first.history] == [
            (e.block, e.epoch) for e in second.history
        ]
        for e, f in zip(first.history, second.history, strict=True):
            assert e.loss == pytest.approx(f.loss, rel=1e-5)
            assert e.accuracy == pytest.approx(f.accuracy) if f.accuracy is not None else True
            assert (e.accuracy is None) == (f.accuracy is None)
        for name in ("seed", "rule", "sample_passes", "forward_passes"):
            assert getattr(first, name) == getattr(second, name)
        for e, f in zip(first.blocks, second.blocks, strict=True):
            assert replace(e, scale=None) == replace(f, scale=None)
            assert (e.scale is None) == (f.scale is None)
            assert e.scale is None or e.scale == pytest.approx(f.scale, rel=1e-9)
    return together, apart


RUNS = [
    (name, order)
    for name in [*DRAWN, "frozen"]
    for order in (tpsgd.sequential, tpsgd.simultaneous)
    if name != "tpsgd" and not (name in LOCKED and order is tpsgd.sequential)
]


@pytest.mark.parametrize(("name", "order"), RUNS)
def test_stacked_equals_one_by_one(name, order):
    rule = rules.frozen() if name == "frozen" else DRAWN[name]()
    both(rule=rule, order=order)


WHOLE = {  # losses that look at the whole batch: one restart's, not all of them
    "predsim": rules.predsim(),
    "auxiliary": rules.auxiliary(),
    "auxiliary, similar": rules.auxiliary(share=0.9),
    "l2, standardised": rules.tpsgd_l2(standardise=True),
    "drtp, standardised": rules.drtp(standardise=True),
}


@pytest.mark.cover(1)
@pytest.mark.parametrize("order", [tpsgd.sequential, tpsgd.simultaneous])
@pytest.mark.parametrize("name", WHOLE)
def test_stacked_restarts_with_losses_over_the_whole_batch(name, order):
    both(rule=WHOLE[name], order=order)
    both(*unrolled("two layers"), rule=WHOLE[name], order=order, epochs=1, batch_size=7)


@pytest.mark.cover(1)
@pytest.mark.parametrize("at", [Place.BEFORE, Place.END], ids=lambda p: p.name)
@pytest.mark.parametrize("name", ["tpsgd_l1", "dfa", "readout_learned"])
def test_stacked_restarts_at_every_place(name, at):
    both(rule=DRAWN[name](at=at), order=tpsgd.simultaneous)


@pytest.mark.parametrize(
    "activation", [nn.LeakyReLU, nn.ReLU, nn.Sigmoid, nn.GELU, nn.SiLU, nn.Softplus]
)
def test_stacked_restarts_for_every_activation(activation):
    both(lambda: factory(activation), order=tpsgd.simultaneous)


@pytest.mark.parametrize("loss", [mse, cross_entropy, bce], ids=lambda x: x.name)
def test_stacked_restarts_for_every_loss_and_kind_of_label(loss):
    hot = F.one_hot(Y, 3).double()
    for rule in (rules.readout(learned=True), rules.tpsgd_l2()):
        both(rule=rule, loss=loss)
        both(rule=rule, loss=loss, data=(DATA[0], 0.9 * hot + 0.1 / 3))
    both(rule=rules.dfa(), order=tpsgd.simultaneous, loss=loss, data=(DATA[0], hot))


@pytest.mark.parametrize("reuse", [True, False])
def test_stacked_restarts_with_inputs_kept_or_made_again(reuse):
    both(reuse=reuse, rule=rules.readout(learned=True))


def test_stacked_restarts_with_a_rule_per_block_and_epochs_per_block():
    both(
        rule=[rules.drtp(), rules.readout(learned=True), rules.tpsgd_l2()],
        epochs=[1, 0, 3],
        order=tpsgd.simultaneous,
    )


def test_stacked_restarts_with_a_rate_per_block_and_a_schedule_of_rates():
    both(
        lr=[0.1, 0.05, 0.2],
        optimizer=torch.optim.SGD,
        lr_schedule=partial(ExponentialLR, gamma=0.5),
        epochs=3,
    )


@pytest.mark.parametrize("kind", ["SGD", "AdamW", "RMSprop", "Adagrad", "RAdam"])
def test_stacked_restarts_with_other_optimizers(kind):
    both(optimizer=partial(getattr(torch.optim, kind), lr=0.01, weight_decay=0.01))


@pytest.mark.parametrize("order", [tpsgd.sequential, tpsgd.simultaneous])
def test_stacked_restarts_with_validation(order):
    x, y = points(seed=1)
    together, apart = both(validation=(x.double(), y), order=order)
    for first, second in zip(together.runs, apart.runs, strict=True):
        for e, f in zip(first.history, second.history, strict=True):
            assert e.val_loss == pytest.approx(f.val_loss, rel=1e-5)
            assert e.val_accuracy == pytest.approx(f.val_accuracy)


def test_stacked_restarts_of_a_layer_over_positions_with_flatten():
    x = DATA[0].view(-1, 2, 3)

    def make():
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3)).double()

    both(make, (x, Y))
    both(make, (x, Y), rule=rules.tpsgd_l2(at=Place.END))
    for rule in WHOLE.values():
        both(make, (x, Y), rule=rule)


def test_stacked_restarts_with_no_bias_and_a_batch_larger_than_the_data():
    both(lambda: nn.Sequential(nn.Linear(6, 4, bias=False), nn.ReLU(), nn.Linear(4, 3)).double(),
         batch_size=1000)  # fmt: skip


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
@pytest.mark.parametrize(("name", "order"), RUNS)
def test_stacked_on_a_gpu_equals_one_by_one_on_the_cpu(name, order):
    """With small batches, so that steps are captured and replayed."""
    rule = rules.frozen() if name == "frozen" else DRAWN[name]()
    settings = SETTINGS | {"rule": rule, "order": order, "batch_size": 4, "epochs": 3}
    there = tpsgd.fit_many(factory, DATA, device="cuda", **settings)
    here = tpsgd.fit_many(factory, DATA, device="cpu", **settings)
    assert there.stacked and not here.stacked
    for a, b in zip(there.models, here.models, strict=True):
        for p, q in zip(a.parameters(), b.parameters(), strict=True):
            torch.testing.assert_close(p.cpu(), q, rtol=1e-6, atol=1e-8)


# ---- over time -----------------------------------------------------------------------------------

UNROLLED = {
    "one layer": (sequences, [lambda: Recurrent(4, 5)], 5),
    "two layers": (
        sequences,
        [lambda: Recurrent(4, 6, sequence=True, leak=0.5), lambda: Recurrent(6, 5)],
        5,
    ),
    "both ways": (sequences, [lambda: Recurrent(4, 3, bidirectional=True)], 6),
    "both ways twice": (
        sequences,
        [
            lambda: Recurrent(4, 3, sequence=True, bidirectional=True),
            lambda: Recurrent(6, 3, bidirectional=True),
        ],
        6,
    ),
    "tokens": (tokens, [lambda: Recurrent(7, 5, activation=nn.GELU)], 5),
    "tokens, two layers": (
        tokens,
        [lambda: Recurrent(7, 4, sequence=True), lambda: Recurrent.paper(4, 5)],
        5,
    ),
    "one feature": (
        lambda: (sequences()[0][..., 0], sequences()[1]),
        [lambda: Recurrent(1, 5, activation=nn.ReLU)],
        5,
    ),
    "all states": (sequences, [lambda: Recurrent(4, 3, sequence=True), nn.Flatten], 15),
    "nn.RNN": (sequences, [lambda: nn.RNN(4, 5, 2, batch_first=True)], 5),
}


def unrolled(kind):
    data, makes, units = UNROLLED[kind]
    net = lambda: nn.Sequential(*(make() for make in makes), nn.Linear(units, 3))  # noqa: E731
    return lambda: net().double(), data()


@pytest.mark.cover(1)
@pytest.mark.usefixtures("unwatched")
@pytest.mark.parametrize("order", [tpsgd.sequential, tpsgd.simultaneous])
@pytest.mark.parametrize("kind", UNROLLED)
def test_stacked_recurrent_layers(kind, order):
    make, data = unrolled(kind)
    for name in ("readout", "drtp" if order is tpsgd.sequential else "tpsgd_l1"):
        settings = {"epochs": 1, "batch_size": 7, "restarts": 2}
        both(make, data, rule=DRAWN[name](), order=order, **settings)


@pytest.mark.cover(1)
@pytest.mark.usefixtures("unwatched")
@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("kind", ["two layers", "tokens", "both ways", "one feature"])
def test_stacked_recurrent_layers_in_chunks(kind, window):
    make, data = unrolled(kind)
    for name in ("tpsgd_l2", "readout_learned"):
        settings = {"rule": DRAWN[name](), "reuse": False, "batch_size": 7, "restarts": 2}
        both(make, data, window=window, epochs=2, **settings)


@pytest.mark.usefixtures("unwatched")
@pytest.mark.parametrize("at", [Place.BEFORE, Place.END], ids=lambda p: p.name)
def test_stacked_recurrent_layers_at_other_places_and_under_dfa(at):
    make, data = unrolled("two layers")
    for name in ("tpsgd_l1", "dfa", "readout_learned"):
        both(make, data, rule=DRAWN[name](at=at), order=tpsgd.simultaneous, restarts=2)


def test_stacked_recurrent_layers_with_validation():
    make, data = unrolled("two layers")
    x, y = sequences(steps=9, seed=1)
    for order in (tpsgd.sequential, tpsgd.simultaneous):
        together, apart = both(make, data, validation=(x, y), order=order, restarts=2)
        for e, f in zip(together.runs[1].history, apart.runs[1].history, strict=True):
            assert e.val_loss == pytest.approx(f.val_loss, rel=1e-5)


@pytest.mark.usefixtures("unwatched")
@pytest.mark.parametrize("kind", ["mlp", *(k for k in UNROLLED if k != "nn.RNN")])
def test_stacked_backprop(kind):
    make, data = (factory, DATA) if kind == "mlp" else unrolled(kind)
    for loss in (cross_entropy, mse):
        both(make, data, backprop=True, loss=loss, epochs=1, batch_size=7, restarts=2)


def test_backprop_of_torchs_rnn_is_not_stacked():
    make, data = unrolled("nn.RNN")
    with pytest.raises(TpsgdError, match=r"nn.RNN computes one model at a time"):
        tpsgd.fit_many(make, data, backprop=True, restarts=2, stacked=True)
    assert not tpsgd.fit_many(make, data, backprop=True, restarts=2, epochs=1).stacked


def test_stacked_backprop_with_a_link_function_at_the_end():
    def make():
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3), nn.Sigmoid()).double()

    both(make, (DATA[0], F.one_hot(Y, 3).double()), backprop=True, loss=bce)


# ---- restarts are what `fit` makes ---------------------------------------------------------------


def test_restart_r_is_fit_with_the_seed_plus_r():
    many = tpsgd.fit_many(lambda: factory(), DATA, **SETTINGS)
    for r, (model, run) in enumerate(many):
        alone = seeded(factory, 4 + r)
        tpsgd.fit(alone, DATA, epochs=2, batch_size=20, seed=4 + r, memory="fast")
        assert same(state(model), state(alone)) and run.seed == 4 + r
    assert len({tuple(model[0].weight.flatten().tolist()) for model in many.models}) == 3


def test_every_record_names_its_own_seed():
    for stacked in (True, False):
        many = tpsgd.fit_many(factory, DATA, stacked=stacked, **SETTINGS)
        assert [run.seed for run in many.runs] == [4, 5, 6]
        assert [run.settings["seed"] for run in many.runs] == [4, 5, 6]


def test_backprop_restarts():
    many = tpsgd.fit_many(factory, DATA, backprop=True, **SETTINGS)
    alone = seeded(factory, 5)
    tpsgd.fit_backprop(alone, DATA, epochs=2, batch_size=20, seed=5)
    assert same(state(many.models[1]), state(alone)) and many.runs[1].rule == "backprop"


def test_length_iteration_and_evaluation():
    many = tpsgd.fit_many(factory, DATA, **SETTINGS)
    assert len(many) == len(list(many)) == 3
    assert many.evaluate(DATA) == [tpsgd.evaluate(model, DATA) for model in many.models]


def test_one_restart():
    for stacked in (None, True, False):
        many = tpsgd.fit_many(factory, DATA, **(SETTINGS | {"restarts": 1}), stacked=stacked)
        assert len(many) == 1 and not many.stacked


def test_the_callers_random_numbers_are_not_touched():
    torch.manual_seed(5)
    wanted = torch.get_rng_state()
    for stacked in (True, False):
        tpsgd.fit_many(factory, DATA, stacked=stacked, **SETTINGS)
    assert torch.equal(torch.get_rng_state(), wanted)


def test_models_are_left_plain():
    for stacked in (True, False):
        for model in tpsgd.fit_many(factory, DATA, stacked=stacked, **SETTINGS).models:
            assert all(p.grad is None and p.is_leaf and p.requires_grad for p in model.parameters())
            assert all(isinstance(p, nn.Parameter) for p in model.parameters())
            assert model.training


def test_on_the_cpu_restarts_run_one_by_one_unless_told_otherwise():
    assert not tpsgd.fit_many(factory, DATA, **SETTINGS).stacked


# ---- what cannot be stacked says why -------------------------------------------------------------

CANNOT = {
    "convolution": (
        lambda: nn.Sequential(
            nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3)
        ),
        {},
        "not a linear or recurrent layer",
    ),
    "dropout": (
        lambda: nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Dropout(), nn.Linear(4, 3)),
        {},
        "dropout",
    ),
    "norm": (
        lambda: nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)),
        {},
        "normalisation",
    ),
    "frozen parameters": (
        lambda: nn.Sequential(nn.Linear(6, 4).requires_grad_(False), nn.Linear(4, 3)),
        {},
        "do not learn",
    ),
    "a pool at the end": (
        lambda: nn.Sequential(
            nn.Unflatten(1, (2, 3)), nn.Linear(3, 3), nn.AdaptiveAvgPool2d((1, 3)), nn.Flatten()
        ),
        {},
        "no closed form",
    ),
    "activation": (lambda: mlp(6, 4, 3, activation=nn.PReLU), {}, "no closed form"),
    "recurrent dropout": (
        lambda: nn.Sequential(
            nn.Unflatten(1, (3, 2)), nn.RNN(2, 4, 2, dropout=0.1, batch_first=True), nn.Linear(4, 3)
        ),
        {},
        "dropout",
    ),
    "optimizer": (lambda: mlp(6, 3), {"optimizer": torch.optim.Rprop}, "each number by itself"),
    "early stopping": (lambda: mlp(6, 3), {"early_stopping": EarlyStopping()}, "different times"),
    "callbacks": (lambda: mlp(6, 3), {"callbacks": [print]}, "different times"),
    "any loss": (
        lambda: mlp(6, 4, 3),
        {"rule": rules.tpsgd(F.smooth_l1_loss)},
        "no derivative in closed form",
    ),
    "any loss, standardised": (
        lambda: mlp(6, 4, 3),
        {"rule": rules.tpsgd(F.smooth_l1_loss, standardise=True)},
        "no derivative in closed form",
    ),
}


@pytest.mark.parametrize("case", CANNOT)
def test_what_cannot_be_stacked(case):
    make, settings, why = CANNOT[case]
    with pytest.raises(TpsgdError, match=f"cannot be stacked: .*{why}.*leave stacked=None"):
        tpsgd.fit_many(make, (X, Y), restarts=2, stacked=True, **settings)


@pytest.mark.parametrize("case", CANNOT)
def test_what_cannot_be_stacked_runs_one_by_one(case):
    make, settings, _ = CANNOT[case]
    settings = {k: v for k, v in settings.items() if k != "callbacks"}
    assert len(tpsgd.fit_many(make, (X, Y), restarts=2, epochs=1, **settings)) == 2


def test_a_loader_is_not_stacked():
    class Few(torch.utils.data.Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, i):
            return torch.ones(4) * i, i % 2

    def model():
        return nn.Sequential(nn.Linear(4, 2))

    with pytest.raises(tpsgd.TpsgdError, match="a loader gives every restart the same batches"):
        tpsgd.fit_many(model, Few(), restarts=2, stacked=True, epochs=1)
    assert not tpsgd.fit_many(model, Few(), restarts=2, epochs=1).stacked


def test_a_factory_that_gives_one_model_twice():
    model = nn.Sequential(nn.Linear(4, 2))
    data = torch.randn(8, 4), torch.arange(8) % 2
    with pytest.raises(tpsgd.TpsgdError, match="a new model each time"):
        tpsgd.fit_many(lambda: model, data, restarts=2, epochs=1)
    with pytest.raises(tpsgd.TpsgdError, match="makes a new model each time, got list"):
        tpsgd.fit_many([model, model], data, restarts=2, epochs=1)
