"""The paper's MLP table: tpSGD beside ZORB, LM-KARnet, dlADMM and extreme learning machines.

    python -m experiments.peers --out results [--device cuda] [--only mlp-256]

MNIST, two layers with LeakyReLU, whole training set, 25 restarts, one by one: accuracy, seconds and
peak memory are those of the same runs. The variants of an arm are compared on the last 10,000
training samples (the others train), the best is trained afresh on all and tested. The paper names
neither the width nor the slope, which matters to ZORB, whose targets below 0 are divided by it:
`mlp-256-steep` has Keras' slope of 0.3, the others torch's of 0.01.

The seconds of a CPU go into the same file, apart, with the same variants: `--device cpu --restarts
3`.
"""

import argparse
import json
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from tpsgd.engine.evaluate import evaluate
from tpsgd.engine.schedules import simultaneous

from tpsgd import data, projections, rules
from tpsgd.comparison.compare import Arm, arm, solved, train
from tpsgd.comparison.provenance import machine, versions
from tpsgd.engine.record import Run
from tpsgd.peers.arms import dladmm, elm, lm_karnet, zorb
from tpsgd.rules import Place
from tpsgd.zoo.words import Factory, mlp

HELD_OUT = 10_000
ENOUGH = 0.93  # on held-out samples: of the variants that reach it the fastest is taken
SHARED = {"epochs": 5, "batch_size": 128}
FEWER = {"dladmm": 10, "dladmm, rho 1": 10}  # restarts


@dataclass(frozen=True)
class Net:
    """A two-layer net."""

    width: int
    slope: float
    restarts: int = 25

    def __call__(self) -> nn.Module:
        return mlp((1, 28, 28), [self.width], 10, partial(nn.LeakyReLU, self.slope))  # type: ignore

    def normal(self) -> nn.Module:
        """The same with normal weights and biases of deviation 0.1, as dlADMM's authors have it."""
        model = self()
        for p in model.parameters():
            nn.init.normal_(p, std=0.1)
        return model


NETS = {
    "mlp-256": Net(256, 0.01),
    "mlp-256-steep": Net(256, 0.3),
    "mlp-1000": Net(1000, 0.01, 10),
}


@dataclass(frozen=True)
class Way:
    """One variant of an arm: how it trains."""

    arm: Arm
    options: dict[str, Any] = field(default_factory=lambda: dict(SHARED))


def ways(net: Net, device: str) -> dict[str, dict[str, Way]]:
    """Every arm and its variants. In one pass, batches decide on memory and speed alone."""
    one_pass = {"batch_size": 1024 if device == "cpu" else 8192}
    l2 = {at.value: arm(rules.tpsgd_l2(at=at)) for at in (Place.AFTER, Place.BEFORE)}
    readout = arm(rules.readout())
    return {
        "backprop": {"": Way(arm(None))},
        "readout": {"": Way(readout)},
        "readout, ridge head": {"": Way(solved(readout, net))},
        "tpsgd-l2": {at: Way(one) for at, one in l2.items()},
        "tpsgd-l2, ridge head": {at: Way(solved(one, net)) for at, one in l2.items()},
        "tpsgd-l2, one epoch": quick(1),
        "tpsgd-l2, quick": quick(2, 3, 4, 6),
        "drtp": {
            f"std {std:g}": Way(arm(rules.drtp(projections.normal(std)))) for std in (1.0, 0.01)
        },
        "lm-karnet": {
            "penalty by cross-validation": Way(lm_karnet(), one_pass),
            "pseudo-inverse": Way(lm_karnet(0.0), one_pass),
        },
        "zorb": {
            "pseudo-inverse": Way(zorb(**one_pass), {}),
            "penalty by cross-validation": Way(zorb(alpha=None, **one_pass), {}),
        },
        "dladmm": {
            "as published: rho from 1e-6, weights N(0, 0.1), 100 iterations": Way(
                replace(dladmm(rho=1e-6, max_rho=0.1, iterations=100), factory=net.normal), {}
            )
        },
        "dladmm, rho 1": {"300 iterations": Way(dladmm(rho=1.0, iterations=300), {})},
        "elm": {"": Way(elm(), one_pass)},
        "frozen": {
            loss.name: Way(arm(rules.frozen(loss))) for loss in (rules.cross_entropy, rules.mse)
        },
    }


def quick(*epochs: int) -> dict[str, Way]:
    """Large batches, all blocks at once, a rate that falls from epoch to epoch."""
    return {
        f"batches of {size}, rate {lr:g}, {count} epochs": Way(
            arm(rules.tpsgd_l2(), simultaneous),
            {"batch_size": size, "lr": lr, "epochs": count, "lr_schedule": partial(_down, count)},
        )
        for size in (512, 1024, 2048)
        for lr in (0.005, 0.01)
        for count in epochs
    }


def _down(epochs: int, optimizer: Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda epoch: 1 - epoch / epochs)


def main() -> None:
    """Run the nets asked for and write one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", choices=list(NETS))
    parser.add_argument("--arm", help="only this one; the others stay")
    parser.add_argument("--restarts", type=int, help="fewer, for seconds or a quick look")
    parser.add_argument("--max-train", type=int, help="of the samples, for a quick look")
    wanted = parser.parse_args()
    wanted.out.mkdir(parents=True, exist_ok=True)
    file = wanted.out / "peers.json"
    old: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    record: dict[str, Any] = old | {"experiment": "peers"}
    on_cpu = torch.device(wanted.device).type == "cpu"
    where: dict[str, Any] = record.setdefault("cpu", {}) if on_cpu else record
    where["command"] = "python -m experiments.peers --out results"
    where["command"] += " --device cpu --restarts 3" if on_cpu else ""
    where |= {"machine": machine(wanted.device), "versions": versions()}
    loaded = data.load("mnist", max_train=wanted.max_train)
    parts = tuple(t.to(wanted.device) for t in (*loaded.train, *loaded.test))
    for name in [wanted.only] if wanted.only else list(NETS):
        net = NETS[name]
        net = replace(net, restarts=wanted.restarts or (3 if on_cpu else net.restarts))
        table = where.setdefault("nets", {}).setdefault(name, {"arms": {}})
        table |= {"width": net.width, "slope": net.slope, "restarts": net.restarts}
        for label, variants in ways(net, wanted.device).items():
            if wanted.arm in (None, label):
                there = record.get("nets", {}).get(name, {}).get("arms", {}).get(label, {})
                known = there.get("variant") if on_cpu else None
                few = replace(net, restarts=min(net.restarts, FEWER.get(label, net.restarts)))
                table["arms"][label] = measured(few, variants, parts, wanted.device, known)
                file.write_text(json.dumps(record, indent=1))
                print(f"{name:14} {line(label, table['arms'][label])}", flush=True)


def measured(
    net: Net, variants: dict[str, Way], parts: tuple[Tensor, ...], device: str, known: str | None
) -> dict[str, Any]:
    """An arm's row: the variant that held-out samples choose, trained on all and tested."""
    x, y, x_test, y_test = parts
    held = min(HELD_OUT, len(y) // 6)
    tried = {}
    for label, way in variants.items() if len(variants) > 1 and known is None else ():
        pairs = [_one(way, net, (x[:-held], y[:-held]), seed, device) for seed in (100, 101)]
        shares = [evaluate(model, (x[-held:], y[-held:])) for model, _ in pairs]
        tried[label] = {"accuracy": fmean(shares), "seconds": pairs[-1][1].seconds}
    chosen = _choice(tried) if tried else known or next(iter(variants))
    runs, shares = [], []
    _one(variants[chosen], net, (x[:2048], y[:2048]), 0, device)  # warms up
    for seed in range(net.restarts):
        model, run = _one(variants[chosen], net, (x, y), seed, device)
        runs.append(run)
        shares.append(evaluate(model, (x_test, y_test)))
    return {
        "accuracy": fmean(shares),
        "deviation": stdev(shares) if len(shares) > 1 else 0.0,
        "accuracies": shares,
        "seconds": median(run.seconds for run in runs),
        "seconds_each": [run.seconds for run in runs],
        "peak_bytes": max(run.peak_bytes for run in runs),
        "kept_bytes": max(run.kept_bytes for run in runs),
        "sample_passes": runs[0].sample_passes,
        "variant": chosen,
        "held_out": tried,
        "settings": runs[0].settings,
    }


def _choice(tried: dict[str, dict[str, float]]) -> str:
    """The most accurate variant; where many are accurate enough, the fastest of those."""
    enough = [k for k in tried if tried[k]["accuracy"] >= ENOUGH]
    if len(tried) > 2 and enough:
        return min(enough, key=lambda k: tried[k]["seconds"])
    return max(tried, key=lambda k: tried[k]["accuracy"])


def _one(
    way: Way, net: Factory, samples: tuple[Tensor, Tensor], seed: int, device: str
) -> tuple[nn.Module, Run]:
    made = train(way.arm, net, samples, seed=seed, device=device, **way.options)
    return made.models[0], made.runs[0]


def line(label: str, row: dict[str, Any]) -> str:
    """A row for the terminal."""
    figures = f"{row['accuracy']:.2%} ± {row['deviation']:.2%}"
    megabytes = row["peak_bytes"] / 2**20
    return f"{label:22} {figures} {row['seconds']:8.3f} s {megabytes:7.1f} MB  {row['variant']}"


if __name__ == "__main__":
    main()
