"""The benchmark of speed: its peers are backprop, its ratios and goals are read as it says."""

import json
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import tpsgd
from tpsgd.zoo.words import cnn, mlp

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def scripts(monkeypatch):
    """The modules of the benchmark."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    names = ("speed", "speed_gpu", "speed_nets", "speed_peers", "speed_table", "speed_turns")
    return SimpleNamespace(**{name: import_module(name) for name in names})


@pytest.fixture
def speed(scripts, monkeypatch, tmp_path):
    """Run the benchmark with some words; its exit status and what it wrote."""
    threads = torch.get_num_threads()

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["speed.py", "--out", str(tmp_path), *words])
        try:
            scripts.speed.main()
        except SystemExit as end:
            return end.code, json.loads((tmp_path / "speed.json").read_text(encoding="utf-8"))
        return 0, json.loads((tmp_path / "speed.json").read_text(encoding="utf-8"))

    yield call
    torch.set_num_threads(threads)
    torch.set_flush_denormal(False)


# ---- the peers -----------------------------------------------------------------------------------


def samples(*shape):
    generator = torch.Generator().manual_seed(1)
    return torch.rand(44, *shape, generator=generator), torch.arange(44) % 3


def trained(model, train, data, **settings):
    """Weights and loss after three epochs of batches of 16, the last of 12."""
    torch.manual_seed(0)
    loss = train(model, *data, batch_size=16, epochs=3, **settings)
    return [p.detach().clone() for p in model.parameters()], loss


def fresh(factory):
    torch.manual_seed(2)
    return factory()


@pytest.mark.parametrize("activation", [nn.Tanh, nn.LeakyReLU])
def test_a_written_out_mlp_learns_what_the_plain_loop_does(scripts, activation):
    peers, data = scripts.speed_peers, samples(1, 4, 5)

    def net():
        return mlp((1, 4, 5), [7, 6], 3, activation)

    by_hand = trained(fresh(net), peers.written_out_mlp, data)
    torch.testing.assert_close(by_hand, trained(fresh(net), peers.plain_loop, data))


def test_a_written_out_rnn_learns_what_the_plain_loop_does(scripts):
    peers, data = scripts.speed_peers, samples(9, 4)

    def net():
        return nn.Sequential(tpsgd.Recurrent(4, 8), nn.Linear(8, 3))

    by_hand = trained(fresh(net), peers.written_out_rnn, data)
    torch.testing.assert_close(by_hand, trained(fresh(net), peers.plain_loop, data))


def test_the_plain_loop_learns_the_same_in_both_memory_formats(scripts):
    loop, data = scripts.speed_peers.plain_loop, samples(2, 6, 6)

    def net():
        return cnn((2, 6, 6), [(4, 3)], 3, nn.LeakyReLU)

    first, last = (trained(fresh(net), loop, data, channels_last=c) for c in (False, True))
    torch.testing.assert_close(first, last)


def test_the_plain_loop_augments_in_half_precision(scripts):
    seen = []

    def shifted(x):
        seen.append(x.shape)
        return x + 1

    model = mlp((5,), [4], 3, nn.ReLU)
    model[1].register_forward_hook(lambda m, i, o: seen.append(o.dtype))
    trained(model, scripts.speed_peers.plain_loop, samples(5), precision=torch.bfloat16)
    assert set(seen) == {torch.bfloat16}
    trained(model, scripts.speed_peers.plain_loop, samples(5), augment=shifted)
    assert torch.Size([16, 5]) in seen and torch.Size([12, 5]) in seen


# ---- ratios and goals ----------------------------------------------------------------------------


def test_a_ratio_is_the_median_over_turns_of_that_to_the_fastest_peer(scripts):
    seconds = {
        "plain loop": [1.0, 2.0, 4.0],
        "plain loop, channels last": [2.0, 1.0, 5.0],
        "fit_backprop": [3.0, 3.0, 2.0],
        "written-out backprop": [0.5, 0.5, 1.0],
        "ours": [2.0, 3.0, 1.0],
    }
    rows = scripts.speed_turns.figures(seconds, ("plain loop", "fit_backprop"))
    assert rows["ours"]["seconds"] == 2.0 and rows["ours"]["each"] == [2.0, 3.0, 1.0]
    assert rows["ours"]["ratio"] == 2.0  # of 2/1, 3/1 and 1/2
    assert rows["ours"]["over"] == {
        "plain loop": 2.0,  # of 2/1, 3/1 and 1/4
        "fit_backprop": 2 / 3,  # of 2/3, 3/3 and 1/2
        "written-out backprop": 4.0,  # of 2/0.5, 3/0.5 and 1/1
    }
    assert rows["fit_backprop"]["ratio"] == 3.0  # of 3/1, 3/1 and 2/2


def measured(**ratios):
    return {"arms": {arm: {"ratio": ratio} for arm, ratio in ratios.items()}}


def test_a_goal_is_missed_beyond_its_margin_only(scripts):
    missed = scripts.speed_turns.missed
    goals = {"net": {"a": {"ratio": 0.8}, "b": {"ratio": 1.0}}, "other": {"a": {"ratio": 0.1}}}
    assert missed({"net": measured(a=0.9, b=1.149)}, goals) == []
    lines = missed({"net": measured(a=0.93, b=1.0)}, goals)
    assert lines == ["net: a: ratio is 0.93, its goal 0.8 (with the margin 0.92)"]
    assert len(missed({"net": measured(a=2.0, b=2.0), "other": measured(a=2.0)}, goals)) == 3


def test_a_goal_without_its_figure_is_missed(scripts):
    goals = {"net": {"a": {"ratio": 0.8, "memory_ratio": 0.3}}}
    (line,) = scripts.speed_turns.missed({"net": measured(a=0.8)}, goals)
    assert line == "net: a: memory_ratio was not measured, its goal is 0.3"


def test_every_goal_names_a_way_to_train_a_net(scripts):
    goals = tomllib.loads(scripts.speed.GOALS.read_text(encoding="utf-8"))
    contests = {
        "cpu": scripts.speed.cpu_contests(quick=True),
        "cuda": scripts.speed_gpu.contests(quick=True, device="cpu"),
    }
    for device, nets in goals.items():
        assert list(nets) == list(contests[device])
        for net, arms in nets.items():
            assert set(arms) <= set(contests[device][net]().arms), net


# ---- the whole program ---------------------------------------------------------------------------

SMALLEST = "64-128-128-10, batch 32"


@pytest.mark.full
def test_the_smallest_net_leaves_its_figures(speed, capsys):
    code, record = speed("--quick", "--turns", "1", "--only", "64-128")
    assert code == 0 and list(record["speed"]) == [SMALLEST]
    assert record["command"] == "python benchmarks/speed.py --turns 1 --quick"
    assert record["machine"]["threads"] == 1 and record["versions"]["torch"]
    arms = record["speed"][SMALLEST]["arms"]
    for rule in ("readout", "tpsgd-l2"):
        row = arms[f"{rule}, sequential"]
        assert set(row["over"]) == {"plain loop", "fit_backprop", "written-out backprop"}
        assert row["ratio"] == max(row["over"]["plain loop"], row["over"]["fit_backprop"])
        assert row["seconds"] > 0 and row["loop_seconds"] > 0 and row["memory_ratio"] > 0
        assert row["sample_passes"] == arms[f"{rule}, simultaneous"]["sample_passes"]
    printed = capsys.readouterr().out.splitlines()
    assert max(map(len, printed)) <= 100
    assert sum(line.startswith(SMALLEST) for line in printed) == 2  # as it runs, and at the end


@pytest.mark.full
@pytest.mark.parametrize(("goal", "code"), [(1e-3, 1), (1e3, 0)])
def test_a_missed_goal_is_named_and_fails_the_check(
    speed, scripts, monkeypatch, tmp_path, goal, code
):
    goals = tmp_path / "goals.toml"
    goals.write_text(f'[cpu."{SMALLEST}"]\n"frozen, sequential" = {{ ratio = {goal} }}\n')
    monkeypatch.setattr(scripts.speed, "GOALS", goals)
    status, _ = speed("--quick", "--turns", "1", "--only", "64-128", "--check")
    assert bool(status) == bool(code)
    assert not code or f"{SMALLEST}: frozen, sequential: ratio is " in str(status)
