"""Properties of the sequences that recurrent nets are trained on (the paper's table in appendix D).

    python -m experiments.sets --out results [--only eeg]

Sizes, type and range of the features and the share that is zero are those of the samples as nets
get them; the file has the paper's figures for the same sets beside them. To these come the smallest
and the largest class, and the test accuracy of always naming the most frequent training class. Sets
that are not on this machine are left out.
"""

import json
from pathlib import Path

import torch
from torch import Tensor

import tpsgd
from experiments.common import Row, program
from experiments.rows import Rows, leave_out, row_arguments
from tpsgd.data import Data
from tpsgd.data.registry import path

SETS = (
    *("seq-mnist-rows", "seq-mnist-pixels", "eeg", "eeg-rows", "ucf101"),
    *("tweets", "tweets-vectors"),
)
SMOKE = ("digits",)
PAPER = Path(__file__).resolve().parents[1] / "results" / "paper.json"


def properties(data: Data) -> Row:
    """The figures of a data set."""
    (x, y), (_, y_test) = data.train, data.test
    counts = torch.bincount(y, minlength=len(data.classes))
    largest = int(counts.argmax())
    return {
        "train": len(y),
        "test": len(y_test),
        "classes": len(data.classes),
        **_shape(data),
        **_features(data, x),
        "smallest_class": float(counts.min() / len(y)),
        "largest_class": float(counts.max() / len(y)),
        "majority_accuracy": float((y_test == largest).float().mean()),
        "chance": 1 / len(data.classes),
        "note": data.note,
    }


def _shape(data: Data) -> Row:
    """Steps and features of a sequence; images are given by their shape alone."""
    row: Row = {"shape": list(data.shape)}
    if data.vocabulary is not None:
        return row | {"steps": data.shape[0], "features": data.vocabulary}
    if len(data.shape) == 2:
        return row | {"steps": data.shape[0], "features": data.shape[1]}
    return row


def _features(data: Data, x: Tensor) -> Row:
    """Type, range and share of zeros; a token stands for a one-hot vector."""
    if data.vocabulary is not None:
        return {"type": "binary", "range": [0, 1], "zeros": 1 - 1 / data.vocabulary}
    whole = bool((x == x.round()).all())
    low, high = x.aminmax()
    zeros = float((x == 0).float().mean())
    return {"type": "int" if whole else "float", "range": [float(low), float(high)], "zeros": zeros}


def main() -> None:
    """Describe every data set that is here; the file is written after each."""
    parser = row_arguments(__doc__, restarts=1)
    parser.add_argument("--only", choices=SETS)
    options = parser.parse_args()
    options.device = "cpu"
    rows = Rows("sets", options)
    printed = json.loads(PAPER.read_text(encoding="utf-8")).get("sets", {})
    for name in SMOKE if options.smoke else [options.only] if options.only else SETS:
        if path(name) is None:
            leave_out(name, ValueError(f"not on this machine; tpsgd data fetch {name} helps"))
            continue
        row = rows.measure(
            name, {"data": name}, lambda name=name: properties(tpsgd.data.load(name))
        )
        if row is None:
            continue
        row["paper"] = printed.get(name)
        rows.save()
        size = f"{row['train']:,} + {row['test']:,}, {row['shape']}, {row['classes']} classes"
        share = f"zeros {row['zeros']:.1%}, majority {row['majority_accuracy']:.1%}"
        print(f"{name:18} {size}, {row['type']} in {row['range']}, {share}", flush=True)


if __name__ == "__main__":
    program(main)
