"""How the nets of `experiments.targets` are trained and measured: arms, searches, figures.

An arm learns by backprop, a local rule or a control. Its rate, and its epochs where several are
tried, are those that are best on held-out training samples; then it learns from all of them.
"""

import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from statistics import fmean, median, stdev
from typing import Any

import torch
from torch import Tensor, nn

import tpsgd
from experiments.common import Row, Samples, commit, hold_out_last
from tpsgd import rules

SEARCH_SEED = 100  # of the weights and the order in a search; restarts have 0, 1, 2, ...
Figures = Callable[[nn.Module, Samples], Row]


@dataclass(frozen=True)
class Arm:
    """How a net learns: without a rule by backprop."""

    rule: Any = None
    settings: Row = field(default_factory=dict)  # of `fit`
    solved: bool = False  # nothing has a rate: hidden layers are random, the last one is solved
    on_inputs: bool = False  # a linear layer in place of the net


@dataclass(frozen=True)
class Task:
    """Data, a net for them, how it is measured, and what is tried in a search."""

    load: Callable[[int], tuple[Samples, Samples]]
    net: Callable[[], nn.Module]
    figures: Figures
    arms: dict[str, Arm]
    rates: Sequence[float]
    epochs: Sequence[int]  # of a search
    longer: int = 1  # the epochs of a restart over those of its search
    batch_size: int = 32
    restarts: int = 3
    searches: bool = False  # for every restart, which has other test samples


def trained(task: Task, arm: Arm, data: Samples, seed: int, lr: float, epochs: int) -> Row:
    """A net that has learned, and what it took: CPU seconds, bytes, sample passes."""
    torch.manual_seed(seed)
    net = linear(data[0]) if arm.on_inputs else task.net()
    settings = {"seed": seed, "batch_size": task.batch_size, "progress": False, **arm.settings}
    if arm.solved:
        settings["optimizer"] = solved_last(net)
    else:
        settings |= {"lr": lr, "epochs": epochs, "lr_schedule": tpsgd.one_cycle()}
    began = time.process_time()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*have no samples")  # rare characters
        if arm.rule is None:
            run = tpsgd.fit_backprop(net, data, **settings)
        else:
            run = tpsgd.fit(net, data, rule=arm.rule, **settings)
    cost = {"cpu_seconds": time.process_time() - began, "total_bytes": run.total_bytes}
    return cost | {"net": net, "sample_passes": run.sample_passes}


def linear(x: Tensor) -> nn.Module:
    """A linear layer on all inputs."""
    return nn.Sequential(nn.Flatten(), nn.Linear(x[0].numel(), 1))


def solved_last(net: nn.Module) -> list[Any]:
    """Optimizers of the blocks of a net: ridge regression for the last."""
    return [torch.optim.Adam] * (len(tpsgd.split(net)) - 1) + [tpsgd.ridge()]


def measured(task: Task, arm: Arm, smoke: bool) -> Row:
    """A row of the result file: settings from held-out samples, figures of test samples."""
    restarts: list[Row] = []
    chosen: Row = {}
    for seed in range(1 if smoke else task.restarts):
        data, test = task.load(seed)
        if smoke:
            data, test = ((x[:64], y[:64]) for x, y in (data, test))
        if not chosen or task.searches:
            chosen = searched(task, arm, data, smoke)
        row = trained(task, arm, data, seed, chosen["lr"], chosen["epochs"])
        row |= task.figures(row.pop("net"), test) | chosen
        restarts.append({"seed": seed, **row})
    return summary(restarts)


def searched(task: Task, arm: Arm, data: Samples, smoke: bool) -> Row:
    """The rate and the epochs that are best on a held-out fifth of the training samples."""
    if arm.solved:
        return {"lr": None, "epochs": None}
    rates, epochs = (task.rates[:1], [1]) if smoke else (task.rates, task.epochs)
    learned, held_out = hold_out_last(*data, len(data[0]) // 5)
    scores: dict[tuple[float, int], float] = {}
    for lr, n in product(rates, epochs):
        try:
            net = trained(task, arm, learned, SEARCH_SEED, lr, n)["net"]
            scores[lr, n] = task.figures(net, held_out)["score"]
        except tpsgd.TpsgdError:  # training diverged
            continue
    lr, n = max(scores, key=lambda key: scores[key])
    tried = [{"lr": rate, "epochs": k, "score": score} for (rate, k), score in scores.items()]
    return {"lr": lr, "epochs": n if smoke else n * task.longer, "search": tried}


def summary(restarts: list[Row]) -> Row:
    """Means of the figures of restarts, the median of their seconds, and all of them."""
    numbers = [k for k, v in restarts[0].items() if isinstance(v, (int, float)) and k != "seed"]
    columns = {name: [row[name] for row in restarts] for name in numbers}
    row: Row = {name: fmean(values) for name, values in columns.items()}
    row["cpu_seconds"] = median(columns["cpu_seconds"])
    row |= {name: restarts[0][name] for name in ("lr", "epochs")}
    if len({(each["lr"], each["epochs"]) for each in restarts}) > 1:  # each has its own
        row |= {"lr": None, "epochs": None}
    deviation = stdev(columns["score"]) if len(restarts) > 1 else 0.0
    row |= {"deviation": deviation, "accuracies": columns["score"], "commit": commit()}
    return row | {"restarts": restarts}


# ---- figures: the score is higher for a better net -----------------------------------------------


def of_numbers(net: nn.Module, data: Samples) -> Row:
    """The root mean squared error over the deviation of the labels, and R²."""
    rmse = math.sqrt(2 * tpsgd.evaluate(net, data, loss="mse")) / float(data[1].std(correction=0))
    return {"score": -rmse, "rmse": rmse, "r2": 1 - rmse**2}


def of_classes(net: nn.Module, data: Samples) -> Row:
    """The share of labels that are right."""
    right = tpsgd.evaluate(net, data)
    return {"score": right, "right": right}


def of_characters(net: nn.Module, data: Samples) -> Row:
    """Bits a character: what a text takes, compressed by the net's probabilities."""
    bits = tpsgd.evaluate(net, data, loss="cross_entropy") / math.log(2)
    return {"score": -bits, "bits": bits}


@torch.no_grad()
def of_pixels(net: nn.Module, data: Samples) -> Row:
    """The mean over the classes of intersection over union, and the share of right pixels."""
    net.eval()
    outputs = torch.cat([net(x) for x in data[0].split(256)])
    predicted, y, classes = outputs.argmax(1), data[1], outputs.shape[1]
    pairs = torch.bincount((y * classes + predicted).flatten(), minlength=classes**2)
    counts = pairs.view(classes, classes).double()
    both = counts.diagonal()
    iou = float((both / (counts.sum(0) + counts.sum(1) - both).clamp(min=1)).mean())
    return {"score": iou, "iou": iou, "right": float(both.sum() / counts.sum())}


# ---- arms ----------------------------------------------------------------------------------------

BACKPROP = Arm()
LOCAL = {"readout-learned": "readout-learned", "auxiliary": rules.auxiliary()}
CONTROLS_OF_NUMBERS = {
    "frozen": Arm("frozen"),
    "frozen, ridge head": Arm("frozen", solved=True),
    "ridge": Arm("tpsgd-l2", solved=True, on_inputs=True),
}


def by_rule(rule: str, **settings: Any) -> Arm:
    """An arm of a local rule."""
    return Arm(LOCAL[rule], settings)
