"""No number in the README or the docs is typed: all come from results/*.json, and are in step."""

import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tpsgd import rules

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
look_up, mean = numbers.look_up, numbers.mean


def test_pages_are_up_to_date():
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", sorted((ROOT / "results").glob("*.json")), ids=lambda p: p.stem)
def test_results_say_where_they_come_from(path):
    record = json.loads(path.read_text(encoding="utf-8"))
    if path.stem == "paper":
        assert "arXiv:2208.08503" in record["source"]
        return
    assert {"cpu", "threads", "gpu"} <= set(record["machine"])
    assert {"python", "torch", "tpsgd"} <= set(record["versions"])
    assert record["command"].startswith(("tpsgd ", "python "))


def test_one_page_says_which_readout_each_result_has():
    page = (ROOT / "docs" / "reproduce.md").read_text(encoding="utf-8")
    section = page.split("## Which `readout`")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")][1:]
    named = {name for row in rows for name in re.findall(r"`([\w-]+)`", row.split("|")[1])}
    assert named == {path.stem for path in (ROOT / "results").glob("*.json")} - {"paper"}
    for path in (ROOT / "results").glob("*.json"):
        if "scale default" in path.read_text(encoding="utf-8"):  # before it was calibrated
            assert f"`{path.stem}`" in next(row for row in rows if "not calibrated" in row), path


def test_pages_name_commands_that_exist_today():
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert "tpsgd.experiments" not in text
        for script in re.findall(r"python (benchmarks/\w+\.py|docs/\w+\.py)", text):
            assert (ROOT / script).is_file(), (page, script)
        for name in re.findall(r"python -m experiments\.(\w+)", text):
            assert (ROOT / "experiments" / f"{name}.py").is_file(), (page, name)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_no_figure_is_typed_by_hand(page):
    prose = CODE.sub("", numbers.MARK.sub("", page.read_text(encoding="utf-8")))
    assert [match.group() for match in FIGURE.finditer(prose)] == []


def test_no_figure_is_typed_into_the_tables():
    tables = tomllib.loads((ROOT / "docs" / "tables.toml").read_text(encoding="utf-8"))
    typed = re.sub(r"\{.+?\}", "", json.dumps(list(tables.values()), ensure_ascii=False))
    assert [match.group() for match in FIGURE.finditer(typed)] == []


# ---- what the pages say in words -----------------------------------------------------------------


SHAPES = "single", "stacked", "bidirectional"
SETS = "seq-mnist-rows", "seq-mnist-pixels", "eeg", "tweets", "tweets-vectors"
TWEETS = "tweets", "tweets-vectors", "tweets-holdout", "tweets-vectors-holdout"
RULES = "drtp", "tpsgd-l1"
IN_TIME = "backprop-leaky in readout's time"
BACKPROP = "backprop", "backprop-leaky"
SHORT = "superseded/readout, short search"
CLAIMS = [  # what the pages say in words about single layers, and would not notice if it changed
    *[("backprop", name, ">", "paper:backprop") for name in SETS],
    *[("readout", name, ">", "reservoir") for name in SETS if name != "seq-mnist-pixels"],
    ("reservoir-perceptron", "seq-mnist-pixels", ">", "readout-perceptron"),
    *[("readout-perceptron", "seq-mnist-pixels", ">", arm) for arm in ("reservoir", "readout")],
    ("backprop", "seq-mnist-pixels", ">", "reservoir-perceptron"),
    ("reservoir-perceptron", "eeg", ">", "reservoir"),
    ("readout", "eeg", ">", "reservoir-perceptron"),
    *[("readout", name, ">", other) for name in TWEETS[1:] for other in BACKPROP],
    ("readout", "tweets", ">", "backprop-leaky"),
    ("readout", "tweets", "~0.3", "backprop"),
    ("backprop", "tweets", ">", SHORT),
    *[(SHORT, name, ">", "backprop-leaky") for name in TWEETS[:2]],
    (SHORT, "tweets-vectors", ">", "backprop"),
    *[("readout", "seq-mnist-rows", "~", name) for name in BACKPROP],
    *[("readout", "eeg", "~0.5", name) for name in BACKPROP],
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
    try:
        ours, theirs = (accuracy(name, shape, a) for a in (arm, other))
    except LookupError:
        pytest.skip("not measured")
    points = round(100 * (ours - theirs), 1)
    if sign == ">":
        assert points > 0, f"{arm} is not ahead of {other} on {name}, {shape}"
    else:
        assert abs(points) <= float(sign[1:] or 1.5), (
            f"{arm} and {other} are {points} points apart on {name}, {shape}"
        )


def accuracy(name, shape, arm):
    """Of an arm of the recurrent nets; `paper:drtp` is the paper's."""
    if arm.startswith("paper:"):
        return float(look_up(f"paper/recurrent/{name}, {shape}/{arm.removeprefix('paper:')}")) / 100
    return mean(look_up(f"recurrent/{name}, {shape}/{arm}"))


DEEPER = [  # the same about two layers and both directions
    *[("readout", n, s, "~1", "backprop") for n in ("seq-mnist-rows", "eeg") for s in SHAPES[1:]],
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
    rows = look_up("recurrent/seq-mnist-rows, stacked")
    before, now = rows["superseded"][rule], rows["arms"][rule]
    assert before["accuracy"] > now["accuracy"], "reword docs/recurrent.md"


def test_recurrent_nets_have_three_to_twenty_five_restarts():
    tables = look_up("recurrent/tables").values()
    assert {len(r["accuracies"]) for t in tables for r in t["arms"].values()} == {3, 5, 10, 25}


def test_every_arm_of_the_papers_nets_has_its_restarts():
    for name, table in look_up("shallow/tables").items():
        restarts = {len(row["accuracies"]) for row in table["arms"].values()}
        assert restarts == {table["settings"]["restarts"]}, f"{name}: reword tables.toml"


def test_readout_and_reservoir_are_the_same_on_pixels_within_their_spread():
    rows = [
        look_up(f"recurrent/seq-mnist-pixels, single/{arm}") for arm in ("readout", "reservoir")
    ]
    apart = abs(rows[0]["accuracy"] - rows[1]["accuracy"])
    assert apart < min(row["deviation"] for row in rows), "reword docs/recurrent.md, choosing.md"


def test_what_the_page_says_about_a_constant_instead_of_calibration():
    """Where this fails after a new measurement: reword docs/recurrent.md and deep.md."""

    def rows(name):
        calibrated = "readout" if name == "eeg" else SHORT
        pair = [look_up(f"recurrent/{name}, single/{a}") for a in ("readout-by-hand", calibrated)]
        assert pair[0]["search"] == pair[1]["search"] or name == "eeg"
        return pair

    gaps = {name: mean(rows(name)[0]) - mean(rows(name)[1]) for name in SETS}
    assert 0.003 < gaps["seq-mnist-rows"] < 0.007
    assert all(-0.007 < gaps[name] < -0.003 for name in ("eeg", "tweets-vectors"))
    for name in ("seq-mnist-pixels", "tweets"):
        assert abs(gaps[name]) < min(row["deviation"] for row in rows(name))


def test_what_the_page_says_about_searches():
    """Where this fails after a new measurement: reword docs/recurrent.md and the history."""
    single = {name: look_up(f"recurrent/{name}, single/arms") for name in SETS}
    assert all(arms["readout"]["search"] == [100_000, 20] for arms in single.values())
    for name in ("tweets", "tweets-vectors"):
        assert {tuple(single[name][arm]["search"]) for arm in BACKPROP} == {(16_000, 8)}
    chosen = [arms["readout"]["choice"] for arms in single.values()]
    assert len({(c["leak"], c["x"], c["lr"]) for c in chosen}) == len(SETS)
    assert sorted(c["x"] for c in chosen) == [1, 1, 3, 3, 3]
    assert sorted(c["leak"] for c in chosen) == [0.1, 0.1, 0.3, 1, 1]
    vectors = look_up(f"recurrent/tweets-vectors, single/{SHORT}/choice")
    assert vectors == single["tweets-vectors"]["readout"]["choice"]
    unlucky = look_up("recurrent/seq-mnist-pixels, single/superseded/backprop-leaky, short search")
    assert sum(share < 0.9 for share in unlucky["accuracies"]) == 8  # of 25: "a third"
    deeper = look_up("recurrent/tweets, stacked/backprop/choice")
    assert deeper == look_up("recurrent/tweets, single/backprop/timed/choice")


def test_seconds_of_an_earlier_run_are_those_of_a_machine_without_other_work():
    for name, table in look_up("recurrent/tables").items():
        for arm, row in table["arms"].items():
            if "timed" in row:
                assert not row["alone"], f"{name}, {arm} has seconds of its own"
                assert len(row["timed"]["accuracies"]) == row["timed"]["restarts"]


@pytest.mark.parametrize("name", ["tweets", "tweets-vectors"])
def test_in_the_searches_on_tweets_backprop_was_ahead(name):
    rows = [look_up(f"recurrent/{name}, single/{arm}") for arm in (SHORT, *BACKPROP)]
    assert {tuple(row["search"]) for row in rows} == {(16_000, 8)}
    ours, *theirs = (max(score for _, score in row["held_out"]) for row in rows)
    assert ours < max(theirs), "reword docs/recurrent.md"


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
    more, less = (look_up(f"peers/{path}/accuracy") for path in claim)
    assert more > less


def test_depth_costs_backprop_memory_and_not_the_local_rules():
    backprop, *ours = (
        look_up(f"demo-deep/{arm}/summary/total_bytes")
        for arm in ("backprop", "readout-learned", "tpsgd-l2")
    )
    assert max(ours) < 0.5 * backprop


@pytest.mark.parametrize("net", ["mlp", "cnn", "deep"])
def test_words_about_the_demo_are_true(net):
    elm, backprop = (look_up(f"demo-{net}/{arm}/summary") for arm in ("elm", "backprop"))
    assert elm["accuracy"] >= backprop["accuracy"] - 0.002, "reword the README"
    assert elm["seconds"] < 0.5 * backprop["seconds"]  # "a fraction of the time"


def test_words_about_memory_and_time_in_the_demo_are_true():
    """Where this fails after a new measurement: reword the limits in the README."""
    ours, micro = (look_up(f"demo-cnn/{a}/summary") for a in ("readout-learned", "backprop-micro"))
    assert micro["total_bytes"] < ours["total_bytes"]  # "as in the CNN above"
    ours, backprop = (look_up(f"demo-deep/{a}/summary") for a in ("readout-learned", "backprop"))
    assert ours["seconds"] > 1.2 * backprop["seconds"]  # "takes longer"


@pytest.mark.parametrize("depth", [2, 4, 8, 16])
def test_words_about_memory_at_equal_micro_batches_are_true(depth):
    """Where this fails after a new measurement: reword docs/memory.md and the README."""
    at = look_up(f"speed/memory/depth={depth}")
    for cut in ("", ", micro-batch 8"):
        assert at[f"readout{cut}"] < at[f"backprop{cut}"]
    assert at["backprop, micro-batch 8"] < at["readout"]


def test_the_readme_is_short():
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 130


def test_words_about_one_pass_are_true():
    """Where this fails after a new measurement: reword docs/one_pass.md."""
    heads, joint = (look_up(f"one_pass/digits/{each}") for each in ("heads", "controls/joint"))
    for name in ("ridge 1000", "rls 1000"):
        assert mean(heads[name]["in turn"]) > mean(joint) - 0.005
        assert mean(heads[name]["first class"]) > mean(joint["first class"]) - 0.005
        assert heads[name]["largest difference"] < 1e-6
    for width in (64, 128, 256, 1000):
        lda, ridge = (mean(heads[f"{solver} {width}"]["in turn"]) for solver in ("lda", "ridge"))
        assert (lda > ridge) == (width < 1000) and (ridge > 0.96 or width == 64)
    heads, probes = (look_up(f"one_pass/photos/{each}") for each in ("heads", "controls"))
    for probe in (f"joint linear probe, {word}" for word in ("trained", "ridge")):
        for name in ("ridge 0", "ridge, direct 500"):
            assert mean(heads[name]["in turn"]) > mean(probes[probe]) - 0.002
            assert mean(heads[name]["first class"]) > mean(probes[probe]["first class"]) - 0.005
        assert mean(heads["ridge 500"]["in turn"]) < mean(probes[probe]) - 0.005
    rows = look_up("one_pass/forgetting")
    for width in (64, 128):
        alone, new = ({arm: mean(rows[f"{arm} {width}"][word]) for arm in (
            "rls, forgetting", "rls, forgetting, bound", "ridge, forgetting in each class"
        )} for word in ("one class alone", "changed"))  # fmt: skip
        free, bound, each = alone.values()
        assert free + 0.1 < bound < each > mean(rows[f"ridge {width}"]["mixed"]) - 0.005
        free, bound, each = new.values()
        assert free > bound > each > free - 0.05


def test_words_about_the_peers_cost_are_true():
    here, there = (look_up(f"{where}/mlp-256/arms") for where in ("peers", "peers/cpu"))
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
    arms = look_up("sequences/rows/steps={}/layers={}/arms".format(*row))
    one, some = (arms[f"readout, window {n}"] for n in (1, 16))
    assert one["seconds"] > some["seconds"], "a window of one step costs time"
    if row[0] == 100:
        assert one["time_ratio"] > 1, "backprop through time is quicker on short sequences"
    assert one["memory_ratio"] < some["memory_ratio"] < 0.5


# ---- how numbers are looked up and written -------------------------------------------------------


@pytest.fixture
def results(tmp_path, monkeypatch):
    """A folder of results of one's own: a function that writes a file there."""
    monkeypatch.setattr(numbers, "RESULTS", tmp_path)
    origin = {
        "machine": {"cpu": "a CPU", "threads": 2, "gpu": None},
        "versions": {"python": "3", "torch": "2"},
        "command": "python -m tpsgd.experiments.it --memory-budget 4MB",
    }
    return lambda name, **record: (tmp_path / f"{name}.json").write_text(
        json.dumps(origin | record)
    )


def value(expression):
    page = numbers.fill(f"a <!-- numbers: {expression} --><!-- end -->.")
    return re.search("-->(.*)<!--", page)[1]


def test_a_changed_result_changes_the_page(results):
    results("it", tables={"mlp": {"arms": {"frozen": {"accuracies": [0.9, 0.92]}}}})
    page = "it was <!-- numbers: percent it/mlp/frozen -->old<!-- end --> % at first"
    assert "-->91.00 ± 1.41<!-- end --> % at first" in numbers.fill(page)


def test_a_path_goes_through_keys_columns_and_rows(results):
    rows = [{"tap": "a", "n": n, "accuracy": n / 10} for n in (1, 2)]
    results("it", rows=[*rows, {"tap": "b", "n": 2, "accuracy": 0.5}])
    assert look_up("it/rows/a/accuracy") == [0.1, 0.2]
    assert look_up("it/rows/a/n=2/accuracy") == 0.2
    assert look_up("it/rows/b")["accuracy"] == 0.5


def test_a_path_goes_to_a_place_in_a_list_of_numbers(results):
    results("it", arms={"readout": {"curve": [0.1, 0.2, 0.3]}})
    assert look_up("it/readout/curve/1") == 0.2


def test_named_rows_come_first_and_all_others_after_them(results):
    results("it", arms={"new": {}, "readout": {}, "backprop": {}})
    ordered = numbers.names("it/arms", ["backprop", "missing", "readout"])
    assert list(ordered.values()) == ["backprop", "readout", "new"]


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("percent it/share", "12.50"),
        ("size it/bytes and it/more", "1.0 KB (×0.50)"),
        ("total it/bytes and it/more", "3.0 KB"),
        ("ratio it/bytes and it/more", "0.50"),
        ("gap it/better and it/share", "5.0 points ahead of"),
        ("signed it/share and it/better", "−5.0"),
        ("seconds it/seconds", "12.3"),
        ("time it/share", "125 ms"),
        (".3f it/share", "0.125"),
        (", it/more", "2,048"),
        ("command it/command", "`python -m experiments.it --memory 4MB`"),
    ],
)
def test_a_value_is_written_in_its_format(results, expression, text):
    results("it", share=0.125, better=0.175, bytes=1024, more=2048, seconds=12.34)
    assert value(expression) == text


def test_a_table_repeats_what_its_file_notes_about_rows(results):
    old = {"note": "from an earlier run"}
    results("it", arms={"a": old, "b": {"accuracy": 0.5}, "c": old}, others={"d": {}})
    assert value("notes it/arms") == " From an earlier run: `a`; `c`."
    assert value("notes it/others") == ""


def test_seconds_of_a_machine_with_other_work_are_not_shown(results):
    arms = {"alone": {"seconds": 1.0}, "shared": {"seconds": 2.0, "alone": False}}
    results("it", arms=arms | {"also": {"seconds": 2.0, "busy": True}})
    assert value("seconds it/alone/seconds") == "1.00"
    for arm in ("shared", "also"):
        with pytest.raises(SystemExit):
            value(f"seconds it/{arm}/seconds")


def test_a_figure_takes_the_seconds_of_an_earlier_run_that_had_the_machine_to_itself(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    figures_of = importlib.import_module("tradeoffs").figures_of
    row = {"accuracy": 0.5, "accuracies": [0.5], "seconds": 9.0, "alone": False}
    assert figures_of(row)["seconds"] == 0
    assert figures_of(row | {"timed": {"seconds": 2.0}})["seconds"] == 2
    assert figures_of(row | {"alone": True})["seconds"] == 9


def test_a_table_has_a_dash_for_what_is_missing_and_says_where_it_comes_from():
    text = numbers.table("recurrent/single")
    assert text.splitlines()[0].startswith("| test accuracy % | MNIST rows |")
    assert "\n| `readout-perceptron` | – | " in text
    space = "\N{NO-BREAK SPACE}"
    row = look_up("recurrent/tables/seq-mnist-rows, single/arms/drtp")
    shown = f"{100 * row['accuracy']:.2f}{space}±{space}{100 * row['deviation']:.2f}"
    assert f"| `drtp` | {shown} (83.39) |" in text
    assert text.endswith("Made by `python -m experiments.recurrent --out results`.")


def test_rows_and_columns_without_a_value_are_left_out():
    assert "perceptron" not in numbers.table("recurrent/stacked")
    assert "CPU |" in numbers.table("peers/mlp-256")
    assert "CPU |" not in numbers.table("peers/mlp-1000")


def test_the_table_of_the_readme_is_narrow_enough():
    lines = numbers.table("readme").splitlines()[:8]
    assert len(lines) == 8 and max(map(len, lines)) <= 110


@pytest.mark.parametrize(
    "page",
    [
        "<!-- numbers: percent shallow/nonsense -->x<!-- end -->",
        "<!-- numbers: percent nonsense/x -->x<!-- end -->",
        "<!-- numbers: nonsense -->\n<!-- end -->",
        "<!-- numbers: run -->",
    ],
)
def test_a_wrong_mark_is_an_error(page):
    with pytest.raises(SystemExit):
        numbers.fill(page)


# ---- memory --------------------------------------------------------------------------------------


def test_plans_are_as_good_as_the_pages_say():
    for where in ("cpu", "gpu"):
        for row in look_up(f"memory-{where}/plan"):
            assert 0.95 <= row["planned"] / row["measured"] <= 1.1, (where, row)


def test_a_deep_net_takes_the_share_of_backprop_that_the_pages_say():
    record = look_up("vgg-memory")
    peaks = {row["arm"]: row["peak_bytes"] for row in record["vgg11"]}
    assert peaks["readout"] <= 0.35 * peaks["backprop"]
    assert peaks["readout"] <= 0.8 * peaks["backprop, checkpointed"]
    assert peaks["predsim"] > peaks["backprop"]  # as docs/memory.md says
    adaptor = {(r["batch_size"], r["arm"]): r["peak_bytes"] for r in record["adaptor"]}
    assert adaptor[64, "readout"] <= 0.7 * adaptor[64, "backprop"]


@pytest.mark.parametrize("where", ["cpu", "gpu"])
def test_memory_is_flat_in_depth_and_samples(where):
    record = look_up(f"memory-{where}")
    for row in record["depth"]:
        if row["arm"] in ("readout", "tpsgd-l2"):
            assert abs(row["growth"]) < 0.05, row
    rows = [r for r in record["scaling"] if r["axis"] == "samples" and r["arm"] == "readout"]
    many = sorted(rows, key=lambda row: row["value"])[-2:]
    assert abs(many[1]["peak_bytes"] - many[0]["peak_bytes"]) < 0.05 * many[0]["peak_bytes"]


def test_mnist_is_learned_within_its_budgets():
    rows = look_up("memory-cpu/small")
    assert rows[0]["budget"] == 4 << 20 and rows[0]["arms"]["readout"]["accuracy"] >= 0.965
    for row in rows:
        mine = row["arms"]["readout"]
        held = mine["peak_bytes"] + mine["kept_bytes"]
        assert row["budget"] is None or held <= row["budget"]


def test_what_the_page_on_adaptors_says_in_words():
    record = look_up("adaptors")
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
    rows = [r for r in look_up("adaptors/shifts") if r.get("replay") == 0]
    said = [r for r in look_up("adaptors/shifts") if r.get("detector") == "mahalanobis"]
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
    """Where this fails after a new measurement: reword docs/deep.md, README, choosing.md."""
    arms = look_up("deep/nets")["vgg11"]["arms"]
    at = {name: row["accuracy"] for name, row in arms.items() if "accuracy" in row}
    layer_by_layer = {k for k in at if "blocks" not in k} - {"backprop"}
    assert max(layer_by_layer, key=at.__getitem__) == "auxiliary"
    assert min(at["auxiliary"], at["4 blocks, auxiliary"]) > at["backprop"]
    assert at["frozen"] + 0.3 < at["readout"]  # "far above the controls"
    assert at["tpsgd-l2"] > 0.64 > at["frozen"] > 0.12 > at["random"]
    for net in ("vgg8", "resnet18"):
        way = [f"deep/{net}/{arm}" for arm in ("auxiliary", "4 blocks, auxiliary", "backprop")]
        local, blocks, backprop = (look_up(f"{arm}/accuracy") for arm in way)
        assert local < blocks < backprop
    assert at["auxiliary"] > arms["auxiliary"]["block_accuracies"][-2] + 0.1  # sorted by class
    curves = [arms[arm]["curve"] for arm in ("auxiliary", "backprop")]
    behind = [ours < theirs for ours, theirs in zip(*curves, strict=True)]
    assert sum(behind) > len(behind) / 2 and not behind[-1]  # "for most of the cycle"


def test_what_the_page_on_deep_nets_says_about_memory_and_time():
    """Where this fails after a new measurement: reword docs/deep.md, memory.md, README."""
    arms = look_up("deep/nets")["vgg11"]["arms"]
    peaks = {name: row["peak_bytes"] for name, row in arms.items() if "peak_bytes" in row}
    assert max(peaks, key=peaks.__getitem__) == "backprop"
    order = ("auxiliary", "4 blocks, auxiliary", "1 block", "backprop")
    layers, four, one, backprop = (peaks[arm] for arm in order)
    assert layers < four < one < backprop
    assert max(layers, four) < 0.6 * backprop  # "little more than half"
    assert backprop - one > one - layers, "most of it is due to the cut after all"
    seconds = {name: row["seconds"] for name, row in arms.items() if "seconds" in row}
    for arm in ("auxiliary", "4 blocks, auxiliary"):
        assert abs(seconds[arm] / seconds["backprop"] - 1) < 0.02  # "at its speed"
    assert seconds["readout"] < 0.9 * seconds["backprop"]
    assert look_up("deep/vgg8/auxiliary/seconds") > look_up("deep/vgg8/backprop/seconds")


def test_what_the_page_on_deep_nets_says_about_recipes():
    """Where this fails after a new measurement: reword docs/deep.md, README, CHANGELOG."""
    nets = {
        word: look_up("deep/nets")[word]["arms"] for word in ("resnet18-sgd", "vit", "vgg8-sgd")
    }
    rows = nets["resnet18-sgd"]["4 stages, two layers"], nets["vit"]["4 blocks, small head"]
    for row, arms, restarts in zip(rows, nets.values(), (2, 1), strict=False):  # "level"
        backprop = arms["backprop"]
        assert row["accuracy"] > backprop["accuracy"] - 0.002
        assert row["restarts"] == restarts, "reword how many restarts these rows have"
        assert row["peak_bytes"] < 0.75 * backprop["peak_bytes"]
    ratios = {  # of four blocks: "up to"
        (word, name): row["seconds"] / arms["backprop"]["seconds"]
        for word, arms in nets.items()
        for name, row in arms.items()
        if name.startswith("4 ") and ("small" in name or "two" in name) and "seconds" in row
    }
    assert max(ratios, key=ratios.__getitem__) == ("resnet18-sgd", "4 stages, two layers")
    small = look_up("deep_small/nets")["resnet18-small"]["arms"]
    four, backprop = small["4 blocks, small head"], small["backprop"]
    assert four["peak_bytes"] < backprop["peak_bytes"] < 1.2 * four["peak_bytes"]
    assert 1.25 < four["seconds"] / backprop["seconds"] < 1.42  # "a third more time"


def test_what_the_page_on_deep_nets_says_about_calibration():
    """Where this fails after a new measurement: reword docs/deep.md, choosing.md."""
    nets = {
        net: {k: row["accuracies"][0] for k, row in rows.items()}
        for net, rows in look_up("calibration/nets").items()
    }
    assert (rules.SCALE, rules.CELLS) == (12, 16), "the pages name the defaults"
    for net, scores in nets.items():
        default = scores["12, 4 x 4 cells" if "12, 4 x 4 cells" in scores else "12"]
        fixed = {k: v for k, v in scores.items() if not k.startswith("learned")}
        shown = [v for k, v in fixed.items() if "256" not in k]
        assert max(shown) - default < 0.0135, net  # "within 1.3 points of the best", rounded
        assert default > fixed["by hand, 256 features"] - 0.004, net

    def best(net: str, ending: str) -> float:
        scores = {k: v for k, v in nets[net].items() if k[0].isdigit() and k.endswith(ending)}
        return float(max(scores, key=scores.__getitem__).split(",")[0])

    for net in ("vgg11", "vgg8"):
        assert nets[net]["12, 4 x 4 cells"] > nets[net]["by hand, 256 features"] + 0.2
        assert best(net, "4 x 4 cells") in (8, 12, 16)
    assert best("cifar10-cnn", "4 x 4 cells") in (16, 24) and best("eeg", "") == 6
    for net in ("cifar10-cnn", "mnist-cnn"):  # what the pages recommend for shallow CNNs
        learned = {k: v for k, v in nets[net].items() if k.startswith("learned")}
        assert max(learned.values()) - learned["learned, 16, 2048 features"] < 0.002, net
    scores = nets["cifar10-cnn"]  # "want more"
    assert scores["learned, 16, 2048 features"] > scores["learned, 12, 4 x 4 cells"] + 0.02


def test_what_the_page_on_sequences_says_about_long_ones():
    """Where this fails after a new measurement: reword docs/recurrent.md, README, choosing.md."""
    at = {k: row["accuracy"] for k, row in look_up("pixels/49-pixels/arms").items()}
    assert min(at["readout, one layer, last"], at["readout, one layer, mean"]) > mean(
        look_up("recurrent/seq-mnist-pixels, single/backprop")
    )
    for layers in ("one layer", "two layers"):
        assert at[f"readout, {layers}, every"] < at[f"readout, {layers}, last"]
        assert at[f"readout, {layers}, last"] < at[f"readout, {layers}, mean"]
        assert at[f"readout, {layers}, mean"] < at[f"backprop, {layers}, mean"]
    assert at["frozen, one layer, mean"] < at["readout, one layer, mean"] - 0.1
    assert abs(at["learned readout, one layer, mean"] - at["readout, one layer, mean"]) < 0.001
    for arm in ("one layer, last", "one layer, mean", "two layers, mean"):
        ours, theirs = (
            look_up(f"pixels/49-pixels/{how}, {arm}") for how in ("readout", "backprop")
        )
        assert ours["seconds"] < theirs["seconds"]
    ours, theirs, control = (
        look_up(f"pixels/784-pixels/{how}, two layers, mean")
        for how in ("readout", "backprop", "frozen")
    )
    assert abs(ours["accuracy"] - theirs["accuracy"]) < 0.001  # "level with backprop"
    assert control["accuracy"] < ours["accuracy"] - 0.1 and ours["accuracy"] > 0.982
    assert ours["restarts"] == 3 and ours["peak_bytes"] < 0.5 * theirs["peak_bytes"]
    memory = look_up("pixels/memory")
    assert all(memory[place]["ratio"] <= 1.01 for place in ("last", "mean", "every"))


def test_what_the_page_on_fleets_says_about_the_restricted_softmax():
    """Where this fails after another measurement: reword docs/fleet.md."""
    rows = look_up("many/fleet/rows")
    final = {(r["task"], r["concentration"], r["arm"]): r["accuracy"][-1] for r in rows}
    for task in ("mlp", "adaptor"):
        plain, restricted = (final[task, 0.1, f"readout{s}"] for s in ("", ", restricted softmax"))
        assert restricted > plain + 0.02
    backprop = final["mlp", 0.1, "backprop, restricted softmax"]
    assert abs(final["mlp", 0.1, "readout, restricted softmax"] - backprop) < 0.01
    assert 0 < final["mlp", 0.1, "backprop"] - final["mlp", 0.1, "readout"] < 0.03
    assert abs(final["mlp", 1.0, "backprop"] - final["mlp", 1.0, "readout"]) < 0.01


def test_what_the_page_on_many_machines_says_about_processes():
    """Where this fails after another measurement: reword docs/many.md."""
    rows = look_up("many/data_parallel/rows")
    seconds = {(row["net"], row["ranks"], row["arm"]): row["seconds"] for row in rows}
    arms = ("readout, overlapped", "readout, waiting", "backprop, DDP")
    for net in ("mlp 256 x 4", "mlp 1024 x 4"):
        assert seconds[net, 2, arms[0]] < seconds[net, 2, arms[1]], "the overlap saves time"
        assert all(seconds[net, 2, arm] < seconds[net, 4, arm] for arm in arms)
    for arm in (arms[0], arms[2]):
        assert seconds["mlp 1024 x 4", 2, arm] < 0.9 * seconds["mlp 1024 x 4", 1, arm]
        assert seconds["mlp 256 x 4", 2, arm] > 0.85 * seconds["mlp 256 x 4", 1, arm]


def test_what_the_page_on_many_machines_says_about_pipelines():
    """Where this fails after another measurement: reword docs/many.md."""
    rows = {(row["way"], row["ranks"]): row for row in look_up("many/pipeline/rows")}
    seconds = {key: row["seconds_per_epoch"] for key, row in rows.items()}
    assert seconds["pipeline", 2] < seconds["simultaneous", 1]
    assert rows["pipeline", 2]["accuracy"] == rows["simultaneous", 1]["accuracy"]
    for way, ranks in ((w, n) for w in ("gpipe", "1f1b") for n in (2, 4)):
        assert seconds[way, ranks] > seconds["backprop", 1]


def test_what_the_page_on_many_machines_says_about_scale():
    """Where this fails after a change of the model: reword docs/many.md."""
    rows = look_up("many/scale/rows")
    speed = {(r["net"], r["place"], r["ranks"], r["way"]): r["relative"] for r in rows}
    pipelines = [key[:3] for key in speed if key[3] == "pipelined local"]
    leads = {
        key: speed[*key, "pipelined local"]
        / max(speed[*key, f"pipelined backprop, {name}"] for name in ("GPipe", "1F1B"))
        for key in pipelines
    }
    assert min(leads.values()) > 0.99, "a local pipeline is nowhere behind"
    for net, place in {key[:2] for key in pipelines}:
        assert leads[net, place, 4096] < leads[net, place, 64], "the lead shrinks in the end"
        local, backprop = (
            [speed[net, place, n, f"data-parallel {way}"] for n in (1, 8, 4096)]
            for way in ("local", "backprop")
        )
        if net == "vgg11":  # sums are short on few ranks: both hide them
            assert local[1] > 0.98 * local[0] and backprop[1] > 0.98 * backprop[0]
        assert local[2] < 1.15 * backprop[2], "sums are long on many ranks: both wait for them"
    assert (
        speed["vgg11", "accelerators", 4096, "data-parallel local"]
        < (
            speed["vgg11", "accelerators", 4096, "data-parallel backprop"]  # more latencies
        )
    )


def test_what_the_page_on_devices_says_about_a_desk():
    """Where this fails after another measurement: reword docs/edge.md."""
    rows = look_up("edge_speed/rows")
    took = {(row["net"], row["batch"], row["arm"]): row["microseconds"] for row in rows}
    arms = dict.fromkeys(row["arm"] for row in rows)
    for net in dict.fromkeys(row["net"] for row in rows):
        fastest = min(arms, key=lambda arm: took[net, 1, arm])
        assert fastest == "exported C", net
        assert 12 < took[net, 16, "exported C"] / took[net, 1, "exported C"] < 16, net
    for net in ("784-32-10", "head 512-64-10"):
        assert 0.75 < took[net, 16, "exported C"] / took[net, 16, "backprop, torch"] < 1.1
        assert min(arms, key=lambda arm: took[net, 16, arm]) == "exported ONNX"
    assert all(row["apart"] <= 1e-4 for row in rows)
