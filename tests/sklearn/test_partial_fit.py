"""Many calls of `partial_fit` are one training run, and early stopping works in them."""

import pickle

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import tpsgd
from tpsgd import TPSGDClassifier, TpsgdError, rules

pytestmark = pytest.mark.usefixtures("unwatched")

X, Y = load_digits(return_X_y=True)
X = X / 16
CLASSES = range(10)


def chunks(size=100):
    for start in range(0, len(Y) // size * size, size):
        yield X[start : start + size], Y[start : start + size]


@pytest.mark.parametrize("word", ["readout", "readout-learned", "tpsgd-l2", "dfa"])
def test_calls_on_chunks_are_one_run_over_a_loader(word):
    fresh = TPSGDClassifier((16,), word, random_state=0)
    fresh._samples(X, Y, first=True)
    fresh._start(10, X.dtype)
    model, seed = fresh.model_, fresh._seed
    stream = TPSGDClassifier((16,), word, random_state=0)
    for chunk in chunks():
        stream.partial_fit(*chunk, classes=CLASSES)
    loader = DataLoader(TensorDataset(*map(torch.from_numpy, (X[:1700], Y[:1700]))), 100)
    rule = rules.ALL[word].make()
    tpsgd.fit(
        model, loader, rule=rule, loss=tpsgd.cross_entropy, order=tpsgd.simultaneous,
        epochs=1, seed=seed,
    )  # fmt: skip
    for ours, theirs in zip(stream.model_.parameters(), model.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-7, atol=1e-9)


def test_a_pickled_classifier_goes_on_as_if_nothing_had_happened():
    whole = TPSGDClassifier((16,), "readout-learned", random_state=0)
    halves = TPSGDClassifier((16,), "readout-learned", random_state=0)
    for i, chunk in enumerate(chunks()):
        whole.partial_fit(*chunk, classes=CLASSES)
        halves.partial_fit(*chunk, classes=CLASSES)
        if i == 5:
            halves = pickle.loads(pickle.dumps(halves))
    assert np.array_equal(whole.predict_proba(X), halves.predict_proba(X))


@pytest.mark.full
def test_single_samples_and_small_batches_are_learned():
    classifier = TPSGDClassifier((64,), lr=0.003, random_state=0)
    for i in range(1000):
        classifier.partial_fit(X[i : i + 1], Y[i : i + 1], classes=CLASSES)
    assert classifier.score(X[1000:], Y[1000:]) > 0.75
    for chunk in chunks(20):
        classifier.partial_fit(*chunk)
    assert classifier.score(X, Y) > 0.9


def test_partial_fit_goes_on_after_fit():
    classifier = TPSGDClassifier((32,), epochs=3, random_state=0).fit(X, Y)
    model, before = classifier.model_, classifier.score(X, Y)
    for _ in range(10):
        classifier.partial_fit(X, Y)
    assert classifier.model_ is model
    assert classifier.score(X, Y) > before


def test_weights_of_a_call_are_taken_as_they_are():
    heavy = TPSGDClassifier((16,), "frozen", optimizer=tpsgd.sgd, random_state=0)
    light = TPSGDClassifier((16,), "frozen", optimizer=tpsgd.sgd, lr=0.3, random_state=0)
    heavy.partial_fit(X[:50], Y[:50], CLASSES, sample_weight=np.full(50, 3.0))
    light.partial_fit(X[:50], Y[:50], CLASSES)
    assert np.allclose(heavy.predict_proba(X), light.predict_proba(X))


def test_early_stopping_ends_a_stream():
    classifier = TPSGDClassifier(
        (64,), lr=0.01, early_stopping=True, n_iter_no_change=4, random_state=0
    )
    calls = 0
    while not getattr(classifier, "stopped_early_", False) and calls < 500:
        classifier.partial_fit(X, Y, classes=CLASSES)
        calls += 1
    assert 4 < calls < 500
    assert classifier.score(X, Y) > 0.95
    before = classifier.predict_proba(X)
    assert np.array_equal(classifier.partial_fit(X, Y).predict_proba(X), before)
    classifier.set_params(early_stopping=False).partial_fit(X, Y)
    assert not np.array_equal(classifier.predict_proba(X), before)


def test_a_sample_is_always_held_out_or_never():
    classifier = TPSGDClassifier(early_stopping=True, validation_fraction=0.25, random_state=0)
    classifier.partial_fit(X[:10], Y[:10], classes=CLASSES)
    held_out = classifier._held_out(X)
    assert 0.2 < held_out.mean() < 0.3
    order = np.random.default_rng(0).permutation(len(X))
    assert np.array_equal(classifier._held_out(X[order]), held_out[order])


def test_held_out_samples_are_not_learned_from():
    settings = {"hidden": (8,), "validation_fraction": 0.25, "random_state": 0}
    watched = TPSGDClassifier(early_stopping=True, **settings)
    watched.partial_fit(X[:10], Y[:10], classes=CLASSES)
    learned = ~watched._held_out(X[:10])
    assert 0 < learned.sum() < 10
    other = TPSGDClassifier(**settings).partial_fit(X[:10][learned], Y[:10][learned], CLASSES)
    assert np.array_equal(watched.predict_proba(X), other.predict_proba(X))


@pytest.mark.parametrize(
    ("classes", "settings", "sentence"),
    [
        (None, {}, "the first call of partial_fit needs all classes"),
        (range(5), {}, r"not in classes=\[0, 1, 2, 3, 4\]: \[5, 6, 7, 8, 9\]"),
        (range(10), {"class_weight": "balanced"}, "needs all labels at once"),
    ],
)
def test_calls_that_cannot_work_are_refused(classes, settings, sentence):
    with pytest.raises(TpsgdError, match=sentence):
        TPSGDClassifier(**settings).partial_fit(X, Y, classes=classes)


def test_other_classes_in_a_later_call_are_refused():
    classifier = TPSGDClassifier().partial_fit(X[:5], Y[:5], classes=CLASSES)
    with pytest.raises(TpsgdError, match=r"9, 10\] are not those of the first call, \[0, 1,"):
        classifier.partial_fit(X, Y, classes=range(11))


@pytest.mark.parametrize("word", ["readout-learned", "tpsgd-l2", "frozen"])
def test_weights_may_come_later_in_a_stream(word):
    """Weights of 1 are the same loss, computed from rows: the stream goes on."""
    plain = TPSGDClassifier((16,), word, random_state=0)
    mixed = TPSGDClassifier((16,), word, random_state=0)
    for i, (x, y) in enumerate(chunks()):
        plain.partial_fit(x, y, classes=CLASSES)
        weights = np.ones(len(y))
        weights[:1] += 1e-9 * (i > 5)  # not all of them 1
        mixed.partial_fit(x, y, classes=CLASSES, sample_weight=weights)
    assert np.allclose(plain.predict_proba(X), mixed.predict_proba(X), atol=1e-6)


def test_the_rate_may_change_in_a_stream():
    classifier = TPSGDClassifier((16,), random_state=0)
    calls = iter(chunks())
    classifier.partial_fit(*next(calls), classes=CLASSES)
    before = classifier.predict_proba(X)
    classifier.set_params(lr=0.0).partial_fit(*next(calls))
    assert np.array_equal(classifier.predict_proba(X), before)
    classifier.set_params(lr=0.01).partial_fit(*next(calls))
    assert not np.array_equal(classifier.predict_proba(X), before)
