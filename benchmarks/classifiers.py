"""TPSGDClassifier and scikit-learn's MLPClassifier on MNIST: CPU seconds in turns, and accuracy.

    TPSGD_DATA=FOLDER python benchmarks/classifiers.py --out results/classifiers.json

One hidden layer of 256 ReLUs, Adam at 1e-3, batches of 128, five epochs, no early stopping, no
penalty, one thread. The control has random hidden layers.
"""

import argparse
import json
import time
import warnings
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import sklearn
import torch
from sklearn.exceptions import ConvergenceWarning
from sklearn.neural_network import MLPClassifier
from threadpoolctl import threadpool_limits

import tpsgd
from tpsgd.comparison.provenance import machine, versions

EPOCHS, BATCH, WIDTH = 5, 128, 256


def classifiers(seed: int) -> dict[str, Any]:
    """The classifiers with the same settings."""
    local = {"epochs": EPOCHS, "batch_size": BATCH, "tol": None, "random_state": seed}
    return {
        "MLPClassifier": MLPClassifier(
            (WIDTH,), batch_size=BATCH, max_iter=EPOCHS, n_iter_no_change=EPOCHS + 1, tol=0.0,
            alpha=0.0, learning_rate_init=1e-3, random_state=seed,
        ),
        "readout": tpsgd.TPSGDClassifier((WIDTH,), "readout", **local),
        "readout-learned": tpsgd.TPSGDClassifier((WIDTH,), "readout-learned", **local),
        "frozen": tpsgd.TPSGDClassifier((WIDTH,), "frozen", **local),
    }  # fmt: skip


def measure(train: Any, test: Any, turns: int) -> dict[str, Any]:
    """Every classifier once in each turn, with the turn as its seed."""
    rows: dict[str, dict[str, list[float]]] = {}
    for seed in range(turns):
        for name, classifier in classifiers(seed).items():
            began = time.process_time()
            classifier.fit(*train)
            took = time.process_time() - began
            row = rows.setdefault(name, {"seconds": [], "accuracy": []})
            row["seconds"].append(round(took, 3))
            row["accuracy"].append(classifier.score(*test))
            print(f"{name}: {took:.2f} s, {row['accuracy'][-1]:.2%}", flush=True)
    best = rows["MLPClassifier"]["seconds"]
    for row in rows.values():
        ratios = [a / b for a, b in zip(row["seconds"], best, strict=True)]
        row |= {"median_seconds": median(row["seconds"]), "mean_accuracy": mean(row["accuracy"])}
        row["ratio"] = median(ratios)
    return rows


def main() -> None:
    """Measure in float32 and float64, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore", ConvergenceWarning)  # MLPClassifier warns after its last epoch
    torch.set_num_threads(1)
    data = tpsgd.data.load("mnist")
    sets = [(x.flatten(1).numpy(), y.numpy()) for x, y in (data.train, data.test)]
    arms = {}
    with threadpool_limits(1):
        for numbers in (np.float32, np.float64):
            train, test = [(x.astype(numbers), y) for x, y in sets]
            arms[numbers.__name__] = measure(train, test, arguments.turns)
    settings = {"hidden": [WIDTH], "epochs": EPOCHS, "batch_size": BATCH, "turns": arguments.turns}
    write_result(arguments.out, "classifiers", f" --turns {arguments.turns}", settings, arms)


def write_result(file: Path, name: str, options: str, settings: Any, arms: Any) -> None:
    """Write what a benchmark of estimators has measured, with the machine and the versions."""
    result = {
        "benchmark": name,
        "command": f"python benchmarks/{name}.py{options}",
        "machine": machine(),
        "versions": versions() | {"scikit-learn": sklearn.__version__},
        "settings": settings,
        "arms": arms,
    }
    file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
