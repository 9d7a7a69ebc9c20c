"""A MobileNet-like net for a board: a frozen body of bytes, and a tail that learns new classes.

    python examples/edge/mobilenet.py --out mobile

A net of width 0.25 learns five classes of CIFAR-10 by backprop. Its body is frozen, with a byte for
each weight; the last depthwise-separable layers, drawn anew, and the head learn the other five
classes on the device, by local losses, one picture at a time. Controls: the same over a body of
floats, a tail that stays as it was drawn, one that learns by backprop, and the body's own tail.
"""

import argparse
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import tpsgd
from tpsgd import rules
from tpsgd_export.read_model import read_model
from tpsgd_export.to_c.check import as_in
from tpsgd_export.to_c.compiled import CompiledNet

WIDTHS = [(8, 16, 1), (16, 32, 2), (32, 32, 1), (32, 64, 2), (64, 64, 1), (64, 128, 2)]
WIDTHS += [(128, 128, 1)] * 3  # the last of them is the tail
BODY = 3 + 6 * (len(WIDTHS) - 1)  # modules that are frozen
RATES = (0.001, 0.003, 0.01)
OLD = 5  # classes that the body learns


def separable(a: int, b: int, stride: int) -> list[nn.Module]:
    """A depthwise convolution, and one over pixels."""
    return [
        nn.Conv2d(a, a, 3, stride, 1, groups=a, bias=False), nn.BatchNorm2d(a), nn.ReLU6(),
        nn.Conv2d(a, b, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU6(),
    ]  # fmt: skip


def mobilenet(classes: int) -> nn.Sequential:
    """Width 0.25, for pictures of 32 x 32."""
    layers: list[nn.Module] = [nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU6()]
    for widths in WIDTHS:
        layers += separable(*widths)
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(128, classes)]
    return nn.Sequential(*layers)


def of_classes(pair: tuple[Tensor, Tensor], new: bool) -> tuple[Tensor, Tensor]:
    """The pictures of the first five classes, or of the others, whose labels begin at 0."""
    x, y = pair
    chosen = (y >= OLD) == new
    return x[chosen], y[chosen] - OLD * new


def pretrained(train: tuple[Tensor, Tensor], epochs: int) -> nn.Sequential:
    """A net that has learned by backprop."""
    model = mobilenet(OLD)
    tpsgd.fit_backprop(model, train, epochs=epochs, batch_size=64, lr=2e-3, progress=False)
    return model


def with_new_tail(body: nn.Sequential, pictures: Tensor, own: bool = False) -> nn.Sequential:
    """The net with a frozen body and a head of zeros; its tail is drawn anew, or its `own`.

    The norms of a new tail measure some pictures: they are folded into its layers.
    """
    model = deepcopy(body).eval()
    for layer in list(model)[:BODY]:
        layer.requires_grad_(False)
    if not own:
        for i, layer in enumerate(separable(*WIDTHS[-1])):
            model[BODY + i] = layer
        for norm in (m for m in list(model)[BODY:] if isinstance(m, nn.BatchNorm2d)):
            norm.momentum = None
            norm.train()
        with torch.no_grad():
            model(pictures)
    head = nn.Linear(128, OLD)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    model[-1] = head
    return model.eval()


@torch.no_grad()
def accuracy(net: CompiledNet | nn.Module, test: tuple[Tensor, Tensor]) -> float:
    """The share of pictures that are right."""
    if isinstance(net, nn.Module):
        return float((net(test[0]).argmax(1) == test[1]).float().mean())
    right = sum(int(net.forward(x).argmax() == y) for x, y in zip(*test, strict=True))
    return right / len(test[1])


def on_device(
    folder: Path, train: tuple[Tensor, Tensor], rate: float, passes: int, blocks: int = -1
) -> CompiledNet:
    """The C, compiled for this machine, after it has learned from one picture after another."""
    net = CompiledNet(folder)
    for _ in range(passes):
        for x, y in zip(*train, strict=True):
            net.step(x, y[None], rate, blocks)
    return net


def by_backprop(
    model: nn.Sequential, train: tuple[Tensor, Tensor], rate: float, passes: int
) -> nn.Module:
    """The tail and the head after as many steps of backprop, with the norms folded as in the C."""
    folded = as_in(read_model(model, rules.readout(), (3, 32, 32)), deepcopy(model))
    assert isinstance(folded, nn.Sequential)
    folded.requires_grad_(False)
    for layer in list(folded)[BODY:]:
        layer.requires_grad_(True)
    optimizer = torch.optim.SGD([p for p in folded.parameters() if p.requires_grad], lr=rate)
    for _ in range(passes):
        for x, y in zip(*train, strict=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(folded(x[None]), y[None]).backward()
            optimizer.step()
    return folded


def export(model: nn.Module, folder: Path, kind: str, cifar: Any, pictures: Tensor) -> None:
    exported = tpsgd.export.c(
        model, folder, shape=(3, 32, 32), rule=rules.readout(scale=4.0), ram="256KB", frozen=kind,
        samples=pictures, inputs=cifar.inputs, classes=cifar.classes[OLD:], overwrite=True,
    )  # fmt: skip
    print(f"\n{folder}: a body of {kind}\n{exported.memory}\n{exported.checked}")


def arguments() -> argparse.Namespace:
    """The words of the command line."""
    parser = argparse.ArgumentParser(
        description="A MobileNet-like net whose tail learns on a board"
    )
    parser.add_argument("--out", type=Path, default=Path("mobile"))
    parser.add_argument("--epochs", type=int, default=8, help="of the body")
    parser.add_argument("--samples", type=int, default=2000, help="that the device learns from")
    parser.add_argument("--passes", type=int, default=1, help="over them")
    parser.add_argument("--held-out", type=int, default=500, help="that choose the rate")
    parser.add_argument("--tests", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    options = arguments()
    torch.manual_seed(options.seed)
    cifar = tpsgd.data.load("cifar10")
    body = pretrained(of_classes(cifar.train, new=False), options.epochs)
    own_classes = tpsgd.evaluate(body, of_classes(cifar.test, new=False))
    print(f"body: {own_classes:.1%} of its own five classes right", flush=True)
    x, y = of_classes(cifar.train, new=True)
    order = torch.randperm(len(y))[: options.samples + options.held_out]
    learn, hold = order[: options.samples], order[options.samples :]
    train, held_out = (x[learn], y[learn]), (x[hold], y[hold])
    x, y = of_classes(cifar.test, new=True)
    test = x[: options.tests], y[: options.tests]
    new, own = (with_new_tail(body, train[0][:256], own) for own in (False, True))
    new_bytes, new_floats, own_bytes = (options.out / word for word in ("new", "floats", "own"))
    for model, folder, kind in (
        (new, new_bytes, "int8"), (new, new_floats, "float32"), (own, own_bytes, "int8")
    ):  # fmt: skip
        export(model, folder, kind, cifar, train[0][:256])
    head, passes = 1 << (2 * len(WIDTHS) + 1), options.passes
    arms = {
        "new tail by local losses": lambda rate: on_device(new_bytes, train, rate, passes),
        "the same over floats": lambda rate: on_device(new_floats, train, rate, passes),
        "new tail, as drawn": lambda rate: on_device(new_bytes, train, rate, passes, head),
        "own tail by local losses": lambda rate: on_device(own_bytes, train, rate, passes),
        "own tail, as it was": lambda rate: on_device(own_bytes, train, rate, passes, head),
        "new tail by backprop": lambda rate: by_backprop(new, train, rate, passes),
    }
    for name, learned in arms.items():
        nets = {rate: learned(rate) for rate in RATES}
        rate = max(RATES, key=lambda r: accuracy(nets[r], held_out))
        share = accuracy(nets[rate], test)
        print(f"{name}: {share:.1%} of {len(test[1]):,} right, rate {rate}", flush=True)


if __name__ == "__main__":
    main()
