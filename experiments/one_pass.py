"""Learning in one pass: random features and a solved head, in any order, with controls.

    python -m experiments.one_pass --out results [--only digits] [--features FILE]

- `digits`: the digits of scikit-learn. Heads (`tpsgd.OnePass`) of several widths by ridge
  regression, recursive least squares and linear discriminant analysis; every sample is read once,
  in random order or all samples of a class before the next class. The outputs of both orders, and
  those of ten models of one class each that are merged, are compared with the outputs of all
  samples in one call.
- `forgetting`: one class alone for 5,000 samples, and labels that change their meaning, under
  forgetting factors.
- `photos`: the average of pool5 of a frozen VGG16, photographs of Imagenette (some of its
  training set to learn from, a fifth of its validation set as a test). The controls are linear
  probes of all samples at once, by ridge regression and by gradient steps.

Controls that take gradient steps read the same streams, ten samples in a step: `readout`, backprop
and `frozen` (random hidden layers, a trained head), each with one hidden layer of 256. `joint` is
backprop on all samples for many epochs. The rates of all of them are chosen by the accuracy on
held-out training samples at the end; penalties are chosen by the heads themselves. The test samples
decide nothing. `--features` keeps the encoder's outputs in a file, which is read the next time.
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
from experiments.streams import Backprop
from tpsgd import OnePass, Stream, adapt, lda, ridge, rls, rules

RATES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
SOLVERS: dict[str, Any] = {"ridge": ridge(), "rls": rls(), "lda": lda()}
STEP = 10  # samples in a step
HIDDEN, EPOCHS = 256, 40  # of the controls, and of those that read all samples many times
FORGETTING, IN_CLASS = 0.999, 0.99  # for every later sample; for every later one of its class
ALONE, CHANGED = 5000, 4000  # samples of one class alone, and with new meanings


@dataclass(frozen=True)
class Task:
    """Samples, and the widths of the heads that learn them."""

    train: Samples
    test: Samples
    widths: tuple[int, ...]
    seeds: int
    rates: tuple[float, ...] = RATES
    epochs: int = EPOCHS

    @property
    def classes(self) -> int:
        """How many classes there are."""
        return int(self.train[1].max()) + 1

    def held_out(self) -> "Task":
        """The training samples with a fifth of them as a test, to choose a rate by."""
        (x, y), random = self.train, torch.Generator().manual_seed(0)
        apart = torch.randperm(len(y), generator=random) < len(y) // 5
        parts = (x[~apart], y[~apart]), (x[apart], y[apart])
        return Task(*parts, self.widths, 1, self.rates, self.epochs)

    def order(self, seed: int, by_class: bool) -> Tensor:
        """The training samples in random order, or in that of their classes."""
        order = torch.randperm(len(self.train[1]), generator=torch.Generator().manual_seed(seed))
        return order[self.train[1][order].argsort(stable=True)] if by_class else order


# ---- heads that are solved -----------------------------------------------------------------------


def head_of(task: Task, solver: str, width: int, seed: int, order: Tensor, size: int) -> OnePass:
    """A head that has read the samples in an order, some at a time."""
    x, y = task.train
    head = OnePass(width, solver=SOLVERS[solver], classes=range(task.classes), seed=seed)
    for index in order.split(size):
        head.partial_fit(x[index], y[index])
    return head


def merged(task: Task, solver: str, width: int, seed: int) -> OnePass | None:
    """A head that only merges others, each of which has read the samples of one class."""
    if solver == "rls":
        return None
    whole = OnePass(width, solver=SOLVERS[solver], classes=range(task.classes), seed=seed)
    for label in range(task.classes):
        members = (task.train[1] == label).nonzero().flatten()
        whole.merge(head_of(task, solver, width, seed, members, len(members)))
    return whole


def measure_head(task: Task, solver: str, width: int) -> Row:
    """One pass by a head: classes in turn, at random, all in one call, and merged."""
    shares, random, first, joint_first, apart, far, began = [], [], [], [], [], [], time.time()
    for seed in range(task.seeds):
        everything = torch.arange(len(task.train[1]))
        build = partial(head_of, task, solver, width, seed)
        in_turn = build(task.order(seed, True), STEP)
        at_random = build(task.order(seed, False), STEP)
        together = build(everything, len(everything))
        out = together.outputs(task.test[0])
        shares.append(in_turn.evaluate(task.test))
        random.append(at_random.evaluate(task.test))
        first.append(first_class(in_turn.outputs(task.test[0]), task))
        joint_first.append(first_class(out, task))
        apart += [float((h.outputs(task.test[0]) - out).abs().max()) for h in (in_turn, at_random)]
        if (whole := merged(task, solver, width, seed)) is not None:
            far.append(float((whole.outputs(task.test[0]) - out).abs().max()))
    return {
        "in turn": accuracies(shares), "at random": accuracies(random),
        "first class": accuracies(first), "first class, all in one call": accuracies(joint_first),
        "largest difference": max(apart), "largest difference, merged": max(far, default=None),
        "bytes": in_turn.nbytes, "seconds": time.time() - began,
    }  # fmt: skip


def first_class(out: Tensor, task: Task) -> float:
    """The accuracy on the class that came first."""
    members = task.test[1] == 0
    return float((out.argmax(1)[members] == 0).double().mean())


# ---- controls that take gradient steps -----------------------------------------------------------


def net(inputs: int, classes: int) -> nn.Sequential:
    """The net of the controls."""
    layers = nn.Linear(inputs, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, classes)
    return nn.Sequential(nn.Flatten(), *layers)


def read_once(task: Task, arm: str, by_class: bool, lr: float, seed: int) -> Tensor:
    """The outputs on the test samples after one pass of gradient steps."""
    torch.manual_seed(seed)
    (x, y), model = task.train, net(task.train[0][0].numel(), task.classes)
    learner: Any = Backprop(model, lr, None)
    if arm != "backprop":
        learner = Stream(model, rule=rules.ALL[arm].make(), lr=lr, seed=seed, batch_size=STEP)
    for index in task.order(seed, by_class).split(STEP):
        learner.partial_fit(x[index], y[index])
    return learner.outputs(task.test[0])


def read_often(task: Task, make: Callable[[], nn.Module], lr: float, seed: int) -> Tensor:
    """The outputs on the test samples after many epochs of backprop."""
    torch.manual_seed(seed)
    model = make()
    tpsgd.fit_backprop(model, task.train, lr=lr, seed=seed, epochs=task.epochs, batch_size=32)
    with torch.no_grad():
        return model(task.test[0])


def accuracy(out: Tensor, task: Task) -> float:
    """The share of test samples that are right."""
    return float((out.argmax(1) == task.test[1]).double().mean())


def measure_control(task: Task, outputs: Callable[[Task, float, int], Tensor]) -> Row:
    """A control with the rate that is best on held-out training samples."""
    chosen = task.held_out()
    row = best_rate(task.rates, lambda lr: accuracy(outputs(chosen, lr, 100), chosen))
    outs = [outputs(task, row["lr"], seed) for seed in range(task.seeds)]
    row |= accuracies([accuracy(out, task) for out in outs])
    return row | {"first class": accuracies([first_class(out, task) for out in outs])}


def controls(task: Task) -> dict[str, Callable[[], Row]]:
    """The controls by their names."""
    inputs = task.train[0][0].numel()

    def once(arm: str, by_class: bool) -> Callable[[], Row]:
        return lambda: measure_control(
            task, lambda some, lr, seed: read_once(some, arm, by_class, lr, seed)
        )

    def often(make: Callable[[], nn.Module]) -> Callable[[], Row]:
        return lambda: measure_control(
            task, lambda some, lr, seed: read_often(some, make, lr, seed)
        )

    rows = {
        f"{arm}, {'in turn' if by_class else 'at random'}": once(arm, by_class)
        for arm in ("backprop", "readout", "frozen")
        for by_class in (True, False)
    }
    rows["joint"] = often(lambda: net(inputs, task.classes))
    linear = lambda: nn.Sequential(nn.Flatten(), nn.Linear(inputs, task.classes))  # noqa: E731
    rows["joint linear probe, trained"] = often(linear)
    rows["joint linear probe, ridge"] = lambda: accuracies_of_probe(task)
    return rows


def accuracies_of_probe(task: Task) -> Row:
    """Ridge regression on all samples at once; cross-validation chooses its penalty."""
    inputs = task.train[0][0].numel()
    model = nn.Sequential(nn.Flatten(), nn.Linear(inputs, task.classes))
    tpsgd.fit(model, task.train, rule=rules.frozen(), optimizer=ridge(), epochs=1)
    with torch.no_grad():
        out = model(task.test[0])
    row = {"lr": None} | accuracies([accuracy(out, task)])
    return row | {"first class": accuracies([first_class(out, task)])}


# ---- the tasks -----------------------------------------------------------------------------------


def digits(options: argparse.Namespace) -> Task:
    """The digits of scikit-learn."""
    data = load("digits", options)
    if options.smoke:
        return Task(data.train, data.test, (0, 16), 1, RATES[1:2], 1)
    return Task(data.train, data.test, (0, 64, 128, 256, 500, 1000), options.seeds)


def photos(options: argparse.Namespace) -> Task:
    """Photographs of Imagenette as the average of pool5 of a frozen VGG16."""
    if options.smoke:
        data, backbone = stand_in.data("imagenette"), stand_in.backbone()
        train, test = (pooled(backbone, part) for part in (data.train, data.test))
        return Task(train, test, (0, 16), 1, RATES[1:2], 1)
    if options.features and options.features.exists():
        train, test = torch.load(options.features, weights_only=True)
    else:
        backbone, train, test = adapt.backbone("vgg16"), *folders()
        train, test = (pooled(backbone, part) for part in (train, test))
        if options.features:
            torch.save((train, test), options.features)
    return Task(train, test, (0, 500, 1000, 2000), min(options.seeds, 3))


def folders() -> tuple[Samples, Samples]:
    """Some photographs of the training set, and a fifth of the validation set."""
    root = Path(os.environ.get("TPSGD_DATA", "")) / "imagenette2-160"
    train = tpsgd.data.load(str(root / "train@160"), max_train=1500)
    test = tpsgd.data.load(str(root / "val@160"), max_train=10)
    assert train.classes == test.classes
    return train.train, test.test


def pooled(backbone: Any, data: Samples) -> Samples:
    """The average of pool5 over space, and the labels."""
    features, labels = adapt.encode(backbone, data, ["pool5"]).at("pool5")
    return features.mean((2, 3)), labels


def measure(task: Task, record: Row, save: Callable[[], Any]) -> None:
    """All heads and controls of a task; the file is written after each."""
    record["settings"] = {
        "train": len(task.train[1]), "test": len(task.test[1]), "seeds": task.seeds,
        "step": STEP, "hidden": HIDDEN, "epochs": task.epochs, "widths": list(task.widths),
        "inputs": task.train[0][0].numel(), "rates": list(task.rates),
    }  # fmt: skip
    heads, others = record.setdefault("heads", {}), record.setdefault("controls", {})
    for name, make in controls(task).items():
        if name not in others:
            others[name] = make()
            print(f"{name:30} {others[name]['accuracy']:.1%}", flush=True)
            save()
    for width in task.widths:
        for solver in SOLVERS:
            if (name := f"{solver} {width}") not in heads:
                heads[name] = row = measure_head(task, solver, width)
                print(f"{name:30} {row['in turn']['accuracy']:.1%}", flush=True)
                save()


# ---- forgetting ----------------------------------------------------------------------------------

FORGETTING_ARMS: dict[str, Row] = {
    "rls": {"solver": rls()},
    "rls, forgetting": {"solver": rls(), "forgetting": FORGETTING, "bound": 1e300},
    "rls, forgetting, bound": {"solver": rls(), "forgetting": FORGETTING},
    "ridge": {"solver": ridge()},
    "ridge, forgetting in each class": {"solver": ridge(), "forgetting": IN_CLASS},
}


def measure_forgetting(task: Task, arm: str, width: int, samples: int, scale: float) -> Row:
    """Accuracy after a mixed stream; after one class alone; and after labels have changed."""
    (x, y), rows = task.train, {"mixed": [], "one class alone": [], "changed": []}
    new = torch.arange(task.classes).roll(1)  # what a label means later
    for seed in range(task.seeds):

        def build() -> OnePass:
            classes = range(task.classes)
            return OnePass(width, classes=classes, seed=seed, **FORGETTING_ARMS[arm])  # noqa: B023

        random = torch.Generator().manual_seed(seed)
        index = torch.randint(len(y), (samples,), generator=random)
        alone = (y == 0).nonzero().flatten()
        alone = alone[torch.arange(int(ALONE * scale)) % len(alone)]
        later = torch.randint(len(y), (int(CHANGED * scale),), generator=random)
        head = build().partial_fit(x[index], y[index])
        rows["mixed"].append(head.evaluate(task.test))
        rows["one class alone"].append(head.partial_fit(x[alone], y[alone]).evaluate(task.test))
        head = build().partial_fit(x[index], y[index]).partial_fit(x[later], new[y[later]])
        rows["changed"].append(head.evaluate((task.test[0], new[task.test[1]])))
    return {name: accuracies(shares) for name, shares in rows.items()}


def forgetting(options: argparse.Namespace, record: Row, save: Callable[[], Any]) -> None:
    """Digits under forgetting factors, in two widths."""
    task = digits(options)
    widths, samples, scale = ((16,), 100, 0.02) if options.smoke else ((64, 128), 6000, 1.0)
    record["settings"] = {
        "seeds": task.seeds, "forgetting": FORGETTING, "in_class": IN_CLASS, "mixed": samples,
        "alone": int(ALONE * scale), "changed": int(CHANGED * scale),
    }  # fmt: skip
    for arm in FORGETTING_ARMS:
        for width in widths:
            if (name := f"{arm} {width}") not in record:
                record[name] = row = measure_forgetting(task, arm, width, samples, scale)
                print(f"{name:36} {row['one class alone']['accuracy']:.1%}", flush=True)
                save()


def main() -> None:
    """Run what is asked for; rows that the file has are left out."""
    parser = arguments(__doc__)
    tasks = "digits", "forgetting", "photos"
    parser.add_argument("--only", choices=tasks, nargs="*", default=list(tasks))
    parser.add_argument("--seeds", "--restarts", type=int, default=5)
    parser.add_argument("--features", type=Path, help="file that keeps what the encoder gives")
    options = parser.parse_args()
    record, save = result_file(options, "one_pass")
    record |= origin("one_pass", "cpu")
    for name in options.only:
        part = record.setdefault(name, {})
        if options.again:
            part.clear()
        if name == "forgetting":
            forgetting(options, part, save)
        else:
            measure({"digits": digits, "photos": photos}[name](options), part, save)
    save()


if __name__ == "__main__":
    program(main)
