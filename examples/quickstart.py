"""The smallest useful program: train a net without backpropagation, and measure what it costs.

python examples/quickstart.py
"""

import torch
from torch import nn

import tpsgd

digits = tpsgd.data.load("digits")  # 8 x 8 images, included in scikit-learn


def net() -> nn.Module:
    """A plain torch model, with the same initial weights every time."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.LeakyReLU(),
        nn.Conv2d(16, 16, 3, padding=1), nn.LeakyReLU(),
        nn.Conv2d(16, 16, 3, padding=1), nn.LeakyReLU(),
        nn.Flatten(), nn.Linear(16 * 8 * 8, 10),
    )  # fmt: skip


# The paper's rule. By default training takes no more memory than backprop.
model = net()
steps = {"epochs": 5, "batch_size": 32}  # by default the data decide
run = tpsgd.fit(model, digits.train, rule=tpsgd.rules.tpsgd_l2(), **steps)
print(run)  # for each block: its rule, how it learned, its loss and accuracy

# Two references: the same net with backpropagation, and with hidden layers that stay random.
backprop, frozen = net(), net()
reference = tpsgd.fit_backprop(backprop, digits.train, **steps)
tpsgd.fit(frozen, digits.train, rule=tpsgd.rules.frozen(), **steps)

print()
for name, trained in (("tpsgd-l2", model), ("backprop", backprop), ("frozen", frozen)):
    print(f"{name:9} {tpsgd.evaluate(trained, digits.test):.1%} of the test digits are right")
share = run.total_bytes / reference.total_bytes
print(f"peak memory {run.total_bytes:,} bytes, {share:.0%} of backprop's")
