"""Shallow nets: the paper's MLP and CNN on MNIST, and the CNN on CIFAR-10.

    python -m experiments.shallow --out results [--device cuda] [--only mnist-mlp]

The variants of an arm, listed in `ARMS`, are trained without the last 10,000 training samples and
compared on them; the best is then trained on the whole training set and tested. All arms use Adam
at 1e-3 and batches of 128. Seconds and bytes are those of the first restarts, which learn one by
one; a second call adds the restarts that are missing.
"""

import argparse
from dataclasses import asdict, dataclass, replace
from itertools import islice
from statistics import fmean

from torch import Tensor, nn

import tpsgd
from experiments.common import (
    Row,
    Samples,
    accuracies,
    arguments,
    hold_out_last,
    is_complete,
    load,
    origin,
    program,
    result_file,
    with_data,
)
from tpsgd import Place, Rule, rules
from tpsgd.comparison.provenance import machine
from tpsgd.engine.restarts import Restarts
from tpsgd.projections import binary, normal, per_filter
from tpsgd.zoo.words import cnn, mlp

HELD_OUT = 10_000
CLOCKED = 4  # restarts that learn one by one; the first warms up the device


@dataclass(frozen=True)
class Table:
    """One net on one data set."""

    data: str
    epochs: int
    restarts: int
    activation: type[nn.Module] = nn.LeakyReLU
    convolutional: bool = True

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
    "mnist-mlp": Table("mnist", 5, 25, convolutional=False),
    "mnist-mlp-tanh": Table("mnist", 5, 25, nn.Tanh, convolutional=False),
    "mnist-cnn": Table("mnist", 2, 25),
    "cifar10-cnn": Table("cifar10", 10, 25),
    "cifar10-cnn-short": Table("cifar10", 3, 25),
}

# An arm's variants: name -> rule; None is backprop.
ARMS: dict[str, dict[str, Rule | None]] = {
    "backprop": {"": None},
    "readout": {"": rules.readout()},
    "readout-learned": {"": rules.readout(learned=True)},
    "dfa": {"": rules.dfa()},
    **{
        name: {
            f"{p.name}, {at.value}": rule(p, at)
            for p in (normal(), per_filter(), binary())
            for at in (Place.AFTER, Place.BEFORE)
        }
        for name, rule in (("tpsgd-l2", rules.tpsgd_l2), ("tpsgd-l1", rules.tpsgd_l1))
    },
    **{
        name: {f"std {std}": rule(normal(std)) for std in (1.0, 0.01)}
        for name, rule in (("drtp", rules.drtp), ("sdfa", rules.sdfa))
    },
    **{  # frozen-long spends the epochs of all blocks on the last one
        name: {loss.name: rules.frozen(loss) for loss in (tpsgd.cross_entropy, tpsgd.mse)}
        for name in ("frozen", "frozen-long")
    },
}


def main() -> None:
    """Run the tables asked for and write one JSON file."""
    parser = arguments(__doc__)
    parser.add_argument("--only", nargs="+", choices=list(TABLES), default=list(TABLES))
    parser.add_argument("--arm", choices=list(ARMS), help="only this one; the others stay")
    parser.add_argument("--restarts", type=int, help="fewer, for a quick look")
    parser.add_argument("--max-train", type=int, help="fewer samples, for a quick look")
    options = parser.parse_args()
    if options.smoke:
        options.restarts = 1
    words = [f"--restarts {options.restarts}"] if options.restarts else []
    record, save = result_file(options, "shallow")
    record |= origin("shallow", options.device, *words)
    for name, bench in with_data(options.only, lambda name: Bench(TABLES[name], options)):
        table = bench.table
        settings = asdict(table) | {"activation": table.activation.__name__}
        settings["restarts"] = bench.restarts
        rows = record.setdefault("tables", {}).setdefault(name, {"arms": {}})
        rows |= {"settings": settings, "held_out": HELD_OUT, "machine": machine(options.device)}
        for arm in [options.arm] if options.arm else list(ARMS):
            if is_complete(rows["arms"].get(arm), bench.restarts, options):
                continue
            row = rows["arms"].get(arm)
            begun = row is not None and not options.again
            row = rows["arms"][arm] = bench.more(arm, row) if begun else bench.run(arm)
            save()
            figures = f"{row['accuracy']:.2%} ± {row['deviation']:.2%}  {row['seconds']:6.2f} s"
            print(f"{name:18} {arm:16} {figures}  {row['variant']}", flush=True)


class Bench:
    """A table's data on a device, and how its arms are trained there."""

    def __init__(self, table: Table, options: argparse.Namespace) -> None:
        self.table = replace(table, epochs=1) if options.smoke else table
        self.most = 2 if options.smoke else None  # variants of an arm
        self.restarts, self.device = options.restarts or table.restarts, options.device
        loaded = load(table.data, options)
        x, y, x_test, y_test = (t.to(self.device) for t in (*loaded.train, *loaded.test))
        x, x_test = standardised(x, x_test)
        self.shape, self.train, self.test = loaded.shape, (x, y), (x_test, y_test)

    def run(self, arm: str) -> Row:
        """Choose the arm's variant on held-out samples, then train on all samples and test."""
        variants = dict(islice(ARMS[arm].items(), self.most))
        part, last = hold_out_last(*self.train, min(HELD_OUT, len(self.train[1]) // 6))
        held_out = {
            label: fmean(self.fit(arm, rule, part, 2).evaluate(last))
            for label, rule in (variants.items() if len(variants) > 1 else ())
        }
        label = max(held_out, key=lambda k: held_out[k]) if held_out else next(iter(variants))
        clocked = self.fit(arm, variants[label], self.train, min(CLOCKED, self.restarts), False)
        runs = clocked.runs[1:] or clocked.runs
        row = accuracies(clocked.evaluate(self.test)) | {
            "variant": label,
            "held_out": held_out,
            "seconds": fmean(run.seconds for run in runs),
            "seconds_each": [run.seconds for run in runs],
            "peak_bytes": max(run.peak_bytes for run in runs),
            "kept_bytes": runs[0].kept_bytes,
            "sample_passes": runs[0].sample_passes,
            "settings": runs[0].settings,
        }
        return self.more(arm, row)

    def more(self, arm: str, row: Row) -> Row:
        """The row with the restarts that it lacks; where that is faster, they learn stacked."""
        done = len(row["accuracies"])
        if done >= self.restarts:
            return row
        rule, missing = ARMS[arm][row["variant"]], self.restarts - done
        many = self.fit(arm, rule, self.train, missing, None, seed=done)
        return row | accuracies(many.evaluate(self.test), row)

    def fit(
        self,
        arm: str,
        rule: Rule | None,
        samples: Samples,
        restarts: int,
        stacked: bool | None = None,
        seed: int = 0,
    ) -> Restarts:
        """Restarts of one arm; a rule that needs the network's output learns simultaneously."""
        waits = rule is not None and rule.needs_output
        return tpsgd.fit_many(
            lambda: self.table.model(self.shape).to(self.device),
            samples,
            restarts=restarts,
            rule=rule,
            backprop=rule is None,
            order=tpsgd.simultaneous if waits else tpsgd.sequential,
            epochs=self.table.epochs_of(arm),
            stacked=stacked,
            seed=seed,
        )


def standardised(x: Tensor, x_test: Tensor) -> tuple[Tensor, Tensor]:
    """Colour images with mean 0 and deviation 1 per channel; grey ones as they are, in [0, 1]."""
    if x.shape[1] == 1:
        return x, x_test
    mean, std = x.mean((0, 2, 3), keepdim=True), x.std((0, 2, 3), keepdim=True)
    return (x - mean) / std, (x_test - mean) / std


if __name__ == "__main__":
    program(main)
