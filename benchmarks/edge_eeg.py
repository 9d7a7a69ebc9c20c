"""EEG learned online by exported C: seizures against healthy brain waves, one sequence at a time.

A leaky cell of 32 units and a linear head, plain SGD, batch 1, 5 epochs. The learning rate of every
arm is chosen on a quarter of the training recordings; the test recordings are read once, at the
end. Controls: the frozen cell (the same C), and backpropagation through time in Python.

    TPSGD_DATA=FOLDER python benchmarks/edge_eeg.py --out results

Arms that the file has are not trained again.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

import tpsgd
from tpsgd import projections, rules
from tpsgd.common.files import write_whole
from tpsgd.common.units import columns
from tpsgd.comparison.provenance import machine, versions
from tpsgd.data.sets.eeg import ROWS
from tpsgd.maths.random import Key, permutation
from tpsgd_export.to_c.compiled import CompiledReader

UNITS, LEAK, EPOCHS, SEEDS = 32, 0.3, 5, (0, 1, 2)
RATES = (0.003, 0.01, 0.03, 0.1)
RULES = {
    "readout": rules.readout(projection=projections.binary()),
    "tpsgd_l2": rules.tpsgd_l2(projection=projections.binary()),
    "frozen": rules.frozen(),
}
Data = tuple[Tensor, Tensor]


def model(seed: int) -> nn.Sequential:
    """The net before it learns."""
    torch.manual_seed(seed)
    return nn.Sequential(tpsgd.Recurrent(1, UNITS, leak=LEAK), nn.Linear(UNITS, 2))


def in_c(rule: rules.Rule, seed: int, lr: float, train: Data, held_out: Data) -> dict[str, float]:
    """Accuracy on other data of the exported program after it has learned."""
    folder = tempfile.mkdtemp()
    exported = tpsgd.export.c(model(seed), folder, shape=train[0].shape[1:], rule=rule, seed=seed)
    net, start = CompiledReader(folder), time.perf_counter()
    (x, y), (x_test, y_test) = train, held_out
    for epoch in range(EPOCHS):
        for i in torch.cat(list(permutation(len(x), Key(seed, 0, epoch)))).tolist():
            net.step(x[i], y[i], lr)
    seconds = time.perf_counter() - start
    right = sum(int(net.forward(a).argmax()) == int(b) for a, b in zip(x_test, y_test, strict=True))
    assert exported.memory is not None
    return {
        "accuracy": right / len(x_test), "seconds": seconds, "ram": exported.memory.ram_bytes,
    }  # fmt: skip


def backprop(seed: int, lr: float, train: Data, held_out: Data) -> dict[str, float]:
    """The same by backpropagation through time, in Python."""
    net, start = model(seed), time.perf_counter()
    tpsgd.fit_backprop(
        net, train, optimizer=tpsgd.sgd, lr=lr, epochs=EPOCHS, batch_size=1, seed=seed,
        progress=False,
    )  # fmt: skip
    seconds = time.perf_counter() - start
    return {"accuracy": tpsgd.evaluate(net, held_out), "seconds": seconds}


def arms() -> dict[str, Callable[..., dict[str, float]]]:
    """What is compared: functions of a seed, a rate, and the data."""
    learned = {
        name: lambda *args, rule=rule: in_c(rule, *args)  # pyright: ignore
        for name, rule in RULES.items()
    }
    return {**learned, "backprop": backprop}


def split(train: Data) -> tuple[Data, Data]:
    """Training data without a quarter of the recordings, and that quarter."""
    x, y = train
    recording = torch.arange(len(x)) // ROWS  # rows are sorted by recording
    chosen = recording % 4 == 3
    return (x[~chosen], y[~chosen]), (x[chosen], y[chosen])


def measure(arm: Callable[..., dict[str, float]], data: Any) -> dict[str, Any]:
    """Choose the rate on held-out recordings, then test."""
    smaller, validation = split(data.train)
    tried = {str(lr): arm(0, lr, smaller, validation)["accuracy"] for lr in RATES}
    lr = float(max(tried, key=lambda rate: tried[rate]))
    runs = [arm(seed, lr, data.train, data.test) for seed in SEEDS]
    accuracies = [run["accuracy"] for run in runs]
    return {"validation": tried, "lr": lr, "runs": runs, "accuracy": accuracies}


def main() -> None:
    """Measure the arms that are missing, write the file after each, print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="a folder")
    file = parser.parse_args().out / "edge_eeg.json"
    torch.set_num_threads(1)
    data = tpsgd.data.load("eeg")
    result = json.loads(file.read_text()) if file.exists() else {"arms": {}}
    result |= {
        "benchmark": "edge_eeg", "command": "python benchmarks/edge_eeg.py --out results",
        "machine": machine(), "versions": versions(),
        "settings": {
            "units": UNITS, "leak": LEAK, "epochs": EPOCHS, "seeds": SEEDS, "batch_size": 1,
            "rates": RATES, "rate_chosen_by": "a quarter of the training recordings, one seed",
        },
    }  # fmt: skip
    for name, arm in arms().items():
        if name not in result["arms"]:
            result["arms"][name] = measure(arm, data)
            write_whole(file, json.dumps(result, indent=1).encode())
    write_whole(file, json.dumps(result, indent=1).encode())
    rows = [
        [
            name,
            f"{100 * fmean(row['accuracy']):.2f}",
            f"{row['lr']:g}",
            str(row["runs"][0].get("ram", "-")),
        ]
        for name, row in result["arms"].items()
    ]
    print(columns([["arm", "test accuracy %", "rate", "RAM, bytes"], *rows]))


if __name__ == "__main__":
    main()
