"""Mean and deviation over restarts, with the two arms that say what a figure is worth.

python examples/restarts.py
"""

from statistics import fmean, stdev

from torch import nn

import tpsgd
from tpsgd import rules

digits = tpsgd.data.load("digits")


def factory() -> nn.Module:
    """A fresh model; fit_many seeds torch before each call."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.LeakyReLU(), nn.Linear(128, 10))


arms = {
    "backprop": {"backprop": True},
    "readout": {"rule": rules.readout()},
    "tpsgd-l2": {"rule": rules.tpsgd_l2()},
    "frozen": {"rule": rules.frozen()},  # the control: only the last block learns
}
print(f"{'rule':9} {'accuracy over 3 restarts':>25} {'seconds':>8} {'peak KB':>8}")
for name, arm in arms.items():
    many = tpsgd.fit_many(factory, digits.train, restarts=3, epochs=10, batch_size=32, **arm)
    found = [100 * a for a in many.evaluate(digits.test)]
    seconds = fmean(run.seconds for run in many.runs)
    peak = max(run.peak_bytes for run in many.runs) / 1024
    print(f"{name:9} {fmean(found):17.1f} ± {stdev(found):3.1f} % {seconds:8.2f} {peak:8.0f}")
