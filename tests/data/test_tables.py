"""Tables as sensors write them: a label of any name, ids, times, blank cells."""

import numpy as np
import pytest
import torch

import tpsgd
from tpsgd import TpsgdError, data
from tpsgd.data import read_new

NAMES = "gesture,rec,clock,ax,ay"
KINDS = ("tap", "swipe")


def table(file, n=40, header=NAMES, blank=(), order=(0, 1, 2, 3, 4)):
    lines = [",".join(np.array(header.split(","))[list(order)])]
    for i in range(n):
        cells = [KINDS[i % 2], f"rec{i:04}", f"10:0{i % 10}", f"{i % 2 + i / 100}", f"{i / 10}"]
        cells[4] = "" if i in blank else cells[4]
        lines.append(",".join(cells[j] for j in order))
    file.write_text("\n".join(lines))
    return str(file)


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({}, r"'gesture', 'rec', 'clock': if 'gesture' \(swipe, tap\) is the label"),
        ({}, r"label='gesture' \(--label gesture\); .*drop=\['rec', 'clock'\] \(--drop rec,clock"),
        ({"label": "gesture"}, "'rec', 'clock': if 'clock' .*drop=.'rec'."),
        ({"label": "gesture", "drop": ["rec", "clock"]}, "line 5, column 'ay': '' is blank"),
        ({"label": "gestures"}, "no column 'gestures': did you mean 'gesture'"),
        ({"drop": "rec,klock"}, "no column 'klock': did you mean 'clock'"),
        ({"label": "ax", "drop": "ax"}, "'ax' cannot be dropped: it is the label"),
        ({"drop": NAMES}, "has no column of features besides the label"),
        ({"impute": "mode"}, "unknown impute 'mode'"),
    ],
)
def test_a_sensor_file_is_refused_with_what_to_do(tmp_path, refused, choices, message):
    refused(table(tmp_path / "own.csv", blank=(3,)), message, **choices)


@pytest.mark.parametrize("none", ["none", "NA", "null"])
@pytest.mark.parametrize("impute", [None, "median"])
def test_a_class_with_the_name_of_a_blank_is_no_blank(tmp_path, refused, none, impute):
    kinds = [none, none, "tap", none, "swipe"]  # most rows have no gesture, and the first one too
    rows = [f"{kinds[i % 5]},{i % 7},{i % 3}" for i in range(40)]
    file = tmp_path / "own.csv"
    file.write_text("\n".join(["gesture,ax,ay", *rows]))
    listed = ", ".join(sorted({none, "swipe", "tap"}))
    message = rf"if 'gesture' \({listed}\) is the label, say label='gesture' \(--label gesture"
    refused(file, message, impute=impute)
    assert data.load(str(file), label="gesture").classes == tuple(sorted({none, "swipe", "tap"}))


def test_a_label_in_first_place_an_id_a_time_and_blank_cells_are_read(tmp_path):
    file = table(tmp_path / "own.csv", blank=(3, 8))
    choices = {"label": "gesture", "drop": "rec,clock", "scale": "none"}
    loaded = data.load(file, impute="median", **choices)
    x, y = (torch.cat(pair) for pair in zip(loaded.train, loaded.test, strict=True))
    assert loaded.classes == ("swipe", "tap") and loaded.inputs["columns"] == ["ax", "ay"]
    assert (y == 1 - (x[:, 0] >= 1).long()).all() and x.isfinite().all()
    value = loaded.inputs["imputation"]["values"][1]
    train = [row[1] for row in loaded.train[0].tolist() if round(row[0], 2) not in (1.03, 0.08)]
    assert value == pytest.approx(np.median(train))
    assert [row[1] for row in x.tolist() if round(row[0], 2) in (1.03, 0.08)] == pytest.approx(
        [value, value]
    )
    assert "blank cells filled with the median of the training samples" in loaded.note
    on_disk = data.load(file, impute="median", on_disk=tmp_path / "decoded", **choices)
    assert torch.equal(on_disk.train[0], loaded.train[0])
    by_mean = data.load(file, impute="mean", on_disk=tmp_path / "decoded", **choices)
    assert by_mean.inputs["imputation"] != on_disk.inputs["imputation"]


def test_statistics_are_those_of_training_samples():
    from tpsgd.data.scaling import typical_values

    x = np.array([[1.0, np.nan], [np.nan, 4.0], [9.0, 6.0], [2.0, 8.0]], np.float32)
    assert typical_values("mean", [x[:2], x[2:]], ["a", "b"])["values"] == [4.0, 6.0]
    assert typical_values("median", [x], ["a", "b"])["values"] == [2.0, 6.0]
    with pytest.raises(TpsgdError, match=r"'b' is blank in all training samples.*--drop b"):
        typical_values("mean", [x[:1]], ["a", "b"])


def test_new_samples_are_filled_and_scaled_as_in_training(tmp_path):
    file = table(tmp_path / "own.csv", blank=(3,))
    loaded = data.load(file, label="gesture", drop=("rec", "clock"), impute="mean")
    other = table(tmp_path / "new.csv", 6, blank=(0,), order=(4, 2, 0, 3))
    new = read_new(other, inputs=loaded.inputs, classes=loaded.classes)
    imputed, scaling = loaded.inputs["imputation"]["values"], loaded.inputs["scaling"]
    expected = (imputed[1] - scaling["shift"][1]) / scaling["scale"][1]
    assert new.x[0, 1].item() == pytest.approx(expected, abs=1e-6)
    assert new.y is not None and new.y.tolist() == [1, 0] * 3
    trained = tpsgd.Trained(torch.nn.Linear(2, 2), tpsgd.Run("readout", 0, {}), (), loaded.inputs)
    assert torch.allclose(trained.scaled([[0.0, float("nan")]])[:, 1], new.x[:1, 1])
    without = {k: v for k, v in loaded.inputs.items() if k != "imputation"}
    with pytest.raises(TpsgdError, match=r"line 2, column 'ay': '' is blank; .*train with"):
        read_new(other, inputs=without, classes=loaded.classes)


@pytest.mark.parametrize("values", ["x", [1.0], [1.0, float("nan")], [[1.0], [2.0]]])
def test_imputation_that_makes_no_sense_is_refused(tmp_path, values):
    file = table(tmp_path / "own.csv", blank=(3,))
    inputs = {"columns": ["ax", "ay"], "label": "gesture", "imputation": {"values": values}}
    with pytest.raises(TpsgdError):
        read_new(file, inputs=inputs | {"shape": [2]}, classes=KINDS)


def test_series_have_blank_cells_too(tmp_path):
    rows = [
        f"s{i},{t},{KINDS[i % 2]},{'' if t == 1 else t + i}" for i in range(10) for t in range(3)
    ]
    (tmp_path / "own.csv").write_text("\n".join(["sequence,step,gesture,a", *rows]))
    with pytest.raises(TpsgdError, match=r"has sequences but no column label.*--label"):
        data.load(str(tmp_path / "own.csv"))
    loaded = data.load(str(tmp_path / "own.csv"), label="gesture", impute="mean", scale="none")
    (value,) = loaded.inputs["imputation"]["values"]
    assert loaded.shape == (3, 1) and (loaded.train[0][:, 1] == value).all()


@pytest.mark.parametrize("spec", ["digits", "own.npz"])
def test_only_tables_have_columns(refused, spec):
    refused(spec, "label, drop and impute are for tables", label="y")
