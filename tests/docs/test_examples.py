"""Every example runs offline and prints what it promises."""

import re
import runpy
from pathlib import Path

import pytest
import torch
from helpers import with_full

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SAYS = {
    "quickstart": r"^peak memory [\d,]+ bytes, \d+% of backprop's$",
    "own_model_and_data": r"^the first test image shows a (\d); the model says \d$",
    "rule_per_block": r"^2 +3: Residual \+ Tanh +readout-learned +18,624 +autograd ",
    "add_a_rule": r"^check_rule: cosine keeps the contract$",
    "sequences": r"^peak memory [\d,]+ bytes, \d+% of backprop through time's$",
    "stream": r"^peak memory [\d,]+ bytes, however long the stream is$",
    "budget": r"^a memory budget of 100.0 KB .* [\d.]+ KB ",
    "adapt": r"^saved and loaded: [\d.]+%, 1,003,788 bytes in ",
    "optuna_search": r"^best of 8 trials: \d+% of held-out samples with$",
    "paper": r"^tpsgd-l2 +9\d\.\d% of the test digits$",
    "restarts": r"^frozen +\d\d\.\d ± +\d\.\d %",
}

ACCURATE = {  # examples that learn, and how well they must do it
    "quickstart": r"^tpsgd-l2 +9\d\.\d%",
    "own_model_and_data": r"^ +9\d\.\d% right",
    "rule_per_block": r"^test: 9\d\.",
    "sequences": r"^readout +(9\d|100)\.\d%",
    "stream": r"^upside down, after 200 images: (8[5-9]|9\d)\.",
    "budget": r"^budget 360KB: .* 9\d\.\d% right",
}


def test_every_example_is_tested():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(SAYS)


LONG = ("budget", "optuna_search", "own_model_and_data", "restarts", "sequences")


@pytest.mark.parametrize("name", with_full(SAYS, LONG))
def test_example(name, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # small steps: a second thread only waits
    try:
        with torch.random.fork_rng():
            runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    finally:
        torch.set_num_threads(threads)
    out = capsys.readouterr().out
    for expected in (SAYS[name], ACCURATE.get(name, "")):
        assert re.search(expected, out, re.MULTILINE)
