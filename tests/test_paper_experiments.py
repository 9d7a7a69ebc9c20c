"""The experiments of the paper's figures and claims: smoke runs, and each measurement's oracle."""

import argparse
import importlib
import json
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import with_full
from torch import nn

import tpsgd
from tpsgd import rules
from tpsgd.projections import Key, Projection, per_filter
from tpsgd.zoo.words import mlp

ROOT = Path(__file__).resolve().parents[1]
NAMES = ("table1", "filters", "scaling", "alignment", "energy", "sets", "clips")


@pytest.fixture
def experiment(monkeypatch):
    """A function that imports an experiment by its name."""
    monkeypatch.syspath_prepend(str(ROOT))
    return lambda name: importlib.import_module(f"experiments.{name}")


@pytest.fixture
def smoke(experiment, monkeypatch, tmp_path):
    """A function that runs an experiment's smoke version and returns its record."""

    def run(name, *words):
        module = experiment(name)
        options = ["--smoke", "--device", "cpu", "--out", str(tmp_path), *words]
        monkeypatch.setattr(sys, "argv", [name, *options])
        module.main()
        return json.loads((tmp_path / f"{name}-smoke.json").read_text(encoding="utf-8"))

    return run


@pytest.mark.parametrize("name", with_full(NAMES, ["filters", "scaling", "clips"]))
def test_a_smoke_run_ends_in_seconds_and_says_where_it_comes_from(name, smoke):
    words = {"alignment": ["--arms", "drtp", "readout"], "energy": ["--only", "mlp"]}
    began = time.perf_counter()
    record = smoke(name, "--restarts", "1", *words.get(name, []))
    assert time.perf_counter() - began < 60
    command = record["command"]
    assert command.startswith(f"python -m experiments.{name} ") and command.endswith("--smoke")
    assert record["machine"]["cpu"] and record["versions"]["torch"]
    assert record["rows"]
    for row in record["rows"].values():
        assert row["settings"] and row["machine"] and row["commit"] == record["commit"]


@pytest.mark.full
@pytest.mark.parametrize("name", ["filters", "scaling"])
def test_a_stopped_run_goes_on_with_the_missing_restarts(name, smoke, experiment, monkeypatch):
    first = smoke(name, "--restarts", "1")
    began, original = [], tpsgd.fit_many

    def counted(*args, **settings):
        began.append((settings["seed"], settings["restarts"]))
        return original(*args, **settings)

    monkeypatch.setattr(tpsgd, "fit_many", counted)
    assert smoke(name, "--restarts", "1")["rows"] == first["rows"] and not began
    second = smoke(name, "--restarts", "2")["rows"]
    assert set(began) == {(1, 1)} and len(began) == len(first["rows"])
    for key, row in second.items():
        assert row["seeds"] == [0, 1] and len(row["seconds_each"]) == 2 and row["peak_bytes"] > 0
        assert row["accuracies"][:1] == first["rows"][key]["accuracies"]


def rows_of(experiment, folder, **changes):
    """Empty rows in a folder."""
    options = {"out": folder, "device": "cpu", "restarts": 3, "smoke": False, "shared": False}
    options |= {"seconds": float("inf")} | changes
    return experiment("rows").Rows("trial", argparse.Namespace(**{"again": False} | options))


def test_rows_with_other_settings_are_measured_again(experiment, tmp_path):
    for value in (1, 1, 2):
        rows_of(experiment, tmp_path).measure("row", {"epochs": value}, lambda v=value: {"v": v})
    record = json.loads((tmp_path / "trial.json").read_text(encoding="utf-8"))
    assert record["rows"]["row"]["v"] == 2

    def unexpected():
        raise AssertionError("measured twice")

    assert rows_of(experiment, tmp_path).measure("row", {"epochs": 2}, unexpected)["v"] == 2
    assert rows_of(experiment, tmp_path, seconds=-1.0).measure("other", {}, unexpected) is None


def test_seconds_are_of_restarts_that_had_the_device_for_themselves(experiment, tmp_path):
    x, y = torch.randn(60, 4), torch.arange(60) % 2

    def fit(**options):
        many = tpsgd.fit_many(lambda: nn.Sequential(nn.Linear(4, 2)), (x, y), epochs=1, **options)
        many.runs[0].seconds = 1.0 + many.runs[0].seed
        return many

    rows_of(experiment, tmp_path, restarts=2).restart("row", {}, fit, (x, y))
    row = rows_of(experiment, tmp_path, restarts=4, shared=True).restart("row", {}, fit, (x, y))
    assert row["seconds_each"] == [1.0, 2.0, 3.0, 4.0]
    assert row["alone_each"] == [True, True, False, False]
    assert row["seconds"] == 2.0 and row["alone"]  # the first one warms up


def test_stacked_restarts_come_after_two_that_are_timed(experiment, tmp_path):
    x, y, calls = torch.randn(60, 4), torch.arange(60) % 2, []

    def fit(**options):
        calls.append((options["seed"], options["restarts"], options["stacked"]))
        model = lambda: nn.Sequential(nn.Linear(4, 2))  # noqa: E731
        return tpsgd.fit_many(model, (x, y), epochs=1, **options)

    row = rows_of(experiment, tmp_path, restarts=5).restart("row", {}, fit, (x, y), stack=True)
    assert calls == [(0, 1, False), (1, 1, False), (2, 3, True)]
    assert row["seeds"] == [0, 1, 2, 3, 4] and len(row["accuracies"]) == 5
    assert len(row["seconds_each"]) == 2


# ---- Table 1 -------------------------------------------------------------------------------------


def test_table_1_is_what_fit_does(smoke):
    record = smoke("table1")
    assert len(record["rows"]) == 15 and record["drtp_from_sdfa"] == 0
    for row in record["rows"].values():
        assert row["fit_and_formula"] < 1e-12 and row["fit_and_autograd"] < 1e-12
        assert row["each"][0]["learning"] == ["closed form"] * 2
        assert row["each"][0]["largest_change"] > 1e-4


@pytest.mark.parametrize("rule", ["dfa", "drtp", "tpsgd-l2"])
def test_another_formula_than_the_printed_one_is_noticed(rule, experiment, monkeypatch):
    module = experiment("table1")
    printed = module.PRINTED[rule]
    monkeypatch.setitem(module.PRINTED, rule, lambda *tensors: 1.01 * printed(*tensors))
    assert 0.005 < module.compare(rule, "tanh", 0)["fit_and_formula"] < 0.02


# ---- filters and scaling -------------------------------------------------------------------------


@pytest.mark.parametrize("filters", [1, 4, 64])
def test_small_naive_codes_have_the_variance_of_filter_based_ones(filters, experiment):
    rule = experiment("filters").rule_of("naive, small", filters, rules.Place.AFTER)
    std = float(rule.options.partition("std ")[2].partition(",")[0])
    P = per_filter()((filters, 40, 40), 10, Key(seed=0))
    assert P.square().mean().sqrt().item() == pytest.approx(std, rel=0.05)


def test_the_grid_has_every_net_once_and_corners_first(experiment):
    grid = experiment("scaling").CIFAR
    cells = list(grid.cells())
    assert len(set(cells)) == len(cells) == 25
    assert set(cells[:4]) == {(0, 0), (0, 4), (4, 0), (4, 4)}
    model = grid.model((3, 32, 32), 4, 4)
    kinds = [type(m) for m in model]
    assert kinds.count(nn.Conv2d) == 4 and kinds.count(nn.Linear) == 5
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    of_blocks = experiment("scaling").rules_of("tpsgd-l2", 2, 1)
    assert [rule.options.split()[0] for rule in of_blocks[:3]] == ["per_filter"] * 2 + ["normal"]


@pytest.mark.full
def test_the_figures_are_drawn_from_the_rows(smoke, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    figures = importlib.import_module("figures")
    for name, figure in (("filters", "filter-sampling"), ("scaling", "cifar-scaling")):
        record = smoke(name, "--restarts", "1")
        source, values, draw = figures.FIGURES[figure]
        assert source == name
        shown = json.loads(json.dumps(values(record)))
        panels = draw(shown, record).axes
        assert len(panels) == (1 if name == "filters" else 4)
    texts = {text.get_text() for text in panels[0].texts}
    row = record["rows"]["tpsgd-l2, 1 convolutions, 0 dense"]
    assert f"{100 * row['accuracy']:.1f}" in texts and len(texts) >= 4


# ---- alignment -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("sign", "angle"), [(1.0, 0.0), (-1.0, 180.0)])
def test_dfa_with_the_weights_of_the_head_is_backprop(sign, angle, experiment):
    torch.manual_seed(0)
    model = mlp((6,), [7], 4, nn.Tanh)
    head = model[-1].weight.detach().clone()
    codes = Projection("head", lambda key, classes, shape, device: sign * head[classes])
    x, labels = torch.randn(40, 6), torch.arange(40) % 4
    watch = experiment("alignment").Angles((x, labels))
    tpsgd.fit(
        model, (x, labels), rule=rules.dfa(codes), order=watch.order, epochs=2, batch_size=20,
        optimizer=torch.optim.SGD, lr=0.0,
    )  # fmt: skip
    assert [point["epoch"] for point in watch.points] == [0, 1, 2]
    for point in watch.points:
        assert point["update"] == [pytest.approx(angle, abs=0.1)]
        assert point["signal"] == [pytest.approx(angle, abs=0.1)]


def test_watching_the_angles_does_not_change_the_training(experiment):
    x, labels = torch.randn(60, 1, 8, 8), torch.arange(60) % 3
    weights = []
    for watched in (False, True):
        torch.manual_seed(0)
        model = mlp((1, 8, 8), [16, 16], 3, nn.Tanh)
        order = tpsgd.simultaneous
        if watched:
            order = experiment("alignment").Angles((x, labels)).order
        run = tpsgd.fit(model, (x, labels), order=order, epochs=2, batch_size=20)
        weights.append((model[1].weight.detach().clone(), run.peak_bytes))
    assert torch.equal(weights[0][0], weights[1][0])
    assert weights[0][1] == weights[1][1]


def test_angles_of_rows(experiment):
    degrees = experiment("alignment").degrees
    a = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 0.0]])
    b = torch.tensor([[0.0, 2.0], [3.0, 3.0], [1.0, 0.0]])
    assert degrees(a, b) == pytest.approx((90 + 45) / 2, abs=1e-3)
    assert degrees(a[2:], b[2:]) is None


# ---- operations ----------------------------------------------------------------------------------


def count(experiment, function):
    """What a function does, added up."""
    counter = experiment("operations").OperationCount()
    with counter:
        function()
    names = experiment("operations").COUNTED
    return [sum(counts[name] for counts in counter.counts.values()) for name in names]


def test_a_linear_layer_does_what_its_closed_form_says(experiment):
    layer, x = nn.Linear(6, 4), torch.randn(10, 6)
    forward = [10 * 6 * 4, 0, 4 * (60 + 24 + 4), 4 * 40]
    assert count(experiment, lambda: layer(x)) == forward
    y = layer(x.requires_grad_())
    gradient = torch.ones_like(y)
    # dx = g W and dW = g^T x: a product each; db: a sum
    backward = [2 * 10 * 6 * 4, 4, 4 * ((40 + 24) + (40 + 60) + 40), 4 * (60 + 24 + 4)]
    assert count(experiment, lambda: y.backward(gradient)) == backward


def test_a_convolution_does_what_its_closed_form_says(experiment):
    layer, x = nn.Conv2d(3, 5, 3), torch.randn(2, 3, 8, 8)
    products = 2 * 36 * 5 * 3 * 9
    moved = [4 * (x.numel() + layer.weight.numel() + 5), 4 * 2 * 5 * 36]
    assert count(experiment, lambda: layer(x)) == [products, 0, *moved]


def test_views_move_nothing_and_writing_in_place_moves_what_it_changes(experiment):
    x, index = torch.zeros(4, 6), torch.tensor([1, 2])
    assert count(experiment, lambda: x.t().reshape(2, 12)[0, :3]) == [0, 24, 96, 96]  # one copy
    assert count(experiment, lambda: x.view(24).expand(3, 24)) == [0] * 4
    assert count(experiment, lambda: x.add_(1)) == [0, 24, 96, 96]
    assert count(experiment, lambda: torch.empty(100)) == [0] * 4
    assert count(experiment, lambda: x[:1].expand(4, 6).clone()) == [
        0,
        24,
        24,
        96,
    ]  # a row, read once
    assert count(experiment, lambda: x.index_select(0, index)) == [0, 12, 48 + 16, 48]


def test_adam_writes_weights_and_moments_but_no_gradients(experiment):
    p = nn.Parameter(torch.zeros(10))
    optimizer = torch.optim.Adam([p], fused=True)
    for _ in range(2):
        p.grad = torch.ones(10)
        step = count(experiment, optimizer.step)
    clock = 4  # bytes of the number of steps, which is read twice and written once
    assert step[2:] == [4 * 40 + 2 * clock, 3 * 40 + clock]


def test_local_steps_leave_out_the_products_with_later_weights(smoke):
    rows = smoke("energy", "--only", "mlp", "--arms", "backprop", "tpsgd-l1", "frozen")["rows"]
    backprop, local = rows["mlp, backprop"], rows["mlp, tpsgd-l1"]
    for check in backprop["linear_layers"]:
        assert check["counted"] == check["closed_form"]
    assert len(backprop["linear_layers"]) == 3
    saved = 32 * 16 + 16 * 10  # the gradients of the inputs of the second and the third layer
    assert backprop["multiply_adds"] - local["multiply_adds"] == saved
    hidden = rows["mlp, frozen"]["layers"][0]
    assert list(hidden) == ["forward"] and hidden["forward"]["multiply_adds"] == 784 * 32


# ---- data sets and clips -------------------------------------------------------------------------


def test_properties_of_a_data_set(experiment):
    x = torch.tensor([[[0.0], [2.0]], [[0.0], [0.0]], [[-1.0], [3.0]], [[1.0], [0.0]]])
    train, test = (x, torch.tensor([0, 1, 1, 1])), (x[:3], torch.tensor([0, 1, 1]))
    row = experiment("sets").properties(tpsgd.data.Data("own", train, test, ("a", "b"), (2, 1), ""))
    assert (row["train"], row["test"], row["steps"], row["features"]) == (4, 3, 2, 1)
    assert (row["zeros"], row["range"], row["type"]) == (0.5, [-1.0, 3.0], "int")
    assert (row["smallest_class"], row["largest_class"]) == (0.25, 0.75)
    assert (row["majority_accuracy"], row["chance"]) == (pytest.approx(2 / 3), 0.5)


def centre(frame, axis):
    """The place of the bright square on the torus, along an axis."""
    light = (frame[..., 0] > 140).sum(1 - axis)
    angles = 2 * np.pi * np.arange(len(light)) / len(light)
    return np.angle((light * np.exp(1j * angles)).sum()) * len(light) / (2 * np.pi)


@pytest.mark.parametrize(
    ("motion", "axis", "sign"), [("Left", 1, -1), ("Right", 1, 1), ("Up", 0, -1)]
)
def test_the_square_drifts_in_the_direction_of_its_class(motion, axis, sign, experiment):
    clips = experiment("clips")
    clip = clips.draw_clip(motion, np.random.default_rng(0))
    assert clip.shape == (clips.FRAMES, clips.SIDE, clips.SIDE, 3)
    for direction in (0, 1):
        places = np.array([centre(frame, direction) for frame in clip])
        steps = (np.diff(places) + clips.SIDE / 2) % clips.SIDE - clips.SIDE / 2
        expected = sign * clips.SPEED if direction == axis else 0
        assert np.abs(steps - expected).max() < 0.5


@pytest.mark.parametrize("kind", ["PNG", "PyAV"])
def test_clips_pass_through_the_loader_in_their_order(kind, experiment):
    if kind == "PyAV":
        pytest.importorskip("av", reason="PyAV encodes and decodes the videos: pip install av")
    clips = experiment("clips")
    (x, y), (x_test, y_test) = clips.load(clips.Size(9, 6, 1), kind)
    assert x.shape == (9, 10, 64) and x_test.shape == (6, 10, 64)
    assert y.tolist() == [0, 1, 2] * 3 and y_test.tolist() == [0, 1, 2] * 2
    sideways = x.view(9, 10, 8, 8).mean(2)  # by column
    angles = torch.exp(2j * torch.pi * torch.arange(8) / 8)
    places = (sideways * angles).sum(-1).angle()
    steps = torch.exp(1j * places.diff(dim=1)).mean(1).angle().sign()
    assert steps[y == 0].tolist() == [-1] * 3 and steps[y == 1].tolist() == [1] * 3


def test_one_frame_and_shuffled_frames_are_what_they_say(experiment):
    clips = experiment("clips")
    x = torch.arange(60.0).view(2, 10, 3)
    assert torch.equal(clips.one_frame(x), x[:, 5:6])
    shuffled = clips.shuffled_frames(x)
    assert not torch.equal(shuffled, x) and torch.equal(shuffled.sort(1).values, x)


def test_rows_are_measured_again_when_that_is_asked_for(experiment, tmp_path):
    first = rows_of(experiment, tmp_path)
    first.measure("row", {"a": 1}, lambda: {"value": 1})
    assert first.measure("row", {"a": 1}, lambda: {"value": 2})["value"] == 1
    second = rows_of(experiment, tmp_path, again=True)
    assert second.measure("row", {"a": 1}, lambda: {"value": 3})["value"] == 3
    assert second.measure("row", {"a": 1}, lambda: {"value": 4})["value"] == 3  # once a call
