"""Deep nets from scratch without backpropagation: VGG11 on Imagenette, VGG8 on CIFAR-10.

    python -m experiments.deep --out results [--images FILE.npz] [--only vgg11]

Batch normalisation, Adam with a rate that falls to 0, random crops and flips made on the device,
bfloat16 with weights in float32; every batch teaches every block as it passes (`simultaneous`).
Accuracy, seconds and peak bytes of a row are those of the same runs. Rates are chosen, per arm, by
a short training on all but a tenth of the training images, judged by that tenth.

- `predsim`, `readout` and `readout-learned` are not the paper's rules.
- `tpsgd-l2` here compares the standardised averages of the feature maps with P y*, and has a
  cross-entropy head (`features=256, standardise=True`); `tpsgd-l2, as printed` compares pixels.

A second call adds the restarts that are missing.
"""

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from tpsgd.engine.evaluate import evaluate
from tpsgd.engine.fit import fit
from tpsgd.engine.schedules import simultaneous

from tpsgd import data, rules
from tpsgd.comparison.provenance import machine, versions
from tpsgd.data.split import stratified
from tpsgd.engine import augment
from tpsgd.engine.backprop import fit_backprop
from tpsgd.errors import TpsgdError
from tpsgd.losses import cross_entropy
from tpsgd.units import size
from tpsgd.zoo.vgg import vgg

Row = dict[str, Any]
Samples = tuple[Tensor, Tensor]
RATES = (3e-4, 1e-3)
SEARCHED = 2  # epochs when rates are compared
ARMS: dict[str, Row | None] = {
    "backprop": None,
    "predsim": {"rule": rules.predsim()},
    "predsim, no convolution": {"rule": rules.predsim(share=0.9, convolve=False)},
    "tpsgd-l2": {"rule": rules.tpsgd_l2(features=256, standardise=True), "loss": cross_entropy},
    "readout": {"rule": rules.readout()},
    "tpsgd-l2, as printed": {"rule": rules.tpsgd_l2()},
    "frozen": {"rule": rules.frozen()},
    "readout-learned": {"rule": rules.readout(learned=True)},
}


@dataclass(frozen=True)
class Net:
    """A net and how it is trained."""

    depth: int
    shape: tuple[int, int, int]
    epochs: int
    batch_size: int
    augmented: Any
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    def __call__(self) -> nn.Module:
        return vgg(self.depth, self.shape, 10, batch_norm=True)


NETS = {
    "vgg11": Net(
        11, (3, 160, 160), 12, 64, augment.chain(augment.flip(), augment.resized_crop((0.5, 1.0))),
        (0.485, 0.456, 0.406), (0.229, 0.224, 0.225),
    ),
    "vgg8": Net(
        8, (3, 32, 32), 10, 128, augment.chain(augment.flip(), augment.crop(4)),
        (0.491, 0.482, 0.447), (0.247, 0.243, 0.262),
    ),
}  # fmt: skip


def trained(net: Net, arm: str, samples: Samples, lr: float, epochs: int, seed: int) -> Any:
    """One training: the model and its record."""
    torch.manual_seed(seed)
    model = net().to(samples[0].device)
    own = ARMS[arm]
    method: Callable[..., Any] = fit_backprop if own is None else fit
    run = method(
        model, samples, lr=lr, epochs=epochs, batch_size=net.batch_size, seed=seed,
        augment=net.augmented, precision=torch.bfloat16, lr_schedule=partial(_down, epochs),
        **({} if own is None else {"schedule": simultaneous, **own}),
    )  # fmt: skip
    return model, run


def _down(epochs: int, optimizer: Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda epoch: (1 + math.cos(math.pi * epoch / epochs)) / 2)


def rate(net: Net, arm: str, samples: Samples) -> Row:
    """The rate that held-out training images choose, after a short training."""
    x, y = samples
    part = torch.from_numpy(stratified(y.cpu().numpy(), len(y) * 9 // 10, 0)).to(y.device)
    tried: dict[float, float] = {}
    for lr in RATES:
        try:
            model, _ = trained(net, arm, (x[part], y[part]), lr, SEARCHED, 100)
            tried[lr] = evaluate(model, (x[~part], y[~part]), batch_size=256)
        except TpsgdError:  # it diverged
            tried[lr] = 0.0
    return {"lr": max(tried, key=lambda lr: tried[lr]), "held_out": tried}


def restart(net: Net, arm: str, train: Samples, test: Samples, seed: int, row: Row) -> None:
    """Train once more and add what came out to the row."""
    model, run = trained(net, arm, train, row["lr"], net.epochs, seed)
    share = evaluate(model, test, batch_size=256)
    row.setdefault("accuracies", []).append(share)
    row.setdefault("seconds_each", []).append(run.seconds)
    shares = row["accuracies"]
    row |= {
        "accuracy": fmean(shares),
        "deviation": stdev(shares) if len(shares) > 1 else 0.0,
        "seconds": fmean(row["seconds_each"]),
        "peak_bytes": max(run.peak_bytes, row.get("peak_bytes", 0)),
        "restarts": len(shares),
        "settings": run.settings,
        "losses": [e.loss for e in run.history if e.block in (0, len(run.blocks))],
    }


def main() -> None:
    """Run what is asked for; the file is written after each training."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--images", type=Path, help="Imagenette: arrays x, y, x_test, y_test")
    parser.add_argument("--only", choices=list(NETS))
    parser.add_argument("--arms", default=";".join(ARMS), help="some of them, with ; between")
    parser.add_argument("--restarts", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin nothing after that")
    parser.add_argument("--note", default="", help="how the images were made, for the record")
    wanted, began = parser.parse_args(), time.perf_counter()
    wanted.out.mkdir(parents=True, exist_ok=True)
    file = wanted.out / "deep.json"
    record: Row = json.loads(file.read_text()) if file.exists() else {}
    record |= {"experiment": "deep", "machine": machine(wanted.device), "versions": versions()}
    record |= {"command": "python -m experiments.deep --out results", "note": wanted.note}
    for name in [wanted.only] if wanted.only else list(NETS):
        net = NETS[name]
        train, test = samples(name, net, wanted.images, wanted.device)
        table = record.setdefault("nets", {}).setdefault(name, {"arms": {}})
        table |= {"epochs": net.epochs, "batch_size": net.batch_size, "train": len(train[1])}
        for seed in range(wanted.restarts):
            for arm in wanted.arms.split(";"):
                row = table["arms"].setdefault(arm, {})
                if row.get("restarts", 0) > seed or time.perf_counter() - began > wanted.seconds:
                    continue
                row |= {} if "lr" in row else rate(net, arm, train)
                restart(net, arm, train, test, seed, row)
                file.write_text(json.dumps(record, indent=1))
                print(f"{time.perf_counter() - began:6.1f} s {name} {line(arm, row)}", flush=True)


def samples(name: str, net: Net, file: Path | None, device: str) -> tuple[Samples, Samples]:
    """Pictures on the device, scaled, and their classes."""
    if file is not None and name == "vgg11":
        arrays = np.load(file)
        parts = [torch.from_numpy(arrays[k]) for k in ("x", "y", "x_test", "y_test")]
    else:
        loaded = data.load("imagenette" if name == "vgg11" else "cifar10")
        parts = [*loaded.train, *loaded.test]
    x, y, x_test, y_test = (t.to(device) for t in parts)
    return (_scaled(x, net), y.long()), (_scaled(x_test, net), y_test.long())


def _scaled(x: Tensor, net: Net) -> Tensor:
    x = x.float().div_(255) if x.dtype is torch.uint8 else x
    mean, std = (torch.tensor(v, device=x.device).view(1, 3, 1, 1) for v in (net.mean, net.std))
    return ((x - mean) / std).contiguous(memory_format=torch.channels_last)


def line(arm: str, row: Row) -> str:
    """A row for the terminal."""
    figures = f"{row['accuracy']:.2%} ± {row['deviation']:.2%} of {row['restarts']}"
    return f"{arm:22} {figures} {row['seconds']:7.1f} s {size(row['peak_bytes']):>9} {row['lr']:g}"


if __name__ == "__main__":
    main()
