"""The timed step of the exports: all arms do the same work, and other work is noticed."""

import json
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tpsgd_export.to_c.compiled import compiler

pytest.importorskip("onnx", reason="onnx writes the graphs, and is not installed")
pytest.importorskip("onnxruntime", reason="onnxruntime runs the graphs")
pytestmark = [
    pytest.mark.skipif(compiler() is None, reason="no C compiler"),
    pytest.mark.usefixtures("unwatched"),
]

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def edge_speed(monkeypatch):
    """The module of the benchmark; torch's threads are put back."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    threads = torch.get_num_threads()
    yield import_module("edge_speed")
    torch.set_num_threads(threads)


@pytest.mark.full
def test_a_small_run_leaves_a_row_for_each_arm(edge_speed, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(edge_speed, "NETS", ("CNN 8x8: 8x3",))
    monkeypatch.setattr(edge_speed, "MOVED", 1e-4)
    monkeypatch.setenv("TPSGD_COMMIT", "abc")
    words = f"--steps 20 --turns 2 --out {tmp_path}"
    monkeypatch.setattr(sys, "argv", ["edge_speed.py", *words.split()])
    import_module("experiments.common").commit.cache_clear()
    edge_speed.main()
    record = json.loads((tmp_path / "edge_speed.json").read_text(encoding="utf-8"))
    assert record["machine"]["threads"] == 1 and record["versions"]["onnxruntime"]
    assert record["versions"]["commit"] == "abc" and record["versions"]["cc"]
    assert record["command"].endswith("--steps 20 --turns 2")
    rows = record["rows"]
    assert [row["arm"] for row in rows] == 2 * list(edge_speed.ARMS)
    for row in rows:
        assert len(row["turns"]) == 2 and row["microseconds"] > 0 and row["apart"] < 1e-5
        assert (row["ratio"] == 1) == (row["arm"] == "backprop, torch")
    assert "CNN 8x8: 8x3  16" in capsys.readouterr().out


def test_the_plain_loop_learns_by_backprop_from_batches_in_order(edge_speed):
    task = edge_speed.Task("64-32-10", 4, 3)
    model, expected = task.model(), task.model()
    edge_speed.plain_loop(task)(model)
    x, y, order = task.samples()
    for batch in order.view(3, 4):
        loss = F.cross_entropy(expected(x[batch]), y[batch])
        params = list(expected.parameters())
        for p, g in zip(params, torch.autograd.grad(loss, params), strict=True):
            p.data -= edge_speed.RATE * g
    torch.testing.assert_close(dict(model.named_parameters()), dict(expected.named_parameters()))


@pytest.mark.parametrize("arm", ["exported C", "exported ONNX", "tpsgd.fit"])
@pytest.mark.parametrize("spoiled", ["other weights", "no work", "no number"])
def test_other_work_is_noticed(edge_speed, arm, spoiled):
    task = edge_speed.Task("64-32-10", 1, 1)
    models = {name: task.model() for name in edge_speed.LOCAL}
    for model in models.values():
        shift(model, 0.1)
    assert edge_speed.distance(task, models) == 0
    by = {"other weights": 2e-4, "no work": -0.1, "no number": float("nan")}[spoiled]
    shift(models[arm], by)
    with pytest.raises(RuntimeError, match="apart and moved by"):
        edge_speed.distance(task, models)


def shift(model: nn.Module, by: float) -> None:
    """Add a number to one weight."""
    with torch.no_grad():
        next(model.parameters()).view(-1)[5] += by
