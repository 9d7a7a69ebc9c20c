"""The paper's adaptors on a frozen VGG16, Imagenette at 160 px, with backprop and a linear probe.

    python -m experiments.adaptors --out results [--images FILE.npz] [--only table,few]

- `table`: the paper's adaptor at pool5, pool4 and pool3 under every rule, with the controls, and
  the transfer baseline (VGG16's dense layers on pool5, from scratch, with backprop).
- `combinations`: L0 (pool5), L1 (pool4), L2 (pool3) and their averages, from the same heads.
- `few`: 5 to 50 labelled images per class, at pool5 and pool4.
- `shifts`: adaptors of the clean images on shifted ones, before and after 10 images per class.
- `precision`: the backbone in float32, bfloat16 and int8, and with half of its weights pruned.

The learning rate of an arm is chosen at pool5, on a held-out tenth of the training images; the test
images decide nothing. VGG16 was trained on ImageNet, which has Imagenette's classes: that adaptors
are accurate is expected; how they compare is what is measured.

`--images` has arrays x, y, x_test, y_test of bytes; without it `imagenette` is loaded.
"""

import argparse
import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

import tpsgd
from experiments import corruptions, stand_in
from experiments.common import (
    Row,
    accuracies,
    arguments,
    best_rate,
    load_images,
    origin,
    program,
    result_file,
)
from experiments.hyperdimensional import auroc, hyperdimensional
from experiments.recovery import Domain, recover
from tpsgd import adapt, ridge, rules
from tpsgd.common.units import size
from tpsgd_adapt.adaptor import fit_weights

TAPS = {"L0": "pool5", "L1": "pool4", "L2": "pool3"}
RATES = (3e-4, 1e-3, 3e-3)
SEARCH_EPOCHS = 3
RESTARTS = 3
FITTING = {"epochs": 8, "batch_size": 64}
FEW = {"epochs": 20, "batch_size": 32}
SHOTS = {"pool5": (5, 10, 20, 50), "pool4": (10, 50)}
PROBE = "linear probe"  # solved: it has no rate, no epochs and no random numbers
ARMS: dict[str, Row] = {
    "backprop": {"method": tpsgd.fit_backprop},
    "readout": {"rule": rules.readout()},
    "readout-learned": {"rule": rules.readout(learned=True)},
    "predsim": {"rule": rules.predsim()},
    "tpsgd-l2": {"rule": rules.tpsgd_l2()},
    "tpsgd-l1": {"rule": rules.tpsgd_l1()},
    "drtp": {"rule": rules.drtp()},
    "frozen": {"rule": rules.frozen()},
    PROBE: {"layers": adapt.Probe(), "optimizer": ridge()},
}
MAIN = ("backprop", "readout", "tpsgd-l2", "frozen", PROBE)


@dataclass
class Bench:
    """The backbone, its features, and the rates that were chosen."""

    backbone: adapt.Backbone
    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor
    train: adapt.Features
    test: adapt.Features
    rates: Row
    restarts: int = RESTARTS
    most: int | None = None  # rates of a search, numbers of labelled images
    fitting: Row = field(default_factory=lambda: FITTING)
    few_fitting: Row = field(default_factory=lambda: FEW)

    def settings(self, arm: str) -> Row:
        """What `adapt.fit` is told about an arm."""
        rate = {} if arm == PROBE else self.fitting | {"lr": self.rate(arm)}
        return {"classes": 10, **rate, **ARMS[arm]}

    def rate(self, arm: str) -> float:
        """The rate that held-out training images choose."""
        if arm not in self.rates:
            self.rates[arm] = self.search(arm, RATES)
        return float(self.rates[arm]["lr"])

    def search(self, arm: str, rates: tuple[float, ...], **more: Any) -> Row:
        """A short training for each rate, tested on held-out training images."""
        part, last = adapt.hold_out(self.train, 0)
        settings = {
            "classes": 10,
            **self.fitting,
            **ARMS[arm],
            "epochs": min(SEARCH_EPOCHS, self.fitting["epochs"]),
        } | more

        def score(lr: float) -> float:
            made = adapt.fit(self.backbone, part, taps="pool5", seed=100, lr=lr, **settings)
            return made.evaluate(last)

        return best_rate(rates[: self.most], score)

    def fit(self, arm: str, tap: str, source: Any = None, **more: Any) -> list[adapt.Adaptor]:
        """The restarts of an arm; one where nothing in them is random."""
        backbone = more.pop("backbone", self.backbone)
        settings = self.settings(arm) | ({} if arm == PROBE else more)
        source = self.train if source is None else source
        if not isinstance(source, list):
            source = [source] * (1 if arm == PROBE else self.restarts)
        return [
            adapt.fit(backbone, part, taps=tap, seed=seed, **settings)
            for seed, part in enumerate(source)
        ]


def table(bench: Bench) -> Iterator[Row]:
    """Every arm at every tap, and the transfer baseline."""
    for tap in TAPS.values():
        for arm in ARMS if tap == "pool5" else MAIN:
            rate = {} if arm == PROBE else {"lr": bench.rate(arm)}
            yield {"tap": tap, "arm": arm, **rate} | figures(bench.fit(arm, tap), bench.test)
    search = bench.search("backprop", (3e-5, 1e-4, 3e-4), layers=dense)
    made = bench.fit("backprop", "pool5", layers=dense, lr=search["lr"])
    row = {"tap": "pool5", "arm": "transfer (dense layers, backprop)", **search}
    yield row | figures(made, bench.test)


def dense(shape: tuple[int, ...], classes: int) -> nn.Sequential:
    """VGG16's dense layers, 4,096 twice, on pool5 averaged to 7 x 7 as torchvision does."""
    return nn.Sequential(
        nn.AdaptiveAvgPool2d(7), nn.Flatten(), nn.Linear(shape[0] * 49, 4096), nn.ReLU(),
        nn.Dropout(0.5), nn.Linear(4096, 4096), nn.ReLU(), nn.Dropout(0.5),
        nn.Linear(4096, classes),
    )  # fmt: skip


def combined(bench: Bench) -> Iterator[Row]:
    """One, two and three taps, averaged and with learned weights."""
    part, last = adapt.hold_out(bench.train, 0)
    for arm in MAIN[:4]:
        each = {tap: bench.fit(arm, tap, part) for tap in TAPS.values()}
        for count in (1, 2, 3):
            for names in combinations(TAPS, count):
                for how in (adapt.averaged, adapt.learned)[: 1 if count == 1 else 2]:
                    heads = [
                        {TAPS[n]: each[TAPS[n]][r] for n in names} for r in range(bench.restarts)
                    ]
                    made = [joined(bench.backbone, one, how, last) for one in heads]
                    row = {"arm": arm, "taps": " + ".join(names), "combine": how.name}
                    yield row | figures(made, bench.test)


def joined(
    backbone: adapt.Backbone, each: dict[str, adapt.Adaptor], how: Any, last: adapt.Features
) -> adapt.Adaptor:
    """Adaptors of single taps as one."""
    first = next(iter(each.values()))
    shapes = {tap: one.tap_shapes[tap] for tap, one in each.items()}
    made = adapt.Adaptor(backbone, first.build, shapes, first.classes, first.shape, how)
    for tap, head in made.heads.items():
        head.load_state_dict(each[tap].heads[tap].state_dict())
    made.runs = {tap: one.runs[tap] for tap, one in each.items()}
    if how is adapt.learned:
        fit_weights(made, last)
    return made


def few(bench: Bench) -> Iterator[Row]:
    """Accuracy by the number of labelled images, each restart with other images."""
    for tap, counts in SHOTS.items():
        for count in counts[: bench.most]:
            parts = [
                bench.train[adapt.shots(bench.y, count, seed)] for seed in range(bench.restarts)
            ]
            for arm in MAIN:
                made = bench.fit(arm, tap, parts, **bench.few_fitting)
                yield {"tap": tap, "shots": count, "arm": arm} | figures(made, bench.test)


def shifted(bench: Bench) -> Iterator[Row]:
    """Every shift, 10 labelled images per class, with and without 10 old ones among them."""
    taps, shifts = ("pool5",), corruptions.SHIFTS
    arms = {arm: {"taps": "pool5", **bench.settings(arm)} for arm in MAIN}
    tests = {
        word: adapt.encode(bench.backbone, (shift(bench.x_test), bench.y_test), taps)
        for word, shift in shifts.items()
    }
    yield from detect(bench, tests)
    for seed in range(bench.restarts):
        chosen = adapt.shots(bench.y, 10, seed).cpu()
        labels, first = bench.y[chosen], len(bench.x_test)  # other noise than the test images'
        new = {
            word: Domain(
                adapt.encode(bench.backbone, (shift(bench.x[chosen], first), labels), taps),
                tests[word],
            )
            for word, shift in shifts.items()
        }
        for replay in (0, 10) if not seed else (0,):
            rows = recover(
                bench.backbone, bench.train, bench.test, new, arms, replay=replay,
                epochs=bench.few_fitting["epochs"], seed=seed,
            )  # fmt: skip
            yield from ({"seed": seed, "replay": replay} | row.as_dict() for row in rows)


def detect(bench: Bench, new: dict[str, adapt.Features]) -> Iterator[Row]:
    """How well each detector tells shifted images from clean ones."""
    part, last = adapt.hold_out(bench.train, 0)
    for fitted in (adapt.novelty.mahalanobis, hyperdimensional):
        detector = fitted(part.at("pool5")[0], part.y)
        detector.calibrate(last.at("pool5")[0])
        clean = detector.score(bench.test.at("pool5")[0])
        for word, test in {"none": bench.test, **new}.items():
            features = test.at("pool5")[0]
            area = auroc(clean, detector.score(features))
            row = {"detector": fitted.__name__, "shift": word, "auroc": area}
            yield row | detector.due(features)._asdict()


def precision(bench: Bench) -> Iterator[Row]:
    """The same adaptors on lighter copies of the backbone."""
    plain, quantize = bench.backbone, adapt.quantize
    copies: dict[str, Callable[[], adapt.Backbone]] = {
        "float32": lambda: plain,
        "bfloat16": lambda: plain.like(quantize.bf16(plain.model), "vgg16 in bf16"),
        "int8": lambda: plain.like(quantize.int8(plain.model), "vgg16 in int8"),
        "half pruned": lambda: plain.like(pruned(plain.model, 0.5), "vgg16, half pruned"),
    }
    for name, make in copies.items():
        backbone = make().to(bench.y.device)
        train, test = (
            adapt.encode(backbone, pair, ("pool5",))
            for pair in ((bench.x, bench.y), (bench.x_test, bench.y_test))
        )
        features, clean = (f.at("pool5")[0].flatten(1) for f in (test, bench.test))
        row: Row = {"backbone": name, "weight_bytes": quantize.weight_bytes(backbone.model)}
        row["cosine"] = float(nn.functional.cosine_similarity(features, clean).mean())
        for arm in MAIN:
            made = bench.fit(arm, "pool5", train, backbone=backbone)
            yield row | {"arm": arm} | figures(made, test)


def pruned(model: nn.Module, share: float) -> nn.Module:
    """A copy in which this share of the weights of every layer, the smallest, are zero."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                sizes = module.weight.abs().flatten()
                module.weight.mul_(module.weight.abs() > sizes.kthvalue(int(share * len(sizes)))[0])
    return model


def figures(made: list[adapt.Adaptor], test: adapt.Features) -> Row:
    """Accuracy, seconds and memory of an arm's restarts."""
    runs = [list(one.runs.values()) for one in made]
    return accuracies([one.evaluate(test) for one in made]) | {
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
}


def main() -> None:
    """Run the parts asked for; the file is written after each row."""
    parser = arguments(__doc__)
    parser.add_argument("--images", type=Path)
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--restarts", type=int, default=RESTARTS)
    parser.add_argument("--max-train", type=int, help="fewer images, for a quick look")
    parser.add_argument("--note", default="", help="how the images were made, for the record")
    options, start = parser.parse_args(), time.perf_counter()
    record, save = result_file(options, "adaptors")
    bench = built(options, {} if options.again else record.setdefault("rates", {}))
    record |= origin("adaptors", options.device) | {"note": options.note}
    record |= {"restarts": bench.restarts, "rates": bench.rates}
    record |= {"fitting": bench.fitting, "few_fitting": bench.few_fitting}
    record |= {"train": len(bench.y), "test": len(bench.y_test)}
    record["backbone_bytes"] = adapt.quantize.weight_bytes(bench.backbone)
    for name in options.only.split(","):
        if name in record.get("finished", []) and not options.again:
            continue
        record[name] = []
        for row in PARTS[name](bench):
            record[name].append(row)
            save()
            print(f"{time.perf_counter() - start:6.1f} s {name:12} {line(row)}", flush=True)
        record["finished"] = [*record.get("finished", []), name]
        save()


def built(options: argparse.Namespace, rates: Row) -> Bench:
    """The images and their features."""
    loaded = load_images("imagenette", options.images, options.smoke)
    x, y, x_test, y_test = (tensor[: options.max_train] for tensor in loaded)
    vgg16 = stand_in.backbone() if options.smoke else adapt.backbone("vgg16", options.weights)
    backbone, taps = vgg16.to(options.device), tuple(TAPS.values())
    train, test = (
        adapt.encode(backbone, pair, taps, batch_size=256) for pair in ((x, y), (x_test, y_test))
    )
    bench = Bench(backbone, x, y.to(options.device), x_test, y_test, train, test, rates)
    bench.restarts = options.restarts
    if options.smoke:
        bench.restarts, bench.most = 1, 1
        bench.fitting, bench.few_fitting = FITTING | {"epochs": 1}, FEW | {"epochs": 1}
    return bench


def line(row: Row) -> str:
    """A row for the terminal."""
    if "detector" in row:
        return f"{row['detector']} {row['shift']}: AUROC {row['auroc']:.3f}"
    if "domain" in row:
        before, after = row["new_before"], row["new_after"]
        what = f"{row['domain']}, {row['arm']}, {row['replay']} replayed"
        return f"{what:36} {before:.2%} to {after:.2%}, forgotten {row['forgotten']:.2%}"
    keys = ("tap", "taps", "combine", "shots", "backbone", "arm")
    words = " ".join(str(row[k]) for k in keys if k in row)
    numbers = f"{row['accuracy']:.2%} ± {row['deviation']:.2%} {row['seconds']:6.2f} s"
    return f"{words:48} {numbers} {size(row['peak_bytes'])}"


if __name__ == "__main__":
    program(main)
