"""Which rule, at what cost: every rule on a small MLP and a small CNN, accuracy, time and memory.

    python -m experiments.cost --out results [--only mnist-mlp]

Backprop, every rule of the library, and random layers with a trained and with a ridge head, with
default memory settings, equal passes, and a learning rate searched for each on held-out training
samples. Seconds and bytes are those of the same training runs. The deep nets of the figure in
docs/cost.md are in deep.json.
"""

from dataclasses import asdict, dataclass, replace

import torch

import tpsgd
from experiments.common import Row, program
from experiments.equal import arm_row
from experiments.rows import Rows, leave_out, row_arguments
from tpsgd import rules
from tpsgd.zoo.words import factory

CONTROLS = ("backprop-checkpointed", "elm")
LEFT_OUT = ("random",)  # nothing is trained


@dataclass(frozen=True)
class Net:
    """A net, its data and how long it is trained."""

    data: str
    model: str
    activation: str
    epochs: int
    max_train: int | None
    restarts: int


NETS = {
    "mnist-mlp": Net("mnist", "mlp:256,256", "tanh", 5, 10_000, 3),
    "cifar10-cnn": Net("cifar10", "cnn:16x5,16x5", "tanh", 5, 2_000, 2),
}


def main() -> None:
    """Compare all rules on the nets asked for; the file is written after each net."""
    parser = row_arguments(__doc__, 0)
    parser.add_argument("--only", nargs="+", choices=list(NETS), default=list(NETS))
    parser.add_argument("--max-train", type=int, help="other numbers of samples; 0: all")
    options = parser.parse_args()
    torch.set_num_threads(1)
    nets = {name: NETS[name] for name in options.only}
    if options.max_train is not None:
        nets = {k: replace(net, max_train=options.max_train or None) for k, net in nets.items()}
    if options.smoke:
        small = replace(NETS["mnist-mlp"], data="digits", epochs=1, max_train=150, restarts=1)
        nets = {"digits-mlp": small}
    rows = Rows("cost", options, {"optimizer": "adam", "lr": "searched"})
    words = [word for word in rules.ALL if word not in LEFT_OUT]
    for name, net in nets.items():
        try:
            data = tpsgd.data.load(net.data, max_train=net.max_train)
        except tpsgd.TpsgdError as error:
            leave_out(name, error)
            continue
        measure(rows, name, net, data, words)


def measure(rows: Rows, name: str, net: Net, data: tpsgd.data.Data, words: list[str]) -> None:
    """The row of a net, with every arm."""
    make = factory(net.model, data.shape, len(data.classes), net.activation)

    def compute() -> Row:
        record = tpsgd.compare(
            data, make, [*words, *CONTROLS], restarts=net.restarts, epochs=net.epochs,
            batch_size=128, lr="search", device=rows.options.device,
        )  # fmt: skip
        if record.interrupted:
            raise KeyboardInterrupt
        print(f"{name}\n{record}\n", flush=True)
        arms = {r.arm.name: arm_row(r) for r in record.results if r.counts}
        return {"arms": arms, "failed": {r.arm.name: r.error for r in record.results if r.error}}

    settings = asdict(net) | {"rules": words}
    rows.measure(name, settings, compute)


if __name__ == "__main__":
    program(main)
