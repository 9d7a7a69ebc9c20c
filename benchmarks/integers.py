"""Digits and EEG learned in int8 and int16 by the exported C, beside float: accuracy and RAM.

    TPSGD_DATA=FOLDER python benchmarks/integers.py --out results/edge_integers.json

One hidden layer of 32 leaky ReLUs under readout with binary codes, batch 1, plain SGD, all blocks
together, weights as torch initialises them. Digits are 64-32-10, EEG windows of 178 samples
178-32-2 (seizure or healthy, split by recording). Each arm has the learning rate, of four, that is
best on validation samples, which are held out of the training set (of EEG whole recordings); then
it learns from the whole training set and is tested once. Binary points come from the training set.
Controls: int8 rounded to nearest, int8 with a frozen hidden layer, float, float backprop. `fit`
measures the gain of a readout on its first batch, here one sample; a second arm of float has the
gain of all training samples, as the integers have.
"""

import argparse
import json
import os
import subprocess
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, pstdev
from typing import Any

import numpy as np
import torch
from machines import machines
from torch import Tensor, nn

import tpsgd
from tpsgd import projections, rules
from tpsgd.common.units import columns
from tpsgd.comparison.provenance import versions
from tpsgd.data.sets import eeg
from tpsgd.maths.random import Key, permutation
from tpsgd_export.read_model import read_model
from tpsgd_export.to_c.check import accuracy_in_integers
from tpsgd_export.to_c.integer_scales import integer_net
from tpsgd_export.to_c.integer_source import integer_source, places

EPOCHS, HIDDEN, SEEDS, SEARCH_SEEDS = 5, 32, 10, 4
RATES = [2.0**-k for k in (5, 6, 7, 8)]
RULE = rules.readout(projection=projections.binary())
CC = os.environ.get("CC", "cc")

Samples = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Task:
    """Training and test samples of a data set; `group` rows of the training set belong together."""

    train: Samples
    test: Samples
    classes: int
    group: int = 1

    def split(self) -> tuple[Samples, Samples]:
        """A fifth of the training set, or of its recordings, for validation."""
        x, y = self.train
        group = torch.arange(len(x)) // self.group
        order = torch.cat(list(permutation(int(group.max()) + 1, Key(12345))))
        held_out = torch.isin(group, order[: len(order) // 5])
        return (x[~held_out], y[~held_out]), (x[held_out], y[held_out])


def digits() -> Task:
    """The 8 x 8 digits of scikit-learn."""
    data = tpsgd.data.load("digits")
    return Task(*((x.flatten(1), y) for x, y in (data.train, data.test)), classes=10)


def windows() -> Task:
    """EEG windows of one second, all 178 samples, as tpsgd's data set splits them."""
    raw = eeg.read(Path(os.environ["TPSGD_DATA"]) / "eeg", eeg.EEG)
    sets = [
        (torch.tensor(x / np.float32(eeg.SCALE)), torch.tensor(y)) for x, y in (raw.train, raw.test)
    ]
    return Task(sets[0], sets[1], classes=2, group=eeg.ROWS)


def model(task: Task, seed: int) -> nn.Sequential:
    """The net, as torch initialises it."""
    torch.manual_seed(seed)
    inputs = task.train[0].shape[1]
    return nn.Sequential(nn.Linear(inputs, HIDDEN), nn.LeakyReLU(), nn.Linear(HIDDEN, task.classes))


def integers(numbers: str, nearest: bool = False, rule: tpsgd.Rule = RULE) -> Any:
    """Trains in C; accuracy and the bytes of RAM."""

    def train(task: Task, train: Samples, test: Samples, rate: float, seed: int) -> Any:
        recipe = read_model(model(task, seed), rule, train[0].shape[1:], seed=seed)
        net = integer_net(recipe, *train, numbers, rate=rate, epochs=EPOCHS)
        accuracy = accuracy_in_integers(
            net, integer_source(net), train, test, rate, EPOCHS, seed, nearest
        )
        at = places(net)
        points = [layer.weight_point for layer in net.layers]
        return accuracy, {"ram": at.state_bytes + at.arena_bytes, "weight_points": points}

    return train


def measured(net: nn.Sequential, x: Tensor) -> tpsgd.Rule:
    """The readout with the gain of all these samples."""
    with torch.no_grad():
        rms = float(net[:2](x).square().mean().sqrt())
    return rules.readout(projection=projections.binary(), scale=rules.SCALE / HIDDEN**0.5 / rms)


def floats(backprop: bool = False, every_sample: bool = False) -> Any:
    """Trains in Python; accuracy."""

    def train(task: Task, train: Samples, test: Samples, rate: float, seed: int) -> Any:
        net = model(task, seed)
        settings: Any = {
            "optimizer": torch.optim.SGD, "lr": rate, "epochs": EPOCHS, "batch_size": 1,
            "seed": seed, "progress": False,
        }  # fmt: skip
        if backprop:
            tpsgd.fit_backprop(net, train, **settings)
        else:
            rule = measured(net, train[0]) if every_sample else RULE
            tpsgd.fit(net, train, rule=rule, order=tpsgd.simultaneous, **settings)
        return tpsgd.evaluate(net, test), {}

    return train


ARMS = {
    "float32 readout": floats(),
    "float32 readout, gain of all samples": floats(every_sample=True),
    "int16 readout": integers("int16"),
    "int8 readout": integers("int8"),
    "int8 readout, nearest": integers("int8", nearest=True),
    "int8 frozen hidden layer": integers("int8", rule=rules.frozen()),
    "float32 backprop": floats(backprop=True),
}


TASKS = {"digits 64-32-10": digits, "EEG 178-32-2": windows}


def measure(task_name: str, arm_name: str) -> dict[str, Any]:
    """The rate by validation, then the accuracy on the test set."""
    torch.set_num_threads(1)
    task, arm = TASKS[task_name](), ARMS[arm_name]
    train, validation = task.split()
    scores = {
        rate: mean(arm(task, train, validation, rate, seed)[0] for seed in range(SEARCH_SEEDS))
        for rate in RATES
    }
    rate = max(scores, key=lambda r: scores[r])
    runs = [arm(task, task.train, task.test, rate, seed) for seed in range(SEEDS)]
    accuracy = [a for a, _ in runs]
    summary = f"{100 * mean(accuracy):.2f} ± {100 * pstdev(accuracy):.2f}"
    print(f"{task_name}, {arm_name}: {summary}", flush=True)
    return {
        "rate": rate, "validation": {str(r): s for r, s in scores.items()}, "accuracy": accuracy,
        "mean": mean(accuracy), "std": pstdev(accuracy), "summary": summary, **runs[0][1],
    }  # fmt: skip


def main() -> None:
    """Measure, write the figures, print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--arms", nargs="*", default=list(ARMS), help="others stay in the file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    pairs = [(task, arm) for task in TASKS for arm in arguments.arms]
    with ProcessPoolExecutor(arguments.processes) as pool:
        rows = list(pool.map(measure, *zip(*pairs, strict=True)))
    before = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    arms: dict[str, dict[str, Any]] = before.get("arms", {name: {} for name in TASKS})
    for (task, arm), row in zip(pairs, rows, strict=True):
        arms[task][arm] = row
    result = {
        "benchmark": "integers",
        "command": "python benchmarks/integers.py --out results/edge_integers.json",
        "machine": machines(before),
        "versions": versions() | {"compiler": compiler()},
        "settings": {
            "hidden": HIDDEN, "epochs": EPOCHS, "seeds": SEEDS, "batch_size": 1, "rates": RATES,
            "rate_chosen_by": f"validation accuracy, mean of {SEARCH_SEEDS} seeds",
        },
        "arms": arms,
    }  # fmt: skip
    arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    lines = [
        [task, arm, row["summary"], f"{row['rate']:g}", str(row.get("ram", "-"))]
        for (task, arm), row in zip(pairs, rows, strict=True)
    ]
    print(columns([["net", "arm", "accuracy", "rate", "RAM, bytes"], *lines]))


def compiler() -> str:
    """The first line of what the C compiler says about itself."""
    said = subprocess.run([CC, "--version"], capture_output=True, text=True, check=True)
    return said.stdout.splitlines()[0]


if __name__ == "__main__":
    main()
