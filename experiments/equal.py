"""What is equal in a comparison: passes, reads, seconds or searched rates; does the order change?

    python -m experiments.equal --out results [--only digits-mlp]

With n epochs per block, a net of b blocks trained block by block reads the samples n b times, and
backprop n times. So a rule that is ahead of backprop at equal passes may be behind at equal reads.
Every net is compared in each way; backprop and frozen random layers are in every comparison. Rates
are Adam's 0.001 unless they are searched, for every arm alike, on held-out training samples. Each
difference has its interval and a paired t test, corrected by Holm's procedure.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

import tpsgd
from experiments.common import Row, program
from experiments.rows import Rows, leave_out, row_arguments
from tpsgd.cli.demo import deep_cnn
from tpsgd.comparison.results import Result
from tpsgd.zoo.words import factory

ARMS = ("readout-learned", "readout", "tpsgd-l2")
WAYS: dict[str, dict[str, Any]] = {
    "passes": {},
    "reads": {"equal": "reads"},
    "seconds": {"equal": "seconds"},
    "searched rates": {"lr": "search"},
    "reads, searched rates": {"equal": "reads", "lr": "search"},
}


@dataclass(frozen=True)
class Net:
    """A net, its data, and the epochs of a block at equal passes."""

    data: str
    model: str
    activation: str
    epochs: int
    batch_size: int
    arms: tuple[str, ...] = ARMS
    max_train: int | None = None


NETS = {
    "digits-mlp": Net("digits", "mlp:128,128", "tanh", 10, 32, (*ARMS, "elm")),
    "digits-cnn": Net("digits", "cnn:16x3,32x3", "leaky-relu", 6, 32, (*ARMS, "elm")),
    "digits-deep": Net("digits", "8-layer CNN", "leaky-relu", 4, 32, (*ARMS, "elm")),
    "mnist-mlp": Net("mnist", "mlp:256,256", "relu", 5, 128),
    "cifar10-cnn": Net("cifar10", "cnn:16x5,16x5", "leaky-relu", 5, 128, max_train=2_000),
}


def main() -> None:
    """Compare the nets asked for in every way; the file is written after every comparison."""
    parser = row_arguments(__doc__)
    parser.add_argument("--only", nargs="+", choices=list(NETS), default=list(NETS))
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--max-train", type=int, help="other numbers of samples; 0: all")
    options = parser.parse_args()
    torch.set_num_threads(1)
    nets = {name: NETS[name] for name in options.only}
    if options.max_train is not None:
        nets = {k: replace(net, max_train=options.max_train or None) for k, net in nets.items()}
    if options.smoke:
        nets = {"digits-mlp": replace(NETS["digits-mlp"], epochs=1, max_train=200)}
        options.ways = ["passes", "reads"]
    rows = Rows("equal", options, {"optimizer": "adam, 0.001 unless searched"})
    for name, net in nets.items():
        try:
            data = tpsgd.data.load(net.data, max_train=net.max_train)
        except tpsgd.TpsgdError as error:
            leave_out(name, error)
            continue
        for way in options.ways:
            measure(rows, name, net, way, data)


def measure(rows: Rows, name: str, net: Net, way: str, data: tpsgd.data.Data) -> None:
    """The row of one net, compared in one way."""
    settings = asdict(net) | {"arms": list(net.arms), "way": way, **WAYS[way]}
    settings |= {"train": len(data.train[1]), "restarts": rows.options.restarts}
    make: Callable[[], nn.Module] = deep_cnn
    if net.model != "8-layer CNN":
        make = factory(net.model, data.shape, len(data.classes), net.activation)

    def compute() -> Row:
        record = tpsgd.compare(
            data, make, net.arms, restarts=rows.options.restarts, epochs=net.epochs,
            batch_size=net.batch_size, device=rows.options.device, **WAYS[way],
        )  # fmt: skip
        if record.interrupted:
            raise KeyboardInterrupt
        print(f"{name}, {way}\n{record}\n", flush=True)
        tests, arms = record.differences(), {}
        for result in record.results:
            arms[result.arm.name] = arm_row(result) | {
                f"to_{other}": asdict(each[result.arm.name])
                for other, each in tests.items()
                if result.arm.name in each
            }
        return {"arms": arms}

    rows.measure(f"{name}, {way}", settings, compute)


def arm_row(result: Result) -> Row:
    """The restarts of an arm: accuracies, seconds, reads of the data, memory, rate."""
    runs = result.runs
    row: Row = {"accuracies": result.accuracies, "seeds": [run.seed for run in runs]}
    row |= {"seconds_each": [run.seconds for run in runs], "reads": [reads(run) for run in runs]}
    return row | {"total_bytes": result.largest.total_bytes if runs else None, "lr": result.arm.lr}


def reads(run: tpsgd.Run) -> int:
    """How often a run went through the training samples: block by block, or for all together."""
    if run.settings.get("order") == "sequential":
        return len(run.history)
    return max((epoch.epoch for epoch in run.history), default=0)


if __name__ == "__main__":
    program(main)
