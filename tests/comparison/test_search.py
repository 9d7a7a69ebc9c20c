"""`search`: what is tried for which arm, that the test set has no part in it, and its mistakes."""

import json
from dataclasses import replace

import pytest
import torch

import tpsgd
from tpsgd import Place, projections, rules
from tpsgd.comparison import search as searching
from tpsgd.comparison import trials
from tpsgd.comparison.arms import arm, scaled
from tpsgd.data import Data
from tpsgd.engine.arm import Arm
from tpsgd.zoo import words as models

pytestmark = pytest.mark.usefixtures("unwatched")


@pytest.fixture
def data() -> Data:
    """Two classes, told apart by the first of six numbers."""
    x = torch.randn(120, 6, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0).long()
    return Data("two", (x[:80], y[:80]), (x[80:], y[80:]), ("0", "1"), (6,), "")


NET = models.factory("mlp:5", (6,), 2)
LEARNED = "readout-learned"


def test_values_are_tried_where_they_matter(data):
    result = tpsgd.search(data, NET, rates=[0.001, 0.05], scales=[3, 12], epochs=3, batch_size=16)
    tried = [(t.arm, *t.values.values()) for t in result.trials]
    assert tried == [
        ("backprop", 0.001), ("backprop", 0.05),
        *((LEARNED, rate, scale) for rate in (0.001, 0.05) for scale in (3, 12)),
        ("frozen", 0.001), ("frozen", 0.05),
    ]  # fmt: skip
    assert result.held_out == 16 and result.best is result.chosen[LEARNED]
    for name, trial in result.chosen.items():
        assert trial.accuracy == max(t.accuracy for t in result.trials if t.arm == name)
    assert [r.arm.name for r in result.test.results] == ["backprop", LEARNED, "frozen"]
    for row in result.test.results:
        settings, values = row.runs[0].settings, result.chosen[row.arm.name].values
        assert settings["lr"] == values["rate"]
        scale = f"calibrated, scale {values.get('scale')}"
        assert "scale" not in values or scale in settings["options"][0]
    assert f"chosen for {LEARNED}" in result.test.settings
    json.dumps(result.as_dict())


READOUT = rules.readout(
    True, projections.binary(), Place.BEFORE, features=64, scale=16.0, calibrate=True
)


@pytest.mark.parametrize(
    "rule",
    [READOUT, replace(READOUT, name="mine", loss=tpsgd.mse), rules.readout(scale=2.0, features=8)],
)
def test_another_scale_changes_nothing_else_of_a_rule(rule):
    again = scaled(Arm("a", rule, lr=0.1), 5.0)
    other = replace(rule, objective=again.rule.objective, options=again.rule.options)
    assert again == Arm("a", other, lr=0.1)
    assert again.rule.objective == replace(rule.objective, scale=5.0)
    assert again.rule.options == rule.options.replace(f"scale {rule.objective.scale:g}", "scale 5")
    back = scaled(again, rule.objective.scale)
    assert back == Arm("a", rule, lr=0.1)


def test_a_search_trains_the_rule_that_it_was_given(data, monkeypatch):
    seen, train = [], searching.Arm.train

    def noted(self, factory, samples, **settings):
        seen.append(self.rule)
        return train(self, factory, samples, **settings)

    monkeypatch.setattr(searching.Arm, "train", noted)
    result = tpsgd.search(data, NET, READOUT, rates=[0.01], epochs=1)
    tried = [t.values["scale"] for t in result.trials if t.arm == READOUT.name]
    assert tried == [16.0, 4.0, 64.0]  # one time, a fourth and four times the rule's own
    trained = [rule for rule in seen if rule and rule.name == READOUT.name]
    assert READOUT in trained and {replace(r.objective, scale=16.0) for r in trained} == {
        READOUT.objective
    }
    options = result.test.results[1].runs[0].settings["options"][0]
    assert options.startswith("binary codes, std 1, at most 64 features, calibrated, scale")
    assert options.endswith("before the activation")


def test_the_test_samples_have_no_part_in_the_choice(data, monkeypatch):
    x, y = data.test
    seen = []
    monkeypatch.setattr(
        trials, "score", lambda model, held, _: seen.append(held) or tpsgd.evaluate(model, held)
    )
    noise = Data(data.name, data.train, (x, 1 - y), data.classes, data.shape, "")
    options = {"rates": [0.001, 0.05], "scales": [12], "epochs": 6, "batch_size": 8}
    one, other = (tpsgd.search(d, NET, **options) for d in (data, noise))
    assert [t.accuracies for t in one.trials] == [t.accuracies for t in other.trials]
    train = {tuple(row) for row in data.train[0].tolist()}
    assert all({tuple(row) for row in held[0].tolist()} <= train for held in seen)
    assert one.test.results[1].accuracies != other.test.results[1].accuracies


def test_a_held_out_sample_is_not_trained_on(data, monkeypatch):
    pairs = []
    train = searching.Arm.train

    def noted(self, factory, samples, **settings):
        pairs.append(samples[0])
        return train(self, factory, samples, **settings)

    monkeypatch.setattr(searching.Arm, "train", noted)
    tpsgd.search(data, NET, rates=[0.01], scales=[12], epochs=1, held_out=0.25)
    assert [len(x) for x in pairs[:3]] == [60, 60, 60] and len(pairs[-1]) == 80


def test_leaks_reach_the_cells_and_the_solved_head_has_no_rate(data):
    x, y = data.train
    steps = Data("s", (x[:, :, None], y), (x[:, :, None], y), ("0", "1"), (6, 1), "")
    asked = []

    def make(leak):
        asked.append(leak)
        return models.factory("rnn:4", (6, 1), 2, leak=leak)()

    result = tpsgd.search(
        steps, make, rates=[0.01], scales=[12], leaks=[0.2, 1.0], ridge_head=True, epochs=1
    )
    frozen = [t.values for t in result.trials if t.arm == "frozen"]
    assert frozen == [{"leak": 0.2}, {"leak": 1.0}] and set(asked) == {0.2, 1.0}
    readout = next(r for r in result.test.results if r.arm.name == LEARNED)
    assert readout.runs[0].blocks[-1].learning == "solved"
    assert readout.runs[0].settings["lr"] == readout.arm.lr == 0.01


def test_a_rate_that_fails_is_a_failed_trial(data):
    grid = {"rates": [0.01, 1000.0], "epochs": 20, "batch_size": 8}
    result = tpsgd.search(data, NET, "tpsgd-l2", **grid, optimizer=tpsgd.sgd)
    errors = [t.error for t in result.trials if t.error]
    assert errors and all(f"failed: {error}" in str(result) for error in errors)
    assert result.best.values["rate"] == 0.01
    with pytest.raises(tpsgd.TpsgdError, match="failed with every setting"):
        broken = rules.tpsgd(lambda y, target: (y * float("nan")).sum())
        tpsgd.search(data, NET, broken, rates=[0.01], epochs=1)


def test_a_trial_without_memory_is_a_failed_trial(data, monkeypatch):
    train = searching.Arm.train

    def fails(self, factory, samples, **settings):
        if self.lr == 0.5:
            raise RuntimeError("CUDA out of\nmemory")
        return train(self, factory, samples, **settings)

    monkeypatch.setattr(searching.Arm, "train", fails)
    result = tpsgd.search(data, NET, "drtp", rates=[0.01, 0.5], epochs=1)
    errors = [t.error for t in result.trials if t.values["rate"] == 0.5]
    assert [e.partition(" (")[0] for e in errors] == ["RuntimeError: CUDA out of memory"] * 3
    assert result.best.values == {"rate": 0.01}


@pytest.mark.parametrize("word", ["frozen", "backprop", "drtp"])
def test_the_best_is_that_of_the_rule_that_was_searched_for(data, word):
    result = tpsgd.search(data, NET, word, rates=[0.01], epochs=1)
    assert result.best.arm == word and result.best is result.chosen[word]


def test_a_search_in_python_goes_on(data, tmp_path, monkeypatch):
    options = {"rates": [0.001, 0.05], "restarts": 2, "epochs": 3, "batch_size": 16}
    whole = tpsgd.search(data, NET, "drtp", **options)
    train, count = searching.Arm.train, iter(range(1, 1000))

    def interrupted(self, factory, samples, **settings):
        if next(count) == 6:
            raise KeyboardInterrupt
        return train(self, factory, samples, **settings)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(searching.Arm, "train", interrupted)
        tpsgd.search(data, NET, "drtp", **options, checkpoint=tmp_path)
    with pytest.raises(tpsgd.TpsgdError, match="holds the trials of a search: go on from it"):
        tpsgd.search(data, NET, "drtp", **options, checkpoint=tmp_path)
    file, saved = tmp_path / "trials.jsonl", tpsgd.Checkpoint(tmp_path, resume=True)
    kept = file.read_text()
    assert len(kept.splitlines()) == 6  # five trials, and what the search is
    with pytest.raises(tpsgd.TpsgdError, match="another run: its data was"):
        other = Data("two", data.test, data.train, data.classes, data.shape, "")
        tpsgd.search(other, NET, "drtp", **options, checkpoint=saved)
    file.write_text(kept + '{"key": ')  # cut off by a kill
    resumed = tpsgd.search(data, NET, "drtp", **options, checkpoint=saved)
    assert [t.accuracies for t in resumed.trials] == [t.accuracies for t in whole.trials]
    for content in (kept + "7\n", kept.replace('"accuracy": 0.', '"accuracy": 1.')):
        file.write_text(content)
        with pytest.raises(tpsgd.TpsgdError, match=r"trials.jsonl was edited or damaged"):
            tpsgd.search(data, NET, "drtp", **options, checkpoint=saved)


def test_the_arm_with_the_best_values_trains_what_was_tested(data):
    fields = {"features": [2, 4]}
    result = tpsgd.search(data, NET, rates=[0.01], scales=[3], fields=fields, epochs=2, seed=4)
    settings = {name: result.test.settings[name] for name in ("epochs", "batch_size")}
    (again,) = result.arm.train(NET, data.train, seed=4, **settings).runs
    tested = next(r for r in result.test.results if r.arm.name == LEARNED)
    assert [e.loss for e in again.history] == [e.loss for e in tested.runs[0].history]
    assert result.arm.lr == 0.01 and "at most" in result.arm.rule.options


def test_of_equal_trials_the_scale_is_the_rules_own(data):
    result = tpsgd.search(data, NET, "readout", rates=[1e-9], epochs=1)  # nothing moves
    trials = {t.values["scale"]: t.accuracy for t in result.trials if t.arm == "readout"}
    assert len({*trials.values()}) == 1 and result.best.values["scale"] == rules.SCALE


def test_scales_of_numbers_are_around_their_own(data):
    (x, y), net = data.train, models.factory("mlp:5", (6,), 1)
    pair = (x, y.float())
    once = {"rates": [0.01], "epochs": 1, "batch_size": 16}
    result = tpsgd.search((pair, pair), net, "readout", loss="mse", **once)
    assert sorted({t.values["scale"] for t in result.trials if "scale" in t.values}) == [
        rules.OF_NUMBERS * factor for factor in (0.25, 1, 4)
    ]


def test_remarks_name_values_at_the_end_of_what_was_tried(data):
    result = tpsgd.search(data, NET, "drtp", rates=[1e-6, 0.03], epochs=3, batch_size=8)
    assert "drtp: 0.03 is the largest rate that was tried" in result.remarks
    assert not tpsgd.search(data, NET, "drtp", rates=[0.03], epochs=1).remarks


def test_without_values_the_defaults_of_the_optimizer_are_tried(data):
    adam = tpsgd.search(data, NET, "drtp", epochs=1)
    assert [t.values["rate"] for t in adam.trials if t.arm == "drtp"] == list(trials.RATES)
    sgd = tpsgd.search(data, NET, "drtp", epochs=1, optimizer=tpsgd.sgd)
    assert [t.values["rate"] for t in sgd.trials if t.arm == "drtp"] == list(trials.SGD_RATES)


def test_the_scale_is_that_of_readouts_alone():
    assert "calibrated, scale 3" in scaled(arm("readout-learned"), 3).rule.options
    with pytest.raises(tpsgd.TpsgdError, match="drtp has no scale"):
        scaled(arm("drtp"), 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": 0.1}, "leave lr out"),
        ({"rule": "drtp", "scales": [1, 2]}, "scales are for a readout, which drtp is not"),
        ({"rates": "0.1"}, "rates must be a list of numbers above 0"),
        ({"rates": [-1]}, "rates must be a list of numbers above 0"),
        ({"held_out": 1.5}, "held_out must be a share between 0 and 1"),
        ({"held_out": 80}, "held_out must be a share between 0 and 1"),
        ({"restarts": 0}, "restarts must be 1 or more"),
        ({"epoch": 1}, "search has no argument 'epoch'"),
    ],
)
def test_mistakes_are_refused(data, options, message):
    with pytest.raises(tpsgd.TpsgdError, match=message):
        tpsgd.search(data, NET, **options)
    with pytest.raises(tpsgd.TpsgdError, match="data must be a data set"):
        tpsgd.search(data.train, NET)
