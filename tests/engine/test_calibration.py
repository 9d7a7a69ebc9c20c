"""The calibration of `readout`: a number per block, from its first batch before it learns."""

import copy

import pytest
import torch
from helpers import points, seeded, sequences, state
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tpsgd
from tpsgd import Memory, Recurrent, rules
from tpsgd.maths.random import Key, permutation
from tpsgd.nets.modes import statistics_restored
from tpsgd.rules import SCALE

pytestmark = pytest.mark.usefixtures("unwatched")

ORDERS = [tpsgd.sequential, tpsgd.simultaneous]
RULES = {"fixed": rules.readout(), "learned": rules.readout(learned=True)}


def mlp():
    return seeded(
        lambda: nn.Sequential(
            nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)
        ).double()
    )


def cnn():
    return seeded(
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(4, 40, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(40 * 9, 3),
        ).double()
    )  # fmt: skip


def both_ways():
    return seeded(
        lambda: nn.Sequential(
            Recurrent(4, 6, bidirectional=True, sequence=True),
            Recurrent(12, 5, bidirectional=True),
            nn.Linear(10, 3),
        ).double()
    )


def data(n=40):
    x, y = points(n)
    return x.double(), y


def pictures(n=40):
    x = torch.randn(n, 2, 6, 6, generator=torch.Generator().manual_seed(0)).double()
    return x, torch.arange(n) % 3


def series():
    x, y = sequences()
    return x.double(), y


def scales(run):
    return [block.scale for block in run.blocks]


def first_batch(x, size, block=0):
    order = torch.cat(list(permutation(len(x), Key(0, block, 0))))
    return x[order[:size]]


def rms(f):
    return float(f.square().mean().sqrt())


def expected(features, units):
    """What the features are multiplied by."""
    return SCALE / units**0.5 / rms(features)


@pytest.mark.parametrize("rule", RULES)
def test_features_of_the_first_batch_have_the_size_of_the_scale(rule):
    x, y = data()
    model = mlp()
    with torch.no_grad():
        hidden = model[:2](first_batch(x, 16))
        numbers = [expected(hidden, 8), expected(model[2:4](hidden), 8)]
    run = tpsgd.fit(
        model, (x, y), rule=RULES[rule], order=tpsgd.simultaneous, epochs=1, batch_size=16
    )
    assert scales(run)[:2] == pytest.approx(numbers, rel=1e-9) and run.blocks[2].scale is None


def test_block_by_block_a_block_is_measured_when_its_turn_comes():
    x, y = data()
    model = mlp()
    kept = []

    def look(record):
        kept.append(state(model))

    run = tpsgd.fit(
        model, (x, y), order=tpsgd.sequential, epochs=1, batch_size=16, callbacks=[look]
    )
    before = mlp()
    before.load_state_dict(kept[0])  # the first block has learned, the second has not
    with torch.no_grad():
        features = before[:4](first_batch(x, 16, block=1))
    assert run.blocks[1].scale == pytest.approx(expected(features, 8), rel=1e-9)


def test_a_block_that_learns_twice_is_measured_twice():
    x, y = data()
    model, kept, found = mlp(), [], []

    def twice(net):
        for _ in range(2):
            kept.append(state(model))
            tpsgd.train.train(net, net.learners[:1], net.source)
            found.append(net.learners[0].scale(0))

    tpsgd.fit(model, (x, y), order=twice, epochs=2, batch_size=16, lr=0.1)
    for before, scale in zip(kept, found, strict=True):
        model.load_state_dict(before)
        with torch.no_grad():
            features = model[:2](first_batch(x, 16))
        assert scale == pytest.approx(expected(features, 8), rel=1e-9)
    assert found[0] != pytest.approx(found[1], rel=0.01)


def test_feature_maps_are_averaged_over_cells_first():
    x, y = pictures()
    model = cnn()
    with torch.no_grad():
        maps = model[:3](first_batch(x, 20))
        cells = nn.functional.adaptive_avg_pool2d(maps, 3)
    rule = rules.readout(features=4 * 3 * 3)
    run = tpsgd.fit(model, (x, y), rule=rule, order=tpsgd.simultaneous, epochs=1, batch_size=20)
    assert run.blocks[0].scale == pytest.approx(expected(cells, 4), rel=1e-9)
    assert rms(cells) != pytest.approx(rms(maps), rel=0.05)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("net", "make"), [(mlp, data), (cnn, pictures), (both_ways, series)])
def test_the_recorded_number_by_hand_is_the_same_training(net, make, rule, order):
    """So the number is constant, and the pass that measures it leaves no trace."""
    samples = make()
    settings = {"order": order, "epochs": 2, "batch_size": 16}
    calibrated, by_hand = net(), net()
    run = tpsgd.fit(calibrated, samples, rule=RULES[rule], **settings)
    each = [rules.readout(rule == "learned", scale=block.scale) for block in run.blocks]
    tpsgd.fit(by_hand, samples, rule=each, **settings)
    for name, value in state(calibrated).items():
        torch.testing.assert_close(state(by_hand)[name], value, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("rule", RULES)
def test_micro_batches_measure_the_whole_batch(rule, order):
    runs = [
        tpsgd.fit(
            mlp(), data(), rule=RULES[rule], order=order, epochs=2, batch_size=16,
            memory=Memory(micro_batch=size, slices=1),
        )
        for size in (None, 5, 16)
    ]  # fmt: skip
    for run in runs[1:]:
        assert scales(run)[:2] == pytest.approx(scales(runs[0])[:2], rel=1e-6)


@pytest.mark.parametrize("rule", RULES)
def test_stacked_restarts_have_a_number_each(rule):
    settings = {"restarts": 3, "rule": RULES[rule], "epochs": 1, "batch_size": 16}
    one, all_together = (
        tpsgd.fit_many(
            lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double(),
            data(), stacked=stacked, **settings,
        )
        for stacked in (False, True)
    )  # fmt: skip
    numbers = [scales(run)[0] for run in one.runs]
    assert len(set(numbers)) == 3
    assert [scales(run)[0] for run in all_together.runs] == pytest.approx(numbers, rel=1e-9)
    for a, b in zip(one.models, all_together.models, strict=True):
        torch.testing.assert_close(state(a)["0.weight"], state(b)["0.weight"])


@pytest.mark.parametrize("both_ways", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_recurrent_states_of_all_steps_and_directions_count(rule, both_ways):
    x, y = sequences()
    x = x.double()
    model = seeded(
        lambda: nn.Sequential(
            Recurrent(4, 6, bidirectional=both_ways, sequence=True),
            Recurrent(6 * (1 + both_ways), 5),
            nn.Linear(5, 3),
        ).double()
    )
    with torch.no_grad():
        states = model[0](first_batch(x, 16))
    settings = {"epochs": 1, "batch_size": 16, "order": tpsgd.simultaneous}
    run = tpsgd.fit(model, (x, y), rule=RULES[rule], **settings)
    assert run.blocks[0].scale == pytest.approx(expected(states, 6), rel=1e-9)


def test_a_loader_is_measured_too_and_gives_all_its_batches():
    x, y = data()
    loader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)
    run = tpsgd.fit(mlp(), loader, epochs=1)
    assert run.blocks[0].scale is not None and run.sample_passes == 3 * len(x)


def test_dead_features_are_not_divided_by_zero():
    model = mlp()
    with torch.no_grad():
        for p in model[:3].parameters():
            p.zero_()
    run = tpsgd.fit(model, data(), epochs=1)
    assert run.blocks[0].scale == SCALE / 8**0.5


@pytest.mark.parametrize("rule", [rules.readout(scale=3.0), rules.tpsgd_l2(), rules.predsim()])
def test_other_rules_and_a_scale_by_hand_are_not_calibrated(rule):
    assert scales(tpsgd.fit(mlp(), data(), rule=rule, epochs=1)) == [None] * 3


def test_a_calibrated_scale_may_be_chosen():
    runs = [
        tpsgd.fit(mlp(), data(), rule=rule, epochs=1)
        for rule in (rules.readout(), rules.readout(scale=3 * SCALE, calibrate=True))
    ]
    assert scales(runs[1])[0] == pytest.approx(3 * scales(runs[0])[0])


@pytest.mark.parametrize("learned", [False, True])
def test_a_projection_that_keeps_its_codes_keeps_their_values(learned):
    codes = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    before = codes.clone()
    own = tpsgd.projections.Projection("mine", lambda key, rows, shape, device: codes)
    rule = [rules.readout(learned, projection=own)] * 3
    tpsgd.fit(mlp().float(), points(40), rule=rule, epochs=1)
    assert torch.equal(codes, before)


def test_the_outputs_of_every_step_are_measured_whatever_the_window():
    x, y = torch.randn(24, 19, 4, generator=torch.Generator().manual_seed(0)), torch.arange(24) % 3

    def measured(window):
        layers = Recurrent.diagonal(4, 5, loss_at="every", sequence=True), Recurrent(5, 6)
        model = seeded(lambda: nn.Sequential(*layers, nn.Linear(6, 3)).double())
        settings = {"epochs": 1, "batch_size": 8, "order": tpsgd.simultaneous}
        return scales(tpsgd.fit(model, (x.double(), y), window=window, **settings))[:2]

    torch.manual_seed(0)
    state_of = torch.get_rng_state()
    numbers = []
    for window in (None, 5, 1):
        torch.set_rng_state(state_of)
        numbers.append(measured(window))
    assert numbers[1] == pytest.approx(numbers[0]) and numbers[2] == pytest.approx(numbers[0])


class Counting(nn.Module):
    """Replaces its buffer in every forward pass, or raises."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.weight = nn.Parameter(torch.ones(6).double())

    def forward(self, x):
        self.count = self.count + 1.0
        if self.count > 100:
            raise ValueError("too often")
        return x * self.weight


def test_a_buffer_that_a_module_replaces_gets_its_value_back():
    model = nn.Sequential(Counting(), nn.Tanh(), *mlp())
    calibrated, by_hand = copy.deepcopy(model), copy.deepcopy(model)
    settings = {"order": tpsgd.simultaneous, "epochs": 1, "batch_size": 20}
    tpsgd.fit(calibrated, data(), **settings)
    tpsgd.fit(by_hand, data(), rule=rules.readout(scale=1.0), **settings)
    assert calibrated[0].count == by_hand[0].count > 0


def test_buffers_get_their_values_back_after_an_error():
    model = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 6))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="stop"), statistics_restored(model):
        model(torch.randn(4, 6))
        raise ValueError("stop")
    assert all(torch.equal(model.state_dict()[k], v) for k, v in before.items())
