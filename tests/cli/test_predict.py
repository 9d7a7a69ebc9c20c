"""`tpsgd train --save`, `tpsgd predict` and `tpsgd evaluate`, and their mistakes."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest

import tpsgd

TRAIN = [
    "train",
    "--data",
    "pets.csv",
    "--model",
    "mlp:8",
    "--epochs",
    "20",
    "--lr",
    "0.05",
    "--save",
    "model",
]
OWN = """
from torch import nn

class Mine(nn.Linear):
    pass

def net():
    return nn.Sequential(Mine(3, 8), nn.ReLU(), nn.Linear(8, 2))
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A folder with a table of two kinds, which differ in the first column."""
    monkeypatch.chdir(tmp_path)
    rows = np.random.default_rng(0).normal(size=(60, 3))
    kinds = np.where(rows[:, 0] > 0, "dog", "cat")
    lines = [",".join([*map(str, row), kind]) for row, kind in zip(rows, kinds, strict=True)]
    Path("pets.csv").write_text("\n".join(["a,b,c,kind", *lines]))
    Path("new.csv").write_text("c,b,a\n0,0,2.5\n0,0,-2.5\n")
    Path("own.py").write_text(OWN)
    return tmp_path


def test_a_sample_goes_through_the_model_once(says, monkeypatch):
    says(*TRAIN)
    samples, outputs = [], tpsgd.Trained.outputs

    def counted(self, x, **options):
        samples.append(len(x))
        return outputs(self, x, **options)

    monkeypatch.setattr(tpsgd.Trained, "outputs", counted)
    assert says("predict", "model", "--data", "new.csv")[0] == 0 and samples == [2]


def test_train_then_predict_then_evaluate(says):
    code, out, _ = says(*TRAIN)
    assert code == 0 and out.endswith("saved model\n")
    code, out, err = says("predict", "model", "--data", "new.csv")
    head, *rows = csv.reader(out.splitlines())
    assert (code, err) == (0, "") and head == ["sample", "prediction", "p(cat)", "p(dog)"]
    assert [row[:2] for row in rows] == [["1", "dog"], ["2", "cat"]]
    assert all(float(p) + float(q) == pytest.approx(1, abs=1e-4) for *_, p, q in rows)
    assert says("predict", "model", "--data", "new.csv", "--out", "p.csv") == (
        0, "saved 2 predictions in p.csv\n", "",
    )  # fmt: skip
    assert Path("p.csv").read_text() == out
    code, out, _ = says("predict", "model", "--data", "pets.csv")
    assert out.startswith("sample,label,prediction,p(cat),p(dog)\n") and out.count("\n") == 61
    code, out, _ = says("evaluate", "model", "--data", "pets.csv")
    assert code == 0 and out.startswith("accuracy 9") and "of 60 samples (pets.csv)" in out
    code, out, _ = says("evaluate", "model", "--data", "pets.csv", "--json")
    assert json.loads(out)["samples"] == 60


def test_the_folder_says_how_the_model_was_trained(says):
    says(*TRAIN, "--seed", "3", "--rule", "drtp")
    trained = tpsgd.load("model")
    assert trained.run.seed == 3 and trained.run.rule == "drtp"
    assert trained.run.settings["model"] == "mlp:8" and trained.classes == ("cat", "dog")
    scaling = trained.inputs.pop("scaling")
    assert scaling["method"] == "standard" and len(scaling["shift"]) == len(scaling["scale"]) == 3
    assert trained.inputs == {"shape": [3], "columns": ["a", "b", "c"], "label": "kind"}
    assert trained.versions["tpsgd"] == tpsgd.__version__


@pytest.mark.parametrize("scale", ["none", "standard", "minmax"])
def test_scale_is_printed_and_kept_with_the_model(says, scale):
    _, out, _ = says(*TRAIN, "--scale", scale)
    accuracy = out.partition("test accuracy ")[2].partition(" ")[0]
    word = {"none": "unscaled", "standard": "standardised", "minmax": "scaled to 0..1"}[scale]
    assert f"features {word}" in out.partition("data: ")[2] and float(accuracy[:-1]) > 60
    code, out, _ = says("evaluate", "model", "--data", "pets.csv", "--json")
    seen, settings = json.loads(out)["accuracy"], tpsgd.load("model").inputs.get("scaling", {})
    assert code == 0 and seen > 0.7 and settings.get("method", "none") == scale


def test_an_unknown_scale(says):
    code, _, err = says("train", "--data", "pets.csv", "--scale", "standart")
    assert code == 2 and "unknown scale 'standart': did you mean 'standard'?" in err


def test_a_saved_model_agrees_with_the_accuracy_that_train_printed(says):
    _, out, _ = says("train", "--epochs", "1", "--save", "model", "--json")
    accuracy = json.loads(out)["accuracy"]
    _, out, _ = says("evaluate", "model", "--data", "digits", "--json")
    record = json.loads(out)
    assert (record["accuracy"], record["samples"], record["data"]) == (accuracy, 359, "digits")
    right = sum(row.get(name, 0) for name, row in record["confusion"].items())
    assert right / 359 == accuracy and len(record["per_class"]) == 10


def test_evaluate_prints_figures_per_class_and_the_matrix(says, monkeypatch):
    says(*TRAIN)
    monkeypatch.setenv("COLUMNS", "60")
    code, out, _ = says("evaluate", "model", "--data", "pets.csv", "--plot", "matrix.png")
    lines = out.splitlines()
    assert code == 0 and max(map(len, lines)) <= 60
    figures, matrix = lines.index("class  samples  recall   precision"), -3
    assert lines[figures + 1].startswith("cat ") and lines[figures + 2].startswith("dog ")
    assert lines[matrix].split() == ["true", "\\", "predicted", "cat", "dog"]
    cells = [int(cell.replace("·", "0")) for line in lines[-2:] for cell in line.split()[1:]]
    assert sum(cells) == 60 and cells[0] + cells[3] > 54
    assert Path("matrix.png").read_bytes().startswith(b"\x89PNG")
    code, _, err = says("evaluate", "model", "--data", "pets.csv", "--plot", "matrix.gif")
    assert code == 2 and "FILE.png or FILE.svg" in err


def test_evaluate_leaves_the_matrix_of_too_many_classes_out(says, monkeypatch):
    says(*TRAIN)
    monkeypatch.setattr("tpsgd.engine.confusion.MOST_CLASSES", 1)
    words = ("evaluate", "model", "--data", "pets.csv")
    code, out, _ = says(*words)
    assert code == 0 and out.startswith("accuracy ") and "2 classes are too many for a ta" in out
    record = json.loads(says(*words, "--json")[1])
    assert record.keys() == {"accuracy", "samples", "data"} and record["samples"] == 60
    code, _, error = says(*words, "--plot", "matrix.png")
    assert code == 2 and "2 classes are too many for a confusion matrix" in error


def test_names_of_classes_that_are_no_text_are_printed_as_their_numbers(says):
    says(*TRAIN)
    trained = tpsgd.load("model")
    trained.run.model = trained.model
    trained.run.save("odd", classes=("a\ud800", "b"), inputs=trained.inputs)
    code, out, _ = says("predict", "odd", "--data", "pets.csv")
    assert code == 0 and "p(a\\ud800)" in out


def test_a_model_is_not_replaced_unless_asked_and_that_is_said_before_training(says, monkeypatch):
    assert says(*TRAIN)[0] == 0
    before = Path("model/model.json").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr("tpsgd.engine.arm.Arm.train", lambda *_, **__: pytest.fail("it trained"))
        code, _, err = says(*TRAIN)
    assert code == 2 and "already holds a model" in err and err.count("\n") == 1
    assert Path("model/model.json").read_bytes() == before
    assert says(*TRAIN, "--seed", "1", "--overwrite")[0] == 0
    assert tpsgd.load("model").run.seed == 1


def test_a_model_of_your_own_file(says):
    train = ["train", "--data", "pets.csv", "--model", "own.py:net", "--save", "model"]
    assert says(*train)[0] == 0
    code, _, err = says("predict", "model", "--data", "new.csv")
    assert code == 2 and "--factory own.py:net" in err
    words = ("--data", "pets.csv", "--model", "model", "--epochs", "1", "--lr", "1e-9")
    code, _, err = says("train", *words, "--factory", "own.py:net", "--save", "again")
    assert code == 0, err
    again = (tpsgd.load(folder, factory="own.py:net").model for folder in ("model", "again"))
    for before, after in zip(*(m.parameters() for m in again), strict=True):
        assert before.allclose(after, atol=1e-6)  # it began with the weights that were saved
    code, _, err = says("train", "--data", "pets.csv", "--factory", "own.py:net")
    assert code == 2 and "--factory is for a saved model" in err
    code, out, _ = says("predict", "model", "--data", "new.csv", "--factory", "own.py:net")
    assert code == 0 and out.count("\n") == 3
    Path("own.py").write_text(OWN + "\n# changed\n")
    code, _, err = says("predict", "model", "--data", "new.csv", "--model", "own.py:net")
    assert code == 2 and "the file has changed" in err


def test_a_full_disk_at_the_end_loses_no_result(says, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tpsgd.saved.folder.write_whole", full)
    code, out, err = says(*TRAIN)
    assert code == 1 and "No space left on device" in err and err.count("\n") == 1
    assert "test accuracy" in out and "saved" not in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("predict nowhere --data new.csv", "nowhere holds no model: there is no model.json"),
        ("predict model --data gone.csv", "there is no gone.csv"),
        ("predict model", "Missing option '--data'"),
        ("predict model --data own.py", "is not one of FILE.npz"),
        ("predict model --data new.csv --out none/p.csv", "there is no folder none"),
        ("predict model --data new.csv --device gpu", "unknown device 'gpu'"),
        ("evaluate model --data new.csv", "new.csv has no labels to compare with"),
        ("evaluate model --data digits", "samples of shape (1, 8, 8), the model was trained on"),
    ],
)
def test_mistakes_are_one_line(says, words, said):
    says(*TRAIN)
    code, _, err = says(*words.split())
    assert code == 2 and said in err and err.count("\n") == 1


def test_a_model_without_class_names_says_what_to_do(says):
    says(*TRAIN)
    tpsgd.load("model").run.save("model", overwrite=True)
    code, _, err = says("predict", "model", "--data", "new.csv")
    assert code == 2 and "has no names of classes: save it with run.save(" in err


def test_a_model_with_other_classes_than_the_data_is_refused_before_it_is_trained(says):
    Path("own.py").write_text(OWN.replace("8, 2)", "8, 7)"))
    words = [*TRAIN[:4], "own.py:net", *TRAIN[5:]]
    code, out, err = says(*words)
    assert (code, out) == (2, "") and "tells 7 classes apart, but classes has 2 names" in err


@pytest.mark.parametrize(
    ("labels", "reason"),
    [
        (("?", "dog"), "new.csv has the label '?', which is not a class of the model"),
        (("cow", "cow"), "new.csv has the label 'cow', which is not"),
        (("", "dog"), "new.csv, line 2 has no text in the column 'kind'"),
        (("", ""), "new.csv, line 2 has no text"),
    ],
)
def test_a_prediction_needs_no_labels(says, labels, reason):
    says(*TRAIN)
    rows = [f"{a},0,0,{label}" for a, label in zip((2.5, -2.5), labels, strict=True)]
    Path("new.csv").write_text("\n".join(["a,b,c,kind", *rows]))
    code, out, err = says("predict", "model", "--data", "new.csv")
    assert code == 0 and err.startswith(f"tpsgd: the labels are ignored: {reason}")
    assert [row[:2] for row in csv.reader(out.splitlines())] == [
        ["sample", "prediction"], ["1", "dog"], ["2", "cat"],
    ]  # fmt: skip
    code, out, err = says("evaluate", "model", "--data", "new.csv")
    assert (code, out) == (2, "") and err.startswith(f"tpsgd: {reason}")
    Path("new.csv").write_text("a,b,kind\n1,2,\n")
    assert (
        "no column 'c', which the model reads" in says("predict", "model", "--data", "new.csv")[2]
    )


def test_images_in_other_folders_than_classes_are_predicted(says):
    Image = pytest.importorskip("PIL.Image")
    for folder in ("train/cat", "train/dog", "unsorted/monday", "unsorted/tuesday"):
        Path(folder).mkdir(parents=True)
        for i in range(4):
            colour = (250 * ("cat" in folder), 20 * i, 9)
            Image.new("RGB", (4, 4), colour).save(Path(folder, f"{i}.png"))
    words = ("--data", "train", "--model", "mlp:4", "--epochs", "1", "--save", "m")
    assert says("train", *words)[0] == 0
    code, out, err = says("predict", "m", "--data", "unsorted")
    assert code == 0 and out.count("\n") == 9 and "label" not in out.splitlines()[0]
    assert err.startswith("tpsgd: the labels are ignored: unsorted has the label 'monday'")


def test_a_model_of_colour_pictures_goes_on_with_grey_ones(says):
    """A folder of grey pictures alone has one channel; a model keeps the channels that it has."""
    from PIL import Image

    for folder, mode in (("colour", "RGB"), ("grey", "L")):
        for i in range(10):
            file = Path(folder, "ab"[i % 2], f"{i}.png")
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (8, 8), (200 * (i % 2), 20 * i, 9)).convert(mode).save(file)
    words = ("--epochs", "1", "--model")
    assert says("train", "--data", "colour", *words, "cnn:4x3", "--save", "m")[0] == 0
    code, *_ = says("train", "--data", "grey", *words, "m", "--save", "again", "--on-disk", "kept")
    assert code == 0 and tpsgd.load("again").inputs["shape"] == [3, 8, 8]
    assert says("evaluate", "again", "--data", "grey")[0] == 0
    assert says("train", "--data", "grey", *words, "cnn:4x3", "--save", "of-grey")[0] == 0
    assert tpsgd.load("of-grey").inputs["shape"] == [1, 8, 8]
    assert says("evaluate", "of-grey", "--data", "colour")[0] == 0


def test_the_help_says_which_command_needs_labels(says):
    text = {word: " ".join(says(word, "--help")[1].split()) for word in ("predict", "evaluate")}
    assert "without" in text["predict"] and "without" not in text["evaluate"]


def test_training_goes_on_from_a_saved_model(says):
    says(*TRAIN)
    Path("more.csv").write_text(Path("pets.csv").read_text().replace("a,b,c,kind", "a,b,c,type"))
    words = ("--model", "model", "--label", "type", "--epochs", "1", "--lr", "1e-9")
    code, out, err = says("train", "--data", "more.csv", *words, "--json", "--save", "again")
    assert (code, err) == (0, "")
    first, again = tpsgd.load("model"), tpsgd.load("again")
    for before, after in zip(first.model.parameters(), again.model.parameters(), strict=True):
        assert before.allclose(after, atol=1e-6)  # it began with the weights that were saved
    assert again.inputs == first.inputs | {"label": "type"} and again.classes == first.classes
    assert json.loads(out)["settings"]["model"] == "model"
    code, out, _ = says("train", "--data", "more.csv", *words, "--max-train", "10", "--json")
    assert code == 0 and json.loads(out)["sample_passes"] == 20


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--data digits", "the model in model tells 2 classes apart, cat, dog, ...; those of"),
        ("--data other.csv", "other.csv has no column 'b', which the model reads"),
        ("--data cows.csv", "cows.csv has the label 'cow', which is not a class of the model"),
        ("--data new.csv", "new.csv has no labels to learn from"),
        ("--data pets.csv --save model", "--save model would write to"),
        (
            "--data pets.csv --drop a",
            "model in model has its own columns, scaling and layers: leave --drop out",
        ),
        ("--data pets.csv --scale none", "layers: leave --scale out"),
        ("--data pets.csv --activation relu", "layers: leave --activation out"),
    ],
)
def test_what_a_saved_model_cannot_go_on_with_is_one_line(says, words, message):
    says(*TRAIN)
    Path("other.csv").write_text(Path("pets.csv").read_text().replace("a,b,c", "a,d,c"))
    Path("cows.csv").write_text(Path("pets.csv").read_text().replace("dog", "cow"))
    code, out, err = says("train", "--model", "model", *words.split())
    assert (code, out) == (2, "") and message in err and err.count("\n") == 1


def test_sensor_tables_from_training_to_prediction(says):
    rows = [f"{('tap', 'hold')[i % 2]},rec{i},{i % 2 + i / 200},{'' if i == 7 else i % 5}"
            for i in range(60)]  # fmt: skip
    Path("s.csv").write_text("\n".join(["gesture,id,ax,ay", *rows]))
    words = [
        "--data",
        "s.csv",
        "--model",
        "mlp:8",
        "--epochs",
        "20",
        "--lr",
        "0.05",
        "--batch-size",
        "8",
        "--save",
        "m",
    ]
    code, _, err = says("train", *words)
    assert code == 2 and "say --label gesture" in err and "measurements, --drop id." in err
    chosen = ("--label", "gesture", "--drop", "id", "--impute", "median")
    assert says("train", *words, *chosen)[0] == 0
    code, out, _ = says("evaluate", "m", "--data", "s.csv", "--json")
    assert code == 0 and json.loads(out)["accuracy"] > 0.9
    Path("t.csv").write_text(Path("s.csv").read_text().replace("gesture", "kind"))
    code, out, _ = says("evaluate", "m", "--data", "t.csv", "--label", "kind", "--json")
    assert code == 0 and json.loads(out)["samples"] == 60
