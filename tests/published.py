"""The nets of `experiments/nets` in small sizes, with samples that they read."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from experiments.nets import classic, dense, mobile, modern, pixels, sequences

CLASSES = 4


class Published(NamedTuple):
    """How to make a net, its samples, and into how many blocks its default cuts it."""

    make: Callable[[], nn.Module]
    samples: Callable[[int], Any]
    blocks: int


def _maps(*shape: int) -> Callable[[int], Any]:
    return lambda n: torch.randn(n, *shape, generator=torch.Generator().manual_seed(1))


def _tokens(kinds: int, steps: int) -> Callable[[int], Any]:
    def draw(n: int) -> Any:
        return torch.randint(0, kinds, (n, steps), generator=torch.Generator().manual_seed(1))

    return draw


def _masked(n: int) -> dict[str, Any]:
    lengths = 3 + torch.arange(n) % 5
    return {
        "input_ids": _tokens(20, 7)(n),
        "attention_mask": (torch.arange(7) < lengths[:, None]).long(),
    }


def _two(n: int) -> tuple[Any, Any]:
    return _maps(1, 8, 8)(n), _maps(4)(n)


RGB = _maps(3, 8, 8)
NETS = {
    "LeNet": Published(lambda: classic.LeNet(classes=CLASSES), _maps(1, 8, 8), 5),
    "VGG": Published(
        lambda: classic.VGG((8, "M", 8, "M"), classes=CLASSES, dense=8, dropout=0.2), RGB, 4
    ),
    "ResNet18": Published(lambda: classic.ResNet(width=4, classes=CLASSES), RGB, 4),
    "ResNet50": Published(
        lambda: classic.ResNet(classic.Bottleneck, (3, 4, 6, 3), width=4, classes=CLASSES), RGB, 4
    ),
    "MobileNetV2": Published(
        lambda: mobile.MobileNetV2(
            ((1, 8, 1, 1), (3, 8, 2, 1), (3, 12, 2, 2)), width=8, last=16, classes=CLASSES
        ),
        RGB, 4,
    ),
    "DenseNet": Published(
        lambda: dense.DenseNet(4, (2, 2), width=8, drop_rate=0.2, classes=CLASSES), RGB, 5
    ),
    "ConvNeXt": Published(
        lambda: modern.ConvNeXt((1, 2), (8, 16), classes=CLASSES, drop=0.2), RGB, 6
    ),
    "Mixer": Published(lambda: modern.Mixer(8, 4, 8, 2, classes=CLASSES), RGB, 4),
    "GRU": Published(lambda: sequences.GRUClassifier(5, 6, CLASSES, 2), _maps(6, 5), 3),
    "LSTM": Published(lambda: sequences.LSTMClassifier(20, 4, 6, CLASSES), _tokens(20, 7), 2),
    "two inputs": Published(lambda: classic.TwoInputs(classes=CLASSES), _two, 5),
}  # fmt: skip
DENSE_OUTPUTS = {
    "U-Net": Published(lambda: pixels.UNet(1, 4, CLASSES), _maps(1, 8, 8), 6),
    "Hourglass": Published(lambda: pixels.Hourglass(1, 4, CLASSES), _maps(1, 8, 8), 4),
    "Tagger": Published(lambda: sequences.Tagger(20, CLASSES, 4, 6), _tokens(20, 7), 3),
    "CharacterModel": Published(
        lambda: sequences.CharacterModel(20, 9, 8, 3, 2), _tokens(20, 7), 4
    ),
}
if find_spec("transformers"):
    NETS |= {
        "ViT": Published(lambda: modern.vit(8, 4, 8, 3, CLASSES), RGB, 4),
        "BERT": Published(lambda: modern.bert(20, 8, 8, 3, CLASSES), _masked, 4),
    }


def params(nets: dict[str, Published]) -> list[Any]:
    """The nets as parameters of a test; those of an absent package are skipped."""
    absent = [] if find_spec("transformers") else ["ViT", "BERT"]
    skip = pytest.mark.skip(reason="transformers is not installed")
    return [*nets, *(pytest.param(name, marks=skip) for name in absent)]
