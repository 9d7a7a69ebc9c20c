"""`examples/paper.py`, the paper in fifty lines, learns the same weights as `tpsgd.fit`."""

import runpy
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tpsgd

PAPER = runpy.run_path(str(Path(__file__).resolve().parents[2] / "examples" / "paper.py"))
RULES = {
    "tpsgd-l2": tpsgd.rules.tpsgd_l2(),
    "tpsgd-l1": tpsgd.rules.tpsgd_l1(),
    "drtp": tpsgd.rules.drtp(tpsgd.projections.normal()),
    "frozen": tpsgd.rules.frozen(),
}


@pytest.mark.parametrize("rule", PAPER["DIRECTION"])
def test_the_paper_in_fifty_lines_equals_fit(rule):
    torch.manual_seed(0)
    x, y = torch.randn(200, 8), torch.arange(200) % 3
    model = nn.Sequential(
        nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 3)
    )
    linear = [m for m in model if isinstance(m, nn.Linear)]
    layers = [(m.weight.detach().clone(), m.bias.detach().clone()) for m in linear]
    PAPER["train"](layers, x, y, rule, eta=0.05, epochs=3, batch=32)
    tpsgd.fit(
        model,
        DataLoader(TensorDataset(x, y), batch_size=32),  # in the order of the program
        rule=RULES[rule],
        loss=tpsgd.mse,
        optimizer=tpsgd.sgd,
        lr=0.05,
        epochs=3,
        memory=tpsgd.Memory(reuse=False),
    )
    for (W, b), m in zip(layers, linear, strict=True):
        torch.testing.assert_close(W, m.weight.detach(), rtol=0, atol=1e-6)
        torch.testing.assert_close(b, m.bias.detach(), rtol=0, atol=1e-6)
    assert torch.equal(PAPER["predict"](layers, x), model(x).argmax(1))
