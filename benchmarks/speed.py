"""Seconds and bytes of every rule over backprop's, at equal sample passes, measured in one run.

    python benchmarks/speed.py --out results [--quick]

Three nets on 10,000 images: the paper's MLP and CNN on MNIST, and a plain 8-layer CNN (16 channels)
on CIFAR-10, five epochs per block, the passes that make the next block's inputs included. Backprop
is measured in both memory layouts and the faster one counts. Arms take turns, and each figure is
the fastest of its turns: a busy machine only ever adds time.

Then the peak memory of plain CNNs of 2, 4, 8 and 16 layers.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tpsgd
from tpsgd import Memory, Run, rules
from tpsgd.comparison.provenance import machine, versions
from tpsgd.units import size
from tpsgd.zoo.words import cnn, mlp

ARMS = {
    "readout": rules.readout(),
    "readout, one cell": rules.readout(features=1),
    "tpsgd-l2": rules.tpsgd_l2(),
    "tpsgd-l1": rules.tpsgd_l1(),
    "drtp": rules.drtp(),
    "dfa": rules.dfa(),
    "frozen": rules.frozen(),
}


def plain(depth: int) -> nn.Sequential:
    """Convolutions of 16 channels that keep the image's size, and one linear layer at the end."""
    layers: list[nn.Module] = []
    for i in range(depth - 1):
        layers += [nn.Conv2d(16 if i else 3, 16, 3, padding=1), nn.LeakyReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * 32 * 32, 10))


def nets(quick: bool) -> dict[str, tuple[Callable[[], nn.Module], Any, int]]:
    """Model, data and epochs of each net."""
    digits = tpsgd.data.load("mnist", max_train=1_000 if quick else 10_000)
    images = tpsgd.data.load("cifar10", max_train=1_000 if quick else 10_000)
    return {
        "mlp": (lambda: mlp(digits.shape, [256], 10, nn.LeakyReLU), digits.train, 5),
        "cnn": (lambda: cnn(digits.shape, [(16, 5), (16, 5)], 10, nn.LeakyReLU), digits.train, 2),
        "8-layer cnn": (lambda: plain(8), images.train, 5),
    }


def backprop(model: nn.Module, data: Any, epochs: int, channels_last: bool) -> Run:
    """Backprop with channels last, which `fit_backprop` chooses itself, or with them first."""
    if channels_last:
        return tpsgd.fit_backprop(model, data, epochs=epochs)
    return tpsgd.fit_backprop(ChannelsFirst(model), data, epochs=epochs)


class ChannelsFirst(nn.Module):
    """A model whose inputs are brought to channels first, whatever they came as."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The model's output."""
        return self.model(x.contiguous())


def one_turn(model: Callable[[], nn.Module], data: Any, epochs: int) -> Iterator[tuple[str, Run]]:
    """Every arm once."""
    yield "backprop", backprop(model(), data, epochs, True)
    yield "backprop, channels first", backprop(model(), data, epochs, False)
    for arm, rule in ARMS.items():
        schedule = tpsgd.simultaneous if rule.needs_output else tpsgd.sequential
        yield arm, tpsgd.fit(model(), data, rule=rule, epochs=epochs, schedule=schedule)


def speed(quick: bool, turns: int) -> dict[str, Any]:
    """The fastest turn of every arm on every net."""
    ratios: dict[str, Any] = {}
    for name, (model, data, epochs) in nets(quick).items():
        best: dict[str, Run] = {}
        for turn in range(turns if epochs * len(tpsgd.split(model())) > 20 else 3 * turns):
            for arm, done in one_turn(model, data, epochs):
                if arm not in best or done.seconds < best[arm].seconds:
                    best[arm] = done
                print(f"{name} turn {turn + 1} {arm}: {done.seconds:.2f} s", flush=True)
        reference = min(best[arm].seconds for arm in best if arm.startswith("backprop"))
        ratios[name] = {
            arm: {
                "seconds": run.seconds,
                "ratio": run.seconds / reference,
                "sample_passes": run.sample_passes,
                "forward_passes": run.forward_passes,
                "peak_bytes": run.peak_bytes,
                "kept_bytes": run.kept_bytes,
            }
            for arm, run in best.items()
        }
    return ratios


def memory(quick: bool) -> list[dict[str, Any]]:
    """Peak bytes by depth: flat for a local rule, rising for backprop."""
    data = tpsgd.data.load("cifar10", max_train=512).train
    rows = []
    for depth in (2, 4, 8, 16):
        row: dict[str, Any] = {"depth": depth}
        row["backprop"] = tpsgd.fit_backprop(plain(depth), data, epochs=1).peak_bytes
        for arm in ("readout", "tpsgd-l2"):
            settings: dict[str, Any] = {"epochs": 1, "memory": Memory(reuse=False)}
            row[arm] = tpsgd.fit(plain(depth), data, rule=ARMS[arm], **settings).peak_bytes
        rows.append(row)
    return rows


def main() -> None:
    """Measure, write `speed.json` and print the ratios."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--quick", action="store_true", help="a small part of the data")
    parser.add_argument("--turns", type=int, default=2, help="the small nets take three times more")
    options = parser.parse_args()
    record = {
        "benchmark": "speed",
        "command": f"python benchmarks/speed.py --turns {options.turns}"
        + (" --quick" if options.quick else ""),
        "machine": machine(),
        "versions": versions(),
        "turns": options.turns,
        "speed": speed(options.quick, options.turns),
        "memory": memory(options.quick),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "speed.json").write_text(json.dumps(record, indent=1))
    for net, arms in record["speed"].items():
        print(f"\n{net}: seconds, and over backprop's")
        for arm, row in arms.items():
            print(f"  {arm:26} {row['seconds']:7.2f} s  {row['ratio']:5.2f}")
    print("\npeak memory by depth")
    for row in record["memory"]:
        print("  " + ", ".join(f"{k} {size(v) if k != 'depth' else v}" for k, v in row.items()))


if __name__ == "__main__":
    main()
