"""Comparisons of models by other labels than one class for each sample, and of several inputs."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tpsgd
from tpsgd import TpsgdError, peers, rules
from tpsgd.comparison.compare import compare
from tpsgd.comparison.trials import Trial, halve, split_training
from tpsgd.data import Data
from tpsgd.engine.arm import Arm

TRAINING: dict[str, Any] = {"epochs": 4, "batch_size": 16, "seed": 0}
ONCE: dict[str, Any] = TRAINING | {"restarts": 1}


def points(n: int = 90) -> Tensor:
    return torch.randn(n, 6, generator=torch.Generator().manual_seed(0))


def cut(x, y, at: int = 60):
    return (x[:at], y[:at]), (x[at:], y[at:])


@pytest.fixture
def numbers() -> Data:
    """Numbers far from 0 that are linear in the samples."""
    x = points()
    return Data("numbers", *cut(x, 500 + 40 * x[:, 0] - 20 * x[:, 1]), (), (6,), "made here")


@pytest.fixture
def steps() -> Data:
    """A class for every step but the last."""
    x = points(90 * 5).view(90, 5, 6)
    y = (x[..., 0] > 0).long()
    y[:, 4] = -100
    return Data("steps", *cut(x, y), ("no", "yes"), (5, 6), "made here")


def net(outputs: int = 1, width: int = 12):
    return lambda: nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, outputs))


class Two(nn.Module):
    """A net of a class with two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(6, 9), nn.Linear(9 + 2, 2)

    def forward(self, points: Tensor, marks: Tensor) -> Tensor:
        return self.head(torch.cat([torch.relu(self.first(points)), marks], 1))


def test_numbers_are_compared_by_r2_alone(numbers, tmp_path):
    arms = ["tpsgd-l2", "lm-karnet", "elm", "predsim", peers.zorb(), peers.dladmm()]
    record = compare(numbers, net(), arms, **ONCE)
    assert [r.arm.name for r in record.results] == [
        "backprop", "tpsgd-l2", "lm-karnet", "frozen", "elm",
    ]  # fmt: skip
    assert all(r.counts for r in record.results) and record.numbers
    by_name = {r.arm.name: r for r in record.results}
    model = arm_model(by_name["elm"].arm, numbers)
    assert by_name["elm"].accuracies == [pytest.approx(tpsgd.evaluate(model, numbers.test))]
    assert by_name["elm"].accuracies[0] > 0.7 > by_name["frozen"].accuracies[0]
    text = str(record)
    assert "R²" in text.splitlines()[0] and f"{by_name['elm'].accuracy[0]:.3f}" in text
    reasons = [line.partition(" is left out: ") for line in record.settings["unsuited"]]
    assert [name for name, *_ in reasons] == ["predsim", "zorb", "dladmm"]
    assert all("the labels are numbers" in reason for *_, reason in reasons)
    page = record.write(tmp_path / "report").read_text()
    assert "test R²" in page and "ccurac" not in page + text
    plain = json.loads((tmp_path / "report" / "results.json").read_text())
    summary = plain["arms"][-1]["summary"]
    assert summary["r2"] == by_name["elm"].accuracies[0] and "accuracy" not in summary
    assert all("accuracy" not in restart for restart in plain["arms"][0]["restarts"])


def arm_model(arm: Arm, data: Data) -> nn.Module:
    return arm.train(net(), data.train, **TRAINING).models[0]


def test_classes_have_the_record_that_they_had():
    x = points()
    record = compare(cut(x, (x[:, 0] > 0).long()), net(2), [], **ONCE)
    plain = record.as_dict()
    assert "score" not in plain["settings"] and plain["data"]["classes"] == 2
    assert {"accuracy", "accuracy_std", "seconds", "confusion"} <= set(plain["arms"][0]["summary"])
    assert "accuracy" in plain["arms"][0]["restarts"][0]


def test_whole_numbers_are_numbers_for_a_loss_of_numbers():
    x = points()
    counts = (50 + 9 * x[:, 0]).round().long()
    record = compare(cut(x, counts), net(), ["elm"], **ONCE, loss="mse")
    assert record.numbers and record.results[-1].accuracies[0] > 0.6
    classes = compare(cut(x, (x[:, 0] > 0).long()), net(2), [], **ONCE, loss="mse")
    assert not classes.numbers and classes.data["classes"] == 2
    ones = torch.cat([(x[:60, 0] * 3), (x[60:, 0] > 0).float()])  # all test labels are 0 or 1
    record = compare(cut(x, ones), net(), ["elm"], **ONCE, loss="mse")
    assert record.numbers and record.results[-1].accuracies[0] < 0


def test_rates_of_numbers_are_chosen_by_r2_on_held_out_samples(numbers, tmp_path):
    settings = ONCE | {"lr": "search", "optimizer": tpsgd.sgd}
    whole = compare(numbers, net(), ["tpsgd-l2"], **settings)
    train, held_out = split_training(numbers, 0.2, 0)
    assert (len(train[1]), len(held_out[1])) == (48, 12) and whole.settings["held_out"] == 12
    first = whole.results[0]
    values = {t.values["rate"]: t.accuracies for t in first.trials if t.values["epochs"] == 4}
    chosen = Arm("backprop", None, lr=first.arm.lr)
    model = chosen.train(net(), train, **TRAINING, optimizer=tpsgd.sgd).models[0]
    assert values[first.arm.lr] == [tpsgd.evaluate(model, held_out)] == max(values.values())
    trial = whole.as_dict()["arms"][0]["trials"][0]
    assert "r2s" in trial and "accuracies" not in trial
    compare(numbers, net(), ["tpsgd-l2"], **settings, checkpoint=tmp_path)
    saved = tpsgd.Checkpoint(tmp_path, resume=True)
    again = compare(numbers, net(), ["tpsgd-l2"], **settings, checkpoint=saved)
    assert [r.accuracies for r in again.results] == [r.accuracies for r in whole.results]
    assert again.numbers
    with pytest.raises(TpsgdError, match="another run"):
        compare(numbers, net(), ["tpsgd-l2"], **settings, loss="l1", checkpoint=saved)


def test_a_rate_that_is_worse_than_the_mean_comes_before_one_that_fails():
    def attempt(rate, epochs):
        error = "it diverged" if rate == 1 else None
        return Trial("a", {"rate": rate}, accuracies=[-9.0 * rate], error=error)

    assert [t.values["rate"] for t in halve([1, 2, 3], 1, attempt)[-1]] == [2, 3, 1]


def test_a_search_of_numbers_says_r2(numbers):
    result = tpsgd.search(numbers, net(), "tpsgd-l2", rates=[0.001, 0.1], **ONCE)
    assert "held-out R²" in str(result) and "ccurac" not in str(result)
    plain = result.as_dict()
    assert plain["trials"][0]["r2"] == result.trials[0].accuracy and result.best.values
    assert "accuracy" not in plain["trials"][0]


def test_labels_of_steps_are_compared_over_those_that_have_one(steps):
    arms = ["readout", "predsim", "elm", "lm-karnet", rules.dfa(), peers.zorb()]
    record = compare(steps, net(2), arms, **ONCE, equal="reads")
    assert {r.arm.name for r in record.results if r.counts} == {
        "backprop", "readout", "lm-karnet", "dfa", "frozen", "elm",
    }  # fmt: skip
    assert [s.split()[0] for s in record.settings["unsuited"]] == ["predsim", "zorb"]
    confusion = record.results[-1].confusion
    assert confusion.samples == 30 * 4 and confusion.classes == ("no", "yes")
    assert record.results[-1].accuracies == [confusion.accuracy] and confusion.accuracy > 0.8
    searched = compare(steps, net(2), [], **(ONCE | {"lr": "search"}))
    assert all(r.counts and r.arm.lr for r in searched.results)


def test_models_of_two_inputs(tmp_path):
    x = points()
    y = (x[:, 0] > 0).long()
    inputs = [tuple(each[rows] for each in (x, x[:, :2] ** 2)) for rows in (y < 2, y == 1)]
    data = ((inputs[0], y), (inputs[1], y[y == 1]))
    arms = ["readout", "elm", "backprop-micro", "backprop-checkpointed", peers.dladmm()]
    settings = ONCE | {"equal": "reads", "epochs": 2}
    record = compare(data, Two, arms, **settings)
    failed = {r.arm.name: r.error for r in record.results if not r.counts}
    assert set(failed) == {"dladmm"} and "several inputs" in failed["dladmm"]
    assert record.data["shape"] == [6] and record.write(tmp_path / "report").exists()


def test_what_is_no_data_is_refused(numbers):
    with pytest.raises(TpsgdError, match=r"or \(\(x, y\), \(x_test, y_test\)\), got a tuple"):
        compare(numbers.train, net(), [])
    broken = replace(numbers, train=(numbers.train[0][:5], numbers.train[1]))
    with pytest.raises(TpsgdError, match="5 samples but y has 60 labels"):
        compare(broken, net(), [], restarts=1, epochs=1)
