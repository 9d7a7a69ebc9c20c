"""Plan memory before training, cap it during training, verify it after training.

python examples/budget.py
"""

import torch
from torch import nn

import tpsgd

digits = tpsgd.data.load("digits")  # in place of your data


def net() -> nn.Module:
    """The same initial weights every time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.LeakyReLU(), nn.Linear(256, 10))


plan = tpsgd.plan(net(), digits.shape, batch_size=64, samples=len(digits.train[1]))
print(plan)

print()
models = []
for budget in (None, "1MB", "360KB"):
    model = net()
    run = tpsgd.fit(model, digits.train, epochs=5, batch_size=64, memory=budget)
    accuracy = tpsgd.evaluate(model, digits.test)
    used = (run.peak_bytes + run.kept_bytes) / 1024
    chosen = {name: run.settings[name] for name in ("micro_batch", "slices", "redraw", "reuse")}
    print(f"budget {budget}: used {used:.0f} KB, {accuracy:.1%} right, {chosen}")
    models.append(model)

first, *others = (nn.utils.parameters_to_vector(model.parameters()) for model in models)
difference = max((first - other).abs().max().item() for other in others)
print(f"the weights differ by {difference:.0e} at most")
try:
    tpsgd.fit(net(), digits.train, batch_size=64, memory="100KB")
except tpsgd.TpsgdError as error:
    print(error)
