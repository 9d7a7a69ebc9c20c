"""Memory: planned and measured, by samples, depth and width, and how little MNIST needs.

    python benchmarks/memory.py --out results [--device cuda] [--only plan,depth,...] [--quick]

- plan: the peak memory that `tpsgd.plan` estimates and the measured one, for every way to train.
- depth: the memory of 16 equal layers beyond their weights, compared with 2.
- scaling: seconds and memory by the number of samples, the depth and the width.
- small: MNIST, 784-256-10, with `readout` under budgets, and as little as possible (CPU only).
- resident: the memory of a fresh process that trains, and of one that only imports (CPU only).

Every trained result has backprop and the frozen control with it. Rates of the small runs are chosen
on the last 10,000 training samples.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tpsgd
from tpsgd import Memory, Run, rules
from tpsgd.common.units import as_bytes, size
from tpsgd.comparison.provenance import machine, versions
from tpsgd.zoo.vgg import vgg

CLASSES = 10
SPARE = 32 << 10  # bytes, beyond what is planned
RECOMPUTED = Memory(reuse=False)
Row = dict[str, Any]


def mlp(depth: int = 2, width: int = 256, inputs: int = 784) -> nn.Sequential:
    """Linear layers."""
    sizes = [inputs, *[width] * (depth - 1)]
    hidden = [m for a, b in pairwise(sizes) for m in (nn.Linear(a, b), nn.LeakyReLU())]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(sizes[-1], CLASSES))


def cnn(depth: int = 2, width: int = 16) -> nn.Sequential:
    """Equal convolutions on images of 32 x 32 and a classifier."""
    layers: list[nn.Module] = []
    for i in range(depth):
        layers += [nn.Conv2d(width if i else 3, width, 5, padding=2), nn.LeakyReLU()]
    return nn.Sequential(*layers, nn.AvgPool2d(4), nn.Flatten(), nn.Linear(width * 64, CLASSES))


def rnn() -> nn.Sequential:
    """A recurrent layer over the rows of an image."""
    return nn.Sequential(tpsgd.Recurrent(28, 512), nn.Linear(512, CLASSES))


def weight_bytes(model: nn.Module) -> int:
    """The bytes of a model's weights."""
    return sum(p.nbytes for p in model.parameters())


def drawn(samples: int, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Noise with labels: what is learned does not matter here."""
    return torch.randn(samples, *shape), torch.arange(samples) % CLASSES


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int, int]] = {
    "MLP 784-256-10": (mlp, (784,), 128, 2048),
    "CNN 2 x 16 filters": (cnn, (3, 32, 32), 128, 2048),
    "RNN 512 units": (rnn, (28, 28), 128, 512),
    "VGG11 at 160 px": (lambda: vgg(11, (3, 160, 160), CLASSES), (3, 160, 160), 64, 256),
}


LOCAL: dict[str, Row] = {
    "sequential": {"memory": Memory(reuse=True)},
    "sequential, recomputed": {"memory": RECOMPUTED},
    "sequential, micro-batch 8": {"memory": Memory(reuse=False, micro_batch=8)},
    "simultaneous": {"order": tpsgd.simultaneous},
}
BACKPROP: dict[str, Callable[[Any], Row]] = {  # settings by the line of a plan
    "backprop": lambda line: {},
    "backprop, micro-batch 8": lambda line: {"memory": Memory(micro_batch=8)},
    "backprop, checkpointed": lambda line: {"segments": line.segments},
}


def plan_against_measured(device: str, quick: bool) -> list[Row]:
    """Every net and way: planned and measured bytes."""
    rows: list[Row] = []
    for name, (make, shape, batch, samples) in NETS.items():
        if name.startswith("VGG") and device == "cpu":
            continue
        data = drawn(samples // (4 if quick else 1), *shape)
        common: Row = {"epochs": 1, "batch_size": batch, "device": device}

        def note(way: str, run: Run, line: Any, name: str = name) -> None:
            row = {"net": name, "way": way, "planned": line.peak, "measured": run.peak_bytes}
            row |= {"kept": run.kept_bytes, "ratio": line.peak / run.peak_bytes}
            rows.append(row)
            print(f"{name:20} {way:38} {size(line.peak):>10} {row['ratio']:.3f}", flush=True)

        plan = {"samples": len(data[1]), **common}
        for rule in (rules.readout(), rules.tpsgd_l2()):
            for way, settings in LOCAL.items():
                own = {"order": tpsgd.sequential, "rule": rule, **settings}
                line = tpsgd.plan(make(), shape, others=False, **plan, **own).lines[0]
                note(f"{rule.name}, {way}", tpsgd.fit(make(), data, **common, **own), line)
        planned = tpsgd.plan(make(), shape, **plan)
        for way, settings in BACKPROP.items():
            if way in {line.name for line in planned.lines}:
                run = tpsgd.fit_backprop(make(), data, **common, **settings(planned[way]))
                note(way, run, planned[way])
        run = tpsgd.fit(make(), data, rule=rules.frozen(), memory=RECOMPUTED, **common)
        note("last layer alone", run, planned["last layer alone"])
    return rows


def arms(make: Callable[[], nn.Module], data: Any, **settings: Any) -> dict[str, Run]:
    """Two rules, backprop and the frozen control, each on a fresh model."""
    runs = {"backprop": tpsgd.fit_backprop(make(), data, **settings)}
    for rule in (rules.readout(), rules.tpsgd_l2(), rules.frozen()):
        runs[rule.name] = tpsgd.fit(make(), data, rule=rule, memory=RECOMPUTED, **settings)
    return runs


def depth(device: str, quick: bool) -> list[Row]:
    """What training holds beyond the weights of 2 and of 16 equal layers."""
    rows: list[Row] = []
    for kind, build, shape in (
        ("MLP of 256 units", lambda n: mlp(n + 1, 256, 256), (256,)),
        ("CNN of 32 filters", lambda n: cnn(n, 32), (3, 32, 32)),
    ):
        data = drawn(256 if quick else 1024, *shape)
        peaks: dict[int, dict[str, int]] = {}
        for layers in (2, 16):
            runs = arms(lambda: build(layers), data, epochs=1, batch_size=128, device=device)  # noqa: B023
            weights = weight_bytes(build(layers))
            peaks[layers] = {arm: run.peak_bytes - weights for arm, run in runs.items()}
        for arm in peaks[2]:
            two, many = peaks[2][arm], peaks[16][arm]
            rows.append({"net": kind, "arm": arm, "two": two, "sixteen": many})
            rows[-1]["growth"] = many / two - 1
            print(f"{kind:20} {arm:10} {size(two):>10} {size(many):>10} {many / two - 1:+.1%}")
    return rows


def scaling(device: str, quick: bool) -> list[Row]:
    """Seconds and bytes against samples, depth and width, one thing at a time."""
    rows: list[Row] = []
    axes: dict[str, tuple[list[int], Callable[[int], Any]]] = {
        "samples": ([2000, 8000, 32000, 128000], lambda n: (lambda: mlp(3), n)),
        "depth": ([2, 4, 8, 16, 32], lambda n: (lambda: mlp(n + 1), 8000)),
        "width": ([64, 256, 1024, 4096], lambda n: (lambda: mlp(3, n), 8000)),
    }
    arms(lambda: mlp(3), drawn(2000, 784), epochs=1, device=device)  # warm up
    for axis, (values, case) in axes.items():
        for value in values[:2] if quick else values:
            make, samples = case(value)
            data = drawn(samples, 784)
            turns = [arms(make, data, epochs=1, device=device) for _ in range(1 if quick else 2)]
            weights = weight_bytes(make())
            for arm in turns[0]:
                seconds = min(turn[arm].seconds for turn in turns)
                peak = turns[0][arm].peak_bytes
                row = {"axis": axis, "value": value, "arm": arm, "seconds": seconds}
                rows.append(row | {"peak_bytes": peak, "weights": weights, "samples": samples})
                print(f"{axis:8} {value:>7} {arm:10} {seconds:8.3f} s {size(peak):>10}", flush=True)
    return rows


# ---- MNIST in little memory ----------------------------------------------------------------------


def small(quick: bool) -> list[Row]:
    """The MLP under budgets: accuracy, measured bytes, what was chosen."""
    data = tpsgd.data.load("mnist", max_train=5000 if quick else None)
    rows = [
        _small(data, "4MB", 128, 5, tpsgd.engine.learners.optimizers.adam, (None,)),
        _small(data, None, 128, 5, tpsgd.engine.learners.optimizers.adam, (None,)),
    ]
    shape = tuple(data.train[0].shape[1:])

    def least(batch: int) -> int:
        """What plain SGD with gradients in fine slices is planned to hold."""
        return tpsgd.plan(
            mlp(), shape, batch_size=batch, optimizer=tpsgd.sgd, others=False,
            memory=Memory(slices=16, reuse=False), order=tpsgd.sequential,
            samples=len(data.train[1]),
        ).peak_bytes  # fmt: skip

    rows.append(_small(data, least(16) + SPARE, 16, 5, tpsgd.sgd, (0.03, 0.1, 0.3)))
    rows[-1]["planned_with_batches_of_1"] = least(1)
    return rows


def _small(
    data: Any, budget: Any, batch: int, epochs: int, optimizer: Any, rates: tuple[Any, ...]
) -> Row:
    """One setting: its rate by held-out samples, then all samples; backprop and frozen as well."""
    x, y = data.train
    part, held = (x[:-10_000], y[:-10_000]), (x[-10_000:], y[-10_000:])
    if len(y) < 20_000:
        part = held = (x, y)
    common: Row = {"batch_size": batch, "optimizer": optimizer}

    def trained(samples: Any, lr: Any, rule: Any, epochs: int, **more: Any) -> tuple[Any, Run]:
        torch.manual_seed(0)
        net = mlp()
        if rule is None:
            return net, tpsgd.fit_backprop(net, samples, lr=lr, epochs=epochs, **common)
        return net, tpsgd.fit(net, samples, lr=lr, epochs=epochs, rule=rule, **common, **more)

    def best(rule: Any) -> Any:
        if len(rates) == 1:
            return rates[0]
        tries = {lr: tpsgd.evaluate(trained(part, lr, rule, 1)[0], held) for lr in rates}
        return max(tries, key=lambda lr: tries[lr])

    row: Row = {"budget": as_bytes(budget) if budget else None, "batch_size": batch}
    row |= {"optimizer": optimizer.__name__, "epochs": epochs, "arms": {}}
    every = {"readout": rules.readout(), "backprop": None, "frozen": rules.frozen()}
    for name, rule in every.items():
        lr, more = best(rule), {} if rule is None else {"memory": budget}
        net, run = trained((x, y), lr, rule, epochs, **more)
        arm = {"accuracy": tpsgd.evaluate(net, data.test), "peak_bytes": run.peak_bytes, "lr": lr}
        arm |= {"kept_bytes": run.kept_bytes, "seconds": run.seconds}
        arm |= {k: run.settings[k] for k in ("micro_batch", "slices", "redraw")}
        row["arms"][name] = arm | {"reuse": str(run.settings["reuse"])}
        told = f"{arm['accuracy']:.2%} {size(run.peak_bytes):>9} + {size(run.kept_bytes)}"
        print(
            f"budget {budget or '-'!s:>8} batch {batch:>3} {optimizer.__name__:5} {name:9} {told}",
            flush=True,
        )
    return row


# ---- the process itself --------------------------------------------------------------------------

CHILD = """
import sys, torch, tpsgd, tpsgd.engine.learners.optimizers
from tpsgd.engine.device import resident
from torch import nn
data = tpsgd.data.load("mnist").train
data[0][:256].double() @ torch.zeros(1, 28, 4).double()  # what a first product loads
if sys.argv[1] != "data":
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(784, 256), nn.LeakyReLU(), nn.Linear(256, 10))
    opt = tpsgd.sgd if sys.argv[1] == "sgd" else tpsgd.engine.learners.optimizers.adam
    if sys.argv[1] == "optimizer":
        opt(list(net.parameters()))
    elif sys.argv[1] == "backprop":
        tpsgd.fit_backprop(net, data, epochs=1)
    else:
        tpsgd.fit(net, data, epochs=1, optimizer=opt, memory=tpsgd.Memory(reuse=False))
print(*resident())
"""


def process() -> list[Row]:
    """Resident bytes of fresh processes: importing and loading alone, and training too."""
    rows: list[Row] = []
    for what in ("data", "optimizer", "adam", "sgd", "backprop"):
        command = [sys.executable, "-c", CHILD, what]
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        now, most = map(int, out.split())
        rows.append({"what": what, "resident": now, "most": most})
        print(f"{what:10} resident {size(now):>10}, at most {size(most):>10}", flush=True)
    return rows


def main() -> None:
    """Measure what is asked for and add it to the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", default="plan,depth,scaling,small,resident")
    parser.add_argument("--quick", action="store_true", help="less data, for a look")
    options = parser.parse_args()
    on_cpu = options.device == "cpu"
    parts: dict[str, Callable[[], list[Row]]] = {
        "plan": lambda: plan_against_measured(options.device, options.quick),
        "depth": lambda: depth(options.device, options.quick),
        "scaling": lambda: scaling(options.device, options.quick),
    }
    if on_cpu:
        parts |= {"small": lambda: small(options.quick), "resident": process}
    file = options.out / f"memory-{'cpu' if on_cpu else 'gpu'}.json"
    record = json.loads(file.read_text()) if file.exists() else {}
    for name in [name for name in options.only.split(",") if name in parts]:
        began = time.perf_counter()
        record[name] = parts[name]()
        record.setdefault("seconds", {})[name] = time.perf_counter() - began
        record |= {"machine": machine(options.device), "versions": versions()}
        record["command"] = f"python benchmarks/memory.py --device {options.device}"
        options.out.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(record, indent=1))
    print(file)


if __name__ == "__main__":
    main()
