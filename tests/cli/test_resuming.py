"""`--checkpoint` and `--resume`: a signal ends a run with how to go on, and it goes on."""

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import with_full

import tpsgd
from tpsgd.engine import arm as arm_module
from tpsgd.saved import checkpoint

pytestmark = pytest.mark.usefixtures("unwatched")
SMALL = ("--data", "two.npz", "--model", "mlp:4,3", "--epochs", "2", "--batch-size", "16")
NET = """
import torch
from torch import nn
from tpsgd_adapt import Backbone

def make():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Backbone(nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU()), ["1"])
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Run in a folder with a small data set, images and a backbone; checkpoints are frequent."""
    x = np.random.default_rng(0).normal(size=(60, 6)).astype("float32")
    np.savez(tmp_path / "two.npz", x=x, y=(x[:, 0] > 0).astype(int))
    images = np.random.default_rng(1).random((60, 3, 6, 6)).astype("float32")
    np.savez(tmp_path / "images.npz", x=images, y=np.arange(60) % 2)
    (tmp_path / "net.py").write_text(NET)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(checkpoint.Checkpoint.__init__, "__defaults__", (0, False))  # every epoch


@pytest.fixture
def signalled(monkeypatch):
    """A signal comes after some checkpoints; the next ones are undisturbed."""

    def after(count: int, number: int) -> None:
        write, counts = checkpoint.write, iter(range(1, 1000))

        def write_then_signal(folder, state):
            write(folder, state)
            if next(counts) == count:
                os.kill(os.getpid(), number)

        monkeypatch.setattr(checkpoint, "write", write_then_signal)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background
    yield after  # would ignore it
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_train_ends_with_how_to_go_on_and_goes_on(says, signalled, number, code):
    says("train", *SMALL, "--out", "whole")
    before = signal.getsignal(signal.SIGTERM)
    signalled(3, number)
    words = ("train", *SMALL, "--checkpoint", "run")
    status, out, err = says(*words)
    assert (status, out) == (code, "")
    assert err == (
        "tpsgd: interrupted after epoch 1 of block 2; to go on: tpsgd train --data two.npz --model "
        "mlp:4,3 --epochs 2 --batch-size 16 --checkpoint run --resume\n"
    )
    status, out, err = says(*words, "--resume", "--out", "resumed")
    assert (status, err) == (0, "")
    whole, resumed = (torch.load(f"{f}/model.pt", weights_only=True) for f in ("whole", "resumed"))
    assert all(torch.equal(whole[key], resumed[key]) for key in whole)
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize("command", ["train", "compare"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_before_the_first_checkpoint_says_that_nothing_is_saved(
    says, monkeypatch, command, number, code
):
    begin = checkpoint.Checkpoint.begin

    def begin_then_signal(self, identity):
        begin(self, identity)
        os.kill(os.getpid(), number)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    words = (command, *SMALL, "--checkpoint", "run")
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.Checkpoint, "begin", begin_then_signal)
        status, out, err = says(*words)
    signal.signal(signal.SIGINT, before)
    assert (status, out) == (code, "") and "--resume" not in err
    assert err == (
        "tpsgd: interrupted before its first checkpoint; nothing was saved of it in run\n"
    )


def test_messages_are_in_words_of_the_shell(says):
    words = ("train", *SMALL, "--checkpoint", "run", "--save", "m")
    assert says(*words)[0] == 0
    assert says(*words)[2] == (
        "tpsgd: m already holds a model: name another folder, or replace it with --overwrite\n"
    )
    assert says(*words, "--overwrite")[2] == (
        "tpsgd: run holds a checkpoint (finished): go on from it with --resume, name another "
        "folder, or remove this one to begin anew\n"
    )
    words = ("search", "--data", "two.npz", "--model", "mlp:4", "--rates", "-1")
    assert "rates must be" in says(*words)[2]


def test_resume_begins_where_there_is_no_checkpoint_and_ends_where_it_is_finished(says):
    words = ("train", *SMALL, "--checkpoint", "run", "--resume", "--json")
    status, out, err = says(*words)
    assert (status, err) == (0, "")
    again, other, err = says(*words)
    assert (again, err) == (0, "")
    first, second = json.loads(out), json.loads(other)
    assert first["history"] == second["history"] and first["accuracy"] == second["accuracy"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--resume",), "--resume goes on from a checkpoint: add --checkpoint FOLDER"),
        (("--checkpoint", "run", "--epochs", "1", "--resume"), "go on with --epochs 2"),
        (("--checkpoint", "run"), "run holds a checkpoint (finished): go on from it with"),
        (("--checkpoint", "net.py"), "cannot write to net.py"),
        (("--checkpoint", "new", "--rule", "zorb"), "zorb has no checkpoints"),
    ],
    ids=str,
)
def test_mistakes_are_one_line(says, words, message):
    says("train", *SMALL, "--checkpoint", "run")
    few = SMALL[:4] if "zorb" in words else SMALL
    status, out, err = says("train", *few, *words)
    assert (status, out) == (2, "") and message in err and err.count("\n") == 1


def finished():
    """What a comparison has written down after its first line, which is its identity."""
    lines = Path("run/comparison.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines[1:]]


def test_compare_reads_finished_runs_and_goes_on_with_the_others(says, signalled, monkeypatch):
    words = ("compare", *SMALL, "--rules", "drtp", "--restarts", "1", "--checkpoint", "run")
    assert says(*words[:-2], "--out", "whole")[0] == 0
    signalled(5, signal.SIGTERM)  # after two of backprop, in drtp's run
    status, _, err = says(*words)
    assert status == 143 and "training runs are in tpsgd-report; to go on: tpsgd compare" in err
    (done,) = (values for values in finished() if "run" in values)
    assert done["key"] == {"rule": "backprop", "values": {}, "seed": 0}
    assert len(done["confusion"]) == 1
    trained, fit_many = [], arm_module.fit_many

    def counted(*args, **settings):
        trained.extend([settings["seed"]] if "checkpoint" in settings else [])
        return fit_many(*args, **settings)

    monkeypatch.setattr(arm_module, "fit_many", counted)
    status, _, err = says(*words, "--resume")
    assert (status, err) == (0, "") and len(trained) == 2
    whole, resumed = (
        json.loads(Path(f, "results.json").read_text())["arms"] for f in ("whole", "tpsgd-report")
    )
    assert figures(whole) == figures(resumed)
    matrices = [[arm["summary"]["confusion"] for arm in arms] for arms in (whole, resumed)]
    assert matrices[0] == matrices[1] and all(matrices[0])  # those of restored runs too
    assert sorted(os.listdir("run"))[-1] == "comparison.jsonl"  # no checkpoint is left
    assert "its epochs were 2, and now they are 3" in says(*words, "--resume", "--epochs", "3")[2]
    assert "run holds a comparison: go on from it" in says(*words, "--out", "other")[2]


def test_a_search_for_rates_that_is_interrupted_says_how_to_go_on(says, signalled):
    words = ("compare", *SMALL, "--rules", "drtp", "--restarts", "1", "--checkpoint", "run")
    signalled(8, signal.SIGTERM)
    status, out, err = says(*words, "--lr", "search")
    assert (status, out) == (143, "") and "to go on: tpsgd compare" in err
    lines = Path("run/trials.jsonl").read_text().splitlines()
    assert len(lines) > 1  # what the search is, and trials
    assert says(*words, "--lr", "search", "--resume")[0] == 0
    assert Path("run/trials.jsonl").read_text().splitlines()[: len(lines)] == lines


def compared(says, *words):
    """A comparison with a checkpoint that begins or goes on: its arms, or the error."""
    words = ("compare", *SMALL, "--restarts", "1", "--checkpoint", "run", "--resume", *words)
    status, out, err = says(*words, "--json", "--overwrite")
    return {arm["name"]: arm for arm in json.loads(out)["arms"]} if status == 0 else err


def test_an_arm_with_other_options_is_not_taken_for_the_same(says):
    first = compared(says, "--rules", "readout", "--readout-scale", "0.5")
    again = compared(says, "--rules", "readout", "--readout-scale", "0.5")
    assert first == again
    err = compared(says, "--rules", "readout", "--readout-scale", "50")
    assert "its rule of readout was" in err and "scale 50" in err and err.count("\n") == 1
    assert "drtp" in compared(says, "--rules", "readout,drtp", "--readout-scale", "0.5")


@pytest.mark.parametrize("words", [("--seconds", "0.2"), ()], ids=str)
def test_a_comparison_at_equal_seconds_goes_on(says, signalled, words):
    words = (*SMALL, "--rules", "drtp", "--restarts", "1", "--equal", "seconds", *words)
    signalled(5, signal.SIGTERM)
    status, _, err = says("compare", *words, "--checkpoint", "run")
    assert status == 143 and "to go on: tpsgd compare" in err
    (before,) = (values for values in finished() if "allowances" in values)
    status, out, err = says("compare", *words, "--checkpoint", "run", "--resume", "--json")
    assert (status, err) == (0, "")
    record, (after,) = json.loads(out), (v for v in finished() if "allowances" in v)
    assert not any(arm["error"] for arm in record["arms"])
    assert record["settings"]["seconds"] == before["amount"]["seconds"]
    assert before["allowances"] == after["allowances"]
    err = says("compare", *words, "--rules", "dfa", "--checkpoint", "run", "--resume")[2]
    assert "its rules were backprop, drtp, frozen, and now they are backprop, dfa, frozen" in err


def figures(arms):
    """The accuracies and losses of a comparison."""
    runs = [run for arm in arms for run in arm["restarts"]]
    return [(run["accuracy"], [epoch["loss"] for epoch in run["history"]]) for run in runs]


@pytest.mark.full
def test_adapt_goes_on_with_its_arms(says, signalled):
    words = ("adapt", "--backbone", "net.py:make", "--data", "images.npz", "--epochs", "2")
    assert says(*words, "--out", "whole")[0] == 0
    signalled(4, signal.SIGTERM)
    status, _, err = says(*words, "--checkpoint", "run")
    assert status == 143 and err.startswith("tpsgd: interrupted") and err.endswith(" --resume\n")
    assert says(*words, "--checkpoint", "run", "--resume")[0] == 0
    whole, resumed = (tpsgd.adapt.load(f, backbone()) for f in ("whole", "tpsgd-adaptor"))
    before, after = (adaptor.heads["1"].parameters() for adaptor in (whole, resumed))
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


OUT = {"train": "o/model.pt", "compare": "o/results.json", "adapt": "o/record.json",
       "search": "o/search.json", "search --model": "o/search.json"}  # fmt: skip


def words_of(command):
    """A command that writes into the folder o."""
    net = ("--backbone", "net.py:make", "--data", "images.npz", "--epochs", "1")
    return {
        "train": ("train", *SMALL, "--out", "o"),
        "compare": ("compare", *SMALL, "--restarts", "1", "--rules", "drtp", "--out", "o"),
        "adapt": ("adapt", *net, "--out", "o"),
        "search": ("search", *net, "--convs", "0", "--dense", "0,1", "--out", "o"),
        "search --model": ("search", *SMALL, "--rates", "0.01", "--rule", "drtp", "--out", "o"),
    }[command]


@pytest.mark.parametrize("command", with_full(OUT, ["adapt", "search", "search --model"]))
def test_a_run_that_begins_does_not_replace_results_of_another(says, command):
    Path("o").mkdir()
    Path(OUT[command]).write_text("another run's")
    words = (*words_of(command), "--checkpoint", "run", "--resume")
    for _ in range(2):
        status, out, err = says(*words)
        assert (status, out) == (2, "") and "is already there, from an earlier run" in err
        assert Path(OUT[command]).read_text() == "another run's"
    assert says(*words, "--overwrite")[0] == 0
    before = Path(OUT[command]).read_bytes()
    assert before != b"another run's" and says(*words)[0] == 0  # its own are replaced
    err = says(*words[:-1], "--overwrite")[2]
    assert " holds " in err and "go on from it with --resume" in err


@pytest.mark.parametrize("command", ["train", "compare", "adapt", "search", "search --model"])
def test_two_processes_do_not_share_a_checkpoint(says, monkeypatch, command):
    with checkpoint.Checkpoint("run").claimed():
        monkeypatch.setattr("tpsgd.common.output._writers", {})  # as another process would have it
        status, out, err = says(*words_of(command), "--checkpoint", "run", "--resume")
    assert (status, out) == (2, "") and "another process is writing to" in err


def test_a_log_of_another_run_is_not_added_to(says):
    Path("log.csv").write_text("mine\n")
    words = ("train", *SMALL, "--log", "log.csv", "--checkpoint", "run", "--resume")
    status, _, err = says(*words)
    assert status == 2 and "log.csv is already there" in err
    assert Path("log.csv").read_text() == "mine\n"


def test_a_log_goes_on_with_its_run(says, signalled, monkeypatch):
    words = ("train", *SMALL, "--log", "log.csv", "--checkpoint", "run", "--resume")
    signalled(3, signal.SIGTERM)
    assert says(*words)[0] == 143
    with open("log.csv", "a") as log:
        log.write("2,2,0.5,0.5,,,1.0\n")  # after the last checkpoint
    assert says(*words)[0] == 0
    rows = [line.split(",")[:2] for line in Path("log.csv").read_text().splitlines()[1:]]
    assert rows == [[b, e] for b in "123" for e in "12"]


SEARCH = ("search", *SMALL, "--rates", "0.001,0.01", "--scales", "3,12", "--checkpoint", "run")


@pytest.mark.cover(1)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("count", [9, 47], ids=["in a trial", "in the test"])
def test_a_search_of_a_model_goes_on(says, signalled, monkeypatch, number, code, count):
    assert says(*SEARCH[:-2], "--out", "whole")[0] == 0
    signalled(count, number)
    status, out, err = says(*SEARCH)
    done = 2 if count == 9 else 8
    assert (status, out) == (code, "") and err.startswith(
        f"tpsgd: interrupted; {done} of 8 trials are in run; to go on: tpsgd search --data"
    )
    assert err.endswith("--checkpoint run --resume\n") and err.count("\n") == 1
    trained, fit_many = [], arm_module.fit_many

    def counted(*args, **settings):
        trained.append(settings.get("checkpoint"))
        return fit_many(*args, **settings)

    monkeypatch.setattr(arm_module, "fit_many", counted)
    kept = Path("run/trials.jsonl").read_text().splitlines()[1:]
    assert says(*SEARCH, "--resume")[0] == 0
    folders = [saved.folder.name for saved in trained if saved is not None]
    assert len([name for name in folders if "rate" in name]) == 8 - len(kept)
    whole, resumed = (
        json.loads(Path(f, "search.json").read_text()) for f in ("whole", "tpsgd-search")
    )
    for values in (whole, resumed):
        for trial in values["trials"]:
            del trial["seconds"]
    assert whole["trials"] == resumed["trials"] and whole["chosen"] == resumed["chosen"]
    assert figures(whole["test"]["arms"]) == figures(resumed["test"]["arms"])
    err = says(*SEARCH, "--resume", "--epochs", "3", "--overwrite")[2]
    assert "its epochs were 2, and now they are 3" in err
    assert says(*SEARCH, "--resume", "--scales", "3,12,48", "--overwrite")[0] == 0


def test_a_search_on_a_backbone_goes_on_from_its_checkpoint(says, signalled, monkeypatch):
    trials, real = [], arm_module.Arm.train

    def train(self, *args, **settings):
        trials.append(args)
        if len(trials) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(self, *args, **settings)

    monkeypatch.setattr(arm_module.Arm, "train", train)
    words = words_of("search")
    status, out, err = says(*words, "--checkpoint", "run")
    assert (status, out) == (143, "") and err.startswith(
        "tpsgd: interrupted; 2 of 3 trials are in run; to go on: tpsgd search"
    )
    status, out, err = says(*words, "--checkpoint", "run", "--resume")
    assert (status, err) == (0, "") and len(trials) == 4  # the third again
    assert len(Path("run/trials.jsonl").read_text().splitlines()) == 4  # and what was searched
    assert not Path("o/trials.jsonl").exists()
    trials.clear()
    status, _, err = says(*words[:-1], "other")  # without a checkpoint, its own folder has them
    assert status == 143 and err.endswith(
        "2 of 3 trials are in other; the same command continues\n"
    )


def backbone():
    from tpsgd.common.files import call_function

    return call_function("net.py:make")
