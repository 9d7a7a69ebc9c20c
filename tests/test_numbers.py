"""No figure in the README or the docs is typed: all come from results/*.json, and are in step."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "docs" / "fill_numbers.py"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
CODE = re.compile(r"^(```+).*?^\1|`[^`\n]+`", re.DOTALL | re.MULTILINE)
FIGURE = re.compile(r"(?<![\w.])(\d+(\.\d+)? ?%|\d\d\.\d{1,2}(?![\d.]))")


def script():
    spec = importlib.util.spec_from_file_location("fill_numbers", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


numbers = script()


def test_pages_are_up_to_date():
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", numbers.FILES)
def test_results_say_where_they_come_from(name):
    path = ROOT / "results" / f"{name}.json"
    assert path.is_file(), f"{path.name} is missing; make it with: {numbers.FILES[name]}"
    record = json.loads(path.read_text(encoding="utf-8"))
    assert {"cpu", "threads", "gpu"} <= set(record["machine"])
    assert {"python", "torch", "tpsgd"} <= set(record["versions"])
    assert record["command"].startswith(("tpsgd ", "python "))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_no_figure_is_typed_by_hand(page):
    prose = CODE.sub("", numbers.MARK.sub("", page.read_text(encoding="utf-8")))
    assert [match.group() for match in FIGURE.finditer(prose)] == []


SETS = "seq-mnist-rows", "seq-mnist-pixels", "eeg", "tweets", "tweets-vectors"
CLAIMS = [  # what the pages say in words about single layers, and would not notice if it changed
    *[("backprop", name, ">", "paper:backprop") for name in SETS],
    *[("readout", name, ">", "reservoir") for name in SETS if name != "seq-mnist-pixels"],
    ("reservoir", "seq-mnist-pixels", ">", "readout"),
    ("backprop", "seq-mnist-pixels", ">", "reservoir"),
    *[("readout", name, ">", "backprop") for name in ("tweets", "tweets-vectors")],
    *[("readout", name, ">", "backprop-leaky") for name in ("tweets", "tweets-vectors")],
    *[("readout", "seq-mnist-rows", "~", name) for name in ("backprop", "backprop-leaky")],
    *[("readout", "eeg", "~", name) for name in ("backprop", "backprop-leaky")],
    *[
        (numbers.SINGLE[1], name, ">", "readout")
        for name in ("seq-mnist-rows", "seq-mnist-pixels", "eeg-tumour")
    ],
    ("readout", "eeg", ">", numbers.SINGLE[1]),
    ("drtp", "seq-mnist-pixels", ">", "paper:drtp"),
    ("tpsgd-l1", "seq-mnist-pixels", "~", "paper:tpsgd-l1"),
    ("drtp", "eeg", ">", "paper:drtp"),
    ("tpsgd-l1", "eeg", ">", "paper:tpsgd-l1"),
    *[
        (f"paper:{rule}", name, ">", rule)
        for rule in ("drtp", "tpsgd-l1")
        for name in ("seq-mnist-rows", "tweets", "tweets-vectors")
    ],
]


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda c: " ".join(c))
def test_words_about_sequences_are_true(claim):
    """Where this fails after a new measurement: reword docs/recurrent.md, README, choosing.md."""
    arm, name, sign, other = claim
    results = numbers.Results(ROOT / "results")
    try:
        said = numbers.gap(results, name, "single", arm, other)
    except numbers.Missing:
        pytest.skip("not measured yet")
    if sign == ">":
        assert said.endswith("ahead of"), f"{arm} is {said} {other} on {name}"
    else:
        assert said == "level with" or float(said.split()[0]) <= 1.5, f"{arm}: {said} {other}"


@pytest.mark.parametrize("name", ["tweets", "tweets-vectors"])
def test_on_held_out_tweets_backprop_was_ahead(name):
    results = numbers.Results(ROOT / "results")
    arms = results["recurrent"]["tables"][f"{name}, single"]["arms"]
    best = {a: max(score for _, score in row["held_out"] or [({}, 0.0)]) for a, row in arms.items()}
    theirs = max(best["backprop"], best.get("backprop-leaky", 0.0))
    assert best["readout"] < theirs, "reword the README and docs/recurrent.md"


def test_cells_of_sequences_that_are_missing_are_named(tmp_path):
    arms = {"readout": {"accuracies": [0.9, 0.92], "seconds": 1.0}}
    found = {"eeg, stacked": {"paper": [50.0, 60.0, 70.0, 80.0, 90.0], "arms": arms}}
    settings = {"hidden": 512, "epochs": 20, "batch_size": 128}
    machine = {"cpu": "a CPU", "threads": 1, "gpu": None}
    record = {"tables": found, "settings": settings, "machine": machine, "command": "python -m it"}
    record["versions"] = {"python": "3", "torch": "2"}
    (tmp_path / "recurrent.json").write_text(json.dumps(record))
    results = numbers.Results(tmp_path)
    page = numbers.fill("<!-- numbers: recurrent/stacked -->\n<!-- end -->", results)
    assert "| `readout` | – | – | 91.00\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}1.41 | – | – |" in page
    assert "| *in the paper* | 92.59 | 82.04 | 90.00 | 69.94 | 72.84 |" in page
    assert "39 of 40 cells (–) are still to be run" in page and "--shapes stacked --sets" in page
    assert "readout's time" not in page
    value = numbers.fill("a <!-- numbers: sequence/eeg/stacked/drtp --><!-- end --> b", results)
    assert "(not measured yet)" in value


def test_what_is_not_measured_says_so(tmp_path):
    page = "a <!-- numbers: accuracy/mnist-mlp/frozen --><!-- end --> b\n"
    page += "<!-- numbers: speed -->\n<!-- end -->\n"
    filled = numbers.fill(page, numbers.Results(tmp_path))
    assert "--> b" in filled and "(not measured yet)" in filled
    assert "Not measured yet: `python benchmarks/speed.py --out results`" in filled
    assert numbers.fill(filled, numbers.Results(tmp_path)) == filled


def test_a_changed_result_changes_the_page(tmp_path):
    page = "it was <!-- numbers: accuracy/mnist-mlp/frozen -->old<!-- end --> at first"
    arms = {"frozen": {"accuracies": [0.9, 0.92]}}
    record = {"tables": {"mnist-mlp": {"arms": arms}}}
    (tmp_path / "shallow.json").write_text(json.dumps(record))
    filled = numbers.fill(page, numbers.Results(tmp_path))
    assert "-->91.00 ± 1.41 %<!--" in filled


@pytest.mark.parametrize(
    "mark", ["<!-- numbers: nonsense -->x<!-- end -->", "<!-- numbers: run -->"]
)
def test_a_wrong_mark_is_an_error(mark, tmp_path):
    with pytest.raises(SystemExit):
        numbers.fill(mark, numbers.Results(tmp_path))
