"""Shifted domains: accuracy before and after adapting, the verdict, old samples, mistakes."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from experiments import recovery, shifts
from experiments.recovery import Recovery, draw_recovery
from tpsgd import TpsgdError, adapt

NET = """
import torch
from torch import nn
from tpsgd_adapt import Backbone

def make():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(6, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        )
    taps = {"early": "2", "late": "5"}
    return Backbone(net, taps, mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25), name="tiny")

def flat():
    return Backbone(nn.Sequential(nn.Linear(3, 4), nn.ReLU()), ["1"])
"""
SMALL = ("--backbone", "net.py:make", "--data", "images.npz", "--epochs", "2")
ARMS = ["readout-learned", "backprop", "frozen", "linear probe"]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Run in a folder with a backbone's code and images, noise with a colour for every class."""
    (tmp_path / "net.py").write_text(NET)
    y = np.arange(240) % 3
    x = np.random.default_rng(0).integers(0, 120, (240, 8, 8, 3))
    x[np.arange(240), :, :, y] += 100
    np.savez(tmp_path / "images.npz", x=x.transpose(0, 3, 1, 2) / np.float32(255), y=y)
    np.savez(tmp_path / "vectors.npz", x=x[:60, 0, 0].astype("float32"), y=y[:60])
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def run(monkeypatch, capsys):
    """A function that runs the experiment: its record, and what it prints."""

    def call(*words: str) -> tuple[dict, str]:
        monkeypatch.setattr(sys, "argv", ["shifts", *SMALL, "--out", "study", *words])
        shifts.main()
        return json.loads(Path("study/shifts.json").read_text()), capsys.readouterr().out

    return call


@pytest.mark.full
def test_shifts(run):
    record, out = run("--shift", "grey,invert", "--shots", "4", "--replay", "2")
    assert "grey: adaptation is due (p " in out and "\ninvert: adaptation is due (p " in out
    assert "\nafter: learned from 4 labelled samples and 2 old ones a class; figures" in out
    files = {path.name for path in Path("study").iterdir()}
    assert files == {"grey.png", "invert.png", "shifts.json"}
    assert all(Path(f"study/{w}.png").read_bytes()[:4] == b"\x89PNG" for w in ("grey", "invert"))
    for shift in record["shifts"].values():
        rows = {row["arm"]: row for row in shift["arms"]}
        assert list(rows) == ARMS and shift["detector"]["auroc"] > 0.7
        for row in rows.values():
            assert row["forgotten"] == row["known_before"] - row["known_after"]
    probe = record["shifts"]["invert"]["arms"][-1]
    assert probe["new_before"] < 0.5 < probe["new_after"]


def test_a_shift_of_few_samples_has_no_verdict(run):
    words = ("--max-train", "30", "--shift", "dim", "--shots", "2", "--tap", "early,late")
    assert "dim: too few samples to say whether it is new" in run(*words)[1]


def test_old_samples_among_the_few_are_not_forgotten(run):
    words = ("--shift", "invert", "--shots", "3", "--replay")
    rows = [run(*words, replay)[0]["shifts"]["invert"]["arms"][-1] for replay in ("0", "9")]
    assert rows[0]["known_after"] < 0.7 and rows[1]["known_after"] > 0.9
    assert rows[0]["known_before"] == rows[1]["known_before"]


def test_figures_have_room(tmp_path):
    """Nothing of the legend or the title is cut off, however few arms there are."""
    row = Recovery("tpsgd-l2", "grey", 1.0, 1.0, 1.0, 1.0, 1.0, 1, 1)
    for arms in (1, 2, 4):
        file = draw_recovery([row] * arms, tmp_path / "a.png", "grey: 10 labelled samples a class")
        pixels = np.asarray(Image.open(file).convert("L"))
        edge = np.concatenate([pixels[:3].ravel(), pixels[:, :3].ravel(), pixels[:, -3:].ravel()])
        assert (edge == 255).all()
        file.unlink()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--shift gray", "did you mean 'grey'?"),
        ("--shift grey,grey", "--shift grey,grey: name each shift once"),
        ("--shift grey --shots 99", "fewer than 99"),
        ("--shift grey --shots 2 --replay 99", "fewer than 99"),
        ("--data vectors.npz --shift grey --shots 2 --backbone net.py:flat", "images"),
    ],
)
def test_a_mistake_is_an_error_before_training(run, monkeypatch, words, said):
    monkeypatch.setattr(adapt, "encode", None)
    monkeypatch.setattr(recovery, "fit", None)
    with pytest.raises(TpsgdError) as error:
        run(*words.split())
    assert said in str(error.value)


def test_an_interruption_keeps_the_arms_that_are_done(run, monkeypatch):
    fit, calls = recovery.fit, []

    def interrupted(*arguments, **options):
        calls.append(1)
        if len(calls) == 3:  # the second arm's first
            raise KeyboardInterrupt
        return fit(*arguments, **options)

    monkeypatch.setattr(recovery, "fit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run("--shift", "invert")
    record = json.loads(Path("study/shifts.json").read_text())
    assert [row["arm"] for row in record["shifts"]["invert"]["arms"]] == ARMS[:1]
    assert Path("study/invert.png").is_file()
