"""The default scale of `readout` where labels are numbers: R² of held-out samples.

    python -m experiments.number_scale --out results

Perceptrons with one and with three hidden layers of 64 units learn four tasks with the epochs and
batches of `fit`, at its rate and at ten times that. A fifth of the training samples is held out; no
test samples are used.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from sklearn import datasets
from torch import nn

import tpsgd
from experiments import targets_data
from experiments.common import (
    Row,
    Samples,
    accuracies,
    arguments,
    hold_out_last,
    is_complete,
    origin,
    program,
    result_file,
)
from experiments.targets_data import Pair, split_and_scaled
from tpsgd import rules
from tpsgd.zoo.words import mlp

SCALES = (0.5, 1.0, 2.0, 3.0, 6.0, 12.0)
RATES = {"1e-3": None, "1e-2": 1e-2}
DEPTHS = (1, 3)
RESTARTS = 3


def friedman(seed: int) -> Pair:
    """Friedman's first function of ten numbers, five of which matter."""
    x, y = datasets.make_friedman1(1500, 10, noise=0.5, random_state=seed)
    return split_and_scaled(x, y, np.arange(1500) >= 1200)


def prices(seed: int) -> Pair:
    """Hundreds of thousands, by a product of eight features and noise."""
    g = np.random.default_rng(seed)
    x, w = g.normal(size=(1800, 8)), g.normal(size=8)
    y = 2e5 * np.exp(0.15 * x @ w + 0.2 * np.sin(3 * x[:, 0])) + 5e3 * g.normal(size=1800)
    return split_and_scaled(x, y, np.arange(1800) >= 1500)


TASKS: dict[str, Callable[[int], Pair]] = {
    "Friedman": friedman,
    "prices": prices,
    "friction": targets_data.friction,
    "diabetes": targets_data.diabetes,
}
ARMS: dict[str, Any] = {
    "backprop": None,
    **{f"{n:g}": rules.readout(learned=True, scale=n, calibrate=True) for n in SCALES},
    "frozen": rules.frozen(),
}


def r2(data: Samples, depth: int, rule: Any, lr: float | None, seed: int) -> float:
    """R² of held-out samples, after training by backprop or a rule."""
    learned, held_out = hold_out_last(*data, len(data[0]) // 5)
    torch.manual_seed(seed)
    net = mlp((data[0].shape[1],), [64] * depth, 1, nn.ReLU)
    if rule is None:
        tpsgd.fit_backprop(net, learned, lr=lr, seed=seed, progress=False)
    else:
        tpsgd.fit(net, learned, rule=rule, lr=lr, seed=seed, progress=False)
    return tpsgd.evaluate(net, held_out)


def main() -> None:
    """Every task, depth, rate and scale; the file is written after each."""
    options = arguments(__doc__).parse_args()
    torch.set_num_threads(1)
    record, save = result_file(options, "number_scale")
    record |= origin("number_scale", "cpu")
    restarts = 1 if options.smoke else RESTARTS
    for name, load in TASKS.items():
        for depth in DEPTHS[:1] if options.smoke else DEPTHS:
            for word, lr in RATES.items():
                key = f"{name}, {depth} hidden, {word}"
                rows: dict[str, Row] = record.setdefault("tables", {}).setdefault(key, {})
                for arm, rule in ARMS.items():
                    if is_complete(rows.get(arm), restarts, options):
                        continue
                    pairs = [load(seed)[0] for seed in range(restarts)]
                    if options.smoke:
                        pairs = [(x[:100], y[:100]) for x, y in pairs]
                    score = partial(r2, depth=depth, rule=rule, lr=lr)
                    scores = [score(pair, seed=seed) for seed, pair in enumerate(pairs)]
                    rows[arm] = accuracies(scores)
                    print(f"{key:28} {arm:9} {rows[arm]['accuracy']:.3f}", flush=True)
                    save()


if __name__ == "__main__":
    program(main)
