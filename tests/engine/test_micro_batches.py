"""Batches in pieces, gradients in slices, codes made on the fly: the same steps with less memory.

Everything is in float64, where the plain run and the frugal one must agree up to rounding.
"""

import copy
from functools import partial

import pytest
import torch
from helpers import (
    DRAWN,
    LOCAL,
    LOCKED,
    Probe,
    Residual,
    close,
    folded,
    images,
    mlp,
    points,
    ragged,
    same,
    seeded,
    sequences,
    state,
    tokens,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tpsgd
from tpsgd import Memory, Recurrent, TpsgdError, rules
from tpsgd.engine.learners.updaters import OptimizerSteps
from tpsgd.engine.sources.batches import BatchForm
from tpsgd.nets.closed_form import sliced
from tpsgd.objectives import Site
from tpsgd.projections import Redrawn

pytestmark = pytest.mark.usefixtures("unwatched")

momentum = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


def maps():
    return [
        nn.Conv2d(2, 5, 3, padding=1),
        nn.Tanh(),
        nn.MaxPool2d(2),
        nn.Conv2d(5, 4, 2),
        nn.LeakyReLU(),
        nn.Flatten(),
        nn.Linear(16, 3),
    ]


def signals():
    return [nn.Conv1d(4, 5, 2), nn.Tanh(), nn.Flatten(), nn.Linear(20, 3)]


def stacked():
    return [Recurrent(4, 6, sequence=True), Recurrent(6, 5), nn.Linear(5, 3)]


def grouped():
    return [nn.Conv2d(2, 4, 3, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(64, 3)]


NETS = {  # 30 samples each: batches of 11, 11 and 8
    "mlp": (lambda: [*mlp(6, 9, 7, 3)], lambda: points(30)),
    "conv2d": (maps, lambda: images(30)),
    "conv1d": (signals, lambda: (sequences(30)[0].transpose(1, 2), sequences(30)[1])),
    "residual": (
        lambda: [nn.Linear(6, 8), nn.Tanh(), Residual(8), nn.Linear(8, 3)],
        lambda: points(30),
    ),
    "groups": (grouped, lambda: images(30)),
    "recurrent": (lambda: [Recurrent(4, 6), nn.Linear(6, 3)], lambda: sequences(30, 3)),
    "two recurrent": (stacked, lambda: sequences(30, 3)),
    "both ways": (
        lambda: [Recurrent(4, 5, bidirectional=True), nn.Linear(10, 3)],
        lambda: sequences(30, 3),
    ),
    "nn.RNN": (
        lambda: [nn.RNN(4, 5, 2, batch_first=True), nn.Linear(5, 3)],
        lambda: sequences(30, 3),
    ),
    "tokens": (lambda: [Recurrent(7, 6), nn.Linear(6, 3)], lambda: tokens(30)),
}
PLAIN = {"epochs": 1, "batch_size": 11, "seed": 3}


def net(kind):
    return seeded(lambda: nn.Sequential(*NETS[kind][0]()).double())


def given_to(kind):
    x, y = NETS[kind][1]()
    return (x.double() if x.is_floating_point() else x), y


def trained(kind, data=None, **settings):
    """A net's weights after training, and the record."""
    model = net(kind)
    run = tpsgd.fit(model, data or given_to(kind), **folded(**(PLAIN | settings)))
    return state(model), run


def agree(kind, frugal, rtol=1e-9, history=True, **settings):
    """Assert that frugal settings change neither weights nor figures."""
    expected, plain = trained(kind, **settings)
    found, run = trained(kind, **settings, **frugal)
    assert not same(expected, state(net(kind)))  # something was learned
    close(found, expected, rtol=rtol, atol=rtol / 10)
    assert run.sample_passes == plain.sample_passes
    if history:
        assert len(run.history) == len(plain.history)
        for a, b in zip(run.history, plain.history, strict=True):
            assert (a.block, a.epoch, a.accuracy) == (b.block, b.epoch, b.accuracy)
            assert a.loss == pytest.approx(b.loss, rel=2e-6, abs=1e-6)  # added up in float32


FRUGAL = {
    "pieces of 4": {"micro_batch": 4},  # 3, 4, 4 and 4, 4
    "a piece larger than the batch": {"micro_batch": 100},
    "one at a time": {"micro_batch": 1},
    "slices": {"slices": 3},
    "more slices than rows": {"slices": 50},
    "redraw": {"redraw": True},
    "pieces, slices, redraw": {"micro_batch": 3, "slices": 4, "redraw": True},
}
ALL = FRUGAL["pieces, slices, redraw"]


@pytest.mark.parametrize("how", FRUGAL)
@pytest.mark.parametrize("kind", NETS)
def test_less_memory_the_same_weights(kind, how):
    agree(kind, FRUGAL[how])


@pytest.mark.cover(1)
@pytest.mark.parametrize("kind", ["mlp", "conv2d", "conv1d", "residual", "both ways"])
@pytest.mark.parametrize("name", LOCAL)
def test_less_memory_the_same_weights_for_every_rule(name, kind):
    together = kind in ("conv1d", "residual")
    order = tpsgd.simultaneous if together else tpsgd.sequential
    agree(kind, ALL, rule=LOCAL[name](), order=order)


@pytest.mark.parametrize("kind", ["mlp", "conv2d", "residual", "recurrent"])
@pytest.mark.parametrize("name", LOCKED)
def test_less_memory_the_same_weights_for_rules_that_wait_for_the_output(name, kind):
    agree(kind, ALL, rule=LOCKED[name](), order=tpsgd.simultaneous)


@pytest.mark.cover(1)
@pytest.mark.parametrize("at", [tpsgd.Place.BEFORE, tpsgd.Place.END])
@pytest.mark.parametrize("name", DRAWN)
def test_less_memory_the_same_weights_at_every_place(name, at):
    agree("conv2d", ALL, rule=DRAWN[name](at=at), order=tpsgd.simultaneous)


OPTIMIZERS = {
    "adam": tpsgd.engine.learners.optimizers.adam,
    "torch's adam": partial(torch.optim.Adam, weight_decay=0.1),
    "sgd": tpsgd.sgd,
    "momentum": momentum,
    "rmsprop": torch.optim.RMSprop,
    "two rates": tpsgd.two_rates(x=0.5, h=0.05),
}


@pytest.mark.cover(1)
@pytest.mark.parametrize("kind", ["mlp", "conv2d", "recurrent"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_less_memory_the_same_weights_for_every_optimizer(name, kind):
    settings = {"optimizer": OPTIMIZERS[name]}
    agree(kind, {"slices": 2}, rule=rules.tpsgd_l2(), **settings)
    agree(kind, ALL, order=tpsgd.simultaneous, **settings)


class Sorted(torch.optim.SGD):
    """An optimizer of the user's own, whose step depends on the whole tensor."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad = p.grad / (1 + p.grad.norm())
        return super().step(closure)


@pytest.mark.parametrize(
    "optimizer",
    [partial(torch.optim.Adafactor, lr=0.02), partial(Sorted, lr=0.1)],
    ids=["adafactor", "own"],
)
@pytest.mark.parametrize("frugal", [{"slices": 4}, ALL], ids=["slices", "all"])
def test_an_optimizer_that_sees_a_tensor_as_a_whole_is_not_given_slices(optimizer, frugal):
    agree("mlp", frugal, optimizer=optimizer, rule=rules.tpsgd_l2())


def test_slices_are_what_an_optimizer_gets(monkeypatch):
    """Otherwise nothing above has tested them."""
    seen = []

    def step(self, apply=OptimizerSteps.step_optimizer):
        seen.append([p.grad is not None for p in self.moving.values()])
        return apply(self)

    monkeypatch.setattr(OptimizerSteps, "step_optimizer", step)
    trained("mlp", slices=3, epochs=1, batch_size=30)
    sizes = [len(one) for one in seen]  # a bias, 3 slices, and in two blocks codes; 3 steps each
    assert sizes == [5] * 6 + [4] * 3
    assert all(sum(one) <= 3 for one in seen)  # one slice at a time, the others with the first
    assert [sum(one) for one in seen].count(1) == 6


def test_a_step_is_taken_once_a_batch(monkeypatch):
    steps = []

    def step(self, apply=OptimizerSteps.step_optimizer):
        steps.append(1)
        return apply(self)

    monkeypatch.setattr(OptimizerSteps, "step_optimizer", step)
    trained("mlp", micro_batch=2, epochs=1)
    assert len(steps) == 3 * 3  # blocks x batches


def test_redraw_stores_no_codes():
    site = Site((4,), 3, tpsgd.projections.Key(), redraw=True)
    assert isinstance(site.codes(tpsgd.projections.normal()), Redrawn)
    assert isinstance(site.codes(tpsgd.projections.orthogonal()), torch.Tensor)


@pytest.mark.parametrize("shape", [(7,), (3, 4, 2)])
@pytest.mark.parametrize("make", ["normal", "uniform", "binary", "per_filter"])
def test_redrawn_codes_are_the_stored_ones(make, shape):
    projection, key = getattr(tpsgd.projections, make)(0.7), tpsgd.projections.Key(5, 2)
    P = projection(shape, 4, key).double()
    drawn = Redrawn(projection, shape, 4, key, "cpu", torch.float64)
    labels = torch.tensor([3, 0, 0, 2, 1, 3])
    assert torch.equal(drawn.aim(labels), P[labels])
    assert torch.equal(drawn.laid_out().aim(labels), P[labels])
    soft = torch.rand(6, 4, dtype=torch.float64)
    expected = (soft @ P.flatten(1)).view(-1, *shape)
    torch.testing.assert_close(drawn.aim(soft), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close((drawn / 3.0).aim(soft), expected / 3, rtol=1e-12, atol=1e-12)
    assert torch.equal(drawn.whole(), P)


@pytest.mark.parametrize("make", ["uniform", "binary", "orthogonal", "per_filter"])
def test_less_memory_the_same_weights_for_every_projection(make):
    projection = getattr(tpsgd.projections, make)()
    agree("conv2d", ALL, rule=rules.tpsgd_l2(projection=projection))


def answers(n):
    """Several yes-or-no labels for each of n samples."""
    return (torch.arange(n)[:, None] >> torch.arange(3) & 1).double()


def soft(n):
    return torch.softmax(points(n, 3, seed=4)[0].double(), 1)


LABELS = {"bce": (answers, tpsgd.bce), "soft": (soft, tpsgd.cross_entropy)}


@pytest.mark.cover(1)
@pytest.mark.parametrize("labels", LABELS)
@pytest.mark.parametrize("name", DRAWN)
def test_less_memory_the_same_weights_for_rows_of_labels(name, labels):
    kind = "recurrent" if name in ("readout", "tpsgd_l1") else "conv2d"
    make, loss = LABELS[labels]
    x, y = given_to(kind)
    settings = {"data": (x, make(len(y))), "loss": loss, "order": tpsgd.simultaneous}
    agree(kind, ALL, rule=DRAWN[name](), **settings)


@pytest.mark.parametrize("kind", ["mlp", "conv2d", "recurrent", "residual"])
def test_less_memory_the_same_weights_with_a_solved_head(kind):
    blocks = len(tpsgd.split(net(kind)))
    optimizer = [torch.optim.Adam] * (blocks - 1) + [tpsgd.ridge()]
    agree(kind, ALL, optimizer=optimizer, rtol=1e-8)


@pytest.mark.parametrize("order", [tpsgd.sequential, tpsgd.simultaneous])
@pytest.mark.parametrize("kind", ["mlp", "conv2d", "recurrent"])
def test_less_memory_the_same_weights_with_a_head_that_learns_from_a_stream(kind, order):
    """Its loss is that of samples it has not learned from yet, which depends on the pieces."""
    frozen = {"rule": rules.frozen(), "order": order, "optimizer": tpsgd.rls()}
    agree(kind, {"micro_batch": 4}, rtol=1e-7, history=False, **frozen)


def test_less_memory_the_same_weights_with_all_blocks_solved():
    before = rules.tpsgd_l2(at=tpsgd.Place.BEFORE)
    agree("mlp", ALL, rule=before, optimizer=tpsgd.ridge(0.1), rtol=1e-8)


@pytest.mark.parametrize("order", [tpsgd.sequential, tpsgd.simultaneous])
@pytest.mark.parametrize("kind", ["mlp", "conv2d", "recurrent"])
def test_less_memory_the_same_weights_from_a_loader_whose_batches_are_cut(kind, order):
    def loader():
        return DataLoader(TensorDataset(*given_to(kind)), batch_size=7)

    expected, plain = trained(kind, data=loader(), order=order)
    found, run = trained(kind, data=loader(), order=order, **ALL)
    close(found, expected)
    assert run.loss == pytest.approx(plain.loss, rel=2e-6)


def test_less_memory_the_same_weights_from_a_dataset():
    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return 30

        def __getitem__(self, i):
            x, y = given_to("mlp")
            return x[i], y[i]

    agree("mlp", ALL, data=Rows())


@pytest.mark.parametrize("reuse", [True, False])
@pytest.mark.parametrize("kind", ["mlp", "conv2d", "two recurrent"])
def test_less_memory_the_same_weights_however_inputs_are_kept(kind, reuse):
    agree(kind, ALL, reuse=reuse)


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("kind", ["two recurrent", "both ways", "tokens"])
def test_less_memory_the_same_weights_with_a_window(kind, window):
    agree(kind, {"micro_batch": 4}, window=window, reuse=False)


def test_validation_is_the_same_with_less_memory():
    data = points(17, seed=5)
    held_out = data[0].double(), data[1]
    _, plain = trained("mlp", validation=held_out)
    _, run = trained("mlp", validation=held_out, **ALL)
    for a, b in zip(run.history, plain.history, strict=True):
        assert a.val_accuracy == b.val_accuracy
        assert a.val_loss == pytest.approx(b.val_loss, rel=2e-6)


def test_parameters_that_may_not_learn_stay():
    def frozen_weight(**settings):
        model = net("mlp")
        model[0].weight.requires_grad_(False)
        tpsgd.fit(model, given_to("mlp"), **folded(**(PLAIN | settings)))
        return model

    expected, found = frozen_weight(), frozen_weight(**ALL)
    close(state(found), state(expected))
    assert torch.equal(found[0].weight, net("mlp")[0].weight)
    assert not torch.equal(found[0].bias, net("mlp")[0].bias)
    assert [p.requires_grad for p in found.parameters()] == [False] + [True] * 5


@pytest.mark.parametrize("frugal", [{"micro_batch": 4}, {"slices": 3}, ALL])
def test_nothing_is_left_on_the_model(frugal):
    model = net("conv2d")
    kept = copy.deepcopy(model.state_dict()).keys()
    tpsgd.fit(model, given_to("conv2d"), **PLAIN, **folded(**frugal))
    assert all(p.grad is None and p.requires_grad and p.is_leaf for p in model.parameters())
    assert model.state_dict().keys() == kept


# ---- what pieces are -----------------------------------------------------------------------------


@settings(max_examples=40)
@given(st.integers(1, 300), st.one_of(st.none(), st.integers(1, 400)), st.booleans())
def test_a_batch_is_cut_into_pieces_of_about_one_size(size, micro_batch, batch_norm):
    form = BatchForm(
        torch.device("cpu"),
        torch.float32,
        128,
        (0,),
        batch_norm=batch_norm,
        micro_batch=micro_batch,
    )
    parts = form.cut(size)
    assert [i for part in parts for i in range(part.start, part.stop)] == list(range(size))
    sizes = [part.stop - part.start for part in parts]
    assert max(sizes) - min(sizes) <= 1
    if not batch_norm:
        assert max(sizes) <= (micro_batch or size)
        assert len(parts) == (-(-size // micro_batch) if micro_batch else 1)
    elif size > 1:
        assert min(sizes) > 1 and max(sizes) <= max(3, micro_batch or size)


@settings(max_examples=40)
@given(st.integers(1, 60), st.integers(1, 80))
def test_slices_cover_every_row_once(rows, slices):
    parts = list(sliced("w", rows, slices))
    if len(parts) == 1:
        assert parts == [("w", None)] and 1 in (rows, slices)
        return
    assert [i for _, part in parts for i in range(part.start, part.stop)] == list(range(rows))
    assert len(parts) == min(rows, slices) == len({name for name, _ in parts})


@pytest.mark.parametrize("micro_batch", [1, 2, 3])
@pytest.mark.parametrize("n", [21, 22, 23])  # batches of 11 and 10; 11 and 11; 11, 11 and 1
def test_batch_norm_never_sees_one_sample(n, micro_batch):
    probe = Probe(lambda x: (x.shape[0], probe.training))
    model = seeded(
        lambda: nn.Sequential(
            nn.Linear(6, 8), probe, nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)
        ).double()
    )
    x, y = points(n)
    settings = {"batch_size": 11, "epochs": 1, "order": tpsgd.simultaneous}
    rule, memory = rules.readout(scale=4.0), Memory(micro_batch=micro_batch)
    tpsgd.fit(model, (x.double(), y), rule=rule, memory=memory, **settings)
    learned = [size for size, training in probe.seen if training]
    assert sum(learned) == n - (n == 23) and min(learned) >= 2 and max(learned) <= 3


@pytest.mark.parametrize("kind", ["closed", "pooled"])
def test_slices_are_the_same_with_batch_norm(kind):
    pool = [nn.MaxPool2d(2)] if kind == "pooled" else []

    def make():
        return nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), *pool, nn.Flatten(), nn.LazyLinear(3)
        ).double()

    def weights(**settings):
        model = seeded(make)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model(torch.zeros(2, 2, 6, 6).double())
        x, y = images(30)
        tpsgd.fit(model, (x.double(), y), optimizer=tpsgd.sgd, **PLAIN, **folded(**settings))
        return state(model)

    close(weights(slices=3, redraw=True), weights())  # Adam would blow up the bias's rounding


# ---- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("streamed", [False, True])
def test_sequences_of_different_lengths_are_not_cut(streamed):
    x, y = sequences(12)
    data = ragged(x), y
    if streamed:
        data = DataLoader(
            list(zip([s[: n + 1] for n, s in enumerate(x.split(1))], y, strict=True)),
            batch_size=6,
            collate_fn=lambda rows: (ragged(x[: len(rows)]), torch.stack([r[1] for r in rows])),
        )
    before = state(model := net("recurrent"))
    with pytest.raises(TpsgdError, match=r"lengths cannot be cut.*batch_size") as caught:
        tpsgd.fit(model, data, memory=Memory(micro_batch=4))
    assert "\n" not in str(caught.value)
    assert same(state(model), before)


@pytest.mark.parametrize("name", ["micro_batch", "slices"])
@pytest.mark.parametrize("value", [0, -3, 2.5, "4"])
def test_pieces_are_whole_numbers(name, value):
    with pytest.raises(TpsgdError, match=f"{name} must be a whole number"):
        trained("mlp", **{name: value})
