"""Signals of different lengths: a recurrent net that learns without backprop through time.

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
    made, labels = [], torch.arange(n) % 2
    for label in labels:
        steps = int(torch.randint(10, 31, (), generator=random))
        begin, pace = torch.rand(2, generator=random) * torch.tensor([6.3, 0.4])
        phase = begin + (0.3 + pace) * torch.arange(steps)
        waves = torch.stack([phase.sin(), (phase + (1.0 if label else -1.0)).sin()], 1)
        made.append(waves + 0.4 * torch.randn(waves.shape, generator=random))
    return Padded.of(made), labels


train, test = signals(600, seed=0), signals(500, seed=1)


def net() -> nn.Module:
    """A leaky cell and a linear classifier; the same weights every time."""
    torch.manual_seed(0)
    return nn.Sequential(Recurrent(2, 64), nn.Linear(64, 2))


EPOCHS = 8


def to_zero(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    """A rate that falls in a straight line."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 - epoch / EPOCHS)


model, backprop, frozen = net(), net(), net()
adam = partial(torch.optim.Adam, lr=3e-3)
settings = {"epochs": EPOCHS, "batch_size": 32, "lr_schedule": to_zero}
local = settings | {"optimizer": [adam, tpsgd.ridge()], "window": 1}  # a head by least squares
run = tpsgd.fit(model, train, rule=rules.readout(), **local)
tpsgd.fit(frozen, train, rule=rules.frozen(), **local)
through_time = tpsgd.fit_backprop(backprop, train, optimizer=adam, **settings)
print(run)

print()
arms = {"readout": model, "backprop through time": backprop, "frozen": frozen}
for name, trained in arms.items():
    print(f"{name:21} {tpsgd.evaluate(trained, test):.1%} of unseen signals right")
share = run.peak_bytes / through_time.peak_bytes
print(f"peak memory {run.peak_bytes:,} bytes, {share:.0%} of backprop through time's")
