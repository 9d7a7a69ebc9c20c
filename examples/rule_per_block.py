"""A different rule for each block, a custom residual module, validation and early stopping.

python examples/rule_per_block.py
"""

import torch
from torch import Tensor, nn

import tpsgd
from tpsgd import EarlyStopping, rules


class Residual(nn.Module):
    """A custom module is one block: autograd works inside the block and stops at its edge."""

    def __init__(self, width: int):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        """x plus a learned correction."""
        return x + self.inner(x)


torch.manual_seed(0)
model = nn.Sequential(
    nn.Flatten(),
    nn.Linear(64, 96), nn.Tanh(),
    Residual(96), nn.Tanh(),
    nn.Linear(96, 96), nn.Tanh(),
    nn.Linear(96, 10),
)  # fmt: skip
for number, block in enumerate(tpsgd.split(model), 1):
    print(f"block {number} is module {block}")

digits = tpsgd.data.load("digits")
x, y = digits.train
held_out = torch.arange(len(y)) % 5 == 0
run = tpsgd.fit(
    model,
    (x[~held_out], y[~held_out]),
    rule=[rules.readout(), rules.readout(learned=True), rules.drtp(), rules.tpsgd_l2()],
    loss=tpsgd.cross_entropy,  # of the last block; the default of tpsgd_l2 is mse
    epochs=[12, 12, 6, 30],
    lr=[1e-3, 1e-3, 3e-4, 1e-3],
    batch_size=32,
    validation=(x[held_out], y[held_out]),
    early_stopping=EarlyStopping(patience=3),
)
print()
print(run)

best = max((e for e in run.history if e.block == 4), key=lambda e: e.val_accuracy or 0.0)
print(f"\nhead: {best.val_accuracy:.1%} of held-out digits right after epoch {best.epoch}")
print(f"test: {tpsgd.evaluate(model, digits.test):.1%}")
