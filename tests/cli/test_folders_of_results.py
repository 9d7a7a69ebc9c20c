"""Folders of the command line: a second run, a full or read-only disk, logs, failed arms."""

import csv
import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

import tpsgd
from tpsgd.cli.app import app
from tpsgd.common.output import output_file, output_folder
from tpsgd.engine import arm as arm_module

pytestmark = pytest.mark.usefixtures("unwatched")
SMALL = ("--data", "two.npz", "--model", "mlp:4", "--epochs", "1", "--batch-size", "16")
COMPARE = ("compare", *SMALL, "--restarts", "1", "--rules", "drtp", "--out", "r")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    x = np.random.default_rng(0).normal(size=(60, 6)).astype("float32")
    np.savez(tmp_path / "two.npz", x=x, y=(x[:, 0] > 0).astype(int))
    monkeypatch.chdir(tmp_path)


def refuses(result, text, code=2):
    assert result[0] == code and result[2].count("\n") == 1 and text in result[2], result
    return result[1]


@pytest.mark.parametrize("words", [("train", *SMALL, "--out", "r"), COMPARE])
def test_a_second_run_is_refused_until_it_may_overwrite(says, words):
    assert says(*words)[0] == 0
    before = {file.name: file.read_bytes() for file in Path("r").iterdir()}
    assert refuses(says(*words), "is already there, from an earlier run") == ""
    assert {file.name: file.read_bytes() for file in Path("r").iterdir()} == before
    assert says(*words, "--seed", "1", "--overwrite")[0] == 0
    assert {file.name: file.read_bytes() for file in Path("r").iterdir()} != before


@pytest.mark.parametrize(
    "words", [("train", *SMALL, "--out", "r"), ("train", *SMALL, "--save", "r"), COMPARE]
)
def test_two_processes_do_not_share_a_folder(says, monkeypatch, words):
    with output_folder(Path("r")):
        monkeypatch.setattr("tpsgd.common.output._writers", {})  # as another process would have it
        assert refuses(says(*words), "another process is writing to") == ""


@pytest.mark.parametrize(
    "words",
    [
        ("train", "--log", "two.csv"),
        ("train", "--out", "pets/new"),
        ("train", "--save", "pets"),
        ("train", "--checkpoint", "pets/run"),
        ("train", "--model", "net.py:make", "--log", "link.csv"),
        ("compare", "--out", "pets"),
        ("search", "--model", "mlp:4", "--checkpoint", "pets/run"),
        ("search", "--out", "pets"),
        ("adapt", "--out", "pets/r"),
        ("plan", "--plot", "pets/a.png"),
        ("predict", "m", "--out", "two.csv"),
        ("predict", "m", "--out", "m/model.json"),
        ("predict", "m", "--model", "net.py:make", "--out", "net.py"),
        ("evaluate", "m", "--plot", "pets/cat/a.png"),
    ],
)
def test_results_are_not_written_over_what_is_read(says, words):
    Path("pets/cat").mkdir(parents=True)
    for name in ("two.csv", "net.py", "pets/cat/a.png"):
        Path(name).write_text("precious")
    Path("m").mkdir()
    Path("m/model.json").write_text("precious")
    Path("link.csv").hardlink_to("two.csv")
    data = "pets@64" if "pets" in words[-1] else "two.csv"
    overwrite = () if words[0] == "evaluate" else ("--overwrite",)
    out = refuses(says(*words, "--data", data, *overwrite), "which this command reads")
    assert out == "" and {f.read_text() for f in Path().glob("**/*.*") if f.name != "two.npz"} == {
        "precious"
    }


def test_a_folder_of_results_may_have_the_name_of_a_built_in_set(says):
    words = ("train", "--model", "mlp:4", "--epochs", "1", "--out", "digits")
    assert says(*words)[0] == 0
    assert says(*words, "--data", "digits", "--overwrite")[0] == 0


@pytest.mark.full
def test_files_of_plans_and_predictions_are_not_replaced(says):
    assert says("train", *SMALL, "--save", "m")[0] == 0
    for words in (
        ("plan", "--shape", "6", "--classes", "2", "--model", "mlp:4", "--plot", "p.png"),
        ("predict", "m", "--data", "two.npz", "--out", "p.csv"),
    ):
        assert says(*words)[0] == 0
        refuses(says(*words), "is already there")
        assert says(*words, "--overwrite")[0] == 0


def fill_disk(monkeypatch, *folders):
    """Let nothing be written below these folders; others have room."""
    real = Path.write_bytes

    def write(self, content):
        if any(Path(folder).resolve() in self.resolve().parents for folder in folders):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(self, content)

    monkeypatch.setattr(Path, "write_bytes", write)


def test_a_disk_that_is_full_at_the_end_loses_neither_model_nor_accuracy(
    says, monkeypatch, tmp_path
):
    Path("t").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "t"))
    fill_disk(monkeypatch, "m")
    out = refuses(says("train", *SMALL, "--save", "m"), "m: cannot write to it (No space", code=1)
    (copy,) = Path("t").glob("tpsgd-*")
    assert "test accuracy" in out and tpsgd.load(copy).classes == ("0", "1")
    assert not list(Path("m").iterdir())


def test_a_comparison_on_a_full_disk_shows_and_keeps_its_results(says, monkeypatch, tmp_path):
    Path("t").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "t"))
    fill_disk(monkeypatch, "r")
    out = refuses(says(*COMPARE), "the results are in", code=1)
    (copy,) = Path("t").glob("tpsgd-*")
    assert "drtp" in out and "report:" not in out and (copy / "report.html").is_file()
    assert json.loads((copy / "results.json").read_text())["finished"] == 3


@pytest.mark.cover(1)
@pytest.mark.parametrize("json_too", [(), ("--json",)])
@pytest.mark.parametrize(
    ("words", "files"),
    [
        (("train", *SMALL, "--out", "r", "--save", "m"), ("r/model.pt", "m/model.json")),
        (COMPARE, ("r/results.json", "r/report.html")),
        (
            ("search", *SMALL, "--rates", "0.1", "--out", "r"), ("r/search.json", "r/report.html"),
        ),
        (("plan", *SMALL[:4], "--plot", "p.png"), ("p.png",)),
    ],
)  # fmt: skip
def test_a_reader_that_ends_early_loses_no_results(monkeypatch, words, files, json_too):
    def closed(*_, **__):
        raise BrokenPipeError

    monkeypatch.setattr("builtins.print", closed)
    monkeypatch.setattr("rich.console.Console.print", closed)
    monkeypatch.setattr("sys.argv", ["tpsgd", *words, *json_too])
    with pytest.raises(BrokenPipeError):
        app(standalone_mode=False)
    assert all(Path(file).is_file() for file in files)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_the_right_to_write(says):
    Path("r").mkdir(mode=0o500)
    refuses(says("train", *SMALL, "--out", "r"), "cannot write to r")


@pytest.mark.parametrize("error", [RuntimeError("CUDA out of\nmemory"), MemoryError("no room")])
def test_an_arm_that_breaks_leaves_the_others(says, monkeypatch, error):
    real = arm_module.fit_many

    def breaks(*args, rule=None, **options):
        if rule is not None and rule.name == "drtp":
            raise error
        return real(*args, rule=rule, **options)

    monkeypatch.setattr(arm_module, "fit_many", breaks)
    code, out, _ = says(*COMPARE)
    assert code == 1 and f"drtp failed: {type(error).__name__}: " in " ".join(out.split())
    arms = {arm["name"]: arm for arm in json.loads(Path("r/results.json").read_text())["arms"]}
    assert arms["backprop"]["summary"] and arms["frozen"]["summary"] and not arms["drtp"]["summary"]


# ---- logs ----------------------------------------------------------------------------------------


def test_train_writes_a_log(says):
    assert says("train", *SMALL, "--epochs", "2", "--log", "log.csv")[0] == 0
    rows = list(csv.DictReader(Path("log.csv").read_text().splitlines()))
    assert [(r["block"], r["epoch"]) for r in rows] == [
        ("1", "1"),
        ("1", "2"),
        ("2", "1"),
        ("2", "2"),
    ]
    refuses(says("train", *SMALL, "--log", "log.csv"), "log.csv is already there")
    assert says("train", *SMALL, "--log", "log.csv", "--overwrite")[0] == 0
    assert says("train", *SMALL, "--rule", "backprop", "--log", "log.jsonl")[0] == 0
    assert json.loads(Path("log.jsonl").read_text())["block"] == 0
    refuses(says("train", *SMALL, "--log", "log.txt"), "a log is FILE.csv or FILE.jsonl")


def test_a_log_has_one_writer(says, monkeypatch):
    with output_file(Path("log.csv")):
        Path("log.csv").write_text("rows of another run")
        words = ("train", *SMALL, "--log", "log.csv", "--overwrite")
        with monkeypatch.context() as patch:
            patch.setattr("tpsgd.common.output._writers", {})  # as another process would have it
            refuses(says(*words), "another process is writing to")
    assert Path("log.csv").read_text() == "rows of another run"
    assert says(*words)[0] == 0 and not list(Path().glob(".*"))
    refuses(says("train", *SMALL, "--log", "none/log.csv"), "cannot write the log none/log.csv")


@pytest.mark.filterwarnings("default")
def test_a_log_that_cannot_be_written_ends_with_status_1_after_the_model(says, monkeypatch):
    real = Path.open

    def full(self, mode="r", *args, **options):
        if mode == "a":
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(self, mode, *args, **options)

    monkeypatch.setattr(Path, "open", full)
    code, out, err = says("train", *SMALL, "--log", "log.csv", "--save", "m")
    assert (
        code == 1 and "test accuracy" in out and err.endswith("log.csv: No space left on device\n")
    )
    assert "training goes on" in err and torch.is_tensor(tpsgd.load("m").model[1].weight)
