"""The paper's adaptors on a frozen VGG16, Imagenette at 160 px, beside backprop and a linear probe.

    python -m experiments.adaptors --out results [--images FILE.npz] [--only table,few]

- `table`: the paper's adaptor at pool5, pool4 and pool3 under every rule, with the controls, and
  the transfer baseline (VGG16's dense layers on pool5, from scratch, with backprop).
- `combinations`: L0 (pool5), L1 (pool4), L2 (pool3) and their averages, from the same heads.
- `few`: 5 to 50 labelled images per class, at pool5 and pool4.
- `shifts`: adaptors of the clean images on shifted ones, before and after 10 images per class.
- `precision`: the backbone in float32, bfloat16 and int8, and with half of its weights pruned.
- `search`: the paper's heatmaps, convolutions by dense layers for every tap.

Learning rates are chosen, per arm, at pool5, on a tenth of the training images that is held out
then; the test images decide nothing. VGG16 was trained on ImageNet, which has Imagenette's classes:
that adaptors are accurate is expected; how they compare is what is measured.

`--images` has arrays x, y, x_test, y_test of bytes; without it `imagenette` is loaded.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tpsgd import adapt, data, rules
from tpsgd.adapt import Backbone, Features, Probe, novelty
from tpsgd.adapt import corruptions as shifts
from tpsgd.adapt import quantize as lighter
from tpsgd.adapt import recovery as domains
from tpsgd.adapt.features import shots
from tpsgd.adapt.fitting import hold_out
from tpsgd.adapt.search import search
from tpsgd.comparison.provenance import machine, versions
from tpsgd.engine.backprop import fit_backprop
from tpsgd.errors import TpsgdError
from tpsgd.solvers import ridge
from tpsgd.units import size

TAPS = {"L0": "pool5", "L1": "pool4", "L2": "pool3"}
RATES = (3e-4, 1e-3, 3e-3)
SEARCHED = 3  # epochs when rates are compared
RESTARTS = 3
FITTING = {"epochs": 8, "batch_size": 64}
FEW = {"epochs": 20, "batch_size": 32}
SHOTS = {"pool5": (5, 10, 20, 50), "pool4": (10, 50)}
Row = dict[str, Any]
ARMS: dict[str, Row] = {
    "backprop": {"method": fit_backprop},
    "readout": {"rule": rules.readout()},
    "readout-learned": {"rule": rules.readout(learned=True)},
    "predsim": {"rule": rules.predsim()},
    "tpsgd-l2": {"rule": rules.tpsgd_l2()},
    "tpsgd-l1": {"rule": rules.tpsgd_l1()},
    "drtp": {"rule": rules.drtp()},
    "frozen": {"rule": rules.frozen()},
}
MAIN = ("backprop", "readout", "tpsgd-l2", "frozen")
PROBE: Row = {"layers": Probe(), "optimizer": ridge()}


@dataclass
class Bench:
    """The backbone, its features, and the rates that were chosen."""

    backbone: Backbone
    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor
    train: Features
    test: Features
    record: Row

    def fit(self, arm: str, tap: str, lr: float, seed: int, **more: Any) -> adapt.Adaptor:
        """One adaptor."""
        own = {**FITTING, "lr": lr, **ARMS[arm], **more}
        source, own_backbone = own.pop("source", self.train), own.pop("backbone", self.backbone)
        return adapt.fit(own_backbone, source, taps=tap, seed=seed, classes=10, **own)

    def rate(self, arm: str) -> float:
        """The rate that held-out training images choose."""
        known: Row = self.record.setdefault("rates", {})
        if arm not in known:
            part, held = hold_out(self.train, 0)
            tried = {}
            for lr in RATES:
                try:
                    made = self.fit(arm, "pool5", lr, 100, source=part, epochs=SEARCHED)
                    tried[lr] = made.evaluate(held)
                except TpsgdError:  # it diverged
                    tried[lr] = 0.0
            known[arm] = {"held_out": tried, "lr": max(tried, key=lambda lr: tried[lr])}
        return float(known[arm]["lr"])


def table(bench: Bench) -> Iterator[Row]:
    """Every arm at every tap, and the transfer baseline."""
    for tap in TAPS.values():
        for arm in ARMS if tap == "pool5" else MAIN:
            lr = bench.rate(arm)
            made = [bench.fit(arm, tap, lr, seed) for seed in range(RESTARTS)]
            yield {"tap": tap, "arm": arm, "lr": lr} | _figures(made, bench.test)
        made = [adapt.fit(bench.backbone, bench.train, taps=tap, classes=10, **PROBE)]
        yield {"tap": tap, "arm": "linear probe"} | _figures(made, bench.test)
        if tap == "pool5":
            yield transfer(bench)


def transfer(bench: Bench) -> Row:
    """VGG16's dense layers, 4,096 twice, on pool5 averaged to 7 x 7 as torchvision does."""

    def dense(shape: tuple[int, ...], classes: int) -> nn.Sequential:
        return nn.Sequential(
            nn.AdaptiveAvgPool2d(7), nn.Flatten(), nn.Linear(shape[0] * 49, 4096), nn.ReLU(),
            nn.Dropout(0.5), nn.Linear(4096, 4096), nn.ReLU(), nn.Dropout(0.5),
            nn.Linear(4096, classes),
        )  # fmt: skip

    part, held = hold_out(bench.train, 0)
    own = {"source": part, "layers": dense, "epochs": SEARCHED}
    tried = {
        lr: bench.fit("backprop", "pool5", lr, 100, **own).evaluate(held)
        for lr in (3e-5, 1e-4, 3e-4)
    }
    lr = max(tried, key=lambda lr: tried[lr])
    made = [bench.fit("backprop", "pool5", lr, seed, layers=dense) for seed in range(RESTARTS)]
    row = {"tap": "pool5", "arm": "transfer (dense layers, backprop)", "lr": lr, "held_out": tried}
    return row | _figures(made, bench.test)


def combined(bench: Bench) -> Iterator[Row]:
    """One, two and three taps, averaged and with learned weights."""
    for arm in MAIN:
        part, held = hold_out(bench.train, 0)
        every = [
            {tap: bench.fit(arm, tap, bench.rate(arm), s, source=part) for tap in TAPS.values()}
            for s in range(RESTARTS)
        ]
        for count in (1, 2, 3):
            for names in combinations(TAPS, count):
                taps = [TAPS[name] for name in names]
                for how in (adapt.averaged, adapt.learned)[: 1 if count == 1 else 2]:
                    made = [joined(bench.backbone, heads, taps, how, held) for heads in every]
                    row = {"arm": arm, "taps": " + ".join(names), "combine": how.name}
                    yield row | _figures(made, bench.test)


def joined(
    backbone: Backbone, each: dict[str, adapt.Adaptor], taps: list[str], how: Any, held: Features
) -> adapt.Adaptor:
    """Adaptors of single taps as one."""
    from tpsgd.adapt.adaptor import fit_weights

    first = each[taps[0]]
    heads: Any = {tap: each[tap].layers[0] for tap in taps}
    shapes = {tap: each[tap].tap_shapes[tap] for tap in taps}
    made = adapt.Adaptor(
        backbone, heads, first.classes, build=first.build, shape=first.shape, tap_shapes=shapes,
        combine=how,
    )  # fmt: skip
    made.runs = {tap: each[tap].runs[tap] for tap in taps}
    made.to(backbone.device)
    if how is adapt.learned:
        fit_weights(made, held)
    return made


def few(bench: Bench) -> Iterator[Row]:
    """Accuracy by the number of labelled images, each restart with images of its own."""
    for tap, counts in SHOTS.items():
        for count in counts:
            parts = [bench.train[shots(bench.y, count, seed)] for seed in range(RESTARTS)]
            for arm in (*MAIN, "linear probe"):
                if arm == "linear probe":
                    made = [
                        adapt.fit(bench.backbone, part, taps=tap, classes=10, **PROBE)
                        for part in parts
                    ]
                else:
                    lr = bench.rate(arm)
                    made = [
                        bench.fit(arm, tap, lr, seed, source=part, **FEW)
                        for seed, part in enumerate(parts)
                    ]
                yield {"tap": tap, "shots": count, "arm": arm} | _figures(made, bench.test)


def shifted(bench: Bench) -> Iterator[Row]:
    """Every shift, 10 labelled images a class, with and without 10 old ones among them."""
    taps = ("pool5",)
    arms = {
        arm: {
            "taps": "pool5",
            "classes": 10,
            **FITTING,
            "lr": bench.rate(arm),
            **ARMS[arm],
        }
        for arm in MAIN
    }
    arms["linear probe"] = {"taps": "pool5", "classes": 10, **PROBE}
    tests = {
        word: adapt.encode(bench.backbone, (shift(bench.x_test), bench.y_test), taps)
        for word, shift in shifts.SHIFTS.items()
    }
    yield from detect(bench, tests)
    for seed in range(RESTARTS):
        chosen = shots(bench.y, 10, seed).cpu()
        labels, first = bench.y[chosen], len(bench.x_test)  # noise of their own
        new = {
            word: domains.Domain(
                adapt.encode(bench.backbone, (shift(bench.x[chosen], first), labels), taps),
                tests[word],
            )
            for word, shift in shifts.SHIFTS.items()
        }
        for replay in (0, 10) if not seed else (0,):
            found = domains.recover(
                bench.backbone, bench.train, bench.test, new, arms, replay=replay,
                epochs=FEW["epochs"], seed=seed,
            )  # fmt: skip
            yield from ({"seed": seed, "replay": replay} | row.as_dict() for row in found)


def detect(bench: Bench, new: dict[str, Features]) -> Iterator[Row]:
    """How well each detector tells shifted images from clean ones."""
    part, held = hold_out(bench.train, 0)
    made = {
        "mahalanobis": novelty.mahalanobis(part.at("pool5")[0], part.y),
        "hyperdimensional": novelty.hyperdimensional(part.at("pool5")[0], part.y),
    }
    for name, detector in made.items():
        detector.calibrate(held.at("pool5")[0])
        clean = detector.score(bench.test.at("pool5")[0])
        for word, test in {"none": bench.test, **new}.items():
            scores = detector.score(test.at("pool5")[0])
            due = detector.due(test.at("pool5")[0])
            found = {"detector": name, "shift": word, "auroc": novelty.auroc(clean, scores)}
            yield found | due._asdict()


def precision(bench: Bench) -> Iterator[Row]:
    """The same adaptors on lighter copies of the backbone."""
    plain = bench.backbone
    copies: dict[str, Callable[[], Backbone]] = {
        "float32": lambda: plain,
        "bfloat16": lambda: plain.like(lighter.bf16(plain.model), "vgg16 in bf16"),
        "int8": lambda: plain.like(lighter.int8(plain.model), "vgg16 in int8"),
        "half pruned": lambda: plain.like(pruned(plain.model, 0.5), "vgg16, half pruned"),
    }
    for name, make in copies.items():
        backbone = make().to(bench.y.device)
        train, test = (
            adapt.encode(backbone, pair, ("pool5",))
            for pair in ((bench.x, bench.y), (bench.x_test, bench.y_test))
        )
        clean = bench.test.at("pool5")[0].flatten(1)
        alike = nn.functional.cosine_similarity(test.at("pool5")[0].flatten(1), clean).mean()
        held = {"backbone": name, "weight_bytes": lighter.weight_bytes(backbone.model)}
        held["cosine"] = float(alike)
        for arm in MAIN:
            lr = bench.rate(arm)
            more = {"source": train, "backbone": backbone}
            made = [bench.fit(arm, "pool5", lr, seed, **more) for seed in range(RESTARTS)]
            yield held | {"arm": arm} | _figures(made, test)
        made = [adapt.fit(backbone, train, classes=10, taps="pool5", **PROBE)]
        yield held | {"arm": "linear probe"} | _figures(made, test)


def pruned(model: nn.Module, share: float) -> nn.Module:
    """A copy whose smallest weights, so large a share of every layer's, are zero."""
    import copy

    made = copy.deepcopy(model)
    with torch.no_grad():
        for module in made.modules():
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                size = module.weight.abs().flatten()
                module.weight.mul_(module.weight.abs() > size.kthvalue(int(share * len(size)))[0])
    return made


def searched(bench: Bench) -> Iterator[Row]:
    """The paper's grid for both rules, on a third of the images."""
    third = bench.train[shots(bench.y, 300, 0)] if len(bench.y) > 6000 else bench.train
    for arm in ("tpsgd-l2", "readout"):
        found = search(
            bench.backbone, third, taps=tuple(TAPS.values()), convs=(0, 1, 2),
            dense=(0, 1, 2), epochs=5, batch_size=64, lr=1e-3, **ARMS[arm],
        )  # fmt: skip
        yield {"arm": arm, "correlation": found.rank_correlation()} | found.as_dict()


def _figures(made: list[adapt.Adaptor], test: Features) -> Row:
    shares = [one.evaluate(test) for one in made]
    runs = [[run for run in one.runs.values()] for one in made]
    return {
        "accuracy": fmean(shares),
        "deviation": stdev(shares) if len(shares) > 1 else 0.0,
        "accuracies": shares,
        "seconds": fmean(sum(run.seconds for run in each) for each in runs),
        "peak_bytes": max(run.peak_bytes for each in runs for run in each),
        "trained_bytes": made[0].nbytes,
    }


PARTS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    "table": table,
    "combinations": combined,
    "few": few,
    "shifts": shifted,
    "precision": precision,
    "search": searched,
}


def main() -> None:
    """Run the parts asked for; the file is written after each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--images", type=Path)
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--note", default="", help="how the images were made, for the record")
    wanted, began = parser.parse_args(), time.perf_counter()
    wanted.out.mkdir(parents=True, exist_ok=True)
    file = wanted.out / "adaptors.json"
    record: Row = json.loads(file.read_text()) if file.exists() else {}
    record |= {"experiment": "adaptors", "machine": machine(wanted.device), "versions": versions()}
    record |= {"command": "python -m experiments.adaptors --out results"}
    record |= {"note": wanted.note, "restarts": RESTARTS, "fitting": FITTING, "few_fitting": FEW}
    x, y, x_test, y_test = images(wanted.images)
    backbone = adapt.backbone("vgg16", wanted.weights).to(wanted.device)
    taps = tuple(TAPS.values())
    train = adapt.encode(backbone, (x, y), taps, batch_size=256)
    test = adapt.encode(backbone, (x_test, y_test), taps, batch_size=256)
    record |= {
        "train": len(y),
        "test": len(y_test),
        "backbone_bytes": lighter.weight_bytes(backbone),
    }
    bench = Bench(backbone, x, y.to(wanted.device), x_test, y_test, train, test, record)
    for name in wanted.only.split(","):
        record[name] = []
        for row in PARTS[name](bench):
            record[name].append(row)
            file.write_text(json.dumps(record, indent=1))
            print(f"{time.perf_counter() - began:6.1f} s {name:12} {line(row)}", flush=True)


def images(file: Path | None) -> tuple[Tensor, ...]:
    """Pictures and labels to train and to test on."""
    if file is None:
        loaded = data.load("imagenette")
        return (*loaded.train, *loaded.test)
    arrays = np.load(file)
    x, y, x_test, y_test = (torch.from_numpy(arrays[k]) for k in ("x", "y", "x_test", "y_test"))
    return x, y.long(), x_test, y_test.long()


def line(row: Row) -> str:
    """A row for the terminal."""
    if "correlation" in row:
        return f"{row['arm']}: rank correlation {row['correlation']}"
    if "detector" in row:
        return f"{row['detector']} {row['shift']}: AUROC {row['auroc']:.3f}"
    if "domain" in row:
        before, after = row["new_before"], row["new_after"]
        what = f"{row['domain']}, {row['arm']}, {row['replay']} replayed"
        return f"{what:36} {before:.2%} to {after:.2%}, forgotten {row['forgotten']:.2%}"
    keys = ("tap", "taps", "combine", "shots", "backbone", "arm")
    words = " ".join(str(row[k]) for k in keys if k in row)
    figures = f"{row['accuracy']:.2%} ± {row['deviation']:.2%} {row['seconds']:6.2f} s"
    return f"{words:48} {figures} {size(row['peak_bytes'])}"


if __name__ == "__main__":
    main()
