"""Every experiment and benchmark can be started; small runs leave the rows that the pages show."""

import importlib
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = [
    path
    for folder in ("experiments", "benchmarks")
    for path in sorted((ROOT / folder).glob("*.py"))
    if "def main()" in path.read_text(encoding="utf-8")
]


@pytest.fixture
def script(monkeypatch):
    """A function that imports a script by its path."""

    def load(path: Path):
        monkeypatch.syspath_prepend(str(ROOT))
        monkeypatch.syspath_prepend(str(path.parent))
        return importlib.import_module(f"{path.parent.name}.{path.stem}")

    return load


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_the_script_explains_itself(path, script, monkeypatch, capsys):
    module = script(path)
    monkeypatch.setattr(sys, "argv", [path.name, "--help"])
    with pytest.raises(SystemExit) as end:
        module.main()
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert any(word in text for word in ("--out", "--save", "--kills", "--cases", "--repeats"))


def test_both_schedules_are_measured_on_held_out_samples(script, monkeypatch, tmp_path, capsys):
    module = script(ROOT / "experiments" / "schedules.py")
    monkeypatch.setitem(module.NETS, "absent", module.Net("no-such-set", module.plain_cnn, 1))
    words = f"--only digits-mlp absent --restarts 2 --quick --device cpu --out {tmp_path}"
    monkeypatch.setattr(sys, "argv", ["schedules", *words.split()])
    module.main()
    assert "absent is left out: " in capsys.readouterr().out
    record = json.loads((tmp_path / "schedules-cpu.json").read_text(encoding="utf-8"))
    assert record["machine"]["cpu"] and list(record["nets"]) == ["digits-mlp"]
    net = record["nets"]["digits-mlp"]
    assert (net["settings"]["samples"], net["settings"]["held_out"]) == (540, 60)
    local = {arm: row for arm, row in net["arms"].items() if ", " in arm}
    for arm, row in local.items():
        assert row["settings"]["order"] == arm.partition(", ")[2]
        assert len(row["accuracies"]) == 2 and row["ratio"] > 0 and row["peak_bytes"] > 0
    passes = {row["sample_passes"] for row in [net["arms"]["backprop"], *local.values()]}
    assert passes == {3 * 540}


@pytest.mark.full
@pytest.mark.real_data("mnist")
@pytest.mark.parametrize(
    ("name", "where", "words"),
    [
        ("shallow", ("tables", "mnist-mlp"), "--only mnist-mlp --arm drtp"),
        ("peers", ("cpu", "nets", "mlp-256"), "--only mlp-256 --arm elm"),
    ],
)
def test_a_small_run_leaves_a_row(name, where, words, script, monkeypatch, tmp_path):
    module = script(ROOT / "experiments" / f"{name}.py")
    options = f"{words} --restarts 2 --max-train 600 --device cpu --out {tmp_path}"
    monkeypatch.setattr(sys, "argv", [name, *options.split()])
    module.main()
    record = json.loads((tmp_path / f"{name}.json").read_text(encoding="utf-8"))
    origin = record["cpu"] if name == "peers" else record
    assert origin["command"].startswith(f"python -m experiments.{name} --out results")
    assert origin["machine"]["cpu"] and origin["versions"]["torch"]
    for key in where:
        record = record[key]
    row = record["arms"][words.split()[-1]]
    assert len(row["accuracies"]) == 2 and 0.2 < row["accuracy"] < 1
    assert row["seconds"] > 0 and row["peak_bytes"] > 0 and row["settings"]["batch_size"]


@pytest.mark.full
@pytest.mark.real_data("mnist")
def test_digits_that_come_one_after_another(script, monkeypatch, tmp_path):
    module = script(ROOT / "experiments" / "streams.py")
    options = f"--only digits --quick --seeds 1 --out {tmp_path}"
    monkeypatch.setattr(sys, "argv", ["streams", *options.split()])
    module.main()
    record = json.loads((tmp_path / "streams.json").read_text(encoding="utf-8"))
    arms = record["digits"]["arms"]
    assert set(arms) == {*module.ARMS, "rls"} and record["machine"]["cpu"]
    for arm, row in arms.items():
        assert [len(point["classes"]) for point in row["curve"]] == [10] * len(row["curve"])
        assert ("buffer_bytes" in row) == arm.endswith("buffer")
    assert arms["rls"]["accuracy"] > arms["backprop"]["accuracy"]
