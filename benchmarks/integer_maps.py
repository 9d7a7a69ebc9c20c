"""Convolutions learned in int8 by the exported C, beside the same in floats: accuracy and RAM.

    TPSGD_DATA=FOLDER python benchmarks/integer_maps.py --out results/integer_maps.json

Digits: 8 filters of 3 x 3, a head. MNIST: 8 filters of 5 x 5 and 16 of 3 x 3, stride
2, a head; 2,000 training and 1,000 test pictures. Readouts with binary codes and a scale of 4,
batch 1, plain SGD, all blocks together. Each arm has the rate, of five, that is best on a fifth of
the training samples, for two other seeds; then it learns from all of them and is tested once.
Controls: hidden layers that do not learn, rounding to the nearest number, backprop in floats.
"""

import argparse
import json
from pathlib import Path
from statistics import mean, stdev
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

import tpsgd
from tpsgd import projections, rules
from tpsgd.comparison.provenance import machine, versions
from tpsgd.maths.random import Key, permutation
from tpsgd_export.read_model import read_model
from tpsgd_export.to_c.check import accuracy_in_integers
from tpsgd_export.to_c.compiled import CompiledNet
from tpsgd_export.to_c.integer_scales import integer_net
from tpsgd_export.to_c.integer_source import integer_layout, integer_source
from tpsgd_export.to_c.memory import layout
from tpsgd_export.to_c.source import sources

RATES = [2.0**-k for k in (3, 4, 5, 6, 7)]
RULE = rules.readout(projection=projections.binary(), scale=4.0)
Samples = tuple[Tensor, Tensor]


def digits_net() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.LeakyReLU(), nn.Flatten(), nn.Linear(288, 10))


def mnist_net() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 8, 5, 2), nn.LeakyReLU(), nn.Conv2d(8, 16, 3, 2), nn.LeakyReLU(), nn.Flatten(),
        nn.Linear(400, 10),
    )  # fmt: skip


TASKS = {"digits": (digits_net, None), "mnist": (mnist_net, (2000, 1000))}
EPOCHS = {"digits": 5, "mnist": 2}


def load(name: str, counts: tuple[int, int] | None) -> tuple[Samples, Samples]:
    """Training and test samples."""
    data = tpsgd.data.load(name)
    if counts is None:
        return data.train, data.test
    (x, y), (tests, classes) = data.train, data.test
    order = torch.cat(list(permutation(len(y), Key(7))))[: counts[0]]
    return (x[order], y[order]), (tests[: counts[1]], classes[: counts[1]])


def in_integers(rule: Any = RULE, nearest: bool = False) -> Any:
    """Learns in C, in int8."""

    def run(make: Any, train: Samples, test: Samples, rate: float, epochs: int, seed: int) -> Any:
        torch.manual_seed(seed)
        recipe = read_model(make(), rule, train[0].shape[1:], seed=seed)
        x, y = (values[:1000] for values in train)
        net = integer_net(recipe, x, y, "int8", rate=rate, epochs=1)
        texts = integer_source(net)
        right = accuracy_in_integers(net, texts, train, test, rate, epochs, seed, nearest)
        return right, integer_layout(net).ram_bytes

    return run


def in_floats(make: Any, train: Samples, test: Samples, rate: float, epochs: int, seed: int) -> Any:
    """Learns in C, in floats, with the samples in the same order."""
    torch.manual_seed(seed)
    recipe = read_model(make(), RULE, train[0].shape[1:], seed=seed, samples=train[0][:1000])
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
    (make, counts), epochs = TASKS[task], EPOCHS[task]
    train, test = load(task, counts)
    order = torch.cat(list(permutation(len(train[1]), Key(12345))))
    fifth = len(order) // 5
    held_out, rest = (tuple(v[part] for v in train) for part in (order[:fifth], order[fifth:]))

    def validated(rate: float) -> float:
        try:
            runs = [ARMS[arm](make, rest, held_out, rate, epochs, seed) for seed in (10, 11)]
        except tpsgd.TpsgdError:  # it diverged
            return 0.0
        return sum(right for right, _ in runs)

    rate = max(RATES, key=validated)
    runs = [ARMS[arm](make, train, test, rate, epochs, seed) for seed in range(seeds)]
    ram = {"ram": runs[0][1]} if runs[0][1] else {}
    return {"rate": rate, "accuracy": [right for right, _ in runs]} | ram


def main() -> None:
    parser = argparse.ArgumentParser(description="Convolutions in int8 beside floats")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--tasks", nargs="*", default=list(TASKS))
    parser.add_argument("--arms", nargs="*", default=list(ARMS), help="others stay in the file")
    options = parser.parse_args()
    settings = {"seeds": options.seeds, "epochs": EPOCHS, "rates": RATES}
    record: dict[str, Any] = {
        "benchmark": "integer_maps", "command": "python benchmarks/integer_maps.py",
        "machine": machine(), "versions": versions(), "settings": settings,
        "arms": {task: {} for task in TASKS},
    }  # fmt: skip
    if options.out.exists():
        record["arms"] = json.loads(options.out.read_text())["arms"]
    for task in options.tasks:
        for arm in options.arms:
            result = record["arms"][task][arm] = measure(task, arm, options.seeds)
            shares = result["accuracy"]
            print(f"{task}, {arm}: {mean(shares):.2%} ± {stdev(shares):.2%}, {result}", flush=True)
            options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
