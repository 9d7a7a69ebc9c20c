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


# ---- which column is the label -------------------------------------------------------------------


def whole_numbers(file, header, columns=(7, 5, 9, 3)):
    """A table of whole numbers; the number of different values in each column."""
    rows = [",".join(str(i * 7 % n if n > 9 else i % n) for n in columns) for i in range(360)]
    file.write_text("\n".join([header, *rows]))
    return str(file)


@pytest.mark.parametrize(
    ("header", "rivals"),
    [
        ("x,y,z,activity", "'y', 'activity'"),
        ("X,Y,Z,Activity", "'Y', 'Activity'"),
        ("activity,x,y,z", "'activity', 'y', 'z'"),
        ("a,x,b,y", "'a', 'b', 'y'"),
        ("a,y,b,c", "'y', 'c'"),
        ("a,b,label,class", "'label', 'class'"),
        ("a,target,b,y", "'target', 'y'"),
        ("activity,ax,ay,az", "'az', 'activity'"),
    ],
)
@pytest.mark.parametrize("task", [None, "regression"])
def test_a_guessed_label_that_has_a_rival_is_asked_for(tmp_path, refused, header, rivals, task):
    file = whole_numbers(tmp_path / "own.csv", header)
    if task and "az" in header:  # the last column is a number as good as any
        return
    refused(file, rf"may be the label, {rivals}: name it, label=... \(--label\)", task=task)
    for label in header.split(","):
        assert data.load(file, label=label, task=task).inputs["label"] == label


@pytest.mark.parametrize(
    ("header", "label"),
    [
        ("x,y,z,label", "label"),
        ("target,x,y,z", "target"),
        ("a,b,c,y", "y"),
        ("y,a,b,c", "y"),
        ("class,y0,y1,y2", "class"),
        ("a,b,c,d", "d"),
    ],
)
def test_a_label_without_a_rival_is_guessed(tmp_path, header, label):
    file = whole_numbers(tmp_path / "own.csv", header)
    loaded = data.load(file)
    assert loaded.inputs["label"] == label and len(loaded.inputs["columns"]) == 3
    assert data.load(file, drop=loaded.inputs["columns"][0]).inputs["label"] == label


def test_x_and_y_alone_are_a_feature_and_a_label(tmp_path):
    assert data.load(whole_numbers(tmp_path / "own.csv", "x,y", (7, 3))).inputs["label"] == "y"
    assert data.load(whole_numbers(tmp_path / "own.csv", "x,z,y", (7, 5, 3))).classes == tuple(
        "012"
    )
    file = whole_numbers(tmp_path / "own.csv", "x,y,z,activity")
    assert data.load(file, drop="y").inputs["label"] == "activity"


def test_a_last_column_of_many_numbers_is_asked_for_beside_one_of_few(tmp_path, refused):
    file = whole_numbers(tmp_path / "own.csv", "kind,ax,ay,az", (3, 200, 50, 25))
    refused(file, "may be the label, 'az', 'kind': name it")
    assert data.load(file, drop="kind").inputs["label"] == "az"
    letters = "\n".join(f"{i % 3},{i * 7 % 200},{chr(65 + i % 26)}" for i in range(360))
    (tmp_path / "own.csv").write_text(f"kind,ax,letter\n{letters}")
    assert len(data.load(file).classes) == 26


# ---- tables that are damaged ---------------------------------------------------------------------

LONG = "x" * 140_000
ROWS = [f"{i},1,{'cd'[i % 2]}" for i in range(12)]


def lines(*others, header="a,b,label", rows=ROWS, end="\n"):
    return end.join([header, *rows, *others]) + end


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (lines(header=f"{LONG},b,label"), "line 1 is no header of names .*field larger"),
        (lines(header='"a,b,label'), "line 1 is no header of names in whole quotes"),
        (lines(header='"a\nb",b,label'), "line 1 is no header of names in whole quotes"),
        (lines(f"{LONG},1,c"), "line 14 cannot be read .field larger than field limit"),
        (lines("1" * 140_000 + ",1,c"), "line 14 cannot be read .*shorten its cells"),
        (lines(f"1,1,{LONG}"), "column 'label': the text 'xxx.* 140,000 characters and is no name"),
        (lines('"1,1,c', "2,1,d", "3,1,c"), "line 14: a quote begins there that does not end"),
        (lines('1,1,"c', "2,1,d", "3,1,c"), "line 14: a quote begins there that does not end"),
        (lines('1,1,"c', *ROWS * 2000), "line .*: shorten its cells, or end a quote"),
        (lines('1,1,"c', '2,1,"d', "3,1,c"), "column 'label': the text 'c 2,1,d' .*several lines"),
        (lines("1,\0,c"), "has NUL bytes, and is no text; save it as UTF-8"),
        (lines("1,1,c\0"), "has NUL bytes, and is no text; save it as UTF-8"),
        (lines(header="a\0,b,label"), "has NUL bytes, and is no text; save it as UTF-8"),
        (lines(header="a,b;label", rows=[r.replace(",c", ";c").replace(",d", ";d") for r in ROWS]),
         "'b;label' has ';' in it, and so have its cells: columns are separated by"),
        (lines("1;1;c"), "line 14 has 1 cells, the header has 3"),
        (lines(header="a;b;label"), "line 2 has 1 cells, the header has 3"),
        (lines(rows=["1,2,c"]), "every label is c; at least two classes"),
        (lines(rows=["1,2,c", "1,2,d"]), "2 samples are too few to hold out 1"),
        (lines(rows=[f"{i},1,{('0.0', 'nan')[i % 2]}" for i in range(9)]), "label nan is not a"),
        (lines(rows=[f"{i},1,{('0', '1e400')[i % 2]}" for i in range(9)]), "1e400 is not a whole"),
    ],
)  # fmt: skip
def test_damaged_tables_are_one_sentence(tmp_path, refused, text, message):
    (tmp_path / "own.csv").write_bytes(text.encode())
    refused(tmp_path / "own.csv", message)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le"])
def test_tables_of_two_bytes_a_letter_are_refused(tmp_path, refused, encoding):
    (tmp_path / "own.csv").write_bytes(lines().encode(encoding))
    refused(tmp_path / "own.csv", "save it as UTF-8")


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("start", ["", "\ufeff"])
def test_line_ends_and_a_mark_of_the_byte_order_change_nothing(tmp_path, start, end):
    (tmp_path / "own.csv").write_bytes((start + lines(end=end)).encode())
    loaded = data.load(tmp_path / "own.csv")
    assert loaded.inputs["columns"] == ["a", "b"] and len(loaded.train[1]) == 10


def test_a_single_quote_in_a_cell_is_no_quote_that_does_not_end(tmp_path):
    rows = [f"{i},{i % 3},{'cd'[i % 2]} 5{chr(34)}" for i in range(11)]
    (tmp_path / "own.csv").write_text(lines(rows=[*rows, ""]))
    assert data.load(tmp_path / "own.csv").classes == ('c 5"', 'd 5"')


@pytest.mark.parametrize(
    ("values", "classes"),
    [
        ((0, 7, 4_000_000_000), ("0", "7", "4000000000")),
        ((-1, 1), ("-1", "1")),
        (("0", "1" + 30 * "0"), ("0", "1" + 30 * "0")),
        (("0", "1e19"), ("0", "1e19")),
    ],
)
def test_classes_may_be_any_whole_numbers(tmp_path, values, classes):
    rows = [f"{i},1,{values[i % len(values)]}" for i in range(30)]
    (tmp_path / "own.csv").write_text(lines(rows=rows))
    assert data.load(tmp_path / "own.csv").classes == classes


@pytest.mark.parametrize(
    "wrong", [{"label": 5}, {"label": ["a", 3]}, {"drop": 5}, {"drop": [3]}, {"on_disk": 5}]
)
def test_names_that_are_no_names_are_refused(tmp_path, refused, wrong):
    (tmp_path / "own.csv").write_text(lines())
    refused(tmp_path / "own.csv", "must be (names of columns|a folder), got", **wrong)
