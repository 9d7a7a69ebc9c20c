"""The published relatives of tpSGD, the plug-in `family`, on MNIST.

    python -m experiments.family --out results [--images FOLDER] [--only pepita] [--restarts 5]

Every arm trains a perceptron 784-256-256-10, but for `pepita`, whose source has 784-1024-10 without
biases and SGD with momentum, and the `wide` arm. Forward gradients of the weights have plain SGD,
as in their source, all other arms Adam; the learning rate falls to 0 in a straight line. It is
chosen by a shorter training without the last 6,000 training images, on these; the test images are
used once, at the end of each restart. The file is written after every restart, and a second call
adds those that are missing. torch and numpy are enough, with `PYTHONPATH=src:plugins/family/src`.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tpsgd
import tpsgd_family as family
from experiments.common import (
    Row,
    Samples,
    accuracies,
    arguments,
    best_rate,
    hold_out_last,
    linear_decay,
    load_images,
    origin,
    program,
    result_file,
)
from tpsgd import rules
from tpsgd.rules import Rule

HELD_OUT = 6_000


def perceptron(*widths: int, act: Any = nn.ReLU, bias: bool = True) -> nn.Module:
    """Linear layers with an activation between them."""
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs, bias=bias), act()]
    return nn.Sequential(*layers[:-1])


def normalised(*widths: int) -> nn.Module:
    """The same with every layer's input divided by its root mean square, for Forward-Forward."""
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in pairwise(widths):
        norm = nn.RMSNorm(inputs, elementwise_affine=False)
        layers += [norm, nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def he_uniform(model: nn.Module) -> nn.Module:
    """PEPITA's initial weights."""
    for p in model.parameters():
        nn.init.kaiming_uniform_(p, nonlinearity="relu")
    return model


MLP = partial(perceptron, 784, 256, 256, 10)
TANH = partial(MLP, act=nn.Tanh)
GOOD = partial(normalised, 784, 256, 256, 10)
RATES = (3e-4, 1e-3, 3e-3, 1e-2)


@dataclass(frozen=True)
class Arm:
    """A rule (None: backprop), its net and how it is trained."""

    rule: Callable[[], Rule] | None
    net: Callable[[], nn.Module] = MLP
    optimizer: Any = torch.optim.Adam
    rates: tuple[float, ...] = RATES
    epochs: int = 10
    search_epochs: int = 2
    batch_size: int = 128

    def fit(self, samples: Samples, lr: float, epochs: int, seed: int) -> Any:
        """One training: what predicts, and the record."""
        torch.manual_seed(seed)
        model = self.net().to(samples[0].device)
        settings: Row = {
            "optimizer": self.optimizer, "lr": lr, "epochs": epochs, "seed": seed,
            "batch_size": self.batch_size, "lr_schedule": linear_decay(epochs), "progress": False,
        }  # fmt: skip
        if self.rule is None:
            run = tpsgd.fit_backprop(model, samples, **settings)
        else:
            order = tpsgd.simultaneous
            run = tpsgd.fit(model, samples, rule=self.rule(), order=order, **settings)
        return run.predictor, run


MOMENTUM = partial(torch.optim.SGD, momentum=0.9)
FORWARD = Arm(family.forward_forward, GOOD, rates=(3e-4, 1e-3, 3e-3), epochs=60, search_epochs=15)
PEPITA = Arm(
    family.pepita, lambda: he_uniform(perceptron(784, 1024, 10, bias=False)), MOMENTUM,
    (0.03, 0.1, 0.3, 1.0), 100, 3, 64,
)  # fmt: skip
ARMS = {
    "backprop": Arm(None),
    "frozen": Arm(rules.frozen),
    "random": Arm(rules.untrained, epochs=0),
    "feedback-alignment": Arm(family.feedback_alignment),
    "sign-symmetry": Arm(family.sign_symmetry),
    "sign-symmetry, uniform": Arm(partial(family.sign_symmetry, uniform=True)),
    "readout": Arm(rules.readout),
    "lls": Arm(rules.lls),
    "target-propagation": Arm(family.target_propagation, TANH),
    "backprop, tanh": Arm(None, TANH),
    "forward-gradient-local": Arm(family.local_forward_gradient, rates=(1e-4, 3e-4, 1e-3)),
    "forward-gradient-activations": Arm(partial(family.forward_gradient, activations=True)),
    "forward-gradient-weights": Arm(family.forward_gradient, optimizer=torch.optim.SGD),
    "weight-perturbation": Arm(family.weight_perturbation, optimizer=torch.optim.SGD),
    "forward-forward, 20 epochs": replace(FORWARD, epochs=20),
    "pepita, 20 epochs": replace(PEPITA, epochs=20),
    "backprop, pepita's net": replace(PEPITA, rule=None, epochs=20, rates=(0.003, 0.01, 0.03)),
    "hsic-bottleneck": Arm(family.hsic_bottleneck, batch_size=256, epochs=5),
    "forward-forward": FORWARD,
    "pepita": PEPITA,
    "forward-forward, wide": replace(FORWARD, net=partial(normalised, 784, 1000, 1000, 1000, 10)),
}
SLOW = "forward-forward", "pepita", "forward-forward, wide"  # on a CPU; left out without --only


def choose_rate(arm: Arm, samples: Samples, held_out: int) -> Row:
    """The rate with the best accuracy on held-out training images after a short training."""
    train, rest = hold_out_last(*samples, held_out)

    def score(lr: float) -> float:
        predictor, _ = arm.fit(train, lr, arm.search_epochs, 100)
        return tpsgd.evaluate(predictor, rest)

    return best_rate(arm.rates, score)


def restart(arm: Arm, train: Samples, test: Samples, seed: int, row: Row) -> None:
    """Train once more and add the result to the row."""
    began = time.perf_counter()
    predictor, run = (
        arm.fit(train, row["lr"], arm.epochs, seed) if arm.epochs else _fresh(arm, seed)
    )
    seconds = time.perf_counter() - began
    row |= accuracies([tpsgd.evaluate(predictor, test)], row if "accuracies" in row else None)
    row |= {"restarts": len(row["accuracies"]), "seconds": seconds, "epochs": arm.epochs}
    if run is not None:
        row |= {"settings": run.settings, "peak_bytes": run.peak_bytes}


def _fresh(arm: Arm, seed: int) -> Any:
    torch.manual_seed(seed)
    return arm.net(), None


def scaled(x: torch.Tensor) -> torch.Tensor:
    """Pixels from 0 to 1, with a dimension of one channel."""
    x = x.float().div_(255) if x.dtype is torch.uint8 else x.float()
    return x.view(len(x), 1, 28, 28)


def main() -> None:
    """Run what is asked for; the file is written after each training."""
    parser = arguments(__doc__)
    parser.add_argument("--images", type=Path, help="a folder with mnist.npz")
    parser.add_argument("--only", nargs="+", choices=list(ARMS))
    parser.add_argument("--restarts", type=int, default=5)
    parser.add_argument("--max-train", type=int, help="fewer images, for a quick look")
    options = parser.parse_args()
    if options.smoke:
        options.restarts, options.max_train = 1, 64
    record, save = result_file(options, "family")
    record |= origin("family", options.device)
    x, y, x_test, y_test = load_images("mnist", options.images, options.smoke)
    x, y = scaled(x)[: options.max_train], y[: options.max_train]
    train = x.to(options.device), y.long().to(options.device)
    test = scaled(x_test).to(options.device), y_test.long().to(options.device)
    table = record.setdefault("arms", {})
    held_out = min(HELD_OUT, len(y) // 4)
    record |= {"train": len(y), "held_out": held_out}
    chosen = options.only or [name for name in ARMS if name not in SLOW]
    for name in chosen if options.again else ():
        table.pop(name, None)
    for seed in range(options.restarts):
        for name in chosen:
            arm, row = ARMS[name], table.setdefault(name, {})
            if options.smoke:
                arm = replace(arm, epochs=min(arm.epochs, 1), search_epochs=1, rates=arm.rates[:1])
            if row.get("restarts", 0) > seed:
                continue
            if arm.epochs and "lr" not in row:
                row |= choose_rate(arm, train, held_out)
            restart(arm, train, test, seed, row)
            row["device"] = options.device
            save()
            shown = f"{row['accuracy']:.2%} ± {row['deviation']:.2%} of {row['restarts']}"
            rate = f"lr {row['lr']:g}, " if "lr" in row else ""
            print(f"{name:32} {shown}, {rate}{row['seconds']:.0f} s", flush=True)


if __name__ == "__main__":
    program(main)
