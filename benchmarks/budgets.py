"""Budgets: how long planning takes, and how close training comes to the best setting by hand.

    python benchmarks/budgets.py --out results/budgets.json [--quick]

Four budgets for each of five nets, as parts of what training takes that keeps all inputs, or of
what backprop takes: of the smaller one, where three of them can be kept. A budget below all of the
grid is raised to its least. The best setting by hand is the fastest one of a grid of micro-batches,
slices and kept or recomputed inputs that fits. Times are seconds of CPU with one thread, the least
of several runs.
"""

import argparse
import json
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch
from speed_nets import NETS, Net, random_data

import tpsgd
from tpsgd import Memory, rules
from tpsgd.comparison.provenance import machine, versions
from tpsgd.engine.settings import Settings
from tpsgd.engine.spec import completed
from tpsgd.memory.budget import within
from tpsgd.memory.rehearse import Inputs

NAMES = {
    "784-256-10, batch 128": "MLP 784-256-10",
    "demo cnn, batch 32": "CNN on digits",
    "mnist cnn, batch 128": "CNN on MNIST",
    "8-layer cnn, batch 128": "8-layer CNN",
    "rnn, 100 steps": "RNN, 100 steps",
}
SAMPLES = {"8-layer CNN": 640}
PARTS = 0.9, 0.6, 0.4, 0.25
SPARE = 16 << 10  # bytes that a budget leaves free
Row = dict[str, Any]


def seconds(action: Callable[[], Any]) -> tuple[float, Any]:
    """CPU time, and what was returned."""
    start = time.thread_time()
    result = action()
    return time.thread_time() - start, result


class Trial:
    """A net, its data, and the settings that all runs share."""

    def __init__(self, net: Net, samples: int, epochs: int) -> None:
        self.net, self.samples = net, samples
        self.data = random_data(samples, *net.shape)
        self.settings: Row = {"batch_size": net.batch_size, "epochs": epochs}

    def plan(self, memory: Any, others: bool = False) -> Any:
        """The plan with these memory settings, or with a budget."""
        options: Row = self.settings | {"memory": memory, "others": others}
        model, options["order"] = self.net.model(), tpsgd.sequential
        return tpsgd.plan(model, self.net.shape, samples=self.samples, **options)

    def choose(self, budget: int) -> tuple[float, Memory]:
        """Seconds of planning, and the settings that a budget chooses."""
        model, rule = self.net.model(), rules.default()
        settings = Settings(order=tpsgd.sequential, memory=Memory(budget), **self.settings)
        settings = completed(rule, tpsgd.split(model), settings)
        inputs = Inputs(self.net.shape, samples=self.samples)
        took, chosen = seconds(lambda: within(model, inputs, rule, settings))
        return took, chosen.memory

    def train(self, memory: Any) -> float:
        """Seconds of training."""
        torch.manual_seed(0)
        model = self.net.model()
        settings: Row = self.settings | {"order": tpsgd.sequential}
        run = lambda: tpsgd.fit(model, self.data, memory=memory, **settings)  # noqa: E731
        return seconds(run)[0]

    def grid(self) -> list[Memory]:
        """Settings that one might choose by hand."""
        sizes = [None, *(self.net.batch_size // k for k in (2, 4, 16))]
        cuts = [*((size, None) for size in sizes), (None, 4), (None, 16)]
        choices = [(*cut, reuse) for cut, reuse in product(cuts, (True, False))]
        return [Memory(micro_batch=m, slices=s, reuse=r) for m, s, r in choices]


def budgets(trial: Trial, totals: dict[Memory, int]) -> list[int]:
    """Four budgets that can be kept."""
    fast = totals[Memory(reuse=True)]
    backprop = trial.plan(Memory(reuse=False), others=True).backprop
    least = min(totals.values()) + 2 * SPARE
    whole = min(fast, backprop)
    whole = whole if PARTS[-2] * whole >= least else max(fast, backprop)
    return [max(least, int(part * whole)) for part in PARTS]


def rows(net: Net, name: str, turns: int, quick: bool) -> list[Row]:
    """The budgets of one net."""
    trial = Trial(net, SAMPLES.get(name, net.samples), 1 if quick else 2)
    grid = trial.grid()
    totals = {m: trial.plan(m).peak_bytes for m in grid}
    limits = budgets(trial, totals)
    planned = {b: min((trial.choose(b) for _ in range(turns)), key=first) for b in limits}
    chosen = {b: memory for b, (_, memory) in planned.items()}
    times: dict[Memory, float] = {}
    for _ in range(turns):
        for memory in {*chosen.values(), *(m for m in grid if totals[m] + SPARE <= max(limits))}:
            times[memory] = min(times.get(memory, float("inf")), trial.train(memory))
    found = []
    for budget, part in zip(limits, PARTS, strict=True):
        fitting = [m for m in grid if totals[m] + SPARE <= budget]
        best = min([*fitting, chosen[budget]], key=times.__getitem__)
        record = {
            "net": name, "part": part, "budget": budget, "chosen": words(chosen[budget]),
            "planning": planned[budget][0], "seconds": times[chosen[budget]],
            "by_hand": words(best), "by_hand_seconds": times[best],
            "ratio": times[chosen[budget]] / times[best],
        }  # fmt: skip
        print(record, flush=True)
        found.append(record)
    return found


def first(pair: tuple[float, Any]) -> float:
    """The seconds of a pair."""
    return pair[0]


def words(memory: Memory) -> str:
    """Settings in words."""
    cut = f"micro-batches of {memory.micro_batch}" if memory.micro_batch else "whole batches"
    slices = f", {memory.slices} slices" if memory.slices else ""
    redrawn = ", codes redrawn" if memory.redraw else ""
    return f"{cut}{slices}{redrawn}, inputs {'kept' if memory.reuse else 'recomputed'}"


def main() -> None:
    """All nets."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results/budgets.json"))
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="two nets, one epoch, one turn")
    options = parser.parse_args()
    torch.set_num_threads(1)
    nets = [(net, NAMES[net.name]) for net in NETS if net.name in NAMES]
    nets, turns = (nets[:2], 1) if options.quick else (nets, options.turns)
    found = [row for net, name in nets for row in rows(net, name, turns, options.quick)]
    about = {
        "command": "python benchmarks/budgets.py",
        "machine": machine("cpu"),
        "versions": versions(),
    }
    options.out.write_text(json.dumps(about | {"rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
