"""Digits learned in one pass on a device: recursive least squares in C beside steps of a rule.

    python benchmarks/edge_one_pass.py --out results [--only digits]

- `digits`: accuracy after every training sample came once, in shuffled order. Heads on random
  features and on the pixels; steps of `readout`, of backprop and of a last layer behind the same
  number of frozen random units, each at the rate that is best after one pass.
- `in_order`: the same, but the classes come one after another.
- `five`: nine classes in one pass, then five samples of the tenth, each once; in heads
  the five count as much as the samples of another class.
- `stability`: 100,000 samples; one class alone for 5,000; labels that change after 50,000. In C
  (float32) and in float64, beside forgetting without a bound and with a cap on the trace.
- `unscaled`: 20,000 samples whose features are a hundred times too large.
- `encoder`: a convolutional net that learned the digits 0 to 4 is frozen, and the head behind it
  learns all ten; the same net untrained is the control.
- `photos`: heads on the features of a frozen VGG16, if they or the photos are there (see edge.py).
- `boards`: bytes, and instructions of a step on an emulated Cortex-M4F, if gcc for ARM and QEMU
  are installed. Instructions are not cycles.

Rates and penalties are chosen on a fifth of the training samples, never on the test samples.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import edge_adaptor
import edge_nets
import emulated
import numpy as np
import torch
from robustness import commit
from torch import Tensor, nn

import tpsgd
from tpsgd import rules
from tpsgd.common.units import columns
from tpsgd.comparison.provenance import machine, versions
from tpsgd.maths.random import Key, permutation
from tpsgd_export.heads import reference
from tpsgd_export.heads.compiled import CompiledHead
from tpsgd_export.heads.recipe import HeadRecipe, unit_scale
from tpsgd_export.heads.source import encoded, read_encoder, sources
from tpsgd_export.read_model import read_model
from tpsgd_export.to_c.codes import with_codes
from tpsgd_export.to_c.compiled import CompiledNet
from tpsgd_export.to_c.source import sources as net_sources

COMMAND = "python benchmarks/edge_one_pass.py --out results"
SECTIONS = ("digits", "in_order", "five", "stability", "unscaled", "encoder", "photos", "boards")
WIDTHS = (64, 128)
SEEDS, SEARCH_SEEDS, CLASSES = 10, 3, 10
RIDGES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
RIDGE = 1.0  # the default of tpsgd.export.one_pass
RATES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
SAMPLES, ALONE, SEEN, AGAIN = 100_000, 5_000, 8_000, 2_000
CHANGED, FORGETTING, UNSCALED = 50_000, 0.999, 20_000
PERMUTED = (3, 1, 4, 0, 5, 9, 2, 6, 8, 7)
CAP = 16.0  # of the trace, in multiples of its first value
FEATURES = Path("vgg16_imagenette.npz")  # those of edge.py
Row = dict[str, Any]
Samples = tuple[Tensor, Tensor]
Learner = Callable[[Samples, Samples, float, int], float]
Order = Callable[[Samples, int], Samples]


def digits() -> tuple[Samples, Samples]:
    """Pixels from 0 to 1 as rows, and labels; for training and for the test."""
    (x, y), test = edge_nets.digits()
    return (x.flatten(1) / 16, y), (test[0].flatten(1) / 16, test[1])


def shuffled(samples: Samples, seed: int) -> Samples:
    """The samples in another order for each seed."""
    order = torch.cat(list(permutation(len(samples[1]), Key(seed, 0))))
    return samples[0][order], samples[1][order]


def by_class(samples: Samples, seed: int) -> Samples:
    """The samples class by class."""
    x, y = shuffled(samples, seed)
    order = torch.argsort(y, stable=True)
    return x[order], y[order]


# ---- learners ------------------------------------------------------------------------------------


def recipe_of(width: int, ridge: float, seed: int, x: Tensor, **changes: Any) -> HeadRecipe:
    """A head whose features have unit size on the samples; width 0: it reads the pixels."""
    inputs = x.shape[1]
    scale = unit_scale(inputs, width, x)
    return HeadRecipe(inputs, width, CLASSES, ridge=ridge, scale=scale, seed=seed, **changes)


def head(width: int) -> Learner:
    """A head in C."""

    def learn(train: Samples, test: Samples, ridge: float, seed: int) -> float:
        compiled = CompiledHead(sources(recipe_of(width, ridge, seed, train[0])))
        compiled.learn_all(train[0].numpy(), train[1])
        return compiled.accuracy(test[0].numpy(), test[1])

    return learn


def steps(rule: Any, *widths: int, codes: str = "flash") -> Learner:
    """A net in C that makes a step on every sample."""

    def learn(train: Samples, test: Samples, rate: float, seed: int) -> float:
        net = stepping(rule, widths, codes, train[0], seed)
        for x, y in zip(*train, strict=True):
            try:
                net.step(x, y.view(1), rate)
            except tpsgd.TpsgdError:  # NET_DIVERGED
                return 0.0
        return accuracy(net, test)

    return learn


def stepping(rule: Any, widths: tuple[int, ...], codes: str, x: Tensor, seed: int) -> CompiledNet:
    """A net in C; readouts that calibrate do it on some of the samples."""
    torch.manual_seed(seed)
    model = edge_nets.mlp(*widths)()
    recipe = read_model(model, rule, (widths[0],), seed=seed, samples=x[:256])
    with tempfile.TemporaryDirectory() as place:
        for name, text in net_sources(with_codes(recipe, codes)).items():
            Path(place, name).write_text(text)
        return CompiledNet(place)


def accuracy(net: CompiledNet, test: Samples) -> float:
    """The share of samples that a net gets right."""
    right = [int(net.forward(x).argmax()) == int(y) for x, y in zip(*test, strict=True)]
    return fmean(map(float, right))


def backprop(*widths: int) -> Learner:
    """The same net by backprop in Python, a step on every sample."""

    def learn(train: Samples, test: Samples, rate: float, seed: int) -> float:
        torch.manual_seed(seed)
        model = edge_nets.mlp(*widths)()
        optimizer = torch.optim.SGD(model.parameters(), rate)
        for x, y in zip(*train, strict=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[None]), y[None]).backward()
            optimizer.step()
        with torch.no_grad():
            return float((model(test[0]).argmax(1) == test[1]).double().mean())

    return learn


LEARNERS: dict[str, tuple[Learner, tuple[float, ...]]] = {
    "head, 64 random features": (head(64), RIDGES),
    "head, 128 random features": (head(128), RIDGES),
    "head on the pixels": (head(0), RIDGES),
    "readout, 64-32-10": (steps(rules.readout(), 64, 32, 10), RATES),
    "readout of scale 4, 64-32-10": (steps(rules.readout(scale=4.0), 64, 32, 10), RATES),
    "frozen, 64-128-10": (steps(rules.frozen(), 64, 128, 10), RATES),
    "backprop, 64-32-10": (backprop(64, 32, 10), RATES),
    "backprop, 64-128-10": (backprop(64, 128, 10), RATES),
}


def scored(name: str, order: Order) -> Row:
    """A learner of digits, with what it takes."""
    row, ram = tested(name, *LEARNERS[name], digits(), order), ram_of(name)
    return row | ({"bytes": ram} if ram else {})


def tested(
    name: str, learn: Learner, values: tuple[float, ...], sets: tuple[Samples, Samples],
    order: Order,
) -> Row:  # fmt: skip
    """The rate or penalty by validation, then accuracies on the test samples."""
    train, test = sets
    part, validation = edge_nets.held_out(train)
    scores = {
        value: fmean(learn(order(part, s), validation, value, s) for s in range(SEARCH_SEEDS))
        for value in values
    }
    best = max(scores, key=lambda value: scores[value])
    accuracies = [learn(order(train, s), test, best, s) for s in range(SEEDS)]
    row = {"arm": name, "rate": best, "validation": {str(k): v for k, v in scores.items()}}
    print(f"{name}: {fmean(accuracies):.4f} ± {stdev(accuracies):.4f} at {best}", flush=True)
    return row | {"accuracies": accuracies}


def ram_of(name: str) -> int | None:
    """Bytes of weights and scratch; none where a learner is not C."""
    widths = {"head, 64 random features": 64, "head, 128 random features": 128}
    if name in widths or name == "head on the pixels":
        return HeadRecipe(64, widths.get(name, 0), CLASSES).memory.ram_bytes
    rule = {"readout": rules.readout(), "frozen": rules.frozen()}.get(name.split(",")[0])
    rule = rules.readout(scale=4.0) if "scale" in name else rule
    if rule is None:
        return None
    sizes = tuple(map(int, name.split(", ")[-1].split("-")))
    return stepping(rule, sizes, "flash", digits()[0][0], 0).ram


# ---- a class from five samples -------------------------------------------------------------------


def five() -> list[Row]:
    """A class from five samples, in heads and in nets that step; other classes were learned before.

    Rates and penalties are those of `digits`, which saw other classes of validation samples.
    """
    chosen = {row["arm"]: row["rate"] for row in in_one_pass(shuffled, FIVE)}
    return [_five(name, chosen[name]) for name in FIVE]


FIVE = ("head, 64 random features", "head, 128 random features", "readout of scale 4, 64-32-10")


def _five(name: str, rate: float) -> Row:
    train, test = digits()
    new, old, before = [], [], []
    for seed in range(SEEDS):
        for last in range(CLASSES):
            x, y = shuffled(train, seed)
            known, few = y != last, (y == last).nonzero()[:5, 0]
            learner = _learner(name, rate, seed, x)
            _learn(learner, (x[known], y[known]), rate)
            rest = test[1] != last
            before.append(_accuracy(learner, (test[0][rest], test[1][rest])))
            _learn(learner, (x[few], y[few]), rate, int(known.sum()) / (CLASSES - 1) / 5)
            new.append(_accuracy(learner, (test[0][~rest], test[1][~rest])))
            old.append(_accuracy(learner, (test[0][rest], test[1][rest])))
    print(
        f"five samples, {name}: new {fmean(new):.3f}, "
        f"others {fmean(before):.3f} -> {fmean(old):.3f}"
    )
    return {"arm": name, "new": new, "others": old, "others_before": before}


def _learner(name: str, rate: float, seed: int, x: Tensor) -> CompiledHead | CompiledNet:
    if name.startswith("readout"):
        return stepping(rules.readout(scale=4.0), (64, 32, 10), "flash", x, seed)
    return CompiledHead(sources(recipe_of(int(name.split()[1]), rate, seed, x)))


def _learn(
    learner: CompiledHead | CompiledNet, samples: Samples, rate: float, weight: float = 1.0
) -> None:
    if isinstance(learner, CompiledHead):
        return learner.learn_all(samples[0].numpy(), samples[1], weight)
    for x, y in zip(*samples, strict=True):
        learner.step(x, y.view(1), rate)
    return None


def _accuracy(learner: CompiledHead | CompiledNet, test: Samples) -> float:
    if isinstance(learner, CompiledHead):
        return learner.accuracy(test[0].numpy(), test[1])
    return accuracy(learner, test)


# ---- stability -----------------------------------------------------------------------------------


class InNumpy:
    """The recursion with a full matrix; `how` forgetting is bounded: "errors", "trace" or "not".

    A sample in whose direction rounding has made the matrix negative is skipped.
    """

    def __init__(self, recipe: HeadRecipe, how: str, dtype: Any = np.float64) -> None:
        self.recipe, self.how, self.dtype, self.skipped = recipe, how, dtype, 0
        self.inverse = (np.eye(recipe.units) / recipe.ridge).astype(dtype)
        self.weights = np.zeros((CLASSES, recipe.units), dtype)
        self.most = CAP * float(self.inverse.trace())

    def learn_all(self, x: Any, labels: Any) -> None:
        """Learn from samples, each once."""
        h = reference.features(self.recipe, x).astype(self.dtype)
        for row, label in zip(h, labels, strict=True):
            errors = self.weights @ row
            errors[int(label)] -= 1
            kept = self.dtype(self._kept(errors))
            gain = self.inverse @ row
            if not row @ gain >= 0:
                self.skipped += 1
                continue
            gain /= kept + row @ gain
            self.weights -= np.outer(errors, gain)
            self.inverse -= np.outer(gain, row @ self.inverse)
            self.inverse = (self.inverse + self.inverse.T) / (2 * kept)

    def _kept(self, errors: Any) -> float:
        forgets = 1 - self.recipe.forgetting
        if self.how == "errors":
            return 1 - forgets * min(1.0, float(errors @ errors))
        return 1.0 if self.how == "trace" and self.inverse.trace() > self.most else 1 - forgets

    def accuracy(self, x: Any, labels: Any) -> float:
        """The share of samples whose class has the largest score."""
        scores = reference.features(self.recipe, x) @ self.weights.T
        return float((scores.argmax(1) == np.asarray(labels)).mean())


def unscaled() -> list[Row]:
    """Features a hundred times too large: factors in C, a full matrix in float32 and float64."""
    (x, y), test = digits()
    rng = np.random.default_rng(0)
    order = np.concatenate([rng.permutation(len(y)) for _ in range(UNSCALED // len(y) + 1)])
    order, rows = order[:UNSCALED], []
    for width in WIDTHS:
        recipe = recipe_of(width, 0.001, 0, x)
        recipe = replace(recipe, scale=100 * recipe.scale)
        arms = {
            "factors in C, float32": CompiledHead(sources(recipe)),
            "full matrix, float32": InNumpy(recipe, "not", np.float32),
            "full matrix, float64": InNumpy(recipe, "not"),
        }
        for name, learner in arms.items():
            learner.learn_all(x.numpy()[order], y.numpy()[order])
            row = {"width": width, "arm": name, "skipped": getattr(learner, "skipped", 0)}
            rows.append(row | {"accuracy": learner.accuracy(test[0].numpy(), test[1].numpy())})
            print(rows[-1], flush=True)
    return rows


STABILITY: dict[str, tuple[float, str]] = {
    "nothing is forgotten": (1.0, "C"),
    "forgetting by the error": (FORGETTING, "C"),
    "forgetting by the error, float64": (FORGETTING, "errors"),
    "forgetting with a cap on the trace, float64": (FORGETTING, "trace"),
    "forgetting without a bound, float64": (FORGETTING, "not"),
}


def stability() -> list[Row]:
    """What heads are worth after many samples, one class alone, and other labels."""
    return [_stability(width, name) for width in WIDTHS for name in STABILITY]


def _stability(width: int, name: str) -> Row:
    (x, y), test = digits()
    forgetting, how = STABILITY[name]
    rng = np.random.default_rng(0)
    order = np.concatenate([rng.permutation(len(y)) for _ in range(SAMPLES // len(y) + 2)])
    xs, labels, permuted = x.numpy(), y.numpy(), np.array(PERMUTED)
    test_x, test_y = test[0].numpy(), test[1].numpy()

    def fresh() -> CompiledHead | InNumpy:
        recipe = recipe_of(width, RIDGE, 0, x, forgetting=forgetting)
        return CompiledHead(sources(recipe)) if how == "C" else InNumpy(recipe, how)

    steady, alone = fresh(), fresh()
    alone.learn_all(xs[order[:SEEN]], labels[order[:SEEN]])
    zeros = np.resize(np.flatnonzero(labels == 0), ALONE)
    alone.learn_all(xs[zeros], labels[zeros])
    row: Row = {"width": width, "arm": name, "one_class": alone.accuracy(test_x, test_y)}
    after = order[SEEN : SEEN + AGAIN]
    alone.learn_all(xs[after], labels[after])
    row["all_again"] = alone.accuracy(test_x, test_y)
    steady.learn_all(xs[order[:CHANGED]], labels[order[:CHANGED]])
    changed = fresh()
    changed.learn_all(xs[order[:CHANGED]], labels[order[:CHANGED]])
    changed.learn_all(xs[order[:SEEN]], permuted[labels[order[:SEEN]]])
    row["other_labels"] = changed.accuracy(test_x, permuted[test_y])
    rest = order[CHANGED:SAMPLES]
    steady.learn_all(xs[rest], labels[rest])
    row["many"] = steady.accuracy(test_x, test_y)
    if isinstance(steady, CompiledHead):
        row["finite"] = bool(np.isfinite(steady.numbers).all())
    print(row, flush=True)
    return row


# ---- an encoder in front -------------------------------------------------------------------------


def encoder() -> list[Row]:
    """A head behind a frozen net that learned half of the classes, or none."""
    rows = []
    for name, epochs in (("learned the digits 0 to 4", 10), ("untrained", 0)):
        accuracies, ram = [], 0
        for seed in range(SEEDS):
            accuracy, ram = _behind_encoder(epochs, seed)
            accuracies.append(accuracy)
        print(f"encoder that {name}: {fmean(accuracies):.4f} ± {stdev(accuracies):.4f}", flush=True)
        rows.append({"arm": name, "accuracies": accuracies, "bytes": ram})
    return rows


def _behind_encoder(epochs: int, seed: int) -> tuple[float, int]:
    train, test = digits()
    x, y = shuffled(train, seed)
    torch.manual_seed(seed)
    layers = [nn.Conv2d(1, 8, 3), nn.LeakyReLU(), nn.Flatten(), nn.Linear(288, 32), nn.LeakyReLU()]
    model = nn.Sequential(*layers)
    if epochs:
        half = y < 5
        tpsgd.fit(
            nn.Sequential(*layers, nn.Linear(32, 5)), (x[half].view(-1, 1, 8, 8), y[half]),
            rule=rules.readout(), epochs=epochs, seed=seed, progress=False,
        )  # fmt: skip
    features = encoded(model, x.view(-1, 1, 8, 8))
    front = read_encoder(model, (1, 8, 8))
    recipe = replace(recipe_of(96, RIDGE, seed, features), classes=CLASSES)
    compiled = CompiledHead(sources(recipe, front))
    compiled.learn_all(x.numpy(), y)
    return compiled.accuracy(test[0].numpy(), test[1]), compiled.ram


# ---- photos --------------------------------------------------------------------------------------


def linear_probe(train: Samples, test: Samples, penalty: float, seed: int) -> float:
    """Ridge regression on the features of all photos at once, in float64."""
    del seed
    recipe = recipe_of(0, penalty, 0, train[0])
    weights = reference.ridge(reference.features(recipe, train[0]), train[1], recipe)
    scores = reference.features(recipe, test[0]) @ weights.T
    return float((scores.argmax(1) == test[1].numpy()).mean())


PHOTOS: dict[str, tuple[Learner, tuple[float, ...]]] = {
    "head, 128 random features": (head(128), RIDGES),
    "head, 256 random features": (head(256), RIDGES),
    "head on the 512 features": (head(0), RIDGES),
    "steps of a linear layer, 512-10": (steps(rules.readout(), 512, 10), RATES),
    "all at once, linear, float64": (linear_probe, RIDGES),
}


def photos(file: Path) -> list[Row] | None:
    """Heads behind a frozen VGG16: photos of Imagenette, each once, shuffled or by class."""
    if not file.is_file() and "TPSGD_DATA" not in os.environ:
        print(f"no {file}, and no TPSGD_DATA with photos to compute it from", flush=True)
        return None
    sets, rows = edge_adaptor.photos(file), []
    for name, (learn, values) in PHOTOS.items():
        row = tested(name, learn, values, (sets.train, sets.test), shuffled)
        ordered = tested(f"{name}, by class", learn, values, (sets.train, sets.test), by_class)
        row["in_order"] = ordered["accuracies"]
        if name.startswith("head"):
            width = int(name.split()[1]) if "random" in name else 0
            row["bytes"] = HeadRecipe(512, width, CLASSES).memory.ram_bytes
        rows.append(row)
    return rows


# ---- boards --------------------------------------------------------------------------------------

OTHER_BOARDS, TIMED = ("Cortex-M0", "Cortex-M3", "Cortex-M7"), ("step", "inference")
AS_NET = """
#include "head.h"
#define NET_INPUT HEAD_INPUT
#define NET_CLASSES HEAD_CLASSES
#define NET_BATCH 1
#define NET_BLOCKS 1
#define NET_ALL_BLOCKS 1u
#define NET_PARAMS (HEAD_CLASSES * HEAD_UNITS)
#define NET_RAM_BYTES HEAD_RAM_BYTES
#define net_state head_state
#define net_arena head_arena
#define net_begin head_begin
#define net_forward head_scores
#define net_classes head_classes
#define net_step(s, a, x, labels, rate, blocks, loss) \\
    ((void)(loss), head_learn(s, a, x, *(labels), 1.0f))
"""


def boards() -> list[Row] | None:
    """Heads that learn all digits once on an emulated Cortex-M4F, and the small one on others."""
    if emulated.missing():
        print(emulated.missing(), flush=True)
        return None
    cases = [(width, "Cortex-M4F", o) for width in WIDTHS for o in ("-Os", "-O2")]
    return [_on_board(*case) for case in (*cases, *((64, board, "-Os") for board in OTHER_BOARDS))]


def _on_board(width: int, board: str, optimise: str) -> Row:
    (x, y), test = edge_nets.digits()
    recipe = recipe_of(width, RIDGE, 0, x.flatten(1) / 16)
    texts = sources(recipe)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        files = {"head.h": texts["head.h"], "net.h": AS_NET, "net.c": texts["head.c"]}
        for file, text in files.items():
            (folder / file).write_text(text)
        emulated.write_data(folder, (x, y), test, EPOCHS="1", RATE="0.0f", SCALE="0.0625f")
        here, there = emulated.on_host(folder), emulated.on_board(folder, board, optimise)
    if here["weights"] != there["weights"] or here["right"] != there["right"]:
        raise RuntimeError("other bits on the board than on this machine")
    ram = recipe.memory.ram_bytes
    if not int(there["placed"]) == int(there["ram"]) == ram:
        raise RuntimeError(f"planned {ram} B, the linker has {there}")
    row = {
        "arm": f"head, {width} random features", "board": board, "optimise": optimise,
        "ram_bytes": ram, "stack_bytes": int(there["stack"]),
        "total_bytes": ram + int(there["stack"]), "code_bytes": int(there["code"]),
        "constants_bytes": int(there["constants"]),
        "right": int(there["right"]), "test": len(test[1]), "same_bits_as_this_machine": True,
    }  # fmt: skip
    row |= {f"{what}_instructions": int(there[what]) for what in TIMED if what in there}
    print(row, flush=True)
    return row


# ---- all of it -----------------------------------------------------------------------------------


def in_one_pass(order: Order, names: Any = LEARNERS) -> list[Row]:
    """Every learner, with samples in an order."""
    return [scored(name, order) for name in names]


MEASURES: dict[str, Callable[[], Any]] = {
    "digits": lambda: in_one_pass(shuffled),
    "in_order": lambda: in_one_pass(by_class),
    "five": five,
    "stability": stability,
    "unscaled": unscaled,
    "encoder": encoder,
    "photos": lambda: photos(FEATURES),
    "boards": boards,
}


def table(record: Row) -> str:
    """The accuracies for people."""
    rows = [["", "arm", "accuracy", "bytes"]]
    for section in ("digits", "in_order", "encoder"):
        for row in record.get(section, []):
            mean, spread = (100 * of(row["accuracies"]) for of in (fmean, stdev))
            rows.append(
                [section, row["arm"], f"{mean:.2f} ± {spread:.2f} %", str(row.get("bytes", ""))]
            )
    return columns(rows)


def main() -> None:
    """Measure some sections, write them beside the others, print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--only", choices=SECTIONS, action="append")
    options = parser.parse_args()
    torch.set_num_threads(1)
    train, test = digits()
    file = options.out / "edge_one_pass.json"
    record = json.loads(file.read_text()) if file.exists() else {}
    for section in options.only or SECTIONS:
        measured = MEASURES[section]()
        if measured is not None:
            record[section] = measured
        record |= {
            "benchmark": "edge_one_pass", "command": COMMAND, "commit": commit(),
            "machine": machine(), "versions": versions(), "how": " ".join((__doc__ or "").split()),
            "settings": {
                "seeds": SEEDS, "train": len(train[1]), "test": len(test[1]), "batch_size": 1,
                "samples": SAMPLES,
                "alone": ALONE, "seen": SEEN, "changed": CHANGED,
                "forgetting": FORGETTING, "unscaled": UNSCALED,
            },
        }  # fmt: skip
        file.write_text(json.dumps(record, indent=1) + "\n")
    print(table(record))


if __name__ == "__main__":
    main()
