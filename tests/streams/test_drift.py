"""A detector with river's interface sees the error of every batch before it is learned."""

import pytest
import torch
from streams.nets import X, Y, mlp

from tpsgd import Stream


class Jump:
    """Like a detector of river: a drift is an error far above the mean of the latest ones."""

    def __init__(self):
        self.errors, self.drift_detected = [], False

    def update(self, value):
        latest = self.errors[-10:]
        self.drift_detected = len(latest) == 10 and value > sum(latest) / 10 + 0.6
        self.errors.append(value)


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
    assert calls == stream.drifts and stream.drifts[0] == 800
    assert len(detector.errors) == 100 and stream.samples == 1000


def test_the_error_is_that_of_a_batch_before_it_is_learned():
    detector, model = Jump(), mlp()
    before = (model(X[:20]).argmax(1) != Y[:20]).double().mean()
    Stream(model, lr=0.1, drift=detector).partial_fit(X[:20], Y[:20])
    assert detector.errors == [pytest.approx(float(before))]


def test_a_long_call_tells_the_error_of_each_batch():
    detector = Jump()
    Stream(mlp(), drift=detector, batch_size=10).partial_fit(X[:95], Y[:95])
    assert len(detector.errors) == 10 and all(0 <= e <= 1 for e in detector.errors)


def test_without_a_callback_drifts_are_noted():
    class Always:
        drift_detected = True

        def update(self, value):
            pass

    stream = Stream(mlp(), drift=Always())
    for start in (0, 5):
        stream.partial_fit(X[start : start + 5], Y[start : start + 5])
    assert stream.drifts == [0, 5]
