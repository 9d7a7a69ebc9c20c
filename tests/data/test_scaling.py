"""Tables and series are scaled with statistics of the training samples, which the model keeps."""

from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_wine

import tpsgd
from tpsgd import Padded, data
from tpsgd.data.new_samples import read_new
from tpsgd.data.scaling import statistics
from tpsgd.saved import trained
from tpsgd.saved.scaling import scaled

RNG = np.random.default_rng(0)
SIZES = np.array([1e-3, 1.0, 1e4])
TABLE = RNG.normal(size=(40, 3)) * SIZES + 5 * SIZES
KINDS = np.array(["cat", "dog"])[np.arange(40) % 2]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def table(x=TABLE, labels=KINDS, name="pets.csv"):
    names = [*(f"f{i}" for i in range(x.shape[1])), "label"]
    rows = [[*map(repr, map(float, row)), kind] for row, kind in zip(x, labels, strict=True)]
    Path(name).write_text("\n".join(",".join(map(str, row)) for row in [names, *rows]))
    return name


def series(name="steps.csv", lengths=(3, 5)):
    """Series of different lengths, with values far from 0."""
    lines = ["sequence,step,a,b,label"]
    for i in range(20):
        values = RNG.normal(size=(lengths[i % len(lengths)], 2)) * [7, 0.1] + [1000, -3]
        lines += [f"s{i},{t},{a},{b},{i % 2}" for t, (a, b) in enumerate(values)]
    Path(name).write_text("\n".join(lines))
    return name


def test_a_table_is_standardised_with_its_training_samples():
    loaded, raw = data.load(table()), data.load(table(), scale="none")
    x = loaded.train[0].double()
    assert x.mean(0).abs().max() < 1e-4 and (x.std(0, correction=0) - 1).abs().max() < 1e-4
    mean, deviation = raw.train[0].mean(0), raw.train[0].std(0, correction=0)
    torch.testing.assert_close(loaded.test[0], (raw.test[0] - mean) / deviation, atol=1e-3, rtol=0)
    assert loaded.note.endswith("features standardised: mean 0 and deviation 1 in the training "
                                "samples")  # fmt: skip
    assert raw.note.endswith("features unscaled") and "scaling" not in raw.inputs
    assert loaded.inputs["scaling"]["method"] == "standard"


def test_the_smallest_and_the_largest_training_value_become_0_and_1():
    x = data.load(table(), scale="minmax").train[0]
    assert x.amin(0).tolist() == [0, 0, 0] and x.amax(0).tolist() == [1, 1, 1]


@pytest.mark.parametrize("scale", ["standard", "minmax"])
def test_a_constant_feature_becomes_0_and_none_is_divided_by_0(scale):
    x = TABLE.copy()
    x[:, 1] = 0.1
    loaded = data.load(table(x), scale=scale)
    assert (loaded.train[0][:, 1] == 0).all() and (loaded.test[0][:, 1] == 0).all()
    assert loaded.inputs["scaling"]["scale"][1] == 1


def test_the_test_samples_and_those_left_out_change_nothing():
    spoilt, kept = TABLE.copy(), data.load(table(), max_train=10, seed=3)
    raw = data.load(table(), scale="none", max_train=10, seed=3)
    used = {tuple(row) for row in raw.train[0].tolist()}
    for row, numbers in enumerate(TABLE.astype(np.float32).tolist()):
        if tuple(numbers) not in used:
            spoilt[row] *= 1000
    again = data.load(table(spoilt), max_train=10, seed=3)
    assert again.inputs == kept.inputs and torch.equal(again.train[0], kept.train[0])


def test_series_are_scaled_over_all_steps_and_padding_stays_0():
    x = data.load(series()).train[0]
    steps = torch.cat([row[:n] for row, n in zip(x.data, x.lengths, strict=True)]).double()
    assert steps.mean(0).abs().max() < 1e-4 and (steps.std(0, correction=0) - 1).abs().max() < 1e-4
    assert all(not row[n:].any() for row, n in zip(x.data, x.lengths, strict=True))
    whole = data.load(series(lengths=(4,))).train[0].double()
    assert whole.mean((0, 1)).abs().max() < 1e-4


@pytest.mark.parametrize("make", [table, series])
def test_new_samples_are_scaled_as_the_training_samples_bit_for_bit(make):
    file = make()
    loaded = data.load(file)
    new = read_new(file, inputs=loaded.inputs, classes=loaded.classes)
    rows = new.x.data if isinstance(new.x, Padded) else new.x
    trained_on = loaded.train[0].data if isinstance(new.x, Padded) else loaded.train[0]
    assert {tuple(r.flatten().tolist()) for r in trained_on} <= {
        tuple(r.flatten().tolist()) for r in rows
    }


def test_scaled_samples_on_disk_are_those_in_memory(folder):
    for scale in (None, "none", "minmax"):
        kept = data.load(table(), on_disk=folder / "kept", scale=scale)
        whole = data.load(table(), scale=scale)
        assert torch.equal(kept.train[0], whole.train[0]) and kept.inputs == whole.inputs
        assert torch.equal(kept.test[0], whole.test[0])
    assert len(list((folder / "kept").iterdir())) == 3


def test_arrays_are_scaled_only_if_that_is_asked_for():
    np.savez("own.npz", x=TABLE, y=KINDS)
    assert data.load("own.npz").train[0].max() > 1000
    assert data.load("own.npz").note.endswith("features unscaled")
    assert data.load("own.npz", scale="standard").train[0].abs().max() < 6


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": RNG.normal(size=(20, 3, 8, 8))}, r"samples of shape \(3, 8, 8\); only tables"),
        ({"x": np.ones((20, 8), np.uint8)}, "bytes, which are divided by 255; only tables"),
        ({"tokens": np.arange(40).reshape(20, 2)}, "has tokens; only tables and series"),
    ],
)
def test_what_is_no_table_is_not_scaled(refused, arrays, message):
    np.savez("own.npz", **arrays, y=np.arange(20) % 2)
    refused("own.npz", message, scale="standard")


def test_an_unknown_word(refused):
    refused(table(), "unknown scale 'standart': did you mean 'standard'", scale="standart")


def test_statistics_do_not_depend_on_the_pieces():
    x = RNG.normal(size=(500, 4)) * 3 + 1e4
    whole = statistics("standard", [x])
    pieces = statistics("standard", np.array_split(x, 7))
    np.testing.assert_allclose(whole["shift"], pieces["shift"], rtol=1e-6)
    np.testing.assert_allclose(whole["scale"], x.std(0), rtol=1e-5)
    np.testing.assert_allclose(pieces["scale"], x.std(0), rtol=1e-5)
    assert abs(scaled(x.astype("float32"), pieces).mean()) < 1e-2


def places(n=400):
    """Columns so far from 0 that float32 has none of the digits that tell their classes apart."""
    labels = np.arange(n) % 3
    x = np.stack([525_200_000 + 20 * labels, -1.7e12 + 1000 * labels], 1).astype(float)
    return x + RNG.uniform(-4, 4, x.shape).round(3), labels


def as_pairs(*sets):
    return sorted(
        (int(label), *row) for x, y in sets for row, label in zip(x.tolist(), y, strict=True)
    )


def test_a_column_far_from_0_keeps_its_digits():
    x, labels = places()
    loaded = data.load(table(x, labels))
    scaling = loaded.inputs["scaling"]
    expected = (x - scaling["shift"]) / scaling["scale"]
    sets = as_pairs(loaded.train, loaded.test)
    np.testing.assert_allclose(sets, as_pairs((expected, labels)), atol=1e-6)
    new = read_new(table(x, labels), inputs=loaded.inputs, classes=loaded.classes)
    np.testing.assert_allclose(new.x, expected, atol=1e-6)
    saved = tpsgd.Trained(torch.nn.Linear(2, 3), tpsgd.Run("readout", 0, {}), (), loaded.inputs)
    assert torch.equal(saved.scaled(x), new.x)
    np.savez("own.npz", x=x, y=labels)
    arrays = data.load("own.npz", scale="standard")
    np.testing.assert_allclose(as_pairs(arrays.train, arrays.test), sets, atol=1e-6)
    assert arrays.train[0].dtype == loaded.train[0].dtype == new.x.dtype == torch.float32


def test_series_and_filled_cells_far_from_0_keep_their_digits():
    x, labels = places(60)
    lines = ["sequence,step,a,b,label"]
    for i, (row, kind) in enumerate(zip(x, labels, strict=True)):
        lines += [f"s{i:02},{t},{row[0]},{row[1] + t},{kind}" for t in range(2 + i % 2)]
    Path("far.csv").write_text("\n".join(lines))
    loaded = data.load("far.csv")
    new = read_new("far.csv", inputs=loaded.inputs, classes=loaded.classes)
    scaling = loaded.inputs["scaling"]
    expected = (x - scaling["shift"]) / scaling["scale"]
    assert isinstance(new.x, Padded) and new.x.dtype == loaded.train[0].dtype == torch.float32
    np.testing.assert_allclose(new.x.data[:, 0], expected, atol=1e-5)
    Path("blank.csv").write_text(Path(table(x, labels)).read_text() + "\n,0,0")
    filled = data.load("blank.csv", impute="mean")
    everything = torch.cat([filled.train[0], filled.test[0]])[:, 0]
    assert len(everything.unique()) > 55


def test_a_table_of_features_of_different_sizes_is_learned():
    """Wine: about 65 % as stored, 95 % and more standardised."""
    x, y = load_wine(return_X_y=True)
    accuracies = {}
    for scale in ("none", None):
        wine = data.load(table(x, y.astype(str), "wine.csv"), scale=scale)
        net = tpsgd.zoo.words.factory("mlp:32", wine.shape, 3)
        torch.manual_seed(0)
        run = tpsgd.fit(net(), wine.train, epochs=20, batch_size=16)
        accuracies[scale] = tpsgd.evaluate(run.model, wine.test)
    assert accuracies[None] > 0.94 > accuracies["none"] + 0.1
    run.save("model", classes=wine.classes, inputs=wine.inputs)
    assert trained.read("model")[1]["inputs"]["scaling"]["method"] == "standard"
