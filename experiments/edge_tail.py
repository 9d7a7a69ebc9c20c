"""A frozen body of bytes with a tail that learns on the device: what the tail is worth.

    python -m experiments.edge_tail --out results [--bodies FOLDER] [--only bodies]

The net of examples/edge/mobilenet.py learns five classes of CIFAR-10 by backprop, once for each
seed, on a GPU if there is one; `--only bodies` stops there. The folder of bodies, `OUT/bodies` by
default, keeps them for the next time. Its body is then frozen, with a byte for each weight, and its
tail learns on the device, one picture at a time, five times each:

- `classes`: the other five classes, with a head of zeros, from 500 and from 2,000 pictures;
- `camera`: 2,000 pictures of the old classes as a grey, noisy camera sees them that is mounted
  sideways.

Arms in the exported C: the tail by local losses, with learned and with fixed codes; the head alone,
behind the tail as it was or behind a tail that is drawn anew; a head that is solved in one pass.
In Python: the tail by backprop. As the body does not move, its outputs are computed once, and the
exported net is the tail; the record has the RAM of the whole net, and how far its logits are from
those of the tail. Each arm has the rate, or penalty, that is best on 500
held-out training pictures, and is tested once on all test pictures of its classes.
"""

import argparse
import tempfile
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import tpsgd
from examples.edge import mobilenet as net
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
from tpsgd import rules
from tpsgd.comparison.provenance import machine
from tpsgd.maths.random import Key, permutation
from tpsgd_export.heads.compiled import CompiledHead
from tpsgd_export.read_model import read_model
from tpsgd_export.to_c.check import as_in
from tpsgd_export.to_c.compiled import CompiledNet
from tpsgd_export.to_c.small import with_small_weights

RATES = (0.003, 0.01, 0.03, 0.1)
PENALTIES = (0.1, 1.0, 10.0, 100.0)
HELD_OUT, PASSES, EPOCHS, SEEDS = 500, 5, 40, 3
SMOKE = 40  # pictures to learn from, and half as many that are held out
TASKS = {"classes": (500, 2000), "camera": (2000,)}  # and how many pictures they learn from
SHAPE = (3, 32, 32)
ALL, HEAD = -1, 0b100  # blocks of the tail that learn


@dataclass(frozen=True)
class Task:
    """Pictures that a device learns, that choose its rate, and that test it."""

    train: Samples
    held_out: Samples
    test: Samples
    passes: int = PASSES
    rates: tuple[float, ...] = RATES
    penalties: tuple[float, ...] = PENALTIES

    def changed(self, change: Callable[[Tensor, int], Tensor]) -> "Task":
        """The same task with other pictures; `change` also gets the number of their set."""
        sets = enumerate((self.train, self.held_out, self.test))
        train, held_out, test = ((change(x, i), y) for i, (x, y) in sets)
        return replace(self, train=train, held_out=held_out, test=test)

    def in_short(self) -> "Task":
        """The task with a pass and a choice."""
        return replace(self, passes=1, rates=RATES[1:2], penalties=PENALTIES[1:2])


@torch.no_grad()
def outputs(model: nn.Module, x: Tensor) -> Tensor:
    """What a model gives for many pictures."""
    return torch.cat([model(part) for part in x.split(500)])


def sideways(x: Tensor, seed: int) -> Tensor:
    """What a grey, noisy camera that is mounted sideways sees."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(len(x), 1, *x.shape[2:], generator=generator)
    grey = x.mean(1, keepdim=True).rot90(1, (2, 3))
    return (0.6 * grey + 0.05 * noise).expand_as(x).contiguous()


def task_of(name: str, cifar: Any, count: int, seed: int, smoke: bool) -> Task:
    """The pictures of a task."""
    new, sizes = name == "classes", (SMOKE, SMOKE // 2) if smoke else (count, HELD_OUT)
    torch.manual_seed(seed)
    train, held_out = net.parts(net.of_classes(cifar.train, new), sizes)
    task = Task(train, held_out, net.of_classes(cifar.test, new))
    if not new:
        task = task.changed(lambda x, i: sideways(x, 3 * seed + i))
    return task.in_short() if smoke else task


# ---- bodies --------------------------------------------------------------------------------------


def body_of(cifar: Any, seed: int, options: argparse.Namespace) -> tuple[nn.Sequential, Row]:
    """A net that has learned the old classes: the share that is right of their test pictures."""
    epochs = 1 if options.smoke else EPOCHS
    file = (options.bodies or options.out / "bodies") / f"body{seed}-{epochs}.pt"
    if not file.exists():
        train = net.of_classes(cifar.train, new=False)
        model = net.pretrained(train, epochs, seed, options.device)
        share = float(tpsgd.evaluate(model, net.of_classes(cifar.test, new=False)))
        file.parent.mkdir(parents=True, exist_ok=True)
        weights = {"model": model.state_dict(), "accuracy": share}
        torch.save(weights | {"machine": machine(options.device)}, file)
    stored = torch.load(file)
    model = net.mobilenet()
    model.load_state_dict(stored.pop("model"))
    return model.eval(), stored


def frozen_body(model: nn.Sequential, name: str) -> nn.Sequential:
    """The net with norms folded into its layers, its body rounded to bytes, and a head of zeros.

    For the old classes the head is the one that they were learned with.
    """
    learner = net.with_new_head(model)
    if name == "camera":
        learner[-1] = deepcopy(model[-1])
    recipe = with_small_weights(read_model(learner, net.RULE, SHAPE))
    twin = as_in(recipe, learner)
    assert isinstance(twin, nn.Sequential)
    return twin.eval()


def drawn(tail: nn.Sequential, pictures: Tensor, seed: int) -> nn.Sequential:
    """A tail with the same head and new weights, whose norms have measured some pictures."""
    torch.manual_seed(seed)
    fresh = net.mobilenet()[net.TAIL :]
    fresh[-1] = deepcopy(tail[-1])
    for norm in (m for m in fresh.modules() if isinstance(m, nn.BatchNorm2d)):
        norm.momentum = None
    with torch.no_grad():
        fresh.train()(pictures)
    return fresh.eval()


# ---- arms ----------------------------------------------------------------------------------------


def share_right(logits: Callable[[Tensor], Tensor], pair: Samples) -> float:
    """The share of samples that are right, one at a time."""
    right = sum(int(logits(x).argmax() == y) for x, y in zip(*pair, strict=True))
    return right / len(pair[1])


def exported(
    model: nn.Module, rule: rules.Rule, samples: Tensor, seed: int, **options: Any
) -> CompiledNet:
    """The C of a net, compiled for this machine."""
    with tempfile.TemporaryDirectory() as folder:
        shape = tuple(samples.shape[1:])
        tpsgd.export.c(
            model, folder, shape=shape, rule=rule, samples=samples[:256], seed=seed, **options
        )
        return CompiledNet(folder)


def order_of(task: Task, seed: int) -> Iterator[int]:
    """The samples of all passes, one after another."""
    for epoch in range(task.passes):
        yield from torch.cat(list(permutation(len(task.train[1]), Key(seed, 0, epoch)))).tolist()


def in_c(
    rule: rules.Rule, blocks: int, tail: nn.Sequential, task: Task, seed: int, rate: float
) -> Callable[[Tensor], Tensor]:
    """A tail that has learned in the exported C."""
    device = exported(tail, rule, task.train[0], seed)
    x, y = task.train
    for i in order_of(task, seed):
        device.step(x[i], y[i : i + 1], rate, blocks)
    return device.forward


def by_backprop(
    tail: nn.Sequential, task: Task, seed: int, rate: float
) -> Callable[[Tensor], Tensor]:
    """A tail that has learned by backprop, in Python."""
    model = deepcopy(tail).train()
    tpsgd.fit_backprop(
        model, task.train, optimizer=tpsgd.sgd, lr=rate, epochs=task.passes, batch_size=1,
        seed=seed, progress=False,
    )  # fmt: skip
    model.eval()
    return torch.no_grad()(lambda x: model(x[None])[0])


def one_pass(
    tail: nn.Sequential, task: Task, seed: int, penalty: float
) -> Callable[[Tensor], Tensor]:
    """A head on the outputs of the tail that sees each picture once, in the exported C."""
    encoder = tail[:-1]
    x, y = outputs(encoder, task.train[0]), task.train[1]
    with tempfile.TemporaryDirectory() as folder:
        tpsgd.export.one_pass(
            folder, shape=(x.shape[1],), classes=net.OLD, features=0, ridge=penalty, samples=x[:256]
        )
        head = CompiledHead(folder)
    for sample, label in zip(x, y.tolist(), strict=True):
        head.learn(sample, label)
    return lambda x: torch.as_tensor(head.scores(outputs(encoder, x[None])[0]))


ARMS: dict[str, Callable[..., Callable[[Tensor], Tensor]]] = {
    "tail": partial(in_c, net.RULE, ALL),
    "tail, fixed codes": partial(in_c, rules.readout(features=net.WIDTH), ALL),
    "tail by backprop": by_backprop,
    "head alone": partial(in_c, net.RULE, HEAD),
    "drawn tail, head alone": partial(in_c, net.RULE, HEAD),
    "head in one pass": one_pass,
}


def measured(arm: str, tail: nn.Sequential, task: Task, seed: int) -> Row:
    """An arm with the rate, or penalty, that is best on held-out pictures; and its test."""
    if arm.startswith("drawn"):
        tail = drawn(tail, task.train[0][:256], seed)
    learn = partial(ARMS[arm], tail, task, seed)
    choices = task.penalties if ARMS[arm] is one_pass else task.rates
    row = best_rate(choices, lambda choice: share_right(learn(choice), task.held_out))
    return row | {"accuracy": share_right(learn(row["lr"]), task.test)}


def whole(model: nn.Sequential, name: str, task: Task, tail: nn.Sequential) -> Row:
    """RAM of the net with its body, and how far its logits are from those of the tail alone."""
    learner = net.with_new_head(model)
    if name == "camera":
        learner[-1] = deepcopy(model[-1])
    x = task.train[0][:256]
    seen = outputs(frozen_body(model, name)[: net.TAIL], x)
    device = exported(learner, net.RULE, x, 0, frozen="int8", ram="256KB")
    short = exported(tail, net.RULE, seen, 0)
    gaps = [device.forward(a) - short.forward(b) for a, b in zip(x, seen, strict=True)]
    apart = float(torch.stack(gaps).abs().max())
    return {"ram_bytes": device.ram, "tail_ram_bytes": short.ram, "logits_apart": apart}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--bodies", type=Path, help="folder of trained bodies")
    parser.add_argument("--only", choices=("bodies",), help="train the bodies, and stop there")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(SEEDS)))
    parser.add_argument("--tasks", nargs="+", default=list(TASKS))
    parser.add_argument("--arms", nargs="+", default=list(ARMS))
    options = parser.parse_args()
    cifar = load("cifar10", options)
    record, write = result_file(options, "edge_tail")
    record |= origin("edge_tail", "cpu")
    record["settings"] = {
        "rates": RATES, "penalties": PENALTIES, "held_out": HELD_OUT, "passes": PASSES,
        "epochs": EPOCHS, "seeds": len(options.seeds),
    }  # fmt: skip
    if options.again:
        for rows in (rows for name in options.tasks for rows in tasks_of(record, name).values()):
            for arm in options.arms:
                rows.pop(arm, None)
    for seed in options.seeds[:1] if options.smoke else options.seeds:
        model, figures = body_of(cifar, seed, options)
        record.setdefault("bodies", {})[str(seed)] = figures
        print(f"body {seed}: {figures['accuracy']:.1%} of the old classes", flush=True)
        write()
        for name in options.tasks if options.only is None else ():
            for count in TASKS[name]:
                learn_task(record, write, (name, count, seed), model, cifar, options)


def tasks_of(record: Row, name: str) -> Row:
    """The arms of a task in the record, by the number of pictures."""
    return record.setdefault("tasks", {}).setdefault(name, {})


def learn_task(
    record: Row, write: Callable[[], Any], of: tuple[str, int, int], model: nn.Sequential,
    cifar: Any, options: argparse.Namespace,
) -> None:  # fmt: skip
    """The arms of a task for one seed, those that the record does not have."""
    name, count, seed = of
    pictures = task_of(name, cifar, count, seed, options.smoke)
    twin = frozen_body(model, name)
    body, tail = twin[: net.TAIL], twin[net.TAIL :]
    task = pictures.changed(lambda x, _: outputs(body, x))
    rows = tasks_of(record, name).setdefault(str(count), {})
    if "whole" not in record:
        record["whole"] = whole(model, name, pictures, tail)
        print(record["whole"], flush=True)
    for arm in options.arms:
        row = rows.setdefault(arm, {"seeds": [], "lr": [], "accuracies": []})
        if seed in row["seeds"]:
            continue
        result = measured(arm, tail, task, seed)
        seeds = {"seeds": [*row["seeds"], seed], "lr": [*row["lr"], result["lr"]]}
        rows[arm] = accuracies([result["accuracy"]], row) | seeds
        print(f"{name}, {count}, {arm}, seed {seed}: {result}", flush=True)
        write()


if __name__ == "__main__":
    program(main)
