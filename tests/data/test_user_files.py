"""Data of the user's: .npz and .csv files, functions, folders of images."""

import io
import os
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tpsgd import TpsgdError, data
from tpsgd.data import read_new

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(20, 3)), np.arange(20) % 2


def npz(tmp_path, **arrays):
    np.savez(tmp_path / "own.npz", **arrays)
    return str(tmp_path / "own.npz")


# .npz


def test_npz_without_a_test_set_is_split(tmp_path):
    loaded = data.load(npz(tmp_path, x=X, y=Y), seed=7)
    assert loaded.train[0].shape == (16, 3) and loaded.test[0].shape == (4, 3)
    assert loaded.test[1].bincount().tolist() == [2, 2] and loaded.shape == (3,)
    assert loaded.note == "20 % held out as test, stratified, seed 7; features unscaled"
    rows = torch.cat([loaded.train[0], loaded.test[0]])
    assert torch.equal(rows.sort(0).values, torch.tensor(X, dtype=torch.float32).sort(0).values)


def test_npz_with_a_test_set_and_labels_from_one(tmp_path):
    loaded = data.load(npz(tmp_path, x=X, y=Y * 4 + 1, x_test=X[:2], y_test=np.array([5, 1])))
    assert loaded.classes == ("1", "5") and loaded.test[1].tolist() == [1, 0]
    assert loaded.note == "features unscaled"
    assert torch.equal(loaded.train[0], torch.tensor(X, dtype=torch.float32))


@pytest.mark.parametrize(
    ("y", "classes"),
    [
        (np.array(["dog", "cat"])[Y], ("cat", "dog")),
        (np.array(["10", "9"])[Y], ("9", "10")),
        (np.array(["01", "1"])[Y], ("01", "1")),
        (Y.astype(bool), ("False", "True")),
        (Y.astype(float) + 3, ("3", "4")),
        (np.array(["café".encode(), b"dog"])[Y], ("café", "dog")),
        (np.array([0, 4_000_000_000])[Y], ("0", "4000000000")),
        (np.array([0, 2**64 - 1], np.uint64)[Y], ("0", str(2**64 - 1))),
        (Y[:, None], ("0", "1")),
    ],
)
def test_labels_may_be_names_or_whole_numbers(tmp_path, y, classes):
    loaded = data.load(npz(tmp_path, x=X, y=y))
    assert loaded.classes == classes and loaded.train[1].dtype == torch.int64


@pytest.mark.parametrize(
    ("shape", "becomes"),
    [
        ((20, 5, 6), (1, 5, 6)),
        ((20, 5, 6, 3), (3, 5, 6)),
        ((20, 3, 5, 6), (3, 5, 6)),
        ((20, 7), (7,)),
    ],
)
def test_bytes_are_read_as_pixels(tmp_path, shape, becomes):
    x = RNG.integers(0, 256, shape, dtype=np.uint8)
    loaded = data.load(npz(tmp_path, x=x, y=Y, x_test=x, y_test=Y))
    assert loaded.shape == becomes and loaded.note.startswith("bytes divided by 255")
    assert loaded.train[0].is_contiguous() and loaded.train[0].max() <= 1
    order = np.moveaxis(x, -1, 1) if shape[-1] == 3 else x
    assert torch.equal(loaded.test[0], torch.tensor(order.reshape(20, *becomes)).float() / 255)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": X}, "holds x; expected x and y"),
        ({"a": X, "b": Y}, "holds a, b; expected x and y"),
        ({}, "holds nothing; expected x and y"),
        ({"x": X, "y": Y, "x_test": X}, "x_test and y_test both or neither"),
        ({"x": X, "y": Y[:-1]}, "one label for each of the 20 samples"),
        ({"x": X, "y": Y, "x_test": X, "y_test": Y[:3]}, "one label for each of the 20 samples"),
        ({"x": X[:0], "y": Y[:0]}, "x is empty, of shape"),
        ({"x": X[:, :0], "y": Y}, "x is empty, of shape"),
        ({"x": X[:, 0], "y": Y}, "x is float64 of shape"),
        ({"x": X.astype(str), "y": Y}, "expected numbers .samples, features"),
        ({"x": X, "y": np.eye(2)[Y]}, r"\(20, 2\); expected one label .* y.argmax"),
        ({"x": X, "y": np.zeros(20, int)}, "every label is 0; at least two classes"),
        ({"x": X, "y": X[:, 0]}, "is not a whole number or a name"),
        ({"x": X, "y": np.full(20, np.nan)}, "the label nan is not a"),
        (
            {"x": X, "y": Y, "x_test": X, "y_test": Y + 1},
            "no training sample of the test set's class 2",
        ),
        ({"x": X, "y": Y, "x_test": X, "y_test": Y.astype(str)[::-1].repeat(1)}, None),
        (
            {"x": X, "y": Y, "x_test": X, "y_test": np.full(20, "dog")},
            "no training sample of the test set's class dog",
        ),
        ({"x": X, "y": Y, "x_test": X[:, :2], "y_test": Y}, "they must match"),
        ({"x": X, "y": Y, "x_test": X.astype(np.uint8), "y_test": Y}, "they must match"),
        ({"x": X[:2], "y": Y[:2]}, "2 samples are too few to hold out 1"),
        (
            {"x": np.where(X[4, 1] == X, np.nan, X), "y": Y},
            r"x\[4, 1\] is nan; replace it by",
        ),
        ({"x": np.where(X[4, 1] == X, np.inf, X), "y": Y}, r"x\[4, 1\] is inf"),
        ({"x": np.array([None] * 20), "y": Y}, "holds Python objects, which may run code"),
        ({"x": X, "y": np.array([b"caf\xe9", b"dog"])[Y]}, r"label b'caf.xe9' is no UTF-8 text"),
        ({"x": X, "y": np.zeros(20, [("a", "f4")])}, "expected whole numbers or names"),
        ({"x": X, "y": np.zeros(20, "V3")}, "y is .V3; expected whole numbers or names"),
        ({"x": X, "y": Y + 1j}, "y is complex128; expected whole numbers or names"),
        ({"x": X, "y": np.array([0, 1e30])[Y]}, r"the label 1e\+30 is too large"),
        ({"x": np.zeros(20, [("a", "f4")]), "y": Y}, "expected numbers .samples, features"),
    ],
)
@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")
def test_npz_files_that_are_wrong_are_refused(refused, tmp_path, arrays, message):
    file = npz(tmp_path, **arrays)
    if message is None:
        assert data.load(file).classes == ("0", "1")
    else:
        refused(file, message)


@pytest.mark.parametrize("content", [b"", b"no zip at all", b"PK\x03\x04 cut short", "half", "npy"])
def test_incomplete_npz_files_are_refused(refused, tmp_path, content):
    file = tmp_path / "bad.npz"
    if content == "npy":
        with file.open("wb") as stream:
            np.save(stream, X)
    elif content == "half":
        np.savez_compressed(file, x=X, y=Y)
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    else:
        file.write_bytes(content)
    refused(file, r"bad.npz is not a complete .npz file")


def test_a_compressed_npz_with_a_flipped_byte_is_refused(refused, tmp_path):
    file = tmp_path / "bad.npz"
    np.savez_compressed(file, x=X, y=Y)
    content = bytearray(file.read_bytes())
    content[200:230] = bytes(30)
    file.write_bytes(content)
    refused(file, "not a complete .npz file")


# paths


@pytest.mark.parametrize("spec", ["no/such.npz", "no.csv", "no/folder", "no.py:make", "no/file.x"])
def test_paths_that_do_not_exist_are_named(refused, spec, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused(spec, "there is no (file )?no")


def test_files_of_another_kind_are_refused(refused, tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    refused(tmp_path / "notes.txt", "is not one of FILE.npz, FILE.csv")
    refused(f"{tmp_path / 'notes.txt'}@32", "is not a folder; expected a folder of images")
    refused(f"{tmp_path / 'nowhere'}@32", "is not a folder; expected a folder of images")


@pytest.mark.parametrize("form", ["npz", "function"])
def test_real_numbers_with_the_channels_last_get_them_first(tmp_path, form):
    x = RNG.normal(size=(20, 8, 6, 3)).astype(np.float32)
    np.savez(tmp_path / "own.npz", x=x, y=Y, x_test=x, y_test=Y)
    spec = str(tmp_path / "own.npz")
    if form == "function":
        body = f"file = np.load({spec!r})\ndef make(): return ((file['x'], file['y']),) * 2"
        spec = function(tmp_path, body)
    loaded = data.load(spec)
    assert loaded.shape == (3, 8, 6) and loaded.note.endswith("channels, height, width")
    assert torch.equal(loaded.test[0], torch.tensor(x).permute(0, 3, 1, 2))
    assert loaded.train[0].is_contiguous()


@pytest.mark.parametrize("shape", [(2, 8, 3), (3, 8, 4), (8, 3, 4), (8, 6, 7)])
def test_other_arrays_of_four_axes_stay_as_they_are(tmp_path, shape):
    loaded = data.load(npz(tmp_path, x=RNG.normal(size=(20, *shape)), y=Y))
    assert loaded.shape == shape


@pytest.mark.parametrize("labels", [np.arange(60), np.array([f"row {i}" for i in range(60)])])
def test_a_label_per_sample_is_refused(refused, tmp_path, labels):
    x = RNG.normal(size=(60, 3))
    refused(npz(tmp_path, x=x, y=labels, x_test=x, y_test=labels), "60 labels have 60 different")
    text = "a,label\n" + "".join(f"0.5,{label}\n" for label in labels)
    refused(csv(tmp_path, text), "60 labels have 60 different values, the first is (0|row 0)")


def test_two_samples_of_each_of_many_classes_are_read(tmp_path):
    x, y = RNG.normal(size=(60, 3)), np.arange(60) // 2
    assert len(data.load(npz(tmp_path, x=x, y=y, x_test=x, y_test=y)).classes) == 30


def zipped(file, shape, content, kind=zipfile.ZIP_DEFLATED):
    """An .npz whose x has a header of this shape before its content."""
    header, labels = io.BytesIO(), io.BytesIO()
    array = {"descr": "<f4", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(header, array)
    np.save(labels, Y)
    with zipfile.ZipFile(file, "w", kind) as archive:
        archive.writestr("x.npy", header.getvalue() + content)
        archive.writestr("y.npy", labels.getvalue())
    return str(file)


@pytest.mark.parametrize("kind", [zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED])
@pytest.mark.parametrize("shape", [(20, 350_000_000), (20, 10**12), (2**62, 2**62), (-4, -5)])
def test_a_header_that_claims_more_than_the_file_has_is_refused(refused, tmp_path, kind, shape):
    file = zipped(tmp_path / "own.npz", shape, bytes(400 if shape[0] > 0 else 80), kind)
    refused(file, "own.npz is not a complete .npz file")
    with pytest.raises(TpsgdError, match=r"not a complete .npz file"):
        read_new(file, inputs={}, classes=("0", "1"))


@pytest.mark.parametrize("token", [2**62, 2**64 - 1])
def test_tokens_that_no_embedding_has_room_for_are_refused(refused, tmp_path, token):
    file = npz(tmp_path, tokens=np.full((20, 3), token, np.uint64), y=Y)
    refused(file, f"the token {token} is too large; number tokens from 0")


def test_zeros_that_would_fill_the_memory_are_refused_unread(refused, tmp_path, monkeypatch):
    file = zipped(tmp_path / "own.npz", (20, 1_000_000), bytes(80_000_000))
    monkeypatch.setattr(np.lib.npyio.NpzFile, "__getitem__", lambda _, name: {"y": Y}[name])
    refused(file, r"would become an array of 76\.3 MB, x of shape \(20, 1000000\).*numpy.savez")


def test_an_npz_that_does_not_fit_in_memory_is_refused(refused, tmp_path, monkeypatch):
    def full(*_):
        raise MemoryError

    np.savez_compressed(tmp_path / "own.npz", x=X, y=Y)
    monkeypatch.setattr(np.lib.npyio.NpzFile, "__getitem__", full)
    refused(str(tmp_path / "own.npz"), "does not fit in memory; save it with numpy.savez")


# .csv


@pytest.mark.parametrize(
    ("name", "first", "n"),
    [
        ("id", 7000, 10),
        ("PassengerId", 1, 10),
        ("a", 0, 60),
        ("row_id", 3, 8),
        ("timestamp_ms", 5, 60),
    ],
)
def test_a_column_that_numbers_the_rows_is_a_warning(tmp_path, name, first, n):
    text = f"{name},b,label\n" + "".join(f"{first + i},{i % 7},{i % 2}\n" for i in range(n))
    with pytest.warns(UserWarning, match=f"the column '{name}' numbers the rows.*--drop {name}"):
        data.load(csv(tmp_path, text))


@pytest.mark.parametrize("name", ["t", "clock", "stamp"])
@pytest.mark.parametrize(
    "of_row",
    [
        lambda i: 1_700_000_000 + i,
        lambda i: 1_700_000_000 + 0.5 * i,
        lambda i: 1_700_000_000_000 + 20 * i,
        lambda i: 1_700_000_000 + i // 2,
        lambda i: round(0.02 * (i // 2), 2),
    ],
)
def test_a_time_is_a_warning_whatever_its_name_and_its_unit(tmp_path, name, of_row):
    text = f"a,{name},label\n" + "".join(f"{i % 7},{of_row(i)},{i % 2}\n" for i in range(200))
    match = f"the column '{name}' (numbers the rows|never falls from row to row), .*--drop {name}"
    with pytest.warns(UserWarning, match=match) as seen:
        data.load(csv(tmp_path, text))
    assert len(seen) == 1


def test_a_time_with_many_rows_at_once_is_known_by_its_name(tmp_path):
    text = "a,time_s,label\n" + "".join(f"{i % 7},{i // 5},{i % 2}\n" for i in range(200))
    with pytest.warns(UserWarning, match="the column 'time_s' never falls"):
        data.load(csv(tmp_path, text))


def test_a_sorted_feature_of_few_values_is_no_warning(tmp_path):
    ages = sorted(18 + i * i % 60 for i in range(200))
    rows = "".join(f"{a},{1e9 + i % 2},{i // 50},{i % 2}\n" for i, a in enumerate(ages))
    data.load(csv(tmp_path, f"age,place,time_of_day,label\n{rows}"))


def test_columns_that_do_not_number_the_rows_are_no_warning(tmp_path):
    text = "id,grid,label\n" + "".join(f"{i % 3},{i},{i % 2}\n" for i in range(20))
    data.load(csv(tmp_path, text))


def csv(tmp_path, text, encoding="utf-8"):
    (tmp_path / "own.csv").write_bytes(text.encode(encoding))
    return str(tmp_path / "own.csv")


def rows(line, n=10):
    return "".join(line.format(i=i, kind="cat" if i % 2 else "dog") + "\n" for i in range(n))


@pytest.mark.parametrize(
    "text",
    [
        "a,b,label\n" + rows("{i},0.5,{kind}"),
        "LABEL,a,b\n" + rows("{kind},{i},0.5"),
        "a,Class,b\r\n" + rows("{i},{kind} ,0.5\r"),
        ",a,b,target\n" + rows("row{i},{i},0.5,{kind}"),
        "a;b;species\n" + rows("{i};0.5;{kind}"),
        "a\tb\tspecies\n" + rows("{i}\t0.5\t{kind}"),
        '"a","b","y"\n' + rows('"{i}",0.5,"{kind}"'),
        "\ufeffa,b,y\n" + rows("{i},5e-1,{kind}") + "\n\n",
        "0,1,label\n" + rows("{i},0.5,{kind}"),
        "a;b;y\n" + rows("{i};0,5;{kind}"),
        "a\tb\ty\n" + rows("{i}\t5,0e-1\t{kind}"),
    ],
)
def test_csv_formats_that_are_read(tmp_path, text):
    loaded = data.load(csv(tmp_path, text), scale="none")
    x, y = loaded.train
    assert loaded.classes == ("cat", "dog") and loaded.shape == (2,) and len(loaded.test[1]) == 2
    assert (x[:, 1] == 0.5).all() and (y == 1 - x[:, 0].long() % 2).all()
    assert x.dtype == torch.float32 and x.is_contiguous()
    assert "20 % held out as test, stratified, seed 0; features unscaled" in loaded.note


def test_csv_classes_are_sorted_as_numbers(tmp_path):
    text = "a,y\n" + "".join(f"{i},{(10, 9, 2)[i % 3]}\n" for i in range(12))
    loaded = data.load(csv(tmp_path, text), scale="none")
    assert loaded.classes == ("2", "9", "10")
    assert (loaded.train[1] == 2 - loaded.train[0][:, 0].long() % 3).all()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty or starts with an empty line"),
        ("\n1,2\n", "is empty or starts with an empty line"),
        ("a,b,label\n", "has a header but no rows"),
        ("1,2,0\n3,4,1\n", "its first line must name the columns"),
        ("5.1,3.5,setosa\n4.9,3.0,setosa\n", "its first line must name the columns"),
        ("label\ncat\n", "has no column of features besides the label in 'label': columns"),
        ("ax|ay|label\n1|2|a\n", "'ax.ay.label': columns are separated by commas, semicolons or"),
        ("# sensor v1\nax,ay,label\n1,2,a\n", "'# sensor v1': .*and line 1 must be the header"),
        ("# v1, Oslo\nax,ay,label\n1,2,a\n", "line 2 has 3 cells.*line 1 must be the header"),
        ("a,b,y\n1,2,0\n3,nan,1\n", "line 3, column 'b': 'nan' is blank; .*impute"),
        ("a,b,y\n1,2,0\n\n3,,1\n", "line 4, column 'b': '' is blank; .*drop=.'b'."),
        ("a,b,y\n1,2,0\nlow,2,1\n", "line 3, column 'a': 'low' is not a finite number"),
        ("a,b,y\n1,2,0\n1e300,2,1\n", "line 3, column 'a': '1e300' is not a finite number"),
        ("a,b,y\n1,2,0\n1,-inf,1\n", "line 3, column 'b': '-inf'"),
        ("a,b,y\n1,2,0\n7,8,0\n1;2,2,1\n", "'1;2' is not a finite number"),
        ('a,b,y\n1,2,0\n"1,200",2,1\n', "'1,200' has a comma in it"),
        ("a,b,y\n1,5,2,5,0\n", "line 2 has 5 cells, .*decimal commas.*semicolons"),
        ("a;b;y\n1,5;2;0\n1,5,2;2;1\n", "line 3, column 'a': '1,5,2' has a comma"),
        ("kind,a,y\ncat,1,2.5\ndog,2,3.5\n", "text, not numbers, in 'kind'.*--label kind"),
        ("a,kind\n1,2.5\n2,3.5\n", "last column, 'kind': name another one"),
        ("a,b,y\n1,2,0\n1,2\n", "line 3 has 2 cells, the header has 3"),
        ("a,b,y\n1,2,0,9\n1,2,1,9\n", "line 2 has 4 cells, the header has 3"),
        ("a,b,y\n1,2,0\n1,2,\n", "line 3 has no text in the column 'y'"),
        ("a,b,y\n1,2,0.5\n1,2,0.25\n", "the label 0.5 is not a"),
        ("a,b,y\n1,2,0\n1,2,0\n", "every label is 0"),
        ("a,b,b,a,y\n1,2,3,4,0\n", "several columns of the name 'a', 'b', .* rename them"),
        ("a, y ,y\n1,2,0\n", "several columns of the name 'y'"),
        (",a,,y\n1,2,3,0\n", "several columns of the name ''"),
        ("sequence,time,time,y\n1,2,3,0\n", "several columns of the name 'time'"),
        ('a,b,y\n1,2,0\n1,"' + "2" * 200_000, "line 3 cannot be read .field larger"),
    ],
)
def test_csv_files_that_are_wrong_are_refused(refused, tmp_path, text, message):
    refused(csv(tmp_path, text), message)


def test_csv_that_is_not_utf8_is_refused(refused, tmp_path):
    refused(csv(tmp_path, "größe,y\n1,2\n", "latin-1"), "cannot be read as UTF-8")
    far = "a,y\n" + "1,cat\n" * 20_000
    refused(csv(tmp_path, far + "ä,cat\n", "latin-1"), "cannot be read as UTF-8")
    refused(csv(tmp_path, far + "1,bär\n", "latin-1"), "cannot be read as UTF-8")


# a function


def function(tmp_path, body):
    (tmp_path / "make.py").write_text("import numpy as np, torch\n" + body)
    return f"{tmp_path / 'make.py'}:make"


@pytest.mark.parametrize(
    "result",
    [
        "np.ones((10, 3)), np.arange(10) % 2",
        "torch.ones(10, 3), torch.arange(10) % 2",
        "torch.ones(10, 3, requires_grad=True), [0, 1] * 5",
        "[[1., 1., 1.]] * 10, ['a', 'b'] * 5",
        "np.broadcast_to(np.float32(1), (10, 3)), np.arange(10) % 2",
        "(np.ones((8, 3)), np.arange(8) % 2), (torch.ones(2, 3), [0, 1])",
    ],
)
def test_results_of_functions_that_are_read(tmp_path, result):
    loaded = data.load(function(tmp_path, f"def make():\n    return {result}\n"))
    assert torch.equal(loaded.train[0], torch.ones(8, 3)) and loaded.test[0].shape == (2, 3)
    assert len(loaded.classes) == 2


@pytest.mark.parametrize("late", [False, True])
def test_a_file_may_import_its_neighbour(tmp_path, monkeypatch, late):
    """When it is run, or when its function is called."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    name = f"neighbour_{late}".lower()
    (tmp_path / f"{name}.py").write_text("import numpy as np\nxy = np.eye(20), np.arange(20) % 2\n")
    line = f"from {name} import xy"
    body = f"def make():\n    {line}\n    return xy" if late else f"{line}\ndef make(): return xy"
    assert data.load(function(tmp_path, body)).shape == (20,)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("x = 1", "has no function 'make'"),
        ("make = 1", "has no function 'make'"),
        ("def make(:", "does not run: SyntaxError"),
        ("import nothing_of_the_sort", "does not run: ModuleNotFoundError"),
        ("def make(): raise KeyError('oh')", "make.py:make failed with KeyError: 'oh'"),
        ("def make(seed): pass", "failed with TypeError"),
        ("def make(): pass", "must return"),
        ("def make(): return 1, 2, 3", "must return"),
        ("def make(): return ((1, 2),) * 3", "must return"),
        ("def make(): return (1, 2), 3", "must return"),
        ("def make(): return ()", "must return"),
        (
            "def make(): return [[[1], [1, 2]], [[1]] * 3], [0, 1]",
            "samples of different shapes",
        ),
        ("def make(): import sys; sys.exit(0)", "make.py:make failed with SystemExit: 0"),
        ("import sys; sys.exit(3)", "make.py does not run: SystemExit: 3"),
        ("def make(): return torch.ones(4, 2, device='meta'), [0, 1] * 2", "no array .*meta"),
        ("def make(): return torch.ones(4, 2), torch.ones(4, device='meta')", "no array .*meta"),
        ("def make(): return torch.ones(4, 2).to_sparse(), [0, 1] * 2", "no array .*Sparse"),
        ("def make(): return np.ones((4, 2)), [0, 1]", "one label for each of the 4 samples"),
        ("def make(): return 1, 2", "expected numbers .samples, features"),
    ],
)
def test_functions_that_are_wrong_are_refused(refused, tmp_path, body, message):
    refused(function(tmp_path, body), message)


@pytest.mark.parametrize(
    "spec", [5, 5.0, None, True, [], {}, ("digits",), b"digits", object(), np.array(["digits"])]
)
def test_a_spec_that_is_no_text_and_no_path_is_refused(spec):
    for read in (data.load, data.path, data.fetch):
        with pytest.raises(TpsgdError, match=r"a data set is named by text, .* or a path, got"):
            read(spec)
    with pytest.raises(TpsgdError, match="a data set is named by text"):
        read_new(spec, inputs={}, classes=("a", "b"))


def test_a_spec_may_be_a_path(tmp_path):
    np.savez(tmp_path / "own.npz", x=X, y=Y)
    loaded = data.load(tmp_path / "own.npz")
    assert loaded.name == str(tmp_path / "own.npz") and data.load(Path("digits")).name == "digits"
    assert len(read_new(tmp_path / "own.npz", inputs=loaded.inputs, classes=("0", "1")).x) == 20


# images


def image(file, size=(6, 4), mode="RGB", value=51):
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, (value,) * 3 if mode == "RGB" else value).save(file)


@pytest.fixture
def folder(tmp_path):
    for i in range(5):
        image(tmp_path / "pets" / "cat" / f"{i}.png", value=51)
        image(tmp_path / "pets" / "dog" / "more" / f"{i}.PNG", mode="L", value=255)
    (tmp_path / "pets" / "cat" / "notes.txt").write_text("not an image")
    (tmp_path / "pets" / ".hidden").mkdir()
    (tmp_path / "pets" / "empty").mkdir()
    return tmp_path / "pets"


def test_image_folder_is_read_as_rgb(folder):
    loaded = data.load(str(folder))
    x, y = loaded.train
    assert loaded.classes == ("cat", "dog") and loaded.shape == (3, 4, 6) and len(x) == 8
    assert torch.equal(x[y == 0].unique(), torch.tensor([0.2])) and (x[y == 1] == 1).all()
    assert (
        "images as RGB, 4 x 6 pixels, other files skipped: 1 (.txt); 20 % held out" in loaded.note
    )


def test_image_folder_is_resized_and_max_train_applies(folder):
    image(folder / "cat" / "zz.jpg", size=(50, 20))
    loaded = data.load(f"{folder}@8", max_train=4)
    assert loaded.train[0].shape == (4, 3, 8, 8) and loaded.train[1].bincount().tolist() == [2, 2]
    assert data.load(str(folder)).shape == (3, 4, 6)


def test_only_the_images_that_are_used_are_read(tmp_path):
    for part, name in (("train", "a"), ("train", "b"), ("test", "a"), ("test", "b")):
        image(tmp_path / part / name / "0.png")
    for i in range(1, 20):
        image(tmp_path / "train" / "a" / f"{i}.png")
    loaded = data.load(str(tmp_path), max_train=2)
    assert sorted(loaded.train[1].tolist()) == [0, 1]
    with pytest.MonkeyPatch.context() as patch:
        opened = []
        real = Image.open
        patch.setattr(Image, "open", lambda f: opened.append(f) or real(f))
        data.load(str(tmp_path), max_train=2)
    assert len(opened) == 1 + 1 + 2 + 2  # their colour, their size


@pytest.mark.parametrize("part", ["val", "test"])
def test_image_folder_with_a_test_set(folder, tmp_path, part):
    folder.rename(tmp_path / "train")
    image(tmp_path / part / "dog" / "1.png", value=0)
    loaded = data.load(str(tmp_path))
    assert len(loaded.train[0]) == 10 and loaded.test[1].tolist() == [1]
    assert loaded.note == "images as RGB, 4 x 6 pixels, other files skipped: 1 (.txt)"


def test_a_class_that_only_the_test_folder_has_is_refused(refused, folder, tmp_path):
    folder.rename(tmp_path / "train")
    image(tmp_path / "val" / "emu" / "1.png")
    refused(tmp_path, "no training sample of the test set's class emu")


def test_image_folders_that_are_wrong_are_refused(refused, tmp_path, folder):
    (tmp_path / "none").mkdir()
    refused(tmp_path / "none", "none has no images in subfolders of classes")
    refused(folder / "cat", "cat has no images in subfolders of classes")
    refused(f"{folder}@0", "asks for images of size 0")


def test_hidden_files_are_left_out_and_others_counted(folder):
    before = data.load(str(folder))
    (folder / "cat" / "._0.png").write_bytes(b"\0\5\x16\7" * 20)  # macOS writes such files
    (folder / "cat" / ".DS_Store").write_bytes(b"x")
    (folder / "dog" / "photo.heic").write_bytes(b"x")
    loaded = data.load(str(folder))
    assert torch.equal(loaded.train[0], before.train[0])
    assert "other files skipped: 1 (.txt)" in before.note
    assert "other files skipped: 2 (.heic, .txt)" in loaded.note


@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_grey_images_of_16_bits_are_scaled_like_those_of_8(folder, suffix):
    values = np.array([[0, 257, 65535], [32896, 128 * 257, 5]], np.uint16)
    for i in range(5):
        (folder / "cat" / f"{i}.png").unlink()
        Image.fromarray(values).save(folder / "cat" / f"{i}.{suffix}")
    loaded = data.load(str(folder))
    (cat,) = loaded.test[0][loaded.test[1] == 0]
    assert (255 * cat).round().int().tolist() == [[[0, 1, 255], [128, 128, 0]]]


@pytest.mark.parametrize("suffix", ["png", "tif", "pgm"])
def test_all_levels_of_16_bits_are_kept_in_grey_and_in_mixed_folders(tmp_path, suffix):
    values = np.arange(4096, dtype=np.uint16).reshape(64, 64)  # of a sensor of 12 bits
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for i in range(3):
            Image.fromarray(values).save(tmp_path / name / f"{i}.{suffix}")
    x = torch.cat([pair[0] for pair in (data.load(str(tmp_path)).train, data.load(tmp_path).test)])
    expected = torch.tensor(values / 65535, dtype=torch.float32)
    assert x.shape == (6, 1, 64, 64) and torch.equal(x, expected.expand(6, 1, 64, 64))
    assert len(data.load(f"{tmp_path}@32").train[0][0].unique()) > 900
    image(tmp_path / "a" / "z.png", size=(64, 64))
    mixed = data.load(tmp_path)
    deep = mixed.train[0][mixed.train[1] == 1]
    assert mixed.shape == (3, 64, 64) and torch.equal(deep, expected.expand(len(deep), 3, 64, 64))


UPRIGHT = np.array([[0, 40, 80], [120, 160, 200]], np.uint8).repeat(8, 0).repeat(8, 1)
TURNED = {  # by the values of the EXIF tag: how the camera has stored what is upright
    **{1: UPRIGHT, 2: UPRIGHT[:, ::-1], 3: UPRIGHT[::-1, ::-1], 4: UPRIGHT[::-1]},
    **{5: UPRIGHT.T, 6: np.rot90(UPRIGHT), 7: UPRIGHT[::-1, ::-1].T, 8: np.rot90(UPRIGHT, -1)},
}


@pytest.mark.parametrize("suffix", ["png", "jpg", "tif", "webp"])
def test_pictures_are_turned_as_their_exif_says(tmp_path, suffix):
    for orientation, stored in TURNED.items():
        exif = Image.Exif()
        exif[0x112] = orientation
        (tmp_path / str(orientation)).mkdir()
        for i in range(2):
            file = tmp_path / str(orientation) / f"{i}.{suffix}"
            options = {"lossless": True} if suffix == "webp" else {}
            Image.fromarray(stored).save(file, exif=exif, **options)
    loaded = data.load(tmp_path, max_train=8)
    assert loaded.shape[1:] == (16, 24)
    upright = torch.tensor(UPRIGHT / 255, dtype=torch.float32)
    assert (loaded.train[0] - upright).abs().max() < (0.05 if suffix == "jpg" else 1e-6)
    new = read_new(tmp_path / "6", inputs=loaded.inputs, classes=loaded.classes).x
    assert (new - upright).abs().max() < 0.05


def test_a_picture_with_damaged_exif_is_read(folder):
    picture = Image.fromarray(RNG.integers(0, 256, (4, 6, 3), dtype=np.uint8))
    picture.save(folder / "cat" / "0.png")
    before = data.load(folder, max_train=8).train[0]
    picture.save(folder / "cat" / "0.png", exif=b"Exif\0\0garbage")
    assert torch.equal(data.load(folder, max_train=8).train[0], before)


GREY = ("1", "L", "LA")


@pytest.mark.parametrize("mode", [*GREY, "P", "CMYK", "RGBA", "YCbCr", "grey P"])
def test_grey_folders_have_one_channel_and_others_three(tmp_path, mode):
    suffix = "tif" if mode in ("CMYK", "YCbCr") else "png"
    colours = Image.fromarray(np.arange(72, dtype=np.uint8).reshape(4, 6, 3) * 3)
    picture = colours.convert("L").convert("P") if mode == "grey P" else colours.convert(mode)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for i in range(3):
            picture.save(tmp_path / name / f"{i}.{suffix}")
    loaded = data.load(tmp_path)
    channels = 1 if mode in (*GREY, "grey P") else 3
    assert loaded.shape == (channels, 4, 6) and loaded.inputs["shape"][0] == channels
    assert f"images as {'grey' if channels == 1 else 'RGB'}, 4 x 6" in loaded.note
    expected = np.asarray(picture.convert("RGB"), np.float32).transpose(2, 0, 1) / 255
    assert np.allclose(loaded.train[0], expected[:channels])


def test_a_test_picture_in_colour_makes_all_pictures_rgb_and_predict_keeps_the_channels(tmp_path):
    for part, mode in (("train", "L"), ("test", "RGB")):
        for name in ("a", "b"):
            for i in range(2):
                image(tmp_path / part / name / f"{i}.png", mode=mode, value=20 * i)
    loaded = data.load(tmp_path)
    assert loaded.shape == (3, 4, 6) and loaded.train[0].shape[1] == 3
    image(tmp_path / "one.grey" / "new.png", mode="L", value=51)
    image(tmp_path / "one.colour" / "new.png", value=51)
    for channels, folder in ((3, "one.grey"), (1, "one.colour"), (1, "one.grey")):
        inputs = loaded.inputs | {"shape": [channels, 4, 6]}
        x = read_new(tmp_path / folder, inputs=inputs, classes=loaded.classes).x
        assert torch.equal(x, torch.full((1, channels, 4, 6), 0.2))


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparent_parts_are_white(tmp_path, mode):
    """A black drawing on a transparent ground is not all black."""
    alpha = Image.fromarray(np.array([[0, 255], [255, 0]], np.uint8))
    picture = Image.new("RGBA" if mode == "P" else mode, (2, 2))
    picture.putalpha(alpha)
    picture = picture.quantize() if mode == "P" else picture
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for i in range(3):
            picture.save(tmp_path / name / f"{i}.png")
    x = data.load(tmp_path).train[0]
    assert torch.equal(x[0, -1], torch.tensor([[1.0, 0], [0, 1]])) and (x == x[0, 0]).all()


def test_the_first_frame_of_an_animation_is_read(tmp_path):
    frames = [Image.fromarray(np.full((3, 3), 60 * i, np.uint8)) for i in range(3)]
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for i in range(3):
            file = tmp_path / name / f"{i}.gif"
            frames[1].save(file, save_all=True, append_images=frames[1:])
    assert torch.equal(data.load(tmp_path).train[0].unique(), torch.tensor([60 / 255]))


@pytest.mark.parametrize("parts", [("",), ("train/", "test/")])
def test_the_first_samples_of_a_folder_are_of_all_classes_in_an_order_of_the_seed(tmp_path, parts):
    for part in parts:
        for value, name in enumerate("abc"):
            for i in range(20):
                image(tmp_path / f"{part}{name}" / f"{i:02}.png", (1, 1), "L", 20 * value + i)
    loaded, again, other = (data.load(tmp_path, seed=seed) for seed in (3, 3, 4))
    for pair, same, changed in zip(
        *((d.train, d.test) for d in (loaded, again, other)), strict=True
    ):
        assert set(pair[1][:12].tolist()) == {0, 1, 2}
        assert torch.equal(pair[0], same[0]) and torch.equal(pair[1], same[1])
        assert not torch.equal(pair[0], changed[0])
        assert torch.equal((255 * pair[0].flatten()).round().long() // 20, pair[1])
    on_disk = data.load(tmp_path, seed=3, on_disk=tmp_path.with_name("kept"))
    assert torch.equal(on_disk.train[0], loaded.train[0])
    assert torch.equal(on_disk.test[1], loaded.test[1])


@pytest.mark.parametrize("content", [b"", b"no image", "half", "32 bit"])
def test_images_that_cannot_be_read_are_named(refused, folder, content):
    file = folder / "cat" / "bad.png"
    if content == "half":
        Image.fromarray(RNG.integers(0, 256, (40, 40, 3), dtype=np.uint8)).save(file)
        file.write_bytes(file.read_bytes()[:2000])
    elif content == "32 bit":
        Image.fromarray(np.full((4, 4), 999, np.int32)).save(file, "TIFF")
    else:
        file.write_bytes(content)
    refused(folder, r"bad.png cannot be read as an image")


@pytest.mark.skipif(sys.platform != "linux", reason="names of files are bytes on Linux alone")
def test_classes_and_pictures_whose_names_are_no_text(refused, folder):
    inputs = {"shape": [3, 4, 6]}
    (folder / "cat" / "0.png").rename(folder / "cat" / os.fsdecode(b"caf\xe9.png"))
    samples = read_new(folder / "cat", inputs=inputs, classes=("cat", "dog"))
    assert samples.names[-1] == "caf\ufffd.png"
    (folder / "cat").rename(folder / os.fsdecode(b"caf\xe9"))
    refused(folder, "the name of the class 'caf_' is no text; change it")


def test_images_that_do_not_fit_in_memory_are_refused(refused, folder):
    refused(f"{folder}@10000000", "8 images of 10000000 x 10000000 do not fit in memory")
