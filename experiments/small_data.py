"""How long to train on small data: the defaults of `fit` against a search and other classifiers.

    python -m experiments.small_data --out results [--only iris]

A fifth of the samples is the test set, another one for every seed; tables are standardised as
`tpsgd train` does. The search tries rates, epochs and batch sizes on a fifth of the training
samples, then trains on all of them. The steps and batch sizes of `tpsgd/engine/lengths.py` were
chosen on the sets of `CHOSEN_ON`, with other seeds than those that are reported.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from statistics import fmean
from typing import Any

import numpy as np
import torch
from sklearn import datasets
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn

import tpsgd
from experiments.common import (
    Samples,
    accuracies,
    arguments,
    is_complete,
    origin,
    program,
    result_file,
)
from experiments.default_rule import shapes
from tpsgd import rules
from tpsgd.data.scaling import statistics
from tpsgd.data.split import stratified
from tpsgd.zoo.words import cnn, mlp

CHOSEN_ON = ("iris", "breast cancer", "hard table", "motion", "shapes, CNN")
RATES, EPOCHS, BATCHES = (1e-3, 3e-3, 1e-2), (10, 30, 100), (16, 64)  # of the search
UNMEASURED = tpsgd.Memory(measure=False)
REFERENCES = {
    "logistic regression": lambda seed: LogisticRegression(max_iter=2000),
    "random forest": lambda seed: RandomForestClassifier(random_state=seed),
}


def small_mlp(shape: tuple[int, ...], classes: int) -> nn.Module:
    """`--model mlp:64`."""
    return mlp(shape, [64], classes, nn.LeakyReLU)


def small_cnn(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Two convolutions and a linear layer."""
    return cnn(shape, [(16, 3), (32, 3)], classes, nn.LeakyReLU)


@dataclass(frozen=True)
class SmallSet:
    """A small data set, the net for it, and how often it is trained."""

    load: Callable[[], Any]
    model: Callable[[tuple[int, ...], int], nn.Module] = small_mlp
    restarts: int = 5


def motion(count: int = 600, steps: int = 64) -> tuple[np.ndarray, np.ndarray]:
    """Features of windows of an inertial sensor: six axes, waves and noise, six activities."""
    g = np.random.default_rng(0)
    y = np.arange(count) % 6
    rate = np.array([0.0, 1.2, 1.8, 2.6, 1.5, 0.6])[y] * g.normal(1, 0.12, count)
    size = np.array([0.05, 0.6, 0.8, 1.3, 0.7, 0.3])[y] * g.lognormal(0, 0.3, count)
    tilt = np.array([0.0, 0.1, 0.25, 0.1, -0.25, 0.9])[y]
    phase = 2 * np.pi * rate[:, None] * np.arange(steps) / 20
    wave = np.sin(phase + g.uniform(0, 2 * np.pi, (count, 1)))
    axes = g.normal(0, 1, (6, 6))[y] + 0.6 * g.normal(0, 1, (count, 6))
    x = (size[:, None] * axes)[:, :, None] * wave[:, None] + 0.4 * g.normal(0, 1, (count, 6, steps))
    x[:, 0] += np.cos(tilt + g.normal(0, 0.3, count))[:, None]
    x[:, 1] += np.sin(tilt + g.normal(0, 0.3, count))[:, None]
    power = np.abs(np.fft.rfft(x)) ** 2
    bands = [np.log(power[:, :, a:b].sum(2)) for a, b in ((1, 3), (3, 6), (6, 10), (10, 33))]
    return np.concatenate([x.mean(2), x.std(2), *bands], 1), y


def separable(count: int = 200) -> tuple[np.ndarray, np.ndarray]:
    """Four classes far apart from one another."""
    y = np.arange(count) % 4
    return np.random.default_rng(0).normal(0, 0.5, (count, 6)) + 3 * np.eye(6)[y], y


def digit_images() -> tuple[np.ndarray, np.ndarray]:
    """The digits of scikit-learn as images."""
    digits: Any = datasets.load_digits()
    return digits.images[:, None] / 16, digits.target


def synthetic(**options: Any) -> Callable[[], Any]:
    """A table by scikit-learn's generator."""
    return lambda: datasets.make_classification(random_state=0, **options)


def of_sklearn(load: Any) -> SmallSet:
    """A table that comes with scikit-learn."""
    return SmallSet(lambda: load(return_X_y=True))


SETS = {
    "iris": of_sklearn(datasets.load_iris),
    "wine": of_sklearn(datasets.load_wine),
    "breast cancer": of_sklearn(datasets.load_breast_cancer),
    "digits": of_sklearn(datasets.load_digits),
    "easy table": SmallSet(
        synthetic(n_samples=400, n_features=10, n_informative=6, n_classes=3, class_sep=1.5)
    ),
    "hard table": SmallSet(
        synthetic(n_samples=1000, n_features=20, n_informative=8, n_classes=4, flip_y=0.05)
    ),
    "motion": SmallSet(motion),
    "separable": SmallSet(separable),
    "digits, CNN": SmallSet(digit_images, small_cnn, 2),
    "shapes, CNN": SmallSet(shapes, small_cnn, 2),
}


def parts(x: Any, y: Any, seed: int) -> tuple[Samples, Samples]:
    """Four fifths and a fifth of samples, with the same shares of the classes."""
    x, y = np.asarray(x, dtype=np.float32), np.asarray(y)
    chosen = stratified(y, len(y) - len(y) // 5, seed)
    pairs = [(torch.from_numpy(x[m]), torch.from_numpy(y[m])) for m in (chosen, ~chosen)]
    return pairs[0], pairs[1]


def split(small: SmallSet, seed: int) -> tuple[Samples, Samples]:
    """The training and the test samples of a seed; tables standardised."""
    (x, y), (x_test, y_test) = parts(*small.load(), seed)
    if x.dim() == 2:
        scaling = statistics("standard", [x.numpy()])
        shift, scale = (torch.tensor(scaling[name]) for name in ("shift", "scale"))
        x, x_test = (x - shift) / scale, (x_test - shift) / scale
    return (x, y), (x_test, y_test)


def train(small: SmallSet, data: Samples, seed: int, rule: Any, **settings: Any) -> nn.Module:
    """A trained net; without a rule by backprop."""
    torch.manual_seed(seed)
    model = small.model(tuple(data[0].shape[1:]), int(data[1].max()) + 1)
    settings |= {"seed": seed, "memory": UNMEASURED, "progress": False}
    if rule is None:
        tpsgd.fit_backprop(model, data, **settings)
    else:
        tpsgd.fit(model, data, rule=rule, **settings)
    return model


def until_held_out_rises(small: SmallSet, data: Samples, seed: int, rule: Any) -> nn.Module:
    """The defaults, but each block ends when the loss of a held-out fifth stops falling."""
    learned, held_out = parts(*data, seed)
    stopping = tpsgd.EarlyStopping(patience=10)
    return train(small, learned, seed, rule, validation=held_out, early_stopping=stopping)


def searched(small: SmallSet, data: Samples, seed: int, rule: Any) -> nn.Module:
    """The rate, the epochs and the batch size that are best on a held-out fifth, then all data."""
    learned, held_out = parts(*data, seed)
    best, most = {}, -1.0
    for lr, epochs, batch_size in product(RATES, EPOCHS, BATCHES):
        settings = {"lr": lr, "epochs": epochs, "batch_size": batch_size}
        accuracy = tpsgd.evaluate(train(small, learned, seed, rule, **settings), held_out)
        if accuracy > most:
            best, most = settings, accuracy
    return train(small, data, seed, rule, **best)


def short(small: SmallSet, data: Samples, seed: int, rule: Any) -> nn.Module:
    """Five epochs of batches of 128, whatever the data."""
    return train(small, data, seed, rule, epochs=5, batch_size=128)


LEARNED = rules.readout(True)
ARMS: dict[str, tuple[Callable[..., nn.Module], Any]] = {
    "learned codes": (train, LEARNED),
    "fixed codes": (train, rules.readout()),
    "backprop": (train, None),
    "frozen": (train, rules.frozen()),
    "until held-out loss rises": (until_held_out_rises, LEARNED),
    "5 epochs of 128": (short, LEARNED),
    "search": (searched, LEARNED),
}


def measure(small: SmallSet, arm: str, seed: int) -> tuple[float, float]:
    """The accuracy on the test samples, and CPU seconds."""
    data, test = split(small, seed)
    began = time.process_time()
    if make := REFERENCES.get(arm):
        classifier = make(seed).fit(_rows(data[0]), data[1].numpy())
        seconds = time.process_time() - began
        return float(classifier.score(_rows(test[0]), test[1].numpy())), seconds
    way, rule = ARMS[arm]
    model = way(small, data, seed, rule)
    return tpsgd.evaluate(model, test), time.process_time() - began


def _rows(x: Tensor) -> np.ndarray:
    return x.flatten(1).numpy()


def main() -> None:
    """Run what is asked for; the file is written after every arm of a set."""
    parser = arguments(__doc__)
    parser.add_argument("--only", choices=list(SETS), nargs="*", default=list(SETS))
    parser.add_argument("--arms", choices=[*ARMS, *REFERENCES], nargs="*")
    options = parser.parse_args()
    torch.set_num_threads(1)
    record, save = result_file(options, "small_data")
    record |= origin("small_data", "cpu") | {"chosen_on": list(CHOSEN_ON)}
    record["search"] = {"rates": RATES, "epochs": EPOCHS, "batch_sizes": BATCHES}
    names, arms = options.only, options.arms or [*ARMS, *REFERENCES]
    if options.smoke:
        names, arms = ["separable"], ["learned codes", "backprop", "random forest"]
    for name, arm in product(names, arms):
        small, row = SETS[name], record.setdefault("sets", {}).setdefault(name, {})
        restarts = 1 if options.smoke else small.restarts
        if is_complete(row.get(arm), restarts, options):
            continue
        figures = [measure(small, arm, seed) for seed in range(restarts)]
        row[arm] = accuracies([accuracy for accuracy, _ in figures])
        row[arm]["cpu_seconds"] = fmean(seconds for _, seconds in figures)
        print(f"{name:15} {arm:26} {row[arm]['accuracy']:.1%}", flush=True)
        save()
    complete = [row for row in record["sets"].values() if all(arm in row for arm in arms)]
    record["means"] = {arm: fmean(row[arm]["accuracy"] for row in complete) for arm in arms}
    save()


if __name__ == "__main__":
    program(main)
