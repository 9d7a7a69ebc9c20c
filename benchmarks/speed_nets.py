"""The nets whose speed is measured on a CPU, their random data, and the ways to train each."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from speed_peers import plain_loop, sklearn_mlp, written_out_mlp, written_out_rnn
from speed_turns import FIT_BACKPROP, PLAIN, WRITTEN_OUT, Arm, Contest
from torch import Tensor, nn

import tpsgd
from tpsgd import rules
from tpsgd.zoo.words import cnn, mlp

CLASSES = 10
SKLEARN = "MLPClassifier"
Samples = tuple[Tensor, Tensor]
Settings = dict[str, Any]
Ways = dict[str, Settings]


def both(name: str, **settings: Any) -> Ways:
    """A way to train by `fit` under both schedules; `sequential` keeps inputs.

    A sequential run trains each block for all epochs, so the sample passes of a block are equal.
    """
    settings |= {"memory": "fast"}
    orders = {"sequential": tpsgd.sequential, "simultaneous": tpsgd.simultaneous}
    return {f"{name}, {word}": settings | {"order": s} for word, s in orders.items()}


DEFAULT: Ways = {"default": {}, "default, fast": {"memory": "fast"}}
CONTROL: Ways = {"frozen, sequential": {"rule": rules.frozen(), "memory": "fast"}}
READOUT = both("readout", rule=rules.readout())
PAPER = both("tpsgd-l2", rule=rules.tpsgd_l2())
STEPWISE = both("readout, window 1", rule=rules.readout(), window=1)


@dataclass(frozen=True)
class Net:
    """A net, the shape and number of its samples, and how it is trained.

    `ways` are names and the settings of `fit`; `settings` are those that `fit`, `fit_backprop` and
    the plain loop share. `peers` are more ways to train by backprop: functions of (model, x, y,
    batch_size, epochs).
    """

    name: str
    model: Callable[[], nn.Module]
    shape: tuple[int, ...]
    samples: int
    batch_size: int
    epochs: int
    ways: Ways = field(default_factory=lambda: DEFAULT | READOUT | PAPER | CONTROL)
    peers: dict[str, Callable[..., Any]] = field(default_factory=dict)
    settings: Settings = field(default_factory=dict)
    device: str = "cpu"

    def quick(self) -> "Net":
        """One epoch of two batches and a sample."""
        return replace(self, samples=2 * self.batch_size + 1, epochs=1)


def plain_cnn(depth: int) -> nn.Sequential:
    """Convolutions of 16 channels that keep the image's size, and one linear layer at the end."""
    layers: list[nn.Module] = []
    for i in range(depth - 1):
        layers += [nn.Conv2d(16 if i else 3, 16, 3, padding=1), nn.LeakyReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * 32 * 32, CLASSES))


def paper_adaptor() -> nn.Sequential:
    """The paper's adaptor on VGG16's features at pool5 (images of 160 x 160)."""
    return nn.Sequential(
        nn.Conv2d(512, 64, 5, padding=2), nn.LeakyReLU(), nn.Flatten(),
        nn.Linear(64 * 25, 256), nn.LeakyReLU(), nn.Linear(256, CLASSES),
    )  # fmt: skip


def recurrent() -> nn.Sequential:
    """A recurrent layer of 256 units and a classifier of its last state."""
    return nn.Sequential(tpsgd.Recurrent(16, 256), nn.Linear(256, CLASSES))


def dense(inputs: int, *widths: int, activation: type[nn.Module] = nn.LeakyReLU) -> nn.Sequential:
    """An MLP."""
    return mlp((inputs,), list(widths), CLASSES, activation)


BY_HAND = {WRITTEN_OUT: written_out_mlp}
BY_HAND_RNN = {WRITTEN_OUT: written_out_rnn}
OVER_TIME = DEFAULT | READOUT | STEPWISE | CONTROL
DIGITS_MLP = partial(dense, 64, 128, 128, activation=nn.Tanh)
DIGITS_CNN = partial(cnn, (1, 8, 8), [(16, 3), (32, 3)], CLASSES, nn.LeakyReLU)
MNIST_MLP = partial(dense, 784, 256)
MNIST_CNN = partial(cnn, (1, 28, 28), [(16, 5), (16, 5)], CLASSES, nn.LeakyReLU)

# Name, model, shape of a sample, samples, batch size, epochs (`fit`'s are five).
NETS = [
    Net("784-256-10, batch 128", MNIST_MLP, (784,), 10_000, 128, 5, peers=BY_HAND),
    Net("784-256-10, batch 32", MNIST_MLP, (784,), 5_000, 32, 5, peers=BY_HAND),
    Net("64-128-128-10, batch 32", DIGITS_MLP, (64,), 1_438, 32, 15, peers=BY_HAND),
    Net("demo cnn, batch 32", DIGITS_CNN, (1, 8, 8), 1_438, 32, 10),
    Net("mnist cnn, batch 128", MNIST_CNN, (1, 28, 28), 2_000, 128, 5),
    Net("8-layer cnn, batch 128", partial(plain_cnn, 8), (3, 32, 32), 1_280, 128, 5),
    Net("rnn, 10 steps", recurrent, (10, 16), 1_000, 64, 5, OVER_TIME, BY_HAND_RNN),
    Net("rnn, 100 steps", recurrent, (100, 16), 512, 64, 5, OVER_TIME, BY_HAND_RNN),
    Net("rnn, 1000 steps", recurrent, (1_000, 16), 128, 64, 5, OVER_TIME, BY_HAND_RNN),
    Net("vgg16 adaptor, batch 64", paper_adaptor, (512, 5, 5), 640, 64, 5),
    Net(
        "scikit-learn's MLP", partial(dense, 784, 256, activation=nn.ReLU), (784,), 10_000, 128, 5,
        peers={SKLEARN: sklearn_mlp},
    ),
]  # fmt: skip


def contest(net: Net) -> Contest:
    """Backprop and the local rules, with the same data, batches, epochs and Adam at 1e-3."""
    x, y = random_data(net.samples, *net.shape, device=net.device)
    sizes = {"batch_size": net.batch_size, "epochs": net.epochs}
    settings: Settings = sizes | net.settings
    arms: dict[str, Arm] = {PLAIN: lambda m: plain_loop(m, x, y, **settings)}
    if any(isinstance(m, nn.Conv2d) for m in net.model().modules()):
        last = settings | {"channels_last": True}
        arms[f"{PLAIN}, channels last"] = lambda m: plain_loop(m, x, y, **last)
    arms[FIT_BACKPROP] = lambda m: tpsgd.fit_backprop(m, (x, y), **settings)
    for peer, train in net.peers.items():
        arms[peer] = lambda m, train=train: train(m, x, y, **settings)
    for way, own in net.ways.items():
        arms[way] = lambda m, own=own: tpsgd.fit(m, (x, y), **settings, **own)
    peers = (SKLEARN,) if SKLEARN in net.peers else (PLAIN, FIT_BACKPROP)
    sizes |= {"samples": net.samples}
    return Contest(net.name, lambda: net.model().to(net.device), arms, sizes, peers)


def random_data(samples: int, *shape: int, device: str = "cpu") -> Samples:
    """Random samples of random classes: the time does not depend on what is learned."""
    generator = torch.Generator(device).manual_seed(1)
    x = torch.rand(samples, *shape, generator=generator, device=device)
    return x, torch.randint(CLASSES, (samples,), generator=generator, device=device)
