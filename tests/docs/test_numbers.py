"""No figure in the README or the docs is typed: all come from results/*.json, and are in step."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
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


SHAPES = "single", "stacked", "bidirectional"
SETS = "seq-mnist-rows", "seq-mnist-pixels", "eeg", "tweets", "tweets-vectors"
TWEETS = "tweets", "tweets-vectors", "tweets-holdout", "tweets-vectors-holdout"
RULES = "drtp", "tpsgd-l1"
IN_TIME = "backprop-leaky in readout's time"
BACKPROP = "backprop", "backprop-leaky"
CLAIMS = [  # what the pages say in words about single layers, and would not notice if it changed
    *[("backprop", name, ">", "paper:backprop") for name in SETS],
    *[("readout", name, ">", "reservoir") for name in SETS if name != "seq-mnist-pixels"],
    ("reservoir", "seq-mnist-pixels", ">", "readout"),
    ("reservoir-perceptron", "seq-mnist-pixels", ">", "readout-perceptron"),
    ("readout-perceptron", "seq-mnist-pixels", ">", "reservoir"),
    ("backprop", "seq-mnist-pixels", ">", "reservoir-perceptron"),
    ("reservoir-perceptron", "eeg", ">", "reservoir"),
    ("readout", "eeg", ">", "reservoir-perceptron"),
    *[("readout", name, ">", other) for name in TWEETS for other in BACKPROP],
    *[("readout", "seq-mnist-rows", "~", name) for name in BACKPROP],
    *[("readout", "eeg", "~", name) for name in BACKPROP],
    *[("readout", name, ">", IN_TIME) for name in TWEETS],
    *[(IN_TIME, name, ">", "readout") for name in ("seq-mnist-rows", "seq-mnist-pixels")],
    *[(IN_TIME, name, ">", "readout") for name in ("eeg-tumour", "eeg-tumour-rows")],
    *[(IN_TIME, name, ">", "backprop-leaky") for name in TWEETS],
    ("drtp", "seq-mnist-rows", "~", "paper:drtp"),
    ("tpsgd-l1", "seq-mnist-rows", ">", "paper:tpsgd-l1"),
    ("drtp", "seq-mnist-pixels", ">", "paper:drtp"),
    ("tpsgd-l1", "seq-mnist-pixels", "~", "paper:tpsgd-l1"),
    *[(rule, name, ">", f"paper:{rule}") for rule in RULES for name in ("eeg", "tweets")],
    *[(f"paper:{rule}", "tweets-vectors", ">", rule) for rule in RULES],
]


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda c: " ".join(c))
def test_words_about_sequences_are_true(claim):
    """Where this fails after a new measurement: reword docs/recurrent.md, README, choosing.md."""
    arm, name, sign, other = claim
    check_claim(arm, name, "single", sign, other)


def check_claim(arm, name, shape, sign, other):
    results = numbers.Results(ROOT / "results")
    try:
        said = numbers.recurrent.gap(results, name, shape, arm, other)
    except numbers.Missing:
        pytest.skip("not measured yet")
    if sign == ">":
        assert said.endswith("ahead of"), f"{arm} is {said} {other} on {name}, {shape}"
    else:
        assert said == "level with" or float(said.split()[0]) <= 1.5, f"{arm}: {said} {other}"


DEEPER = [  # the same about two layers and both directions
    ("readout", "seq-mnist-rows", "bidirectional", "~", "backprop"),
    *[("readout", name, shape, ">", "backprop") for name in SETS[3:] for shape in SHAPES[1:]],
    *[("reservoir", "seq-mnist-pixels", shape, ">", "readout") for shape in SHAPES[1:]],
    *[("backprop", "seq-mnist-pixels", shape, ">", "reservoir") for shape in SHAPES[1:]],
    *[
        (rule, name, "bidirectional", ">", f"paper:{rule}")
        for rule in RULES
        for name in SETS
        if name != "tweets-vectors"
    ],
    *[(f"paper:{rule}", "tweets-vectors", shape, ">", rule) for rule in RULES for shape in SHAPES],
    *[
        (rule, name, "stacked", ">", f"paper:{rule}")
        for rule in RULES
        for name in ("eeg", "tweets")
    ],
    *[(f"paper:{rule}", "seq-mnist-rows", "stacked", ">", rule) for rule in RULES],
    ("drtp", "seq-mnist-pixels", "stacked", ">", "paper:drtp"),
    ("paper:tpsgd-l1", "seq-mnist-pixels", "stacked", ">", "tpsgd-l1"),
    ("paper:backprop", "tweets", "bidirectional", ">", "backprop"),
]


@pytest.mark.parametrize("claim", DEEPER, ids=lambda c: " ".join(c))
def test_words_about_deeper_nets_are_true(claim):
    """Where this fails after a new measurement: reword docs/recurrent.md."""
    arm, name, shape, sign, other = claim
    check_claim(arm, name, shape, sign, other)


@pytest.mark.parametrize("rule", RULES)
def test_one_rate_for_all_weights_was_better_on_stacked_rows(rule):
    found = numbers.Results(ROOT / "results")["recurrent"]["tables"]["seq-mnist-rows, stacked"]
    now, before = found["arms"][rule], found["superseded"][rule]
    assert before["accuracy"] > now["accuracy"], "reword docs/recurrent.md"


@pytest.mark.parametrize("name", ["tweets", "tweets-vectors"])
def test_in_the_searches_on_tweets_backprop_was_ahead(name):
    results = numbers.Results(ROOT / "results")
    arms = results["recurrent"]["tables"][f"{name}, single"]["arms"]
    best = {a: max(score for _, score in row["held_out"] or [({}, 0.0)]) for a, row in arms.items()}
    theirs = max(best["backprop"], best.get("backprop-leaky", 0.0))
    assert best["readout"] < theirs, "reword docs/recurrent.md"


PEERS = [  # what docs/peers.md says in words: (net, arm) is more accurate than (net, arm)
    *[("mlp-256/tpsgd-l2", other) for other in ("mlp-256/lm-karnet", "mlp-256-steep/zorb")],
    *[("mlp-256/tpsgd-l2, one epoch", f"mlp-256/{peer}") for peer in ("lm-karnet", "zorb")],
    *[("mlp-256-steep/tpsgd-l2, quick", f"mlp-256-steep/{peer}") for peer in ("lm-karnet", "zorb")],
    *[("mlp-1000/elm", f"mlp-1000/{peer}") for peer in ("lm-karnet", "zorb")],
    ("mlp-256/tpsgd-l2, ridge head", "mlp-256/tpsgd-l2"),
    ("mlp-256-steep/zorb", "mlp-256/zorb"),
]


@pytest.mark.parametrize("claim", PEERS, ids=" > ".join)
def test_words_about_peers_are_true(claim):
    """Where this fails after a new measurement: reword docs/peers.md."""
    nets = numbers.Results(ROOT / "results")["peers"]["nets"]
    more, less = (nets[net]["arms"][arm]["accuracy"] for net, arm in (c.split("/") for c in claim))
    assert more > less


@pytest.mark.parametrize("net", ["mlp", "cnn"])
def test_words_about_the_demo_are_true(net):
    arms = numbers.Results(ROOT / "results")[f"demo-{net}"]["arms"]
    found = {arm["name"]: arm["summary"] for arm in arms}
    assert found["elm"]["accuracy"] >= found["backprop"]["accuracy"] - 0.002, "reword the README"
    assert found["elm"]["seconds"] < 0.2 * found["backprop"]["seconds"]


def test_words_about_the_peers_cost_are_true():
    record = numbers.Results(ROOT / "results")["peers"]
    here, there = record["nets"]["mlp-256"]["arms"], record["cpu"]["nets"]["mlp-256"]["arms"]
    for peer in ("lm-karnet", "zorb"):
        assert here[peer]["seconds"] < here["tpsgd-l2"]["seconds"]
        assert here["tpsgd-l2, one epoch"]["seconds"] < 1.3 * here[peer]["seconds"]
        assert there["tpsgd-l2, one epoch"]["seconds"] < there[peer]["seconds"]
        assert there["tpsgd-l2"]["peak_bytes"] < there[peer]["peak_bytes"]
    assert here["readout"]["accuracy"] - here["readout, ridge head"]["accuracy"] < 0.01
    assert there["dladmm"]["accuracy"] >= 0.9


ROWS = (100, 1), (1000, 1), (100, 2), (1000, 2)  # (steps, layers)


@pytest.mark.parametrize("row", ROWS, ids=lambda r: f"{r[0]} steps, {r[1]} layers")
def test_words_about_windows_are_true(row):
    """Where this fails after a new measurement: reword docs/recurrent.md and README."""
    if not (ROOT / "results" / "sequences.json").is_file():
        pytest.skip("not measured yet")
    rows = numbers.Results(ROOT / "results")["sequences"]["rows"]
    arms = next(r["arms"] for r in rows if (r["steps"], r["layers"]) == row)
    one, some = (arms[f"readout, window {n}"] for n in (1, 16))
    assert one["seconds"] > some["seconds"], "a window of one step costs time"
    if row[0] == 100:
        assert one["time_ratio"] > 1, "backprop through time is quicker on short sequences"
    assert one["memory_ratio"] < some["memory_ratio"] < 0.5


def test_memory_and_time_by_length(tmp_path):
    page = "<!-- numbers: sequences/1 -->\n<!-- end -->\n"
    page += "it takes <!-- numbers: through-time/10/1/readout, window 1 --><!-- end -->."
    bare = numbers.fill(page, numbers.Results(tmp_path))
    assert "Not measured yet: `python benchmarks/sequences.py --out results`" in bare
    assert "(not measured yet)" in bare
    arm = {"peak_bytes": 2048, "seconds": 0.5, "memory_ratio": 0.25, "time_ratio": 1.5}
    record = {
        "rows": [{"steps": 10, "layers": 1, "arms": {"readout, window 1": arm}}],
        "settings": {"features": 16, "hidden": 256, "batch_size": 64, "turns": 2},
        "machine": {"cpu": "a CPU", "threads": 2, "gpu": None},
        "versions": {"python": "3", "torch": "2"},
        "command": "python benchmarks/sequences.py",
    }
    (tmp_path / "sequences.json").write_text(json.dumps(record))
    filled = numbers.fill(bare, numbers.Results(tmp_path))
    assert "|  | 10 steps: memory | 10 steps: seconds |" in filled
    assert "| `readout, window 1` | 2.0\N{NO-BREAK SPACE}KB (×0.25) | 0.50 (×1.50) |" in filled
    assert "1 layer of 256 units" in filled and "a CPU, 2 threads" in filled
    assert "-->1.50 of its seconds and 0.25 of its memory<!--" in filled


def test_arms_that_are_not_measured_are_left_out_of_a_comparison(tmp_path):
    arms = {"readout": {"accuracies": [0.9]}, "backprop": {"accuracies": [0.92]}}
    record = {"tables": {"eeg, single": {"arms": arms}}}
    (tmp_path / "recurrent.json").write_text(json.dumps(record))
    mark = "<!-- numbers: against/eeg/single/readout/backprop/backprop-leaky --><!-- end -->"
    filled = numbers.fill(mark, numbers.Results(tmp_path))
    assert "-->2.0 points behind `backprop`<!--" in filled


def test_seconds_of_arms_that_shared_the_gpu_are_not_shown(tmp_path):
    arm = {"accuracies": [0.9, 0.9], "seconds": 10.0, "stacked": True}
    arms = {"readout": arm | {"seconds": 4.0, "alone": True}, "backprop": arm}
    arms |= {"drtp": arm | {"alone": False}, "readout-perceptron": arm | {"stacked": False}}
    record = {"tables": {"eeg, single": {"arms": arms}}, "command": "python -m it"}
    record["machine"] = {"cpu": "a CPU", "threads": 1, "gpu": None}
    record["versions"] = {"python": "3", "torch": "2"}
    (tmp_path / "recurrent.json").write_text(json.dumps(record))
    page = "<!-- numbers: recurrent-seconds -->\n<!-- end -->\n"
    page += "<!-- numbers: time-ratio/eeg/readout/backprop --><!-- end --> and "
    page += "<!-- numbers: sequence-seconds/eeg/drtp --><!-- end -->"
    filled = numbers.fill(page, numbers.Results(tmp_path))
    assert "| `readout` | – | – | 4.0 (2) | – | – |" in filled
    assert "`drtp`" not in filled and "perceptron" not in filled
    assert "-->0.40<!--" in filled and "-->(not measured yet)<!--" in filled


def test_how_a_file_was_put_together_is_said():
    results = numbers.Results(ROOT / "results")
    assert results["recurrent"]["history"] in numbers.recurrent.recurrent(results, "single")


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


# ---- memory --------------------------------------------------------------------------------------


def test_plans_are_as_good_as_the_pages_say():
    for where in ("cpu", "gpu"):
        for row in numbers.Results(ROOT / "results")[f"memory-{where}"]["plan"]:
            assert 0.95 <= row["planned"] / row["measured"] <= 1.1, (where, row)


def test_a_deep_net_takes_the_share_of_backprop_that_the_pages_say():
    record = numbers.Results(ROOT / "results")["vgg-memory"]
    peaks = {row["arm"]: row["peak_bytes"] for row in record["vgg11"]}
    assert peaks["readout"] <= 0.35 * peaks["backprop"]
    assert peaks["readout"] <= 0.8 * peaks["backprop, checkpointed"]
    assert peaks["predsim"] > peaks["backprop"]  # as docs/memory.md says
    adaptor = {(r["batch_size"], r["arm"]): r["peak_bytes"] for r in record["adaptor"]}
    assert adaptor[64, "readout"] <= 0.7 * adaptor[64, "backprop"]


@pytest.mark.parametrize("where", ["cpu", "gpu"])
def test_memory_is_flat_in_depth_and_samples(where):
    record = numbers.Results(ROOT / "results")[f"memory-{where}"]
    for row in record["depth"]:
        if row["arm"] in ("readout", "tpsgd-l2"):
            assert abs(row["growth"]) < 0.05, row
    rows = [r for r in record["scaling"] if r["axis"] == "samples" and r["arm"] == "readout"]
    many = sorted(rows, key=lambda row: row["value"])[-2:]
    assert abs(many[1]["peak_bytes"] - many[0]["peak_bytes"]) < 0.05 * many[0]["peak_bytes"]


def test_mnist_is_learned_within_its_budgets():
    rows = numbers.Results(ROOT / "results")["memory-cpu"]["small"]
    assert rows[0]["budget"] == 4 << 20 and rows[0]["arms"]["readout"]["accuracy"] >= 0.965
    for row in rows:
        mine = row["arms"]["readout"]
        held = mine["peak_bytes"] + mine["kept_bytes"]
        assert row["budget"] is None or held <= row["budget"]


def stored(name: str) -> dict:
    return json.loads((ROOT / "results" / f"{name}.json").read_text(encoding="utf-8"))


def test_what_the_page_on_adaptors_says_in_words():
    record = stored("adaptors")
    at = {(r["tap"], r["arm"]): r["accuracy"] for r in record["table"]}
    assert 0 < at["pool5", "backprop"] - at["pool5", "readout"] < 0.005
    assert 0.009 < at["pool5", "backprop"] - at["pool5", "tpsgd-l2"] < 0.012
    for tap in ("pool4", "pool3"):
        assert at[tap, "readout"] > max(at[tap, "backprop"], at[tap, "linear probe"])
        assert at[tap, "tpsgd-l2"] < at[tap, "linear probe"]
    few = {(r["tap"], r["shots"], r["arm"]): r["accuracy"] for r in record["few"]}
    assert all(few[tap, n, "linear probe"] > few[tap, n, "readout"] for tap, n, _ in few)
    single = {r["arm"]: r["accuracy"] for r in record["combinations"] if r["taps"] == "L0"}
    assert all(r["accuracy"] < single[r["arm"]] + 0.003 for r in record["combinations"])
    precise = {(r["backbone"], r["arm"]): r for r in record["precision"]}
    for arm in ("backprop", "readout", "tpsgd-l2", "linear probe"):
        assert precise["float32", arm]["accuracy"] - precise["int8", arm]["accuracy"] < 0.01
    assert precise["int8", arm]["weight_bytes"] <= 0.3 * precise["float32", arm]["weight_bytes"]


def test_what_the_page_says_about_shifts():
    rows = [r for r in stored("adaptors")["shifts"] if r.get("replay") == 0]
    said = [r for r in stored("adaptors")["shifts"] if r.get("detector") == "mahalanobis"]
    due = {r["shift"]: r["due"] for r in said}

    def gain(word: str, arm: str) -> float:
        mine = [r for r in rows if r["domain"] == word and r["arm"] == arm]
        return sum(r["new_after"] - r["new_before"] for r in mine) / len(mine)

    for word in ("grey", "dim"):
        assert not due[word] and max(gain(word, a) for a in ("backprop", "readout", "tpsgd-l2")) < 0
    for word in ("edges", "blur", "noise", "invert"):
        assert due[word] and min(gain(word, a) for a in ("backprop", "readout")) > 0
        lost = {r["arm"]: r["forgotten"] for r in rows if r["domain"] == word and r["seed"] == 0}
        assert lost["linear probe"] > 2 * lost["readout"]


def test_what_the_page_on_deep_nets_says_in_words():
    nets = stored("deep")["nets"]
    arms = {name: row["accuracy"] for name, row in nets["vgg11"]["arms"].items()}
    local = {k: v for k, v in arms.items() if k != "backprop"}
    assert max(local, key=lambda k: local[k]) == "predsim, no convolution"
    assert arms["backprop"] > local["predsim, no convolution"]
    assert arms["tpsgd-l2"] > 0.64 > 0.12 > arms["tpsgd-l2, as printed"]
    assert arms["readout"] < arms["frozen"] + 0.06
    peaks = {name: row["peak_bytes"] for name, row in nets["vgg11"]["arms"].items()}
    assert 0.55 < peaks["predsim, no convolution"] / peaks["backprop"] < 0.65
