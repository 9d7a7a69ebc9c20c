"""A detector with river's interface sees the error of every sample before it is learned."""

import pytest
import torch
from streams.nets import X, Y, learn, mlp
from torch import nn

import tpsgd
from tpsgd import Stream

pytestmark = pytest.mark.usefixtures("unwatched")


class Jump:
    """Like a detector of river: a drift is an error far above the mean of the latest ones."""

    def __init__(self):
        self.errors, self.drift_detected = [], False

    def update(self, value):
        self.errors.append(value)
        latest, before = self.errors[-20:], self.errors[-220:-20]
        self.drift_detected = len(before) == 200 and sum(latest) / 20 > sum(before) / 200 + 0.5


def test_a_drift_calls_back_with_the_stream():
    detector, calls = Jump(), []
    stream = Stream(
        mlp(), lr=0.01, batch_size=10, drift=detector, on_drift=lambda s: calls.append(s.samples)
    )
    order = torch.arange(1000) % len(X)
    for start in range(0, 1000, 20):
        index = order[start : start + 20]
        labels = Y[index] if start < 800 else 9 - Y[index]  # the digits change their meaning
        stream.partial_fit(X[index], labels)
    assert calls == stream.drifts and stream.drifts[0] in (800, 810, 820)
    assert len(detector.errors) == stream.samples == 1000


def test_the_errors_are_those_of_the_samples_before_they_are_learned():
    detector, model = Jump(), learn(Stream(mlp(), lr=0.003), 100).model
    before = (model(X[:20]).argmax(1) != Y[:20]).long().tolist()
    Stream(model, lr=0.1, drift=detector).partial_fit(X[:20], Y[:20])
    assert sorted(detector.errors) == sorted(before) and set(before) == {0, 1}


def test_a_long_call_tells_the_error_of_each_sample():
    """The detectors for yes or no, such as river's DDM, take no shares."""
    detector = Jump()
    Stream(mlp(), drift=detector, batch_size=10).partial_fit(X[:95], Y[:95])
    assert len(detector.errors) == 95 and all(type(e) is int for e in detector.errors)


def test_rows_of_labels_are_right_if_all_of_them_are():
    detector = Jump()
    rows = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0]])
    model = nn.Sequential(nn.Linear(2, 2))
    model.load_state_dict({"0.weight": torch.eye(2), "0.bias": torch.zeros(2)})
    stream = Stream(model, loss=tpsgd.bce, drift=detector)
    stream.partial_fit(torch.tensor([[9.0, -9.0], [9.0, -9.0], [-9.0, -9.0]]), rows)
    assert sorted(detector.errors) == [0, 0, 1]


def test_detectors_of_river():
    drift = pytest.importorskip("river.drift")
    for detector in (drift.ADWIN(), drift.binary.DDM(), drift.binary.EDDM()):
        stream = Stream(mlp(), lr=0.01, batch_size=10, drift=detector)
        for _ in range(3):
            stream.partial_fit(X, Y)
        before = len(stream.drifts)
        stream.partial_fit(X, 9 - Y)
        assert len(stream.drifts) > before, type(detector)


def test_without_a_callback_drifts_are_noted():
    class Always:
        drift_detected = True

        def update(self, value):
            pass

    stream = Stream(mlp(), drift=Always())
    for start in (0, 5):
        stream.partial_fit(X[start : start + 5], Y[start : start + 5])
    assert stream.drifts == [0, 5]


def test_a_detector_that_fails_is_named():
    class Broken(Jump):
        def update(self, value):
            raise ZeroDivisionError("no errors")

    stream = Stream(mlp(), drift=Broken())
    with pytest.raises(tpsgd.TpsgdError, match="detector Broken failed with ZeroDivisionError: no"):
        stream.partial_fit(X[:4], Y[:4])
    assert stream.samples == 0
