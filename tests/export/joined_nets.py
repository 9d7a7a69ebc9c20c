"""Nets whose blocks are more than a layer: residual blocks of several kinds, pools inside."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tpsgd.zoo.resnet import resnet


def seen(model: nn.Module) -> Any:
    """A model whose batch norms have seen something, in evaluation mode."""
    torch.manual_seed(1)
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.running_mean = torch.randn(norm.num_features) * 0.3
            norm.running_var = torch.rand(norm.num_features) + 0.5
            nn.init.uniform_(norm.weight, 0.5, 1.5)
            nn.init.normal_(norm.bias)
    return model.eval()


class Basic(nn.Module):
    """relu(shortcut(x) + f(x)), written as people write it."""

    def __init__(self, inputs: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.shortcut = nn.Sequential()
        if stride > 1 or inputs != width:
            pixels = nn.Conv2d(inputs, width, 1, stride, bias=False)
            self.shortcut = nn.Sequential(pixels, nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += self.shortcut(x)
        return F.relu(y)


class Inverted(nn.Module):
    """MobileNetV2's block: no activation after the sum."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        wide = 2 * inputs
        self.adds = stride == 1 and inputs == outputs
        self.conv = nn.Sequential(
            nn.Conv2d(inputs, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU6(inplace=True),
            nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False), nn.BatchNorm2d(wide),
            nn.ReLU6(inplace=True), nn.Conv2d(wide, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x) if self.adds else self.conv(x)


class Around(nn.Module):
    """A body between a first convolution and a head."""

    def __init__(self, *body: nn.Module, channels: int, act: nn.Module | None = None) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3, padding=1)
        self.act, self.body = act or nn.ReLU(), nn.Sequential(*body)
        self.fc = nn.Linear(channels, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(self.act(self.stem(x)))
        return self.fc(x.mean((2, 3)))


class Wide(nn.Module):
    """A dense block with a skip connection and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(12, 7), nn.Linear(7, 9), nn.Linear(9, 7)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.a(x))
        z = self.dropout(F.leaky_relu(self.b(y), 0.1))
        return torch.sigmoid(self.c(z) + y)


class Pooled(nn.Module):
    """Pools inside of a block, and a sum behind one of them."""

    def __init__(self, pool: nn.Module) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(4, 5, 3, padding=1), nn.Conv2d(5, 5, 3, padding=1)
        self.pool = pool

    def forward(self, x: Tensor) -> Tensor:
        y = self.pool(F.leaky_relu(self.a(x), 0.2))
        return torch.tanh(self.b(y) + y)


def chain(*body: nn.Module, channels: int) -> nn.Module:
    """The same in an `nn.Sequential`, whose modules stay whole."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.LeakyReLU(), *body, nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(channels, 3),
    )  # fmt: skip


def stacked() -> nn.Module:
    return chain(Basic(4, 4), Basic(4, 6, 2), channels=6)


def separable() -> nn.Module:
    """Depthwise convolutions, each with the convolution over pixels after it."""
    layers = [nn.Conv2d(2, 4, 3, padding=1), nn.ReLU6()]
    for a, b, stride in ((4, 6, 1), (6, 5, 2)):
        layers += [nn.Conv2d(a, a, 3, stride, 1, groups=a), nn.ReLU6(), nn.Conv2d(a, b, 1)]
        layers += [nn.BatchNorm2d(b), nn.ReLU6()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, 3))


MAPS = (2, 6, 5)
NETS: dict[str, tuple[Any, tuple[int, ...], Any]] = {  # model, shape, blocks
    "stacked": (stacked, MAPS, "layers"),
    "basic": (lambda: Around(Basic(4, 4), Basic(4, 6, 2), channels=6), MAPS, "layers"),
    "inverted": (
        lambda: Around(Inverted(4, 4), Inverted(4, 5, 2), channels=5, act=nn.ReLU6()), MAPS, None,
    ),
    "separable": (separable, MAPS, None),
    "dense": (
        lambda: nn.Sequential(Wide(), nn.Linear(7, 6), nn.ReLU(), nn.Linear(6, 3)), (12,), "layers"
    ),
    "pooled": (lambda: chain(Pooled(nn.MaxPool2d(2)), channels=5), MAPS, "layers"),
    "means": (lambda: chain(Pooled(nn.AvgPool2d(3, 2)), channels=5), MAPS, "layers"),
    "cells": (lambda: chain(Pooled(nn.AdaptiveAvgPool2d((4, 2))), channels=5), MAPS, "layers"),
    "whole": (stacked, MAPS, 1),
    "halves": (stacked, MAPS, [2, 2]),
    "zoo": (lambda: resnet(18, MAPS, 3, small=True, width=2), MAPS, "layers"),
}  # fmt: skip


def net(name: str) -> tuple[Any, tuple[int, ...], Any]:
    """A model, the shape of a sample, and its blocks."""
    torch.manual_seed(0)
    make, shape, blocks = NETS[name]
    return seen(make()), shape, blocks
