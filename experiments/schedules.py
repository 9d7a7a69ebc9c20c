"""Which order suits which net: both orders on every kind of net, at equal sample passes.

    python -m experiments.schedules --out results [--device cuda] [--only mnist-mlp] [--quick]

Every arm has Adam at 1e-3, the same batches and the same epochs per block. The library's default
order is chosen on these figures, so the test set is never read: accuracies are those of a tenth
of the training samples, which no arm is trained on. Arms take turns, so that a busy machine slows
all of them alike; a ratio is the median of an arm's seconds over those of backprop in its turn.
The file is schedules-cpu.json or schedules-gpu.json. A data set that is not here is left out.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import nn

import tpsgd
from experiments import common
from experiments.common import Row, Samples, accuracies, arguments, origin, program, result_file
from experiments.shallow import standardised
from tpsgd import Recurrent, rules
from tpsgd.common.units import size
from tpsgd.data.split import hold_out
from tpsgd.zoo.words import cnn, mlp

QUICK = 600  # samples of a quick look
WARM = 4  # batches that every arm is warmed up with
ARMS: dict[str, Row | None] = {
    "backprop": None,
    **{
        f"{word}, {order.__name__}": {"rule": rule, "order": order}
        for word, rule in (("readout", rules.readout()), ("tpsgd-l2", rules.tpsgd_l2()))
        for order in (tpsgd.sequential, tpsgd.simultaneous)
    },
    "frozen": {"rule": rules.frozen(), "order": tpsgd.sequential},
}


@dataclass(frozen=True)
class Net:
    """A net, its data and how long it is trained."""

    data: str
    model: Callable[[tuple[int, ...]], nn.Sequential]
    epochs: int
    batch_size: int = 128


def plain_cnn(shape: tuple[int, ...], depth: int = 8) -> nn.Sequential:
    """Convolutions of 16 channels that keep the image's size, and one linear layer at the end."""
    channels, *pixels = shape
    layers: list[nn.Module] = []
    for i in range(depth - 1):
        layers += [nn.Conv2d(16 if i else channels, 16, 3, padding=1), nn.LeakyReLU()]
    features = 16 * pixels[0] * pixels[1]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(features, 10))


def with_norms(shape: tuple[int, ...], depth: int = 7) -> nn.Sequential:
    """Linear layers of 64 units with batch norm."""
    layers: list[nn.Module] = [nn.Flatten()]
    for i in range(depth - 1):
        inputs = 64 if i else shape[0] * shape[1] * shape[2]
        layers += [nn.Linear(inputs, 64), nn.BatchNorm1d(64), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(64, 10))


NETS = {
    "digits-mlp": Net("digits", lambda s: mlp(s, [128, 128], 10, nn.Tanh), 15, 32),
    "digits-cnn": Net("digits", lambda s: cnn(s, [(16, 3), (32, 3)], 10, nn.LeakyReLU), 10, 32),
    "digits-deep": Net("digits", plain_cnn, 10, 32),
    "digits-norm": Net("digits", with_norms, 5, 32),
    "digits-norm-long": Net("digits", with_norms, 20, 32),
    "mnist-mlp": Net("mnist", lambda s: mlp(s, [256], 10, nn.LeakyReLU), 5),
    "mnist-cnn": Net("mnist", lambda s: cnn(s, [(16, 5), (16, 5)], 10, nn.LeakyReLU), 2),
    "cifar10-deep": Net("cifar10", plain_cnn, 5),
    "mnist-rows": Net(
        "seq-mnist-rows", lambda s: nn.Sequential(Recurrent(s[1], 256), nn.Linear(256, 10)), 3
    ),
}


def main() -> None:
    """Measure the nets asked for; the file is written after each."""
    parser = arguments(__doc__)
    parser.add_argument("--only", nargs="+", choices=list(NETS), default=list(NETS))
    parser.add_argument("--restarts", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="few samples, one epoch")
    options = parser.parse_args()
    if options.smoke:
        options.quick, options.restarts = True, 1
    on = "cpu" if options.device == "cpu" else "gpu"
    record, save = result_file(options, f"schedules-{on}")
    words = [f"--device {options.device}"] if on == "cpu" else []
    words += ["--only", *options.only] if options.only != list(NETS) else []
    record |= origin("schedules", options.device, *words)
    for name in options.only:
        if name in record.get("nets", {}) and not options.again:
            continue
        try:
            row = measure(NETS[name], options)
        except (tpsgd.TpsgdError, ImportError) as error:  # the data set is not on this machine
            print(f"{name} is left out: {error}", flush=True)
            continue
        record.setdefault("nets", {})[name] = row
        save()
        for arm, figures in row["arms"].items():
            share = f"{figures['accuracy']:.2%} ± {figures['deviation']:.2%}"
            sizes = f"{size(figures['peak_bytes']):>9} + {size(figures['kept_bytes']):>9}"
            print(f"{name:13} {arm:23} {share} {figures['seconds']:7.2f} s {sizes}", flush=True)


def measure(net: Net, options: argparse.Namespace) -> Row:
    """Every arm of a net: accuracy on held-out training samples, seconds, bytes."""
    quick, restarts = options.quick, options.restarts
    samples, held_out, shape = load(net.data, options)
    settings: Row = {"epochs": 1 if quick else net.epochs, "batch_size": net.batch_size}
    few = tuple(t[: WARM * net.batch_size] for t in samples)
    results: dict[str, list[tuple[float, tpsgd.Run]]] = {arm: [] for arm in ARMS}
    for own in ARMS.values():
        train(net, shape, own, (few[0], few[1]), settings | {"epochs": 1, "seed": 0})
    for seed in range(restarts):
        for arm, own in ARMS.items():
            model, run = train(net, shape, own, samples, settings | {"seed": seed})
            results[arm].append((tpsgd.evaluate(model, held_out), run))
    sizes = {"samples": len(samples[1]), "held_out": len(held_out[1]), "restarts": restarts}
    peer = [run.seconds for _, run in results["backprop"]]
    arms = {arm: figures_of(pairs, peer) for arm, pairs in results.items()}
    return {"data": net.data, "settings": settings | sizes, "arms": arms}


def load(name: str, options: argparse.Namespace) -> tuple[Samples, Samples, tuple[int, ...]]:
    """The training set without a tenth of its samples, that tenth, and the shape of a sample."""
    options.max_train, device = QUICK if options.quick else None, options.device
    loaded = common.load(name, options)
    x, y = loaded.train
    if loaded.shape[0] == 3:
        x, _ = standardised(x, x)
    kept = torch.from_numpy(hold_out(y.numpy(), 0.1, 0))
    parts = [(x[rows].to(device), y[rows].to(device)) for rows in (kept, ~kept)]
    return parts[0], parts[1], loaded.shape


def train(
    net: Net, shape: tuple[int, ...], own: Row | None, samples: Samples, settings: Row
) -> Any:
    """A fresh model, trained, and its record."""
    torch.manual_seed(settings["seed"])
    model = net.model(shape).to(samples[1].device)
    if own is None:
        return model, tpsgd.fit_backprop(model, samples, **settings)
    return model, tpsgd.fit(model, samples, **settings, **own)


def figures_of(pairs: list[tuple[float, tpsgd.Run]], peer: list[float]) -> Row:
    """The figures of one arm's restarts; `peer` are the seconds of backprop in each turn."""
    runs = [run for _, run in pairs]
    return accuracies([share for share, _ in pairs]) | {
        "seconds": median(run.seconds for run in runs),
        "seconds_each": [run.seconds for run in runs],
        "ratio": median(run.seconds / other for run, other in zip(runs, peer, strict=True)),
        "peak_bytes": max(run.peak_bytes for run in runs),
        "kept_bytes": max(run.kept_bytes for run in runs),
        "sample_passes": runs[0].sample_passes,
        "settings": runs[0].settings,
    }


if __name__ == "__main__":
    program(main)
