"""The regressor keeps scikit-learn's conventions, and its local rule beats random hidden layers."""

import pickle
import warnings

import numpy as np
import pytest
import torch
from sklearn.datasets import make_friedman1
from sklearn.linear_model import Ridge

from tests.sklearn.checks import scikit_learns_checks
from tpsgd import TpsgdError, TPSGDRegressor
from tpsgd.losses import mse
from tpsgd.maths.random import Key
from tpsgd.objectives import Site, differentiate
from tpsgd.rules import readout

pytestmark = pytest.mark.usefixtures("unwatched")

X, Y = make_friedman1(1000, noise=0.5, random_state=0)
TRAIN, TEST = slice(0, 700), slice(700, None)
SMALL = {"hidden": (64,), "epochs": 40, "lr": 0.005, "random_state": 0}


@pytest.mark.parametrize("check", scikit_learns_checks(TPSGDRegressor()))
def test_scikit_learns_own_checks(check):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the checks expect warnings, and ask for some
        check(TPSGDRegressor())


def score(regressor):
    return regressor.fit(X[TRAIN], Y[TRAIN]).score(X[TEST], Y[TEST])


def test_a_local_rule_beats_random_hidden_layers_and_ridge():
    learned = score(TPSGDRegressor(**SMALL))
    assert learned > score(TPSGDRegressor(**SMALL, rule="frozen")) + 0.03
    assert learned > score(Ridge()) + 0.05


@pytest.mark.parametrize("learned", [False, True])
def test_the_local_loss_of_a_readout_is_squared(learned):
    site = Site((5,), 2, Key(0), loss=mse, numbers=True, dtype=torch.float64)
    objective = readout(learned, scale=2.0).objective(site)
    generator = torch.Generator().manual_seed(0)
    y = torch.randn(7, 5, dtype=torch.float64, generator=generator)
    s = torch.randn(7, 2, dtype=torch.float64, generator=generator)
    codes = objective.tensors[0] * (objective.tensors[1] if learned else 1.0)
    local = objective(y, s)
    assert torch.allclose(local.loss, (y @ codes.T - s).square().sum(1).mean() / 2)
    count = len(objective.learned_tensors)
    by_autograd = differentiate(objective.loss, y, s, objective.tensors, count)
    assert torch.allclose(local.dy, by_autograd.dy)


def test_targets_of_any_size_and_number():
    both = np.stack([Y, -1e6 * Y + 5e7], 1)
    regressor = TPSGDRegressor(**SMALL).fit(X, both)
    assert regressor.predict(X).shape == (1000, 2)
    assert regressor.score(X, both) > 0.8


def test_early_stopping_warm_start_and_pickle():
    regressor = TPSGDRegressor(**SMALL, early_stopping=True, n_iter_no_change=2).fit(X, Y)
    assert all(e.val_loss is not None and e.accuracy is None for e in regressor.run_.history)
    copy = pickle.loads(pickle.dumps(regressor)).set_params(warm_start=True)
    assert np.array_equal(copy.predict(X), regressor.predict(X))
    model = copy.model_
    assert copy.fit(X, Y).model_ is model
    with pytest.raises(TpsgdError, match="another number of targets"):
        copy.fit(X, np.stack([Y, Y], 1))


def test_a_rule_that_needs_classes_is_refused():
    with pytest.raises(TpsgdError, match=r"predsim compares samples of a class.*are numbers"):
        TPSGDRegressor(rule="predsim").fit(X, Y)


def test_an_auxiliary_net_that_reads_numbers_beats_random_hidden_layers():
    learned = score(TPSGDRegressor(**SMALL, rule="auxiliary"))
    assert learned > score(TPSGDRegressor(**SMALL, rule="frozen")) + 0.03


@pytest.mark.parametrize("value", [1e6, 0.1, 0.0])
def test_a_target_that_never_changes_is_predicted_exactly(value):
    both = np.stack([Y, np.full(len(Y), value)], 1)
    regressor = TPSGDRegressor(**SMALL | {"epochs": 3}, warm_start=True).fit(X, both)
    predicted = regressor.predict(X)
    assert (predicted[:, 1] == value).all() and np.ptp(predicted[:, 0]) > 0
    assert (regressor.fit(X, both).predict(X)[:, 1] == value).all()
    with pytest.raises(TpsgdError, match="same value in all samples before"):
        regressor.fit(X, both + Y[:, None])


def test_targets_too_large_for_a_deviation_are_refused():
    with pytest.raises(TpsgdError, match=r"y has numbers of up to .*e\+30., too large"):
        TPSGDRegressor(**SMALL).fit(X, Y * 1e300)


@pytest.mark.parametrize("epochs", [0, -1, 2.5, "3"])
def test_no_epochs_train_no_model(epochs):
    with pytest.raises(
        TpsgdError, match=f"epochs must be a whole number, 1 or more, got {epochs!r}"
    ):
        TPSGDRegressor(epochs=epochs).fit(X, Y)
