"""Mean and standard deviation over restarts, with the two references: backprop and `frozen`.

python examples/restarts.py
"""

from statistics import fmean, stdev

from torch import nn

import tpsgd
from tpsgd import rules

digits = tpsgd.data.load("digits")


def factory() -> nn.Module:
    """A new model; fit_many seeds torch before each call."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.LeakyReLU(), nn.Linear(128, 10))


methods = {
    "backprop": {"backprop": True},
    "readout": {"rule": rules.readout()},
    "tpsgd-l2": {"rule": rules.tpsgd_l2()},
    "frozen": {"rule": rules.frozen()},  # the control: only the last block is trained
}
print(f"{'rule':9} {'accuracy over 3 restarts':>25} {'seconds':>8} {'peak KB':>8}")
for name, method in methods.items():
    many = tpsgd.fit_many(factory, digits.train, restarts=3, epochs=10, batch_size=32, **method)
    accuracies = [100 * accuracy for accuracy in many.evaluate(digits.test)]
    seconds = fmean(run.seconds for run in many.runs)
    peak = max(run.peak_bytes for run in many.runs) / 1024
    mean, deviation = fmean(accuracies), stdev(accuracies)
    print(f"{name:9} {mean:17.1f} ± {deviation:3.1f} % {seconds:8.2f} {peak:8.0f}")
