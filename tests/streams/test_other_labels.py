"""Streams of numbers, of labels for every step, and of models of a class."""

import copy

import pytest
import torch
from streams.nets import same, weights
from torch import nn

import tpsgd
from tpsgd import Rehearsal, Stream, TpsgdError, ridge, rules
from tpsgd.common.files import call_function
from tpsgd.engine.sources.inputs import inputs
from tpsgd_streams.other_labels import LabelStatistics

X = torch.randn(160, 6, generator=torch.Generator().manual_seed(0))
NUMBERS = 500 + 40 * X[:, 0] - 20 * X[:, 1]
STEPS = X.view(32, 5, 6)
TAGS = (STEPS[..., 0] > 0).long()
TAGS[:, 4] = -100
CLASS = """
import torch
from torch import nn


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(6, 9), nn.Linear(9 + 2, 2)

    def forward(self, points, marks):
        return self.head(torch.cat([torch.relu(self.first(points)), marks], 1))
"""
LAST = """
from torch import nn


class Turned(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(6, 9), nn.Linear(9, 2)

    def forward(self, x):
        return self.head(self.first(x).relu()).transpose(1, 2)  # (batch, classes, steps)
"""


def net(outputs: int = 1, width: int = 16) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, outputs))


def learn(stream: Stream, x, y, size: int = 8, epochs: int = 1) -> Stream:
    for _ in range(epochs):
        for i in range(0, len(y), size):
            each = tuple(t[i : i + size] for t in x) if isinstance(x, tuple) else x[i : i + size]
            stream.partial_fit(each, y[i : i + size])
    return stream


@pytest.mark.parametrize("size", [1, 8])
def test_numbers_are_learned_in_their_units(size):
    stream = learn(Stream(net(), lr=0.01), X, NUMBERS, size, epochs=6)
    assert stream.evaluate((X, NUMBERS)) == tpsgd.evaluate(stream.model, (X, NUMBERS)) > 0.8
    assert stream.predict(X[:2]) == stream.model(X[:2])[:, 0].tolist() and stream.classes == ()
    statistics = stream._nets[0].labels
    assert statistics.count == 6 * 160
    assert float(statistics.mean) == pytest.approx(float(NUMBERS.mean()), rel=1e-6)
    variance = float(statistics.squares) / statistics.count
    assert variance == pytest.approx(float(NUMBERS.var(correction=0)), rel=1e-5)


def test_new_statistics_change_no_output():
    model = net().double()
    before = model(X.double())
    scaling = LabelStatistics.of(NUMBERS.double()[:, None])
    with scaling.standardised(model[-1], in_units=True):
        inside = model(X.double())
    torch.testing.assert_close(model(X.double()), before)
    torch.testing.assert_close(inside, (before - scaling.mean) / NUMBERS.double().std(correction=0))
    constant = LabelStatistics.of(torch.full((3, 1), 0.1, dtype=torch.float64))
    assert float((constant + constant).scaling(True).scale) == 1.0


@pytest.mark.parametrize("size", [1, 3, 20])
def test_a_trained_model_goes_on(size):
    model = net()
    tpsgd.fit(model, (X, NUMBERS), epochs=40, batch_size=8)
    share = tpsgd.evaluate(model, (X, NUMBERS))
    stream = Stream(model).partial_fit(X[:size], NUMBERS[:size])
    assert stream.evaluate((X, NUMBERS)) == pytest.approx(share, abs=0.05) and share > 0.8


def test_rls_solves_for_numbers_as_they_are():
    stream = learn(Stream(net().double(), optimizer=tpsgd.rls(1e-3)), X.double(), NUMBERS)
    other = net().double()
    frozen = {"rule": rules.frozen(), "optimizer": ridge(1e-3 / 160)}
    tpsgd.fit(other, (X.double(), NUMBERS.double()), **frozen)
    torch.testing.assert_close(stream.model(X.double()), other(X.double()))


@pytest.mark.parametrize("loss", ["mse", tpsgd.losses.l1])
def test_whole_numbers_and_lists(loss):
    whole = NUMBERS.round().long()
    streams = [learn(Stream(net(), loss=loss), X, y) for y in (whole, whole.float().tolist())]
    assert same(*(weights(stream.model) for stream in streams))
    assert streams[0].partial_fit(X[0], 7).evaluate((X, whole)) < 1


def test_labels_of_steps():
    stream = learn(Stream(net(2), lr=0.01), STEPS, TAGS, epochs=15)
    predicted = torch.tensor(stream.predict(STEPS))
    labelled = TAGS >= 0
    right = (predicted == TAGS)[labelled].float().mean()
    assert stream.evaluate((STEPS, TAGS)) == pytest.approx(float(right)) and right > 0.85
    solved = learn(Stream(net(2), optimizer=tpsgd.rls()), STEPS, TAGS)
    assert solved.evaluate((STEPS, TAGS)) > 0.8


CASES = {
    "numbers": (lambda: net(2), X[:32], torch.stack([NUMBERS, X[:, 2]], 1)[:32], {}),
    "numbers by rls": (net, X[:32], NUMBERS[:32], {"optimizer": tpsgd.rls()}),
    "steps": (lambda: net(2), STEPS, TAGS, {"lr": 0.01}),
    "numbers of steps": (net, STEPS, NUMBERS.view(32, 5), {}),
}


@pytest.mark.parametrize("kind", CASES)
def test_a_stream_goes_on_where_it_was_saved(kind, tmp_path):
    make, x, y, settings = CASES[kind]
    first = learn(Stream(make(), **settings), x[:16], y[:16])
    first.save(tmp_path / "saved")
    second, third = Stream.load(tmp_path / "saved"), Stream(first.model, **settings)
    third.load_state_dict(first.state_dict())
    assert second.predict(x[:3]) == first.predict(x[:3]) and second.classes == first.classes
    assert third.classes == first.classes
    for stream in (first, second):
        learn(stream, x[16:], y[16:])
    assert same(weights(first.model), weights(second.model))


def test_a_model_of_a_class_with_two_inputs_is_saved_by_its_file(tmp_path):
    (tmp_path / "two.py").write_text(CLASS)
    factory = f"{tmp_path / 'two.py'}:Two"
    x, y = (X, X[:, :2] ** 2), (X[:, 0] > 0).long()
    first = learn(Stream(call_function(factory), lr=0.01), x, y, epochs=5)
    assert first.evaluate((x, y)) > 0.9
    first.save(tmp_path / "saved", factory=factory)
    with pytest.raises(TpsgdError, match="name that file to have it run"):
        Stream.load(tmp_path / "saved")
    second = Stream.load(tmp_path / "saved", factory=factory)
    for stream in (first, second):
        learn(stream, x, y)
        stream.partial_fit((X[0], X[0, :2] ** 2), 2)  # a single sample, of a new class
    assert same(weights(first.model), weights(second.model)) and second.classes == (0, 1, 2)


def test_a_detector_gets_the_error_in_units_before_the_model_learns():
    errors: list[float] = []

    class Detector:
        drift_detected = False

        def update(self, value):
            errors.append(value)

    stream = learn(Stream(net(), drift=Detector()), X[:80], NUMBERS[:80])
    expected = (stream.model(X[80:88])[:, 0] - NUMBERS[80:88]).abs()
    stream.partial_fit(X[80:88], NUMBERS[80:88])
    assert sorted(errors[-8:]) == pytest.approx(sorted(expected.tolist()))
    tags = learn(Stream(net(2), drift=Detector()), STEPS[:8], TAGS[:8])
    shares = (torch.tensor(tags.predict(STEPS[8:10])) != TAGS[8:10])[:, :4].float().mean(1)
    tags.partial_fit(STEPS[8:10], TAGS[8:10])
    assert sorted(errors[-2:]) == pytest.approx(sorted(shares.tolist()))


def test_after_a_broken_step_a_stream_goes_on_as_if_it_had_not_been():
    linear = nn.Linear(6, 1)
    stream, other = (Stream(copy.deepcopy(linear), lr=0.01) for _ in range(2))
    for each in (stream, other):
        learn(each, X[:80], NUMBERS[:80])
    learn(stream, X[80:88], NUMBERS[80:88])  # the step before is lost, too
    with pytest.raises(TpsgdError, match="as they were before the step before"):
        stream.partial_fit(X[88:96] * 1e30, NUMBERS[88:96])
    other._calls = stream._calls
    for each in (stream, other):
        learn(each, X[96:], NUMBERS[96:])
    assert same(weights(stream.model), weights(other.model))
    assert stream._nets[0].labels.count == other._nets[0].labels.count == 80 + 64


REFUSED = {
    "other numbers": ({}, X[:9], torch.rand(9, 3) * 9, "the model has 1 output, and y has 3"),
    "nan": ({}, X[:9], NUMBERS[:9] * float("nan"), "the labels contain NaN"),
    "names": ({"classes": ["a"]}, X[:9], NUMBERS[:9], "numbers, and classes are named"),
    "rehearsal": ({"rehearsal": Rehearsal("9KB")}, X[:9], NUMBERS[:9], "leave rehearsal out"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_numbers_that_cannot_be_learned_are_refused(kind):
    settings, x, y, said = REFUSED[kind]
    stream = Stream(net(), **settings)
    before = weights(stream.model)
    with pytest.raises(TpsgdError, match=said):
        stream.partial_fit(x, y)
    assert same(before, weights(stream.model)) and stream.samples == 0


def test_other_refusals():
    numbers = Stream(net()).partial_fit(X[:9], NUMBERS[:9])
    with pytest.raises(TpsgdError, match="there are no classes to add"):
        numbers.add_class()
    steps = Stream(net(2)).partial_fit(STEPS, TAGS)
    with pytest.raises(TpsgdError, match=r"the shape \(samples, 5\)"):
        steps.partial_fit(STEPS[:, :3], TAGS[:, :3])
    with pytest.raises(TpsgdError, match="label 2 is out of range"):
        steps.partial_fit(STEPS, TAGS.clamp(min=0) + 1)
    with pytest.raises(TpsgdError, match="models of several inputs"):
        Rehearsal("9KB").check(inputs((X[:4], X[:4, :2])))


def test_forged_statistics_are_refused(tmp_path):
    stream = learn(Stream(net()), X[:16], NUMBERS[:16])
    stream._nets[0].labels.squares.neg_()
    stream.save(tmp_path / "saved")
    with pytest.raises(TpsgdError, match="mean and the deviation"):
        Stream.load(tmp_path / "saved")


def test_predictions_of_steps_wherever_the_model_has_its_classes(tmp_path):
    file = tmp_path / "net.py"
    file.write_text(LAST)
    stream = learn(Stream(call_function(f"{file}:Turned")), STEPS, TAGS)
    stream.save(tmp_path / "saved", factory=f"{file}:Turned")
    loaded = Stream.load(tmp_path / "saved", factory=f"{file}:Turned")
    expected = stream.model(STEPS).argmax(1).tolist()
    assert stream.predict(STEPS) == loaded.predict(STEPS) == expected
