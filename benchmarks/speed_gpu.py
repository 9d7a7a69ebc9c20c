"""The nets whose speed is measured on a GPU; `speed.py --device cuda` runs them.

The data are random, except for MNIST, whose accuracy after one epoch is measured too where the
files are (`TPSGD_DATA`).
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from speed_nets import (
    CLASSES,
    CONTROL,
    MNIST_CNN,
    MNIST_MLP,
    PAPER,
    READOUT,
    Net,
    Samples,
    Ways,
    contest,
    random_data,
)
from speed_peers import plain_loop
from speed_turns import FIT_BACKPROP, PLAIN, Contest
from torch import nn

import tpsgd
from tpsgd import Memory, augment, rules
from tpsgd.zoo.vgg import vgg
from tpsgd.zoo.words import cnn

IMAGE = (3, 160, 160)
CIFAR_CNN = partial(cnn, (3, 32, 32), [(16, 5), (16, 5)], CLASSES, nn.LeakyReLU)
VGG11, VGG11_BN = (partial(vgg, 11, IMAGE, CLASSES, batch_norm=norm) for norm in (False, True))
TOGETHER = {"order": tpsgd.simultaneous}
POOLED = {"rule": rules.tpsgd_l2(features=256, standardise=True), "loss": tpsgd.cross_entropy}
DEEP: Ways = {
    "readout, simultaneous": {"rule": rules.readout()} | TOGETHER,
    "tpsgd-l2, simultaneous": {"rule": rules.tpsgd_l2()} | TOGETHER,
    "tpsgd-l2, pooled, simultaneous": POOLED | TOGETHER,
    "predsim, simultaneous": {"rule": rules.predsim(share=0.9, convolve=False)} | TOGETHER,
}
SMALL: Ways = {
    "readout, simultaneous": TOGETHER,
    "readout, micro 32, simultaneous": TOGETHER | {"memory": Memory(micro_batch=32)},
    "readout, micro 16, simultaneous": TOGETHER | {"memory": Memory(micro_batch=16)},
    "readout, recompute, sequential": {"memory": Memory(reuse=False)},
}
CROPS = augment.chain(augment.flip(), augment.resized_crop((0.5, 1.0)))


def in_micro_batches(model: nn.Module, x: Any, y: Any, **sizes: Any) -> tpsgd.Run:
    """Backprop that adds up the gradients of 16 samples at a time, to save memory."""
    return tpsgd.fit_backprop(model, (x, y), memory=Memory(micro_batch=16), **sizes)


def nets() -> list[Net]:
    """The paper's nets at their full number of samples, then VGG11 with and without batch norm."""
    half = {"precision": torch.bfloat16}
    deep = Net("vgg11 bn, bf16", VGG11_BN, IMAGE, 2_000, 64, 2, DEEP, settings=half)
    return [
        Net("mnist mlp, batch 128", MNIST_MLP, (784,), 60_000, 128, 5),
        Net("mnist cnn, batch 128", MNIST_CNN, (1, 28, 28), 60_000, 128, 2),
        Net("cifar10 cnn, batch 128", CIFAR_CNN, (3, 32, 32), 50_000, 128, 3),
        deep,
        replace(deep, name="vgg11 bn, bf16, crops", settings=half | {"augment": CROPS}),
        Net(
            "vgg11, float32", VGG11, IMAGE, 2_000, 64, 2, SMALL,
            peers={"backprop, micro 16": in_micro_batches},
        ),
    ]  # fmt: skip


def contests(quick: bool, device: str = "cuda") -> dict[str, Callable[[], Contest]]:
    """The nets by name; the data of a net are made when its turn comes."""
    every: dict[str, Callable[[], Contest]] = {}
    for net in nets():
        here = replace(net.quick() if quick else net, device=device)
        every[net.name] = lambda here=here: contest(here)
    samples = 1_000 if quick else 60_000
    for rule in (rules.readout(), rules.tpsgd_l2()):
        name = f"restarts, {rule.name}"
        every[name] = lambda rule=rule, name=name: restarts(name, rule, samples, device)
    every["90 % on mnist"] = lambda: one_epoch("90 % on mnist", samples, device)
    return every


def restarts(name: str, rule: rules.Rule, samples: int, device: str) -> Contest:
    """25 restarts in one step against one restart."""
    data = random_data(samples, 784, device=device)
    settings: dict[str, Any] = {"epochs": 5, "batch_size": 128}

    def model() -> nn.Module:
        return MNIST_MLP().to(device)

    def train(_: nn.Module, count: int) -> tpsgd.Run:
        chosen = {"rule": rule, "restarts": count, **TOGETHER, **settings}
        return tpsgd.fit_many(model, data, **chosen).runs[0]

    one, many = "1 restart, simultaneous", "25 restarts, simultaneous"
    arms = {one: partial(train, count=1), many: partial(train, count=25)}
    return Contest(name, model, arms, {**settings, "samples": samples}, peers=(one,))


def one_epoch(name: str, samples: int, device: str) -> Contest:
    """One epoch in batches of 512, and the accuracy after it."""
    train, test = mnist(samples, device)
    settings: dict[str, Any] = {"epochs": 1, "batch_size": 512}
    arms = {
        PLAIN: lambda m: plain_loop(m, *train, **settings),
        FIT_BACKPROP: lambda m: tpsgd.fit_backprop(m, train, lr=3e-3, **settings),
    }
    for way, own in (READOUT | PAPER | CONTROL).items():
        arms[way] = lambda m, own=own: tpsgd.fit(m, train, lr=3e-3, **settings, **own)
    score = None if test is None else lambda model: tpsgd.evaluate(model, test)
    sizes = {**settings, "samples": samples, "lr": 3e-3}
    return Contest(name, lambda: MNIST_MLP().to(device), arms, sizes, score=score)


def mnist(samples: int, device: str) -> tuple[Samples, Samples | None]:
    """MNIST on the device as rows, or random data and no test set where MNIST is not there."""
    try:
        loaded = tpsgd.data.load("mnist", max_train=samples)
    except (tpsgd.TpsgdError, ImportError):
        return random_data(samples, 784, device=device), None
    (x, y), (x_test, y_test) = loaded.train, loaded.test
    train = x.flatten(1).to(device), y.to(device)
    return train, (x_test.flatten(1).to(device), y_test.to(device))
