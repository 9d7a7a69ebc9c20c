"""Signals of different lengths: train a recurrent net without backprop through time.

python examples/sequences.py
"""

from functools import partial

import torch
from torch import nn

import tpsgd
from tpsgd import Padded, Recurrent, rules


def signals(n: int, seed: int) -> tuple[Padded, torch.Tensor]:
    """Two noisy sensors, 10 to 30 steps: the second lags behind the first, or runs ahead of it."""
    random = torch.Generator().manual_seed(seed)
    sequences, labels = [], torch.arange(n) % 2
    for label in labels:
        steps = int(torch.randint(10, 31, (), generator=random))
        start, pace = torch.rand(2, generator=random) * torch.tensor([6.3, 0.4])
        phase = start + (0.3 + pace) * torch.arange(steps)
        waves = torch.stack([phase.sin(), (phase + (1.0 if label else -1.0)).sin()], 1)
        sequences.append(waves + 0.4 * torch.randn(waves.shape, generator=random))
    return Padded.of(sequences), labels


train, test = signals(600, seed=0), signals(500, seed=1)


def net() -> nn.Module:
    """A leaky cell and a linear classifier, with the same initial weights every time."""
    torch.manual_seed(0)
    return nn.Sequential(Recurrent(2, 64), nn.Linear(64, 2))


EPOCHS = 8


def to_zero(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    """A learning rate that decreases linearly to zero."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 - epoch / EPOCHS)


model, backprop, frozen = net(), net(), net()
adam = partial(torch.optim.Adam, lr=3e-3)
settings = {"epochs": EPOCHS, "batch_size": 32, "lr_schedule": to_zero}
local = settings | {
    "optimizer": [adam, tpsgd.ridge()],
    "window": 1,
}  # the head is solved by least squares
run = tpsgd.fit(model, train, rule=rules.readout(), **local)
tpsgd.fit(frozen, train, rule=rules.frozen(), **local)
through_time = tpsgd.fit_backprop(backprop, train, optimizer=adam, **settings)
print(run)

print()
methods = {"readout": model, "backprop through time": backprop, "frozen": frozen}
for name, trained in methods.items():
    print(f"{name:21} {tpsgd.evaluate(trained, test):.1%} of the test signals are right")
share = run.peak_bytes / through_time.peak_bytes
print(f"peak memory {run.peak_bytes:,} bytes, {share:.0%} of backprop through time's")
