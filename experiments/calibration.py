"""How large should calibrated features be, and how many: the defaults of `readout`.

    python -m experiments.calibration --out results [--only mnist-mlp]

Every setting trains every net, the shallow ones of the paper, two VGGs with batch norm and two
recurrent nets, on the training samples without a part that is held out; the accuracy is that on the
held-out part. The test samples are not used. `by hand` is a scale of 16 for feature maps and of 4
for other output, without calibration.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from statistics import fmean

import torch
from torch import nn

import tpsgd
from experiments.common import (
    Row,
    Samples,
    arguments,
    load_images,
    origin,
    program,
    result_file,
    with_data,
)
from experiments.shallow import standardised
from tpsgd import Recurrent, Rule, inits, rules
from tpsgd.data.split import stratified
from tpsgd.zoo.recipes import deep
from tpsgd.zoo.words import cnn, mlp

SCALES = (6.0, 8.0, 12.0, 16.0, 24.0)
FEATURES = {"256 features": 256, "2048 features": 2048, "4 x 4 cells": None}
HELD_OUT = 10  # a tenth of the training samples


@dataclass(frozen=True)
class Net:
    """A net, its data and how it is trained."""

    data: str
    model: Callable[[tuple[int, ...]], nn.Module]
    maps: tuple[bool, ...]  # whether each hidden block gives feature maps
    epochs: int
    learned: tuple[bool, ...] = (False,)
    deep: bool = False
    settings: Row = field(default_factory=dict)


def small_cnn(shape: tuple[int, ...]) -> nn.Module:
    """The paper's CNN."""
    return cnn(shape, [(16, 5), (16, 5)], 10, nn.LeakyReLU)


def recurrent(shape: tuple[int, ...], classes: int) -> nn.Module:
    """A leaky cell of 256 units and a classifier."""
    init = inits.reservoir(0.9, 1.0)
    return nn.Sequential(Recurrent(shape[-1], 256, leak=0.3, init=init), nn.Linear(256, classes))


CONVOLUTIONS = {8: (True,) * 6 + (False,), 11: (True,) * 8 + (False,)}
NETS = {
    "vgg11": Net(
        "imagenette", lambda s: deep.vgg(11, s, 10), CONVOLUTIONS[11], 6, deep=True
    ),
    "vgg8": Net(
        "cifar10", lambda s: deep.vgg(8, s, 10), CONVOLUTIONS[8], 5, deep=True,
        settings={"batch_size": 128},
    ),
    "cifar10-cnn": Net("cifar10", small_cnn, (True, True), 10, (False, True)),
    "mnist-cnn": Net("mnist", small_cnn, (True, True), 2, (False, True)),
    "mnist-mlp": Net("mnist", lambda s: mlp(s, [256], 10, nn.LeakyReLU), (False,), 5),
    "mnist-rows": Net("seq-mnist-rows", lambda s: recurrent(s, 10), (False,), 5),
    "eeg": Net("eeg-rows", lambda s: recurrent(s, 2), (False,), 20),
}  # fmt: skip


def settings_of(net: Net) -> dict[str, Rule | list[Rule]]:
    """The rules to compare, by name; recurrent states and vectors are read out whole."""
    chosen: dict[str, Rule | list[Rule]] = {}
    for learned in net.learned:
        word = "learned, " if learned else ""
        for name, features in FEATURES.items() if any(net.maps) else (("", None),):
            for scale in SCALES:
                label = ", ".join(filter(None, (f"{word}{scale:g}", name)))
                chosen[label] = rules.readout(
                    learned, features=features, scale=scale, calibrate=True
                )
        hands = [16.0 if maps else 4.0 for maps in net.maps]
        by_hand = [rules.readout(learned, features=256, scale=scale) for scale in hands]
        chosen[f"{word}by hand, 256 features"] = [*by_hand, by_hand[-1]]
    return chosen


def fit(net: Net, rule: Rule | list[Rule], samples: Samples, seed: int, device: str) -> nn.Module:
    """A trained net."""
    torch.manual_seed(seed)
    model = net.model(tuple(samples[0].shape[1:])).to(device)
    settings: Row = {"epochs": net.epochs, "seed": seed} | net.settings
    if net.deep:
        shape = tuple(samples[0].shape[1:])
        settings = deep.settings(shape, device, **settings)
    tpsgd.fit(model, samples, rule=rule, memory=tpsgd.Memory(measure=False), **settings)
    return model


def load(net: Net, options: argparse.Namespace) -> tuple[Samples, Samples]:
    """The training samples in two parts, to learn from and to choose by."""
    device = options.device
    x, y, *_ = (
        t[: options.max_train] for t in load_images(net.data, options.images, options.smoke)
    )
    x, y = x.to(device), y.long().to(device)
    x = x.float().div_(255) if x.dtype is torch.uint8 else x
    x = standardised(x, x[:0])[0] if x.dim() == 4 else x
    part = torch.from_numpy(stratified(y.cpu().numpy(), len(y) - len(y) // HELD_OUT, 0))
    part = part.to(device)
    return (x[part], y[part]), (x[~part], y[~part])


def main() -> None:
    """Run what is asked for; the file is written after each training."""
    parser = arguments(__doc__)
    parser.add_argument("--images", type=Path, help="a folder of arrays, such as imagenette.npz")
    parser.add_argument("--only", choices=list(NETS), nargs="*", default=list(NETS))
    parser.add_argument("--restarts", type=int, default=2)
    parser.add_argument("--settings", nargs="*", help="only these, by name")
    parser.add_argument("--max-train", type=int, help="fewer samples, for a quick look")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin nothing after that")
    options, start = parser.parse_args(), time.perf_counter()
    if options.smoke:
        options.restarts, options.max_train = 1, 60
    record, save = result_file(options, "calibration")
    record |= origin("calibration", options.device)
    for seed in range(options.restarts):
        for name, parts in with_data(options.only, lambda name: load(NETS[name], options)):
            net, (train, held_out) = NETS[name], parts
            if options.smoke:
                net = replace(net, epochs=1)
            rows = record.setdefault("nets", {}).setdefault(name, {})
            for label, rule in islice(settings_of(net).items(), 1 if options.smoke else None):
                if options.settings and label not in options.settings:
                    continue
                if options.again and seed == 0:
                    rows[label] = {"accuracies": []}
                row = rows.setdefault(label, {"accuracies": []})
                if len(row["accuracies"]) > seed or time.perf_counter() - start > options.seconds:
                    continue
                model = fit(net, rule, train, seed, options.device)
                row["accuracies"].append(tpsgd.evaluate(model, held_out, batch_size=256))
                row["accuracy"] = fmean(row["accuracies"])
                save()
                print(f"{name:12} {label:24} {row['accuracy']:.2%}", flush=True)


if __name__ == "__main__":
    program(main)
