"""`tpsgd search`: words to a grid, what it prints and writes, Ctrl-C."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from tpsgd import rules
from tpsgd.data import load
from tpsgd.engine.arm import Arm
from tpsgd.memory.meter import tensor_bytes
from tpsgd_adapt import AdaptorSearch, backbone, search

NET = """
import torch
from torch import nn
from tpsgd_adapt import Backbone

def make():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.ReLU(), nn.Flatten())
    return Backbone(net, {"maps": "1", "flat": "2"}, name="tiny")

def plain():
    return make().model
"""
SMALL = ("--backbone", "net.py:make", "--data", "images.npz", "--epochs", "1")
GRID = (*SMALL, "--taps", "maps,flat", "--convs", "0,1", "--dense", "0")
DRAWN = AdaptorSearch.plot
TRIALS = 2 + 2 + 1  # probes, and one or none convolution, of which vectors have none


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Run in a folder with a backbone and images; plans by a formula, to save time."""
    (tmp_path / "net.py").write_text(NET)
    g, y = np.random.default_rng(0), np.arange(60) % 3
    x = 0.5 * g.random((60, 3, 8, 8)) + 0.5 * np.eye(3)[y][:, :, None, None]
    np.savez(tmp_path / "images.npz", x=x.astype("float32"), y=y)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "tpsgd_adapt.trials.planned_peak",
        lambda arm, head, x, settings: 3 * tensor_bytes(head),
    )
    monkeypatch.setattr(AdaptorSearch, "plot", lambda self, file: file)
    return tmp_path


def rows(record: dict) -> list[dict]:
    """A record's rows, less their times."""
    return [{k: v for k, v in row.items() if k != "seconds"} for row in record["rows"]]


def test_a_grid_and_its_files(says, monkeypatch):
    monkeypatch.setattr(AdaptorSearch, "plot", DRAWN)
    code, out, err = says("search", *GRID, "--out", "found")
    lines = [line for line in out.splitlines() if not line.startswith("to train it: ")]
    assert (code, err) == (0, "") and max(map(len, lines)) <= 80
    assert lines[0].startswith("tap") and len([x for x in lines if x.startswith("maps")]) == 3
    said = " ".join(lines[TRIALS + 1 :])
    assert "best: " in said and "of 10 held-out samples, planned" in said
    assert "control: " in said and "rank correlation of score and accuracy: " in said
    names = ["search.json", "heatmaps.png", "trials.jsonl"]
    assert lines[-1] == f"{', '.join(names)}: found"
    assert sorted(names) == sorted(p.name for p in Path("found").iterdir())
    assert Path("found/heatmaps.png").read_bytes().startswith(b"\x89PNG")
    assert Path("found/trials.jsonl").read_text().count("\n") == 1 + TRIALS  # what was searched


def test_words_mean_what_the_library_is_given(says):
    words = ("--rule", "drtp", "--restarts", "2", "--batch-size", "16", "--lr", "0.01")
    more = ("--seed", "3", "--memory", "30KB", "--top", "1", "--max-train", "40")
    code, out, _ = says("search", *GRID, *words, *more, "--json")
    record = json.loads(out)
    samples = load("images.npz", seed=3, max_train=40)
    direct = search(
        backbone("net.py:make"), samples.train, taps=("maps", "flat"), convs=(0, 1), dense=(0,),
        rule=rules.drtp(), restarts=2, batch_size=16, lr=0.01, seed=3, memory="30KB", top=1,
        epochs=1, classes=samples.classes,
    )  # fmt: skip
    plain = json.loads(json.dumps(direct.as_dict()))
    assert code == 0 and rows(record) == rows(plain)
    assert {"over budget", "left out"} & {row["skipped"] for row in record["rows"]}
    assert record["command"].startswith("tpsgd search") and record["backbone"] == "tiny"
    saved = json.loads(Path("tpsgd-search/search.json").read_text())
    assert saved == {k: v for k, v in record.items() if k != "files"}


def test_ctrl_c_says_how_to_go_on(says, monkeypatch):
    real, done = Arm.train, []

    def train(self, *given, **more):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(given)
        return real(self, *given, **more)

    monkeypatch.setattr(Arm, "train", train)
    code, out, err = says("search", *GRID)
    wanted = f"interrupted; 2 of {TRIALS} trials are in tpsgd-search; the same command continues"
    assert (code, out) == (130, "") and err == f"tpsgd: {wanted}\n"
    monkeypatch.setattr(Arm, "train", lambda *a, **k: done.append(a) or real(*a, **k))
    assert says("search", *GRID)[0] == 0 and len(done) == TRIALS
    code, _, err = says("search", *GRID)
    assert code == 2 and "search.json is already there" in err and "--overwrite" in err
    assert says("search", *GRID, "--overwrite")[0] == 0 and len(done) == TRIALS


def test_ctrl_c_before_the_first_trial(says, monkeypatch):
    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("tpsgd_adapt.trials.activation_overlap", stopped)
    code, _, err = says("search", *GRID)
    assert code == 130 and "interrupted; no trial was begun; the same command continues" in err


def test_backprop_and_rules_that_wait_for_the_output(says):
    for word, method in (("backprop", "fit_backprop"), ("dfa", "fit")):
        words = (*SMALL, "--taps", "flat", "--dense", "1", "--rule", word, "--json", "--out", word)
        record = json.loads(says("search", *words)[1])
        assert record["settings"]["method"] == method and record["rows"][1]["accuracies"]
    assert "order" not in record["settings"]  # that of the rule


def test_the_last_tap_is_searched_if_none_is_named(says):
    code, out, _ = says("search", *SMALL, "--dense", "0", "--json")
    assert code == 0 and {row["tap"] for row in json.loads(out)["rows"]} == {"flat"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--taps nowhere", "has no tap 'nowhere'"),
        ("--convs a,b", "--convs takes whole numbers such as 0,1,2, got 'a,b'"),
        ("--dense 1.5", "--dense takes whole numbers"),
        ("--dense -1", "dense must be a whole number, 0 or more"),
        ("--convs 1,1", "convs must be different values"),
        ("--rule drpt", "did you mean 'drtp'?"),
        ("--rule zorb", "an adaptor is trained by a rule or by backprop, not by zorb"),
        ("--augment flip", "No such option: --augment"),
        ("--memory apples", "is no amount of memory"),
        ("--memory 10", "nothing was trained within 10 B: the smallest plans"),
        ("--lr 0", "--lr must be more than 0"),
        ("--device gpu", "unknown device 'gpu'"),
        ("--top 0", "--top"),
        ("--backbone vgg99", "unknown backbone 'vgg99'"),
        ("--backbone net.py:nobody", "nobody"),
        ("--backbone net.py:plain", "returns a plain module: name the submodule to read from"),
        ("--weights nowhere.npz", "nowhere.npz"),
        ("--data nowhere.npz", "nowhere.npz"),
    ],
)
def test_mistakes_are_one_line(says, words, said):
    code, _, err = says("search", *SMALL, *words.split())
    assert code in (1, 2) and said in err and err.count("\n") == 1


def test_a_terminal_sees_a_bar(says, monkeypatch):
    seen = []

    class Bar:
        def __enter__(self):
            return lambda what, done, total: seen.append((what, done / total))

        def __exit__(self, *_):
            return None

    monkeypatch.setattr(sys.modules["tpsgd.cli.terminal"], "live_bar", Bar)
    assert says("search", *GRID)[0] == 0
    assert seen[0][0] == "features" and seen[-1][1] == 1.0
    assert {"planning", "maps probe", "maps 1+0"} <= {what for what, _ in seen}
    assert all(0 <= share <= 1 for _, share in seen)


def test_a_model_is_searched_and_its_command_trains_what_was_tested(says):
    rates = "0.00312345678,0.0301234567"  # more digits than are printed
    words = ("--model", "mlp:8", "--rates", rates, "--scales", "12", "--epochs", "3")
    code, out, err = says("search", "--data", "images.npz", *words, "--seed", "1")
    lines = out.splitlines()
    assert (code, err) == (0, "") and lines[0].split()[:3] == ["rule", "rate", "scale"]
    assert sum(line.endswith("*") for line in lines) == 3
    assert Path("tpsgd-search/report.html").exists()
    record = json.loads(Path("tpsgd-search/search.json").read_text())
    command = next(line for line in lines if line.startswith("to train it: ")).partition(": ")[2]
    assert command == record["command"] and "--readout-scale 12" in command
    trained = json.loads(says(*command.split()[1:], "--json")[1])
    arms = {arm["name"]: arm for arm in record["test"]["arms"]}
    tested = arms["readout-learned"]["restarts"][0]
    assert trained["accuracy"] == tested["accuracy"]
    assert [e["loss"] for e in trained["history"]] == [e["loss"] for e in tested["history"]]


def test_the_command_of_a_search_of_layers_trains_the_best(says):
    words = (*GRID, "--seed", "3", "--lr", "0.01", "--max-train", "40", "--out", "s")
    code, out, _ = says("search", *words)
    record = json.loads(Path("s/search.json").read_text())
    command = out.partition("to train it: ")[2].splitlines()[0]
    assert code == 0 and command == record["to_train"] and "--rule readout-learned" in command
    layers = [row for row in record["rows"] if "convs" in row["layers"]]
    best = max(layers, key=lambda row: (row["accuracy"] or 0, -row["planned_bytes"]))
    assert f"--tap {best['tap']} --convs {best['layers']['convs']} --dense 0" in command
    status, printed, error = says(*command.split()[1:], "--json", "--no-controls")
    assert status == 0, error
    first = json.loads(printed)["arms"][0]
    names = ("rule", "lr", "epochs", "batch_size", "optimizer", "loss")
    assert {n: first["settings"][n] for n in names} == {
        "rule": "readout-learned", "lr": 0.01, "epochs": 1, "batch_size": 32,
        "optimizer": record["settings"]["optimizer"], "loss": record["settings"]["loss"],
    }  # fmt: skip
    assert first["trained_bytes"] == best["trainable_bytes"]


def test_a_model_is_searched_with_the_defaults_of_train(says, monkeypatch):
    monkeypatch.setattr("tpsgd.engine.lengths.epochs_for", lambda steps: 2 * steps)
    words = ("--data", "images.npz", "--model", "mlp:8")
    code, out, _ = says("search", *words, "--rates", "0.01", "--scales", "12", "--json")
    record = json.loads(out)
    trained = json.loads(says("train", *words, "--json")[1])["settings"]
    tested = record["test"]["settings"]
    lengths = {name: trained[name] for name in ("epochs", "batch_size")}
    assert code == 0 and lengths == {name: tested[name] for name in lengths}
    assert lengths == {"epochs": 12, "batch_size": 8}
    assert record["command"].endswith("--epochs 12 --batch-size 8")


def test_numbers_are_searched_and_fields_are_in_the_command(says):
    g = np.random.default_rng(0)
    x = g.normal(size=(60, 3))
    rows = [",".join(map(str, (*row, row @ [1, 2, 3]))) for row in x]
    Path("prices.csv").write_text("\n".join(["a,b,c,price", *rows]))
    words = ("--data", "prices.csv", "--task", "regression", "--model", "mlp:4", "--epochs", "2")
    tried = ("--rates", "0.01", "--fields", "features=2,4")
    code, out, _ = says("search", *words, *tried)
    record = json.loads(Path("tpsgd-search/search.json").read_text())
    arm = "readout-learned"
    scales = [t["values"]["scale"] for t in record["trials"] if t["arm"] == arm]
    assert code == 0 and sorted({*scales}) == [0.75, 3, 12]  # around the default of numbers
    assert "R² " in out.partition("best: ")[2]
    assert f"--fields features={record['chosen'][arm]['features']}" in record["command"]
    trained = json.loads(says(*record["command"].split()[1:], "--json")[1])
    tested = next(a for a in record["test"]["arms"] if a["name"] == arm)["restarts"][0]
    assert trained["r2"] == tested["r2"]
    assert "--task needs --model" in says("search", *words[:4], "--backbone", "net.py:make")[2]


def test_fields_of_a_rule_in_a_training_run(says):
    words = ("train", "--data", "images.npz", "--model", "mlp:4", "--epochs", "1", "--json")
    options = "at most 2 features"
    code, out, _ = says(*words, "--rule", "tpsgd-l2", "--fields", "features=2 at=before")
    (text,) = json.loads(out)["settings"]["options"]
    assert code == 0 and options in text and "before" in text
    refused = says(*words, "--fields", "features=2,4")[2]
    assert "--fields features has several values: tpsgd search tries them" in refused
    assert "did you mean 'features'" in says(*words, "--fields", "feature=2")[2]
    assert (
        "backprop does not learn by a rule"
        in says(*words, "--rule", "backprop", "--fields", "a=1")[2]
    )
    solved = json.loads(says(*words, "--rule", "elm", "--fields", "alpha=0.5")[1])
    assert "0.5" in str(solved["settings"]["optimizer"])


def test_leaks_are_searched_and_named_in_the_command(says):
    g, y = np.random.default_rng(0), np.arange(60) % 2
    np.savez("steps.npz", x=g.normal(size=(60, 5, 2)).astype("float32"), y=y)
    words = ("--model", "rnn:4", "--rates", "0.01", "--scales", "12.3456789", "--leaks", "0.3,1")
    code, out, _ = says("search", "--data", "steps.npz", *words, "--epochs", "1", "--json")
    record = json.loads(out)
    command = record["command"].split()
    assert code == 0 and "--leak" in command and "12.3456789" in command
    trained = json.loads(says(*command[1:], "--json")[1])
    arms = {arm["name"]: arm for arm in record["test"]["arms"]}
    tested = arms["readout-learned"]["restarts"][0]
    assert [e["loss"] for e in trained["history"]] == [e["loss"] for e in tested["history"]]
    assert tested["blocks"][-1]["learning"] == "solved"


def test_fields_and_rules_of_a_file(says):
    rule = "from tpsgd import rules\ndef lls(temperature=1.0): return rules.lls(temperature)"
    Path("my_rules.py").write_text(rule)
    words = ("--model", "mlp:4", "--rates", "0.01", "--rule", "my_rules.py:lls", "--fields")
    tried = "temperature=0.5,2 epochs=1,2"
    code, out, err = says("search", "--data", "images.npz", *words, tried, "--json")
    assert (code, err) == (0, "")
    record = json.loads(out)
    values = [t["values"] for t in record["trials"] if t["arm"] == "lls"]
    names = ("rate", "epochs", "temperature")
    assert values == [
        dict(zip(names, (0.01, epochs, temperature), strict=True))
        for epochs in (1, 2)
        for temperature in (0.5, 2)
    ]
    assert f"--epochs {record['chosen']['lls']['epochs']}" in record["command"]
    command = "compare --data images.npz --model mlp:4 --rules my_rules.py:lls --restarts 1"
    assert "lls" in says(*command.split(), "--epochs", "1")[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--model mlp:4 --fields features", "--fields takes NAME=VALUES, each name once"),
        ("--model mlp:4 --fields feature=1", "has no field 'feature': did you mean 'features'?"),
        ("--model mlp:4 --rule nowhere.py:lls", "there is no file nowhere.py"),
        ("--model mlp:4 --backbone resnet18", "--model searches no backbone: leave --backbone out"),
        ("--model mlp:4 --convs 1", "leave --convs out"),
        ("--rates 0.1", "--rates needs --model"),
        ("--model mlp:4 --rates a", "--rates takes numbers such as 0.1,0.3,1, got 'a'"),
        ("--model mlp:4 --leaks 0.1", "--leaks is for models such as rnn:512"),
        ("--model mlp:4 --lr 0.1", "leave --lr out, or name --rates"),
        ("--model mlp:4 --rule redout", "did you mean 'readout'?"),
    ],
)
def test_mistakes_in_the_search_of_a_model(says, words, message):
    code, _, err = says("search", "--data", "images.npz", *words.split())
    assert code == 2 and message in err
