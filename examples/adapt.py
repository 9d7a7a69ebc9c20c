"""Adapt a pretrained encoder to your images: the encoder is frozen, a few layers on it are trained.

    python examples/adapt.py FOLDER WEIGHTS

FOLDER has a subfolder of images for each class. WEIGHTS are VGG16's: download
https://download.pytorch.org/models/vgg16-397923af.pth. Without arguments, a tiny encoder with
random weights learns three colours, which needs no download.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn

import tpsgd
from tpsgd import adapt


def main(folder: str, encoder: adapt.Backbone, output: Path) -> None:
    """Load the images, plan the memory, train, test, save and load."""
    data = tpsgd.data.load(folder)  # 20 % of each class is held out as test data
    tap, shape = encoder.shapes(data.train[0]).popitem()  # the last tap
    layers = adapt.Layers()(shape, len(data.classes))  # as `fit` will make them: conv and dense
    plan = tpsgd.plan(layers, shape, batch_size=32, samples=len(data.train[1]))
    print(f"planned peak: {plan.peak_bytes:,} bytes, with backprop {plan['backprop'].total:,}")
    train, test = (adapt.encode(encoder, pair, [tap]) for pair in (data.train, data.test))
    adaptor = adapt.fit(encoder, train, classes=data.classes, batch_size=32)
    probe = adapt.probe(encoder, train, classes=data.classes)  # the control: a linear classifier
    print(f"adaptor {adaptor.evaluate(test):.1%}, linear probe {probe.evaluate(test):.1%}")
    loaded = adapt.load(adaptor.save(output), encoder)  # the files do not contain the encoder
    print(f"saved and loaded: {loaded.evaluate(test):.1%}, {loaded.nbytes:,} bytes in {output}")


def tiny() -> adapt.Backbone:
    """In place of a pretrained encoder: one convolution with random weights."""
    torch.manual_seed(0)
    return adapt.Backbone(nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU(), nn.MaxPool2d(2)), ["2"])


def squares(folder: Path) -> str:
    """In place of your images: noisy squares of three colours."""
    noise = np.random.default_rng(0)
    for i in range(90):
        subfolder = folder / ("red", "green", "blue")[i % 3]
        subfolder.mkdir(parents=True, exist_ok=True)
        image = noise.integers(0, 120, (8, 8, 3))
        image[..., i % 3] += 100
        Image.fromarray(image.astype("uint8")).save(subfolder / f"{i}.png")
    return str(folder)


if sys.argv[2:] and sys.argv[2].endswith((".pth", ".safetensors", ".npz")):
    main(f"{sys.argv[1]}@160", adapt.backbone("vgg16", sys.argv[2]), Path("adaptor"))
else:
    print("without FOLDER and WEIGHTS.pth, a tiny encoder learns three colours")
    temporary = Path(tempfile.mkdtemp())
    main(squares(temporary / "images"), tiny(), temporary / "adaptor")
