"""Searching layers for taps: the grid, its file of trials, its table and figure."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import points, seeded
from scipy.stats import spearmanr
from torch import nn

from tpsgd import Memory, TpsgdError, rules
from tpsgd.comparison.finished_runs import TRIALS as FILE
from tpsgd.data.split import stratified
from tpsgd_adapt import Backbone, Features, Layers, Probe, encode, figures, fit, probe
from tpsgd_adapt.quantize import weight_bytes
from tpsgd_adapt.search import AdaptorSearch, search
from tpsgd_adapt.trials import Candidate, LayerTrials

SMALL = Layers(filters=3, kernel=3, width=8)
NET = Backbone(
    seeded(lambda: nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Flatten())),
    {"maps": "0", "flat": "1"},
)
OPTIONS = {"taps": ("maps", "flat"), "convs": (0, 1), "dense": (0, 1), "layers": SMALL}
OPTIONS |= {"rule": rules.tpsgd_l2(), "epochs": 1, "batch_size": 16}
SCIPY: Any = spearmanr
CONFIGURATIONS = 2 * 2 + 2 + 2  # a tap of vectors has no convolutions; two probes


def features(n: int = 60, seed: int = 0) -> Features:
    """What the two taps say about samples of three classes."""
    x, y = points(n, 32, 3, seed)
    return Features({"maps": x.view(n, 2, 4, 4), "flat": x}, y, (1, 4, 4))


def found(data=None, **options) -> Any:
    return search(NET, features() if data is None else data, **OPTIONS | options)


def watch(monkeypatch, before):
    """Call `before(row, seed)` before every training run."""
    real = LayerTrials.task

    def task(self, row, restarts):
        made = real(self, row, restarts)

        def train(seed, settings):
            before(row, seed)
            return made.train(seed, settings)

        return replace(made, train=train)

    monkeypatch.setattr(LayerTrials, "task", task)


@pytest.fixture
def quick(monkeypatch):
    """Plans by a formula, since rehearsals take their time; trainings are counted."""
    trained = []
    monkeypatch.setattr(
        "tpsgd_adapt.trials.planned_peak",
        lambda arm, head, x, settings: 3 * weight_bytes(head),
    )
    watch(monkeypatch, lambda row, seed: trained.append((row.tap, row.layers, seed)))
    monkeypatch.setattr("tpsgd.memory.meter.Meter._watch", lambda self, on: None)
    return trained


def lines(folder) -> int:
    """The number of finished training runs in a folder; the first line says what the search is."""
    return (folder / FILE).read_text().count("\n") - 1


def plain(search: AdaptorSearch) -> list:
    """What a search has found, less its times."""
    return [(r.tap, r.layers, r.score, r.accuracies, r.skipped) for r in search.rows]


def test_every_configuration_and_its_cost():
    made = found(taps="maps", convs=(1,))
    kinds = [row.layers for row in made.rows]
    assert kinds == [Probe(), Layers(1, 0, 3, 3, 8), Layers(1, 1, 3, 3, 8)]
    own = 4 * (2 * 3 * 9 + 3 + 3 * 16 * 8 + 8 + 8 * 3 + 3)
    assert made.rows[-1].trainable_bytes == own
    for row in made.rows:
        assert row.planned_bytes == row.peak_bytes > row.trainable_bytes and row.seconds > 0
        assert (row.score is None) == row.control


def test_accuracies_are_those_of_layers_trained_by_hand(quick):
    data = features()
    mask = torch.from_numpy(stratified(data.y.numpy(), 48, 3))
    row = found(data, restarts=2, seed=3).rows[4]
    assert row.tap == "maps" and row.layers == Layers(1, 1, 3, 3, 8)
    for r in (0, 1):
        one = fit(
            NET, data[mask], taps="maps", layers=row.layers, rule=rules.tpsgd_l2(), epochs=1,
            batch_size=16, seed=3 + r,
        )  # fmt: skip
        assert one.evaluate(data[~mask]) == row.accuracies[r]
    assert row.accuracy == sum(row.accuracies) / 2
    assert row.std == pytest.approx(abs(row.accuracies[0] - row.accuracies[1]) / math.sqrt(2))


def test_the_control_is_a_linear_probe_solved_once(quick):
    data = features()
    mask = torch.from_numpy(stratified(data.y.numpy(), 48, 0))
    made = found(data, restarts=3)
    row = made.control("flat")
    one = probe(NET, data[mask], taps="flat", batch_size=16)
    assert row is not None and row.accuracies == [one.evaluate(data[~mask])]
    assert sum(isinstance(layers, Probe) for _, layers, _ in quick) == 2
    assert not made.best().control


def test_taps_of_vectors_have_no_convolutions(quick):
    rows = found().rows
    assert len(rows) == CONFIGURATIONS
    assert [r.layers.convs for r in rows if r.tap == "flat" and not r.control] == [0, 0]


def test_features_are_computed_where_data_is_given(quick):
    x, y = points(60, 16, 3)
    x = x.view(60, 1, 4, 4)
    before = encode(NET, (x, y), ("maps", "flat"))
    assert plain(found((x, y))) == plain(found(before))


def test_what_plans_above_the_budget_is_not_trained(quick):
    every = found()
    limit = sorted(row.planned_bytes for row in every.rows)[4]
    made = found(memory=limit)
    above = [row for row in made.rows if row.planned_bytes > limit]
    assert above and all(r.skipped == "over budget" and not r.accuracies for r in above)
    assert all(r.accuracies and not r.skipped for r in made.rows if r not in above)
    assert made.best() == made.best(limit) and every.best(limit).planned_bytes <= limit
    with pytest.raises(TpsgdError, match="nothing was trained within 10 B: the smallest plans"):
        every.best("10B")


def test_memory_settings_are_those_of_the_training():
    options = {"taps": "flat", "convs": (0,), "dense": (1,)}
    whole, parts = found(**options), found(**options, memory=Memory(micro_batch=4))
    assert parts.memory_budget is None and parts.settings["micro_batch"] == 4
    assert parts.best().planned_bytes < whole.best().planned_bytes
    assert parts.best().peak_bytes < whole.best().peak_bytes


def test_the_best_by_score_are_trained_in_each_tap(quick):
    wide = Layers(filters=8, kernel=3, width=64)
    every, made = found(layers=wide), found(layers=wide, top=1)
    for tap in ("maps", "flat"):
        scores = {r.layers: r.score for r in every.rows if r.tap == tap and r.score is not None}
        assert min(scores.values()) > -math.inf and len(scores) == (3 if tap == "maps" else 1)
        trained = [r.layers for r in made.rows if r.tap == tap and r.accuracies and not r.control]
        assert trained == [max(scores, key=lambda layers: scores[layers])]
    assert {r.skipped for r in made.rows} == {"", "left out"}


def test_a_second_call_trains_nothing(quick, tmp_path):
    first = found(folder=tmp_path, restarts=2)
    assert len(quick) == 2 * CONFIGURATIONS - 2 == lines(tmp_path)
    quick.clear()
    assert plain(found(folder=tmp_path, restarts=2)) == plain(first) and not quick
    found(folder=tmp_path, restarts=3)
    assert {seed for _, _, seed in quick} == {2} and len(quick) == CONFIGURATIONS - 2


@pytest.mark.parametrize(
    "other",
    [
        {"epochs": 2},
        {"lr": 0.01},
        {"data": features(seed=1)},
        {"data": features(57)},
        {"rule": rules.drtp()},
    ],
)
def test_other_data_or_settings_are_not_mixed_up(quick, tmp_path, other):
    found(folder=tmp_path, taps="flat")
    quick.clear()
    with pytest.raises(TpsgdError, match=r"is of another run: its .*; resume with the same"):
        found(**{"folder": tmp_path, "taps": "flat", **other})
    assert not quick


def test_more_taps_and_layers_may_follow(quick, tmp_path):
    found(folder=tmp_path, taps="flat")
    quick.clear()
    assert plain(found(folder=tmp_path)) == plain(found())
    assert len(quick) == CONFIGURATIONS - 3 + CONFIGURATIONS


def test_a_line_that_was_cut_short_is_written_again(quick, tmp_path):
    first = found(folder=tmp_path)
    file = tmp_path / FILE
    whole = file.read_bytes()
    file.write_bytes(whole[:-20])
    quick.clear()
    assert plain(found(folder=tmp_path)) == plain(first) and len(quick) == 1
    keys = [json.loads(line).get("key") for line in file.read_text().splitlines()]
    assert keys == [json.loads(line).get("key") for line in whole.splitlines()]


def test_a_damaged_file_is_refused(tmp_path):
    (tmp_path / FILE).write_text('{"key": 1}\n')
    with pytest.raises(TpsgdError, match=r"trials.jsonl was edited or damaged, or is of another"):
        found(folder=tmp_path)


def test_ctrl_c_leaves_the_file_whole(quick, tmp_path, monkeypatch):
    first = found()

    def stopped(row, seed):
        if len(quick) == CONFIGURATIONS + 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        watch(patch, stopped)
        found(folder=tmp_path)
    text = (tmp_path / FILE).read_text()
    assert lines(tmp_path) == 3 and all(json.loads(line) for line in text.splitlines())
    assert plain(found(folder=tmp_path)) == plain(first)
    assert len(quick) == 2 * CONFIGURATIONS
    assert [file.name for file in tmp_path.iterdir()] == [FILE]


def test_a_configuration_that_fails_leaves_the_others_alone(quick, monkeypatch, tmp_path):
    def fails(row, seed):
        if row.layers == Layers(1, 1, 3, 3, 8):
            raise TpsgdError("the loss of block 1 became nan")

    watch(monkeypatch, fails)
    made = found(folder=tmp_path)
    failed = [row for row in made.rows if row.error]
    assert [row.skipped for row in failed] == ["failed"]
    assert sum(bool(row.accuracies) for row in made.rows) == CONFIGURATIONS - 1
    assert "maps, 1 convolutional and 1 dense layers failed: the loss of" in str(made)
    assert lines(tmp_path) == CONFIGURATIONS - 1


def test_if_all_configurations_fail_the_reason_is_raised(quick):
    with pytest.raises(TpsgdError, match="lr must be a number"):
        found(lr=-1)


def test_progress_goes_from_nothing_to_all(quick):
    told = []
    found(progress=lambda *what: told.append(what), restarts=2)
    trials = [(done, total) for what, done, total in told if what != "planning"]
    assert told[0] == ("planning", 0, CONFIGURATIONS)
    total = 2 * CONFIGURATIONS - 2
    assert trials == sorted(trials) and {t for _, t in trials} == {total}
    assert (trials[0][0], trials[-1][0]) == (0, total)
    assert "maps 1+0" in {what for what, _, _ in told}


def row(
    tap="pool4", convs=0, dense=0, planned=1000, score=None, accuracies=(), skipped="", **more
) -> Candidate:
    more = {"accuracies": list(accuracies), "seconds": 1.0, "peak_bytes": planned, **more}
    return Candidate(tap, Layers(convs, dense), 500, planned, score, skipped, **more)


def probed(tap: str, accuracy: float, seconds: float) -> Candidate:
    results = {"accuracies": [accuracy], "seconds": seconds, "peak_bytes": 900}
    return Candidate(tap, Probe(), 40, 900, None, **results)


MADE = AdaptorSearch(
    (
        probed("pool4", 0.7, 0.5),
        row(accuracies=(0.5, 0.6)),
        row(convs=1, planned=2000, score=10.0, accuracies=(0.75, 1.0)),
        row(dense=1, planned=1500, score=-math.inf, accuracies=(0.875, 0.875)),
        row(convs=1, dense=1, planned=2 << 40, score=30.0, skipped="over budget"),
        probed("a.very.long.name", 0.9, 12345.0),
        row("a.very.long.name", 1, 1, 1 << 40, 98765.4321, (0.123, 0.456, 0.789)),
        row("a.very.long.name", 0, 1, 1 << 30, 20.0, skipped="left out"),
    ),
    {},
    1 << 40,
)


def test_of_equally_accurate_layers_the_smallest_are_best():
    assert MADE.best("1MB", tap="pool4") == MADE.rows[3] and MADE.best(1400) == MADE.rows[1]
    assert MADE.best() == MADE.rows[3] and MADE.control() == MADE.rows[5]
    assert MADE.control("pool4") == MADE.rows[0]


def test_rank_correlation_is_scipys():
    pairs = [(10.0, 0.875), (-math.inf, 0.875), (98765.4321, 0.456)]
    wanted = SCIPY(*zip(*pairs, strict=True)).statistic
    assert MADE.rank_correlation() == pytest.approx(wanted)
    assert MADE.rank_correlation("pool4") is None


def test_the_table_is_at_most_80_wide():
    lines = str(MADE).splitlines()
    assert max(map(len, lines)) <= 80 and len(lines) == 1 + len(MADE.rows)
    assert lines[0].split()[:6] == ["tap", "conv", "dense", "weights", "planned", "peak"]
    assert "…y.long.name" in lines[6] and "over budget" in lines[5] and "left out" in lines[8]
    assert "87.5 ± 17.7" in lines[3] and "-inf" in lines[4]


def test_a_search_as_plain_values():
    plain = json.loads(json.dumps(MADE.as_dict(), allow_nan=False))
    assert plain["memory_budget"] == 1 << 40 and len(plain["rows"]) == len(MADE.rows)
    assert plain["rows"][2]["accuracy"] == 0.875
    assert (
        plain["rows"][2]["layers"]["convs"] == 1 and plain["rows"][0]["layers"]["kind"] == "probe"
    )


def test_heatmaps_show_numbers_the_budget_and_the_choice():
    from matplotlib.colors import to_hex
    from matplotlib.patches import Rectangle

    best = {tap: MADE.best(tap=tap) for tap in ("pool4", "a.very.long.name")}
    accuracy, memory, other, _ = figures.heatmaps(MADE.rows, best, MADE.memory_budget).axes
    said = {text.get_position(): text.get_text() for text in accuracy.texts}
    assert said == {
        (0, 0): "55.0\n± 7.1",
        (1, 0): "87.5\n± 17.7",
        (0, 1): "87.5\n± 0.0",
        (1, 1): "",
    }
    assert {t.get_text() for t in memory.texts} == {"1000 B", "2.0 KB", "1.5 KB", "2048.00 GB"}
    assert accuracy.get_title() == "pool4: held-out % (linear probe 70.0)"
    for axes in (accuracy, memory):
        boxes = [p for p in axes.patches if isinstance(p, Rectangle)]
        hatched = [p.get_xy() for p in boxes if p.get_hatch()]
        green = [p.get_xy() for p in boxes if to_hex(p.get_edgecolor()) == figures.CHOSEN]
        assert hatched == [(0.5, 0.5)] and [tuple(map(round, xy)) for xy in green] == [(0, 1)]
    assert other.get_title().startswith("…y.long.name: held-out %")


@pytest.mark.parametrize(("name", "start"), [("a.png", b"\x89PNG"), ("a.svg", b"<?xml")])
def test_a_search_is_drawn_as_png_or_svg(tmp_path, name, start):
    assert MADE.plot(tmp_path / name).read_bytes()[:4] == start[:4]


@pytest.mark.parametrize("name", ["a.jpg", "nowhere/a.png"])
def test_a_figure_that_cannot_be_written_is_refused(tmp_path, name):
    with pytest.raises(TpsgdError, match=r"is FILE\.png or FILE\.svg|there is no folder"):
        MADE.plot(tmp_path / name)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"taps": "nowhere"}, "has no tap 'nowhere'"),
        ({"taps": ()}, "name each tap once, and at least one"),
        ({"convs": ()}, "convs must be different values"),
        ({"dense": (1, 1)}, "dense must be different values"),
        ({"convs": (-1,)}, "convs must be a whole number, 0 or more"),
        ({"restarts": 0}, "restarts must be a whole number, 1 or more"),
        ({"top": 0}, "top must be a whole number, 1 or more"),
        ({"memory": "4 apples"}, "is no amount of memory"),
        ({"combine": None}, "adapt.search has no argument 'combine'"),
    ],
)
def test_bad_arguments_of_a_search_are_named(given, said):
    with pytest.raises(TpsgdError, match=said):
        found(**given)


def test_a_method_without_a_plan_is_refused():
    with pytest.raises(TpsgdError, match=r"its method is tpsgd\.fit or tpsgd\.fit_backprop"):
        found(taps="flat", method=lambda model, data, **options: None)
