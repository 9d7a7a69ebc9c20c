"""Shallow nets: the paper's MLP and CNN on MNIST, and the CNN on CIFAR-10.

    python -m experiments.shallow --out results [--device cuda] [--only mnist-mlp]

For every arm, the variants listed in `ARMS` are compared on the last 10,000 training samples (the
others train); the best is then trained afresh on the whole training set and tested. Backprop and
the frozen control stand beside every rule. All arms use Adam at 1e-3 and batches of 128.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor, nn
from tpsgd.engine.restarts import Restarts, fit_many
from tpsgd.engine.schedules import sequential, simultaneous

from tpsgd import data, projections, rules
from tpsgd.comparison.provenance import machine, versions
from tpsgd.projections import binary, normal, per_filter
from tpsgd.rules import Place, Rule
from tpsgd.zoo.words import cnn, mlp

HELD_OUT = 10_000


@dataclass(frozen=True)
class Table:
    """One net on one data set."""

    data: str
    epochs: int
    restarts: int
    activation: type[nn.Module] = nn.LeakyReLU
    convolutional: bool = True
    paper: str = ""

    def model(self, shape: tuple[int, ...]) -> nn.Sequential:
        """The paper's two-layer MLP, or its two convolutions and a linear layer."""
        if self.convolutional:
            return cnn(shape, [(16, 5), (16, 5)], 10, self.activation)
        return mlp(shape, [256], 10, self.activation)

    def epochs_of(self, arm: str) -> int | list[int]:
        """Per block; the long control spends all blocks' epochs on the last one."""
        hidden = 2 if self.convolutional else 1
        if arm == "frozen-long":
            return [0] * hidden + [self.epochs * (hidden + 1)]
        return self.epochs


TABLES = {
    "mnist-mlp": Table("mnist", 5, 25, convolutional=False, paper="tpSGD 88.3"),
    "mnist-mlp-tanh": Table("mnist", 5, 5, nn.Tanh, convolutional=False),
    "mnist-cnn": Table("mnist", 2, 5, paper="tpSGD 96.6, backprop 97.1"),
    "cifar10-cnn": Table("cifar10", 10, 5, paper="tpSGD 46.5, backprop 46.8"),
    "cifar10-cnn-short": Table("cifar10", 3, 5, paper="tpSGD 46.5, backprop 46.8"),
}

# An arm's variants: name -> rule; None is backprop. Grids of cells are for convolutions alone.
ARMS: dict[str, dict[str, Rule | None]] = {
    "backprop": {"": None},
    "readout": {
        f"at most {n} features": rules.readout(features=n) for n in (16, 64, 256, 1024, 2048)
    },
    "readout-learned": {
        f"at most {n} features": rules.readout(True, features=n) for n in (16, 64, 256, 1024, 2048)
    },
    "dfa": {"": rules.dfa()},
    "tpsgd-l2": {
        f"{p.name}, {at.value}": rules.tpsgd_l2(p, at)
        for p in (normal(), per_filter(), binary())
        for at in (Place.AFTER, Place.BEFORE)
    },
    "tpsgd-l1": {
        f"{p.name}, {at.value}": rules.tpsgd_l1(p, at)
        for p in (normal(), per_filter(), binary())
        for at in (Place.AFTER, Place.BEFORE)
    },
    "drtp": {f"std {std}": rules.drtp(projections.normal(std)) for std in (1.0, 0.01)},
    "sdfa": {f"std {std}": rules.sdfa(projections.normal(std)) for std in (1.0, 0.01)},
    "frozen": {loss.name: rules.frozen(loss) for loss in (rules.cross_entropy, rules.mse)},
    # the same with the passes of all blocks spent on the head
    "frozen-long": {loss.name: rules.frozen(loss) for loss in (rules.cross_entropy, rules.mse)},
}


def main() -> None:
    """Run the tables asked for and write one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", choices=list(TABLES))
    parser.add_argument("--arm", choices=list(ARMS), help="only this one; the others stay")
    parser.add_argument("--restarts", type=int, help="fewer, for a quick look")
    wanted = parser.parse_args()
    names = [wanted.only] if wanted.only else list(TABLES)
    file = wanted.out / "shallow.json"
    wanted.out.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {
        "experiment": "shallow",
        "command": "python -m experiments.shallow --out results"
        + (f" --restarts {wanted.restarts}" if wanted.restarts else ""),
        "machine": machine(wanted.device),
        "versions": versions(),
        "tables": json.loads(file.read_text())["tables"] if file.exists() else {},
    }
    for name in names:
        made = run(TABLES[name], wanted.device, wanted.restarts, wanted.arm)
        if wanted.arm and name in record["tables"]:
            made["arms"] = record["tables"][name]["arms"] | made["arms"]
        record["tables"][name] = made
        file.write_text(json.dumps(record, indent=1))
    for name in names:
        print(f"\n{name}")
        for arm, row in record["tables"][name]["arms"].items():
            figures = f"{row['accuracy']:.2%} ± {row['deviation']:.2%}"
            print(f"  {arm:16} {figures}  {row['seconds']:6.2f} s  {row['variant']}")


def run(
    table: Table, device: str, restarts: int | None = None, only: str | None = None
) -> dict[str, Any]:
    """Choose every arm's variant on held-out data, then train on all and test."""
    loaded = data.load(table.data)
    x, x_test = standardised(loaded.train[0].to(device), loaded.test[0].to(device))
    y, y_test = loaded.train[1].to(device), loaded.test[1].to(device)
    part = (x[:-HELD_OUT], y[:-HELD_OUT]), (x[-HELD_OUT:], y[-HELD_OUT:])

    def factory() -> nn.Module:
        return table.model(loaded.shape).to(device)

    arms = {}
    for name, variants in ARMS.items():
        if only not in (None, name):
            continue
        epochs = table.epochs_of(name)
        if name.startswith("readout") and not table.convolutional:
            variants = {"whole": variants["at most 256 features"]}
        held_out = {
            label: fmean(train(rule, factory, part[0], epochs, 2).evaluate(part[1]))
            for label, rule in (variants.items() if len(variants) > 1 else ())
        }
        label = max(held_out, key=lambda k: held_out[k]) if held_out else next(iter(variants))
        many = train(variants[label], factory, (x, y), epochs, restarts or table.restarts)
        arms[name] = summary(many, many.evaluate((x_test, y_test)), label, held_out)
        print(f"{table.data} {name}: {arms[name]['accuracy']:.2%}", flush=True)
    settings = asdict(table) | {"activation": table.activation.__name__}
    settings["restarts"] = restarts or table.restarts
    return {"settings": settings, "held_out": HELD_OUT, "machine": machine(device), "arms": arms}


def train(
    rule: Rule | None,
    factory: Callable[[], nn.Module],
    samples: tuple[Tensor, Tensor],
    epochs: int | list[int],
    restarts: int,
) -> Restarts:
    """Restarts of one arm; rules that wait for the output learn simultaneously."""
    waits = rule is not None and rule.needs_output
    return fit_many(
        factory,
        samples,
        restarts=restarts,
        rule=rule,
        backprop=rule is None,
        schedule=simultaneous if waits else sequential,
        epochs=epochs,
        stacked=False,  # one by one, so that seconds and bytes are those of one run
    )


def summary(
    many: Restarts, accuracies: list[float], variant: str, held_out: dict[str, float]
) -> dict[str, Any]:
    """One arm's row: accuracy, time and memory of the same runs."""
    runs = many.runs[1:] or many.runs  # the first run also warms the device up
    return {
        "accuracy": fmean(accuracies),
        "deviation": stdev(accuracies) if len(accuracies) > 1 else 0.0,
        "accuracies": accuracies,
        "variant": variant,
        "held_out": held_out,
        "seconds": fmean(run.seconds for run in runs),
        "peak_bytes": max(run.peak_bytes for run in many.runs),
        "kept_bytes": many.runs[0].kept_bytes,
        "sample_passes": many.runs[0].sample_passes,
        "settings": many.runs[0].settings,
    }


def standardised(x: Tensor, x_test: Tensor) -> tuple[Tensor, Tensor]:
    """Colour images with mean 0 and deviation 1 per channel; grey ones as they are, in [0, 1]."""
    if x.shape[1] == 1:
        return x, x_test
    mean, std = x.mean((0, 2, 3), keepdim=True), x.std((0, 2, 3), keepdim=True)
    return (x - mean) / std, (x_test - mean) / std


if __name__ == "__main__":
    main()
