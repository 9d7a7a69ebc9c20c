"""Recurrent nets leave torch: by `torch.export`, ONNX and a trace, for batches of any size."""

import warnings

import pytest
import torch
from helpers import seeded, with_full
from torch import nn

from tpsgd import Recurrent
from tpsgd.nets.recurrent import connect

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]
NETS = {
    "leaky": lambda: [Recurrent(4, 8)],
    "paper": lambda: [Recurrent.paper(4, 8)],
    "both ways, then one": lambda: [
        Recurrent(4, 4, bidirectional=True, sequence=True),
        Recurrent(8, 8, activation=nn.ReLU),
    ],
    "nn.RNN": lambda: [nn.RNN(4, 8, batch_first=True)],
    "diagonal": lambda: [Recurrent.diagonal(4, 8)],
    "two diagonal": lambda: [
        Recurrent.diagonal(4, 8, sequence=True),
        Recurrent.diagonal(8, 8, loss_at="last"),
    ],
}
OURS = [name for name in NETS if name != "nn.RNN"]


def net(name):
    model = seeded(lambda: nn.Sequential(*NETS[name](), nn.Linear(8, 3)))
    return connect(model).eval()


def agrees(other, model, steps):
    """Whether another form of a model has its outputs, for batches of other sizes."""
    for batch in (1, 2, 7):
        x = torch.randn(batch, steps, 4, generator=torch.Generator().manual_seed(batch))
        with torch.no_grad():
            torch.testing.assert_close(other(x), model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("steps", [10, 40])
@pytest.mark.parametrize("name", OURS)
def test_torch_export_with_any_batch(name, steps):
    model, shapes = net(name), {0: torch.export.Dim("batch")}
    program = torch.export.export(model, (torch.randn(5, steps, 4),), dynamic_shapes=(shapes,))
    agrees(program.module(), model, steps)


@pytest.mark.cover(1)
@pytest.mark.parametrize("steps", [10, 40])
@pytest.mark.parametrize("name", NETS)
def test_a_trace_takes_any_batch(name, steps):
    model = net(name)
    with torch.no_grad():
        agrees(torch.jit.trace(model, torch.randn(5, steps, 4)), model, steps)


def session(tmp_path, model, steps, **options):
    onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime runs the exported file")
    pytest.importorskip("onnx", reason="torch writes ONNX files with it")
    file, x = tmp_path / "net.onnx", torch.randn(5, steps, 4)
    names = {"input_names": ["x"], "output_names": ["y"]}
    with warnings.catch_warnings():  # torch's own, about how it exports
        warnings.simplefilter("ignore")
        torch.onnx.export(model, (x,), str(file), verbose=False, **names, **options)
    running = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    return lambda x: torch.from_numpy(running.run(None, {"x": x.numpy()})[0])


@pytest.mark.cover(1)
@pytest.mark.parametrize("steps", [10, 40])
@pytest.mark.parametrize("name", with_full(OURS, OURS[:-2]))
def test_onnx_with_any_batch(tmp_path, name, steps):
    model, axes = net(name), {"x": {0: "batch"}, "y": {0: "batch"}}
    agrees(session(tmp_path, model, steps, dynamo=False, dynamic_axes=axes), model, steps)


@pytest.mark.full
@pytest.mark.parametrize("name", OURS)
def test_onnx_by_way_of_torch_export_with_any_batch(tmp_path, name):
    pytest.importorskip("onnxscript")
    model, shapes = net(name), ({0: torch.export.Dim("batch")},)
    agrees(session(tmp_path, model, 10, dynamo=True, dynamic_shapes=shapes), model, 10)
