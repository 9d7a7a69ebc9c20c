"""`python -m experiments`: every experiment by its name, its smoke run, and results joined."""

import argparse
import importlib
import json
import sys

import pytest
import torch
from helpers import with_full

from experiments import __main__ as reproduce
from experiments import common, merge, stand_in
from experiments.registry import EXPERIMENTS, WEIGHTS, Experiment
from tpsgd import TpsgdError
from tpsgd.data.registry import DATASETS

PROGRAMS = [  # the same program under another name is not run twice
    "shallow --only mnist-mlp",
    "shallow --only cifar10-cnn-short",
    "family --only pepita forward-forward weight-perturbation",
    "peers --only mlp-256",
    "deep --only vgg11",
    "deep --only vgg11 --clock",
    "adaptors",
    "recurrent --shapes single stacked --sets tweets --arms drtp reservoir readout backprop-leaky",
    "search",
    "default_rule",
    "small_data",
    "deep --small --only vit-small",
    "models",
    "targets",
    "number_scale",
    "probes",
    "cost",
    "equal",
    "distributions --only leaky",
    "pixels",
    "streams",
    "one_pass",
    "edge_tail --tasks camera",
    "calibration --only vgg11 cifar10-cnn mnist-mlp eeg",
    "schedules --only digits-mlp mnist-cnn mnist-rows",
]
LONG = [p for p in PROGRAMS[1:] if p.split()[0] != "streams"]
# tests/test_paper_experiments.py runs the smoke versions of these
ELSEWHERE = ["table1", "sets", "filters", "scaling", "alignment", "energy", "clips"]
PAPER = [
    *("table1", "mlp", "cnn", "imagenette", "rnn", "rnn-stacked", "rnn-bidirectional", "rnn-data"),
    *("filter-sampling", "cifar-scaling", "adaptor-search", "adaptor-combinations"),
    *("alignment", "energy", "distributions"),
]


@pytest.fixture
def here(monkeypatch, tmp_path):
    """A function that says which data sets are here; results go into a temporary folder."""
    monkeypatch.chdir(tmp_path)

    def choose(*names: str) -> None:
        monkeypatch.setattr("experiments.registry.is_here", lambda name: name in names)

    return choose


@pytest.fixture
def started(monkeypatch):
    """The programs that are started, with their words; those named in `failing` fail."""
    calls: list[list[str]] = []
    failing: set[str] = set()

    def run(words):
        calls.append(words)
        return int(words[0] in failing)

    monkeypatch.setattr(reproduce, "run", run)
    return calls, failing


def test_every_part_of_the_paper_has_a_name():
    assert [name for name, experiment in EXPERIMENTS.items() if experiment.of_paper] == PAPER


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_entry_names_what_exists(name):
    experiment = EXPERIMENTS[name]
    assert set(experiment.data) <= {*DATASETS, WEIGHTS}
    assert experiment.minutes > 0 and experiment.files
    assert {words.split()[0] for words in experiment.programs} <= {
        *ELSEWHERE, *(w.split()[0] for w in PROGRAMS)
    }  # fmt: skip


@pytest.mark.parametrize("program", with_full(PROGRAMS, LONG))
def test_the_smoke_run_needs_no_data(program, monkeypatch, tmp_path):
    module, *words = program.split()
    try:
        main = importlib.import_module(f"experiments.{module}").main
    except ModuleNotFoundError as error:
        pytest.skip(f"no {error.name}")
    monkeypatch.delenv("TPSGD_DATA", raising=False)
    monkeypatch.setenv("TPSGD_CACHE", str(tmp_path / "empty"))
    monkeypatch.setattr("socket.socket.connect", no_network)
    precision = torch.get_float32_matmul_precision()
    options = [*words, "--smoke", "--device", "cpu", "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", [module, *options])
    main()
    torch.set_float32_matmul_precision(precision)
    file = next((tmp_path / "out").glob("*.json"))
    record = json.loads(file.read_text(encoding="utf-8"))
    there = record["cpu"] if module == "peers" else record
    assert there["machine"]["cpu"] and "commit" in there["versions"]


def no_network(*args):
    raise OSError("this test has no network")


def test_a_run_that_was_stopped_goes_on(monkeypatch, tmp_path, capsys):
    from experiments import shallow

    options = f"--only mnist-mlp --smoke --device cpu --out {tmp_path}".split()
    monkeypatch.setattr(shallow, "ARMS", {k: shallow.ARMS[k] for k in ("backprop", "readout")})
    monkeypatch.setattr(sys, "argv", ["shallow", *options, "--arm", "readout"])
    shallow.main()
    file = tmp_path / "shallow-smoke.json"
    first = json.loads(file.read_text())["tables"]["mnist-mlp"]["arms"]
    monkeypatch.setattr(sys, "argv", ["shallow", *options])
    capsys.readouterr()
    shallow.main()
    second = json.loads(file.read_text())["tables"]["mnist-mlp"]["arms"]
    assert second["readout"] == first["readout"] and list(second) == ["readout", "backprop"]
    assert "readout" not in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["shallow", *options, "--again"])
    shallow.main()
    assert "readout" in capsys.readouterr().out


def test_smoke_runs_have_a_file_of_their_own(tmp_path):
    for smoke, name in ((True, "deep-smoke"), (False, "deep")):
        options = argparse.Namespace(out=tmp_path, smoke=smoke)
        record, save = common.result_file(options, "deep")
        assert record == {"experiment": name}
        save()
        assert common.result_file(options, "deep")[0] == record


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_file_that_is_no_result_stops_the_run_in_one_sentence(content, started, capsys, tmp_path):
    (tmp_path / "table1.json").write_text(content)
    assert reproduce.main(["table1", "--out", str(tmp_path)]) == 1 and not started[0]
    error = capsys.readouterr().err
    assert "table1.json is no file of results" in error and error.count("\n") == 1
    assert (tmp_path / "table1.json").read_text() == content


def test_a_folder_that_cannot_be_written_to_is_named(started, capsys, tmp_path):
    (tmp_path / "file").touch()
    for words in (["table1"], ["--merge", str(tmp_path / "part")]):
        (tmp_path / "part").mkdir(exist_ok=True)
        (tmp_path / "part" / "deep.json").write_text("{}")
        assert reproduce.main([*words, "--out", str(tmp_path / "file")]) == 1 and not started[0]
        error = capsys.readouterr().err
        assert "cannot write to" in error and error.count("\n") == 1


def test_names_words_and_flags_reach_the_programs(here, started, tmp_path):
    here("mnist")
    calls, _ = started
    words = ["mlp", "peers", "--restarts", "2", "--again", "--out", str(tmp_path)]
    assert reproduce.main(words) == 0
    assert [call[0] for call in calls] == ["shallow", "peers", "peers"]
    assert calls[0] == [
        *["shallow", "--only", "mnist-mlp", "mnist-mlp-tanh", "--out"],
        *[str(tmp_path), "--again", "--restarts", "2"],
    ]


def test_a_failure_does_not_stop_the_others(here, started, capsys):
    here("mnist", "cifar10")
    calls, failing = started
    failing.add("shallow")
    assert reproduce.main(["cnn", "peers"]) == 1
    assert [call[0] for call in calls] == ["shallow", "peers"]
    assert "1 of 2 ran; failed: cnn" in capsys.readouterr().out


def test_without_data_every_command_can_be_copied(here, capsys):
    here()
    assert reproduce.main(["cnn"]) == 1
    error = capsys.readouterr().err
    assert "`tpsgd data fetch mnist`, `tpsgd data fetch cifar10`" in error


def test_without_data_a_sentence_names_the_smoke_run(here, started, capsys):
    here()
    assert reproduce.main(["mlp"]) == 1 and not started[0]
    error = capsys.readouterr().err
    assert "tpsgd data fetch mnist" in error and "python -m experiments mlp --smoke" in error
    assert error.count("\n") == 1
    assert reproduce.main(["mlp", "--smoke"]) == 0 and len(started[0]) == 2
    assert "--smoke" in started[0][0] and "reproduced" not in started[0][0]


def test_a_smoke_run_without_a_name_runs_everything(started, capsys):
    assert reproduce.main(["--smoke"]) == 0
    assert f"{len(EXPERIMENTS)} of {len(EXPERIMENTS)} ran" in capsys.readouterr().out
    calls = len(started[0])
    assert reproduce.main(["--smoke", "--paper"]) == 0 and calls < len(started[0]) < 2 * calls
    assert reproduce.main([]) == 1 and "name an experiment" in capsys.readouterr().err


def test_a_set_that_is_missing_among_others_is_left_out(here, started, capsys):
    here("mnist")
    assert reproduce.main(["cnn"]) == 0 and len(started[0]) == 1
    here("imagenette")
    assert reproduce.main(["adaptor-search"]) == 1
    assert "$TPSGD_DATA/vgg16" in capsys.readouterr().err


def test_sets_that_cannot_be_had_are_left_out_by_the_loop(capsys):
    def build(name):
        if name == "absent":
            raise TpsgdError("no network")
        return name.upper()

    assert list(common.with_data(["a", "absent", "b"], build)) == [("a", "A"), ("b", "B")]
    assert capsys.readouterr().out == "absent is left out: no network\n"


def test_the_list_says_what_is_here(here, capsys):
    here("mnist")
    assert reproduce.main(["--list"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in EXPERIMENTS)
    assert "needs mnist, cifar10 (not here); GPU, 5 min; shallow.json" in text


@pytest.mark.parametrize("words", [[], ["mpl"]])
def test_a_wrong_name_gets_one_sentence(words, capsys):
    assert reproduce.main(words) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_an_experiment_that_is_not_in_the_checkout_is_named(monkeypatch, started, capsys):
    absent = Experiment("a thing", ("no_such_program",), ("thing",), 1)
    monkeypatch.setitem(EXPERIMENTS, "mlp", absent)
    assert reproduce.main(["mlp"]) == 1 and not started[0]
    assert "experiments.no_such_program" in capsys.readouterr().err


def test_results_of_several_machines_are_joined(tmp_path, capsys):
    write = {
        "a/deep.json": {"nets": {"vgg11": {"arms": {"readout": {"lr": 1}}}}, "note": "a"},
        "b/deep.json": {"nets": {"vgg11": {"arms": {"backprop": {"lr": 2}}}}, "note": "b"},
        "b/shallow.json": {"tables": {}},
        "out/deep.json": {"nets": {"vgg8": {}}},
    }
    for name, record in write.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(record))
    words = ["--merge", str(tmp_path / "a" / "deep.json"), str(tmp_path / "b")]
    assert reproduce.main([*words, "--out", str(tmp_path / "out")]) == 0
    joined = json.loads((tmp_path / "out" / "deep.json").read_text())
    assert joined["note"] == "b" and set(joined["nets"]) == {"vgg8", "vgg11"}
    assert set(joined["nets"]["vgg11"]["arms"]) == {"readout", "backprop"}
    assert json.loads((tmp_path / "out" / "shallow.json").read_text()) == {"tables": {}}


def test_a_file_that_is_no_result_is_named(tmp_path, capsys):
    (tmp_path / "deep.json").write_text("{")
    with pytest.raises(TpsgdError, match=r"deep\.json is no file of results"):
        merge.join([tmp_path / "deep.json"], tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", DATASETS)
def test_artificial_samples_have_the_form_of_their_set(name):
    entry, data = DATASETS[name], stand_in.data(name)
    assert len(data.classes) == (len(entry.classes) or entry.class_count)
    assert set(data.train[1].tolist()) == set(range(len(data.classes)))
    assert data.vocabulary == entry.vocabulary
    if entry.shape[-1] <= stand_in.PIXELS or len(entry.shape) < 3:
        assert data.shape == entry.shape == tuple(data.train[0].shape[1:])
    assert torch.equal(data.train[0], stand_in.data(name).train[0])


def test_rows_of_two_commits_are_not_mixed():
    old = {"row": {"accuracies": [0.5], "busy": True, "commit": "a"}}
    new = {"row": {"accuracies": [0.6], "commit": "b"}}
    assert merge.merged(old, new) == new
    clocked = {"row": {"accuracies": [0.6], "seconds": 2.0, "commit": "b"}}
    assert merge.merged(new, {"row": {"seconds": 2.0}}) == clocked
