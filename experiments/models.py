"""Models of any class, cut into blocks, and backprop: nets of `experiments/nets` on small digits.

    python -m experiments.models --out results [--only ViT]

The rate of each arm, and the rule of the arms with a choice, are those with the best accuracy on a
held-out fifth of the training samples after a third of the epochs. Every block has the same epochs
as the net in backprop. The test samples are looked at once, by the net that is then trained on all
training samples.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from statistics import fmean
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
    is_complete,
    origin,
    program,
    result_file,
)
from experiments.nets import classic, dense, mobile, modern, pixels, sequences
from tpsgd import rules
from tpsgd.data.split import stratified

RATES = (1e-3, 3e-3, 1e-2)
RESTARTS = 3
BATCH = 32
FEW = 4  # blocks
SEED_OF_SEARCH = 100
NOISE = 0.5  # of the pictures whose strokes a net marks


# ---- digits as pictures, rows, tokens ------------------------------------------------------------


def pictures(x: Tensor, y: Tensor) -> Any:
    """8 x 8 pixels."""
    return x, y


def colour(x: Tensor, y: Tensor) -> Any:
    """8 x 8 pixels of three equal channels."""
    return x.expand(-1, 3, -1, -1).contiguous(), y


def large(x: Tensor, y: Tensor) -> Any:
    """16 x 16 pixels of three equal channels."""
    return colour(F.interpolate(x, scale_factor=2.0, mode="bilinear"), y)


def rows(x: Tensor, y: Tensor) -> Any:
    """Eight steps, a row of pixels each."""
    return x[:, 0], y


def tokens(x: Tensor, y: Tensor) -> Any:
    """64 tokens, the grey values."""
    return (16 * x[:, 0]).round().long().flatten(1), y


def fewer_tokens(x: Tensor, y: Tensor) -> Any:
    """16 tokens, the grey values of four pixels."""
    return tokens(F.avg_pool2d(x, 2), y)


def two_inputs(x: Tensor, y: Tensor) -> Any:
    """Pixels, and the means of four columns."""
    return (x, x[:, 0].mean(1)[:, :4].contiguous()), y


def strokes(x: Tensor, y: Tensor) -> Any:
    """Noisy pixels, and for each of them whether it is part of the digit."""
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(len(x)))
    return x + NOISE * noise, (x[:, 0] > 0.5).long()


# ---- nets ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Net:
    """How to make a net, what it reads, and the epochs of each block."""

    make: Callable[[], nn.Module]
    view: Callable[[Tensor, Tensor], Any]
    epochs: int = 20


VGG_PLAN = (16, "M", 32, 32, "M", 64, 64)
MOBILE = ((1, 8, 1, 1), (3, 12, 2, 1), (3, 16, 2, 2), (3, 24, 2, 1))
NETS = {
    "LeNet": Net(classic.LeNet, pictures),
    "VGG": Net(partial(classic.VGG, VGG_PLAN, dense=64, dropout=0.1), large),
    "ResNet18": Net(partial(classic.ResNet, width=16), colour, 12),
    "ResNet50": Net(partial(classic.ResNet, classic.Bottleneck, (3, 4, 6, 3), width=8), colour, 12),
    "MobileNetV2": Net(partial(mobile.MobileNetV2, MOBILE, width=8, last=64, dropout=0.1), colour),
    "Separable": Net(mobile.Separable, pictures),
    "Separable, no norm": Net(partial(mobile.Separable, norm=False), pictures),
    "DenseNet": Net(partial(dense.DenseNet, 8, (3, 3, 3), width=16), colour, 12),
    "ConvNeXt": Net(modern.ConvNeXt, large, 12),
    "MLP-Mixer": Net(partial(modern.Mixer, 16, 4, 32, 4), large),
    "ViT": Net(partial(modern.vit, 16, 4, 32, 4), large),
    "BERT": Net(partial(modern.bert, 17, 16, 32, 4, 10), fewer_tokens),
    "GRU": Net(partial(sequences.GRUClassifier, 8, 32, 10, 2), rows),
    "LSTM": Net(partial(sequences.LSTMClassifier, 17, 16, 32), tokens),
    "two inputs": Net(classic.TwoInputs, two_inputs),
    "U-Net": Net(partial(pixels.UNet, 1, 8, 2), strokes),
}
OF_TRANSFORMERS = ("ViT", "BERT")
IN_SMOKE = ("GRU", "two inputs", "U-Net")


# ---- arms ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """How a net learns: by a rule in an order, by default the one of `fit`; or by backprop."""

    rule: tpsgd.Rule | None
    order: Any = None


@dataclass(frozen=True)
class Arm:
    """Ways of learning, of which one is chosen, and where the net is cut."""

    ways: dict[str, Way]
    blocks: int | str | None = None


BY_DEFAULT = {"readout-learned": Way(rules.default())}
BY_READOUT = {
    "readout-learned": Way(rules.default(), tpsgd.sequential),
    "readout-learned, simultaneous": Way(rules.default(), tpsgd.simultaneous),
}
BY_AUXILIARY = {
    "auxiliary": Way(rules.auxiliary(share=0.9), tpsgd.sequential),
    "auxiliary, share 0": Way(rules.auxiliary(), tpsgd.sequential),
}
ARMS = {
    "backprop": Arm({"backprop": Way(None)}),
    "default cut": Arm(BY_DEFAULT),
    "4 blocks": Arm(BY_READOUT, FEW),
    "4 blocks, auxiliary": Arm(BY_AUXILIARY, FEW),
    "frozen": Arm({"frozen": Way(rules.frozen())}),
}
ARMS_OF_DEPTHWISE = {"2 blocks": Arm(BY_DEFAULT, 2), "layer by layer": Arm(BY_DEFAULT, "layers")}


def arms_of(name: str) -> dict[str, Arm]:
    """The arms of a net; one of depthwise convolutions is cut in more ways."""
    return ARMS | (ARMS_OF_DEPTHWISE if name.startswith("Separable") else {})


# ---- training ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """A net and its digits: training and test samples, as they are loaded."""

    net: Net
    train: Samples
    test: Samples

    def held_out(self) -> "Task":
        """The same with a fifth of the training samples as test samples."""
        x, y = self.train
        chosen = stratified(y.numpy(), len(y) - len(y) // 5, SEED_OF_SEARCH)
        mask = torch.as_tensor(chosen)
        return Task(self.net, (x[mask], y[mask]), (x[~mask], y[~mask]))

    def cut(self, blocks: int | str | None) -> int | str | None:
        """How many blocks: `FEW`, or without a number as many as there are, if they are fewer."""
        if blocks != FEW:
            return blocks
        inputs = self.net.view(*self.train)[0]
        shape = tuple(t.shape[1:] for t in inputs) if isinstance(inputs, tuple) else inputs[:2]
        return FEW if len(tpsgd.split(self.net.make(), shape)) > FEW else None

    def trained(
        self, way: Way, blocks: int | str | None, lr: float, epochs: int, seed: int
    ) -> tuple[float, tpsgd.Run, float]:
        """The test accuracy, the record and the CPU seconds of a net."""
        torch.manual_seed(seed)
        model = self.net.make()
        settings: Row = {"lr": lr, "epochs": epochs, "batch_size": BATCH, "seed": seed}
        settings |= {"lr_schedule": tpsgd.one_cycle(), "progress": False}
        data = self.net.view(*self.train)
        began = time.process_time()
        if way.rule is None:
            run = tpsgd.fit_backprop(model, data, **settings)
        else:
            settings |= {"rule": way.rule, "order": way.order, "blocks": blocks}
            run = tpsgd.fit(model, data, **settings)
        seconds = time.process_time() - began
        return tpsgd.evaluate(model, self.net.view(*self.test)), run, seconds


def search(task: Task, arm: Arm, blocks: int | str | None, epochs: int) -> Row:
    """The way and the rate with the best accuracy on held-out samples, and all accuracies."""
    held_out = task.held_out()

    def accuracy(way: Way, lr: float) -> float:
        return held_out.trained(way, blocks, lr, epochs, SEED_OF_SEARCH)[0]

    trials = {name: best_rate(RATES, partial(accuracy, way)) for name, way in arm.ways.items()}
    best = {name: trial["held_out"][trial["lr"]] for name, trial in trials.items()}
    name = max(best, key=lambda name: best[name])
    return {"way": name, "lr": trials[name]["lr"], "best_held_out": best, "trials": trials}


def row_of(task: Task, arm: Arm, smoke: bool) -> Row:
    """An arm's search, then its restarts on all training samples."""
    epochs, restarts = (1, 1) if smoke else (task.net.epochs, RESTARTS)
    blocks = task.cut(arm.blocks)
    chosen = search(task, arm, blocks, max(1, epochs // 3))
    way, lr = arm.ways[chosen["way"]], chosen["lr"]
    shares, runs, seconds = zip(
        *(task.trained(way, blocks, lr, epochs, seed) for seed in range(restarts)), strict=True
    )
    row = accuracies(shares) | chosen | {"cpu_seconds": fmean(seconds)}
    row["peak_bytes"] = max(run.total_bytes for run in runs)
    row["order"] = runs[0].settings.get("order")
    if way.rule is not None:
        row["blocks"] = [block.name for block in runs[0].blocks]
    return row


def main() -> None:
    """Run what is asked for; the file is written after every arm of a net."""
    parser = arguments(__doc__)
    parser.add_argument("--only", choices=list(NETS), nargs="*", default=list(NETS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    record, save = result_file(options, "models")
    record |= origin("models", "cpu") | {"rates": RATES, "batch_size": BATCH, "noise": NOISE}
    digits = tpsgd.data.load("digits", max_train=60 if options.smoke else None)
    for name in IN_SMOKE if options.smoke else options.only:
        if name in OF_TRANSFORMERS and not find_spec("transformers"):
            print(f"{name} is left out: transformers is not installed", flush=True)
            continue
        net = NETS[name]
        task = Task(net, digits.train, digits.test)
        entry = record.setdefault("nets", {}).setdefault(name, {"arms": {}})
        entry["parameters"] = sum(p.numel() for p in net.make().parameters())
        entry["epochs"] = net.epochs
        for label, arm in arms_of(name).items():
            if is_complete(entry["arms"].get(label), 1 if options.smoke else RESTARTS, options):
                continue
            row = entry["arms"][label] = row_of(task, arm, options.smoke)
            figures = f"{row['accuracy']:.1%} {row['way']}, {row['cpu_seconds']:.1f} s"
            print(f"{name:12} {label:19} {figures}", flush=True)
            save()


if __name__ == "__main__":
    program(main)
