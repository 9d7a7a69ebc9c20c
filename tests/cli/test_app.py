"""The command line: what it prints and where, its exit status, and that a mistake is one line."""

import errno
import inspect
import io
import json
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

import tpsgd
from tpsgd.cli import app as cli
from tpsgd.cli import options, rule_list, terminal
from tpsgd.common import plugins
from tpsgd.comparison.arms import ALL, arm
from tpsgd.engine import arm as arm_module
from tpsgd.engine.lengths import batch_size_for, epochs_for
from tpsgd.nets.inits import BY_NAME
from tpsgd.zoo import words as models

SMALL = ("--data", "two.npz", "--model", "mlp:4", "--epochs", "1", "--batch-size", "16")
OWN = """
from torch import nn

def good():
    return nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2))

def narrow():
    return nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2))

def broken():
    return 1 / 0

def leaves():
    raise SystemExit(0)

def wrong():
    from tpsgd import Rule
    return Rule("wrong", lambda site: site.nothing)

def silent():
    from dataclasses import replace
    from tpsgd import rules
    class Silent(nn.Module):
        def forward(self, x):
            raise LookupError("no answer")
    return replace(rules.readout(), name="silent", predictor=lambda model: Silent())

def steps():
    return nn.Sequential(nn.RNN(3, 4, batch_first=True), nn.Linear(4, 2))
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Run in a folder that holds a small data set and a file of models."""
    x = np.random.default_rng(0).normal(size=(60, 6)).astype("float32")
    np.savez(tmp_path / "two.npz", x=x, y=(x[:, 0] > 0).astype(int))
    (tmp_path / "own.py").write_text(OWN)
    steps = np.random.default_rng(1).normal(size=(60, 7, 3)).astype("float32")
    y = (steps[:, 0, 0] > 0).astype(int)
    np.savez(tmp_path / "steps.npz", x=steps, y=y)
    np.savez(tmp_path / "padded.npz", x=steps, y=y, lengths=np.arange(60) % 7 + 1)
    tokens = np.random.default_rng(2).integers(0, 9, (60, 5))
    np.savez(tmp_path / "tokens.npz", tokens=tokens, y=(tokens[:, 0] > 4).astype(int))
    np.savez(tmp_path / "images.npz", x=steps.reshape(60, 1, 7, 3), y=y)
    monkeypatch.chdir(tmp_path)
    return tmp_path


SHOWN = {
    "": "compare", "train": "--optimizer", "compare": "--optimizer", "plan": "--optimizer",
    "adapt": "--combine", "search": "--rates", "predict": "--data", "export c": "--ram",
    "rules": "readout-learned",
}  # fmt: skip


def test_help_and_the_list_of_rules_need_no_torch():
    program = (
        "import sys\n"
        "from tpsgd.cli.app import main\n"
        f"for word in {list(SHOWN)}:\n"
        "    sys.argv = ['tpsgd', *word.split(), *['--help'] * (word != 'rules')]\n"
        "    try: main()\n"
        "    except SystemExit as end: assert not end.code\n"
        "    print(sorted({'torch', 'numpy', 'matplotlib'} & set(sys.modules)))"
    )
    places = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    call = [sys.executable, "-c", program]
    done = subprocess.run(call, capture_output=True, text=True, env=places)
    assert done.returncode == 0, done.stderr
    *texts, rest = done.stdout.split("[]\n")
    assert rest == "" and max(map(len, done.stdout.splitlines())) <= 80
    for text, shown in zip(texts, SHOWN.values(), strict=True):
        assert shown in text


def test_every_public_name_loads():
    names: dict[str, object] = {}
    exec("from tpsgd import *", names)
    assert set(tpsgd.__all__) <= set(names) and None not in [names[n] for n in tpsgd.__all__]
    assert set(tpsgd.__all__) <= {name for name, _ in inspect.getmembers(tpsgd)}
    with pytest.raises(AttributeError, match="no attribute 'fitt'"):
        tpsgd.fitt  # noqa: B018


@pytest.mark.skipif(
    "fleet" in plugins.names(plugins.ATTRIBUTES), reason="the plug-in tpsgd-fleet is installed"
)
def test_a_plug_in_that_is_not_installed_says_how_to_install_it():
    assert not hasattr(tpsgd, "fleet")
    with pytest.raises(
        AttributeError,
        match=r"in the plug-in tpsgd-fleet, .*: pip install -c .* -e plugins/f",
    ):
        tpsgd.fleet  # noqa: B018


def test_version(says):
    assert says("--version") == (0, f"tpsgd {tpsgd.__version__}\n", "")


def test_no_words_show_the_help(says):
    code, out, err = says()
    assert (code, err) == (0, "") and "Usage" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("train --rule reedout", "did you mean 'readout'?"),
        ("train --rule x", "choose from backprop, backprop-checkpointed"),
        ("train --blocks two", "--blocks two: write a number of blocks, 4, the"),
        ("train --model mlp:8 --blocks 5", "blocks must be a number from 1 to 2"),
        ("compare --rules drtp,redout", "unknown rule 'redout': did you mean 'readout'?"),
        ("compare --rules ,", "unknown rule ''"),
        ("train --order sequental", "not one of 'sequential', 'simultaneous'"),
        ("train --rule sdfa --order sequential", "sdfa cannot learn block by block"),
        ("train --rule dfa --order sequential", "trained yet; use --order simultaneous"),
        ("train --lr nan", "--lr must be more than 0"),
        ("compare --lr 0", "--lr must be more than 0"),
        ("compare --lr fast", "--lr takes a number such as 0.003, or search, got 'fast'"),
        ("train --lr 1e9", "--lr must be more than 0, at most 1000, got 1e+09"),
        ("train --epochs 0", "--epochs"),
        ("train --seed 9223372036854775808", "--seed"),
        ("train --threads 100000", "'--threads': "),
        ("train --model own.py:leaves", "own.py:leaves failed with SystemExit: 0"),
        ("train --epochs many", "--epochs"),
        ("compare --restarts 0", "--restarts"),
        ("train --nothing", "No such option: --nothing"),
        ("train --reuse nowhere", "--reuse nowhere: write yes, no, or a folder that exists"),
        ("train --micro-batch 0", "--micro-batch"),
        ("train --rule zorb --micro-batch 4", "zorb takes no --micro-batch"),
        ("train --memory 9MB --reuse no", "a memory budget chooses --micro-batch"),
        pytest.param(
            *("train --memory 1KB", "an optimizer without state, --optimizer sgd"),
            marks=pytest.mark.full,
        ),
        ("trian", "No such command 'trian'"),
        ("train --data diggits", "did you mean 'digits'?"),
        ("train --data none.npz", "there is no none.npz"),
        ("train --model mpl:3", "unknown model 'mpl:3'"),
        ("train --model none.py:f", "there is no file none.py"),
        ("train --model own.py:f", "own.py has no function 'f'"),
        ("train --model own.py:broken", "ZeroDivisionError"),
        ("train --rule own.py:wrong --epochs 1", "own.py:wrong failed with AttributeError: 'Site'"),
        ("plan --rule own.py:wrong", "AttributeError: 'Site' object has no attribute 'nothing' ("),
        ("plan --rule own.py:wrong", "own.py, line 18)"),
        (
            "train --rule own.py:silent --epochs 1",
            "Silent cannot take an input of shape (batch, 6)",
        ),
        ("train --rule own.py:silent --epochs 1", "own.py, line 25)"),
        ("train --model own.py:narrow", "block 1 (0: Linear + ReLU) cannot take"),
        ("compare --model own.py:narrow", "cannot take"),
        ("train --activation rely", "unknown activation 'rely'"),
        ("train --rule reservior", "did you mean 'reservoir'?"),
        ("train --rule reservoir", "begin with a recurrent layer"),
        ("compare --rules readout,reservoir", "begin with a recurrent layer"),
        ("train --window 4", "window is for models with recurrent layers"),
        ("compare --window 0", "--window"),
        ("train --init zeros", "init and leak are for recurrent models"),
        ("compare --leak 0.5", "not for mlp:256"),
        (
            "train --data steps.npz --model rnn:4 --init zeroes",
            "unknown init 'zeroes': choose zeros, uniform",
        ),
        ("train --data steps.npz --model rnn:4 --leak nan", "leak must be over 0"),
        ("train --data steps.npz --model rnm:4", "did you mean 'rnn'?"),
        ("train --data images.npz --model rnn:4", "seq-mnist-rows"),
        ("train --model rnn:4", "needs sequences (steps, features), not samples of shape (6,)"),
        ("train --data tokens.npz", "mlp:256 cannot read tokens"),
        ("train --data tokens.npz --model cnn:4x3", "cnn:4x3 cannot read tokens"),
        ("compare --data padded.npz", "the model has no recurrent layer to read them"),
        ("train --data steps.npz --model rnn:4 --rule reservoir --order simultaneous", "ridge"),
        ("train --head ridge --order simultaneous", "choose --order sequential"),
        ("train --device gpu", "unknown device 'gpu'"),
        ("train --out two.npz/here", "cannot write to two.npz/here"),
        ("compare --out two.npz/here", "cannot write to two.npz/here"),
        ("data fetch nothing", "not a built-in data set"),
        ("data fetch", "Missing argument"),
    ],
)
def test_a_mistake_is_one_line(says, words, said):
    first, *rest = words.split()
    small = SMALL[:2] + SMALL[4:] if first in ("train", "compare") else ()
    code, out, err = says(first, *small, *rest)
    assert (code, out) == (2, "")
    assert err.startswith("tpsgd: ") and err.count("\n") == 1 and said in err


def test_out_is_tried_before_training(says, monkeypatch):
    def never(*_, **__):
        raise AssertionError("trained")

    monkeypatch.setattr(arm_module, "fit_many", never)
    for command in ("train", "compare"):
        assert says(command, *SMALL, "--out", "two.npz")[0] == 2


def test_train_says_what_it_did(says):
    code, out, err = says("train", *SMALL, "--rule", "tpsgd-l1", "--activation", "tanh")
    assert (code, err) == (0, "")
    assert out.startswith("tpsgd-l1: ") and "test accuracy " in out and "Tanh" in out


@pytest.mark.parametrize("rule", ["backprop", "dfa", "readout-learned", "frozen"])
def test_train_json_is_one_object(says, rule):
    code, out, err = says("train", *SMALL, "--rule", rule, "--lr", "0.01", "--json")
    record = json.loads(out)
    assert (code, err) == (0, "")
    assert 0 <= record["accuracy"] <= 1 and record["seconds"] > 0 and record["peak_bytes"] > 0
    assert record["rule"] == rule and record["settings"]["model"] == "mlp:4"
    assert record["settings"]["lr"] == 0.01
    assert record["command"].startswith("tpsgd train --data two.npz")


def test_train_saves_a_state_dict_that_loads(says):
    code, out, _ = says("train", *SMALL, "--out", "kept/here", "--seed", "3")
    assert code == 0 and str(Path("kept/here/model.pt")) in out
    record = json.loads(Path("kept/here/run.json").read_text())
    data = tpsgd.data.load("two.npz", seed=3)
    model = models.factory("mlp:4", data.shape, 2)()
    model.load_state_dict(torch.load("kept/here/model.pt", weights_only=True))
    assert tpsgd.evaluate(model, data.test) == record["accuracy"]


@pytest.mark.parametrize("command", ["train", "compare"])
def test_options_become_settings_of_fit(says, command):
    words = ("--data", "images.npz", "--model", "cnn:4x2", "--epochs", "1", "--batch-size", "16")
    words += ("--optimizer", "sgd", "--seed", "3", "--micro-batch", "4")
    words += ("--rule", "readout") if command == "train" else ("--rules", "readout")
    record = json.loads(says(command, *words, "--reuse", "no", "--json")[1])
    runs = [record] if command == "train" else [arm["restarts"][0] for arm in record["arms"]]
    for run in runs:
        settings = run["settings"]
        assert (settings["optimizer"], run["seed"], settings["micro_batch"]) == ("sgd", 3, 4)
        assert settings["reuse"] is False or run["rule"] == "backprop"  # which has no blocks


@pytest.mark.parametrize(("word", "layers"), [("2", 2), ("1,2", 2), ("1", 1), ("3", 3)])
def test_train_in_blocks_of_several_layers(says, word, layers):
    words = ("--data", "images.npz", "--model", "cnn:4x2,4x2", "--epochs", "1", "--blocks", word)
    record = json.loads(says("train", *words, "--json")[1])
    assert len(record["blocks"]) == layers
    assert record["settings"]["blocks"] == {"1,2": "[1, 2]"}.get(word, word)


def test_reuse_from_a_folder_gives_the_same_model(says):
    Path("there").mkdir()
    words = ("train", *SMALL, "--model", "mlp:4,4", "--json", "--reuse")
    records = {reuse: json.loads(says(*words, reuse)[1]) for reuse in ("yes", "no", "there")}
    assert records["there"]["settings"]["reuse"] == "there"
    losses = [[epoch["loss"] for epoch in r["history"]] for r in records.values()]
    assert losses[0] == losses[1] == losses[2]


def test_own_model_and_fewer_samples(says):
    words = ("--data", "two.npz", "--model", "own.py:good", "--epochs", "1", "--max-train", "20")
    record = json.loads(says("train", *words, "--json")[1])
    assert record["data"]["train"] == 20


def test_threads(says):
    before = torch.get_num_threads()
    try:
        record = json.loads(says("train", *SMALL, "--threads", "1", "--json")[1])
        assert record["machine"]["threads"] == 1
    finally:
        torch.set_num_threads(before)


def test_compare_prints_a_narrow_table(says):
    code, out, err = says("compare", *SMALL, "--restarts", "2")
    lines = out.splitlines()
    assert (code, err) == (0, "") and max(map(len, lines)) <= 80
    words = {word for word, entry in ALL.items() if entry.feed_forward}
    names = [line.split()[0] for line in lines[3 : 3 + len(words)]]
    assert names[0] == "backprop" and set(names[-2:]) == {"elm", "frozen"}
    assert set(names) == words
    assert "solved in one pass, without epochs: zorb, lm-karnet, elm" in " ".join(out.split()) or (
        "solved in one pass, without epochs: lm-karnet, zorb, elm" in " ".join(out.split())
    )
    assert "not trained: dladmm; name them in --rules to train them" in " ".join(out.split())
    assert lines[-1] == f"report: {Path('tpsgd-report/report.html')}"
    assert Path("tpsgd-report/report.html").is_file()


@pytest.mark.parametrize("width", [40, 60, 70, 80])
def test_a_narrow_terminal_loses_columns_and_no_names(says, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    words = ("--rules", "readout-learned,tpsgd-l2", "--restarts", "2")
    code, out, _ = says("compare", *SMALL, *words)
    head, _, *rows = out.splitlines()[1 if width > 50 else 2 :][:6]
    assert code == 0 and "…" not in out and max(map(len, [head, *rows])) <= width
    names = {line.split()[0] for line in rows}
    assert names == {"backprop", "readout-learned", "tpsgd-l2", "frozen"}
    assert "accuracy %" in head and ("passes" in head) == (width >= 80)


def test_compare_json_is_one_object(says):
    words = ("--rules", "readout", "--restarts", "2", "--seed", "5", "--out", "r", "--json")
    code, out, err = says("compare", *SMALL, *words)
    record = json.loads(out)
    assert (code, err) == (0, "")
    assert [a["name"] for a in record["arms"]] == ["backprop", "readout", "frozen"]
    assert record["settings"]["model"] == "mlp:4" and record["report"] == str(Path("r/report.html"))
    for row in record["arms"]:
        assert 0 <= row["summary"]["accuracy"] <= 1 and row["summary"]["peak_bytes"] > 0
        assert [r["seed"] for r in row["restarts"]] == [5, 6]
    on_disk = json.loads(Path("r/results.json").read_text())
    assert {**on_disk, "report": record["report"]} == record


@pytest.mark.full
def test_compare_fails_after_the_table_if_an_arm_fails(says):
    words = (*SMALL, "--model", "mlp:40", "--memory", "2KB", "--restarts", "1", "--epochs", "1")
    code, out, err = says("compare", *words, "--rules", "backprop")  # the frozen control fails
    assert (code, err) == (1, "") and "frozen failed: a memory budget" in " ".join(out.split())
    assert Path("tpsgd-report/report.html").is_file()
    arms = json.loads(Path("tpsgd-report/results.json").read_text())["arms"]
    assert [bool(arm["summary"]) for arm in arms] == [True, False]


def test_an_interrupted_comparison_keeps_what_is_finished(says, monkeypatch):
    fit_many = arm_module.fit_many

    def interrupted(*args, **options):
        if options.get("seed") == 1:
            raise KeyboardInterrupt
        return fit_many(*args, **options)

    monkeypatch.setattr(arm_module, "fit_many", interrupted)
    words = ("--rules", "drtp", "--restarts", "3", "--out", "r")
    code, out, err = says("compare", *SMALL, *words)
    assert code == 130 and err.count("\n") == 1 and "3 of 9 training runs are in r" in err
    assert "interrupted: 3 of 9" in out and Path("r/report.html").is_file()
    record = json.loads(Path("r/results.json").read_text())
    assert record["interrupted"] and [len(a["restarts"]) for a in record["arms"]] == [1, 1, 1]


@pytest.mark.parametrize("command", ["train", "compare"])
def test_an_early_interrupt_is_one_line(says, monkeypatch, command):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(arm_module, "fit_many", interrupted)
    code, out, err = says(command, *SMALL, "--out", "r")
    assert (code, out) == (130, "") and err.count("\n") == 1 and "interrupted" in err
    assert not list(Path("r").iterdir())


@pytest.mark.parametrize("command", ["train", "compare"])
def test_a_full_disk_is_one_line(says, monkeypatch, command):
    def full(self, content):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    code, out, err = says(command, *SMALL, "--out", "r")
    assert code == 1 and err.count("\n") == 1 and "No space left on device" in err
    assert "nor to a temporary folder" in err
    assert ("test accuracy" if command == "train" else "backprop") in out and "saved" not in out


def test_a_warning_is_one_line_and_not_on_standard_output(says, monkeypatch):
    monkeypatch.setattr(cli, "app", lambda **_: cli.warnings.warn("a\nb", stacklevel=1))
    with cli.warnings.catch_warnings():
        cli.warnings.simplefilter("default")
        assert says() == (0, "", "tpsgd: warning: a b\n")


def test_a_terminal_gets_a_live_bar(says, monkeypatch):
    screen = io.StringIO()

    def console(stderr=False, **options):
        return Console(file=screen, force_terminal=True, width=80) if stderr else Console(**options)

    monkeypatch.setattr(terminal, "Console", console)
    code, out, _ = says("compare", *SMALL, "--restarts", "1", "--rules", "drtp", "--json")
    assert code == 0 and json.loads(out)
    assert "warming up" in screen.getvalue() and "frozen" in screen.getvalue()  # first and last


def test_rules_lists_every_word_and_its_source(says):
    rows = [(word, arm(word).about, entry.source) for word, entry in ALL.items()]
    assert rule_list.rule_list() == rows
    code, out, _ = says("rules")
    assert code == 0 and max(map(len, out.splitlines())) <= 80
    assert all(word in out for word in ALL) and "Mostafa et al. 2018" in out


def test_rules_of_plug_ins_are_listed_where_they_are_installed(says, monkeypatch):
    monkeypatch.setattr(plugins, "names", lambda group, own=(): {"zorb", "somebodys"})
    out = says("rules")[1]
    assert "zorb" in out and "dladmm" not in out and "of a plug-in" in out


def test_data_commands(says, monkeypatch, tmp_path):
    monkeypatch.setenv("TPSGD_CACHE", str(tmp_path))
    monkeypatch.delenv("TPSGD_DATA", raising=False)
    code, out, _ = says("data", "list")
    assert code == 0 and out.splitlines()[1].startswith("digits")
    assert max(map(len, out.splitlines())) <= 80 and "tweets-vectors-holdout" in out
    code, out, _ = says("data", "fetch", "digits")
    assert code == 0 and Path(out.strip()).is_dir()


STEPS = ("--epochs", "1", "--batch-size", "16", "--restarts", "1")


@pytest.mark.parametrize(
    "words",
    [
        ("steps.npz", "rnn:4,4+3", "--window", "3", "--leak", "0.5", "--init", "scaled-uniform"),
        ("padded.npz", "torch-rnn:4"),
        pytest.param(("tokens.npz", "paper-birnn:4", "--max-train", "20"), marks=pytest.mark.full),
        pytest.param(("steps.npz", "own.py:steps"), marks=pytest.mark.full),
    ],
)
def test_compare_recurrent_nets(says, words):
    data, model, *more = words
    code, out, err = says("compare", "--data", data, "--model", model, *more, *STEPS)
    lines = out.splitlines()
    assert (code, err) == (0, "") and max(map(len, lines)) <= 80
    unsuited = {"backprop-checkpointed"} | ({"backprop-micro"} if data == "padded.npz" else set())
    words = {word for word, entry in ALL.items() if entry.recurrent} - unsuited
    assert out.count("is left out:") == len(unsuited)
    assert {line.split()[0] for line in lines[3 : 3 + len(words)]} == words
    assert "failed" not in out and "relative to backprop through time" in out


def test_compare_searches_rates(says):
    words = ("--data", "steps.npz", "--model", "rnn:4", *STEPS, "--rules", "readout")
    code, out, err = says("compare", *words, "--lr", "search")
    lines = out.splitlines()
    assert (code, err) == (0, "") and max(map(len, lines)) <= 80
    rates = {line.split()[0]: line.split()[3] for line in lines[3:6]}
    assert float(rates["backprop"]) > 0 and float(rates["readout"]) > 0 and rates["frozen"] == "–"
    assert "rates: chosen on" in out and "short training runs" in out
    record = json.loads(Path("tpsgd-report/results.json").read_text())
    assert record["settings"]["lr"] == "search"
    readout = record["arms"][1]
    assert readout["restarts"][0]["settings"]["lr"] == readout["lr"] == float(rates["readout"])
    assert [block["learning"] for block in readout["restarts"][0]["blocks"]][-1] == "solved"


def test_the_record_holds_a_recurrent_nets_settings(says):
    words = ("--data", "steps.npz", "--model", "rnn:4", "--init", "zeros", "--window", "2")
    record = json.loads(says("compare", *words, *STEPS, "--rules", "random,drtp", "--json")[1])
    assert [a["name"] for a in record["arms"]] == ["backprop", "drtp", "frozen", "random"]
    settings = record["settings"]
    assert (settings["init"], settings["window"]) == ("zeros", 2) and "leak" not in settings
    assert "backprop through time" in record["arms"][0]["about"]
    random = record["arms"][3]["restarts"][0]
    assert random["sample_passes"] == 0 and not random["history"]


@pytest.mark.parametrize("rule", ["readout", "random", "reservoir", "backprop"])
def test_train_a_recurrent_net(says, rule):
    words = ("--data", "tokens.npz", "--model", "rnn:4", "--epochs", "1", "--rule", rule)
    record = json.loads(says("train", *words, "--json", "--out", "kept")[1])
    assert record["rule"] == rule and record["data"]["vocabulary"] == 9
    data = tpsgd.data.load("tokens.npz")
    model = models.factory("rnn:4", data.shape, 2, tokens=9)()
    model.load_state_dict(torch.load("kept/model.pt", weights_only=True))
    assert tpsgd.evaluate(model, data.test) == record["accuracy"]
    code, out, _ = says("train", *words)
    assert code == 0 and "Recurrent" in out and "test accuracy" in out


def test_the_random_control_is_there_for_other_models_by_name(says):
    code, out, _ = says("compare", *SMALL, "--rules", "random", "--restarts", "1")
    names = [line.split()[0] for line in out.splitlines()[3:6]]
    assert code == 0 and set(names) == {"backprop", "frozen", "random"}


def test_words_of_the_command_line_are_those_of_the_models():
    helps = {f.name: f.metadata["option"].help for f in fields(options.Model)}
    assert all(word.replace("_", "-") in helps["init"] for word in BY_NAME)
    assert all(word in helps["activation"] for word in {*models.ACTIVATIONS} - {"leaky-relu"})


@pytest.mark.full
@pytest.mark.real_data("mnist")
def test_rows_of_mnist(says):
    words = ("--data", "seq-mnist-rows", "--model", "rnn:32", "--max-train", "500", "--window", "7")
    code, out, err = says("compare", *words, *STEPS, "--rules", "readout,reservoir", "--json")
    record = json.loads(out)
    assert (code, err) == (0, "") and record["data"]["shape"] == [28, 28]
    accuracy = {a["name"]: a["summary"]["accuracy"] for a in record["arms"]}
    assert set(accuracy) == {"backprop", "readout", "reservoir", "frozen"}
    assert accuracy["reservoir"] > 0.3


@pytest.mark.parametrize("head", ["adam", "ridge"])
def test_a_solved_head_is_not_hidden(says, head):
    words = (*SMALL, "--rules", "readout,dfa", "--restarts", "1", "--head", head)
    status, out, _ = says("compare", *words)
    said = " ".join(out.split())
    assert status == 0
    assert ("solved in closed form, except of backprop, dfa" in said) is (head == "ridge")


def test_peers_by_their_words(says):
    words = (*SMALL, "--rules", "zorb,lm-karnet,dladmm,elm", "--restarts", "1")
    code, out, err = says("compare", *words)
    assert (code, err) == (0, "") and max(map(len, out.splitlines())) <= 80
    assert {"zorb", "lm-karnet", "dladmm", "elm", "backprop", "frozen"} <= set(out.split())
    assert "dladmm: 300 iterations over all samples, not epochs" in " ".join(out.split())
    for word, *more in (
        ("zorb", "--lr", "5"),
        ("elm", "--blocks", "1"),
        ("lm-karnet", "--lr", "1"),
    ):
        code, _, err = says("train", *SMALL, "--rule", word, *more)
        assert code == 2 and f"{word} takes no {more[0]}: leave them out" in err
    code, out, _ = says("train", *SMALL, "--rule", "zorb", "--json")
    record = json.loads(out)
    assert code == 0 and record["rule"] == "zorb" and 0 <= record["accuracy"] <= 1


# ---- recipes -------------------------------------------------------------------------------------


@pytest.fixture
def squares():
    """Images of 16 x 16 pixels in a file."""
    x = np.random.default_rng(3).normal(size=(60, 1, 16, 16)).astype("float32")
    np.savez("squares.npz", x=x, y=np.arange(60) % 2)
    return "--data", "squares.npz", "--model", "vgg:8", "--recipe", "deep"


def test_a_recipe_sets_what_was_not_chosen(says, squares):
    words = ("--epochs", "1", "--max-train", "8", "--json")
    settings = json.loads(says("train", *squares, *words)[1])["settings"]
    recipe = tpsgd.zoo.recipes.deep
    assert settings["epochs"] == 1 and settings["batch_size"] == recipe.batch_size
    assert (settings["lr"], settings["lr_schedule"]) == (recipe.lr, str(recipe.lr_schedule))
    assert settings["augment"] == str(recipe.augmentation((1, 16, 16)))
    assert settings["order"] == "simultaneous" and settings["precision"] is None
    assert settings["model"] == "vgg:8" and "activation" not in settings


def test_options_replace_those_of_a_recipe(says, squares):
    words = ("--epochs", "1", "--max-train", "8", "--batch-size", "4")
    words += ("--order", "sequential", "--optimizer", "sgd", "--model", "cnn:4x3", "--json")
    settings = json.loads(says("train", *squares, *words)[1])["settings"]
    chosen = {"batch_size": 4, "order": "sequential"}
    chosen |= {"optimizer": "sgd", "lr": None, "lr_schedule": "one_cycle(0.2)"}
    assert {name: settings[name] for name in chosen} == chosen


@pytest.mark.parametrize(
    ("words", "expected"), [("", (1e-3, 0.05)), ("adam", (1e-3, 0.05)), ("sgd", (None, None))]
)
def test_another_optimizer_has_not_the_rate_and_the_decay_of_a_recipe(
    says, squares, words, expected
):
    others = ("--recipe", "vit", "--model", "vit:1x8", "--epochs", "1", "--max-train", "8")
    others += ("--optimizer", words) if words else ()
    settings = json.loads(says("train", *squares[:2], *others, "--json")[1])["settings"]
    assert (settings["lr"], settings["weight_decay"]) == expected and settings["clip"] == 1.0


@pytest.mark.full
def test_compare_and_plan_take_a_recipe(says, squares):
    words = ("--model", "cnn:4x3", "--epochs", "1", "--max-train", "8", "--batch-size", "4")
    words += ("--rules", "readout", "--restarts", "1", "--json")
    for row in json.loads(says("compare", *squares, *words)[1])["arms"]:
        assert row["restarts"][0]["settings"]["lr_schedule"] == "one_cycle(0.2)"
    assert json.loads(says("plan", *squares, "--json")[1])["batch_size"] == 64


def test_without_a_recipe_the_data_decide_how_long_to_train(says):
    record = json.loads(says("train", "--data", "two.npz", "--model", "mlp:4", "--json")[1])
    samples = record["data"]["train"]
    steps = -(-samples // record["settings"]["batch_size"])
    assert record["settings"]["batch_size"] == batch_size_for(samples)
    assert record["settings"]["epochs"] == epochs_for(steps)
    assert f"{steps * epochs_for(steps):,} steps a block" in record["length"]
    assert record["settings"]["lr_schedule"] is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--recipe deeper", "'deeper' is not one of 'deep'"),
        ("--recipe deep", "this recipe is for images"),
        ("--recipe deep --rule elm", "elm takes no --recipe"),
        ("--model vgg:12", "write vgg:8, vgg:11 or vgg:16"),
    ],
)
def test_a_recipe_that_does_not_suit_is_one_sentence(says, words, message):
    code, out, err = says("train", "--data", "two.npz", "--epochs", "1", *words.split())
    assert code and message in f"{out}{err}" and "Traceback" not in err


@pytest.mark.full
def test_compare_at_equal_reads_and_seconds(says):
    words = (*SMALL, "--restarts", "1", "--rules", "readout")
    code, out, _ = says("compare", *words, "--equal", "reads")
    assert code == 0 and "equal reads of the data: " in out.splitlines()[0]
    assert "epochs of the blocks: backprop " in out and "most confused by readout: " in out
    timed = ("--equal", "seconds", "--seconds", "0.2", "--overwrite")
    code, out, _ = says("compare", *words, *timed, "--json")
    record = json.loads(out)
    assert code == 0 and record["settings"]["seconds"] == 0.2
    assert all(row["restarts"][0]["seconds"] > 0.15 for row in record["arms"])
    code, _, err = says("compare", *words, "--seconds", "1", "--overwrite")
    assert code == 2 and "seconds=1.0 needs equal='seconds'" in err
    assert "'read' is not one of 'passes', 'reads'" in says("compare", *words, "--equal", "read")[2]


def test_the_scale_of_readout_is_an_option(says):
    record = json.loads(says("train", *SMALL, "--readout-scale", "3", "--json")[1])
    assert "calibrated, scale 3" in record["settings"]["options"][0]
    words = ("--restarts", "1", "--rules", "readout,drtp", "--readout-scale", "3", "--json")
    arms = json.loads(says("compare", *SMALL, *words)[1])["arms"]
    options = {a["name"]: str(a["restarts"][0]["settings"]["options"]) for a in arms}
    assert "calibrated, scale 3" in options["readout"] and "calibrated" not in options["drtp"]
    code, _, err = says("train", *SMALL, "--rule", "drtp", "--readout-scale", "3")
    assert code == 2 and "drtp has no scale" in err


def test_published_tables_go_where_there_is_no_folder_yet(says, folder):
    words = ("compare", *SMALL, "--rules", "lls", "--restarts", "1", "--out", "report")
    code, _, err = says(*words, "--latex", "new/x.tex", "--csv", "new/x.csv")
    assert code == 0, err
    assert Path("new/x.tex").read_text().startswith("% tpsgd compare")
    assert Path("new/x.csv").read_text().startswith("rule,n,mean")
    code, _, err = says(*words, "--latex", "same", "--csv", "same")
    assert code == 2 and "name the same file" in err and not Path("same").exists()
    code, _, err = says(*words, "--latex", "new/x.tex")
    assert code == 2 and "already there" in err
