"""The benchmark of heads that learn in one pass: its recursion, its orders, its figures."""

import json
import sys
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))

import edge_one_pass as one_pass  # noqa: E402

from tpsgd_export.heads import reference  # noqa: E402
from tpsgd_export.heads.recipe import HeadRecipe  # noqa: E402
from tpsgd_export.to_c.compiled import compiler  # noqa: E402

RESULTS = ROOT / "results" / "edge_one_pass.json"
RECIPE = HeadRecipe(6, 12, 10, scale=0.4, forgetting=0.95, bound=1e6)


@pytest.fixture(scope="module")
def record():
    return json.loads(RESULTS.read_text())


def of(record, section: str, arm: str) -> dict:
    (row,) = [row for row in record[section] if row["arm"] == arm]
    return row


@pytest.mark.parametrize("how", ["errors", "not"])
def test_the_recursion_in_float64_is_that_of_the_reference(how):
    rng = np.random.default_rng(0)
    x, labels = rng.normal(size=(80, 6)), rng.integers(0, 10, 80)
    learner = one_pass.InNumpy(RECIPE, how)
    learner.learn_all(x, labels)
    h = reference.features(RECIPE, x)
    exact = reference.recursive(RECIPE, h, labels)[0]
    if how == "not":
        exact = reference.ridge(h, labels, RECIPE, np.full(80, RECIPE.forgetting))
    np.testing.assert_allclose(learner.weights, exact, atol=1e-9)


def test_a_class_comes_after_another_and_no_sample_is_lost():
    train, _ = one_pass.digits()
    x, y = one_pass.by_class(train, 3)
    assert (y.diff() >= 0).all() and len(y) == len(train[1])
    assert torch.equal(x.sum(0), train[0].sum(0))
    orders = [one_pass.shuffled(train, seed)[1] for seed in (0, 0, 1)]
    assert torch.equal(orders[0], orders[1]) and not torch.equal(orders[0], orders[2])


def test_factors_hold_where_a_full_matrix_in_float32_does_not(record):
    for width in (64, 128):
        rows = {row["arm"]: row for row in record["unscaled"] if row["width"] == width}
        ours, full = rows["factors in C, float32"], rows["full matrix, float32"]
        assert ours["accuracy"] > 0.9 > 0.5 > full["accuracy"] and full["skipped"] > 1000
        exact = rows["full matrix, float64"]
        assert ours["accuracy"] == pytest.approx(exact["accuracy"], abs=0.01)


@pytest.mark.full
@pytest.mark.skipif(compiler() is None, reason="no C compiler")
def test_learners_learn_a_few_digits():
    train, test = one_pass.digits()
    few, some = (train[0][:150], train[1][:150]), (test[0][:60], test[1][:60])
    assert one_pass.head(64)(few, some, 1.0, 0) > 0.6
    assert one_pass.steps(one_pass.rules.frozen(), 64, 32, 10)(few, some, 1e-30, 0) < 0.4
    assert one_pass.backprop(64, 32, 10)(few, some, 0.1, 0) > 0.4


def test_goals_that_the_page_claims_are_those_of_the_file(record):
    def mean(section, arm, key="accuracies"):
        return fmean(of(record, section, arm)[key])

    small, large = "head, 64 random features", "head, 128 random features"
    assert mean("digits", large) >= 0.965 and of(record, "digits", large)["bytes"] <= 40_000
    assert mean("digits", small) >= 0.92 and of(record, "digits", small)["bytes"] <= 12_000
    assert mean("in_order", large) >= 0.96
    controls = [row for row in record["in_order"] if not row["arm"].startswith("head")]
    assert len(controls) == 5 and all(fmean(row["accuracies"]) < 0.5 for row in controls)
    linear = mean("digits", "head on the pixels")
    assert abs(linear - mean("digits", small)) < 0.02 and mean("digits", large) > linear + 0.02
    frozen = of(record, "digits", "frozen, 64-128-10")
    assert abs(fmean(frozen["accuracies"]) - mean("digits", small)) < 0.01
    assert frozen["bytes"] < 0.5 * of(record, "digits", small)["bytes"]
    boards = set()
    for row in record["boards"]:
        assert row["same_bits_as_this_machine"]
        boards.add(row["board"])
        if (row["board"], row["optimise"]) == ("Cortex-M4F", "-Os"):
            assert row["total_bytes"] <= (12_000 if "64" in row["arm"] else 40_000)
    assert boards == set(one_pass.emulated.BOARDS)


def test_what_the_page_says_of_forgetting_is_in_the_file(record):
    rows = {row["arm"]: row for row in record["stability"] if row["width"] == 128}
    ours, exact = rows["forgetting by the error"], rows["forgetting by the error, float64"]
    capped = rows["forgetting with a cap on the trace, float64"]
    free, none = rows["forgetting without a bound, float64"], rows["nothing is forgotten"]
    assert ours["finite"] and none["finite"]
    for key in ("many", "one_class", "other_labels"):
        assert ours[key] == pytest.approx(exact[key], abs=0.01)
    assert min(ours["one_class"], ours["other_labels"]) > 0.9
    assert free["one_class"] < 0.9 < free["other_labels"]
    assert none["other_labels"] < 0.5 and capped["other_labels"] < 0.5


@pytest.mark.full
@pytest.mark.skipif(compiler() is None, reason="no C compiler")
def test_features_of_photos_are_learned_in_any_order(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    means = np.abs(rng.normal(size=(10, 512)))
    sets = {}
    for name, count in {"train": 80, "test": 40}.items():
        noise = 2 * np.abs(rng.normal(size=(10 * count, 512)))
        sets[name] = (np.repeat(means, count, 0) + noise).astype(np.float32)
    np.savez(tmp_path / "features.npz", **sets)
    monkeypatch.setattr(one_pass, "SEEDS", 2)
    monkeypatch.setattr(one_pass, "SEARCH_SEEDS", 1)
    few = {name: (learn, values[4:5]) for name, (learn, values) in one_pass.PHOTOS.items()}
    monkeypatch.setattr(one_pass, "PHOTOS", few)
    rows = {row["arm"]: row for row in one_pass.photos(tmp_path / "features.npz")}
    head, steps = rows["head, 256 random features"], rows["steps of a linear layer, 512-10"]
    assert min(head["accuracies"]) > 0.95
    assert head["in_order"] == pytest.approx(head["accuracies"], abs=0.01)
    assert min(steps["accuracies"]) > 0.95 > 0.3 > max(steps["in_order"])
    monkeypatch.delenv("TPSGD_DATA", raising=False)
    assert one_pass.photos(tmp_path / "absent.npz") is None
