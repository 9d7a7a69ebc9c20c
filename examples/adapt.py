"""A pretrained encoder learns your own pictures: the encoder stays, a few layers on it are trained.

    python examples/adapt.py FOLDER WEIGHTS

FOLDER has a subfolder of pictures for each class. WEIGHTS are VGG16's: download
https://download.pytorch.org/models/vgg16-397923af.pth. With no arguments a tiny encoder with random
weights learns three colours, which shows how it goes and needs no download.
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


def main(folder: str, encoder: adapt.Backbone, place: Path) -> None:
    """What it takes: the encoder, the pictures, the bytes, the training, the test, the files."""
    data = tpsgd.data.load(folder)  # 20 % of each class is held out as test data
    tap, shape = encoder.shapes(data.train[0]).popitem()  # the last tap
    layers = adapt.Layers()(shape, len(data.classes))  # such as `fit` will make: conv and dense
    plan = tpsgd.plan(layers, shape, batch_size=32, samples=len(data.train[1]))
    print(f"to be held: {plan.peak_bytes:,} bytes, by backprop {plan['backprop'].total:,}")
    train, test = (adapt.encode(encoder, part, [tap]) for part in (data.train, data.test))
    adaptor = adapt.fit(encoder, train, classes=data.classes, batch_size=32)
    probe = adapt.probe(encoder, train, classes=data.classes)  # the control: linear, solved
    print(f"adaptor {adaptor.evaluate(test):.1%}, linear probe {probe.evaluate(test):.1%}")
    again = adapt.load(adaptor.save(place), encoder)  # the layers alone, without the encoder
    print(f"saved and loaded: {again.evaluate(test):.1%}, {again.nbytes:,} bytes in {place}")


def tiny() -> adapt.Backbone:
    """Stands for a pretrained encoder: one convolution with random weights."""
    torch.manual_seed(0)
    return adapt.Backbone(nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU(), nn.MaxPool2d(2)), ["2"])


def squares(folder: Path) -> str:
    """Stands for your pictures: noisy squares of three colours."""
    noise = np.random.default_rng(0)
    for i in range(90):
        place = folder / ("red", "green", "blue")[i % 3]
        place.mkdir(parents=True, exist_ok=True)
        picture = noise.integers(0, 120, (8, 8, 3))
        picture[..., i % 3] += 100
        Image.fromarray(picture.astype("uint8")).save(place / f"{i}.png")
    return str(folder)


if sys.argv[2:] and sys.argv[2].endswith((".pth", ".safetensors", ".npz")):
    main(f"{sys.argv[1]}@160", adapt.backbone("vgg16", sys.argv[2]), Path("adaptor"))
else:
    print("no FOLDER and no WEIGHTS.pth are given: a tiny encoder learns three colours")
    here = Path(tempfile.mkdtemp())
    main(squares(here / "pictures"), tiny(), here / "adaptor")
