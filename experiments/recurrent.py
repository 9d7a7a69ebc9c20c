"""Tables 5, 6 and 7 of the paper: recurrent nets of 512 units, batches of 128, 20 epochs.

    python -m experiments.recurrent --out results

Every arm's learning rate, initial weights and leak are chosen on held-out training samples, all
candidates of a search side by side as stacked restarts; the choice is then trained afresh on the
whole training set, several times, and tested. The paper's cell carries the paper's rules and its
backprop; the leaky cell carries `readout`, backprop through time with the same search, and the
reservoir control. Matrix products run in TF32 on a GPU.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from tpsgd.engine.evaluate import evaluate
from tpsgd.engine.restarts import Restarts, fit_many

from experiments.rated import Rates
from tpsgd import data, rules
from tpsgd.comparison.provenance import machine, versions
from tpsgd.data import Data
from tpsgd.errors import TpsgdError
from tpsgd.losses import mse
from tpsgd.nets import inits
from tpsgd.nets.recurrent import Recurrent
from tpsgd.rules import Rule
from tpsgd.solvers import ridge

HIDDEN, BATCH, EPOCHS = 512, 128, 20
SMALL = 5_000  # a set of so few samples is searched with all epochs
WINDOW = 64  # time steps taken together: a GPU has the memory
SHAPES = ("single", "stacked", "bidirectional")

# The paper's test accuracies: random net, random RNN, DRTP, tpSGD l1, backprop.
PAPER = {
    ("seq-mnist-rows", "single"): (9.58, 9.76, 83.39, 79.81, 92.53),
    ("seq-mnist-pixels", "single"): (10.28, 11.35, 62.83, 66.46, 75.55),
    ("eeg", "single"): (48.35, 79.48, 89.57, 83.57, 94.14),
    ("tweets", "single"): (49.92, 50.08, 66.82, 67.72, 71.75),
    ("tweets-vectors", "single"): (49.92, 64.84, 69.60, 68.67, 72.26),
    ("seq-mnist-rows", "stacked"): (10.32, 19.02, 83.16, 79.96, 92.59),
    ("seq-mnist-pixels", "stacked"): (10.32, 13.66, 68.60, 70.01, 82.04),
    ("eeg", "stacked"): (51.57, 80.87, 80.78, 80.87, 93.75),
    ("tweets", "stacked"): (50.08, 52.55, 67.04, 67.35, 69.94),
    ("tweets-vectors", "stacked"): (50.08, 64.35, 70.24, 68.48, 72.84),
    ("seq-mnist-rows", "bidirectional"): (11.35, 10.70, 83.13, 79.05, 92.10),
    ("seq-mnist-pixels", "bidirectional"): (11.35, 10.32, 67.19, 68.01, 80.95),
    ("eeg", "bidirectional"): (48.52, 85.04, 84.09, 88.61, 90.53),
    ("tweets", "bidirectional"): (50.08, 51.07, 65.00, 66.41, 71.65),
    ("tweets-vectors", "bidirectional"): (50.08, 65.76, 70.31, 68.96, 69.74),
}
SETS = (
    "seq-mnist-rows",
    "seq-mnist-pixels",
    "eeg",
    "eeg-rows",
    "eeg-tumour",
    "eeg-tumour-rows",
    "tweets",
    "tweets-holdout",
    "tweets-vectors",
    "tweets-vectors-holdout",
)


@dataclass(frozen=True)
class Choice:
    """What a search may vary."""

    leak: float = 1.0
    x: float = 0.01  # W_X begins uniform in (-x, x)
    h: float = 0.01  # W_H uniform in (-h, h); of the leaky cell, its spectral radius
    lr: float = 1e-3
    adam: bool = True  # or plain SGD
    ratio: float = 1.0  # the rate of W_X and b_X over that of W_H and b_H
    alpha: float = 1e-7  # the ridge head's


@dataclass(frozen=True)
class Arm:
    """One column of the tables."""

    rule: Rule | None  # None: backprop
    choices: tuple[Choice, ...]
    leaky: bool
    head: str = "ridge"  # "ridge", "adam" or "none"
    search: tuple[int, int] = (16_000, 8)  # samples and epochs
    perceptron: bool = False  # a hidden layer on standardised states, before the linear one


def grid(**values: Sequence[Any]) -> tuple[Choice, ...]:
    """All combinations."""
    choices = [Choice()]
    for name, options in values.items():
        choices = [replace(c, **{name: v}) for c in choices for v in options]
    return tuple(choices)


def begun(choices: Sequence[Choice], pairs: Sequence[tuple[float, float]]) -> tuple[Choice, ...]:
    """The choices with each of these initial scales of W_X and W_H."""
    return tuple(replace(c, x=x, h=h) for c in choices for x, h in pairs)


SCALES = ((0.01, 0.01), (0.1, 0.1), (1.0, 0.1), (3.0, 0.4), (6.0, 0.4))
RATES = (1e-4, 3e-4, 1e-3, 3e-3)
FAITHFUL = (
    *begun(grid(adam=[False], lr=(0.25, 0.5, 2.0, 8.0)), SCALES),
    *begun(grid(adam=[False], lr=(0.25, 0.5), ratio=(10.0, 100.0, 1000.0)), SCALES[:3]),
)
PAPER_BP = begun(grid(lr=RATES), SCALES)
LEAKY = grid(h=[0.9], leak=(0.1, 0.3, 1.0), x=(0.3, 1.0, 3.0), lr=RATES)
SOLVED = grid(h=[0.9], leak=(0.3, 1.0), x=(0.3, 1.0), lr=(3e-5, 1e-4, 3e-4), alpha=[1e-9])
GENTLE = grid(h=[0.9], leak=[1.0], x=[0.3], lr=(1e-5, 3e-5, 1e-4, 1e-3))
RESERVOIR = grid(h=[0.9], leak=(0.1, 0.3, 1.0), x=(0.1, 0.3, 1.0, 3.0), alpha=(1e-9, 1e-7, 1e-5))

ARMS = {
    "random": Arm(rules.frozen(mse), (Choice(),), False, head="none"),
    "random-rnn": Arm(rules.frozen(mse), (Choice(),), False, head="adam"),
    "drtp": Arm(rules.drtp(), FAITHFUL, False, search=(100_000, 20)),
    "tpsgd-l1": Arm(rules.tpsgd_l1(), FAITHFUL, False, search=(100_000, 20)),
    "backprop": Arm(None, PAPER_BP, False, head="adam"),
    "reservoir": Arm(rules.frozen(), RESERVOIR, True),
    "readout": Arm(rules.readout(), LEAKY, True, head="adam"),
    "readout-ridge": Arm(rules.readout(), SOLVED, True),
    "readout-perceptron": Arm(rules.readout(), GENTLE, True, head="adam", perceptron=True),
    "reservoir-perceptron": Arm(rules.frozen(), GENTLE[:1], True, head="adam", perceptron=True),
    "backprop-leaky": Arm(None, LEAKY, True, head="adam"),
}
EQUAL_TIME = "backprop-leaky in readout's time"

Pair = tuple[Tensor, Tensor]


def main() -> None:
    """Run what is asked for and write one JSON file, after every arm."""
    wanted = _arguments()
    torch.set_float32_matmul_precision("high")
    file = wanted.out / "recurrent.json"
    wanted.out.mkdir(parents=True, exist_ok=True)
    old = json.loads(file.read_text()) if file.exists() else {"tables": {}}
    record: dict[str, Any] = old | {
        "experiment": "recurrent",
        "command": "python -m experiments.recurrent --out results",
        "machine": machine(wanted.device),
        "versions": versions(),
        "settings": {"hidden": HIDDEN, "batch_size": BATCH, "epochs": EPOCHS, "precision": "TF32"},
    }
    for name in wanted.sets:
        loaded = data.load(name, max_train=wanted.max_train)
        place = Place(loaded, wanted.device, wanted.restarts)
        for shape in wanted.shapes:
            table = record["tables"].setdefault(f"{name}, {shape}", {"data": name, "shape": shape})
            table |= {"note": loaded.note, "paper": PAPER.get((_published(name), shape))}
            arms = table.setdefault("arms", {})
            for arm in wanted.arms:
                if arm in arms and not wanted.again:
                    continue
                if shape != "single" and (ARMS[arm].perceptron or arm == "backprop-leaky"):
                    continue
                chosen = record["tables"].get(f"{name}, single", {}).get("arms", {}).get(arm, {})
                trials = {k: v for k, v in arms.get(arm, {}).items() if k in ("held_out", "search")}
                arms[arm] = place.run(ARMS[arm], shape, chosen.get("choice")) | trials
                print(f"{name}, {shape}, {arm}: {_figures(arms[arm])}", flush=True)
                file.write_text(json.dumps(record, indent=1))
            pair = [arms.get(a, {"alone": False}) for a in ("readout", "backprop-leaky")]
            timed = shape == "single" and all(row.get("alone", True) for row in pair)
            if timed and (EQUAL_TIME not in arms or wanted.again):
                arms[EQUAL_TIME] = place.in_time(arms)
                print(f"{name}, {EQUAL_TIME}: {_figures(arms[EQUAL_TIME])}", flush=True)
                file.write_text(json.dumps(record, indent=1))
    for title, table in record["tables"].items():
        print(f"\n{title}   paper: {table['paper']}")
        for arm, row in table["arms"].items():
            print(f"  {arm:16} {_figures(row)}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=SETS)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--restarts", type=int, default=3)
    parser.add_argument("--max-train", type=int, help="fewer samples, for a quick look")
    parser.add_argument("--again", action="store_true", help="also what the file has already")
    return parser.parse_args()


def _published(name: str) -> str:
    """The set under whose name the paper's figure stands."""
    return "eeg" if name.startswith("eeg") else name.removesuffix("-holdout")


def _figures(row: dict[str, Any]) -> str:
    chosen = " ".join(f"{k} {v:g}" for k, v in row["choice"].items())
    return f"{row['accuracy']:.2%} ± {row['deviation']:.2%}  {row['seconds']:6.1f} s  {chosen}"


class Place:
    """A data set on a device, and how its arms are trained there."""

    def __init__(self, loaded: Data, device: str, restarts: int) -> None:
        self.loaded, self.device, self.restarts = loaded, device, restarts
        self.train, self.test = (
            (x.to(device), y.to(device)) for x, y in (loaded.train, loaded.test)
        )

    def run(self, arm: Arm, shape: str, known: dict[str, Any] | None) -> dict[str, Any]:
        """Search, unless a choice is known; then train on everything, several times, and test."""
        held_out: list[tuple[dict[str, Any], float]] = []
        choice = Choice(**known) if known else arm.choices[0]
        if known is None and len(arm.choices) > 1:
            held_out = self._search(arm, shape)
            choice = Choice(**max(held_out, key=lambda pair: pair[1])[0])
        many = self._train(arm, shape, [choice] * self.restarts, self.train, EPOCHS)
        searched = None if not held_out else [arm.search[0], self._epochs(arm)]
        return _row(many, self.test, choice, held_out) | {"search": searched}

    def _epochs(self, arm: Arm) -> int:
        """Of a search."""
        return EPOCHS if len(self.train[1]) <= SMALL else arm.search[1]

    def in_time(self, arms: dict[str, Any]) -> dict[str, Any]:
        """Backprop through time, for no longer than the readout took."""
        ours, theirs = arms["readout"]["seconds"], arms["backprop-leaky"]
        epochs = max(1, min(EPOCHS, round(EPOCHS * ours / theirs["seconds"])))
        choice = Choice(**theirs["choice"])
        many = self._train(
            ARMS["backprop-leaky"], "single", [choice] * self.restarts, self.train, epochs
        )
        return _row(many, self.test, choice, []) | {"epochs": epochs}

    def _search(self, arm: Arm, shape: str) -> list[tuple[dict[str, Any], float]]:
        """Every choice's accuracy on held-out samples; those of one structure train together."""
        samples, epochs = arm.search[0], self._epochs(arm)
        inner, held_out = last_of_each_class(self.train, samples)

        def scores(choices: list[Choice]) -> list[float]:
            if arm.perceptron and len(choices) > 1:  # its batch norm cannot be stacked
                return [scores([c])[0] for c in choices]
            try:
                many = self._train(arm, shape, choices, inner, epochs)
                return many.evaluate(held_out)
            except TpsgdError as error:
                if " became " not in str(error):
                    raise
                # one of them left the finite numbers: each by itself
                return [0.0] if len(choices) == 1 else [scores([c])[0] for c in choices]

        found = []
        ordered = sorted(arm.choices, key=_structure)
        for _, group in groupby(ordered, key=_structure):
            together = list(group)
            found += [(asdict(c), v) for c, v in zip(together, scores(together), strict=True)]
        return found

    def _train(
        self, arm: Arm, shape: str, choices: Sequence[Choice], samples: Pair, epochs: int
    ) -> Restarts:
        """A model for each choice, trained together."""
        wanted = iter(choices)
        features = self.loaded.vocabulary or self.loaded.shape[-1]
        classes = len(self.loaded.classes)

        def factory() -> nn.Module:
            made = model(features, classes, shape, arm.leaky, next(wanted), arm.perceptron)
            return made.to(self.device)

        if arm.head == "none":
            models = []
            for seed in range(len(choices)):
                torch.manual_seed(seed)
                models.append(factory())
            return Restarts(models, [], False)
        alike = len(set(choices)) == 1
        chosen = choices[:1] if alike else choices
        rates, ratios = tuple(c.lr for c in chosen), tuple(c.ratio for c in chosen)
        optimizer, head = Rates(rates, ratios, choices[0].adam), Rates((1e-3,), (1.0,), True)
        recurrent = 2 if shape == "stacked" else 1
        last = ridge(choices[0].alpha) if arm.head == "ridge" else head
        inner = int(arm.perceptron or shape == "stacked")  # the perceptron's hidden layer
        blocks = [optimizer] * recurrent + [head] * inner + [last]
        rule = [arm.rule] * recurrent + [_upper(arm)] * inner + [arm.rule]
        return fit_many(
            factory, samples, restarts=len(choices), backprop=arm.rule is None,
            rule=None if arm.rule is None else rule,  # type: ignore[arg-type]
            optimizer=optimizer if arm.rule is None else blocks, epochs=epochs, batch_size=BATCH,
            lr_schedule=partial(_to_zero, epochs=epochs),
            stacked=len(choices) > 1 and not arm.perceptron, window=WINDOW,
        )  # fmt: skip


def _to_zero(optimizer: Optimizer, epochs: int) -> LambdaLR:
    """A learning rate that falls in a straight line."""
    return LambdaLR(optimizer, lambda epoch: 1 - epoch / epochs)


def _structure(choice: Choice) -> tuple[float, float, bool]:
    """What stacked restarts must have in common."""
    return choice.leak, choice.alpha, choice.adam


def _upper(arm: Arm) -> Rule:
    """The rule of the perceptron's hidden layer: the paper's l2 on its cell, else readout."""
    return rules.readout() if arm.leaky else rules.tpsgd_l2()


def model(
    features: int, classes: int, shape: str, leaky: bool, choice: Choice, perceptron: bool = False
) -> nn.Sequential:
    """The paper's three: one layer, two with a perceptron of as many units, both directions."""

    def layer(inputs: int, **options: Any) -> Recurrent:
        deeper = inputs == HIDDEN
        if leaky:
            init = inits.reservoir(choice.h, None if deeper else choice.x)
            return Recurrent(inputs, HIDDEN, leak=choice.leak, init=init, **options)
        x = choice.h if deeper else choice.x
        return Recurrent.paper(inputs, HIDDEN, init=inits.scaled_uniform(x, choice.h), **options)

    if shape == "stacked":
        upper = nn.Linear(HIDDEN, HIDDEN), nn.LeakyReLU(), nn.Linear(HIDDEN, classes)
        return nn.Sequential(layer(features, sequence=True), layer(HIDDEN), *upper)
    if perceptron:
        inner = nn.BatchNorm1d(HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.LeakyReLU()
        return nn.Sequential(layer(features), *inner, nn.Linear(HIDDEN, classes))
    if shape == "bidirectional":
        return nn.Sequential(layer(features, bidirectional=True), nn.Linear(2 * HIDDEN, classes))
    return nn.Sequential(layer(features), nn.Linear(HIDDEN, classes))


def last_of_each_class(data: Pair, samples: int, share: float = 0.2) -> tuple[Pair, Pair]:
    """Samples to train on, not too many, and held-out ones: the last of each class.

    EEG rows lie recording by recording, so that held-out rows come from recordings of their own.
    """
    x, y = data
    classes = int(y.max() + 1)
    inner, outer = [], []
    for c in range(classes):
        mine = (y == c).nonzero().squeeze(1)
        cut = len(mine) - round(share * len(mine))
        keep = min(cut, samples // classes)
        inner.append(mine[torch.linspace(0, cut - 1, keep, device=y.device).round().long()])
        outer.append(mine[cut:][: 10_000 // classes])
    parts = torch.cat(inner), torch.cat(outer)
    return tuple((x[i], y[i]) for i in parts)  # type: ignore[return-value]


def _row(
    many: Restarts, test: Pair, choice: Choice, held_out: list[tuple[dict[str, Any], float]]
) -> dict[str, Any]:
    """One arm's row: accuracy, time and memory of the same trainings, restarts together."""
    accuracies = [evaluate(made, test) for made in many.models]
    run = many.runs[0] if many.runs else None
    return {
        "accuracy": fmean(accuracies),
        "deviation": stdev(accuracies) if len(accuracies) > 1 else 0.0,
        "accuracies": accuracies,
        "choice": asdict(choice),
        "held_out": held_out,
        "seconds": sum(r.seconds for r in (many.runs[:1] if many.stacked else many.runs)),
        "stacked": many.stacked,
        "sample_passes": run.sample_passes if run else 0,
        "settings": run.settings if run else {},
        "restarts": len(accuracies),
        "machine": machine(str(test[1].device)),
    }


if __name__ == "__main__":
    main()
