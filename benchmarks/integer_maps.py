"""Convolutions learned in int8 by the exported C, beside the same in floats: accuracy and RAM.

    TPSGD_DATA=FOLDER python benchmarks/integer_maps.py --out results/integer_maps.json

Digits: 8 filters of 3 x 3, a head. EEG: 8 filters of 9 samples, stride 4, a head; windows of 178
samples, seizure or healthy, split by recording. Readouts with binary codes and a scale of 4,
batch 1, plain SGD, all blocks together. Each arm has the rate, of four, that is best on a fifth of
the training samples, of EEG of the recordings, for two other seeds; then it learns from all of them
and is tested once. Controls: hidden layers that do not learn, rounding to the nearest number,
backprop in floats.
"""

import argparse
import json
from pathlib import Path
from statistics import mean, stdev
from tempfile import TemporaryDirectory
from typing import Any

import integers
import torch
from machines import machines
from torch import Tensor, nn

import tpsgd
from tpsgd import projections, rules
from tpsgd.comparison.provenance import versions
from tpsgd.maths.random import Key, permutation
from tpsgd_export.read_model import read_model
from tpsgd_export.to_c.check import accuracy_in_integers
from tpsgd_export.to_c.compiled import CompiledNet
from tpsgd_export.to_c.integer_scales import integer_net
from tpsgd_export.to_c.integer_source import integer_layout, integer_source
from tpsgd_export.to_c.memory import layout
from tpsgd_export.to_c.source import sources

RATES = [2.0**-k for k in (5, 6, 7, 8)]
RULE = rules.readout(projection=projections.binary(), scale=4.0)
Samples = tuple[Tensor, Tensor]


def digits_net() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.LeakyReLU(), nn.Flatten(), nn.Linear(288, 10))


def eeg_net() -> nn.Sequential:
    return nn.Sequential(
        nn.Unflatten(1, (1, 178)), nn.Conv1d(1, 8, 9, 4), nn.LeakyReLU(), nn.Flatten(),
        nn.Linear(344, 2),
    )  # fmt: skip


TASKS = {"digits": digits_net, "EEG": eeg_net}
EPOCHS = {"digits": 5, "EEG": 5}


def load(name: str) -> integers.Task:
    """Training and test samples."""
    if name == "EEG":
        return integers.windows()
    data = tpsgd.data.load(name)
    return integers.Task(data.train, data.test, classes=10)


def in_integers(rule: Any = RULE, nearest: bool = False) -> Any:
    """Learns in C, in int8."""

    def run(make: Any, train: Samples, test: Samples, rate: float, epochs: int, seed: int) -> Any:
        torch.manual_seed(seed)
        recipe = read_model(make(), rule, train[0].shape[1:], seed=seed)
        x, y = (values[:: max(1, len(values) // 1000)] for values in train)
        net = integer_net(recipe, x, y, "int8", rate=rate, epochs=1)
        texts = integer_source(net)
        right = accuracy_in_integers(net, texts, train, test, rate, epochs, seed, nearest)
        return right, integer_layout(net).ram_bytes

    return run


def in_floats(make: Any, train: Samples, test: Samples, rate: float, epochs: int, seed: int) -> Any:
    """Learns in C, in floats, with the samples in the same order."""
    torch.manual_seed(seed)
    recipe = read_model(make(), RULE, train[0].shape[1:], seed=seed, samples=train[0])
    with TemporaryDirectory() as place:
        for name, text in sources(recipe).items():
            Path(place, name).write_text(text)
        net = CompiledNet(place)
    for epoch in range(epochs):
        for i in torch.cat(list(permutation(len(train[1]), Key(seed, 0, epoch)))):
            net.step(train[0][i], train[1][i : i + 1], rate)
    right = sum(int(net.forward(x).argmax() == y) for x, y in zip(*test, strict=True))
    return right / len(test[1]), layout(recipe).ram_bytes


def by_backprop(
    make: Any, train: Samples, test: Samples, rate: float, epochs: int, seed: int
) -> Any:
    """Learns in Python, by backprop."""
    torch.manual_seed(seed)
    net = make()
    tpsgd.fit_backprop(
        net, train, lr=rate, epochs=epochs, batch_size=1, optimizer=tpsgd.sgd, seed=seed,
        progress=False,
    )  # fmt: skip
    return tpsgd.evaluate(net, test), None


ARMS = {
    "float32": in_floats,
    "int8": in_integers(),
    "int8, rounded to nearest": in_integers(nearest=True),
    "int8, frozen hidden layers": in_integers(rules.frozen()),
    "float32, backprop": by_backprop,
}


def measure(task: str, arm: str, seeds: int) -> dict[str, Any]:
    """The accuracy of an arm over seeds, at the rate that validation chose with the first."""
    make, epochs, data = TASKS[task], EPOCHS[task], load(task)
    rest, held_out = data.split()

    def validated(rate: float) -> float:
        try:
            runs = [ARMS[arm](make, rest, held_out, rate, epochs, seed) for seed in (10, 11)]
        except tpsgd.TpsgdError:  # it diverged
            return 0.0
        return sum(right for right, _ in runs)

    rate = max(RATES, key=validated)
    runs = [ARMS[arm](make, data.train, data.test, rate, epochs, seed) for seed in range(seeds)]
    ram = {"ram": runs[0][1]} if runs[0][1] else {}
    return {"rate": rate, "accuracy": [right for right, _ in runs]} | ram


def main() -> None:
    parser = argparse.ArgumentParser(description="Convolutions in int8 beside floats")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--tasks", nargs="*", default=list(TASKS))
    parser.add_argument("--arms", nargs="*", default=list(ARMS), help="others stay in the file")
    options = parser.parse_args()
    before = json.loads(options.out.read_text()) if options.out.exists() else {}
    settings = {"seeds": options.seeds, "epochs": EPOCHS, "rates": RATES}
    record: dict[str, Any] = {
        "benchmark": "integer_maps",
        "command": "python benchmarks/integer_maps.py --out results/integer_maps.json",
        "machine": machines(before), "versions": versions(), "settings": settings,
        "arms": before.get("arms", {task: {} for task in TASKS}),
    }  # fmt: skip
    for task in options.tasks:
        for arm in options.arms:
            result = record["arms"][task][arm] = measure(task, arm, options.seeds)
            shares = result["accuracy"]
            print(f"{task}, {arm}: {mean(shares):.2%} ± {stdev(shares):.2%}, {result}", flush=True)
            options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
