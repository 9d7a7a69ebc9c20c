"""A MobileNet-like net for a board: a frozen body of bytes, and a tail that learns new classes.

    python examples/edge/mobilenet.py --out mobile

A net of inverted residuals (width 0.25, pictures of 32 x 32) learns five classes of CIFAR-10 by
backprop. Its body is frozen, with a byte for each weight. Its tail, the last inverted residual and
the convolution behind it, learns the other five classes by local losses in the exported C, one
picture at a time, with a new head. Control: the same with a tail that stays as it was.
"""

import argparse
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path

import torch
from torch import Tensor, nn

import tpsgd
from tpsgd import rules
from tpsgd.zoo import recipes
from tpsgd_export.to_c.compiled import CompiledNet

BLOCKS = (  # inverted residuals: channels in, channels out, expansion, stride
    (8, 8, 1, 1), (8, 16, 2, 2), (16, 16, 2, 1), (16, 32, 3, 2), (32, 32, 3, 1), (32, 32, 3, 1),
    (32, 64, 3, 2), (64, 64, 3, 1), (64, 64, 3, 1),
)  # fmt: skip
WIDTH = 128  # of the last convolution, over pixels
TAIL = 3 + len(BLOCKS) - 1  # the module where the tail begins
LEARNS = {"the tail and the head": 0b111, "the head alone": 0b100}  # of the last three blocks
OLD = 5  # classes that the body learns
RULE = rules.readout(True, features=WIDTH)  # which sees the mean of each map
RATES = (0.003, 0.01, 0.03)
Samples = tuple[Tensor, Tensor]


def convolution(a: int, b: int, kernel: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    """A convolution with its norm."""
    layer = nn.Conv2d(a, b, kernel, stride, kernel // 2, groups=groups, bias=False)
    return [layer, nn.BatchNorm2d(b)]


class Inverted(nn.Module):
    """An inverted residual: wider, a depthwise convolution, narrower; and the input added."""

    def __init__(self, a: int, b: int, expansion: int, stride: int) -> None:
        super().__init__()
        c = a * expansion
        wider = [*convolution(a, c, 1), nn.ReLU6()] if expansion > 1 else []
        depthwise = [*convolution(c, c, 3, stride, c), nn.ReLU6()]
        self.path = nn.Sequential(*wider, *depthwise, *convolution(c, b, 1))
        self.adds = a == b and stride == 1

    def forward(self, x: Tensor) -> Tensor:
        return x + self.path(x) if self.adds else self.path(x)


def mobilenet(classes: int = OLD) -> nn.Sequential:
    """Inverted residuals, a convolution over pixels, and a linear layer on the means of maps."""
    channels = BLOCKS[-1][1]
    return nn.Sequential(
        *convolution(3, BLOCKS[0][0], 3), nn.ReLU6(), *(Inverted(*block) for block in BLOCKS),
        *convolution(channels, WIDTH, 1), nn.ReLU6(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(WIDTH, classes),
    )  # fmt: skip


def of_classes(pair: Samples, new: bool) -> Samples:
    """The pictures of the first five classes, or of the others, whose labels begin at 0."""
    x, y = pair
    chosen = (y >= OLD) == new
    return x[chosen], y[chosen] - OLD * new


def pretrained(train: Samples, epochs: int, seed: int, device: str = "cpu") -> nn.Sequential:
    """A net that has learned by backprop."""
    torch.manual_seed(seed)
    model = mobilenet().to(device)
    settings = recipes.residual.settings((3, 32, 32), epochs=epochs, seed=seed)
    del settings["order"]  # of blocks, and backprop has one
    tpsgd.fit_backprop(model, train, device=device, **settings)
    return model.cpu().eval()


def with_new_head(model: nn.Sequential) -> nn.Sequential:
    """The net with a frozen body, and a head of zeros."""
    model = deepcopy(model)
    for module in model[:TAIL]:
        module.requires_grad_(False)
    head = nn.Linear(WIDTH, OLD)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    model[-1] = head
    return model


def learned(
    folder: Path, train: Samples, rate: float, passes: int, last_blocks: int
) -> CompiledNet:
    """The C, compiled for this machine, after its last blocks have learned from every picture."""
    net = CompiledNet(folder)
    for _ in range(passes):
        for x, y in zip(*train, strict=True):
            net.step(x, y[None], rate, last_blocks << net.blocks - 3)
    return net


def accuracy(net: CompiledNet, pictures: Samples) -> float:
    """The share of pictures that are right."""
    right = sum(int(net.forward(x).argmax() == y) for x, y in zip(*pictures, strict=True))
    return right / len(pictures[1])


def parts(pair: Samples, sizes: Sequence[int]) -> list[Samples]:
    """Some pictures, then others; in a random order."""
    x, y = pair
    order = torch.randperm(len(y))
    return [(x[chosen], y[chosen]) for chosen in order[: sum(sizes)].split(list(sizes))]


def arguments() -> argparse.Namespace:
    """The words of the command line."""
    parser = argparse.ArgumentParser(description="A MobileNet whose tail learns on a board")
    parser.add_argument("--out", type=Path, default=Path("mobile"))
    parser.add_argument("--epochs", type=int, default=8, help="of the body")
    parser.add_argument("--pictures", type=int, help="that the body learns from, if not all")
    parser.add_argument("--samples", type=int, default=2000, help="that the device learns from")
    parser.add_argument("--passes", type=int, default=5, help="over them")
    parser.add_argument("--held-out", type=int, default=500, help="that choose the rate")
    parser.add_argument("--tests", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    options = arguments()
    cifar = tpsgd.data.load("cifar10")
    old, labels = (part[: options.pictures] for part in of_classes(cifar.train, new=False))
    print(f"the body learns from {len(labels):,} pictures, {options.epochs} epochs", flush=True)
    body = pretrained((old, labels), options.epochs, options.seed)
    own_classes = tpsgd.evaluate(body, of_classes(cifar.test, new=False))
    print(f"body: {own_classes:.1%} of its own five classes right", flush=True)
    new = of_classes(cifar.train, new=True)
    train, held_out = parts(new, (options.samples, options.held_out))
    (test,) = parts(of_classes(cifar.test, new=True), (options.tests,))
    exported = tpsgd.export.c(
        with_new_head(body), options.out, shape=(3, 32, 32), rule=RULE, ram="256KB", frozen="int8",
        samples=train[0][:256], inputs=cifar.inputs, classes=cifar.classes[OLD:], overwrite=True,
    )  # fmt: skip
    print(exported)
    for name, blocks in LEARNS.items():
        print(f"{name}: {len(RATES)} rates, {options.passes} passes each", flush=True)
        nets = {rate: learned(options.out, train, rate, options.passes, blocks) for rate in RATES}
        rate = max(RATES, key=lambda r: accuracy(nets[r], held_out))
        share = accuracy(nets[rate], test)
        print(f"{name}: {share:.1%} of {len(test[1]):,} right, rate {rate}", flush=True)


if __name__ == "__main__":
    main()
