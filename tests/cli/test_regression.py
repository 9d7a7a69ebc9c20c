"""The command line on numbers, on classes of steps and pixels, and on models of any class."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest

import tpsgd

OWN = """
import torch
from torch import nn

class Residual(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.a, self.b = nn.Linear(n, n), nn.Linear(n, n)
    def forward(self, x):
        return torch.relu(x + self.b(torch.relu(self.a(x))))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.block, self.head = nn.Linear(3, 16), Residual(16), nn.Linear(16, 2)
    def forward(self, x):
        return self.head(self.block(torch.relu(self.first(x))))

class Pixels(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 2, 1)
    def forward(self, x):
        return self.head(torch.relu(self.body(x)))

class Steps(nn.Module):
    def __init__(self, outputs=3):
        super().__init__()
        self.body, self.head = nn.Conv1d(2, 8, 1), nn.Linear(8, outputs)
    def forward(self, x):
        return self.head(torch.relu(self.body(x.transpose(1, 2))).transpose(1, 2))

def numbers_of_steps():
    return Steps(1)
"""
TASK = ["--task", "regression", "--label", "price,area"]
SHORT = ["--epochs", "60", "--lr", "0.01", "--batch-size", "16"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A table with two columns of numbers to predict, and a file of models."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(80, 3)).round(4)
    y = np.stack([1000 + 50 * x[:, 0], x[:, 1] - x[:, 2]], 1)
    lines = [",".join(map(str, row)) for row in np.concatenate([x, y], 1)]
    Path("homes.csv").write_text("\n".join(["a,b,c,price,area", *lines]))
    Path("new.csv").write_text("c,b,a\n0,0,1\n0,0,-1\n")
    Path("own.py").write_text(OWN)
    return tmp_path


def test_numbers_from_training_to_prediction(says):
    words = ["train", "--data", "homes.csv", *TASK, "--model", "mlp:16", *SHORT]
    code, out, _ = says(*words, "--save", "m")
    assert code == 0 and "test R² 0.9" in out and "accuracy" not in out
    code, out, _ = says("predict", "m", "--data", "new.csv")
    head, *rows = csv.reader(out.splitlines())
    assert code == 0 and head == ["sample", "price", "area"]
    assert [float(row[1]) for row in rows] == pytest.approx([1050, 950], abs=30)
    code, out, _ = says("predict", "m", "--data", "homes.csv", "--out", "p.csv")
    head = Path("p.csv").read_text().splitlines()[0]
    assert head == "sample,label(price),label(area),price,area"
    code, out, _ = says("evaluate", "m", "--data", "homes.csv")
    assert code == 0 and out.startswith("R² 0.9") and "of 80 samples (homes.csv)" in out
    rows = dict(line.split() for line in out.splitlines()[-2:])
    predicted = tpsgd.data.load("homes.csv", task="regression", label=["price", "area"])
    errors = tpsgd.load("m").errors(predicted.train)
    code, out, _ = says("evaluate", "m", "--data", "homes.csv", "--json")
    record = json.loads(out)
    assert record["mean_absolute_error"]["area"] == pytest.approx(float(rows["area"]), rel=1e-3)
    assert float(rows["price"]) == pytest.approx(float(errors[0]), rel=0.3) and record["r2"] > 0.9
    code, out, _ = says("train", "--model", "m", "--data", "homes.csv", "--epochs", "1", "--json")
    assert code == 0 and json.loads(out)["r2"] > 0.9 and "accuracy" not in json.loads(out)


def test_the_loss_of_numbers(says):
    words = ["train", "--data", "homes.csv", *TASK, "--model", "mlp:4", "--epochs", "1", "--json"]
    losses = {}
    for loss in (None, "mse", "l1", "huber"):
        code, out, _ = says(*words, *(["--loss", loss] if loss else []))
        record = json.loads(out)
        assert code == 0 and record["settings"]["loss"] == (loss or "mse")
        losses[loss] = record["history"][-1]["loss"]
    assert losses[None] == losses["mse"] and len(set(losses.values())) == 3


def test_labels_of_0_and_1_are_numbers_if_that_is_said(says):
    Path("flags.csv").write_text(
        "\n".join(["a,b,y", *(f"{i % 7},{i % 5},{i % 2}" for i in range(60))])
    )
    words = ["--data", "flags.csv", "--task", "regression", "--model", "mlp:8", "--epochs", "2"]
    code, out, _ = says("train", *words, "--save", "m")
    assert code == 0 and "test R²" in out and "accuracy" not in out
    assert says("evaluate", "m", "--data", "flags.csv")[1].startswith("R²")


def test_plans_and_comparisons_of_numbers(says):
    words = ["--data", "homes.csv", *TASK]
    code, out, _ = says("plan", *words, "--model", "own.py:Net", "--json")
    assert (
        code == 0 and [b["name"] for b in json.loads(out)["lines"][0]["blocks"]][-1] == "3: Linear"
    )
    short = ["--epochs", "1", "--restarts", "1", "--rules", "readout-learned"]
    assert says("compare", *words, "--model", "own.py:Net", *short)[0] == 0


def test_a_model_of_any_class(says):
    words = ["--data", "homes.csv", *TASK, "--model", "own.py:Net", *SHORT]
    code, out, _ = says("train", *words, "--save", "m")
    assert code == 0 and "block: Residual" in out and "test R² 0." in out
    code, out, _ = says("predict", "m", "--data", "new.csv", "--model", "own.py:Net")
    assert code == 0 and out.startswith("sample,price,area\n1,")
    assert "own.py:Net" in says("predict", "m", "--data", "new.csv")[2]


def test_a_class_for_each_pixel(says):
    x = np.random.default_rng(0).random((40, 1, 6, 6), np.float32)
    y = np.where(x[:, 0] > 0.5, 7, 3)
    y[:, 0] = -100
    np.savez("pixels.npz", x=x, y=y)
    own = ("--model", "own.py:Pixels")
    assert says("train", "--data", "pixels.npz", *own, *SHORT, "--save", "m")[0] == 0
    code, _, err = says("predict", "m", "--data", "pixels.npz", *own)
    assert code == 2 and "write --out FILE.npz" in err and err.count("\n") == 1
    assert says("predict", "m", "--data", "pixels.npz", *own, "--out", "p.npz")[0] == 0
    with np.load("p.npz") as arrays:
        predicted, shares = arrays["prediction"], arrays["probabilities"]
        assert (predicted == y)[y > 0].mean() > 0.9 and shares.shape == (40, 6, 6, 2)
        assert np.allclose(shares.sum(-1), 1, atol=1e-5) and arrays["classes"].tolist() == [3, 7]
    code, out, _ = says("evaluate", "m", "--data", "pixels.npz", *own)
    assert code == 0 and "of 1,200 labels" in out and out.splitlines()[3].startswith("3 ")
    assert says("plan", "--data", "pixels.npz", *own)[0] == 0


@pytest.mark.parametrize("numbers", [False, True])
def test_a_class_or_a_number_for_each_step(says, numbers):
    x = np.random.default_rng(0).normal(size=(60, 4, 2)).astype(np.float32)
    y = x.sum(-1) * 5 if numbers else np.digitize(x[..., 0], [-0.5, 0.5])
    np.savez("steps.npz", x=x, y=y)
    own = ("--model", "own.py:numbers_of_steps" if numbers else "own.py:Steps")
    task = ("--task", "regression") if numbers else ()
    words = ("--data", "steps.npz", *own)
    assert says("train", *words, *task, *SHORT, "--save", "m")[0] == 0
    code, out, _ = says("predict", "m", *words)
    head, *rows = csv.reader(out.splitlines())
    steps = [f"step {i}" for i in range(1, 5)]
    assert code == 0 and head == ["sample", *(f"label({step})" for step in steps), *steps]
    cells = np.array(rows, float)
    assert np.allclose(cells[:, 1:5], y, rtol=1e-4)
    distance = abs(cells[:, 5:] - y)
    assert distance.mean() < 1 if numbers else (distance > 0).mean() < 0.1
    code, out, _ = says("evaluate", "m", *words)
    assert code == 0 and out.startswith("R² 0.9" if numbers else "accuracy 9")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("train --data homes.csv --label price --loss l1", "is not a whole number or a name"),
        ("train --data digits --loss l1", "--loss is for numbers: add --task regression"),
        ("train --data digits --task regression", "digits has classes"),
        ("train --data homes.csv --task regression --loss bce", "'--loss'"),
        ("train --data homes.csv --task regression --label prise", "no column 'prise'"),
        ("train --data homes.csv --label price", "to predict numbers, say --task regression."),
        ("train --model m --data homes.csv --task regression", "leave --task out"),
        ("evaluate m --data homes.csv --plot a.png", "numbers have no confusion matrix"),
        ("evaluate m --data new.csv", "new.csv has no labels to compare with"),
    ],
)
def test_mistakes_are_one_line(says, words, said):
    train = ["train", "--data", "homes.csv", *TASK, "--model", "mlp:4", "--epochs", "1"]
    assert not words.partition(" m ")[2] or says(*train, "--save", "m")[0] == 0
    code, _, err = says(*words.split())
    assert code == 2 and said in err and err.count("\n") == 1


def test_a_model_that_was_saved_without_names(says):
    train = ["train", "--data", "homes.csv", *TASK, "--model", "mlp:4", "--epochs", "1"]
    assert says(*train, "--save", "m")[0] == 0
    tpsgd.load("m").run.save("m", overwrite=True)
    np.savez("x.npz", x=np.random.rand(9, 3), y=np.random.rand(9, 2))
    assert says("predict", "m", "--data", "x.npz")[1].startswith("sample,label(y1),label(y2),y1,y2")
    assert says("evaluate", "m", "--data", "x.npz")[1].splitlines()[-2].startswith("y1 ")


def test_labels_that_cannot_be_read_are_ignored_by_predict(says):
    train = ["train", "--data", "homes.csv", *TASK, "--model", "mlp:4", "--epochs", "1"]
    assert says(*train, "--save", "m")[0] == 0
    Path("bad.csv").write_text("a,b,c,price,area\n1,2,3,high,1\n")
    code, out, err = says("predict", "m", "--data", "bad.csv")
    assert code == 0 and out.startswith("sample,price,area\n") and "'high' is no number" in err
    np.savez("x.npz", x=np.random.rand(9, 3), y=np.random.rand(9, 2))
    words = ["--data", "x.npz", "--model", "mlp:4", "--epochs", "1", "--save", "n"]
    assert says("train", *words, "--task", "regression")[0] == 0
    np.savez("x.npz", x=np.random.rand(9, 3), y=np.random.rand(9))
    code, out, err = says("predict", "n", "--data", "x.npz")
    assert code == 0 and out.startswith("sample,y1,y2\n") and "the labels are ignored" in err
