"""Filter sampling: accuracy against the number of filters, 1 to 128 (the paper's second figure).

    python -m experiments.filters --out results [--device cuda] [--only mnist]

One convolution of 5 x 5, LeakyReLU and a linear layer, as in the paper, trained by `tpsgd-l2` with
both kinds of class codes P. Filter-based codes have deviations i/nf, 1/3 of the variance of naive
ones: `naive, small` has normal codes of that variance, and decides whether the filters or the
size make a difference. The controls are backprop, and random filters under a head with the same
squared error. The targets are those after the activation on MNIST and before it on CIFAR-10, as
held-out samples chose for the paper's CNN (`shallow.json`). Adam at 1e-3, batches of 128.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

import tpsgd
from experiments.common import Row, program
from experiments.rows import Rows, leave_out, row_arguments, shown
from experiments.shallow import standardised
from tpsgd import Place, Rule, TpsgdError, rules
from tpsgd.engine.restarts import Restarts
from tpsgd.projections import normal, per_filter
from tpsgd.zoo.words import cnn

FILTERS = (1, 2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True)
class Panel:
    """A data set, its epochs per block, and where the paper's targets are."""

    data: str
    epochs: int
    at: Place
    filters: tuple[int, ...] = FILTERS
    kernel: int = 5
    max_train: int | None = None


PANELS = {
    "mnist": Panel("mnist", 2, Place.AFTER),
    "cifar10": Panel("cifar10", 3, Place.BEFORE),
}
SMOKE = {"digits": Panel("digits", 8, Place.AFTER, (1, 4), 3, 600)}
# The arms that decide come first.
ARMS = ("filter-based", "naive", "frozen", "backprop", "naive, small", "readout")


def rule_of(arm: str, filters: int, at: Place) -> Rule | None:
    """How an arm learns; None is backprop."""
    if arm == "filter-based":
        return rules.tpsgd_l2(per_filter(), at)
    if arm.startswith("naive"):
        mean_square = sum((i / filters) ** 2 for i in range(1, filters + 1)) / filters
        return rules.tpsgd_l2(normal(mean_square**0.5 if arm == "naive, small" else 1.0), at)
    return {"frozen": rules.frozen(tpsgd.mse), "readout": rules.readout(), "backprop": None}[arm]


class Bench:
    """The data of a panel on a device, and how its rows are trained there."""

    def __init__(self, panel: Panel, device: str) -> None:
        self.panel, self.device = panel, device
        loaded = tpsgd.data.load(panel.data, max_train=panel.max_train)
        x, y, x_test, y_test = (t.to(device) for t in (*loaded.train, *loaded.test))
        x, x_test = standardised(x, x_test)
        self.shape, self.train, self.test = loaded.shape, (x, y), (x_test, y_test)

    def model(self, filters: int) -> nn.Module:
        """A convolution, an activation and a linear layer."""
        kernels = [(filters, self.panel.kernel)]
        return cnn(self.shape, kernels, 10, nn.LeakyReLU).to(self.device)

    def fit(self, arm: str, filters: int, **more: Any) -> Restarts:
        """Restarts of one arm."""
        rule = rule_of(arm, filters, self.panel.at)
        settings: Row = {"rule": rule, "backprop": rule is None, "epochs": self.panel.epochs}
        return tpsgd.fit_many(lambda: self.model(filters), self.train, **settings, **more)


def main() -> None:
    """Measure the panels asked for; the file is written after every restart."""
    parser = row_arguments(__doc__)
    parser.add_argument("--only", choices=list(PANELS))
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    options = parser.parse_args()
    panels = SMOKE if options.smoke else PANELS
    rows = Rows("filters", options, {"net": "one 5 x 5 convolution, LeakyReLU, one linear layer"})
    for name in [options.only] if options.only and not options.smoke else list(panels):
        try:
            bench = Bench(panels[name], options.device)
        except TpsgdError as error:
            leave_out(name, error)
            continue
        for filters in bench.panel.filters:
            for arm in options.arms:
                measure(rows, bench, name, arm, filters)


def measure(rows: Rows, bench: Bench, name: str, arm: str, filters: int) -> None:
    """The row of one arm at one width."""
    panel = bench.panel
    settings: Row = {"data": panel.data, "arm": arm, "filters": filters, "epochs": panel.epochs}
    settings |= {"target": panel.at.value, "kernel": panel.kernel, "train": len(bench.train[1])}

    fit = partial(bench.fit, arm, filters)
    row = rows.restart(f"{name}, {arm}, {filters}", settings, fit, bench.test)
    if row is not None:
        print(f"{name:8} {filters:4} {arm:14} {shown(row)}", flush=True)


if __name__ == "__main__":
    program(main)
