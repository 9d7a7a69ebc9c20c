"""The distribution of P: normal, uniform and binary class codes on the paper's MLP, 25 restarts.

    python -m experiments.distributions --out results [--only leaky]

The paper says that sampling P "from different distributions makes no noticeable difference". Codes
of the three distributions have mean 0 and the same deviation; restarts with the same seed begin
with the same weights and see the samples in the same order. The nets
are those of `experiments.shallow`: 784-256-10 on MNIST, 5 epochs per block, Adam at 1e-3, batches
of 128, on 20,000 training images. Accuracy is that on 4,000 others, which are held out. Backprop
and frozen hidden layers are the controls.
"""

from functools import partial

import torch

import tpsgd
from experiments.common import Row, Samples, hold_out_last, load, program
from experiments.rows import Rows, row_arguments, shown
from experiments.shallow import HELD_OUT, TABLES
from tpsgd import Place, Rule, rules
from tpsgd.projections import binary, normal, uniform

CODES = (normal(), uniform(), binary())
NETS = {"leaky": TABLES["mnist-mlp"], "tanh": TABLES["mnist-mlp-tanh"]}
ARMS: dict[str, Rule | None] = {
    **{
        f"{name}, {at.value}, {p.name}": rule(p, at)
        for name, rule in (("tpsgd-l2", rules.tpsgd_l2), ("tpsgd-l1", rules.tpsgd_l1))
        for at in (Place.AFTER, Place.BEFORE)
        for p in CODES
    },
    "frozen": rules.frozen(tpsgd.mse),
    "backprop": None,
}


def main() -> None:
    """Train every arm with every seed; the file is written after every restart."""
    parser = row_arguments(__doc__, 25)
    parser.add_argument("--only", nargs="+", choices=list(NETS), default=list(NETS))
    parser.add_argument("--max-train", type=int, default=24_000, help="images, a sixth held out")
    options = parser.parse_args()
    torch.set_num_threads(1)
    loaded = load("mnist", options)
    count = min(HELD_OUT, len(loaded.train[1]) // 6)
    rows = Rows("distributions", options, {"held_out": count})
    rows.save()  # what the file says of itself, also where no row is missing
    train, held_out = hold_out_last(*loaded.train, count)
    restarts = options.restarts
    for name in options.only:
        for options.restarts in range(1, restarts + 1):  # all arms with one seed, then the next
            for arm in ARMS:
                row = measure(rows, name, arm, loaded.shape, train, held_out)
                if row is not None and options.restarts == restarts:
                    print(f"{name:6} {arm:40} {shown(row)}", flush=True)


def measure(
    rows: Rows, name: str, arm: str, shape: tuple[int, ...], train: Samples, held_out: Samples
) -> Row | None:
    """The row of an arm, with the restarts that are asked for so far."""
    table, rule = NETS[name], ARMS[arm]
    epochs = 1 if rows.options.smoke else table.epochs
    fit = partial(
        tpsgd.fit_many, partial(table.model, shape), train, rule=rule, backprop=rule is None,
        epochs=epochs, order=tpsgd.sequential,
    )  # fmt: skip
    settings: Row = {"net": name, "arm": arm, "epochs": epochs, "train": len(train[1])}
    return rows.restart(f"{name}, {arm}", settings, fit, held_out)


if __name__ == "__main__":
    program(main)
