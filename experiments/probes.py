"""What each block of an MLP represents, under backprop, three local rules and without learning.

    python -m experiments.probes --out results

Four hidden layers of 256 on 10,000 images of MNIST; all blocks learn at the same time. On 1,000
other training images: the accuracy of a linear probe of each block, its effective rank, how alike
its outputs are to those of the first restart of backprop (CKA), and, after every epoch, the angle
between its local gradient and backprop's.
"""

from typing import Any

import torch

import tpsgd
from experiments.common import Row, load, program
from experiments.rows import Rows, row_arguments
from tpsgd.engine.restarts import make_model
from tpsgd.zoo.words import factory
from tpsgd_probes import (
    Probes,
    alignment,
    block_outputs,
    halves,
    linear_cka,
    probe_accuracy,
    rank_of,
)

ARMS = ("backprop", "readout-learned", "tpsgd-l2", "dfa", "frozen")
TRAIN, BATCH, EPOCHS = 10_000, 1_000, 5


def main() -> None:
    """Train every arm; the file is written after every restart."""
    parser = row_arguments(__doc__, 3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = Rows("probes", options, {"model": "mlp:256,256,256,256", "activation": "relu"})
    data = load("mnist", options)
    count = min(BATCH, len(data.train[1]) // 6)
    train, batch = (
        (data.train[0][part], data.train[1][part]) for part in (slice(TRAIN), slice(-count, None))
    )
    make = factory("mlp:256,256,256,256", data.shape, 10, "relu")
    epochs = 1 if options.smoke else EPOCHS
    reference = make_model(make, 0)
    tpsgd.fit_backprop(reference, train, epochs=epochs, batch_size=128)
    for arm in ARMS:

        def measured(seed: int, arm: str = arm) -> Row:
            model, watch = make_model(make, seed), Probes(*batch, [alignment()])
            settings: Any = {"epochs": epochs, "batch_size": 128, "seed": seed}
            if arm == "backprop":
                tpsgd.fit_backprop(model, train, **settings)
            else:
                settings |= {"order": tpsgd.simultaneous, "callbacks": [watch]}
                tpsgd.fit(model, train, rule=arm, **settings)
            row = {"accuracy": tpsgd.evaluate(model, batch), "angles": angles(watch)}
            return row | at_the_end(model, reference, *batch)

        settings = {"arm": arm, "train": len(train[1]), "batch": count, "epochs": epochs}
        row = rows.each(arm, settings, measured)
        if row is not None:
            print(arm, [{k: v for k, v in one.items() if k != "angles"} for one in row["each"]])


def angles(watch: Probes) -> list[list[float | None]]:
    """Degrees of each block that was measured, by epoch."""
    blocks = sorted({row["block"] for row in watch.rows})
    return [watch.series("alignment", block) for block in blocks]


def at_the_end(model: Any, reference: Any, x: torch.Tensor, y: torch.Tensor) -> Row:
    """The measures of every block of a trained model."""
    with torch.no_grad():
        pairs = list(zip(block_outputs(model, x), block_outputs(reference, x), strict=True))
    one, other = halves(len(y))
    return {
        "probe": [probe_accuracy(h[one], y[one], h[other], y[other]) for h, _ in pairs],
        "rank": [rank_of(h) for h, _ in pairs],
        "cka": [linear_cka(h, like) for h, like in pairs],
    }


if __name__ == "__main__":
    program(main)
