"""How long `fit` trains by default."""

import numpy as np
import pytest
import torch
from helpers import mlp, points
from sklearn.datasets import load_breast_cancer, load_iris, load_wine
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import tpsgd
from tpsgd.engine.lengths import FEWEST_EPOCHS, STEPS, batch_size_for, epochs_for, with_lengths
from tpsgd.engine.record import Run
from tpsgd.engine.settings import Settings


@pytest.mark.parametrize("samples", [1, 7, 60, 200, 1438, 10_000, 60_000, 10**6])
def test_the_steps_of_a_block_hardly_depend_on_the_samples(samples):
    batch_size = batch_size_for(samples)
    steps = -(-samples // batch_size)
    taken = steps * epochs_for(steps)
    assert batch_size in (8, 16, 32, 64, 128)
    assert taken > STEPS - steps and (taken <= STEPS or epochs_for(steps) == FEWEST_EPOCHS)


def test_large_data_take_five_epochs_of_batches_of_128():
    settings = with_lengths(Settings.of("fit", {}), (np.zeros((60_000, 1)), np.zeros(60_000)))
    assert (settings.epochs, settings.batch_size) == (5, 128)


def test_what_was_asked_for_stays():
    data = points(n=90)
    for asked in ({"epochs": 2}, {"batch_size": 30}, {"epochs": [1, 3], "batch_size": 7}):
        settings = with_lengths(Settings.of("fit", asked), data)
        assert {name: getattr(settings, name) for name in asked} == asked
    assert settings.epochs == [1, 3]
    assert with_lengths(Settings.of("fit", {"batch_size": 30}), data).epochs == STEPS // 3


class Endless(IterableDataset):
    """Samples without a known number."""

    def __iter__(self):
        return iter(zip(*points(n=20), strict=True))


def test_a_loader_keeps_its_batches_and_one_without_a_length_takes_five_epochs():
    settings, data = Settings.of("fit", {}), TensorDataset(*points(n=90))
    of_loader = with_lengths(settings, DataLoader(data, 30))
    assert (of_loader.epochs, of_loader.batch_size) == (STEPS // 3, 30)
    unknown = with_lengths(settings, DataLoader(Endless(), 10))
    assert (unknown.epochs, unknown.batch_size) == (FEWEST_EPOCHS, 10)
    run = tpsgd.fit(mlp(6, 4, 3), Endless())
    assert run.settings["epochs"] == 5 and run.length == "5 epochs of batches of 128"


def test_the_record_says_how_long_it_was_and_keeps_it():
    run = tpsgd.fit(mlp(6, 4, 3), points(n=60), early_stopping=tpsgd.EarlyStopping(1, 10.0))
    assert run.settings["epochs"] == 250 and run.settings["batch_size"] == 8
    words = "16 steps a block: 2 epochs of batches of 8, stopped before 250, chosen for 60 samples"
    assert run.length == words and words in str(run).splitlines()
    assert Run.of(run.as_dict()).length == words
    assert tpsgd.fit(mlp(6, 4, 3), points(n=60), epochs=1).length == ""


def test_restarts_and_plans_take_the_same_lengths():
    many = tpsgd.fit_many(
        lambda: mlp(6, 4, 3), points(n=60), restarts=2, callbacks=[lambda e: True]
    )
    assert all("chosen for 60 samples" in run.length for run in many.runs)
    plans = [tpsgd.plan(mlp(6, 4, 3), (6,), samples=60, **s) for s in ({}, {"batch_size": 8})]
    assert plans[0].lines == plans[1].lines != tpsgd.plan(mlp(6, 4, 3), (6,)).lines


@pytest.mark.parametrize(
    ("load", "accuracy"), [(load_iris, 0.9), (load_wine, 0.94), (load_breast_cancer, 0.94)]
)
def test_small_tables_are_learned_by_default(load, accuracy):
    x, y = load(return_X_y=True)
    x = torch.from_numpy((x - x.mean(0)) / x.std(0)).float()
    y, test = torch.from_numpy(y), torch.arange(len(x)) % 5 == 0
    torch.manual_seed(0)
    model = mlp(x.shape[1], 64, int(y.max()) + 1)
    tpsgd.fit(model, (x[~test], y[~test]))
    assert tpsgd.evaluate(model, (x[test], y[test])) >= accuracy
