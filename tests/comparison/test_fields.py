"""A search over fields of a rule, lengths and rules of a file; wrong fields are refused."""

from dataclasses import replace
from functools import partial

import pytest

import tpsgd
from tpsgd import Place, Rule, objectives, rules
from tpsgd.comparison.arms import arm
from tpsgd.comparison.fields import rule_of_file, with_fields
from tpsgd.engine.arm import Arm
from tpsgd.projections import binary, normal
from tpsgd.zoo import words

pytestmark = pytest.mark.usefixtures("unwatched")
FILE = """
from dataclasses import replace
from tpsgd import rules

def lls(temperature=1.0):
    return replace(rules.lls(temperature), name="my-lls")

def number():
    return 3
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "my_rules.py"
    path.write_text(FILE)
    return f"{path}:lls"


@pytest.fixture(scope="module")
def digits():
    return tpsgd.data.load("digits", max_train=120)


NET = words.factory("mlp:8", (1, 8, 8), 10)


def test_fields_of_a_value_are_replaced_and_nothing_else():
    rule = rules.readout(projection=binary(), at=Place.BEFORE)
    changed = with_fields(Arm("a", rule, lr=0.1), {"features": 9, "loss": tpsgd.mse})
    objective = replace(rule.objective, features=9)
    options = "binary codes, std 1, at most 9 features, calibrated, scale 12, or 3 for numbers"
    expected = replace(rule, objective=objective, loss=tpsgd.mse, options=objective.__str__())
    assert changed == Arm("a", expected, lr=0.1) and changed.rule.options.startswith(options[:44])


def test_arguments_of_a_function_make_the_rule_anew():
    make = partial(rules.readout, True)
    changed = with_fields(Arm("a", make()), {"features": 9, "projection": normal(2.0)}, make)
    assert changed.rule == rules.readout(True, features=9, projection=normal(2.0))
    both = with_fields(Arm("a", make()), {"features": 9, "loss": tpsgd.mse}, make)  # of the rule
    assert both.rule == replace(rules.readout(True, features=9), loss=tpsgd.mse)


def test_words_stand_for_places_projections_and_losses():
    arm = Arm("a", rules.readout())
    words = {"at": "before", "projection": "binary", "loss": "mse"}
    expected = replace(rules.readout(at=Place.BEFORE, projection=binary()), loss=tpsgd.mse)
    assert with_fields(arm, words, rules.readout).rule == expected
    of_value = with_fields(arm, {"at": "end", "loss": "bce"}).rule
    assert of_value and of_value.at is Place.END and of_value.loss is tpsgd.losses.bce


def test_a_rule_of_a_file_is_a_word_everywhere(file, digits):
    assert arm(file).name == "my-lls" and arm(file).rule.options == rules.lls().options
    assert rule_of_file(file, temperature=2.0).options == rules.lls(2.0).options
    record = tpsgd.compare(digits, NET, [file], restarts=1, epochs=1, batch_size=64)
    lls = tpsgd.compare(digits, NET, ["lls"], restarts=1, epochs=1, batch_size=64)
    assert record.results[1].arm.name == "my-lls" and record.results[1].counts
    assert record.results[1].accuracies == lls.results[1].accuracies
    with pytest.raises(tpsgd.TpsgdError, match=r"number must return a tpsgd.Rule, got a int"):
        arm(file.replace("lls", "number"))
    with pytest.raises(tpsgd.TpsgdError, match="there is no file"):
        arm("nowhere.py:lls")


def test_a_search_tries_fields_of_a_rule_and_lengths_of_every_arm(file, digits):
    result = tpsgd.search(
        digits, NET, file, rates=[0.01], fields={"temperature": [0.1, 1.0]},
        epochs=[1, 8], batch_size=[16],
    )  # fmt: skip
    tried = [(t.arm, *t.values.values()) for t in result.trials]
    lengths, mine = [(0.01, 1, 16), (0.01, 8, 16)], []
    for each in lengths:
        mine += [("my-lls", *each, 0.1), ("my-lls", *each, 1.0)]
    controls = [[(name, *each) for each in lengths] for name in ("backprop", "frozen")]
    assert tried == [*controls[0], *mine, *controls[1]]
    best, tested = result.best.values, result.test.results[1]
    trained = Arm("x", rules.lls(best["temperature"]), lr=0.01).train(
        NET, digits.train, epochs=best["epochs"], batch_size=16
    )
    assert tested.accuracies == trained.evaluate(digits.test)
    for row in result.test.results:
        assert row.runs[0].settings["batch_size"] == 16
        assert len(row.runs[0].history) % result.chosen[row.arm.name].values["epochs"] == 0
    assert f"epochs {best['epochs']}" in str(result.best)
    assert not any("batch_size" in line for line in result.remarks)  # a single value was tried


def test_a_function_may_take_values_that_are_no_numbers(digits):
    def mine(at: Place = Place.AFTER, loss=objectives.l2) -> Rule:
        return replace(rules.tpsgd_l2(at=at), name="mine")

    result = tpsgd.search(digits, NET, mine, rates=[0.01], fields={"at": [*Place]}, epochs=1)
    assert [t.values["at"] for t in result.trials if t.arm == "mine"] == [p.name for p in Place]
    at = result.test.results[1].runs[0].settings["options"][0]
    assert at.endswith(Place[result.best.values["at"]].value)


def test_values_of_one_name_are_all_tried(digits):
    codes = [normal(std) for std in (0.01, 1.0, 100.0)]
    result = tpsgd.search(
        digits, NET, rules.tpsgd_l2, rates=[0.01], fields={"projection": codes}, epochs=4
    )
    tried = [t.values["projection"] for t in result.trials if t.arm == "tpsgd-l2"]
    assert tried == ["normal", "normal 2", "normal 3"]
    assert len({t.accuracy for t in result.trials if t.arm == "tpsgd-l2"}) > 1


def test_a_field_may_have_the_name_of_a_list_that_is_empty(digits):
    result = tpsgd.search(
        digits, NET, rules.readout, rates=[0.01], scales=(), fields={"scale": [2.0, 5.0]},
        epochs=1,
    )  # fmt: skip
    of_rule = [t for t in result.trials if t.arm == "readout"]
    assert [t.values["scale"] for t in of_rule] == [2.0, 5.0]
    best = result.test.results[1].runs[0].settings["options"][0]
    assert f"scale {result.best.values['scale']:g}" in best


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fields": {"feature": [1]}}, "readout has no field 'feature': did you mean 'features'"),
        ({"rule": "backprop", "fields": {"at": [1]}}, "backprop does not learn by a rule"),
        ({"fields": {"features": 3}}, "the field features needs a list of values to try, got 3"),
        ({"fields": {"epochs": [1]}, "epochs": [1, 2]}, "epochs has a list of its own"),
        ({"fields": {"rate": [1]}}, "rate has a list of its own"),
        ({"epochs": [0.5]}, "epochs must be a list of whole numbers above 0"),
        ({"fields": {"features": [-1]}}, "features"),
        ({"fields": {"at": ["inside"]}}, "at must be one of before, after, end, got 'inside'"),
        ({"fields": {"projection": ["x"]}}, "projection must be one of normal, uniform, binary"),
        ({"fields": {"at": [3]}}, "at must be a tpsgd.Place"),
        ({"fields": ["features"]}, "fields must be a dict of lists"),
        ({"epochs": []}, "epochs needs a value to try"),
        ({"rule": lambda: 3}, "must return one, got a int"),
        ({"rule": lambda scale: rules.readout(scale)}, "a function that makes one: .*scale"),
    ],
)
def test_mistakes_are_refused_before_anything_is_trained(options, message, digits, monkeypatch):
    monkeypatch.setattr(Arm, "train", None)
    with pytest.raises(tpsgd.TpsgdError, match=message):
        tpsgd.search(digits, NET, **({"rule": "readout"} | options))


def test_a_rule_looks_at_a_place():
    with pytest.raises(tpsgd.TpsgdError, match=r"at must be a tpsgd.Place.*got 'after'"):
        rules.readout(at="after")  # type: ignore[arg-type]
