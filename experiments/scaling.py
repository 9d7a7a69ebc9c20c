"""Scaling on CIFAR-10: 0 to 4 convolutions x 0 to 4 dense layers (the paper's four heatmaps).

    python -m experiments.scaling --out results [--device cuda]

Convolutions have 16 filters of 5 x 5, stride 1, no padding; dense layers have 256 units; LeakyReLU
after each; a linear layer at the end. `tpsgd-l2` has filter-based codes on convolutions and normal
ones on dense layers, targets before the activation, which held-out samples chose for the paper's
CNN (`shallow.json`), and a head of squared error; the control `frozen` has the same head on random
layers. `readout` is our default; backprop is Adam on the cross-entropy. Every arm has Adam at 1e-3,
batches of 128, and as many epochs per block as backprop has of the whole net.

On a GPU the restarts of nets without convolutions are stacked, after two that are timed alone.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

import tpsgd
from experiments.common import Row, program
from experiments.rows import Rows, leave_out, row_arguments, shown
from experiments.shallow import standardised
from tpsgd import Place, Rule, TpsgdError, rules
from tpsgd.engine.restarts import Restarts
from tpsgd.projections import normal, per_filter

ARMS = ("tpsgd-l2", "backprop", "frozen", "readout")


@dataclass(frozen=True)
class Grid:
    """The nets of the heatmaps and how they are trained."""

    data: str
    most: int = 4  # layers of each kind
    filters: int = 16
    kernel: int = 5
    units: int = 256
    epochs: int = 3
    max_train: int | None = None

    def cells(self) -> Iterator[tuple[int, int]]:
        """Numbers of convolutions and of dense layers, corners first: they show the most."""
        numbers = range(self.most + 1)
        pairs = [(convolutions, dense) for dense in numbers for convolutions in numbers]
        yield from sorted(pairs, key=lambda pair: sum(0 < n < self.most for n in pair))

    def model(self, shape: tuple[int, ...], convolutions: int, dense: int) -> nn.Sequential:
        """Convolutions, dense layers and a linear layer."""
        layers: list[nn.Module] = []
        channels, height, width = shape
        for _ in range(convolutions):
            layers += [nn.Conv2d(channels, self.filters, self.kernel), nn.LeakyReLU()]
            channels, shrinks = self.filters, self.kernel - 1
            height, width = height - shrinks, width - shrinks
        layers, inputs = [*layers, nn.Flatten()], channels * height * width
        for _ in range(dense):
            layers += [nn.Linear(inputs, self.units), nn.LeakyReLU()]
            inputs = self.units
        return nn.Sequential(*layers, nn.Linear(inputs, 10))


CIFAR = Grid("cifar10")
SMOKE = Grid("digits", most=1, filters=4, kernel=3, units=32, epochs=6, max_train=600)


def rules_of(arm: str, convolutions: int, dense: int) -> list[Rule] | None:
    """The rule of each block; None is backprop."""
    if arm == "backprop":
        return None
    if arm == "tpsgd-l2":
        maps, vectors = (rules.tpsgd_l2(p, Place.BEFORE) for p in (per_filter(), normal()))
        return [maps] * convolutions + [vectors] * (dense + 1)
    rule = {"frozen": rules.frozen(tpsgd.mse), "readout": rules.readout()}[arm]
    return [rule] * (convolutions + dense + 1)


class Bench:
    """The data on a device, and how a net of the grid is trained there."""

    def __init__(self, grid: Grid, device: str) -> None:
        self.grid, self.device = grid, device
        loaded = tpsgd.data.load(grid.data, max_train=grid.max_train)
        x, y, x_test, y_test = (t.to(device) for t in (*loaded.train, *loaded.test))
        x, x_test = standardised(x, x_test)
        self.shape, self.train, self.test = loaded.shape, (x, y), (x_test, y_test)

    def fit(self, arm: str, convolutions: int, dense: int, **more: Any) -> Restarts:
        """Restarts of one arm on one net."""
        rule = rules_of(arm, convolutions, dense)
        settings: Row = {"rule": rule, "backprop": rule is None, "epochs": self.grid.epochs}

        def make() -> nn.Module:
            return self.grid.model(self.shape, convolutions, dense).to(self.device)

        return tpsgd.fit_many(make, self.train, **settings, **more)

    def measure(self, rows: Rows, arm: str, convolutions: int, dense: int) -> None:
        """The row of one arm on one net."""
        grid = self.grid
        settings: Row = {"data": grid.data, "arm": arm, "convolutions": convolutions}
        settings |= {"dense": dense, "epochs": grid.epochs, "train": len(self.train[1])}
        name = f"{arm}, {convolutions} convolutions, {dense} dense"
        stack = not convolutions and torch.device(self.device).type == "cuda"
        fit = partial(self.fit, arm, convolutions, dense)
        row = rows.restart(name, settings, fit, self.test, stack)
        if row is not None:
            print(f"{convolutions} + {dense} {arm:10} {shown(row)}", flush=True)


def main() -> None:
    """Measure every arm on every net; the file is written after every training."""
    parser = row_arguments(__doc__)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    options = parser.parse_args()
    grid = SMOKE if options.smoke else CIFAR
    settings = {"filters": grid.filters, "kernel": grid.kernel, "units": grid.units}
    rows = Rows("scaling", options, settings | {"epochs": grid.epochs})
    try:
        bench = Bench(grid, options.device)
    except TpsgdError as error:
        return leave_out(grid.data, error)
    for convolutions, dense in grid.cells():
        for arm in options.arms:
            bench.measure(rows, arm, convolutions, dense)


if __name__ == "__main__":
    program(main)
