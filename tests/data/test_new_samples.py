"""New samples are read as the training samples were, with or without labels."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tpsgd import Padded, TpsgdError, data
from tpsgd.data.new_samples import read_new

NUMBERS = np.random.default_rng(0).normal(size=(12, 4)).astype("float32")
KINDS = np.array(["cat", "dog", "owl"])[np.arange(12) % 3]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def table(name, columns, rows):
    text = ",".join(columns) + "\n" + "".join(",".join(map(str, row)) + "\n" for row in rows)
    Path(name).write_text(text)
    return name


@pytest.fixture
def pets():
    rows = [[*map(repr, map(float, x)), kind] for x, kind in zip(NUMBERS, KINDS, strict=True)]
    return data.load(table("pets.csv", [*"abcd", "kind"], rows), scale="none")


def new(spec, pets, **options):
    return read_new(spec, **({"inputs": pets.inputs, "classes": pets.classes} | options))


def test_a_data_set_says_what_its_samples_look_like(pets):
    expected = {"shape": [4], "columns": list("abcd"), "label": "kind"}
    assert pets.inputs == expected
    np.savez("bytes.npz", x=np.zeros((9, 5, 5), np.uint8), y=np.arange(9) % 3)
    scaling = {"method": "bytes"}
    assert data.load("bytes.npz").inputs == {"shape": [1, 5, 5], "scaling": scaling}
    assert data.load("bytes.npz", on_disk="kept").inputs == {"shape": [1, 5, 5], "scaling": scaling}
    np.savez("tokens.npz", tokens=np.arange(18).reshape(9, 2), y=np.arange(9) % 3)
    assert data.load("tokens.npz").inputs == {"shape": [2], "vocabulary": 18}


def test_columns_are_read_by_name_in_any_order_and_others_ignored(pets):
    rows = [["x", d, c, "some text", b, a] for a, b, c, d in NUMBERS.tolist()]
    table("new.csv", ["id", "d", "c", "remark", "b", "a"], rows)
    samples = new("new.csv", pets)
    np.testing.assert_array_equal(samples.x, NUMBERS)
    assert samples.y is None and samples.names == [str(i) for i in range(1, 13)]


def test_labels_become_class_indices_and_one_class_is_enough(pets):
    table("new.csv", [*"abcd", "kind"], [[*NUMBERS[0], "owl"], [*NUMBERS[1], "owl"]])
    assert new("new.csv", pets).y.tolist() == [2, 2]
    table("new.csv", [*"abcd", "kind"], [[*NUMBERS[0], "cow"]])
    with pytest.raises(TpsgdError, match="label 'cow', which is not a class of the model"):
        new("new.csv", pets)


def test_a_table_of_one_row_and_one_without_a_column(pets):
    table("new.csv", list("abcd"), [NUMBERS[0]])
    assert new("new.csv", pets).x.shape == (1, 4)
    table("new.csv", list("abc"), [NUMBERS[0][:3]])
    with pytest.raises(TpsgdError, match="no column 'd', which the model reads"):
        new("new.csv", pets)


def test_a_table_with_other_separators_is_refused_with_those_that_are_read(pets):
    Path("new.csv").write_text("a|b|c|d\n1|2|3|4\n")
    with pytest.raises(TpsgdError, match="'a', which the model reads: columns are separated by"):
        new("new.csv", pets)


def test_columns_of_one_name_are_refused_if_the_model_reads_them(pets):
    table("new.csv", [*"abcd", "note", "note"], [[*NUMBERS[0], 1, 2]])
    assert new("new.csv", pets).x.tolist() == [NUMBERS[0].tolist()]
    for twice in ("b", "kind"):
        table("new.csv", [*"abcd", "kind", twice], [[*NUMBERS[0], "owl", "owl"]])
        with pytest.raises(TpsgdError, match=f"several columns of the name '{twice}'"):
            new("new.csv", pets)


@pytest.mark.parametrize("cell", ["", "nan", "1e99", "word"])
def test_a_cell_that_is_no_number_is_named(pets, cell):
    table("new.csv", list("abcd"), [NUMBERS[0], [1, cell, 2, 3]])
    with pytest.raises(TpsgdError, match=r"line 3, column 'b'"):
        new("new.csv", pets)


def test_tables_of_time_steps_are_named_by_their_sequence():
    rows = [
        [name, t, t + i, "ab"[i % 2]] for i, name in enumerate("pqrstuvw") for t in range(2 + i)
    ]
    table("steps.csv", ["sequence", "time", "value", "label"], rows)
    steps = data.load("steps.csv", scale="none")
    table("new.csv", ["value", "sequence", "time"], [(5, "z", 1), (4, "z", 0), (7, "y", 3)])
    samples = new("new.csv", steps)
    assert isinstance(samples.x, Padded) and samples.names == ["y", "z"]
    assert samples.x.lengths.tolist() == [1, 2]
    assert samples.x.data[..., 0].tolist() == [[7, 0], [4, 5]]


def test_arrays_with_and_without_labels_and_their_test_part():
    np.savez("train.npz", x=NUMBERS, y=KINDS)
    train = data.load("train.npz")
    np.savez("new.npz", x=NUMBERS[:2])
    samples = new("new.npz", train)
    assert samples.y is None and torch.equal(samples.x, torch.from_numpy(NUMBERS[:2]))
    np.savez("new.npz", x=NUMBERS, y=KINDS, x_test=NUMBERS[:1], y_test=KINDS[:1])
    samples = new("new.npz", train)
    assert samples.y.tolist() == [0] and len(samples.x) == 1
    np.savez("new.npz", z=NUMBERS)
    with pytest.raises(TpsgdError, match=r"holds z; expected x and y.*tokens in place of x"):
        new("new.npz", train)


def test_bytes_and_numbers_are_not_mixed_up():
    pixels = np.arange(9 * 25, dtype=np.uint8).reshape(9, 5, 5)
    np.savez("bytes.npz", x=pixels, y=np.arange(9) % 3)
    np.savez("floats.npz", x=pixels[:, None].astype("float32"), y=np.arange(9) % 3)
    of_bytes, of_floats = data.load("bytes.npz"), data.load("floats.npz")
    torch.testing.assert_close(
        new("bytes.npz", of_bytes).x[:, 0] * 255, torch.tensor(pixels).float()
    )
    assert new("floats.npz", of_floats).x.max() > 200
    with pytest.raises(TpsgdError, match="samples are numbers, but the model was trained on bytes"):
        new("floats.npz", of_bytes)
    with pytest.raises(TpsgdError, match="samples are bytes, but the model was trained on numbers"):
        new("bytes.npz", of_floats)


def test_scaling_with_statistics_of_the_training_samples(pets):
    scaling = {"method": "standard", "shift": [1, 2, 3, 4], "scale": [2, 2, 2, 4]}
    table("new.csv", list("abcd"), [[1, 2, 3, 4], [3, 2, 5, 8]])
    samples = new("new.csv", pets, inputs=pets.inputs | {"scaling": scaling})
    assert samples.x.tolist() == [[0, 0, 0, 0], [1, 0, 1, 1]]


@pytest.mark.parametrize(
    "wrong",
    [
        {"shape": "abc"},
        {"shape": [-1]},
        {"columns": 5},
        {"columns": [5]},
        {"label": 3},
        {"scaling": "standard"},
        {"scaling": {"shift": [1, 2, 3, 4]}},
        {"scaling": {"shift": [1, 2], "scale": [1, 2]}},
        {"scaling": {"shift": ["a"], "scale": [None]}},
        {"scaling": {"shift": [10**400] * 4, "scale": [1] * 4}},
        {"scaling": {"shift": [float("nan")] * 4, "scale": [1] * 4}},
        {"imputation": {"values": [10**400] * 4}},
        {"shape": [10**400]},
    ],
)
def test_inputs_that_make_no_sense_are_refused(pets, wrong):
    with pytest.raises(TpsgdError):
        new("pets.csv", pets, inputs=pets.inputs | wrong)


def test_shapes_must_agree_but_for_the_number_of_steps():
    np.savez("train.npz", x=np.zeros((9, 4, 3), "float32"), y=np.arange(9) % 3)
    np.savez("longer.npz", x=np.zeros((2, 7, 3), "float32"))
    np.savez("wider.npz", x=np.zeros((2, 4, 5), "float32"))
    train = data.load("train.npz")
    assert new("longer.npz", train).x.shape == (2, 7, 3)
    with pytest.raises(
        TpsgdError, match=r"shape \(4, 5\), the model was trained on shape \(4, 3\)"
    ):
        new("wider.npz", train)


def photo(name, shade, size):
    Image.new("RGB", size, (shade, 0, 0)).save(name)


def test_images_get_the_size_of_the_training_images(folder):
    for kind in ("cat", "dog"):
        (folder / "photos" / kind).mkdir(parents=True)
        for i in range(5):
            photo(folder / "photos" / kind / f"{i}.png", 20 * i, (6, 4))
    train = data.load("photos")
    (folder / "new" / "deep").mkdir(parents=True)
    photo("new/b.png", 255, (30, 40))
    photo("new/deep/a.png", 51, (6, 4))
    samples = new("new", train)
    assert samples.x.shape == (2, 3, 4, 6) and samples.y is None
    assert samples.names == ["b.png", "deep/a.png"]
    assert samples.x[:, 0].amax((1, 2)).tolist() == pytest.approx([1, 0.2])
    samples = new("photos", train)
    assert len(samples.x) == 10 and samples.y.tolist() == [0] * 5 + [1] * 5
    assert samples.names[0] == "cat/0.png"
    (folder / "empty").mkdir()
    with pytest.raises(TpsgdError, match="has no images"):
        new("empty", train)


def test_images_for_a_model_of_tables_and_the_reverse(pets, folder):
    (folder / "photos").mkdir()
    photo("photos/a.png", 1, (4, 4))
    with pytest.raises(TpsgdError, match="not images as"):
        new("photos", pets)
    inputs = {"shape": [3, 4, 4]}
    with pytest.raises(TpsgdError, match="not trained on a table"):
        read_new("pets.csv", inputs=inputs, classes=["a"])


def test_functions_and_names_that_do_not_exist(pets):
    Path("mine.py").write_text(
        "import numpy as np\ndef new(): return np.ones((2, 4)), ['owl', 'cat']\n"
    )
    assert new("mine.py:new", pets).y.tolist() == [2, 0]
    with pytest.raises(TpsgdError, match=r"there is no gone\.csv"):
        new("gone.csv", pets)
    with pytest.raises(TpsgdError, match="did you mean 'digits'"):
        new("diggits", pets)
