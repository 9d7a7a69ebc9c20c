"""`tpsgd demo`: its reports, its lines about the nets, and what it refuses; on tiny nets."""

import json
import re
from pathlib import Path

import pytest

import tpsgd
from tpsgd.cli import demo as demo_module
from tpsgd.cli.demo import ARMS, NETS, RULE, summary
from tpsgd.comparison.arms import all_words, arm
from tpsgd.comparison.results import Result, Results
from tpsgd.engine import arm as arm_module
from tpsgd.engine.record import Run


@pytest.fixture(autouse=True)
def tiny(tmp_path, monkeypatch):
    """One epoch and one restart of small nets on 80 digits, and a search over two rates."""
    monkeypatch.setattr("tpsgd.comparison.trials.RATES", (0.001, 0.01))
    data = tpsgd.data.load("digits", max_train=80)
    monkeypatch.setattr(tpsgd.data, "load", lambda name: data)
    nets = {"mlp": NETS["mlp"]._replace(model="mlp:4", epochs=1)}
    nets["cnn"] = NETS["cnn"]._replace(model="mlp:3", epochs=1)
    monkeypatch.setattr(demo_module, "NETS", nets)
    monkeypatch.setattr(demo_module, "RESTARTS", 1)
    monkeypatch.chdir(tmp_path)


def test_the_demo_has_a_report_per_net_and_ends_with_a_line_per_net(says):
    code, out, err = says("demo")
    lines = out.splitlines()
    assert (code, err) == (0, "") and max(map(len, lines)) <= 80
    text = " ".join(out.split())
    for net in ("MLP", "CNN"):
        (numbers,) = re.findall(rf" {net}: accuracy (.*?), time ×", text)
        assert "random layers at best" in numbers and "both in micro-batches ×" in numbers
    assert text.endswith("reports: demo/mlp/report.html, demo/cnn/report.html")
    for net in ("mlp", "cnn"):
        record = json.loads(Path(f"demo/{net}/results.json").read_text())
        assert {a["name"] for a in record["arms"]} == set(ARMS)
        assert record["settings"]["lr"] == "search" and record["command"] == "tpsgd demo"
        assert {r["kept_bytes"] for a in record["arms"] for r in a["restarts"]} == {0}
        assert Path(f"demo/{net}/report.html").is_file()


def test_further_rules_are_trained_where_they_are_named(says, monkeypatch):
    monkeypatch.setattr(demo_module, "NETS", {"mlp": demo_module.NETS["mlp"]})
    words, _ = all_words(tpsgd.zoo.words.factory("mlp:4", (1, 8, 8), 10))
    for rules, names in (("drtp", ["drtp"]), ("all", words)):
        assert says("demo", "--rules", rules, "--overwrite")[0] == 0
        record = json.loads(Path("demo/mlp/results.json").read_text())
        assert {a["name"] for a in record["arms"]} == {*ARMS, *names}


def test_what_the_demo_refuses_it_refuses_before_training(says, monkeypatch):
    monkeypatch.setattr(tpsgd, "compare", None)
    Path("demo/cnn").mkdir(parents=True)
    Path("demo/cnn/results.json").write_text("precious")
    for words, text in (
        ((), "results.json is already there, from an earlier run"),
        (("--rules", "redout", "--overwrite"), "unknown rule 'redout': did you mean 'readout'?"),
        (("--out", "demo/cnn/results.json/x"), "cannot write to"),
    ):
        code, out, err = says("demo", *words)
        assert (code, out) == (2, "") and err.count("\n") == 1 and text in err
    assert Path("demo/cnn/results.json").read_text() == "precious"
    assert not Path("demo/mlp").exists()


def test_an_interrupt_leaves_the_nets_before_it_and_the_runs_that_finished(says, monkeypatch):
    fit_many, count = arm_module.fit_many, len(ARMS)

    def interrupted(make, *args, **options):
        control = options["rule"] is not None and options["rule"].name == "frozen"
        if control and Path("demo/cnn/results.json").exists():
            raise KeyboardInterrupt
        return fit_many(make, *args, **options)

    monkeypatch.setattr(arm_module, "fit_many", interrupted)
    code, out, err = says("demo")
    assert code == 130 and err.count("\n") == 1
    assert f"of {count} training runs are in {Path('demo/cnn')}" in err
    record = json.loads(Path("demo/mlp/results.json").read_text())
    assert record["finished"] == count and Path("demo/mlp/report.html").is_file()
    record = json.loads(Path("demo/cnn/results.json").read_text())
    assert record["interrupted"] and 0 < record["finished"] < count
    assert "MLP: accuracy" not in out


def test_an_arm_that_fails_does_not_hide_the_others(says, monkeypatch):
    fit_many = arm_module.fit_many

    def failing(make, *args, **options):
        if options["rule"] is not None and options["rule"].name == RULE:
            raise tpsgd.TpsgdError("it diverged")
        return fit_many(make, *args, **options)

    monkeypatch.setattr(arm_module, "fit_many", failing)
    code, out, _ = says("demo")
    assert code == 1 and f"{RULE} failed: it diverged" in out and "MLP: accuracy" not in out
    assert Path("demo/cnn/report.html").is_file()


def result(word, accuracies, seconds=1.0, peak=100, error=None):
    """An arm's result, with a run for each accuracy."""
    runs = [Run(word, 0, {}, seconds=seconds, peak_bytes=peak) for _ in accuracies]
    return Result(arm(word), list(accuracies), runs, error)


def line(*results):
    """The line about a net called A, on which the planned memory of the rule is 30 bytes."""
    return summary("A", Results({}, {}, {}, list(results)), 30)


BACKPROP = result("backprop", [0.95, 0.95])


def test_a_line_compares_the_rule_with_backprop_and_the_best_control():
    ours, micro = result(RULE, [0.9, 0.92], 2.0, 40), result("backprop-micro", [0.95], 3.0, 60)
    controls = [result("frozen", [0.5, 0.5]), result("elm", [0.93, 0.95])]
    assert line(BACKPROP, micro, ours, *controls) == [
        "A: accuracy 91.0 (backprop 95.0, random layers at best 94.0), memory ×0.40 (both in "
        "micro-batches ×0.50), time ×2.00"
    ]
    assert line(BACKPROP, ours) == ["A: accuracy 91.0 (backprop 95.0), memory ×0.40, time ×2.00"]


def test_a_net_without_a_result_of_both_has_no_line():
    failed = result(RULE, [0.9], error="it diverged")
    assert line(BACKPROP, failed) == line(result(RULE, [0.9])) == []
