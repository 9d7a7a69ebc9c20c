"""Bytes: say them before training, keep them under a limit, check them after.

python examples/budget.py
"""

import torch
from torch import nn

import tpsgd
from tpsgd.units import size

digits = tpsgd.data.load("digits")  # stands for your own files


def net() -> nn.Module:
    """The same initial weights every time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.LeakyReLU(), nn.Linear(256, 10))


plan = tpsgd.plan(net(), digits.shape, batch_size=64, samples=len(digits.train[1]))
print(plan)

models = []
for budget in (None, "1MB", "360KB"):
    model = net()
    run = tpsgd.fit(model, digits.train, epochs=5, batch_size=64, memory_budget=budget)
    right = tpsgd.evaluate(model, digits.test)
    chosen = {k: run.settings[k] for k in ("micro_batch", "slices", "redraw", "reuse")}
    print(f"{budget}: held {size(run.peak_bytes + run.kept_bytes)}, {right:.1%} right, {chosen}")
    models.append(model)

first, *others = (nn.utils.parameters_to_vector(model.parameters()) for model in models)
apart = max((first - other).abs().max().item() for other in others)
print(f"the weights differ by {apart:.0e}")
try:
    tpsgd.fit(net(), digits.train, batch_size=64, memory_budget="100KB")
except tpsgd.TpsgdError as error:
    print(error)
