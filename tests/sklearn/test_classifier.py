"""The classifier keeps scikit-learn's conventions, and works inside scikit-learn's tools."""

import io
import os
import pickle
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import joblib
import numpy as np
import pytest
import torch
from scipy.sparse import csr_matrix
from sklearn.base import clone
from sklearn.datasets import load_digits, load_iris
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_score, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import tpsgd
from tests.sklearn.checks import scikit_learns_checks
from tpsgd import TPSGDClassifier, TpsgdError, rules
from tpsgd.features import progress_bar

IRIS = load_iris(return_X_y=True)
ONE_BATCH = {"batch_size": 128, "epochs": 5}  # repeated samples fill batches otherwise than weights
SMALL = {"hidden": (16,), "lr": 0.01, "random_state": 0}


@pytest.mark.parametrize("check", scikit_learns_checks(TPSGDClassifier()))
def test_scikit_learns_own_checks(check):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the checks expect warnings, and ask for some
        check(TPSGDClassifier(**ONE_BATCH if "weight_equivalence" in str(check) else {}))


def accuracy(classifier, **settings):
    X, y = load_digits(return_X_y=True)
    X, X_test, y, y_test = train_test_split(X / 16, y, random_state=0, stratify=y)
    return clone(classifier).set_params(**settings).fit(X, y).score(X_test, y_test)


def test_a_local_rule_beats_random_hidden_layers():
    classifier = TPSGDClassifier((64,), epochs=20, lr=0.005, random_state=0)
    learned = accuracy(classifier)
    assert learned > 0.95
    assert learned > accuracy(classifier, rule="frozen") + 0.02


@pytest.mark.parametrize("word", [w for w in rules.ALL if w != "random"])
def test_every_rule_trains(word):
    classifier = TPSGDClassifier((16,), word, activation="tanh", lr=0.01, random_state=0)
    X, y = StandardScaler().fit_transform(IRIS[0]), IRIS[1]
    assert classifier.fit(X, y).score(X, y) > 0.8


def test_a_rule_is_a_word_a_value_or_a_function():
    of_word = TPSGDClassifier(rule="readout-learned", epochs=2, random_state=0).fit(*IRIS)
    for rule in (rules.readout(True), partial(rules.readout, True)):
        other = clone(of_word).set_params(rule=rule).fit(*IRIS)
        assert np.array_equal(other.predict_proba(IRIS[0]), of_word.predict_proba(IRIS[0]))


def test_the_net_is_that_of_fit():
    X, y = IRIS
    classifier = TPSGDClassifier((8,), epochs=3, tol=None, random_state=0).fit(X, y)
    torch.manual_seed(classifier._seed)
    model = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3)
    ).double()
    learned = tpsgd.rules.readout(learned=True)
    tpsgd.fit(model, (X, y), rule=learned, epochs=3, seed=classifier._seed)
    assert torch.equal(model[3].weight, classifier.model_[3].weight)
    assert classifier.n_iter_ == 3
    assert classifier.run_.sample_passes == 2 * 3 * 150


@pytest.mark.full
def test_pipeline_grid_search_and_cross_validation():
    pipeline = make_pipeline(StandardScaler(), TPSGDClassifier(**SMALL, epochs=50))
    grid = {
        "tpsgdclassifier__rule": ["readout", "frozen"],
        "tpsgdclassifier__hidden": [32, (32, 32)],
    }
    search = GridSearchCV(pipeline, grid, cv=3, error_score="raise").fit(*IRIS)
    assert search.best_score_ > 0.9
    assert cross_val_score(search.best_estimator_, *IRIS, error_score="raise").mean() > 0.85


@pytest.mark.parametrize("through", ["pickle", "joblib"])
def test_files_of_the_classifier(through, tmp_path):
    classifier = TPSGDClassifier(**SMALL, epochs=5).fit(*IRIS)
    if through == "pickle":
        copy = pickle.loads(pickle.dumps(classifier))
    else:
        joblib.dump(classifier, tmp_path / "classifier.joblib")
        copy = joblib.load(tmp_path / "classifier.joblib")
    assert np.array_equal(copy.predict_proba(IRIS[0]), classifier.predict_proba(IRIS[0]))
    for each in (copy, classifier):
        each.partial_fit(*IRIS)
    assert np.array_equal(copy.predict_proba(IRIS[0]), classifier.predict_proba(IRIS[0]))


def test_labels_are_strings_and_probabilities_are_in_their_order():
    X, y = IRIS
    names = np.array(["setosa", "versicolor", "arctic"])
    classifier = TPSGDClassifier(**SMALL).fit(X, names[y])
    assert list(classifier.classes_) == sorted(names)
    assert (classifier.predict(X) == names[y]).mean() > 0.9
    probabilities = classifier.predict_proba(X)
    assert np.allclose(probabilities.sum(1), 1)
    assert (classifier.classes_[probabilities.argmax(1)] == classifier.predict(X)).all()


def test_float32_samples_are_learned_in_float32():
    X, y = IRIS
    classifier = TPSGDClassifier(epochs=2, random_state=0).fit(X.astype(np.float32), y)
    assert classifier.model_[1].weight.dtype is torch.float32
    assert classifier.predict_proba(X).dtype == np.float32
    other = clone(classifier).fit(X, y)
    assert other.model_[1].weight.dtype is torch.float64
    assert np.allclose(classifier.predict_proba(X), other.predict_proba(X), atol=1e-4)


def test_early_stopping_holds_samples_out_and_ends_early():
    classifier = TPSGDClassifier(**SMALL, epochs=500, early_stopping=True, n_iter_no_change=3)
    classifier.fit(*IRIS)
    assert classifier.n_iter_ < 500
    assert all(e.val_loss is not None for e in classifier.run_.history)
    epochs = [e.block for e in classifier.run_.history]
    assert classifier.run_.sample_passes == 135 * len(epochs)


def test_tol_ends_a_layer_and_none_does_not():
    assert TPSGDClassifier(**SMALL, tol=10.0, n_iter_no_change=2).fit(*IRIS).n_iter_ == 3
    assert TPSGDClassifier(**SMALL, tol=None, epochs=15).fit(*IRIS).n_iter_ == 15


def test_warm_start_goes_on():
    X, y = IRIS
    classifier = TPSGDClassifier(**SMALL, epochs=1, tol=None, warm_start=True).fit(X, y)
    model, before = classifier.model_, classifier.score(X, y)
    for _ in range(30):
        classifier.fit(X, y)
    assert classifier.model_ is model
    assert classifier.score(X, y) > before
    with pytest.raises(TpsgdError, match=r"the classes \[0, 1, 2\], but y has \[1, 2\]: set"):
        classifier.fit(X[y > 0], y[y > 0])
    with pytest.raises(TpsgdError, match="other hidden layers"):
        classifier.set_params(hidden=(5,)).fit(X, y)
    assert classifier.set_params(warm_start=False).fit(X, y).model_ is not model


def test_the_number_of_features_is_held_to():
    classifier = TPSGDClassifier(epochs=1).fit(*IRIS)
    assert classifier.n_features_in_ == 4
    with pytest.raises(ValueError, match="3 features, but TPSGDClassifier is expecting 4"):
        classifier.predict(IRIS[0][:, :3])


def test_names_of_features_are_held_to():
    pandas = pytest.importorskip("pandas")
    X = pandas.DataFrame(IRIS[0], columns=list("abcd"))
    classifier = TPSGDClassifier(epochs=1).fit(X, IRIS[1])
    assert list(classifier.feature_names_in_) == list("abcd")
    with pytest.raises(ValueError, match="feature names"):
        classifier.predict(X[list("dcba")])


def test_before_fit():
    with pytest.raises(NotFittedError):
        TPSGDClassifier().predict(IRIS[0])


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"rule": "readot"}, "unknown rule 'readot': did you mean 'readout'?"),
        ({"rule": 3}, "rule must be a word or a tpsgd.rules value, got 3"),
        ({"activation": "rely"}, "unknown activation 'rely': did you mean 'relu'?"),
        ({"hidden": (0,)}, r"hidden must be widths of 1 or more, got \(0,\)"),
        ({"epochs": 0.5}, "epochs must be a whole number, 1 or more, got 0.5"),
        ({"epochs": 0}, "epochs must be a whole number, 1 or more, got 0"),
        ({"hidden": (10**11,)}, r"a net with hidden=\(100000000000,\) does not fit in memory"),
        ({"hidden": (10**30,)}, "does not fit in memory"),
        ({"n_iter_no_change": 0}, "n_iter_no_change must be a whole number, 1 or more, got 0"),
        (
            {"early_stopping": True, "validation_fraction": 2},
            "validation_fraction must be a number between 0 and 1, got 2",
        ),
        ({"device": "tpu"}, "unknown device 'tpu'"),
        (
            {"rule": "predsim", "class_weight": {0: 2, 1: 1, 2: 1}},
            "weights of samples or classes work with the rules readout",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, sentence):
    with pytest.raises(TpsgdError, match=sentence):
        TPSGDClassifier(**settings).fit(*IRIS)


def test_sparse_samples_are_refused_with_a_sentence():
    with pytest.raises(TypeError, match="Sparse data was passed for X, but dense data is required"):
        TPSGDClassifier().fit(csr_matrix(IRIS[0]), IRIS[1])


def test_one_class_is_refused():
    with pytest.raises(TpsgdError, match="at least 2 classes, but y has 1 class: 0"):
        TPSGDClassifier().fit(IRIS[0], np.zeros(150, int))


def without_scikit_learn(code):
    env = os.environ | {"PYTHONPATH": str(Path(tpsgd.__file__).parents[1])}
    code = f"import sys; sys.modules['sklearn'] = None; import tpsgd; {code}"
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)


@pytest.mark.full
def test_the_library_imports_without_scikit_learn():
    missing = without_scikit_learn("tpsgd.fit; print(tpsgd.evaluate); tpsgd.TPSGDClassifier")
    assert missing.returncode == 1 and "evaluate" in missing.stdout
    assert missing.stderr.splitlines()[-1].endswith(
        "tpsgd's classifier and regressor need scikit-learn: pip install scikit-learn"
    )


@pytest.mark.full
@pytest.mark.real_data("mnist")
def test_mnist_in_five_epochs():
    data = tpsgd.data.load("mnist")
    (X, y), (X_test, y_test) = data.train, data.test
    classifier = TPSGDClassifier((256,), epochs=5, random_state=0)
    classifier.fit(X.flatten(1).numpy(), y.numpy())
    assert classifier.score(X_test.flatten(1).numpy(), y_test.numpy()) >= 0.97


def test_bytes_are_pixels_in_training_and_prediction():
    X = np.random.default_rng(0).integers(0, 256, (80, 5), dtype=np.uint8)
    y = X[:, 0] > 127
    of_bytes = TPSGDClassifier((8,), epochs=3, random_state=0).fit(X, y)
    numbers = (X / np.float32(255)).astype(np.float32)
    of_numbers = TPSGDClassifier((8,), epochs=3, random_state=0).fit(numbers, y)
    assert np.array_equal(of_bytes.predict_proba(X), of_numbers.predict_proba(numbers))
    with pytest.raises(TpsgdError, match="X is of numbers, but the net was trained on bytes"):
        of_bytes.predict(X.astype(float))
    with pytest.raises(TpsgdError, match=r"X is of bytes .* but the net was trained on numbers"):
        of_numbers.predict(X)


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def screen(monkeypatch):
    """A terminal on which bars appear at once."""
    terminal = Terminal()
    monkeypatch.setattr(progress_bar, "sys", SimpleNamespace(stderr=terminal))
    monkeypatch.setattr(progress_bar, "automatic", True)
    for constant in ("PATIENCE", "PAUSE"):
        monkeypatch.setattr(progress_bar, constant, 0.0)
    return terminal


@pytest.mark.parametrize("make", [TPSGDClassifier, tpsgd.TPSGDRegressor])
def test_verbose_shows_a_progress_bar_and_the_default_is_quiet(make, screen):
    make(**SMALL, epochs=2).fit(*IRIS)
    assert screen.getvalue() == ""
    make(**SMALL, epochs=2, verbose=True).fit(*IRIS)
    assert "100%" in screen.getvalue()
    with pytest.raises(TpsgdError, match="verbose must be True or False"):
        make(**SMALL, verbose="yes").fit(*IRIS)


def test_verbose_shows_a_progress_bar_in_partial_fit(screen):
    classifier = TPSGDClassifier(**SMALL, batch_size=32).partial_fit(*IRIS, classes=[0, 1, 2])
    assert screen.getvalue() == ""
    classifier.set_params(verbose=True).partial_fit(*IRIS)
    assert "100%" in screen.getvalue()
