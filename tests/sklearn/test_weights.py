"""Weights: the closed forms are derivatives, and a weight of 2 is the same as a sample twice."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.datasets import load_iris

from tpsgd import TPSGDClassifier, TpsgdError, rules
from tpsgd.maths.random import Key
from tpsgd.objectives import Site, differentiate
from tpsgd_sklearn.weights import weighted, weighted_cross_entropy, weighted_rows

pytestmark = pytest.mark.usefixtures("unwatched")

X, Y = load_iris(return_X_y=True)
WEIGHTS = np.random.default_rng(0).integers(0, 4, len(Y)) * np.array([1.0, 2.0, 5.0])[Y]
WORDS = ["readout", "readout-learned", "drtp", "tpsgd-l1", "tpsgd-l2", "dfa", "frozen"]


def rows_and_outputs(classes=3, units=5, samples=7):
    generator = torch.Generator().manual_seed(0)
    options = {"generator": generator, "dtype": torch.float64}
    y, weights = torch.randn(samples, units, **options), torch.rand(samples, **options) + 0.1
    labels = torch.randint(0, classes, (samples,), generator=generator)
    return y, weights, labels, weighted_rows(labels, weights, classes)


@pytest.mark.parametrize("word", ["readout", "readout-learned", "drtp", "tpsgd-l1", "tpsgd-l2"])
def test_a_weighted_objective_is_the_weighted_mean_of_the_samples_losses(word):
    y, weights, labels, rows = rows_and_outputs()
    rule, key = rules.ALL[word].make(), Key(3)
    site = Site((5,), 3, key, loss=weighted_cross_entropy, dtype=torch.float64)
    objective = weighted(rule).objective(site)
    plain = rule.objective(Site((5,), 3, key, dtype=torch.float64))
    losses = [plain(y[i : i + 1], labels[i : i + 1]).loss for i in range(len(y))]
    local, tensors = objective(y, rows), objective.tensors
    assert torch.allclose(local.loss, (weights * torch.stack(losses)).mean())
    learned = len(objective.learned_tensors)
    by_autograd = differentiate(objective.loss, y, rows, tensors, learned)
    assert torch.allclose(local.dy, by_autograd.dy)
    for written, derived in zip(local.dtensors, by_autograd.dtensors, strict=True):
        assert torch.allclose(written, derived)


def test_the_last_blocks_loss_is_weighted():
    y, weights, labels, rows = rows_and_outputs(units=3)
    each = torch.nn.functional.cross_entropy(y, labels, reduction="none")
    assert torch.allclose(weighted_cross_entropy.value(y, rows), (weights * each).mean())
    y.requires_grad_()
    (dy,) = torch.autograd.grad(len(y) * weighted_cross_entropy.value(y, rows), y)
    assert torch.allclose(weighted_cross_entropy.grad(y.detach(), rows), dy)


@pytest.mark.parametrize("word", WORDS)
def test_weights_equal_repeated_samples(word):
    classifier = TPSGDClassifier((8,), word, epochs=9, batch_size=999, lr=0.05, random_state=0)
    by_weight = classifier.fit(X, Y, WEIGHTS * 3.0).predict_proba(X)
    repeats = WEIGHTS.astype(int)
    repeated = classifier.fit(X.repeat(repeats, 0), Y.repeat(repeats)).predict_proba(X)
    unweighted = classifier.fit(X, Y).predict_proba(X)
    assert np.allclose(by_weight, repeated, rtol=1e-6, atol=1e-8)
    assert not np.allclose(by_weight, unweighted, rtol=1e-3)


def test_class_weights_multiply_sample_weights():
    classifier = TPSGDClassifier((8,), epochs=5, random_state=0)
    of_samples = classifier.fit(X, Y, WEIGHTS * np.array([1, 5, 2])[Y]).predict_proba(X)
    classifier.set_params(class_weight={0: 1, 1: 5, 2: 2})
    assert np.allclose(of_samples, classifier.fit(X, Y, WEIGHTS).predict_proba(X))


def test_balanced_weights_help_a_rare_class():
    rare = np.r_[0:100, 100:105]
    classifier = TPSGDClassifier((16,), lr=0.01, epochs=20, random_state=0)
    plain = classifier.fit(X[rare], Y[rare]).predict(X) == Y
    balanced = classifier.set_params(class_weight="balanced").fit(X[rare], Y[rare]).predict(X) == Y
    assert balanced[Y == 2].mean() > plain[Y == 2].mean() + 0.2


@pytest.mark.parametrize(
    "rule", ["sdfa", "predsim", "auxiliary", replace(rules.predsim(), name="readout-mine")]
)
def test_rules_without_weights_are_refused(rule):
    name = getattr(rule, "name", rule)
    with pytest.raises(TpsgdError, match=f"dfa and frozen, not with {name}"):
        TPSGDClassifier(rule=rule).fit(X, Y, WEIGHTS)


def test_standardised_targets_are_refused_with_weights():
    with pytest.raises(TpsgdError, match="not standardise=True"):
        TPSGDClassifier(rule=rules.tpsgd_l2(standardise=True)).fit(X, Y, WEIGHTS)


def test_negative_weights_are_refused():
    with pytest.raises(ValueError, match="Negative values"):
        TPSGDClassifier().fit(X, Y, WEIGHTS - 1)


def test_weights_of_zero_for_all_but_one_class_are_refused():
    with pytest.raises(TpsgdError, match="y has 1 class: 2"):
        TPSGDClassifier().fit(X, Y, Y == 2)
