"""Classes that come one after another: the accuracy of each over time, with and without a buffer.

    python -m experiments.streams --out results [--only digits] [--quick]

- `digits`: MNIST, all samples of a class before the next class, read once, ten at a time. The net,
  784 - 256 - classes, begins with one output and gets one for each new class.
- `photos`: layers on a frozen VGG16 (pool5), photographs of Imagenette in the same way, two at a
  time. The features are computed once.

The arms are `readout`, backprop (a plain torch loop) and the control with random hidden layers,
`frozen`, each with and without a `tpsgd.Rehearsal`, and `rls` on random features (for photographs,
on the tap's average), which needs no buffer. Every arm grows its last layer in the same way. The
learning rate of an arm is chosen by its accuracy on held-out training samples at the end of the
stream; the test samples decide nothing.
"""

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tpsgd
from experiments import stand_in
from experiments.common import (
    Row,
    Samples,
    accuracies,
    arguments,
    best_rate,
    load,
    origin,
    program,
    result_file,
)
from tpsgd import Rehearsal, Stream, adapt, rules
from tpsgd.data.registry import find
from tpsgd.nets.new_classes import add_output, enlarged, outputs_of

RATES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
REPLAYED = 4  # earlier samples in a step, for each new one


class Backprop:
    """Backpropagation on the same stream: a plain torch loop."""

    def __init__(self, model: nn.Module, lr: float, rehearsal: Rehearsal | None) -> None:
        self.model, self.rehearsal = model, rehearsal
        self.optimizer = torch.optim.Adam(model.parameters(), lr)

    def partial_fit(self, x: Tensor, y: Tensor) -> None:
        """One step."""
        while int(y.max()) >= outputs_of(self.model):
            self._add_class()
        batch = (x, y) if self.rehearsal is None else self.rehearsal.mixed(x, y)
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(batch[0].float()), batch[1]).backward()
        self.optimizer.step()
        if self.rehearsal is not None:
            self.rehearsal.add(x, y)

    def _add_class(self) -> None:
        """One more output, as a `Stream` adds it."""
        before = {p: p.shape for p in self.model.parameters()}
        add_output(self.model)
        for p, shape in before.items():
            state = self.optimizer.state[p]
            state.update({k: enlarged(v, p, shape) for k, v in state.items()})

    @torch.no_grad()
    def outputs(self, x: Tensor) -> Tensor:
        """The outputs of the model."""
        return self.model(x.float())


@dataclass(frozen=True)
class Task:
    """Samples in the order of their classes, and the net that learns them."""

    train: Samples
    held_out: Samples
    test: Samples
    model: Callable[[], nn.Module]
    memory: str
    probe: Callable[[], nn.Module] | None = None  # the net of `rls`, if it is another one
    latest: int = 10  # new samples in a step
    every: int = 250  # samples between two looks at the accuracies

    @property
    def classes(self) -> int:
        """How many classes come."""
        return int(self.train[1].max()) + 1


def learner(task: Task, arm: str, lr: float, seed: int) -> Any:
    """A new net that learns by an arm."""
    rule, _, buffer = arm.partition(", ")
    torch.manual_seed(seed)
    rehearsal = Rehearsal(task.memory, replayed=REPLAYED, seed=seed) if buffer else None
    if rule == "rls":
        return Stream((task.probe or task.model)(), optimizer=tpsgd.rls(), seed=seed)
    if rule == "backprop":
        return Backprop(task.model(), lr, rehearsal)
    make = rules.ALL[rule].make
    return Stream(task.model(), rule=make(), lr=lr, rehearsal=rehearsal, seed=seed)


def run(task: Task, arm: str, lr: float, seed: int, test: Samples) -> tuple[list[Row], Any]:
    """The accuracy of each class over time, and the learner."""
    made, (x, y), curve, samples = learner(task, arm, lr, seed), task.train, [], 0
    random = torch.Generator().manual_seed(seed)
    for label in range(task.classes):
        of_class = (y == label).nonzero().flatten()
        of_class = of_class[torch.randperm(len(of_class), generator=random)]
        for index in of_class.split(task.latest):
            made.partial_fit(x[index], y[index])
            samples += len(index)
            if samples % task.every < task.latest or samples == len(y):
                curve.append({"samples": samples, "classes": per_class(made, test, task.classes)})
    return curve, made


def per_class(made: Any, test: Samples, classes: int) -> list[float]:
    """The accuracy on each class; 0 for one that has not come."""
    right = made.outputs(test[0]).argmax(1) == test[1]
    return [round(float(right[test[1] == c].double().mean()), 4) for c in range(classes)]


def final(curve: list[Row]) -> float:
    """The mean accuracy of all classes at the end."""
    return sum(curve[-1]["classes"]) / len(curve[-1]["classes"])


def held_out_accuracy(task: Task, arm: str, lr: float) -> float:
    """What a rate is chosen by."""
    return final(run(task, arm, lr, 100, task.held_out)[0])


ARMS = ("backprop", "readout", "frozen", "backprop, buffer", "readout, buffer", "frozen, buffer")


def measure(task: Task, seeds: int, rates: tuple[float, ...]) -> Row:
    """All arms on a task."""
    arms: Row = {}
    for arm in (*ARMS, "rls"):
        began, row = time.perf_counter(), {"lr": None}
        if arm != "rls":
            row = best_rate(rates, partial(held_out_accuracy, task, arm))
        curves = []
        for seed in range(seeds):
            curve, made = run(task, arm, row["lr"], seed, task.test)
            curves.append(curve)
        row |= accuracies([final(curve) for curve in curves])
        row["first_class"] = [curve[-1]["classes"][0] for curve in curves]
        row["curve"] = curves[0]
        if getattr(made, "rehearsal", None) is not None:
            row |= {"buffer_bytes": made.rehearsal.nbytes, "buffer_samples": len(made.rehearsal)}
        arms[arm] = row
        print(f"{arm:18} {row['accuracy']:.1%} (lr {row['lr']}), "
              f"{time.perf_counter() - began:.0f} s", flush=True)  # fmt: skip
    return arms


def first_of_each(y: Tensor, count: int, skip: int = 0) -> Tensor:
    """The indices of the first samples of each class, after some that are left out."""
    each = [(y == c).nonzero().flatten()[skip : skip + count] for c in range(int(y.max()) + 1)]
    return torch.cat(each)


def digits(options: argparse.Namespace) -> tuple[Task, Row]:
    """MNIST, a class after another; pixels in float16."""
    count, held_out, tested = (20, 10, 10) if options.quick else (500, 100, 200)
    if options.smoke:
        count, held_out, tested = 8, 4, 4
    data = load("mnist", options)
    (x, y), (x_test, y_test) = data.train, data.test
    x, x_test = x.half(), x_test.half()
    chosen, last = first_of_each(y, count), first_of_each(y, held_out, count)
    test = first_of_each(y_test, tested)

    def model() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 1))

    parts = (x[chosen], y[chosen]), (x[last], y[last]), (x_test[test], y_test[test])
    settings = {"model": "784-256-classes", "train": len(chosen), "test": len(test),
                "held_out": len(last), "memory": "400KB", "latest": 10,
                "replayed": REPLAYED}  # fmt: skip
    return Task(*parts, model, "400KB"), settings


def photos(options: argparse.Namespace) -> tuple[Task, Row]:
    """Photographs of Imagenette as features of VGG16; the classes in the order of their names."""
    classes, count, held_out, tested = (2, 4, 2, 2) if options.quick else (6, 30, 8, 20)
    folder = Path(os.environ.get("TPSGD_DATA", "")) / "imagenette2-160" / "val@160"
    smoke = options.smoke
    data = stand_in.data("imagenette") if smoke else tpsgd.data.load(str(folder), max_train=1200)
    (x, y), (x_test, y_test) = data.train, data.test
    few, few_test = y < classes, y_test < classes
    (x, y), (x_test, y_test) = (x[few], y[few]), (x_test[few_test], y_test[few_test])
    backbone = stand_in.backbone() if smoke else adapt.backbone("vgg16")
    parts = []
    for pixels, labels, index in (
        (x, y, first_of_each(y, count)),
        (x, y, first_of_each(y, held_out, count)),
        (x_test, y_test, first_of_each(y_test, tested)),
    ):
        features = adapt.encode(backbone, (pixels[index], labels[index]), ["pool5"])
        parts.append(features.at("pool5"))
    shape = tuple(parts[0][0].shape[1:])
    settings = {"model": "pool5 - Conv2d(64, 5) - 256 - classes", "train": len(parts[0][1]),
                "test": len(parts[2][1]), "held_out": len(parts[1][1]), "memory": "2MB",
                "latest": 2, "replayed": REPLAYED,
                "classes": list(find("imagenette").classes[:classes])}  # fmt: skip
    layers, probe = adapt.Layers(), adapt.Probe()
    task = Task(*parts, lambda: layers(shape, 1), "2MB", lambda: probe(shape, 1), 2, 6)
    return task, settings


TASKS = {"digits": digits, "photos": photos}


def main() -> None:
    """Run what is asked for; the file is written after each task."""
    parser = arguments(__doc__)
    parser.add_argument("--only", choices=list(TASKS), nargs="*", default=list(TASKS))
    parser.add_argument("--seeds", "--restarts", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="few samples and rates")
    options = parser.parse_args()
    if options.smoke:
        options.quick, options.seeds = True, 1
    record, save = result_file(options, "streams")
    record |= origin("streams", "cpu")
    rates = RATES[1:2] if options.quick else RATES
    for name in options.only:
        if name in record and not options.again:
            continue
        task, settings = TASKS[name](options)
        print(name, settings, flush=True)
        settings |= {"seeds": options.seeds, "rates": list(rates)}
        record[name] = {"settings": settings, "arms": measure(task, options.seeds, rates)}
        save()


if __name__ == "__main__":
    program(main)
