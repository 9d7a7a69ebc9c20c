"""The angle between each rule's update and that of backprop, block by block, while a net learns.

    python -m experiments.alignment --out results [--device cuda] [--only mlp]

Every batch trains every block (`simultaneous`), the head by cross-entropy. After the first batch
and after every epoch, both gradients of each hidden block are computed by autograd on the same
training samples: that of the block's local loss, and that of the net's loss. The angle of the
*update* is between the gradients of the block's weights and biases; that of the *signal* is between
the derivatives with respect to the block's output before its activation, the mean over samples.
Below 90 degrees a small step of the rule lowers the net's loss. Frenkel et al. show that for DRTP
in nets of linear layers with an activation; the angle is measured by an observer, so the training
is that of `fit`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

import tpsgd
from experiments.common import Row, Samples, program
from experiments.rows import Rows, leave_out, row_arguments
from experiments.shallow import standardised
from tpsgd import Place, TpsgdError, rules
from tpsgd.engine.restarts import make_model
from tpsgd.objectives import Signal
from tpsgd.train import Batch, EpochEnd, Learner, Net, Observer, simultaneous
from tpsgd.zoo.words import cnn, mlp

PROBES = 512  # samples on which both gradients are computed
RULES = [name for name in rules.ALL if rules.ALL[name].make().objective is not None]


@dataclass(frozen=True)
class Setting:
    """A net on a data set."""

    data: str
    model: Callable[[tuple[int, ...]], nn.Module]
    epochs: int
    max_train: int | None = None


NETS = {
    "mlp": Setting("mnist", lambda s: mlp(s, [256, 256], 10, nn.LeakyReLU), 5),
    "mlp-tanh": Setting("mnist", lambda s: mlp(s, [256, 256], 10, nn.Tanh), 5),
    "cnn": Setting("mnist", lambda s: cnn(s, [(16, 5), (16, 5)], 10, nn.LeakyReLU), 3),
}
SMOKE = {
    "mlp": Setting("digits", lambda s: mlp(s, [32, 32], 10, nn.Tanh), 2, 600),
    "cnn": Setting("digits", lambda s: cnn(s, [(4, 3), (4, 3)], 10, nn.LeakyReLU), 2, 600),
}


class Angles(Observer):
    """Measures the angles after the first batch and after every epoch."""

    def __init__(self, probes: Samples) -> None:
        self.probes, self.points = probes, []
        self.batches = 0

    def batch(self, learners: Sequence[Learner], batch: Batch) -> None:
        """The weights are hardly those of the start yet."""
        self.batches += 1
        if self.batches == 1 and learners:
            self.points.append({"epoch": 0} | angles(learners, *self.probes))

    def epoch(self, end: EpochEnd) -> set[Learner]:
        """Class codes and scales are those that the blocks learn from."""
        self.points.append({"epoch": end.number + 1} | angles(end.learners, *self.probes))
        return set()

    def order(self, net: Net) -> None:
        """`simultaneous`, watched; the memory meter, first and last of the observers, sees none."""
        net.observers.insert(1, self)
        simultaneous(net)


def angles(learners: Sequence[Any], x: Tensor, labels: Tensor) -> Row:
    """Degrees between the local gradients of the hidden blocks and those of the net's loss."""
    with torch.enable_grad():
        local = local_gradients(learners, x, labels)
        whole = net_gradients(learners, x, labels)
    pairs = list(zip(local, whole, strict=True))
    return {
        "update": [degrees(ours[0][None], theirs[0][None]) for ours, theirs in pairs],
        "signal": [degrees(ours[1], theirs[1]) for ours, theirs in pairs],
    }


def local_gradients(
    learners: Sequence[Any], x: Tensor, labels: Tensor
) -> list[tuple[Tensor, Tensor]]:
    """Of each hidden block's local loss: by its weights and biases, and by its outputs."""
    inputs = [x]
    for learner in learners:
        inputs.append(learner.block.outputs(inputs[-1])[Place.END].detach())
    output = inputs[-1].requires_grad_()
    (gradient,) = torch.autograd.grad(learners[-1].objective.loss(output, labels), output)
    error = -gradient * len(x)
    signals = {Signal.LABEL: labels, Signal.ERROR: error, Signal.ERROR_SIGN: error.sign()}
    pairs = []
    for learner, x_i in zip(learners[:-1], inputs, strict=False):
        outputs = learner.block.outputs(x_i)
        y, signal = outputs[learner.gradient.at], signals[learner.signal]
        loss = learner.objective.loss(y, signal, *learner.tensors)
        pairs.append(_gradients(loss, learner, outputs))
    return pairs


def net_gradients(
    learners: Sequence[Any], x: Tensor, labels: Tensor
) -> list[tuple[Tensor, Tensor]]:
    """Of the net's loss, for the same tensors: backprop."""
    hidden = []
    for learner in learners:
        outputs = learner.block.outputs(x)
        x = outputs[Place.END]
        hidden.append((learner, outputs))
    loss = learners[-1].objective.loss(x, labels)
    return [_gradients(loss, learner, outputs) for learner, outputs in hidden[:-1]]


def _gradients(loss: Tensor, learner: Any, outputs: dict[Place, Tensor]) -> tuple[Tensor, Tensor]:
    """By the block's weights and biases in one row, and by each sample's output in a row."""
    parameters = list(learner.block.layer.parameters())
    places = [*parameters, outputs[Place.BEFORE]]
    *of_parameters, of_output = torch.autograd.grad(loss, places, retain_graph=True)
    return torch.cat([g.flatten() for g in of_parameters]), of_output.flatten(1)


def degrees(a: Tensor, b: Tensor) -> float | None:
    """The mean angle between the rows of two matrices; rows of zeros have none."""
    lengths = a.norm(dim=1) * b.norm(dim=1)
    usable = lengths > 0
    if not usable.any():
        return None
    cosine = (a * b).sum(1)[usable] / lengths[usable]
    return float(cosine.clamp(-1, 1).double().acos().mean()) * 180 / math.pi


class Bench:
    """A net's data on a device, and how one restart is trained there."""

    def __init__(self, setting: Setting, device: str) -> None:
        self.setting, self.device = setting, device
        loaded = tpsgd.data.load(setting.data, max_train=setting.max_train)
        x, y, x_test, y_test = (t.to(device) for t in (*loaded.train, *loaded.test))
        x, x_test = standardised(x, x_test)
        self.shape, self.train, self.test = loaded.shape, (x, y), (x_test, y_test)

    def run(self, rule: str, seed: int) -> Row:
        """The angles over one training, and its accuracy."""
        watch = Angles((self.train[0][:PROBES], self.train[1][:PROBES]))
        model = make_model(lambda: self.setting.model(self.shape), seed).to(self.device)
        run = tpsgd.fit(
            model, self.train, rule=rules.ALL[rule].make(), loss=tpsgd.cross_entropy,
            order=watch.order, epochs=self.setting.epochs, seed=seed,
        )  # fmt: skip
        figures = {"accuracy": tpsgd.evaluate(model, self.test), "peak_bytes": run.peak_bytes}
        return figures | {"train_seconds": run.seconds, "points": watch.points}


def main() -> None:
    """Measure every rule on every net; the file is written after every training."""
    parser = row_arguments(__doc__, restarts=3)
    parser.add_argument("--only", choices=list(NETS))
    parser.add_argument("--arms", nargs="+", choices=RULES, default=RULES)
    options = parser.parse_args()
    nets = SMOKE if options.smoke else NETS
    rows = Rows("alignment", options, {"probes": PROBES, "order": "simultaneous"})
    for name in [options.only] if options.only in nets else list(nets):
        try:
            bench = Bench(nets[name], options.device)
        except TpsgdError as error:
            leave_out(name, error)
            continue
        for rule in options.arms:
            measure(rows, bench, name, rule)


def measure(rows: Rows, bench: Bench, name: str, rule: str) -> None:
    """The row of one rule on one net."""
    setting = bench.setting
    settings: Row = {"net": name, "rule": rule, "data": setting.data, "epochs": setting.epochs}
    settings["train"] = len(bench.train[1])
    row = rows.each(f"{name}, {rule}", settings, lambda seed: bench.run(rule, seed))
    if row is not None:
        row |= summary(row["each"])
        rows.rows[f"{name}, {rule}"] = row
        rows.save()
        words = [f"{first:.0f}° to {last:.0f}°" for first, last in row["update"]]
        print(f"{name:9} {rule:16} {', '.join(words)}; accuracy {row['accuracy']:.1%}", flush=True)


def summary(each: list[Row]) -> Row:
    """Of every block the mean angle at the start and at the end, and the largest of any restart."""
    values: Row = {"accuracy": fmean(one["accuracy"] for one in each)}
    values["peak_bytes"] = max(one["peak_bytes"] for one in each)
    for kind in ("update", "signal"):
        blocks = range(len(each[0]["points"][0][kind]))
        values[kind] = [
            [fmean(_number(one["points"][k][kind][b]) for one in each) for k in (0, -1)]
            for b in blocks
        ]
        values[f"largest_{kind}"] = [
            max(_number(point[kind][b]) for one in each for point in one["points"]) for b in blocks
        ]
    return values


def _number(angle: float | None) -> float:
    """An angle; where a gradient is zero there is none, and nothing is learned: 90 degrees."""
    return 90.0 if angle is None else angle


if __name__ == "__main__":
    program(main)
