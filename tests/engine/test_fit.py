"""`fit` and `fit_backprop`: repeatable, in place, and what each argument does."""

import math
from functools import partial

import pytest
import torch
from helpers import DRAWN, LOCAL, LOCKED, Probe, Residual, images, mlp, points, same, seeded, state
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, StepLR

import tpsgd
from tpsgd import EarlyStopping, Memory, bce, cross_entropy, mse, rules

SGD = partial(torch.optim.SGD, lr=0.05)
ORDERS = [tpsgd.sequential, tpsgd.simultaneous]
FITS = {
    "sequential": tpsgd.fit,
    "simultaneous": partial(tpsgd.fit, order=tpsgd.simultaneous),
    "dfa": partial(tpsgd.fit, order=tpsgd.simultaneous, rule=rules.dfa()),
    "backprop": tpsgd.fit_backprop,
}


def cnn():
    return seeded(
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Dropout(0.3),
            Residual(4),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(64, 3),
        )
    )


# ---- it learns -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "order"),
    [(name, s) for name in (*LOCAL, "frozen") for s in ORDERS]
    + [(name, tpsgd.simultaneous) for name in LOCKED],
)
def test_clouds_that_lie_apart_are_learned(name, order):
    rule = rules.frozen() if name == "frozen" else DRAWN[name]()
    x, y = points(n=240, features=10, apart=3.0)
    model = mlp(10, 32, 3)
    before = tpsgd.evaluate(model, (x, y))
    tpsgd.fit(model, (x, y), rule=rule, order=order, epochs=12, batch_size=24, lr=0.01)
    assert tpsgd.evaluate(model, (x, y)) > max(0.9, before)


def test_backprop_learns():
    x, y = points(n=240, features=10, apart=3.0)
    model = mlp(10, 32, 3)
    tpsgd.fit_backprop(model, (x, y), epochs=8, batch_size=24, lr=0.01)
    assert tpsgd.evaluate(model, (x, y)) > 0.95


def test_hidden_features_of_the_readout_beat_the_frozen_control():
    """A problem that random features alone do not solve: the sign of a product."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(600, 8, generator=g)
    y = (x[:, 0] * x[:, 1] > 0).long()
    found = {}
    for rule in (rules.readout(), rules.frozen()):
        model = mlp(8, 24, 2, activation=nn.ReLU)
        tpsgd.fit(model, (x, y), rule=rule, epochs=40, batch_size=50, lr=0.01)
        found[rule.name] = tpsgd.evaluate(model, (x, y))
    assert found["readout"] > found["frozen"] + 0.05


# ---- bit for bit ---------------------------------------------------------------------------------


@pytest.mark.parametrize("how", FITS)
def test_the_same_seed_gives_the_same_weights_bit_for_bit(how):
    runs = []
    for _ in range(2):
        model = cnn()
        runs.append((FITS[how](model, images(), epochs=2, batch_size=8, seed=3), state(model)))
        torch.randn(7)  # the caller's own numbers in between change nothing
    assert same(runs[0][1], runs[1][1])
    losses = [[e.loss for e in run.history] for run, _ in runs]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("how", FITS)
def test_another_seed_gives_other_weights(how):
    found = []
    for seed in (0, 1):
        model = mlp(6, 8, 3)
        FITS[how](model, points(), epochs=1, batch_size=8, seed=seed)
        found.append(state(model))
    assert not same(*found)


def test_the_seed_changes_the_projection_itself():
    """With all samples in one batch and no dropout, nothing else is left to chance."""
    found = []
    for seed in (0, 1):
        model = mlp(6, 8, 3)
        tpsgd.fit(model, points(), rule=rules.tpsgd_l2(), epochs=1, batch_size=48, seed=seed)
        found.append(state(model))
    assert not torch.equal(found[0]["0.weight"], found[1]["0.weight"])


@pytest.mark.parametrize("how", FITS)
def test_the_callers_random_numbers_are_not_touched(how):
    torch.manual_seed(5)
    wanted = torch.get_rng_state()
    FITS[how](cnn(), images(), epochs=1, batch_size=8, seed=9)
    assert torch.equal(torch.get_rng_state(), wanted)


def test_the_callers_random_numbers_are_not_touched_by_a_run_that_fails():
    torch.manual_seed(5)
    wanted = torch.get_rng_state()
    with pytest.raises(tpsgd.TpsgdError):
        tpsgd.fit(mlp(6, 3), points(), loss=mse, optimizer=partial(SGD, lr=1e9), epochs=20)
    assert torch.equal(torch.get_rng_state(), wanted)


@pytest.mark.parametrize("how", FITS)
def test_training_goes_on_from_the_weights_given(how):
    """A rate of zero leaves the weights as they are: `fit` does not make its own."""
    model = mlp(6, 8, 3)
    before = state(model)
    FITS[how](model, points(), epochs=2, optimizer=SGD, lr=0.0)
    assert same(state(model), before)


def test_training_twice_goes_on():
    model = mlp(6, 8, 3)
    first = tpsgd.fit(model, points(), epochs=3, batch_size=8)
    second = tpsgd.fit(model, points(), epochs=3, batch_size=8)
    assert second.loss < first.loss


@pytest.mark.parametrize("how", FITS)
def test_modes_are_restored(how):
    model = cnn().eval()
    model[3].train()
    FITS[how](model, images(), epochs=1)
    assert [m.training for m in model] == [False] * 3 + [True] + [False] * 4 and not model.training


def test_modes_are_restored_after_an_error():
    model = cnn()

    def stumble(record):
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        tpsgd.fit(model, images(), callbacks=[stumble])
    assert all(m.training for m in model.modules())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("how", FITS)
def test_the_models_number_format_is_kept(how, dtype):
    model = cnn().to(dtype)
    run = FITS[how](model, images(), epochs=1, batch_size=8)
    assert all(p.dtype == dtype for p in model.parameters())
    assert math.isfinite(run.loss)


def test_the_memory_layout_of_the_weights_is_kept():
    for model in (cnn(), cnn().to(memory_format=torch.channels_last)):
        strides = [p.stride() for p in model.parameters()]
        tpsgd.fit(model, images(), epochs=1)
        assert [p.stride() for p in model.parameters()] == strides


# ---- backprop ------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", [mse, cross_entropy, bce], ids=lambda x: x.name)
def test_backprop_is_the_usual_loop(loss):
    x, y = points()
    model, twin = mlp(6, 8, 3).double(), mlp(6, 8, 3).double()
    tpsgd.fit_backprop(model, (x, y), loss=loss, optimizer=SGD, epochs=3, batch_size=48)
    optimizer = SGD(twin.parameters())
    for _ in range(3):  # one batch: the order within it does not matter
        optimizer.zero_grad()
        loss.value(twin(x.double()), y).backward()
        optimizer.step()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_a_net_of_one_layer_is_the_same_under_every_rule_and_backprop():
    found = []
    for fit in FITS.values():
        model = mlp(6, 3)
        fit(model, points(), loss=cross_entropy, epochs=2, batch_size=8)
        found.append(state(model))
    for other in found[1:]:
        assert torch.allclose(other["0.weight"], found[0]["0.weight"], atol=1e-6)


def test_backprop_takes_any_module():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.head = Residual(6), nn.Linear(6, 3)

        def forward(self, x):
            return self.head(torch.relu(self.stem(x)))

    model = seeded(Net)
    run = tpsgd.fit_backprop(model, points(), epochs=3, batch_size=8)
    assert run.history[-1].loss < run.history[0].loss
    assert {e.block for e in run.history} <= {0, 1}


def test_backprop_counts_sample_passes_per_layer():
    run = tpsgd.fit_backprop(mlp(6, 8, 8, 3), points(), epochs=2)
    assert run.sample_passes == 48 * 2 * 3
    assert run.sample_passes == tpsgd.fit(mlp(6, 8, 8, 3), points(), epochs=2).sample_passes
    assert [b.learning for b in run.blocks] == ["autograd"] * 3
    assert [e.block for e in run.history] == [0, 0]


@pytest.mark.parametrize(("loss", "link"), [(bce, nn.Sigmoid()), (cross_entropy, nn.Softmax(1))])
@pytest.mark.parametrize("how", FITS)
def test_a_link_function_at_the_end_is_the_losss_own(how, loss, link):
    """The loss looks at the logits, so training is as without it."""
    plain, linked = mlp(6, 8, 3), nn.Sequential(*mlp(6, 8, 3), link)
    for model in (plain, linked):
        FITS[how](model, points(), loss=loss, epochs=2, batch_size=16)
    torch.testing.assert_close(state(linked), state(plain), atol=1e-6, rtol=1e-6)


# ---- the last block's loss -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "loss"),
    [
        (rules.tpsgd_l1(), "mse"),
        (rules.tpsgd_l2(), "mse"),
        (rules.tpsgd(nn.functional.l1_loss), "mse"),
        (rules.drtp(), "cross_entropy"),
        (rules.readout(), "cross_entropy"),
        (rules.frozen(), "cross_entropy"),
        (rules.frozen(mse), "mse"),
    ],
    ids=lambda v: getattr(v, "name", v),
)
def test_default_losses(rule, loss):
    assert tpsgd.fit(mlp(6, 8, 3), points(), rule=rule, epochs=1).settings["loss"] == loss
    given = tpsgd.fit(mlp(6, 8, 3), points(), rule=rule, loss=bce, epochs=1)
    assert given.settings["loss"] == "bce"


def test_the_recorded_loss_and_accuracy_are_those_of_the_epoch():
    x, y = points()
    model = mlp(6, 3)
    run = tpsgd.fit(model, (x, y), optimizer=SGD, lr=0.0, epochs=1, batch_size=7)
    wanted = cross_entropy.value(model(x), y).item()
    assert run.loss == pytest.approx(wanted, rel=1e-5)
    assert run.history[0].accuracy == pytest.approx(tpsgd.evaluate(model, (x, y)))


# ---- epochs, rates, optimizers -------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
def test_epochs_per_block(order):
    model = mlp(6, 8, 7, 3)
    before = state(model)
    run = tpsgd.fit(model, points(), order=order, epochs=[2, 0, 3])
    assert [e.block for e in run.history].count(1) == 2
    assert [e.block for e in run.history].count(3) == 3
    assert 2 not in {e.block for e in run.history}
    assert torch.equal(model[2].weight, before["2.weight"])
    assert run.sample_passes == 48 * 5


@pytest.mark.parametrize("how", FITS)
def test_no_epochs_at_all(how):
    model = mlp(6, 8, 3)
    before = state(model)
    run = FITS[how](model, points(), epochs=0)
    assert same(state(model), before) and run.history == [] and run.loss is None
    assert run.sample_passes == 0 and "0 sample passes" in str(run)


def test_a_block_stops_learning_when_its_epochs_are_over():
    model, seen = mlp(6, 8, 3), []
    tpsgd.fit(
        model,
        points(),
        order=tpsgd.simultaneous,
        epochs=[1, 3],
        callbacks=[lambda e: seen.append((e.block, e.epoch, model[0].weight.clone()))],
    )
    assert [(block, epoch) for block, epoch, _ in seen] == [(1, 1), (2, 1), (2, 2), (2, 3)]
    assert torch.equal(seen[0][2], seen[-1][2])


@pytest.mark.parametrize("order", ORDERS)
def test_rates_per_block(order):
    model = mlp(6, 8, 7, 3)
    before = state(model)
    tpsgd.fit(model, points(), order=order, optimizer=SGD, lr=[0.0, 0.1, 0.0], epochs=1)
    moved = {k for k, v in state(model).items() if not torch.equal(v, before[k])}
    assert moved == {"2.weight", "2.bias"}


def test_the_rate_given_replaces_the_optimizers():
    found = []
    for settings_ in (
        {"optimizer": SGD, "lr": 0.3},
        {"optimizer": partial(torch.optim.SGD, lr=0.3)},
    ):
        model = mlp(6, 8, 3)
        tpsgd.fit(model, points(), epochs=1, **settings_)
        found.append(state(model))
    assert same(*found)


def test_optimizers_per_block():
    model, made = mlp(6, 8, 3), []

    def factory(kind):
        def make(params):
            made.append(kind)
            return kind(params, lr=0.01)

        return make

    tpsgd.fit(
        model, points(), optimizer=[factory(torch.optim.SGD), factory(torch.optim.Adam)], epochs=1
    )
    assert set(made) == {torch.optim.SGD, torch.optim.Adam}


@pytest.mark.parametrize(
    "kind",
    ["SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop"],
)
def test_any_torch_optimizer(kind):
    model = mlp(6, 8, 3)
    before = state(model)
    run = tpsgd.fit(model, points(), optimizer=getattr(torch.optim, kind), epochs=1, batch_size=8)
    assert math.isfinite(run.loss)
    assert all(not torch.equal(v, before[k]) for k, v in state(model).items())


def test_the_default_is_adam_at_a_thousandth():
    found = []
    for chosen in ({}, {"optimizer": partial(torch.optim.Adam, lr=1e-3)}):
        model = mlp(6, 8, 3)
        tpsgd.fit(model, points(), epochs=2, batch_size=8, **chosen)
        found.append(state(model))
    for name in found[0]:
        torch.testing.assert_close(found[0][name], found[1][name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("how", FITS)
def test_the_rate_follows_its_schedule(how):
    """At rate 1e-2 * 0^epoch only the first epoch moves anything."""
    once, often = mlp(6, 8, 3), mlp(6, 8, 3)
    settings_ = {"optimizer": SGD, "lr": 0.01, "batch_size": 8, "memory": Memory(reuse=True)}
    FITS[how](once, points(), epochs=1, **settings_)
    FITS[how](often, points(), epochs=4, lr_schedule=partial(ExponentialLR, gamma=0.0), **settings_)
    if how == "sequential":  # the second block sees another order, from its own first epoch on
        assert torch.equal(once[0].weight, often[0].weight)
    assert same(state(once), state(often))


def test_the_rates_of_a_schedule_one_by_one():
    rates, optimizers = [], []

    def keep(params):
        optimizers.append(SGD(params, lr=0.1))
        return optimizers[-1]

    tpsgd.fit(
        mlp(6, 8, 3),
        points(),
        optimizer=keep,
        epochs=4,
        lr_schedule=partial(StepLR, step_size=2, gamma=0.1),
        callbacks=[lambda e: rates.append(optimizers[-1].param_groups[0]["lr"])],
    )
    assert rates[4:] == pytest.approx([0.1, 0.1, 0.01, 0.01])  # the last block's, while it learns


# ---- stopping ------------------------------------------------------------------------------------


def test_callbacks_get_every_record_in_order():
    seen = []
    run = tpsgd.fit(mlp(6, 8, 3), points(), epochs=3, callbacks=[seen.append])
    assert seen == run.history and len(seen) == 6


@pytest.mark.parametrize("order", ORDERS)
def test_a_callback_that_says_true_stops_its_block_alone(order):
    run = tpsgd.fit(
        mlp(6, 8, 3),
        points(),
        order=order,
        epochs=4,
        callbacks=[lambda e: e.block == 1 and e.epoch == 2],
    )
    assert sorted((e.block, e.epoch) for e in run.history) == [
        (1, 1), (1, 2), (2, 1), (2, 2), (2, 3), (2, 4),
    ]  # fmt: skip


def test_every_callback_is_called_even_when_one_stops():
    calls = []
    tpsgd.fit(
        mlp(6, 3),
        points(),
        epochs=4,
        callbacks=[lambda e: True, lambda e: calls.append(e.epoch)],
    )
    assert calls == [1]


def test_callbacks_stop_backprop():
    run = tpsgd.fit_backprop(mlp(6, 8, 3), points(), epochs=9, callbacks=[lambda e: e.epoch == 2])
    assert len(run.history) == 2


@pytest.mark.parametrize("how", ["sequential", "simultaneous", "backprop"])
def test_early_stopping_waits_for_its_patience(how):
    """At rate zero nothing improves after the first epoch."""
    run = FITS[how](
        mlp(6, 8, 3),
        points(),
        optimizer=SGD,
        lr=0.0,
        epochs=20,
        batch_size=48,
        validation=points(seed=1),
        early_stopping=EarlyStopping(patience=3),
    )
    for block in {e.block for e in run.history}:
        assert len([e for e in run.history if e.block == block]) == 4


def test_early_stopping_per_block():
    run = tpsgd.fit(
        mlp(6, 8, 3),
        points(),
        optimizer=SGD,
        lr=0.0,
        epochs=5,
        validation=points(seed=1),
        early_stopping=[EarlyStopping(1), None],
    )
    assert [e.block for e in run.history] == [1, 1, 2, 2, 2, 2, 2]


def test_early_stopping_asks_for_a_real_improvement():
    settings_ = {"epochs": 12, "batch_size": 48, "lr": 1e-4, "optimizer": SGD}
    lax = tpsgd.fit(mlp(6, 3), points(), early_stopping=EarlyStopping(1), **settings_)
    strict = tpsgd.fit(mlp(6, 3), points(), early_stopping=EarlyStopping(1, 0.5), **settings_)
    assert len(lax.history) == 12 and len(strict.history) == 2


def test_early_stopping_goes_by_the_validation_loss():
    """Held-out labels that contradict the training labels: one loss rises, the other falls."""
    x, y = points()
    model = mlp(6, 3)
    nn.init.zeros_(model[0].weight)
    run = tpsgd.fit(
        model,
        (x, y),
        epochs=20,
        lr=0.01,
        validation=(x, (y + 1) % 3),
        early_stopping=EarlyStopping(2),
    )
    assert len(run.history) == 3
    assert run.history[-1].loss < run.history[0].loss
    assert run.history[-1].val_loss > run.history[0].val_loss


def test_dfas_blocks_stop_by_the_networks_loss():
    run = tpsgd.fit(
        mlp(6, 8, 3),
        points(),
        rule=rules.dfa(),
        order=tpsgd.simultaneous,
        optimizer=SGD,
        lr=0.0,
        epochs=9,
        batch_size=48,
        early_stopping=EarlyStopping(2),
    )
    assert sorted((e.block, e.epoch) for e in run.history) == [
        (b, e) for b in (1, 2) for e in (1, 2, 3)
    ]


# ---- validation ----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", FITS)
def test_validation_is_measured_after_every_epoch_and_changes_nothing(how):
    held_out = images(seed=1)
    with_it, without = cnn(), cnn()
    run = FITS[how](with_it, images(), epochs=2, batch_size=8, validation=held_out)
    FITS[how](without, images(), epochs=2, batch_size=8)
    assert same(state(with_it), state(without))
    last = [e for e in run.history if e.block in (0, 3)]
    assert all(e.val_loss is not None and e.val_accuracy is not None for e in last)
    assert last[-1].val_accuracy == pytest.approx(tpsgd.evaluate(with_it, held_out))
    wanted = cross_entropy.value(with_it.eval()(held_out[0]), held_out[1]).item()
    assert last[-1].val_loss == pytest.approx(wanted, rel=1e-4)


def test_validation_of_a_hidden_block_is_its_local_loss():
    """On the training data itself, at rate zero, both are the same number."""
    x, y = points()
    run = tpsgd.fit(
        mlp(6, 8, 3),
        (x, y),
        rule=rules.tpsgd_l2(),
        optimizer=SGD,
        lr=0.0,
        epochs=1,
        validation=(x, y),
    )
    for e in run.history:
        assert e.val_loss == pytest.approx(e.loss, rel=1e-5)


def test_validation_in_another_form():
    x, y = points(seed=1)
    dataset = torch.utils.data.TensorDataset(x, y)
    found = []
    for held_out in ((x.numpy(), y.numpy()), dataset, torch.utils.data.DataLoader(dataset, 7)):
        run = tpsgd.fit(mlp(6, 8, 3), points(), epochs=1, validation=held_out)
        found.append([(e.val_loss, e.val_accuracy) for e in run.history])
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            assert b == pytest.approx(a, rel=1e-5)


# ---- inputs kept or made again -------------------------------------------------------------------


def tower(*extra):
    return seeded(
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.MaxPool2d(2),
            *extra,
            nn.Conv2d(4, 4, 2),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(4, 3),
        )
    )


def test_keeping_inputs_and_making_them_again_give_the_same_weights():
    kept, made = tower(), tower()
    first = tpsgd.fit(kept, images(), epochs=3, batch_size=8, memory=Memory(reuse=True))
    second = tpsgd.fit(made, images(), epochs=3, batch_size=8, memory=Memory(reuse=False))
    assert same(state(kept), state(made))
    assert [e.loss for e in first.history] == [e.loss for e in second.history]


def test_kept_inputs_are_reported_where_there_are_any():
    kept = tpsgd.fit(tower(), images(), epochs=2, memory=Memory(reuse=True))
    # block 1's outputs (4, 2, 2), then with them block 2's (4,), 32 samples of float32
    assert kept.kept_bytes == 32 * 4 * (16 + 4)
    assert tpsgd.fit(tower(), images(), epochs=2, memory=Memory(reuse=False)).kept_bytes == 0
    assert tpsgd.fit(tower(), images(), order=tpsgd.simultaneous).kept_bytes == 0
    assert tpsgd.fit_backprop(tower(), images()).kept_bytes == 0
    assert "+ kept inputs " in str(kept)


def test_validation_inputs_given_by_the_caller_are_not_ours():
    plain = tpsgd.fit(mlp(6, 8, 3), points(), epochs=1, memory=Memory(reuse=True))
    assert plain.kept_bytes == 48 * 8 * 4
    held_out = points(n=12, seed=1)
    checked = tpsgd.fit(
        mlp(6, 8, 3), points(), epochs=1, memory=Memory(reuse=True), validation=held_out
    )
    assert checked.kept_bytes == (48 + 12) * 8 * 4


def test_forward_passes_count_what_it_takes_to_make_inputs():
    n, epochs = 32, 3
    kept = tpsgd.fit(tower(), images(), epochs=epochs, memory=Memory(reuse=True))
    assert kept.forward_passes == 2 * n  # each sample once through each of two blocks
    made = tpsgd.fit(tower(), images(), epochs=epochs, memory=Memory(reuse=False))
    assert made.forward_passes == epochs * n * (1 + 2)
    assert kept.sample_passes == made.sample_passes == 3 * epochs * n
    assert tpsgd.fit(tower(), images(), order=tpsgd.simultaneous).forward_passes == 0


def test_a_blocks_inputs_are_computed_in_evaluation_mode():
    probe = Probe(lambda x: len(x))
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), probe, nn.Linear(8, 3))
    x, y = points()
    tpsgd.fit(model, (x, y), epochs=[3, 1], batch_size=16)
    tracked = int(model[1].num_batches_tracked)
    assert tracked == 3 * 3  # three epochs of three batches, and none while passing on


# ---- parameters that stay put --------------------------------------------------------------------


@pytest.mark.parametrize("how", FITS)
def test_parameters_without_requires_grad_stay_put(how):
    model = cnn()
    model[0].weight.requires_grad_(False)
    model[1].bias.requires_grad_(False)
    model[4].inner.requires_grad_(False)
    before = state(model)
    FITS[how](model, images(), epochs=1, batch_size=8)
    after = state(model)
    still = {k for k, _ in model.named_parameters() if torch.equal(before[k], after[k])}
    assert still == {"0.weight", "1.bias", "4.inner.weight", "4.inner.bias"}
    assert {k for k, p in model.named_parameters() if not p.requires_grad} == still


@pytest.mark.parametrize("how", ["sequential", "simultaneous", "dfa"])
def test_a_wholly_frozen_block_stays_put_running_statistics_included(how):
    model = cnn()
    model[:3].requires_grad_(False)
    before = state(model[:3])
    run = FITS[how](model, images(), epochs=2, batch_size=8)
    assert same(state(model[:3]), before)
    assert [b.learning for b in run.blocks] == ["frozen", "autograd", "closed form"]
    assert {e.block for e in run.history} == {2, 3}
    assert run.sample_passes == 32 * 2 * 2


def test_a_frozen_last_block_stays_put():
    model = mlp(6, 8, 3)
    model[2].requires_grad_(False)
    before = state(model[2])
    for how in ("sequential", "dfa"):
        run = FITS[how](model, points(), epochs=1)
        assert same(state(model[2]), before) and {e.block for e in run.history} == {1}


# ---- batch norm and batches ----------------------------------------------------------------------


@pytest.mark.parametrize("how", FITS)
def test_batch_norm_tracks_as_many_batches_as_it_sees(how):
    model = cnn()
    before = state(model)
    FITS[how](model, images(), epochs=3, batch_size=8)
    assert int(model[1].num_batches_tracked) == 12
    assert not torch.equal(model[1].running_mean, before["1.running_mean"])
    assert not torch.equal(model[1].running_var, before["1.running_var"])


@pytest.mark.parametrize("how", FITS)
@pytest.mark.parametrize("make", [lambda: nn.BatchNorm1d(8), lambda: nn.Identity()])
def test_a_last_batch_of_one_sample(how, make):
    """Batch norm cannot learn from it, so it is left out; other nets learn from it."""
    model = seeded(lambda: nn.Sequential(nn.Linear(6, 8), make(), nn.ReLU(), nn.Linear(8, 3)))
    run = FITS[how](model, points(n=17), epochs=1, batch_size=8)
    assert run.sample_passes == 2 * (17 if isinstance(model[1], nn.Identity) else 16)
    assert math.isfinite(run.loss)


def test_the_sample_left_out_changes_from_epoch_to_epoch():
    probe = Probe(lambda x: tuple(sorted(x[:, 0].tolist())))
    model = nn.Sequential(probe, nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    x, y = points(n=9)
    tpsgd.fit(model, (x, y), epochs=[6, 0], batch_size=8)
    epochs = {seen for seen in probe.seen if len(seen) == 8}
    assert len(epochs) > 1


@pytest.mark.parametrize("how", FITS)
def test_a_batch_larger_than_the_data(how):
    large, exact = mlp(6, 8, 3), mlp(6, 8, 3)
    FITS[how](large, points(), epochs=2, batch_size=10_000)
    FITS[how](exact, points(), epochs=2, batch_size=48)
    assert same(state(large), state(exact))


def test_batches_are_shuffled_anew_each_epoch_and_cover_every_sample():
    probe = Probe(lambda x: tuple(x[:, 0].tolist()))
    model = nn.Sequential(probe, nn.Linear(6, 3))
    x, y = points(n=20)
    tpsgd.fit(model, (x, y), epochs=3, batch_size=10)
    batches = [seen for seen in probe.seen if len(seen) == 10]
    epochs = [batches[i] + batches[i + 1] for i in (0, 2, 4)]
    assert all(sorted(e) == sorted(x[:, 0].tolist()) for e in epochs)
    assert len(set(epochs)) == 3


def test_progress_reports_passes_and_the_total():
    calls = []
    tpsgd.fit(mlp(6, 8, 3), points(), epochs=2, batch_size=4, progress=lambda *a: calls.append(a))
    done, totals = zip(*calls, strict=True)
    assert set(totals) == {48 * 2 * 2}
    assert list(done) == sorted(done) and done[0] > 0 and done[-1] <= 192


def test_an_embedding_gets_whole_numbers():
    x = torch.randint(0, 9, (40, 5), generator=torch.Generator().manual_seed(0))
    model = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(20, 3))
    run = tpsgd.fit(model, (x, x[:, 0] % 3), epochs=2)
    assert run.blocks[0].learning == "autograd" and math.isfinite(run.loss)


# ---- any shapes and labels -----------------------------------------------------------------------


@settings(max_examples=40)
@given(
    n=st.integers(2, 20),
    widths=st.lists(st.integers(1, 6), min_size=2, max_size=4),
    classes=st.integers(2, 5),
    batch_size=st.integers(1, 25),
    seed=st.integers(0, 2**40),
    rule=st.sampled_from(sorted(DRAWN)),
    data=st.data(),
)
@pytest.mark.filterwarnings("ignore:.*classes have no samples")
def test_fit_takes_any_shapes_and_labels(n, widths, classes, batch_size, seed, rule, data):
    y = torch.tensor(data.draw(st.lists(st.integers(0, classes - 1), min_size=n, max_size=n)))
    x = torch.randn(n, widths[0], generator=torch.Generator().manual_seed(seed % 2**31))
    model = mlp(*widths, classes)
    run = tpsgd.fit(
        model,
        (x, y),
        rule=DRAWN[rule](),
        order=tpsgd.simultaneous,
        epochs=1,
        batch_size=batch_size,
        seed=seed,
    )
    assert run.sample_passes == n * len(widths)
    assert [e.block for e in run.history] == list(range(1, len(widths) + 1))
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert 0 <= run.history[-1].accuracy <= 1


@settings(max_examples=25)
@given(
    channels=st.integers(1, 3),
    size=st.tuples(st.integers(3, 6), st.integers(3, 6)),
    filters=st.integers(1, 4),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 2),
    padding=st.integers(0, 2),
    rule=st.sampled_from(sorted(LOCAL)),
)
def test_fit_takes_any_convolution(channels, size, filters, kernel, stride, padding, rule):
    x = torch.randn(6, channels, *size, generator=torch.Generator().manual_seed(1))
    model = nn.Sequential(
        nn.Conv2d(channels, filters, kernel, stride, padding),
        nn.Tanh(),
        nn.Flatten(),
        nn.LazyLinear(2),
    )
    model(x)
    before = state(model)
    run = tpsgd.fit(model, (x, torch.arange(6) % 2), rule=LOCAL[rule](), epochs=1, batch_size=4)
    assert [b.learning for b in run.blocks] == ["closed form"] * 2
    assert not torch.equal(model[0].weight, before["0.weight"])
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_a_module_that_relies_on_view_trains_beside_convolutions():
    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4 * 16, 3)

        def forward(self, x):
            return self.layer(x.view(len(x), -1))

    model = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.Tanh(), Flat())
    data = torch.randn(32, 2, 4, 4), torch.arange(32) % 3
    tpsgd.fit(model, data, epochs=1)
    tpsgd.fit_backprop(model, data, epochs=1)
    assert 0 <= tpsgd.evaluate(model, data) <= 1


def test_the_record_tells_variants_of_a_rule_apart():
    data = torch.randn(16, 4), torch.arange(16) % 2
    rules = tpsgd.rules.tpsgd_l2(), tpsgd.rules.tpsgd_l2(tpsgd.projections.binary(2.0))
    made = [nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)) for _ in rules]
    pairs = zip(made, rules, strict=True)
    told = [tpsgd.fit(m, data, rule=r, epochs=1).settings["options"] for m, r in pairs]
    assert told == [
        ["normal codes, std 1, after the activation"],
        ["binary codes, std 2, after the activation"],
    ]


def test_the_runs_loss_is_the_last_blocks_even_when_it_stopped_first():
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    data = torch.randn(16, 4), torch.arange(16) % 2
    run = tpsgd.fit(model, data, order=tpsgd.simultaneous, epochs=[3, 1])
    assert run.history[-1].block == 1
    assert run.loss == next(e.loss for e in run.history if e.block == 2)
