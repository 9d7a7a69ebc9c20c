"""Deep nets from scratch without backpropagation: VGGs, ResNets, vision transformers.

    python -m experiments.deep --out results [--images FOLDER] [--only vgg11] [--small]

Every arm has the recipe of its net, a value of `zoo.recipes`: one cycle, flips and mirrored shifts
on the device, on a GPU bfloat16 with weights in float32; every batch trains every block as it
passes. Nets whose names end in `small` learn a part of CIFAR-10 at half its size on a CPU. The rate
of an arm is chosen by a short training without a tenth of the training images, on that tenth, from
the same rates for all arms. The accuracy of each epoch is that of the test images, and nothing is
chosen by it.

- One layer a block: `predsim`, `auxiliary`, `readout` and `readout-learned` are not the paper's
  rules; `tpsgd-l2` here compares the standardised averages of the feature maps with P y*, and has a
  cross-entropy head (`features=2048, standardise=True`).
- `4 blocks, ...`: gradients flow inside each of four blocks of several layers and stop at its edge.
- `small head` is `auxiliary` as it is by default; `auxiliary` here has nine tenths of similarity.
- `4 blocks` are cut where memory is lowest, `4 stages` where a net halves its feature maps.

Runs may go on side by side on one device, so their seconds say little: `--clock` trains each arm
alone for a few epochs on some of the images, and writes down the seconds of an epoch of them all
and the peak memory. A second call adds the restarts that are missing.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tpsgd
from experiments.common import (
    Row,
    Samples,
    accuracies,
    arguments,
    best_rate,
    load_images,
    origin,
    program,
    result_file,
    with_data,
)
from tpsgd import rules
from tpsgd.common.units import size
from tpsgd.data.split import stratified
from tpsgd.zoo import recipes
from tpsgd.zoo.recipes import Recipe, deep, residual
from tpsgd.zoo.resnet import resnet
from tpsgd.zoo.vit import vit

RATES = (5e-4, 1e-3, 2e-3, 4e-3)
CLOCK_EPOCHS, CLOCK_IMAGES = 3, 12_800
SIMILAR = rules.predsim(share=0.9, convolve=False)
STAGES = "stages"
ARMS: dict[str, Row | None] = {
    "backprop": None,
    "predsim": {"rule": rules.predsim()},
    "auxiliary": {"rule": rules.auxiliary(share=0.9)},
    "4 blocks, predsim": {"rule": rules.predsim(), "blocks": 4},
    "readout": {"rule": rules.readout()},
    "4 blocks, auxiliary": {"rule": rules.auxiliary(share=0.9), "blocks": 4},
    "predsim, no convolution": {"rule": SIMILAR},
    "4 blocks, predsim, no convolution": {"rule": SIMILAR, "blocks": 4},
    "readout-learned": {"rule": rules.readout(learned=True)},
    "4 blocks, readout-learned": {"rule": rules.readout(learned=True), "blocks": 4},
    "1 block": {"rule": rules.readout(), "blocks": 1},  # backprop; ReLU and pooling store less
    "2 blocks, predsim": {"rule": rules.predsim(), "blocks": 2},
    "auxiliary, published": {"rule": rules.auxiliary(kernels=(1, 3), share=0.0)},
    "tpsgd-l2": {
        "rule": rules.tpsgd_l2(features=2048, standardise=True),
        "loss": tpsgd.cross_entropy,
    },
    "small head": {"rule": rules.auxiliary()},
    "4 blocks, small head": {"rule": rules.auxiliary(), "blocks": 4},
    "2 blocks, small head": {"rule": rules.auxiliary(), "blocks": 2},
    "4 stages, small head": {"rule": rules.auxiliary(), "blocks": STAGES},
    "4 stages, two layers": {"rule": rules.auxiliary(kernels=(1, 3)), "blocks": STAGES},
    "wide head": {"rule": rules.auxiliary(channels=256)},
    "backprop-checkpointed": {"segments": 4},
    "backprop-micro": {"memory": tpsgd.Memory(micro_batch=32)},
    "frozen": {"rule": rules.frozen()},
    "random": {"rule": rules.untrained()},
}
OF_RECIPES = (
    *("backprop", "4 blocks, small head", "small head", "2 blocks, small head"),
    *("backprop-checkpointed", "backprop-micro", "frozen", "random"),
)
OF_STAGES = (*OF_RECIPES, "4 stages, small head", "wide head")
OF_RESIDUAL = (*OF_STAGES, "4 stages, two layers")

SMOKE_ARMS = ("backprop", "readout", "4 blocks, auxiliary")


@dataclass(frozen=True)
class Part:
    """The first images of a data set, averaged to fewer pixels."""

    train: int
    test: int
    cells: int

    def of(self, images: Sequence[Tensor]) -> list[Tensor]:
        """Training and test images with their labels, from whole data sets."""
        x, y, x_test, y_test = images
        cut = x[: self.train], y[: self.train], x_test[: self.test], y_test[: self.test]
        return [
            t if t.dim() < 4 else F.avg_pool2d(t.float() / 255, t.shape[-1] // self.cells)
            for t in cut
        ]


@dataclass(frozen=True)
class Net:
    """A net, its data and its recipe."""

    data: str
    model: Callable[[tuple[int, ...]], nn.Module]
    recipe: Recipe
    search_epochs: int
    rates: tuple[float, ...] = RATES
    arms: tuple[str, ...] = tuple(ARMS)
    part: Part | None = None
    stages: tuple[int, ...] = ()  # the numbers of layers in four blocks

    def fit(
        self,
        arm: str,
        samples: Samples,
        lr: float,
        epochs: int,
        seed: int,
        validation: Samples | None = None,
    ) -> Any:
        """One training: the model and its record."""
        torch.manual_seed(seed)
        device, shape = samples[0].device, tuple(samples[0].shape[1:])
        model = self.model(shape).to(device)
        chosen: Row = {"lr": lr, "epochs": epochs, "seed": seed, "validation": validation}
        settings = self.recipe.settings(shape, device, **chosen)
        own = dict(ARMS[arm] or {})
        if own.get("blocks") == STAGES:
            own["blocks"] = list(self.stages)
        train = tpsgd.fit if "rule" in own else tpsgd.fit_backprop
        return model, train(model, samples, **settings, **own)

    def scaled(self, *images: Tensor) -> list[Tensor]:
        """Images, channels last; the first ones get mean 0 and deviation 1 per channel."""
        floats = [x.float().div_(255) if x.dtype is torch.uint8 else x for x in images]
        std, mean = torch.std_mean(floats[0], (0, 2, 3), keepdim=True)
        layout = torch.channels_last
        return [((x - mean) / std).contiguous(memory_format=layout) for x in floats]


def resnet18(shape: tuple[int, ...], width: int = 64) -> nn.Module:
    """For images under 64 px."""
    return resnet(18, shape, 10, small=True, width=width)


CIFAR = replace(deep, epochs=40, batch_size=128, cutout=0.25)
OF_SGD, OF_ADAMW = (0.05, 0.1, 0.2), (5e-4, 1e-3, 2e-3)
SMALL = Part(10_000, 2_000, 16)
NETS = {
    "vgg11": Net("imagenette", lambda shape: deep.vgg(11, shape, 10), deep, 2),
    "vgg8": Net("cifar10", lambda shape: deep.vgg(8, shape, 10), CIFAR, 2),
    "resnet18": Net("cifar10", resnet18, replace(CIFAR, epochs=15), 1),
    "resnet18-sgd": Net(
        "cifar10", resnet18, residual, 3, OF_SGD, OF_RESIDUAL, None, (3, 2, 2, 3)
    ),
    "resnet18-sgd-60": Net(
        "cifar10", resnet18, replace(residual, epochs=60), 3, OF_SGD, OF_RESIDUAL, None,
        (3, 2, 2, 3),
    ),
    "vgg8-sgd": Net(
        "cifar10", lambda shape: deep.vgg(8, shape, 10), replace(residual, epochs=40), 1, OF_SGD,
        OF_STAGES, None, (2, 2, 2, 2),
    ),
    "vit": Net(
        "cifar10", lambda shape: vit(shape, 10), replace(recipes.vit, epochs=50), 2, OF_ADAMW,
        OF_RECIPES,
    ),
    "resnet18-small": Net(
        "cifar10", partial(resnet18, width=16), replace(residual, epochs=12), 2, OF_SGD, OF_RECIPES,
        SMALL,
    ),
    "vit-small": Net(
        "cifar10", lambda shape: vit(shape, 10, width=64, patch=4), recipes.vit, 3, OF_ADAMW,
        OF_RECIPES, SMALL,
    ),
}  # fmt: skip


def choose_rate(net: Net, arm: str, samples: Samples) -> Row:
    """The rate with the best accuracy on held-out training images after a short training."""
    x, y = samples
    part = torch.from_numpy(stratified(y.cpu().numpy(), len(y) * 9 // 10, 0)).to(y.device)

    def score(lr: float) -> float:
        model, _ = net.fit(arm, (x[part], y[part]), lr, net.search_epochs, 100)
        return tpsgd.evaluate(model, (x[~part], y[~part]), batch_size=256)

    return best_rate(net.rates, score)


def restart(net: Net, arm: str, train: Samples, test: Samples, seed: int, row: Row) -> None:
    """Train once more and add the result to the row."""
    curve = test if seed == 0 else None
    model, run = net.fit(arm, train, row["lr"], net.recipe.epochs, seed, curve)
    share = tpsgd.evaluate(model, test, batch_size=256)
    last = max((e.block for e in run.history), default=0)
    row |= accuracies([share], row if "accuracies" in row else None)
    row |= {"restarts": len(row["accuracies"]), "settings": run.settings}
    row["cut"] = [b.name for b in run.blocks]
    row["scales"] = [b.scale for b in run.blocks]
    if seed == 0:
        row["curve"] = [e.val_accuracy for e in run.history if e.block == last]
        row["block_accuracies"] = [
            [e.val_accuracy for e in run.history if e.block == i][-1]
            for i in sorted({e.block for e in run.history})
        ]


def clock(net: Net, arm: str, train: Samples, row: Row) -> None:
    """The seconds of an epoch and the peak memory of an arm that has the device for itself."""
    samples, all_images = (train[0][:CLOCK_IMAGES], train[1][:CLOCK_IMAGES]), len(train[1])
    _, run = net.fit(arm, samples, row.get("lr", 1e-3), CLOCK_EPOCHS, 0)
    last = max((e.block for e in run.history), default=0)
    times = [e.seconds for e in run.history if e.block == last]
    epochs = [(b - a) * all_images / len(samples[1]) for a, b in pairwise(times)]
    row |= {
        "epoch_seconds": median(epochs) if epochs else run.seconds,
        "peak_bytes": run.peak_bytes,
        "seconds": (median(epochs) if epochs else 0.0) * net.recipe.epochs,
    }


def learn(
    net: Net, arm: str, train: Samples, test: Samples, seed: int, row: Row, left: float
) -> None:
    """Choose an arm's rate if it has none, and train a restart if it ends in the seconds left."""
    began = time.perf_counter()
    row |= {} if "lr" in row else choose_rate(net, arm, train)
    search, began = time.perf_counter() - began, time.perf_counter()
    epochs = net.search_epochs * len(net.rates)
    if search * (1 + net.recipe.epochs / epochs) <= left:
        restart(net, arm, train, test, seed, row)
        row["took"] = time.perf_counter() - began  # seconds, to expect of the next restart


def main() -> None:
    """Run what is asked for; the file is written after each training."""
    parser = arguments(__doc__)
    parser.add_argument("--images", type=Path, help="a folder of arrays, such as imagenette.npz")
    parser.add_argument("--only", nargs="+", choices=list(NETS), default=list(NETS))
    parser.add_argument("--small", action="store_true", help="nets for a CPU; deep_small.json")
    parser.add_argument("--arms", help="some of them, with ; between")
    parser.add_argument("--restarts", type=int, default=3)
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="begin nothing that ends later"
    )
    parser.add_argument("--max-train", type=int, help="fewer images, for a quick look")
    parser.add_argument("--clock", action="store_true", help="seconds and memory, no accuracy")
    parser.add_argument("--note", default="", help="how the images were made, for the record")
    options, start = parser.parse_args(), time.perf_counter()
    if options.smoke:
        options.restarts, options.arms, options.max_train = 1, ";".join(SMOKE_ARMS), 16
    record, save = result_file(options, "deep_small" if options.small else "deep")
    words = ["--small"] if options.small else []
    record |= origin("deep", options.device, *words) | {"note": options.note}
    options.only = [name for name in options.only if name.endswith("small") == options.small]
    if not options.only:
        raise tpsgd.TpsgdError("nets whose names end in small need --small, and others do not")
    images = partial(load_images, folder=options.images, smoke=options.smoke)
    for name, arrays in with_data(options.only, lambda name: images(NETS[name].data)):
        net = NETS[name]
        if options.smoke:
            net = replace(net, recipe=replace(net.recipe, epochs=1))
        loaded = net.part.of(arrays) if net.part else arrays
        loaded = [t[: options.max_train].to(options.device) for t in loaded]
        x, x_test = net.scaled(loaded[0], loaded[2])
        train, test = (x, loaded[1].long()), (x_test, loaded[3].long())
        table = record.setdefault("nets", {}).setdefault(name, {"arms": {}})
        table |= {"epochs": net.recipe.epochs, "recipe": str(net.recipe), "train": len(train[1])}
        chosen = net.arms if options.arms is None else options.arms.split(";")
        for seed in range(1 if options.clock else options.restarts):
            for arm in chosen:
                if options.again and seed == 0 and not options.clock:
                    table["arms"][arm] = {}
                row = table["arms"].setdefault(arm, {"lr": net.rates[0]} if options.smoke else {})
                left = options.seconds - (time.perf_counter() - start)
                late = row.get("took", 0.0) > left
                if late or (not options.clock and row.get("restarts", 0) > seed):
                    continue
                began = time.perf_counter()
                if options.clock:
                    clock(net, arm, train, row)
                else:
                    learn(net, arm, train, test, seed, row, left)
                save()
                shown = _shown(row) + f"  ({time.perf_counter() - began:.0f} s)"
                print(f"{name} {arm:34} {shown}", flush=True)


def _shown(row: Row) -> str:
    """A row for the terminal."""
    words = []
    if "accuracy" in row:
        words += [f"{row['accuracy']:.2%} ± {row['deviation']:.2%} of {row['restarts']}"]
    if "epoch_seconds" in row:
        words += [f"{row['epoch_seconds']:.2f} s an epoch, {size(row['peak_bytes'])}"]
    return ", ".join(words) + f", lr {row.get('lr', math.nan):g}"


if __name__ == "__main__":
    program(main)
