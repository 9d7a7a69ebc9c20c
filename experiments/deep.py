"""Deep nets from scratch without backpropagation: VGG11 on Imagenette, VGG8 on CIFAR-10.

    python -m experiments.deep --out results [--images FILE.npz] [--only vgg11]

Batch norm, Adam with a rate that falls to 0, random crops and flips on the device, bfloat16 with
weights in float32; every batch trains every block as it passes (`simultaneous`). Accuracy, seconds
and peak memory of a row are those of the same runs. The rate of an arm is chosen by a short
training without a tenth of the training images, on that tenth.

- `predsim`, `readout` and `readout-learned` are not the paper's rules.
- `tpsgd-l2` here compares the standardised averages of the feature maps with P y*, and has a
  cross-entropy head (`features=256, standardise=True`); `tpsgd-l2, as printed` compares pixels.

A second call adds the restarts that are missing.
"""

import math
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

import tpsgd
from experiments.common import (
    Row,
    Samples,
    accuracies,
    arguments,
    best_rate,
    load_images,
    origin,
    result_file,
)
from tpsgd import augment, rules
from tpsgd.data.split import stratified
from tpsgd.units import size
from tpsgd.zoo.vgg import vgg

RATES = (3e-4, 1e-3)
SEARCH_EPOCHS = 2
ARMS: dict[str, Row | None] = {
    "backprop": None,
    "predsim": {"rule": rules.predsim()},
    "predsim, no convolution": {"rule": rules.predsim(share=0.9, convolve=False)},
    "tpsgd-l2": {
        "rule": rules.tpsgd_l2(features=256, standardise=True),
        "loss": tpsgd.cross_entropy,
    },
    "readout": {"rule": rules.readout()},
    "tpsgd-l2, as printed": {"rule": rules.tpsgd_l2()},
    "frozen": {"rule": rules.frozen()},
    "readout-learned": {"rule": rules.readout(learned=True)},
}


@dataclass(frozen=True)
class Net:
    """A VGG, its data and how it is trained."""

    data: str
    depth: int
    shape: tuple[int, int, int]
    epochs: int
    batch_size: int
    augmentation: Any
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    def fit(self, arm: str, samples: Samples, lr: float, epochs: int, seed: int) -> Any:
        """One training: the model and its record."""
        torch.manual_seed(seed)
        model = vgg(self.depth, self.shape, 10, batch_norm=True).to(samples[0].device)
        settings: Row = {
            "lr": lr,
            "epochs": epochs,
            "batch_size": self.batch_size,
            "seed": seed,
            "augment": self.augmentation,
            "precision": torch.bfloat16,
            "lr_schedule": lambda optimizer: cosine_decay(optimizer, epochs),
        }
        own = ARMS[arm]
        if own is None:
            return model, tpsgd.fit_backprop(model, samples, **settings)
        return model, tpsgd.fit(model, samples, schedule=tpsgd.simultaneous, **settings, **own)

    def scaled(self, x: Tensor) -> Tensor:
        """Images with mean 0 and deviation 1 per channel, channels last."""
        x = x.float().div_(255) if x.dtype is torch.uint8 else x
        mean, std = (
            torch.tensor(v, device=x.device).view(1, 3, 1, 1) for v in (self.mean, self.std)
        )
        return ((x - mean) / std).contiguous(memory_format=torch.channels_last)


NETS = {
    "vgg11": Net(
        "imagenette", 11, (3, 160, 160), 12, 64,
        augment.chain(augment.flip(), augment.resized_crop((0.5, 1.0))),
        (0.485, 0.456, 0.406), (0.229, 0.224, 0.225),
    ),
    "vgg8": Net(
        "cifar10", 8, (3, 32, 32), 10, 128, augment.chain(augment.flip(), augment.crop(4)),
        (0.491, 0.482, 0.447), (0.247, 0.243, 0.262),
    ),
}  # fmt: skip


def cosine_decay(optimizer: Optimizer, epochs: int) -> LambdaLR:
    """A learning rate that falls to 0 along a cosine."""
    return LambdaLR(optimizer, lambda epoch: (1 + math.cos(math.pi * epoch / epochs)) / 2)


def choose_rate(net: Net, arm: str, samples: Samples) -> Row:
    """The rate with the best accuracy on held-out training images after a short training."""
    x, y = samples
    part = torch.from_numpy(stratified(y.cpu().numpy(), len(y) * 9 // 10, 0)).to(y.device)

    def score(lr: float) -> float:
        model, _ = net.fit(arm, (x[part], y[part]), lr, SEARCH_EPOCHS, 100)
        return tpsgd.evaluate(model, (x[~part], y[~part]), batch_size=256)

    return best_rate(RATES, score)


def restart(net: Net, arm: str, train: Samples, test: Samples, seed: int, row: Row) -> None:
    """Train once more and add the result to the row."""
    model, run = net.fit(arm, train, row["lr"], net.epochs, seed)
    shares = [*row.get("accuracies", []), tpsgd.evaluate(model, test, batch_size=256)]
    seconds = [*row.get("seconds_each", []), run.seconds]
    row |= accuracies(shares) | {
        "seconds": fmean(seconds),
        "seconds_each": seconds,
        "peak_bytes": max(run.peak_bytes, row.get("peak_bytes", 0)),
        "restarts": len(shares),
        "settings": run.settings,
        "losses": [e.loss for e in run.history if e.block in (0, len(run.blocks))],
    }


def main() -> None:
    """Run what is asked for; the file is written after each training."""
    parser = arguments(__doc__)
    parser.add_argument("--images", type=Path, help="Imagenette: arrays x, y, x_test, y_test")
    parser.add_argument("--only", choices=list(NETS))
    parser.add_argument("--arms", default=";".join(ARMS), help="some of them, with ; between")
    parser.add_argument("--restarts", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin nothing after that")
    parser.add_argument("--max-train", type=int, help="fewer images, for a quick look")
    parser.add_argument("--note", default="", help="how the images were made, for the record")
    options, start = parser.parse_args(), time.perf_counter()
    record, save = result_file(options.out, "deep")
    record |= origin("deep", options.device) | {"note": options.note}
    for name in [options.only] if options.only else list(NETS):
        net = NETS[name]
        file = options.images if name == "vgg11" else None
        loaded = [t[: options.max_train].to(options.device) for t in load_images(net.data, file)]
        train, test = ((net.scaled(x), y.long()) for x, y in (loaded[:2], loaded[2:]))
        table = record.setdefault("nets", {}).setdefault(name, {"arms": {}})
        table |= {"epochs": net.epochs, "batch_size": net.batch_size, "train": len(train[1])}
        for seed in range(options.restarts):
            for arm in options.arms.split(";"):
                row = table["arms"].setdefault(arm, {})
                late = time.perf_counter() - start > options.seconds
                if row.get("restarts", 0) > seed or late:
                    continue
                row |= {} if "lr" in row else choose_rate(net, arm, train)
                restart(net, arm, train, test, seed, row)
                save()
                figures = f"{row['accuracy']:.2%} ± {row['deviation']:.2%} of {row['restarts']}"
                cost = f"{row['seconds']:7.1f} s {size(row['peak_bytes']):>9} {row['lr']:g}"
                print(f"{name} {arm:22} {figures} {cost}", flush=True)


if __name__ == "__main__":
    main()
