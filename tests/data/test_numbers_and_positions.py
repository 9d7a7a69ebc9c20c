"""Labels that are numbers to predict, and classes of every step or pixel."""

import numpy as np
import pytest
import torch

import tpsgd
from tpsgd import data
from tpsgd.data import read_new

HOMES = "rooms,age,price,area"


def homes(file, change=lambda i, row: row, n=40):
    """A table of four columns, whose last two can be computed from the first two."""
    rng = np.random.default_rng(0)
    rows = [[r, a, 100 * r + a + 0.5, 10 * r] for r, a in rng.normal(5, 2, (n, 2)).round(3)]
    lines = [",".join(map(str, change(i, row))) for i, row in enumerate(rows)]
    file.write_text("\n".join([HOMES, *lines]))
    return str(file)


def test_one_column_of_numbers(tmp_path):
    homes_data = data.load(
        homes(tmp_path / "homes.csv"), task="regression", label="price", drop="area"
    )
    (x, y), (_, y_test) = homes_data.train, homes_data.test
    assert (y.dtype, y.shape, y_test.shape) == (torch.float32, (32,), (8,))
    assert homes_data.classes == () and homes_data.targets == ("price",)
    scaling = homes_data.inputs["scaling"]
    rooms = x[:, 0].double() * scaling["scale"][0] + scaling["shift"][0]
    age = x[:, 1].double() * scaling["scale"][1] + scaling["shift"][1]
    assert torch.allclose(100 * rooms + age + 0.5, y.double(), rtol=1e-5)
    assert "held out as test, at random" in homes_data.note


@pytest.mark.parametrize("label", ["price,area", "price, area", ["price", "area"]])
def test_several_columns_of_numbers(tmp_path, label):
    loaded = data.load(homes(tmp_path / "homes.csv"), task="regression", label=label)
    assert loaded.train[1].shape == (32, 2) and loaded.targets == ("price", "area")
    assert loaded.inputs["columns"] == ["rooms", "age"] and len(loaded.train[0].T) == 2
    assert loaded.inputs["label"] == ["price", "area"]


def test_a_column_whose_name_has_a_comma(tmp_path):
    (tmp_path / "own.csv").write_text('a;b;"x,y"\n1;1;2,5\n2;9;3,5\n4;3;1,5\n')
    loaded = data.load(str(tmp_path / "own.csv"), task="regression", label="x,y")
    assert loaded.targets == ("x,y",)
    assert sorted([*loaded.train[1].tolist(), *loaded.test[1].tolist()]) == [1.5, 2.5, 3.5]


def test_new_samples_find_the_columns_of_numbers(tmp_path):
    file = homes(tmp_path / "homes.csv")
    trained = data.load(file, task="regression", label="price,area")
    new = read_new(file, inputs=trained.inputs, classes=())
    assert new.y.shape == (40, 2) and new.y.dtype == torch.float32
    (tmp_path / "new.csv").write_text("age,rooms\n1,2\n3,4\n")
    assert read_new(str(tmp_path / "new.csv"), inputs=trained.inputs, classes=()).y is None


def test_numbers_on_disk_are_the_same(tmp_path):
    choices = {"task": "regression", "label": "price,area"}
    file = homes(tmp_path / "homes.csv")
    loaded = data.load(file, **choices)
    for _ in range(2):
        on_disk = data.load(file, on_disk=tmp_path / "decoded", **choices)
        assert torch.equal(on_disk.train[1], loaded.train[1]) and on_disk.targets == loaded.targets
    classes = data.load(homes(tmp_path / "homes.csv", yes_or_no), on_disk=tmp_path / "decoded")
    assert classes.classes == ("0", "1")


def yes_or_no(i, row):
    return [*row[:3], i % 2]


@pytest.mark.parametrize(
    ("choices", "change", "message"),
    [
        ({}, lambda i, r: r if i != 3 else [*r[:2], "", r[3]], "line 5, column 'price': '' is bla"),
        ({}, lambda i, r: r if i != 3 else [*r[:2], "nan", r[3]], "line 5, column 'price': 'nan'"),
        ({"impute": "mean"}, lambda i, r: [*r[:2], "?" if i == 3 else 1, 2], "'price': '\\?' is b"),
        ({}, lambda i, r: [*r[:2], "high", r[3]], r"column 'price': 'high' is no number .*without"),
        ({}, lambda i, r: [*r[:2], "inf", r[3]], "column 'price': 'inf' is no number"),
        ({}, lambda i, r: [*r[:2], 7, r[3]], "label 'price' is 7 in every sample.*another column"),
        ({"label": "price,area"}, lambda i, r: [*r[:3], 1], "'area' is 1 in every sample"),
        ({"label": "prize,area"}, lambda i, r: r, "no column 'prize': did you mean 'price'"),
        ({"drop": "price"}, lambda i, r: r, "'price' cannot be dropped: it is the label"),
        ({"task": "regresion"}, lambda i, r: r, "unknown task 'regresion'"),
    ],
)
def test_a_label_that_is_no_number(tmp_path, refused, choices, change, message):
    choices = {"task": "regression", "label": "price"} | choices
    refused(homes(tmp_path / "homes.csv", change), message, **choices)


def test_a_table_without_rows_or_with_too_few(tmp_path, refused):
    refused(homes(tmp_path / "a.csv", n=0), "has a header but no rows", task="regression")
    (tmp_path / "b.csv").write_text("a,b\n1,2\n")
    refused(tmp_path / "b.csv", "'b' is 2 in every sample", task="regression")


def test_classes_that_look_like_numbers_point_to_the_task(tmp_path, refused):
    file = homes(tmp_path / "homes.csv")
    refused(file, r"label .* is not a whole .*say task='regression' \(--task", label="price")
    refused(file, r"several label columns .*say task='regression'", label="price,area")
    whole = homes(tmp_path / "whole.csv", lambda i, row: [*row[:3], 1000 + i])
    refused(whole, r"40 different values.* classes need several samples; to predict numbers, say")
    few = homes(tmp_path / "few.csv", lambda i, row: [*row[:3], f"{7 * (i % 25)}.0"], n=60)
    with pytest.warns(UserWarning, match="60 labels have 25 different numbers, .*task='regression"):
        assert len(data.load(few).classes) == 25


@pytest.mark.parametrize("spec", ["digits", "."])
def test_numbers_come_from_tables_and_arrays_alone(refused, spec):
    refused(spec, r"FILE.csv, FILE.npz and FILE.py:FUNCTION; .* has classes", task="regression")


def test_numbers_of_a_set_that_does_not_exist(refused):
    refused("diabetes", r"'diabetes' is not a built-in data set", task="regression")


@pytest.mark.parametrize("shape", [(30,), (30, 1), (30, 2), (30, 5), (30, 4, 4)])
def test_arrays_of_numbers(tmp_path, shape):
    y = np.random.default_rng(0).normal(size=shape)
    np.savez(tmp_path / "own.npz", x=np.zeros((30, 5, 1)), y=y)
    loaded = data.load(str(tmp_path / "own.npz"), task="regression")
    rest = () if shape == (30, 1) else shape[1:]
    assert loaded.train[1].shape == (24, *rest) and loaded.train[1].dtype == torch.float32
    names = tuple(f"y{i}" for i in range(1, rest[0] + 1)) if len(rest) == 1 else ("y",)
    assert loaded.targets == names
    new = read_new(str(tmp_path / "own.npz"), inputs=loaded.inputs, classes=())
    assert np.allclose(new.y, y.reshape(new.y.shape))


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (np.array([1.0, np.nan, 2.0]), r"label y\[1\] is nan; replace it .*sample 1"),
        (np.array([1.0, 1e300, 2.0]), r"label y\[1\] is 1e\+300"),
        (np.array(["a", "b", "a"]), "label a is no number; classes are predicted without task"),
        (np.ones(3), "'y' is 1 in every sample"),
        (np.ones(4), r"y has the shape \(4,\)"),
    ],
)
def test_arrays_that_are_no_numbers_to_learn(tmp_path, refused, y, message):
    np.savez(tmp_path / "own.npz", x=np.zeros((3, 2)), y=y)
    refused(tmp_path / "own.npz", message, task="regression")


@pytest.mark.parametrize(
    ("x", "y"),
    [((20, 6, 2), (20, 6)), ((20, 6, 2), (20, 3)), ((20, 1, 6, 6), (20, 6, 6)), (None, (20, 6))],
)
def test_a_class_for_each_step_or_pixel(tmp_path, x, y):
    labels = np.random.default_rng(0).integers(0, 3, y) * 2 + 1
    labels[:, 0] = -100
    arrays = {"tokens": np.arange(120).reshape(20, 6) % 9} if x is None else {"x": np.zeros(x)}
    np.savez(tmp_path / "own.npz", **arrays, y=labels)
    loaded = data.load(str(tmp_path / "own.npz"))
    assert loaded.classes == ("1", "3", "5") and "at random" in loaded.note
    assert loaded.train[1].shape == (16, *y[1:]) and loaded.train[1].dtype == torch.int64
    assert set(loaded.train[1].unique().tolist()) == {-100, 0, 1, 2}
    new = read_new(str(tmp_path / "own.npz"), inputs=loaded.inputs, classes=loaded.classes)
    assert np.array_equal(np.where(new.y < 0, -100, 2 * new.y + 1), labels)


def test_classes_of_pixels_are_counted_over_all_labels(tmp_path):
    y, y_test = np.zeros((4, 3, 3), np.uint8), np.zeros((2, 3, 3), np.uint8)
    y[0, 0, 0], y_test[0, 0, 0] = 1, 4
    x, x_test = np.zeros((4, 1, 3, 3)), np.zeros((2, 1, 3, 3))
    np.savez(tmp_path / "own.npz", x=x, y=y, x_test=x_test, y_test=y_test)
    loaded = data.load(str(tmp_path / "own.npz"))
    assert loaded.classes == ("0", "1", "4") and loaded.test[1].max() == 2
    np.savez(tmp_path / "own.npz", x=x, y=y, x_test=x_test, y_test=y_test[:, 1:])
    with pytest.raises(tpsgd.TpsgdError, match="y of training and of test samples must have equal"):
        data.load(str(tmp_path / "own.npz"))


@pytest.mark.parametrize(
    ("x", "y"),
    [
        (np.zeros((6, 4)), np.eye(3, dtype=int)[[0, 1, 2, 0, 1, 2]]),  # one-hot rows
        (np.zeros((6, 5, 4)), np.eye(3, dtype=int)[[0, 1, 2, 0, 1, 2]]),
        (np.zeros((6, 4)), np.ones((6, 4), int)),  # a table has no steps
        (np.zeros((6, 5, 4)), np.random.default_rng(0).random((6, 5))),
    ],
)
def test_labels_that_are_not_of_steps(tmp_path, refused, x, y):
    np.savez(tmp_path / "own.npz", x=x, y=y)
    text = refused(tmp_path / "own.npz", "y has the shape .* one label for each of the 6 samples")
    assert ("say task='regression'" in text) == (y.dtype == float)
    np.savez(tmp_path / "none.npz", x=np.zeros((6, 5, 4)), y=np.full((6, 5), -100))
    refused(tmp_path / "none.npz", "every label is -100; at least two classes")


def test_sequences_have_numbers_too(tmp_path):
    rows = [f"s{i},{t},{i % 7},{i / 3}" for i in range(20) for t in range(2 + i % 3)]
    (tmp_path / "own.csv").write_text("\n".join(["sequence,time,a,target", *rows]))
    loaded = data.load(str(tmp_path / "own.csv"), task="regression")
    assert isinstance(loaded.train[0], tpsgd.Padded) and loaded.train[1].shape == (16,)
    (tmp_path / "own.csv").write_text("\n".join(["sequence,time,a,target", *rows, "s3,9,1,0"]))
    with pytest.raises(tpsgd.TpsgdError, match="sequence 's3' has two labels"):
        data.load(str(tmp_path / "own.csv"), task="regression")


def test_max_train_takes_samples_at_random(tmp_path):
    loaded = data.load(homes(tmp_path / "a.csv"), task="regression", label="price", max_train=10)
    assert len(loaded.train[1]) == 10 and "10 of 32 training samples, at random" in loaded.note
