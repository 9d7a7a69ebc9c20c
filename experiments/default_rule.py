"""Which rule should be the default: fixed codes, learned codes, or learned ones for maps alone.

    python -m experiments.default_rule --out results [--only mnist-mlp]

Every arm trains every net with every learning rate on the training samples without a tenth that is
held out; its accuracy is that on the held-out tenth, at the rate that is best there, for all arms
alike. The test samples are not used. Backprop and frozen random layers are the controls.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor, nn

import tpsgd
from experiments.calibration import HELD_OUT, recurrent, small_cnn
from experiments.common import Row, Samples, arguments, load_images, origin, program, result_file
from experiments.shallow import standardised
from tpsgd import Rule, rules
from tpsgd.data.split import stratified
from tpsgd.zoo.words import cnn, mlp

RATES = (1e-3, 2e-3, 4e-3, 8e-3)
ARMS: dict[str, tuple[Rule, Rule] | None] = {  # of blocks whose output is maps, and of others
    "backprop": None,
    "fixed": (rules.readout(), rules.readout()),
    "learned": (rules.readout(True), rules.readout(True)),
    "learned for maps": (rules.readout(True), rules.readout()),
    "learned, 2048 features": (rules.readout(True, features=2048), rules.readout(True)),
    "frozen": (rules.frozen(), rules.frozen()),
}


@dataclass(frozen=True)
class Net:
    """A net, its data and how long it is trained."""

    data: str
    model: Callable[[tuple[int, ...]], nn.Module]
    epochs: int
    batch_size: int = 128


def plain8(shape: tuple[int, ...]) -> nn.Module:
    """Seven convolutions of 16 filters, pooled three times, and a classifier."""
    modules, channels = [], shape[0]
    for i in range(7):
        modules += [nn.Conv2d(channels, 16, 3, padding=1), nn.LeakyReLU()]
        modules += [nn.MaxPool2d(2)] if i in (1, 3, 5) else []
        channels = 16
    return nn.Sequential(*modules, nn.Flatten(), nn.Linear(16 * (shape[1] // 8) ** 2, 10))


NETS = {
    "mnist-mlp": Net("mnist", lambda s: mlp(s, [256], 10, nn.LeakyReLU), 5),
    "mnist-cnn": Net("mnist", small_cnn, 3),
    "cifar10-cnn": Net("cifar10", small_cnn, 10),
    "cifar10-plain8": Net("cifar10", plain8, 10),
    "digits-mlp": Net("digits", lambda s: mlp(s, [128, 128], 10, nn.Tanh), 15, 32),
    "digits-cnn": Net("digits", lambda s: cnn(s, [(16, 3), (32, 3)], 10, nn.LeakyReLU), 10, 32),
    "shapes-cnn": Net("shapes", lambda s: cnn(s, [(16, 3), (32, 3)], 8, nn.LeakyReLU), 10, 32),
    "shapes-mlp": Net("shapes", lambda s: mlp(s, [128, 128], 8, nn.LeakyReLU), 15, 32),
    "mnist-rows": Net("seq-mnist-rows", lambda s: recurrent(s, 10), 5),
    "eeg": Net("eeg-rows", lambda s: recurrent(s, 2), 20),
}


def shapes(count: int = 1600, size: int = 16) -> tuple[Tensor, Tensor]:
    """Eight kinds of filled outlines at random places and sizes, on noise: a small picture set."""
    g = torch.Generator().manual_seed(0)
    y = torch.arange(count) % 8
    centre = torch.rand(count, 2, 1, 1, generator=g) * 6 + (size - 7) / 2
    radius = torch.rand(count, 1, 1, generator=g) * 2.5 + 3
    rows, columns = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    v, u = ((axis - centre[:, i]) / radius for i, axis in enumerate((rows, columns)))
    r = (u * u + v * v).sqrt()
    square, diamond = torch.maximum(u.abs(), v.abs()), u.abs() + v.abs()
    kinds = torch.stack(
        [
            *(r < 1, (r < 1) & (r > 0.6), square < 0.85, (square < 0.85) & (square > 0.5)),
            *(diamond < 1.1, (u.abs() < 0.3) | (v.abs() < 0.3), (u - v).abs() < 0.4),
            (v < 0.8) & (v > u.abs() * 2 - 1),
        ]
    )
    inside = kinds[y, torch.arange(count)] & (square < 1.2)
    return (inside + 0.6 * torch.randn(count, size, size, generator=g)).unsqueeze(1), y


def load(net: Net, options: argparse.Namespace) -> tuple[Samples, Samples]:
    """The training samples in two parts, to learn from and to choose by."""
    if net.data == "shapes":
        x, y = shapes()
    else:
        x, y, *_ = load_images(net.data, options.images, options.smoke)
    x, y = x[: options.max_train].to(options.device), y[: options.max_train].long()
    x = x.float().div_(255) if x.dtype is torch.uint8 else x
    x = standardised(x, x[:0])[0] if x.dim() == 4 else x
    part = torch.from_numpy(stratified(y.numpy(), len(y) - len(y) // HELD_OUT, 0))
    y, part = y.to(options.device), part.to(options.device)
    return (x[part], y[part]), (x[~part], y[~part])


def fit(net: Net, arm: str, lr: float, data: Samples, seed: int) -> tuple[nn.Module, Row]:
    """A trained net, its time and its memory."""
    torch.manual_seed(seed)
    model = net.model(tuple(data[0].shape[1:])).to(data[0].device)
    settings: Row = {"epochs": net.epochs, "batch_size": net.batch_size, "lr": lr, "seed": seed}
    pair = ARMS[arm]
    if pair is None:
        run = tpsgd.fit_backprop(model, data, **settings)
    else:
        blocks = tpsgd.split(model)
        chosen = [pair[0 if block.maps else 1] for block in blocks]
        run = tpsgd.fit(model, data, rule=chosen, memory=tpsgd.Memory(reuse=False), **settings)
    return model, {"seconds": run.seconds, "peak_bytes": run.peak_bytes}


def main() -> None:
    """Run what is asked for; the file is written after each training."""
    parser = arguments(__doc__)
    parser.add_argument("--images", type=Path, help="a folder of arrays, such as mnist.npz")
    parser.add_argument("--only", choices=list(NETS), nargs="*", default=list(NETS))
    parser.add_argument("--restarts", type=int, default=2)
    parser.add_argument("--max-train", type=int, help="fewer samples, for a quick look")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin nothing after that")
    options, start = parser.parse_args(), time.perf_counter()
    if options.smoke:
        options.restarts, options.max_train = 1, 60
    record, save = result_file(options, "default_rule")
    record |= origin("default_rule", options.device)
    parts = {name: load(NETS[name], options) for name in options.only}
    for seed in range(options.restarts):
        for name, (train, held_out) in parts.items():
            net = replace(NETS[name], epochs=1) if options.smoke else NETS[name]
            for arm in ARMS:
                for lr in RATES[:1] if options.smoke else RATES:
                    rows = record.setdefault("nets", {}).setdefault(name, {}).setdefault(arm, {})
                    row = rows.setdefault(f"{lr:g}", {"accuracies": []})
                    late = time.perf_counter() - start > options.seconds
                    if len(row["accuracies"]) > seed or late:
                        continue
                    try:
                        model, figures = fit(net, arm, lr, train, seed)
                        row["accuracies"].append(tpsgd.evaluate(model, held_out))
                    except tpsgd.TpsgdError as error:  # it diverged
                        figures = {"error": str(error)}
                        row["accuracies"].append(0.0)
                    row |= figures | {"accuracy": fmean(row["accuracies"])}
                    save()
                best = max(rows, key=lambda lr, rows=rows: rows[lr].get("accuracy", 0.0))
                print(f"{name:15} {arm:24} lr {best:6} {rows[best]['accuracy']:.2%}", flush=True)


if __name__ == "__main__":
    program(main)
