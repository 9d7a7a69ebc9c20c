"""An adaptor on a device: features of a frozen VGG16 into a head that learns in the exported C.

The features are the means of pool5, 512 numbers for a photo of Imagenette at 128 px, divided by one
number, their deviation over the training photos. A phone, or a larger chip, computes them; the head
learns from one photo at a time. VGG16 was trained on ImageNet, which has Imagenette's classes: that
heads are accurate is expected; how they compare is what is measured.
"""

import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import numpy as np
import torch
from edge_nets import Case, random_bytes
from edge_nets import measured as board_row
from torch import Tensor, nn

import tpsgd
from tpsgd import projections, rules
from tpsgd.data.images import decode_images, image_files
from tpsgd.data.split import hold_out
from tpsgd.maths.random import Key, permutation
from tpsgd_adapt import shots
from tpsgd_adapt.pretrained import backbone
from tpsgd_export.read_model import read_model
from tpsgd_export.to_c.compiled import CompiledNet
from tpsgd_export.to_c.source import sources

PIXELS, CLASSES, TRAIN, TEST = 128, 10, 80, 40  # photos of a class
FEATURES, HIDDEN, SEEDS = 512, 64, 5
FEW, FEW_EPOCHS, EPOCHS = 10, 20, 5  # few photos of a class, epochs for few and for all
RATES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
BINARY = projections.binary()
Samples = tuple[Tensor, Tensor]
Row = dict[str, Any]
Trained = tuple[nn.Sequential, int]  # a net, and the bytes that training it took at most


class Photos(NamedTuple):
    """Features and labels; class c has the same number of photos as every other."""

    train: Samples
    test: Samples


# ---- features ------------------------------------------------------------------------------------


def photos(file: Path) -> Photos:
    """The features in a file, or those that are computed and written there."""
    if not file.is_file():
        folder = Path(os.environ["TPSGD_DATA"])
        arrays = {}
        for part, name, count in (("train", "train", TRAIN), ("val", "test", TEST)):
            files = chosen(folder / "imagenette2-160" / part, count)
            arrays[name] = encoded(folder / "vgg16" / "vgg16_features.npz", files).numpy()
        np.savez(file, **arrays)
    arrays = np.load(file)
    scale = arrays["train"].std()
    sets = [
        (torch.tensor(arrays[name] / scale), torch.arange(CLASSES).repeat_interleave(count))
        for name, count in (("train", TRAIN), ("test", TEST))
    ]
    return Photos(sets[0], sets[1])


def chosen(folder: Path, count: int) -> list[Path]:
    """Photos of every class, evenly from its list, class after class."""
    files: list[Path] = []
    for each in sorted(folder.iterdir()):
        own = [file for file in image_files(folder) if file.parent == each]
        files += own[:: len(own) // count][:count]
    return files


@torch.inference_mode()
def encoded(weights: Path, files: list[Path]) -> Tensor:
    """The means of pool5."""
    net = backbone("vgg16", weights)
    rows = []
    for first in range(0, len(files), 8):
        names = np.array([str(file) for file in files[first : first + 8]], dtype=object)
        x = torch.from_numpy(decode_images(names, (3, PIXELS, PIXELS)))
        rows.append(net(x, ["pool5"])["pool5"].mean((2, 3)))
    return torch.cat(rows)


# ---- heads ---------------------------------------------------------------------------------------


def head(hidden: bool, seed: int) -> nn.Sequential:
    """A linear head, or one with a hidden layer."""
    torch.manual_seed(seed)
    if not hidden:
        return nn.Sequential(nn.Linear(FEATURES, CLASSES))
    return nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.LeakyReLU(), nn.Linear(HIDDEN, CLASSES))


def in_c(
    hidden: bool, rule: rules.Rule, train: Samples, test: Samples, lr: float, epochs: int, seed: int
) -> float:
    """The accuracy of a head that has learned in the exported C, one photo at a time."""
    with tempfile.TemporaryDirectory() as folder:
        model = head(hidden, seed)
        for name, text in sources(read_model(model, rule, (FEATURES,), seed=seed)).items():
            Path(folder, name).write_text(text)
        net = CompiledNet(folder)
    x, y = train
    for epoch in range(epochs):
        for i in torch.cat(list(permutation(len(x), Key(seed, 0, epoch)))).tolist():
            net.step(x[i], y[i : i + 1], lr)
    logits = torch.stack([net.forward(photo) for photo in test[0]])
    return float((logits.argmax(1) == test[1]).float().mean())


def trained_by_backprop(train: Samples, lr: float, epochs: int, seed: int) -> Trained:
    """The head with a hidden layer after backprop in Python, one photo at a time."""
    net = head(True, seed)
    run = tpsgd.fit_backprop(
        net, train, optimizer=tpsgd.sgd, lr=lr, epochs=epochs, batch_size=1, seed=seed,
        progress=False,
    )  # fmt: skip
    return net, run.peak_bytes


def solved(train: Samples, seed: int) -> Trained:
    """A linear head that is solved in Python."""
    net = head(False, seed)
    return net, tpsgd.fit(net, train, optimizer=tpsgd.ridge(), progress=False).peak_bytes


def by_backprop(train: Samples, test: Samples, lr: float, epochs: int, seed: int) -> float:
    """The accuracy after backprop."""
    return tpsgd.evaluate(trained_by_backprop(train, lr, epochs, seed)[0], test)


def by_ridge(train: Samples, test: Samples, seed: int) -> float:
    """The accuracy of the solved head."""
    return tpsgd.evaluate(solved(train, seed)[0], test)


ARMS: dict[str, Callable[..., float]] = {
    "512-10, C": partial(in_c, False, rules.readout()),
    "512-64-10 readout, C": partial(in_c, True, rules.readout(projection=BINARY, scale=4.0)),
    "512-64-10 frozen, C": partial(in_c, True, rules.frozen()),
    "512-64-10 backprop, Python": by_backprop,
}
BOARDS = {  # the same nets and rules on the Cortex-M4F
    "512-10, C": Case("head 512-10"),
    "512-64-10 readout, C": Case("head 512-64-10"),
    "512-64-10 frozen, C": Case("head 512-64-10", "frozen"),
}
MEASURED = (
    *("ram", "ram_bytes", "samples_bytes", "stack_bytes", "total_bytes", "code_bytes"),
    *("constants_bytes", "step_instructions", "inference_instructions"),
)


def learned(arm: Callable[..., float], subsets: list[Samples], test: Samples, epochs: int) -> Row:
    """The rate by validation, then the accuracy on the test photos; a seed for each subset."""
    scores = {
        lr: fmean(
            arm(*held_out(subset, seed), lr, epochs, seed) for seed, subset in enumerate(subsets)
        )
        for lr in RATES
    }
    lr = max(scores, key=lambda rate: scores[rate])
    accuracies = [arm(subset, test, lr, epochs, seed) for seed, subset in enumerate(subsets)]
    validation = {str(rate): score for rate, score in scores.items()}
    return {"lr": lr, "validation": validation} | _spread(accuracies)


def _spread(accuracies: list[float]) -> Row:
    mean, deviation = fmean(accuracies), stdev(accuracies)
    return {"accuracies": accuracies, "accuracy": mean, "deviation": deviation}


def held_out(samples: Samples, seed: int) -> tuple[Samples, Samples]:
    """Four fifths of the photos, and the others for validation."""
    x, y = samples
    mask = torch.from_numpy(hold_out(y.numpy(), 0.2, seed))
    return (x[mask], y[mask]), (x[~mask], y[~mask])


def measure(file: Path) -> Row:
    """Accuracy by photos and arm, and the bytes and instructions of the heads in C."""
    train, test = photos(file)
    few = [shots(train[1], FEW, seed) for seed in range(SEEDS)]
    sets = {
        str(FEW): ([(train[0][i], train[1][i]) for i in few], FEW_EPOCHS),
        "all": ([train] * SEEDS, EPOCHS),
    }
    rows = []
    for photos_of_a_class, (subsets, epochs) in sets.items():
        about = {"photos_of_a_class": photos_of_a_class, "epochs": epochs}
        for name, arm in ARMS.items():
            rows.append({"arm": name} | about | learned(arm, subsets, test, epochs))
        accuracies = [by_ridge(subset, test, seed) for seed, subset in enumerate(subsets)]
        rows.append({"arm": "512-10 ridge, Python"} | about | {"epochs": 1} | _spread(accuracies))
    settings = {
        "pixels": PIXELS, "train": len(train[1]), "test": len(test[1]), "features": FEATURES,
        "batch_size": 1, "optimizer": "sgd", "rates": RATES, "seeds": SEEDS,
        "rate_chosen_by": "a fifth of the training photos, mean of the seeds",
    }  # fmt: skip
    boards = {}
    for name, case in BOARDS.items():
        row = board_row(case, "Cortex-M4F", random_bytes(case))
        boards[name] = {key: row[key] for key in MEASURED}
    peaks = {
        "512-64-10 backprop, Python": trained_by_backprop(train, 0.01, 1, 0)[1],
        "512-10 ridge, Python": solved(train, 0)[1],
    }
    return {"settings": settings, "rows": rows, "boards": boards, "peak_bytes_in_python": peaks}
