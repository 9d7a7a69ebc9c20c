"""The smallest useful program: train a net without backpropagation, and see what it cost.

python examples/quickstart.py
"""

import torch
from torch import nn

import tpsgd

digits = tpsgd.data.load("digits")  # 8 x 8 images, ships with scikit-learn


def net() -> nn.Module:
    """A plain torch model; the same weights every time."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.LeakyReLU(),
        nn.Conv2d(16, 16, 3, padding=1), nn.LeakyReLU(),
        nn.Conv2d(16, 16, 3, padding=1), nn.LeakyReLU(),
        nn.Flatten(), nn.Linear(16 * 8 * 8, 10),
    )  # fmt: skip


# The paper's rule, with as little memory as it can do with: inputs are recomputed, not kept.
model = net()
run = tpsgd.fit(model, digits.train, rule=tpsgd.rules.tpsgd_l2(), batch_size=32, reuse=False)
print(run)  # per block: its rule, how it learned, loss and accuracy

# The same net with backpropagation, and with hidden layers that never learn: what a rule is worth
# shows between the two.
backprop, frozen = net(), net()
reference = tpsgd.fit_backprop(backprop, digits.train, batch_size=32)
tpsgd.fit(frozen, digits.train, rule=tpsgd.rules.frozen(), batch_size=32)

print()
for name, trained in (("tpsgd-l2", model), ("backprop", backprop), ("frozen", frozen)):
    print(f"{name:9} {tpsgd.evaluate(trained, digits.test):.1%} of unseen digits right")
share = run.peak_bytes / reference.peak_bytes
print(f"peak memory {run.peak_bytes:,} bytes, {share:.0%} of backprop's")
