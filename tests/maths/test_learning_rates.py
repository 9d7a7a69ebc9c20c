"""Learning rates that change with every batch: against torch's schedulers, stepped by hand."""

import math
from functools import partial

import pytest
import torch
from helpers import distance, images, mlp, points, same, seeded, state
from slow_path import slow_fit
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR, StepLR
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, IterableDataset

import tpsgd
from tpsgd import EarlyStopping, Memory, TpsgdError, one_cycle, ridge, rls, rules
from tpsgd.maths.learning_rates import BatchRates, RateCurve
from tpsgd.maths.random import Key, permutation
from tpsgd_adapt import Backbone

ORDERS = {"sequential": tpsgd.sequential, "simultaneous": tpsgd.simultaneous}
OPTIMIZERS = {
    "adam": partial(torch.optim.Adam, lr=0.02),
    "adamw": partial(torch.optim.AdamW, lr=0.02, weight_decay=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.01),
    "rate in a tensor": lambda params: torch.optim.Adam(
        params, lr=torch.tensor(0.02, dtype=torch.float64), foreach=False, capturable=False
    ),
}


def by_hand(step: int, steps: int, warm_up: float = 0.2) -> float:
    """The curve as one would draw it: a line up to the step `warm`, then half a cosine."""
    warm = math.floor(warm_up * steps)
    if step < warm:
        return (step + 1) / (warm + 1)
    return 0.5 + 0.5 * math.cos(math.pi * (step - warm) / (steps - warm))


def stepped(factory, steps):
    """A factory of optimizers whose rate follows torch's scheduler, stepped after every step."""

    def make(params):
        optimizer = factory(params)
        scheduler = LambdaLR(optimizer, lambda step: by_hand(step, steps))
        optimizer.register_step_post_hook(lambda *_: scheduler.step())
        return optimizer

    return make


class Noting(torch.optim.SGD):
    """SGD that writes down the rate of every step, one list an optimizer."""

    made: list[list[float]]

    def __init__(self, params, lr=0.5):
        super().__init__(params, lr)
        self.rates: list[float] = []
        type(self).made.append(self.rates)

    def step(self, closure=None):
        self.rates.append(float(self.param_groups[0]["lr"]))
        return super().step(closure)


@pytest.fixture
def noting():
    """A kind of optimizer that writes its rates down, and the lists that it has written."""
    return type("Noting", (Noting,), {"made": []})


def rates(steps, taken=None, lr=0.5):
    return pytest.approx([lr * by_hand(step, steps) for step in range(taken or steps)])


# ---- the curve -----------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 2, 7, 100])
@pytest.mark.parametrize("warm_up", [0, 0.2, 0.5, 0.99])
def test_the_rate_rises_in_a_line_and_falls_to_0(warm_up, steps):
    factors = [one_cycle(warm_up).factor(step, steps) for step in range(steps)]
    assert factors == pytest.approx([by_hand(step, steps, warm_up) for step in range(steps)])
    assert max(factors) == 1.0 and min(factors) > 0
    peak = factors.index(1.0)
    assert peak == int(warm_up * steps)
    assert factors[:peak] == sorted(factors[:peak])
    assert factors[peak:] == sorted(factors[peak:], reverse=True)


@pytest.mark.parametrize("warm_up", [-0.1, 1, math.nan, "0.2"])
def test_a_warm_up_is_a_share(warm_up):
    with pytest.raises(TpsgdError, match="warm_up must be a share"):
        one_cycle(warm_up)


def test_a_curve_is_read_by_its_name():
    assert str(one_cycle()) == repr(one_cycle()) == "one_cycle(0.2)"


# ---- the weights of a loop with torch's schedulers -----------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fit_has_the_weights_of_schedulers_stepped_by_hand(name, order, tapes):
    (x, y), fast, slow = points(50), mlp(6, 8, 8, 3).double(), mlp(6, 8, 8, 3).double()
    settings = {"epochs": 5, "batch_size": 8}  # seven batches an epoch, the last of two samples
    data, factory = (x.double(), y), OPTIMIZERS[name]
    tpsgd.fit(
        fast, data, order=ORDERS[order], optimizer=factory, lr_schedule=one_cycle(),
        **settings,
    )  # fmt: skip
    slow_fit(slow, data, rules.default(), ORDERS[order], optimizer=stepped(factory, 35), **settings)
    assert distance(fast, slow) < 1e-9
    if name in ("rmsprop", "rate in a tensor"):  # their rates are no argument of a kernel
        assert not tapes
    else:  # recorded once, whatever the rate; two steps to warm up, two to record
        assert len(tapes) == (3 if order == "sequential" else 1)
        assert all(tape.count == 30 - 4 for tape in tapes)


@pytest.mark.parametrize("lr_schedule", [one_cycle(), partial(StepLR, step_size=1, gamma=0.5)])
def test_a_tape_follows_the_rates_of_blocks_that_go_on_after_others(lr_schedule, tapes):
    """Against an optimizer of the user's own, whose steps are never recorded."""
    own, (x, y), models = type("Own", (torch.optim.Adam,), {}), points(200), []
    for kind in (torch.optim.Adam, own):
        model = mlp(6, 8, 8, 3).double()
        tpsgd.fit(
            model, (x.double(), y), optimizer=partial(kind, lr=0.02), epochs=[2, 6, 4],
            batch_size=8, order=tpsgd.simultaneous, lr_schedule=lr_schedule,
        )  # fmt: skip
        models.append(model)
    assert len(tapes) == 3 and all(tape.count > 30 for tape in tapes)
    assert distance(*models) < 1e-9


def test_backprop_has_the_weights_of_a_plain_torch_loop():
    (x, y), model, plain = points(50), mlp(6, 8, 3), mlp(6, 8, 3)
    tpsgd.fit_backprop(model, (x, y), epochs=3, batch_size=8, lr=0.02, lr_schedule=one_cycle())
    optimizer = stepped(partial(torch.optim.Adam, lr=0.02), 21)(list(plain.parameters()))
    for epoch in range(3):
        for index in torch.cat(list(permutation(50, Key(0, 0, epoch)))).split(8):
            optimizer.zero_grad()
            F.cross_entropy(plain(x[index]), y[index]).backward()
            optimizer.step()
    assert distance(model, plain) < 1e-6


# ---- the rates one by one ------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
def test_each_block_has_the_whole_curve_of_its_epochs_and_its_rate(order, noting):
    tpsgd.fit(
        mlp(6, 8, 8, 3), points(48), optimizer=noting, lr=[0.5, 0.25, 0.125], epochs=[2, 4, 3],
        batch_size=16, order=ORDERS[order], lr_schedule=one_cycle(),
    )  # fmt: skip
    blocks = [r for r in noting.made if r]  # `fit` makes each optimizer once more, to check it
    assert blocks == [rates(6), rates(12, lr=0.25), rates(9, lr=0.125)]


def test_micro_batches_share_the_rate_of_their_batch(noting):
    settings = {"optimizer": noting, "epochs": 2, "batch_size": 16, "lr_schedule": one_cycle()}
    whole, parts = mlp(6, 8, 3), mlp(6, 8, 3)
    tpsgd.fit(whole, points(48), **settings)
    tpsgd.fit(parts, points(48), memory=Memory(micro_batch=5), **settings)
    assert [r for r in noting.made if r] == [rates(6)] * 4
    assert distance(whole, parts) < 1e-6


def test_a_block_that_stops_early_has_the_beginning_of_the_curve(noting):
    tpsgd.fit(
        mlp(6, 8, 3), points(48), optimizer=noting, epochs=5, batch_size=16,
        early_stopping=EarlyStopping(patience=2, min_delta=100.0), lr_schedule=one_cycle(),
        order=tpsgd.simultaneous,
    )  # fmt: skip
    assert [r for r in noting.made if r] == [rates(15, taken=9)] * 2


def test_the_curve_goes_on_when_the_net_s_output_is_no_longer_waited_for(noting):
    """DFA's hidden block stops first: from then on another kind of step is taken."""
    tpsgd.fit(
        mlp(6, 8, 3), points(48), rule=rules.dfa(), optimizer=noting, epochs=[2, 4],
        batch_size=16, lr_schedule=one_cycle(),
    )  # fmt: skip
    assert [r for r in noting.made if r] == [rates(6), rates(12)]


def test_batch_norm_s_batch_of_one_sample_is_no_step(noting):
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    settings = {"optimizer": noting, "epochs": 2, "batch_size": 16, "lr_schedule": one_cycle()}
    tpsgd.fit(model, points(49), order=tpsgd.simultaneous, **settings)
    assert [r for r in noting.made if r] == [rates(6)] * 2


@pytest.mark.parametrize("solver", [ridge, rls])
def test_a_solver_has_no_rate(solver, noting):
    tpsgd.fit(
        mlp(6, 8, 3), points(48), optimizer=[noting, solver()], epochs=2, batch_size=16,
        lr_schedule=one_cycle(),
    )  # fmt: skip
    assert [r for r in noting.made if r] == [rates(6)]


def test_a_curve_of_the_user_s(noting):
    curve = RateCurve("line", lambda step, steps: 1 - step / steps)
    settings = {"optimizer": noting, "epochs": 2, "batch_size": 16}
    run = tpsgd.fit_backprop(mlp(6, 3), points(48), lr_schedule=curve, **settings)
    assert [r for r in noting.made if r] == [pytest.approx([0.5 * (1 - i / 6) for i in range(6)])]
    assert run.settings["lr_schedule"] == "line"


# ---- data of every kind --------------------------------------------------------------------------


class Endless(IterableDataset):
    """Samples without a length."""

    def __iter__(self):
        return zip(*points(48), strict=True)


class Counted(Endless):
    """The same with a length."""

    def __len__(self):
        return 48


SOURCES = {
    "loader": lambda: DataLoader(list(zip(*points(48), strict=True)), 16),
    "loader without its last batch": lambda: DataLoader(
        list(zip(*points(50), strict=True)), 16, drop_last=True
    ),
    "data set": lambda: Counted(),
}


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("order", ORDERS)
def test_a_stream_that_knows_its_length(order, name, noting):
    settings = {"optimizer": noting, "epochs": 2, "batch_size": 16, "lr_schedule": one_cycle()}
    tpsgd.fit(mlp(6, 8, 3), SOURCES[name](), order=ORDERS[order], **settings)
    assert [r for r in noting.made if r] == [rates(6)] * 2


def test_a_stream_without_a_length_is_refused_before_anything_learns():
    model = mlp(6, 8, 3)
    before = state(model)
    with pytest.raises(TpsgdError, match=r"one_cycle\(0.2\) needs the number of batches"):
        tpsgd.fit(model, Endless(), lr_schedule=one_cycle())
    assert same(before, state(model))


def test_more_batches_than_the_data_said_stay_at_the_last_rate(noting):
    class Wrong(Endless):
        def __len__(self):
            return 32

    settings = {"optimizer": noting, "epochs": 1, "batch_size": 16, "lr_schedule": one_cycle()}
    tpsgd.fit_backprop(mlp(6, 3), Wrong(), **settings)
    last = 0.5 * by_hand(1, 2)
    assert [r for r in noting.made if r] == [pytest.approx([0.5 * by_hand(0, 2), last, last])]


# ---- what else trains ----------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
def test_stacked_restarts_have_the_weights_of_single_ones(order):
    settings = {"epochs": 3, "batch_size": 16, "lr_schedule": one_cycle(), "lr": 0.02}
    one, other = (
        tpsgd.fit_many(
            lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)), points(48),
            restarts=2, stacked=stacked, order=ORDERS[order], **settings,
        )
        for stacked in (True, False)
    )  # fmt: skip
    assert one.stacked
    for a, b in zip(one.models, other.models, strict=True):
        assert distance(a, b) < 1e-5


def test_an_adaptor_and_a_plan_take_it(noting):
    x, y = images(48)
    encoder = Backbone(nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU()), ["1"])
    settings = {"optimizer": noting, "epochs": 2, "batch_size": 16, "lr_schedule": one_cycle()}
    tpsgd.adapt.fit(encoder, (x, y), **settings)
    blocks = [r for r in noting.made if r]
    assert blocks and all(r == rates(6) for r in blocks)
    model, chosen = mlp(6, 8, 3), {"batch_size": 16, "epochs": 2}
    with_curve = tpsgd.plan(model, (6,), samples=48, lr_schedule=one_cycle(), **chosen)
    assert str(with_curve) == str(tpsgd.plan(model, (6,), samples=48, **chosen))


# ---- rates in tensors, as on a GPU ---------------------------------------------------------------


class Operators(TorchDispatchMode):
    """Notes the names of operators."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **kwargs or {})


def test_rates_in_tensors_keep_their_memory_and_are_set_together():
    """CUDA graphs read them from where they were captured; one kernel sets all of a length."""
    params = [nn.Parameter(torch.zeros(1)) for _ in range(3)]
    optimizers = [
        torch.optim.Adam([p], lr=torch.tensor(lr), capturable=True, foreach=False)
        for p, lr in zip(params, (0.1, 0.2, 0.3), strict=True)
    ]
    joint = BatchRates(one_cycle(), optimizers, [10, 10, 5])
    assert len(joint.tensors) == 2 and not joint.numbers
    tensors = [o.param_groups[0]["lr"] for o in optimizers]
    for step in range(12):
        with Operators() as operators:
            joint.advance()
        assert operators.names == ["aten.mul.out"] * 2  # nothing is read from the device
        now = [o.param_groups[0]["lr"] for o in optimizers]
        assert all(a is b and a.dim() == 0 for a, b in zip(now, tensors, strict=True))
        for rate, lr, steps in zip(now, (0.1, 0.2, 0.3), (10, 10, 5), strict=True):
            assert float(rate) == pytest.approx(lr * by_hand(min(step, steps - 1), steps))


def test_equal_curves_of_a_net_with_convolutions_and_augmentation(tapes):
    """Whatever wraps the step, the rate is set once per batch."""
    (x, y), models = images(48), []
    for lr_schedule in (one_cycle(), RateCurve("the same", by_hand)):
        model = seeded(
            lambda: nn.Sequential(
                nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)
            )
        )  # fmt: skip
        settings = {"epochs": 3, "batch_size": 16, "augment": tpsgd.augment.flip()}
        tpsgd.fit(model, (x, y), lr_schedule=lr_schedule, **settings)
        models.append(model)
    assert distance(*models) < 1e-7
