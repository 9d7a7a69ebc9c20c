"""Long sequences: MNIST pixel by pixel and row by row, EEG and tweets, by diagonal recurrences.

    python -m experiments.pixels --out results

Every layer of a local arm learns by itself, all layers from the same pass over the samples, so that
every arm reads the training set equally often. Arms differ in the rule, the number of layers and
where in time the loss looks; the leaky cell and backprop through the same layers are beside them,
and two controls: layers that stay random under a trained head, and nothing trained at all. Each
arm's learning rate is chosen on held-out training samples by the same short search. The memory of
one model is planned for 49 and for 784 steps with the same window, and measured on a small set.
"""

import argparse
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

import tpsgd
from experiments.common import (
    Row,
    Samples,
    accuracies,
    arguments,
    best_rate,
    load,
    origin,
    program,
    result_file,
    with_data,
)
from experiments.recurrent import last_of_each_class
from tpsgd import Recurrent, Rule, rules
from tpsgd.comparison.provenance import machine
from tpsgd.engine.restarts import Restarts

UNITS, BATCH = 256, 128
RATES = (1e-3, 2e-3, 4e-3, 8e-3)
SEARCH = (12_000, 3)  # samples and epochs
GPU_WINDOW = 112  # time steps computed together where memory is plenty and launching takes time
PLACES = ("last", "mean", "every")


@dataclass(frozen=True)
class Set:
    """A data set as sequences, and how many epochs an arm has for it."""

    name: str
    epochs: int
    pixels: bool = False  # images become sequences of all their pixels


SETS = {
    "49-pixels": Set("seq-mnist-pixels", 10),
    "784-pixels": Set("mnist", 6, pixels=True),
    "rows": Set("seq-mnist-rows", 10),
    "eeg": Set("eeg", 20),
    "tweets": Set("tweets", 10),
}


SMOKE_SETS = ["eeg", "tweets"]


@dataclass(frozen=True)
class Arm:
    """A column: how which layers learn, and where their loss looks."""

    rule: Rule | None  # None: backprop
    layers: int
    loss_at: str | None  # None: leaky cells


def arms() -> Iterator[tuple[str, Arm]]:
    """By name, those that decide first."""
    for layers, word in ((1, "one layer"), (2, "two layers")):
        for place in ("mean", "last", "every"):
            yield f"readout, {word}, {place}", Arm(rules.readout(), layers, place)
        yield f"backprop, {word}, mean", Arm(None, layers, "mean")
    for layers, word in ((1, "one layer"), (2, "two layers")):
        yield f"learned readout, {word}, mean", Arm(rules.readout(learned=True), layers, "mean")
        yield f"frozen, {word}, mean", Arm(rules.frozen(), layers, "mean")
        yield f"backprop, {word}, last", Arm(None, layers, "last")
        yield f"leaky readout, {word}", Arm(rules.readout(), layers, None)
        yield f"leaky backprop, {word}", Arm(None, layers, None)
    yield "random, one layer, mean", Arm(rules.untrained(), 1, "mean")


ARMS = dict(arms())


def main() -> None:
    """Run what is asked for; the file is written after every arm."""
    options, begin = parse(), time.monotonic()
    torch.set_float32_matmul_precision("high")
    record, save = result_file(options, "pixels")
    settings = {"units": UNITS, "batch_size": BATCH, "rates": RATES, "search": SEARCH}
    record |= origin("pixels", options.device) | {"settings": settings}
    if ("memory" not in record or options.again) and not options.smoke:
        record["memory"] = memory()
        save()
        print(f"memory: {record['memory']}", flush=True)
    for name, bench in with_data(options.sets, lambda name: Bench(SETS[name], options)):
        table = record.setdefault("tables", {}).setdefault(name, {"shape": bench.shape})
        table |= {"data": SETS[name].name, "note": bench.note}
        rows = table.setdefault("arms", {})
        for arm in options.arms:
            if time.monotonic() - begin > options.seconds:
                return print("no time is left for more", flush=True)
            if arm in rows and not options.again:
                continue
            rows[arm] = bench.run(ARMS[arm])
            save()
            print(f"{name}, {arm}: {figures(rows[arm])}", flush=True)
    return None


def parse() -> argparse.Namespace:
    """The arguments."""
    parser = arguments(__doc__)
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=SETS)
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS), metavar="ARM")
    parser.add_argument("--restarts", type=int, default=3)
    parser.add_argument("--max-train", type=int, help="fewer samples, for a quick look")
    parser.add_argument("--epochs", type=int, help="instead of each set's own number")
    parser.add_argument("--lr", type=float, help="leave the search out")
    parser.add_argument("--window", type=int, help="time steps computed together")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin nothing after that")
    options = parser.parse_args()
    if options.smoke:
        options.restarts, options.epochs, options.lr = 1, 1, options.lr or RATES[0]
        options.sets, options.arms = SMOKE_SETS, options.arms[:4]
    return options


def figures(row: Row) -> str:
    """A row for the terminal."""
    return (
        f"{row['accuracy']:.2%} ± {row['deviation']:.2%}  {row['seconds']:.1f} s  "
        f"{row['peak_bytes'] / 1e6:.1f} MB  lr {row['lr']:g}"
    )


class Bench:
    """A data set on a device, and how its arms are trained there."""

    def __init__(self, chosen: Set, options: argparse.Namespace) -> None:
        loaded = load(chosen.name, options)
        self.note = loaded.note
        self.device, self.restarts, self.lr = options.device, options.restarts, options.lr
        self.epochs = options.epochs or chosen.epochs
        self.train, self.test = (
            (sequences(x, chosen.pixels).to(self.device), y.to(self.device))
            for x, y in (loaded.train, loaded.test)
        )
        self.shape = list(self.train[0].shape[1:])
        self.features = loaded.vocabulary or self.shape[-1]
        self.classes = len(loaded.classes)
        on_gpu = torch.device(self.device).type == "cuda"
        self.window = options.window or (GPU_WINDOW if on_gpu else None)

    def run(self, arm: Arm) -> Row:
        """Choose a learning rate, train on all samples several times, and test."""
        untrained = arm.rule is not None and not arm.rule.head
        choice: Row = {"lr": self.lr or 1e-3, "held_out": {}}
        if self.lr is None and not untrained:
            samples, epochs = SEARCH
            inner, outer = last_of_each_class(self.train, samples)
            choice = best_rate(
                RATES, lambda lr: self._fit(arm, inner, epochs, lr, 1).evaluate(outer)[0]
            )
        many = self._fit(arm, self.train, self.epochs, choice["lr"], self.restarts)
        together = many.runs[:1] if many.stacked else many.runs
        return accuracies(many.evaluate(self.test)) | choice | {
            "epochs": 0 if untrained else self.epochs,
            "restarts": self.restarts,
            "stacked": many.stacked,
            "seconds": sum(run.seconds for run in together),
            "peak_bytes": max(run.peak_bytes for run in many.runs),
            "window": self.window,
            "machine": machine(self.device),
        }  # fmt: skip

    def _fit(self, arm: Arm, samples: Samples, epochs: int, lr: float, restarts: int) -> Restarts:
        """Several models, on a GPU side by side."""
        return tpsgd.fit_many(
            lambda: model(arm, self.features, self.classes).to(self.device), samples,
            restarts=restarts, rule=arm.rule, backprop=arm.rule is None, epochs=epochs, lr=lr,
            batch_size=BATCH, lr_schedule=tpsgd.one_cycle(0.3),
            order=None if arm.rule is None else tpsgd.simultaneous,
            window=None if arm.rule is None else self.window,
        )  # fmt: skip


def model(arm: Arm, features: int, classes: int) -> nn.Sequential:
    """Recurrent layers and a linear classifier."""
    layers: list[nn.Module] = []
    for number in range(1, arm.layers + 1):
        sequence = number < arm.layers
        if arm.loss_at is None:
            layers.append(Recurrent(features, UNITS, sequence=sequence))
        else:
            at = arm.loss_at
            layers.append(Recurrent.diagonal(features, UNITS, loss_at=at, sequence=sequence))
        features = UNITS
    return nn.Sequential(*layers, nn.Linear(UNITS, classes))


def sequences(x: torch.Tensor, pixels: bool) -> torch.Tensor:
    """Samples as sequences; of images, all pixels from the top left to the bottom right."""
    return x.flatten(1).unsqueeze(-1) if pixels else x


def memory(units: int = 64, batch: int = 32, window: int = 16) -> Row:
    """Planned and measured peaks for 49 and 784 steps, of two layers, and their ratios."""
    peaks: Row = {"units": units, "batch_size": batch, "window": window}
    settings = {"batch_size": batch, "epochs": 1, "order": tpsgd.simultaneous, "window": window}
    for place in PLACES:
        planned, measured = [], []
        for steps in (49, 784):
            layers = [
                Recurrent.diagonal(inputs, units, loss_at=place, sequence=inputs == 1)
                for inputs in (1, units)
            ]
            net = nn.Sequential(*layers, nn.Linear(units, 10))
            plan = tpsgd.plan(net, (steps, 1), samples=3 * batch, others=False, **settings)
            planned.append(plan.lines[0].peak)
            x, y = torch.rand(3 * batch, steps, 1), torch.arange(3 * batch) % 10
            measured.append(tpsgd.fit(net, (x, y), lr=1e-3, **settings).peak_bytes)
        ratio = measured[1] / measured[0]
        peaks[place] = {"planned": planned, "measured": measured, "ratio": ratio}
    return peaks


if __name__ == "__main__":
    program(main)
