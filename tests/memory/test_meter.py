"""Peak memory: counted byte for byte, given back, and flat in depth."""

import gc
import weakref

import pytest
import torch
from helpers import DRAWN, LOCAL, Residual, folded, images, mlp, points, seeded, sequences, tokens
from torch import nn

import tpsgd
from tpsgd import rules, split
from tpsgd.engine.device import available
from tpsgd.engine.learners.learner import BlockLearner
from tpsgd.engine.learners.updaters import OptimizerSteps
from tpsgd.engine.settings import BlockSettings
from tpsgd.memory.meter import LiveBytes, Meter, tensor_bytes
from tpsgd.nets.autograd import Autograd
from tpsgd.nets.closed_form import ClosedForm
from tpsgd.nets.unrolled import Unrolled
from tpsgd.objectives import l2
from tpsgd.train import Observer

FLOAT = 4
N, INPUTS, UNITS = 32, 20, 12


def step(in_place: bool):
    """One l2 step on a Linear block with plain SGD, and the live bytes it took at most."""
    layer = nn.Linear(INPUTS, UNITS)
    block = split(nn.Sequential(layer, nn.ReLU(), nn.Linear(UNITS, 3)))[0]
    P, x, y = torch.randn(3, UNITS), torch.randn(N, INPUTS), torch.arange(N) % 3
    learner = BlockLearner(
        block,
        ClosedForm(block, tpsgd.Place.AFTER, in_place=in_place),
        OptimizerSteps(),
        lambda: l2(P),
        BlockSettings(1, torch.optim.SGD, 0.1),
        block.named_parameters(),
    )
    learner.start()
    live = LiveBytes()
    with torch.no_grad(), live:
        learner.update(learner.forward(x), y)
    return live


def test_live_bytes_of_one_linear_step_are_those_counted_by_hand():
    """z, which becomes y, and dy, which becomes dz; the loss; then dW and db."""
    batch, weights = N * UNITS * FLOAT, (INPUTS * UNITS + UNITS) * FLOAT
    assert step(in_place=True).peak == 2 * batch + FLOAT + weights


def test_out_of_place_takes_one_more_batch_for_y_and_one_for_dz():
    """While dz is computed from y and dy; dy is free when the gradients are allocated."""
    batch = N * UNITS * FLOAT
    assert step(in_place=False).peak == 4 * batch + FLOAT


def test_nothing_is_left_after_the_step():
    live = step(in_place=True)
    gc.collect()
    assert live.live == 0


def test_live_bytes_follow_storages_not_tensors():
    live = LiveBytes()
    with live:
        a = torch.zeros(100)
        b = a.view(10, 10)[2:]
        c = a.add_(1)
        assert live.live == 400
        d = torch.ones(50, dtype=torch.float64)
        assert live.live == 800
        del a, c
        assert live.live == 800  # b still holds the first storage
        del b
        assert live.live == 400
    del d
    assert live.live == 0 and live.peak == 800


def test_what_was_there_before_is_not_counted():
    before = torch.zeros(1000)
    live = LiveBytes()
    with live:
        before.add_(1)
        before.view(10, 100)
    assert live.live == live.peak == 0


def test_what_is_freed_outside_is_noticed():
    live = LiveBytes()
    with live:
        kept = torch.zeros(10)
    del kept
    with live:
        other = torch.zeros(10)
        assert live.live == 40
    assert live.peak == 40 and other is not None


FITS = {name: (tpsgd.fit, {"rule": make()}) for name, make in LOCAL.items()} | {
    "dfa": (tpsgd.fit, {"rule": rules.dfa(), "order": tpsgd.simultaneous}),
    "backprop": (tpsgd.fit_backprop, {}),
}


@pytest.mark.parametrize("how", FITS)
def test_nothing_is_left_after_a_run(how, monkeypatch):
    meters = []

    class Kept(Meter):
        def __init__(self, device):
            super().__init__(device)
            meters.append(self)

    monkeypatch.setattr("tpsgd.features.extensions.Meter", Kept)
    fit, settings = FITS[how]
    model = seeded(lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), Residual(8), nn.Linear(8, 3)))
    run = fit(model, points(), epochs=2, batch_size=16, **settings)
    gc.collect()
    assert run.peak_bytes > tensor_bytes(model)
    assert meters[0].live.live == 0


def test_the_models_own_bytes_are_part_of_the_peak():
    model = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3))
    assert tensor_bytes(model) == FLOAT * (18 + 3 + 4 * 3) + 8
    run = tpsgd.fit(mlp(6, 3), points(), epochs=0)
    assert run.peak_bytes == tensor_bytes(mlp(6, 3))


def test_adams_state_is_part_of_the_peak():
    settings = {"epochs": 1, "batch_size": 8, "memory": "fast"}
    sgd = tpsgd.fit(mlp(40, 500, 3), points(features=40), optimizer=torch.optim.SGD, **settings)
    adam = tpsgd.fit(mlp(40, 500, 3), points(features=40), **settings)
    state_of_block_1 = 2 * (40 * 500 + 500 + 3 * 500) * FLOAT  # weights, biases, class codes
    assert adam.peak_bytes - sgd.peak_bytes == pytest.approx(state_of_block_1, rel=0.05)


def test_kept_inputs_are_those_of_two_blocks_at_most():
    """A block's inputs are released once those of the next block are there."""
    model, rows = mlp(6, 4, 9, 8, 3), 48 * FLOAT
    run = tpsgd.fit(model, points(), epochs=1, memory=tpsgd.Memory(reuse=True))
    assert run.kept_bytes == rows * max(4 + 9, 9 + 8)
    held_out = points(n=12, seed=1)
    run = tpsgd.fit(model, points(), epochs=1, memory=tpsgd.Memory(reuse=True), validation=held_out)
    rows, more = 48 * FLOAT, 12 * FLOAT  # the validation data's follow the training data's
    assert run.kept_bytes == max(rows * (9 + 8) + more * 9, rows * 8 + more * (9 + 8))


# ---- depth ---------------------------------------------------------------------------------------


def deep_mlp(blocks):
    return seeded(
        lambda: nn.Sequential(
            *[m for _ in range(blocks) for m in (nn.Linear(24, 24), nn.ReLU())], nn.Linear(24, 3)
        )
    )


def deep_cnn(blocks):
    return seeded(
        lambda: nn.Sequential(
            nn.Conv2d(2, 6, 3, padding=1),
            nn.ReLU(),
            *[m for _ in range(blocks - 1) for m in (nn.Conv2d(6, 6, 3, padding=1), nn.ReLU())],
            nn.Flatten(),
            nn.Linear(6 * 36, 3),
        )
    )


DEEP = {
    "mlp": (deep_mlp, lambda: points(n=64, features=24)),
    "cnn": (deep_cnn, lambda: images(n=64)),
}


def growth(fit, kind, **settings):
    """How much more 16 blocks hold at their peak than 2, and how much more of it is the model."""
    make, data = DEEP[kind]
    peaks = {
        n: fit(make(n), data(), epochs=1, batch_size=64, **folded(**settings)).peak_bytes
        for n in (2, 16)
    }
    return peaks[16] - peaks[2], tensor_bytes(make(16)) - tensor_bytes(make(2)), peaks[2]


@pytest.mark.cover(1)
@pytest.mark.parametrize("kind", DEEP)
@pytest.mark.parametrize("name", LOCAL)
def test_sequential_training_takes_no_more_memory_in_depth_than_the_model_itself(name, kind):
    grown, model, peak = growth(tpsgd.fit, kind, rule=LOCAL[name]())
    assert grown <= model + 0.05 * peak


def test_sequential_training_with_recomputed_inputs_takes_no_more_memory_in_depth():
    grown, model, peak = growth(tpsgd.fit, "cnn", reuse=False)
    assert grown <= model + 0.05 * peak


@pytest.mark.parametrize("kind", DEEP)
def test_backprop_takes_much_more(kind):
    grown, model, peak = growth(tpsgd.fit_backprop, kind)
    assert grown > 2 * model + peak


# ---- time ----------------------------------------------------------------------------------------

UNROLLED = {
    "one layer": ([lambda: tpsgd.Recurrent(4, 24)], 24),
    "both ways": ([lambda: tpsgd.Recurrent(4, 24, bidirectional=True)], 48),
    "two layers": (
        [lambda: tpsgd.Recurrent(4, 24, sequence=True), lambda: tpsgd.Recurrent(24, 24)],
        24,
    ),
    "nn.RNN": ([lambda: nn.RNN(4, 24, 2, batch_first=True)], 24),
    "tokens": ([lambda: tpsgd.Recurrent(7, 24)], 24),
}
IN_TIME = [  # the last: steps of the long ones
    ("one layer", "readout", tpsgd.sequential, 1, 1000),
    ("one layer", "readout", tpsgd.sequential, None, 100),
    ("one layer", "tpsgd_l1", tpsgd.sequential, 1, 100),
    ("one layer", "tpsgd_l1", tpsgd.simultaneous, None, 100),
    ("one layer", "drtp", tpsgd.simultaneous, 1, 100),
    ("one layer", "drtp", tpsgd.sequential, None, 100),
    ("both ways", "tpsgd_l1", tpsgd.sequential, 1, 100),
    ("both ways", "readout", tpsgd.simultaneous, 1, 100),
    ("both ways", "drtp", tpsgd.sequential, None, 100),
    ("two layers", "readout", tpsgd.sequential, 1, 100),
    ("two layers", "readout", tpsgd.simultaneous, 1, 1000),
    ("two layers", "tpsgd_l1", tpsgd.sequential, None, 100),
    ("two layers", "drtp", tpsgd.simultaneous, None, 100),
    ("nn.RNN", "readout", tpsgd.simultaneous, 1, 100),
]


def peak_in_time(kind, steps, fit=tpsgd.fit, data=sequences, **settings):
    """Peak bytes for two batches of sequences this long, and the bytes of one batch."""
    makes, units = UNROLLED[kind]
    model = seeded(lambda: nn.Sequential(*(make() for make in makes), nn.Linear(units, 3)))
    x, y = data(n=16, steps=steps)
    x = x.float() if x.is_floating_point() else x
    peak = fit(model, (x, y), epochs=1, batch_size=8, **folded(**settings)).peak_bytes
    return peak, x[:8].nbytes


@pytest.mark.cover(1)
@pytest.mark.parametrize(("kind", "name", "order", "window", "steps"), IN_TIME)
def test_memory_does_not_grow_with_the_length_of_sequences(kind, name, order, window, steps):
    """Two default windows and a part against many of them.

    Without `window` the batch itself is gathered, and left out here.
    """
    settings = {"rule": LOCAL[name](), "order": order, "reuse": False, "window": window}
    (short, few), (long, many) = (peak_in_time(kind, n, **settings) for n in (20, steps))
    if window is None:
        short, long = short - few, long - many
    assert abs(long - short) <= 0.03 * short


def test_memory_does_not_grow_with_the_number_of_tokens():
    short, long = (peak_in_time("tokens", n, data=tokens, window=1)[0] for n in (10, 100))
    assert abs(long - short) <= 0.03 * short


@pytest.mark.parametrize("order", [tpsgd.sequential, tpsgd.simultaneous])
@pytest.mark.parametrize("kind", ["both ways", "two layers"])
def test_a_batch_is_let_go_without_waiting_for_the_garbage_collector(kind, order, monkeypatch):
    batches = []

    def watched(self, params, x, forward=Unrolled.forward):
        saved = forward(self, params, x)
        batches.append(weakref.ref(saved))
        return saved

    monkeypatch.setattr(Unrolled, "forward", watched)
    gc.disable()
    try:
        peak_in_time(kind, 3, order=order, reuse=False)
        assert batches and not any(batch() for batch in batches)
    finally:
        gc.enable()


def test_each_step_of_a_window_takes_the_memory_of_three_states():
    """The state, the activation and the derivative; inputs and logits are small here."""
    few, many = (peak_in_time("one layer", 40, window=w)[0] for w in (4, 8))
    state = 8 * 24 * FLOAT
    assert 3 * state <= (many - few) / (8 - 4) < 4 * state


@pytest.mark.cover(1)
@pytest.mark.parametrize("order", [tpsgd.sequential, tpsgd.simultaneous])
@pytest.mark.parametrize("kind", ["one layer", "both ways", "two layers"])
def test_windows_that_are_not_followed_do_not_change_the_peak(kind, order, monkeypatch):
    """Of sequences whose last window is a shorter one, forwards and backwards."""
    settings = {"order": order, "reuse": False, "window": 4}
    some = peak_in_time(kind, 58, **settings)
    monkeypatch.setattr(Meter, "_skip", lambda self, alike: None)
    assert some == peak_in_time(kind, 58, **settings)


@pytest.mark.parametrize("window", [1, None])
def test_a_long_sequence_is_not_followed_to_its_end(window, monkeypatch):
    followed = []

    def count(self, *args, dispatch=LiveBytes.__torch_dispatch__):
        followed[-1] += 1
        return dispatch(self, *args)

    monkeypatch.setattr(LiveBytes, "__torch_dispatch__", count)
    for steps in (80, 400):
        followed.append(0)
        peak_in_time("one layer", steps, reuse=False, window=window)
    assert followed[0] == followed[1] > 100


@pytest.mark.parametrize("kind", ["one layer", "both ways", "two layers", "nn.RNN"])
def test_backprop_through_time_does_grow(kind):
    (short, few), (long, many) = (peak_in_time(kind, n, tpsgd.fit_backprop) for n in (10, 100))
    assert long - many > 2 * (short - few)


def test_nothing_is_left_of_a_run_over_time():
    live = LiveBytes()
    with live:
        for order in (tpsgd.sequential, tpsgd.simultaneous):
            peak_in_time("two layers", 5, order=order, reuse=False)
    gc.collect()
    assert live.live == 0


def test_a_projection_lives_while_its_block_learns():
    alive = []

    class Look(Observer):
        def epoch(self, end):
            alive.append([bool(x.tensors) for x in end.net.learners])
            return set()

    def order(net):
        net.observers.append(Look())
        tpsgd.sequential(net)
        alive.append([bool(x.tensors) for x in net.learners])

    tpsgd.fit(mlp(6, 8, 8, 3), points(), order=order, rule=rules.tpsgd_l2(), epochs=1)
    assert alive == [[True, False, False], [False, True, False], [False] * 3, [False] * 3]


def test_free_memory_is_a_positive_number():
    assert available(torch.device("cpu")) > 1 << 20


def test_engines_without_an_objective_have_no_codes():
    block = split(mlp(6, 8, 3))[0]
    for engine in (ClosedForm(block, tpsgd.Place.AFTER), Autograd(block, tpsgd.Place.AFTER)):
        assert engine.objective.tensors == ()


@pytest.mark.parametrize("name", DRAWN)
def test_the_peak_is_the_same_from_run_to_run(name):
    settings = {"rule": DRAWN[name](), "order": tpsgd.simultaneous, "epochs": 1}
    peaks = {tpsgd.fit(mlp(6, 8, 3), points(), **settings).peak_bytes for _ in range(3)}
    assert len(peaks) == 1


def test_evaluate_does_not_grow_with_the_length():
    peaks = []
    for steps in (10, 500):
        x, y = torch.randn(64, steps, 2), torch.arange(64) % 3
        model = nn.Sequential(tpsgd.Recurrent(2, 64), nn.Linear(64, 3))
        live = LiveBytes()
        with live:
            tpsgd.evaluate(model, (x, y))
        peaks.append(live.peak)
    assert peaks[1] < peaks[0] + 2 * x.nbytes  # the batch, and checking it
    assert 20 * x.nbytes < 64 * 500 * 64 * 4  # which is far less than all states
