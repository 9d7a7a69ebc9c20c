"""Artificial samples and a small random encoder, in place of what `--smoke` cannot expect here."""

import torch
from torch import Tensor, nn

from tpsgd import adapt
from tpsgd.data import Data
from tpsgd.data.registry import find
from tpsgd_adapt.backbone import IMAGENET

PIXELS = 32  # edge of an image: large photographs would take minutes
NOTE = "artificial samples"


def data(name: str) -> Data:
    """A few random samples in the form of a built-in data set; classes differ in their mean.

    Examples:
        >>> data("seq-mnist-rows").shape, data("tweets").vocabulary
        ((28, 28), 1000)
    """
    entry = find(name)
    classes = entry.classes or tuple(map(str, range(entry.class_count)))
    shape = entry.shape
    if len(shape) == 3:
        shape = (shape[0], *(min(PIXELS, edge) for edge in shape[1:]))
    random = torch.Generator().manual_seed(0)
    train = max(60, min(300, 20 * len(classes)))
    splits = [
        samples(shape, len(classes), count, entry.vocabulary, random) for count in (train, 40)
    ]
    return Data(name, *splits, classes, shape, NOTE, entry.vocabulary)


def samples(
    shape: tuple[int, ...], classes: int, count: int, words: int | None, random: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Numbers in [0, 1] around the mean of a class, or words, half of them words of the class."""
    y = torch.arange(count) % classes
    if words is None:
        centres = torch.rand(classes, *shape, generator=torch.Generator().manual_seed(1))
        return (centres[y] + torch.rand(count, *shape, generator=random)) / 2, y
    own = words // classes
    anywhere = torch.randint(words, (count, *shape), generator=random)
    inside = torch.randint(own, (count, *shape), generator=random) + (own * y).unsqueeze(1)
    return torch.where(torch.rand(count, *shape, generator=random) < 0.5, inside, anywhere), y


def backbone() -> adapt.Backbone:
    """Three random convolutions with the taps of VGG16 that the experiments read."""
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveMaxPool2d(5),
    ]  # fmt: skip
    taps = {"pool3": "2", "pool4": "5", "pool5": "8"}
    mean, std = IMAGENET
    return adapt.Backbone(nn.Sequential(*layers), taps, mean=mean, std=std, name="stand-in")
