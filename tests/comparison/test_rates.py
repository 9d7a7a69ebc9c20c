"""`lr="search"`: which rates are tried for whom, on which samples; what resumed runs repeat."""

import json
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

import tpsgd
from tpsgd.comparison import trials as trials_module
from tpsgd.comparison.arms import arm, with_ridge
from tpsgd.comparison.compare import compare
from tpsgd.comparison.equal import Allowance
from tpsgd.comparison.report.table import remarks
from tpsgd.comparison.session import epochs_of, has_rate
from tpsgd.comparison.trials import RATES, SGD_RATES, Trial, best_of_arm, halve
from tpsgd.data import Data
from tpsgd.engine.arm import Arm
from tpsgd.engine.record import BlockInfo, Run
from tpsgd.engine.settings import Settings
from tpsgd.zoo import words as models

NET = models.factory("mlp:5", (6,), 2)
SEARCH: dict[str, Any] = {"lr": "search", "restarts": 1, "epochs": 5, "batch_size": 16}


@pytest.fixture
def data() -> Data:
    """Two classes, told apart by the first of six numbers."""
    x = torch.randn(120, 6, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0).long()
    return Data("two", (x[:80], y[:80]), (x[80:], y[80:]), ("0", "1"), (6,), "")


@pytest.fixture
def trained(monkeypatch) -> list[tuple]:
    """The name, the rate, the samples and the epochs of every training run."""
    runs, train = [], Arm.train

    def noted(self, factory, samples, **settings):
        runs.append((self.name, self.lr, len(samples[1]), settings["epochs"]))
        return train(self, factory, samples, **settings)

    monkeypatch.setattr(Arm, "train", noted)
    return runs


@pytest.mark.parametrize(
    ("accuracies", "epochs", "rounds"),
    [
        ([0.1, 0.5, 0.4, 0.3, 0.2], 10, [(2, [2, 3, 4, 5, 1]), (10, [2, 3])]),
        ([0.5, 0.5, 0.5, 0.4, 0.5], 5, [(1, [1, 2, 3, 5, 4]), (5, [1, 2])]),  # ties: small rates
        ([0.2, 0.1, None, None, None], 20, [(4, [1, 2, 3, 4, 5]), (20, [1, 2])]),
        ([0.0, None, 0.2, 0.1, None], 20, [(4, [3, 4, 1, 2, 5]), (20, [3, 4])]),
        ([0.1, 0.5, 0.4, 0.3, 0.2], 1, [(1, [2, 3, 4, 5, 1])]),  # a second round would repeat it
        ([0.5, 0.4, 0.3, 0.2, 0.1], [5, 0], [([1, 0], [1, 2, 3, 4, 5]), ([5, 0], [1, 2])]),
    ],
)  # fmt: skip
def test_the_best_rates_are_tried_for_all_epochs(accuracies, epochs, rounds):
    def attempt(rate, epochs):
        accuracy = accuracies[rate - 1]
        error = "it diverged" if accuracy is None else None
        values = {"rate": rate, "epochs": epochs}
        return Trial("a", values, accuracies=[accuracy or 0.0], error=error)

    tried = halve([1, 2, 3, 4, 5], epochs, attempt)
    assert rounds == [(r[0].values["epochs"], [t.values["rate"] for t in r]) for r in tried]
    assert best_of_arm(tried[-1]) is tried[-1][0]


CLOSED, SOLVED, FROZEN = "closed form", "solved", "frozen"
MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


@pytest.mark.parametrize(
    ("searched", "learning", "expected"),
    [
        (arm("backprop"), [CLOSED, CLOSED], True),
        (arm("readout"), ["autograd", CLOSED], True),
        (arm("frozen"), [FROZEN, CLOSED], True),
        (arm("frozen"), [FROZEN, SOLVED], False),
        (arm("elm"), [FROZEN, SOLVED], False),
        (arm("lm-karnet"), [SOLVED, SOLVED], False),
        (arm("zorb"), [CLOSED], False),
        (arm("random"), [FROZEN, FROZEN], False),
        (with_ridge(arm("readout"), NET, {}), [CLOSED, SOLVED], True),
        (with_ridge(arm("readout"), NET, {"lr": "search"}), [CLOSED, SOLVED], True),
        (with_ridge(arm("readout"), NET, {"lr": 0.1}), [CLOSED, SOLVED], False),
        (Arm("slow", None, lr=1e-4), [CLOSED], False),
        (Arm("sgd", None, optimizer=tpsgd.sgd), [CLOSED], True),
        (Arm("momentum", None, optimizer=MOMENTUM), [CLOSED], False),
        (arm("backprop"), None, False),  # it failed on its first batch
    ],
)
def test_rates_are_searched_where_blocks_follow_gradients(searched, learning, expected):
    blocks = [BlockInfo("Linear", "", 1, word) for word in learning or []]
    run = None if learning is None else Run(searched.name, 0, {}, blocks)
    assert has_rate(searched, run) is expected


@pytest.mark.parametrize(
    ("own", "allowance", "expected"),
    [
        (None, Allowance(), 7),
        (None, Allowance(14), 14),  # equal reads
        (None, Allowance([3, 4]), [3, 4]),
        (None, Allowance(700, 1.5), 7),  # equal seconds: 700 are many more than will fit
        (3, Allowance(), 3),
    ],
)
def test_rounds_are_shares_of_an_arms_own_epochs(own, allowance, expected):
    assert epochs_of(Arm("a", None, epochs=own), allowance, Settings(epochs=7)) == expected


def test_every_arm_has_the_same_search_and_then_trains_on_all_samples(data, trained, tmp_path):
    record = compare(data, NET, ["readout", "zorb", "elm"], **SEARCH)
    for result in record.results:
        name, rate = result.arm.name, result.arm.lr
        of_arm = [run[1:] for run in trained if run[0] == name]
        assert of_arm[0] == (None, 16, 1) and of_arm[-1] == (rate, 80, 5)  # warm-up and final run
        if name in ("zorb", "elm"):
            assert rate is None and len(of_arm) == 2 and not result.trials
            continue
        assert of_arm[1:6] == [(r, 64, 1) for r in RATES]
        assert [run[1:] for run in of_arm[6:-1]] == [(64, 5)] * 2 and len(of_arm) == 9
        assert (
            result.runs[0].settings["lr"] == rate == best_of_arm(result.trials[5:]).values["rate"]
        )
    table = {line.split()[0]: line.split()[3] for line in str(record).splitlines()[1:]}
    rates = {r.arm.name: "–" if r.arm.lr is None else f"{r.arm.lr:g}" for r in record.results}
    assert table == rates and "accuracy %  n  rate" in str(record)
    line = remarks(record)[0]
    assert line.startswith("rates: chosen on 16 held-out training samples by 21 short training")
    values = json.loads(json.dumps(record.as_dict()))
    assert {a["name"]: a["lr"] for a in values["arms"]} == {
        r.arm.name: r.arm.lr for r in record.results
    }
    assert [len(a["trials"]) for a in values["arms"]] == [7, 7, 0, 7, 0]
    page = record.write(tmp_path).read_text()
    assert "<th>learning rate</th>" in page and f"<td>{rates['readout']}</td>" in page
    assert line in page


def test_arms_that_only_save_memory_share_a_search(data, trained):
    ours = arm("readout")
    small = replace(ours, name="readout-micro", remark="in micro-batches", micro_batch=4)
    other = arm(tpsgd.rules.readout(scale=2.0))
    arms = ["backprop", "backprop-checkpointed", "backprop-micro", ours, small]
    record = compare(data, NET, [*arms, replace(other, name="wide")], **SEARCH)
    results = {result.arm.name: result for result in record.results}
    searched = {"backprop", "readout", "wide", "frozen"}
    assert {name for name, result in results.items() if result.trials} == searched
    for name, twin in (
        ("backprop-checkpointed", "backprop"),
        ("backprop-micro", "backprop"),
        ("readout-micro", "readout"),
    ):
        assert results[name].runs[0].settings["lr"] == results[twin].arm.lr
        assert len([run for run in trained if run[0] == name]) == 2  # the warm-up, the run


def test_the_test_samples_have_no_part_in_the_choice(data, monkeypatch):
    seen, score = [], trials_module.score
    monkeypatch.setattr(
        trials_module,
        "score",
        lambda model, held, target: (seen.append(held), score(model, held, target))[1],
    )
    other = replace(data, test=(data.test[0], 1 - data.test[1]))
    one, two = (compare(d, NET, ["drtp"], **SEARCH, optimizer=tpsgd.sgd) for d in (data, other))
    assert {t.values["rate"] for t in one.results[0].trials} == set(SGD_RATES)
    for a, b in zip(one.results, two.results, strict=True):
        assert a.arm.lr == b.arm.lr and a.accuracies != b.accuracies
        assert [t.accuracies for t in a.trials] == [t.accuracies for t in b.trials]
    train = {tuple(row) for row in data.train[0].tolist()}
    assert seen and all({tuple(row) for row in held[0].tolist()} <= train for held in seen)


@pytest.mark.parametrize("stop", [7, 26])  # in backprop's search, in a final run
def test_a_resumed_comparison_repeats_no_finished_trial(data, trained, tmp_path, monkeypatch, stop):
    settings = SEARCH | {"epochs": 2}
    whole = compare(data, NET, ["drtp"], **settings)
    assert len(trained) == 3 + 3 * 7 + 3
    noted, count = Arm.train, iter(range(1, 1000))

    def interrupted(self, factory, samples, **settings):
        if next(count) == stop:
            raise KeyboardInterrupt
        return noted(self, factory, samples, **settings)

    with monkeypatch.context() as patch:
        patch.setattr(Arm, "train", interrupted)
        assert compare(data, NET, ["drtp"], **settings, checkpoint=tmp_path).interrupted
    trained.clear()
    saved = tpsgd.Checkpoint(tmp_path, resume=True)
    again = compare(data, NET, ["drtp"], **settings, checkpoint=saved)
    assert len(trained) == 3 + 3 * 7 + 3 - (stop - 1 - 3)  # warm-up runs are not kept
    for a, b in zip(whole.results, again.results, strict=True):
        assert a.arm.lr == b.arm.lr and a.accuracies == b.accuracies


def test_a_rule_that_is_added_later_is_searched_alone(data, trained, tmp_path):
    settings = SEARCH | {"epochs": 1, "checkpoint": tpsgd.Checkpoint(tmp_path, resume=True)}
    compare(data, NET, [], **settings)
    trained.clear()
    assert len(compare(data, NET, ["drtp"], **settings).results) == 3
    assert [name for name, *_ in trained[3:]] == ["drtp"] * 6  # five rates, then the final run


def test_an_arm_that_fails_with_every_rate_has_its_error_and_the_others_go_on(data, monkeypatch):
    train = Arm.train

    def fails(self, factory, samples, **settings):
        if self.name == "drtp" and self.lr is not None:
            raise RuntimeError("no memory left")
        return train(self, factory, samples, **settings)

    monkeypatch.setattr(Arm, "train", fails)
    record = compare(data, NET, ["drtp"], **SEARCH)
    error = str(record.results[1].error)
    assert error.startswith("drtp failed with every setting: RuntimeError: no memory left (")
    assert [r.error for r in record.results] == [None, error, None]
    assert f"drtp failed: {error}" in str(record)


def test_rates_of_several_labels_per_sample_are_searched(data):
    x, _ = data.train
    several = replace(data, train=(x, (x[:, :2] > 0).float()), test=(x, (x[:, :2] > 0).float()))
    record = compare(several, NET, [], **SEARCH, loss=tpsgd.bce)
    assert all(r.counts and r.arm.lr for r in record.results)
