"""The paper's MLP table: tpSGD compared with ZORB, LM-KARnet, dlADMM and extreme learning machines.

    python -m experiments.peers --out results [--device cuda] [--only mlp-256]

MNIST, two layers with LeakyReLU, whole training set, 25 restarts, one by one: accuracy, seconds and
peak memory are those of the same runs. The variants of an arm are trained without the last 10,000
training samples and compared on them; the best is then trained on all samples and tested. The paper
names neither the width nor the slope, which matters to ZORB, whose targets below 0 are divided by
it: `mlp-256-steep` has Keras' slope of 0.3, the others torch's of 0.01.

The seconds of a CPU go into the same file, apart, with the same variants: `--device cpu --restarts
3`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor, nn

import tpsgd
from experiments.common import (
    Row,
    Samples,
    accuracies,
    arguments,
    hold_out_last,
    is_complete,
    linear_decay,
    load,
    origin,
    program,
    result_file,
)
from tpsgd import Place, ridge, rules
from tpsgd.common.units import size
from tpsgd.engine.learners.optimizers import adam
from tpsgd.projections import normal
from tpsgd.zoo.words import mlp

HELD_OUT = 10_000
ENOUGH = 0.93  # on held-out samples: of the variants that reach it the fastest is taken
FEWER = {"dladmm": 10, "dladmm, rho 1": 10}  # restarts
Way = Callable[..., tpsgd.Run]  # (model, samples, seed=, device=) -> run


@dataclass(frozen=True)
class Net:
    """A two-layer net."""

    width: int
    slope: float
    restarts: int = 25

    def __call__(self) -> nn.Module:
        return mlp((1, 28, 28), [self.width], 10, partial(nn.LeakyReLU, self.slope))  # type: ignore


NETS = {
    "mlp-256": Net(256, 0.01),
    "mlp-256-steep": Net(256, 0.3),
    "mlp-1000": Net(1000, 0.01, 10),
}


def fit(rule: rules.Rule, **settings: Any) -> Way:
    """Training by a rule, five epochs per block in batches of 128 unless it says otherwise."""
    return partial(tpsgd.fit, rule=rule, **{"epochs": 5, "batch_size": 128, **settings})


def ways(device: str) -> dict[str, dict[str, Way]]:
    """Every arm and its variants. In one pass, batches decide on memory and speed alone."""
    zorb, dladmm = tpsgd.peers.fit_zorb, tpsgd.peers.fit_dladmm
    one_pass = {"batch_size": 1024 if device == "cpu" else 8192}
    ridge_head: Row = {"optimizer": [adam, ridge()]}
    places = (Place.AFTER, Place.BEFORE)
    projected = rules.tpsgd_l2(at=Place.BEFORE)
    return {
        "backprop": {"": partial(tpsgd.fit_backprop, epochs=5, batch_size=128)},
        "readout": {"": fit(rules.readout())},
        "readout, ridge head": {"": fit(rules.readout(), **ridge_head)},
        "tpsgd-l2": {at.value: fit(rules.tpsgd_l2(at=at)) for at in places},
        "tpsgd-l2, ridge head": {
            at.value: fit(rules.tpsgd_l2(at=at), **ridge_head) for at in places
        },
        "tpsgd-l2, one epoch": quick(1),
        "tpsgd-l2, quick": quick(2, 3, 4, 6),
        "drtp": {f"std {std:g}": fit(rules.drtp(normal(std))) for std in (1.0, 0.01)},
        "lm-karnet": {
            "penalty by cross-validation": fit(projected, optimizer=ridge(), **one_pass),
            "pseudo-inverse": fit(projected, optimizer=ridge(0.0), **one_pass),
        },
        "zorb": {
            "pseudo-inverse": partial(zorb, **one_pass),
            "penalty by cross-validation": partial(zorb, alpha=None, **one_pass),
        },
        "dladmm": {
            "as published: rho from 1e-6, weights N(0, 0.1), 100 iterations": partial(
                as_published, partial(dladmm, rho=1e-6, max_rho=0.1, iterations=100)
            )
        },
        "dladmm, rho 1": {"300 iterations": partial(dladmm, rho=1.0, iterations=300)},
        "elm": {"": fit(rules.frozen(), optimizer=ridge(), **one_pass)},
        "frozen": {loss.name: fit(rules.frozen(loss)) for loss in (tpsgd.cross_entropy, tpsgd.mse)},
    }


def quick(*epochs: int) -> dict[str, Way]:
    """Large batches, `simultaneous`, a rate that falls from epoch to epoch."""
    return {
        f"batches of {batch}, rate {lr:g}, {count} epochs": fit(
            rules.tpsgd_l2(), order=tpsgd.simultaneous, batch_size=batch, lr=lr, epochs=count,
            lr_schedule=linear_decay(count),
        )
        for batch in (512, 1024, 2048)
        for lr in (0.005, 0.01)
        for count in epochs
    }  # fmt: skip


def as_published(way: Way, model: nn.Module, samples: Samples, seed: int, device: str) -> tpsgd.Run:
    """Normal weights and biases of deviation 0.1, as dlADMM's authors have them."""
    for p in model.parameters():
        nn.init.normal_(p, std=0.1)
    return way(model, samples, seed=seed, device=device)


def main() -> None:
    """Run the nets asked for and write one JSON file."""
    parser = arguments(__doc__)
    parser.add_argument("--only", nargs="+", choices=list(NETS), default=list(NETS))
    parser.add_argument("--arm", help="only this one; the others stay")
    parser.add_argument("--without", default=(), nargs="+", help="arms whose names begin so")
    parser.add_argument("--restarts", type=int, help="fewer, for seconds or a quick look")
    parser.add_argument("--max-train", type=int, help="of the samples, for a quick look")
    options = parser.parse_args()
    if options.smoke:
        options.restarts, options.without = 1, ["dladmm"]  # which has hundreds of iterations
    record, save = result_file(options, "peers")
    on_cpu = torch.device(options.device).type == "cpu"
    there: Row = record.setdefault("cpu", {}) if on_cpu else record
    there |= origin("peers", options.device, *["--device cpu --restarts 3"] * on_cpu)
    loaded = load("mnist", options)
    parts = tuple(t.to(options.device) for t in (*loaded.train, *loaded.test))
    for name in options.only:
        net = NETS[name]
        restarts = options.restarts or (3 if on_cpu else net.restarts)
        net = replace(net, restarts=restarts)
        table = there.setdefault("nets", {}).setdefault(name, {"arms": {}})
        table |= {"width": net.width, "slope": net.slope, "restarts": restarts}
        for arm, every in ways(options.device).items():
            if options.arm not in (None, arm) or arm.startswith(tuple(options.without)):
                continue
            variants = dict(islice(every.items(), 2 if options.smoke else None))
            chosen = None
            if on_cpu:  # the variant that was chosen on the GPU
                rows = record.get("nets", {}).get(name, {}).get("arms", {})
                chosen = rows.get(arm, {}).get("variant")
            few = replace(net, restarts=min(restarts, FEWER.get(arm, restarts)))
            if is_complete(table["arms"].get(arm), few.restarts, options):
                continue
            row = table["arms"][arm] = measure(few, variants, parts, options.device, chosen)
            save()
            figures = f"{row['accuracy']:.2%} ± {row['deviation']:.2%} {row['seconds']:8.3f} s"
            cost = f"{size(row['peak_bytes']):>9}  {row['variant']}"
            print(f"{name:14} {arm:22} {figures} {cost}", flush=True)


def measure(
    net: Net, variants: dict[str, Way], parts: tuple[Tensor, ...], device: str, chosen: str | None
) -> Row:
    """An arm's row: the variant that held-out samples choose, trained on all and tested."""
    x, y, x_test, y_test = parts
    part, last = hold_out_last(x, y, min(HELD_OUT, len(y) // 6))
    held_out = {}
    for label, way in variants.items() if len(variants) > 1 and chosen is None else ():
        pairs = [train(way, net, part, seed, device) for seed in (100, 101)]
        share = fmean(tpsgd.evaluate(model, last) for model, _ in pairs)
        held_out[label] = {"accuracy": share, "seconds": pairs[-1][1].seconds}
    label = choose(held_out) if held_out else chosen or next(iter(variants))
    train(variants[label], net, (x[:2048], y[:2048]), 0, device)  # warms up
    runs, shares = [], []
    for seed in range(net.restarts):
        model, run = train(variants[label], net, (x, y), seed, device)
        runs.append(run)
        shares.append(tpsgd.evaluate(model, (x_test, y_test)))
    return accuracies(shares) | {
        "seconds": median(run.seconds for run in runs),
        "seconds_each": [run.seconds for run in runs],
        "peak_bytes": max(run.peak_bytes for run in runs),
        "kept_bytes": max(run.kept_bytes for run in runs),
        "sample_passes": runs[0].sample_passes,
        "variant": label,
        "held_out": held_out,
        "settings": runs[0].settings,
    }


def choose(held_out: dict[str, dict[str, float]]) -> str:
    """The most accurate variant; where many are accurate enough, the fastest of those."""
    enough = [k for k in held_out if held_out[k]["accuracy"] >= ENOUGH]
    if len(held_out) > 2 and enough:
        return min(enough, key=lambda k: held_out[k]["seconds"])
    return max(held_out, key=lambda k: held_out[k]["accuracy"])


def train(
    way: Way, net: Net, samples: Samples, seed: int, device: str
) -> tuple[nn.Module, tpsgd.Run]:
    """A fresh model, trained."""
    torch.manual_seed(seed)
    model = net()
    return model, way(model, samples, seed=seed, device=device)


if __name__ == "__main__":
    program(main)
