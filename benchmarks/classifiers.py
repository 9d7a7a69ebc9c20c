"""TPSGDClassifier and scikit-learn's MLPClassifier on MNIST: CPU seconds in turns, and accuracy.

    TPSGD_DATA=FOLDER python benchmarks/classifiers.py --out results/classifiers.json

One hidden layer of 256 ReLUs, Adam at 1e-3, batches of 128, five epochs, no early stopping, no
penalty, one thread. The control has random hidden layers.

    TPSGD_DATA=FOLDER python benchmarks/classifiers.py --defaults --out results/classifiers.json

Both with their defaults on seven sets, in turns with other test sets: accuracy, rank and CPU
seconds. It is added to the file. The defaults were chosen with other seeds, from 100 on.
"""

import argparse
import json
import time
import warnings
from itertools import product
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import sklearn
import torch
from scipy.stats import rankdata
from sklearn import datasets
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier
from sklearn.preprocessing import StandardScaler
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
    parser.add_argument("--defaults", action="store_true", help="both with their defaults")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore", ConvergenceWarning)  # MLPClassifier warns after its last epoch
    torch.set_num_threads(1)
    if arguments.defaults:
        record = json.loads(arguments.out.read_text(encoding="utf-8"))
        with threadpool_limits(1):
            record["defaults"] = with_defaults(arguments.turns)
        arguments.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        return
    data = tpsgd.data.load("mnist")
    sets = [(x.flatten(1).numpy(), y.numpy()) for x, y in (data.train, data.test)]
    arms = {}
    with threadpool_limits(1):
        for numbers in (np.float32, np.float64):
            train, test = [(x.astype(numbers), y) for x, y in sets]
            arms[numbers.__name__] = measure(train, test, arguments.turns)
    settings = {"hidden": [WIDTH], "epochs": EPOCHS, "batch_size": BATCH, "turns": arguments.turns}
    write_result(arguments.out, "classifiers", f" --turns {arguments.turns}", settings, arms)


def tables() -> dict[str, tuple[Any, Any]]:
    """Six tables, and 5,000 digits of MNIST, pixels from 0 to 1."""
    known = ("iris", "wine", "breast_cancer", "digits")
    loaded = {name: getattr(datasets, f"load_{name}")(return_X_y=True) for name in known}
    easy = {"n_samples": 400, "n_features": 10, "n_informative": 6, "n_classes": 3}
    hard = {"n_samples": 1000, "n_features": 20, "n_informative": 8, "n_classes": 4}
    loaded["easy"] = datasets.make_classification(**easy, class_sep=1.5, random_state=0)
    loaded["hard"] = datasets.make_classification(**hard, flip_y=0.05, random_state=0)
    x, y = tpsgd.data.load("mnist").train
    return loaded | {"mnist": (x[:5000].flatten(1).numpy(), y[:5000].numpy())}


def with_defaults(turns: int) -> dict[str, Any]:
    """Accuracies and seconds of both classifiers on every set, mean ranks and total seconds."""
    kinds = {"MLPClassifier": MLPClassifier, "TPSGDClassifier": tpsgd.TPSGDClassifier}
    rows: dict[str, Any] = {}
    for (name, (X, y)), seed in product(tables().items(), range(turns)):
        split: Any = train_test_split(X, y, test_size=0.25, random_state=seed, stratify=y)
        samples, held_out, labels, held_out_labels = split
        if name != "mnist":
            scaler = StandardScaler().fit(samples)
            samples, held_out = scaler.transform(samples), scaler.transform(held_out)
        for kind, make in kinds.items():
            began = time.process_time()
            classifier = make(random_state=seed).fit(samples, labels)
            row = rows.setdefault(kind, {}).setdefault(name, {"accuracies": [], "seconds": []})
            row["seconds"].append(round(time.process_time() - began, 3))
            row["accuracies"].append(classifier.score(held_out, held_out_labels))
            print(f"{name} {kind}: {row['accuracies'][-1]:.2%}, {row['seconds'][-1]} s", flush=True)
    means = [[mean(row["accuracies"]) for row in rows[kind].values()] for kind in kinds]
    for kind, ranks in zip(kinds, rankdata(-np.round(means, 9), axis=0), strict=True):
        seconds = sum(mean(row["seconds"]) for row in rows[kind].values())
        rows[kind] |= {"mean_rank": float(ranks.mean()), "total_seconds": seconds}
    return rows | {"turns": turns, "machine": machine(), "versions": versions()}


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
