"""Random nets, rules and optimizers, exported as C and run beside `tpsgd.fit`.

    python benchmarks/random_nets.py --count 5000 --out results

Every net is compiled with the undefined-behaviour sanitizer, and its weights after a few steps are
compared with those of `fit` in float64.
"""

import argparse
import json
import random
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tpsgd
from tpsgd import projections, rules
from tpsgd.common.errors import TpsgdError
from tpsgd.common.files import write_whole
from tpsgd.comparison.provenance import machine, versions
from tpsgd_export.read_model import read_model
from tpsgd_export.to_c.check import Distances, distances
from tpsgd_export.to_c.codes import with_binary_codes, with_codes
from tpsgd_export.to_c.source import sources

FLAGS = (
    *("-std=c99", "-pedantic", "-Wall", "-Wextra", "-Wconversion", "-Wshadow", "-Werror", "-O0"),
    *("-ffp-contract=off", "-fsanitize=undefined", "-fno-sanitize-recover=all"),
)
ACTIVATIONS = (nn.ReLU, nn.LeakyReLU, nn.Tanh, nn.Sigmoid)
PROJECTIONS = ("normal", "uniform", "binary", "orthogonal", "per_filter")
STEPS = 6


@dataclass
class Case:
    """A net, how it learns, and how it is exported."""

    model: nn.Module
    shape: tuple[int, ...]
    rule: Any
    loss: Any
    options: dict[str, Any]
    codes: str
    order: Any

    def __str__(self) -> str:
        loss = self.loss.name if self.loss else "own"
        return f"{self.model}, {self.shape}, {self.rule.name}, {loss}, {self.options}, {self.codes}"


def draw(seed: int) -> Case:
    """A random case; the same for the same seed."""
    chance = random.Random(seed)
    torch.manual_seed(seed)
    classes = chance.randint(2, 6)
    shape, layers = _hidden(chance)
    width = int(nn.Sequential(*layers, nn.Flatten())(torch.zeros(1, *shape)).shape[1])
    for _ in range(chance.randint(0, 2)):
        units = chance.choice((1, 3, 8, 12, 90))
        layers += [*_linear(chance, width, units), chance.choice(ACTIVATIONS)()]
        width = units
    layers += _linear(chance, width, classes)
    options = {
        "batch": chance.choice((1, 1, 2, 5)),
        "optimizer": chance.choice(("sgd", "momentum", "adam")),
        "seed": chance.randrange(1 << 40),
        "spare": chance.choice((0, 0, 1, 3)),
    }
    losses = (None, tpsgd.mse, tpsgd.cross_entropy, tpsgd.bce)
    codes = chance.choice(("hash", "flash", "auto", "binary"))
    order = chance.choice((tpsgd.simultaneous, tpsgd.sequential))
    model = nn.Sequential(*layers)
    for layer in model:
        if chance.random() < 0.1 and layer is not layers[-1]:
            layer.requires_grad_(False)
    return Case(model, shape, _rule(chance), chance.choice(losses), options, codes, order)


def _hidden(chance: random.Random) -> tuple[tuple[int, ...], list[nn.Module]]:
    """The shape of a sample and the convolutions that read it, if there are any."""
    dimensions, channels = chance.randint(0, 2), chance.randint(1, 3)
    if not dimensions:
        return (chance.randint(1, 20),), []
    shape = (channels, *(chance.randint(5, 11) for _ in range(dimensions)))
    layers: list[nn.Module] = []
    for _ in range(chance.randint(1, 4)):
        grown = [*layers, *_convolution(chance, channels, dimensions)]
        try:
            out = nn.Sequential(*grown)(torch.zeros(1, *shape))
        except RuntimeError:  # the kernel is larger than what is left of the picture
            continue
        layers, channels = grown, out.shape[1]
    return shape, [*layers, nn.Flatten()]


def _convolution(chance: random.Random, channels: int, dimensions: int) -> list[nn.Module]:
    groups = chance.choice([g for g in (1, 1, 2, 3) if channels % g == 0])
    filters = groups * chance.randint(1, 3)

    def each(low: int, high: int) -> tuple[int, ...]:
        return tuple(chance.randint(low, high) for _ in range(dimensions))

    layer = (nn.Conv1d, nn.Conv2d)[dimensions - 1]
    kernel, stride, dilation = each(1, 4), each(1, 3), each(1, 2)
    # torch 2.13 ends the process where padding is wider than the kernel (channels last, float32)
    widest = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    padding = tuple(min(p, w) for p, w in zip(each(0, 3), widest, strict=True))
    convolution = layer(
        channels, filters, kernel, stride, padding, dilation, groups,  # type: ignore
        bias=chance.random() < 0.8,
    )  # fmt: skip
    pools = [[], [(nn.MaxPool1d, nn.MaxPool2d)[dimensions - 1](each(1, 3), each(1, 2))]]  # type: ignore
    pools.append([(nn.AvgPool1d, nn.AvgPool2d)[dimensions - 1](2)])  # type: ignore[arg-type]
    if dimensions == 2:
        pools.append([nn.AdaptiveAvgPool2d(1)])
    return [convolution, chance.choice(ACTIVATIONS)(), *chance.choice(pools)]


def _linear(chance: random.Random, inputs: int, outputs: int) -> list[nn.Module]:
    return [nn.Linear(inputs, outputs, bias=chance.random() < 0.8)]


def _rule(chance: random.Random) -> rules.Rule:
    projection = getattr(projections, chance.choice(PROJECTIONS))(chance.choice((1.0, 0.3)))
    name = chance.choice(("readout", "readout", "l1", "l2", "drtp", "frozen"))
    if name == "readout":
        learned = chance.random() < 0.5
        return rules.readout(learned, projection, scale=chance.choice((None, 2.0)))
    make = {"l1": rules.tpsgd_l1, "l2": rules.tpsgd_l2, "drtp": rules.drtp}
    return make[name](projection) if name in make else rules.frozen()


def measure(case: Case, flags: tuple[str, ...] = FLAGS) -> Distances:
    """How far the compiled net is from `fit`, and torch from itself."""
    rule: Any = with_binary_codes(case.rule) if case.codes == "binary" else case.rule
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        recipe = read_model(case.model, rule, case.shape, loss=case.loss, **case.options)
    recipe = with_codes(recipe, case.codes)
    texts = sources(recipe)
    options = {"rule": rule, "loss": case.loss}
    return distances(case.model, recipe, texts, case.order, STEPS, flags, **options)


def main() -> int:
    """Try many nets; say which are not equal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="seed of the first net")
    parser.add_argument("--out", type=Path, help="folder for random_nets.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    began, worst, unequal = time.perf_counter(), 0.0, 0
    for seed in range(arguments.first, arguments.first + arguments.count):
        case = draw(seed)
        try:
            apart = measure(case)
        except TpsgdError as error:
            unequal += 1
            print(f"{seed}: {error}: {case}")
            continue
        worst = max(worst, apart.ours / apart.largest)
        if not apart.equal:
            unequal += 1
            print(f"{seed}: {apart}: {case}")
        if sys.stderr.isatty():
            print(f"\r{seed + 1 - arguments.first} of {arguments.count}", end="", file=sys.stderr)
    seconds = time.perf_counter() - began
    if arguments.out:
        record = {
            "benchmark": "random_nets", "machine": machine(), "versions": versions(),
            "command": f"python benchmarks/random_nets.py --count {arguments.count} --out results",
            "nets": arguments.count, "first": arguments.first, "unequal": unequal, "worst": worst,
            "seconds": seconds,
        }  # fmt: skip
        write_whole(arguments.out / "random_nets.json", json.dumps(record, indent=1).encode())
    print(f"{arguments.count} nets in {seconds:.0f} s, {unequal} unequal, worst {worst:.1e}")
    return int(unequal > 0)


if __name__ == "__main__":
    sys.exit(main())
