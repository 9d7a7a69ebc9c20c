"""Tables 5, 6 and 7 of the paper: recurrent nets of 512 units, batches of 128, 20 epochs.

    python -m experiments.recurrent --out results

Every arm's learning rate, initial weights and leak are chosen on held-out training samples, all
candidates of a search side by side as stacked restarts; the choice is then trained afresh on the
whole training set, several times, and tested. The paper's cell carries the paper's rules and its
backprop; the leaky cell carries `readout` (calibrated, and with a constant set by hand), backprop
through time with the same search, and the reservoir control. Matrix products run in TF32 on a GPU.
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any

import torch
from torch import nn

import tpsgd
from experiments.common import (
    Row,
    Samples,
    accuracies,
    arguments,
    linear_decay,
    load,
    origin,
    program,
    result_file,
    with_data,
)
from experiments.rated import Rates
from tpsgd import Recurrent, Rule, TpsgdError, inits, mse, ridge, rules
from tpsgd.comparison.provenance import machine
from tpsgd.engine.restarts import Restarts

HIDDEN, BATCH, EPOCHS = 512, 128, 20
SMALL = 5_000  # a set with no more samples than this is searched with all epochs
WINDOW = 64  # time steps processed together: a GPU has the memory
SHAPES = ("single", "stacked", "bidirectional")

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


SMOKE_SETS = ("eeg", "tweets")


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
    "tpsgd-l2": Arm(rules.tpsgd_l2(), FAITHFUL, False, search=(100_000, 20)),
    "backprop": Arm(None, PAPER_BP, False, head="adam"),
    "reservoir": Arm(rules.frozen(), RESERVOIR, True),
    "readout": Arm(rules.readout(), LEAKY, True, head="adam", search=(100_000, 20)),
    "readout-by-hand": Arm(rules.readout(scale=4.0), LEAKY, True, head="adam"),
    "readout-ridge": Arm(rules.readout(), SOLVED, True),
    "readout-perceptron": Arm(rules.readout(), GENTLE, True, head="adam", perceptron=True),
    "reservoir-perceptron": Arm(rules.frozen(), GENTLE[:1], True, head="adam", perceptron=True),
    "backprop-leaky": Arm(None, LEAKY, True, head="adam", search=(100_000, 20)),
}
EQUAL_TIME = "backprop-leaky in readout's time"


def main() -> None:
    """Run what is asked for; the file is written after every arm."""
    options = parse()
    torch.set_float32_matmul_precision("high")
    record, save = result_file(options, "recurrent")
    settings = {"hidden": HIDDEN, "batch_size": BATCH, "epochs": EPOCHS, "precision": "TF32"}
    record |= origin("recurrent", options.device) | {"settings": settings}
    tables = record.setdefault("tables", {})
    for name, bench in with_data(options.sets, lambda name: Bench(name, options)):
        for shape in options.shapes:
            table = tables.setdefault(f"{name}, {shape}", {"data": name, "shape": shape})
            table["note"] = bench.loaded.note
            arms = table.setdefault("arms", {})
            for arm in options.arms:
                if arm in arms and not options.again:
                    continue
                if shape != "single" and (ARMS[arm].perceptron or arm == "backprop-leaky"):
                    continue
                single = tables.get(f"{name}, single", {}).get("arms", {}).get(arm, {})
                trials = {k: v for k, v in arms.get(arm, {}).items() if k in ("held_out", "search")}
                arms[arm] = bench.run(ARMS[arm], shape, single.get("choice")) | trials
                save()
                print(f"{name}, {shape}, {arm}: {figures(arms[arm])}", flush=True)
            pair = [arms.get(a, {"alone": False}) for a in ("readout", "backprop-leaky")]
            timed = shape == "single" and all(row.get("alone", True) for row in pair)
            if timed and (EQUAL_TIME not in arms or options.again):
                arms[EQUAL_TIME] = bench.in_time(arms)
                save()
                print(f"{name}, {EQUAL_TIME}: {figures(arms[EQUAL_TIME])}", flush=True)


def parse() -> argparse.Namespace:
    """The arguments."""
    parser = arguments(__doc__)
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=SETS)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--restarts", type=int, default=5)
    parser.add_argument("--shared", action="store_true", help="other runs go on beside this one")
    parser.add_argument("--max-train", type=int, help="fewer samples, for a quick look")
    options = parser.parse_args()
    if options.smoke:
        options.restarts, options.sets = 1, [name for name in SMOKE_SETS if name in options.sets]
    return options


def figures(row: Row) -> str:
    """A row for the terminal."""
    choice = " ".join(f"{k} {v:g}" for k, v in row["choice"].items())
    return f"{row['accuracy']:.2%} ± {row['deviation']:.2%}  {row['seconds']:6.1f} s  {choice}"


class Bench:
    """A data set on a device, and how its arms are trained there."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self.loaded = load(name, options)
        self.device, self.restarts = options.device, options.restarts
        self.alone = not options.shared
        self.epochs, self.most = (1, 2) if options.smoke else (EPOCHS, None)  # choices of a search
        self.train, self.test = (
            (x.to(self.device), y.to(self.device)) for x, y in (self.loaded.train, self.loaded.test)
        )

    def run(self, arm: Arm, shape: str, chosen: Row | None) -> Row:
        """Search, unless there is a choice; then train on all samples, several times, and test."""
        held_out: list[tuple[Row, float]] = []
        choice = Choice(**chosen) if chosen else arm.choices[0]
        if chosen is None and len(arm.choices) > 1:
            held_out = self._search(arm, shape)
            choice = Choice(**max(held_out, key=lambda pair: pair[1])[0])
        many = self._fit(arm, shape, [choice] * self.restarts, self.train, self.epochs)
        search = None if not held_out else [arm.search[0], self._epochs(arm)]
        return self._row(many, choice, held_out) | {"search": search}

    def _epochs(self, arm: Arm) -> int:
        """Of a search."""
        return self.epochs if len(self.train[1]) <= SMALL else arm.search[1]

    def in_time(self, arms: Row) -> Row:
        """Backprop through time, for no longer than the readout took."""
        ours, theirs = arms["readout"]["seconds"], arms["backprop-leaky"]
        epochs = max(1, min(self.epochs, round(self.epochs * ours / theirs["seconds"])))
        choice = Choice(**theirs["choice"])
        many = self._fit(
            ARMS["backprop-leaky"], "single", [choice] * self.restarts, self.train, epochs
        )
        return self._row(many, choice, []) | {"epochs": epochs}

    def _search(self, arm: Arm, shape: str) -> list[tuple[Row, float]]:
        """Every choice's accuracy on held-out samples; choices of one structure train together."""
        samples, epochs = arm.search[0], self._epochs(arm)
        inner, held_out = last_of_each_class(self.train, samples)

        def scores(choices: list[Choice]) -> list[float]:
            if arm.perceptron and len(choices) > 1:  # its batch norm cannot be stacked
                return [scores([c])[0] for c in choices]
            try:
                many = self._fit(arm, shape, choices, inner, epochs)
                return many.evaluate(held_out)
            except TpsgdError as error:
                if " became " not in str(error):
                    raise
                # the loss of one of them is not finite: train each by itself
                return [0.0] if len(choices) == 1 else [scores([c])[0] for c in choices]

        trials = []
        for _, group in groupby(sorted(arm.choices[: self.most], key=structure), key=structure):
            together = list(group)
            trials += [(asdict(c), v) for c, v in zip(together, scores(together), strict=True)]
        return trials

    def _fit(
        self, arm: Arm, shape: str, choices: Sequence[Choice], samples: Samples, epochs: int
    ) -> Restarts:
        """A model for each choice, trained together."""
        rest = iter(choices)
        features = self.loaded.vocabulary or self.loaded.shape[-1]
        classes = len(self.loaded.classes)

        def factory() -> nn.Module:
            net = model(features, classes, shape, arm.leaky, next(rest), arm.perceptron)
            return net.to(self.device)

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
        rule = [arm.rule] * recurrent + [upper_rule(arm)] * inner + [arm.rule]
        return tpsgd.fit_many(
            factory, samples, restarts=len(choices), backprop=arm.rule is None,
            rule=None if arm.rule is None else rule,  # type: ignore[arg-type]
            optimizer=optimizer if arm.rule is None else blocks, epochs=epochs, batch_size=BATCH,
            lr_schedule=linear_decay(epochs),
            stacked=len(choices) > 1 and not arm.perceptron, window=WINDOW,
        )  # fmt: skip

    def _row(self, many: Restarts, choice: Choice, held_out: list[tuple[Row, float]]) -> Row:
        """One arm's row: accuracy and time of the same runs, restarts together."""
        run = many.runs[0] if many.runs else None
        shares = [tpsgd.evaluate(net, self.test) for net in many.models]
        return accuracies(shares) | {
            "choice": asdict(choice),
            "held_out": held_out,
            "seconds": sum(r.seconds for r in (many.runs[:1] if many.stacked else many.runs)),
            "stacked": many.stacked,
            "peak_bytes": max((r.peak_bytes for r in many.runs), default=0),  # restarts together
            "sample_passes": run.sample_passes if run else 0,
            "settings": run.settings if run else {},
            "restarts": len(shares),
            "alone": self.alone,
            "machine": machine(self.device),
        }


def structure(choice: Choice) -> tuple[float, float, bool]:
    """What stacked restarts must have in common."""
    return choice.leak, choice.alpha, choice.adam


def upper_rule(arm: Arm) -> Rule:
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


def last_of_each_class(data: Samples, samples: int, share: float = 0.2) -> tuple[Samples, Samples]:
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


if __name__ == "__main__":
    program(main)
