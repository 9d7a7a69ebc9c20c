"""Microseconds of a training step on this machine: exported C and ONNX, `fit`, a plain torch loop.

    python benchmarks/edge_speed.py --out results [--steps 2000] [--turns 9] [--quick]

A small net learns from random samples, one epoch in a shuffled order, plain SGD, one thread. Every
arm begins with the same weights and gathers the same batches from the same samples:

- `exported C`: `net_step` in a loop that is C, too, compiled with -O2 for any processor of this
  kind (no -march=native).
- `exported ONNX`: onnxruntime, whose state is fed back by numpy, as the exported run.py does.
- `tpsgd.fit`: `simultaneous` and `tpsgd.sgd`, the whole call.
- `backprop, torch`: the loop a user would write, cross-entropy and the fused `torch.optim.SGD`.

The first three have the rule `readout(scale=4.0)`; after every turn their weights must agree, so
that it is the same work that is timed. Seconds are CPU seconds of the thread; figures are medians
over turns, ratios are medians of those within a turn. This is a desk machine: no board was timed.
"""

import argparse
import ctypes
import gc
import json
import os
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import edge_nets
import numpy as np
import torch
from many import commit
from speed_turns import cpu_clock, figures
from torch import Tensor, nn
from torch.nn import functional as F

import tpsgd
from tpsgd.common.units import columns
from tpsgd.comparison.provenance import machine, versions
from tpsgd.maths.random import Key, permutation
from tpsgd_export.read_model import read_model
from tpsgd_export.recipe import StepRecipe
from tpsgd_export.to_c.codes import with_codes
from tpsgd_export.to_c.compiled import compiled_library, compiler
from tpsgd_export.to_c.source import sources
from tpsgd_export.to_onnx.step import step_model

NETS = ("64-32-10", "784-32-10", "head 512-64-10", "CNN 8x8: 8x3")
BATCHES = (1, 16)
PLAIN = "backprop, torch"
RULE, RATE = tpsgd.rules.readout(scale=4.0), 0.001
APART, MOVED = 1e-4, 1e-3  # weights of two arms at most, and weights from their beginning at least
PROBE = """
#include <string.h>
#include "net.h"

static net_state state;
static net_arena arena;
static float x[NET_BATCH * NET_INPUT], loss[NET_BLOCKS];
static uint16_t y[NET_BATCH];

int probe_train(const float *samples, const uint16_t *labels, const int64_t *order, long steps,
                float lr, float *weights)
{
    int answer = NET_OK;
    net_begin(&state);
    for (; steps > 0 && answer == NET_OK; steps--) {
        for (int i = 0; i < NET_BATCH; i++, order++) {
            memcpy(x + i * NET_INPUT, samples + *order * NET_INPUT, NET_INPUT * sizeof(float));
            y[i] = labels[*order];
        }
        answer = net_step(&state, &arena, x, y, lr, NET_ALL_BLOCKS, loss);
    }
    memcpy(weights, state.weights, NET_PARAMS * sizeof(float));
    return answer;
}
"""
Row = dict[str, Any]
Arm = Callable[[nn.Module], object]  # trains a fresh model; what it prepares is not timed


@dataclass(frozen=True)
class Task:
    """A net, and random samples for some steps."""

    net: str
    batch: int
    steps: int

    def model(self) -> nn.Module:
        """The net with the weights that every arm begins with."""
        torch.manual_seed(0)
        return edge_nets.NETS[self.net][0]()

    def recipe(self) -> StepRecipe:
        """Its training step as `tpsgd.export` reads it."""
        shape = edge_nets.NETS[self.net][1]
        return with_codes(read_model(self.model(), RULE, shape, batch=self.batch), "auto")

    def samples(self) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs from 0 to 1, labels, and the order in which `fit` shuffles them."""
        count, generator = self.steps * self.batch, torch.Generator().manual_seed(0)
        x = torch.rand(count, *edge_nets.NETS[self.net][1], generator=generator)
        y = torch.arange(count) % 10
        return x, y, torch.cat(list(permutation(count, Key(0))))


# ---- the arms ------------------------------------------------------------------------------------


def exported_c(task: Task) -> Arm:
    """The exported C and a loop over the steps, compiled together."""
    with tempfile.TemporaryDirectory() as place:
        for name, text in (sources(task.recipe()) | {"probe.c": PROBE}).items():
            Path(place, name).write_text(text)
        train = compiled_library(Path(place)).probe_train
    train.argtypes = [*[ctypes.c_void_p] * 3, ctypes.c_long, ctypes.c_float, ctypes.c_void_p]
    x, y, order = task.samples()
    labels = y.to(torch.uint16)

    def arm(model: nn.Module) -> None:
        weights = torch.empty(sum(p.numel() for p in model.parameters()))
        pointers = [t.data_ptr() for t in (x, labels, order)]
        if error := train(*pointers, task.steps, RATE, weights.data_ptr()):
            raise RuntimeError(f"{task}: net_step returned {error}")
        nn.utils.vector_to_parameters(weights, model.parameters())

    return arm


def exported_onnx(task: Task) -> Arm:
    """The exported graph, with the lines of the exported run.py around it."""
    import onnxruntime

    graph, beginning = step_model(task.recipe(), edge_nets.NETS[task.net][1])
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    content, providers = graph.SerializeToString(), ["CPUExecutionProvider"]
    step = onnxruntime.InferenceSession(content, options, providers)
    x, y, order = (t.numpy() for t in task.samples())
    blocks, places = np.ones(2, bool), range(task.batch, len(order), task.batch)

    def arm(model: nn.Module) -> None:
        state = dict(beginning)
        for indices in np.split(order, places):
            rate = np.array(RATE, np.float32)
            batch = {"x": x[indices], "labels": y[indices], "lr": rate, "learn": blocks}
            values = step.run(None, {**batch, **state})
            new = dict(zip([output.name for output in step.get_outputs()], values, strict=True))
            state.update({name: new[f"new/{name}"] for name in state})
        model.load_state_dict({name: torch.from_numpy(value) for name, value in state.items()})

    return arm


def by_fit(task: Task) -> Arm:
    """`tpsgd.fit`, which shuffles the samples itself."""
    x, y, _ = task.samples()

    def arm(model: nn.Module) -> tpsgd.Run:
        return tpsgd.fit(
            model, (x, y), rule=RULE, order=tpsgd.simultaneous, optimizer=tpsgd.sgd, lr=RATE,
            epochs=1, batch_size=task.batch, seed=0, progress=False,
        )  # fmt: skip

    return arm


def plain_loop(task: Task) -> Arm:
    """The loop that a user would write."""
    x, y, order = task.samples()

    def arm(model: nn.Module) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE, fused=True)
        for batch in order.split(task.batch):
            optimizer.zero_grad()
            F.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()

    return arm


LOCAL: dict[str, Callable[[Task], Arm]] = {
    "exported C": exported_c,
    "exported ONNX": exported_onnx,
    "tpsgd.fit": by_fit,
}
ARMS = {**LOCAL, PLAIN: plain_loop}


# ---- turns ---------------------------------------------------------------------------------------


def measure(task: Task, turns: int) -> list[Row]:
    """Every arm once in each turn, after a turn that warms up: a row for each arm."""
    arms = {name: prepare(task) for name, prepare in ARMS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    apart = 0.0
    for turn in range(turns + 1):
        models = {name: task.model() for name in arms}
        gc.collect()
        for name, arm in arms.items():
            began = cpu_clock()
            arm(models[name])
            took = cpu_clock() - began
            seconds[name] += [took / task.steps] if turn else []
        apart = max(apart, distance(task, models))
    rows = figures(seconds, (PLAIN,))
    return [
        {
            "net": task.net, "batch": task.batch, "steps": task.steps, "arm": name,
            "microseconds": 1e6 * row["seconds"], "ratio": row["ratio"],
            "turns": [1e6 * s for s in row["each"]], "apart": apart,
        }
        for name, row in rows.items()
    ]  # fmt: skip


def distance(task: Task, models: dict[str, nn.Module]) -> float:
    """How far the weights of the local arms are apart; an error if it was not the same work."""
    begun, *learned = (
        nn.utils.parameters_to_vector(model.parameters()).detach()
        for model in (task.model(), *(models[name] for name in LOCAL))
    )
    weights = torch.stack(learned)
    apart = float((weights - weights[-1]).abs().max())  # NaN if one of the weights is
    moved = float((weights - begun).abs().amax(1).min())
    if not (apart <= APART and moved >= MOVED):
        raise RuntimeError(
            f"{task}: weights of C, ONNX and fit are {apart:.1e} apart and moved by {moved:.1e}"
        )
    return apart


def table(rows: list[Row]) -> str:
    """Microseconds a step, and in brackets times the plain loop: a line for each net and batch."""
    lines: dict[tuple[str, int], list[str]] = {}
    for row in rows:
        cell = f"{row['microseconds']:.1f} ({row['ratio']:.2f})"
        lines.setdefault((row["net"], row["batch"]), []).append(cell)
    cells = [[net, str(batch), *line] for (net, batch), line in lines.items()]
    return columns([["net", "batch", *(f"{arm}, us" for arm in ARMS)], *cells])


def origin(command: str) -> Row:
    """Where the figures come from."""
    import onnxruntime

    said = subprocess.run([*(compiler() or ()), "--version"], capture_output=True, text=True)
    tools = {"onnxruntime": onnxruntime.__version__, "cc": said.stdout.partition("\n")[0]}
    return {
        "benchmark": "edge_speed", "command": command, "machine": machine(),
        "versions": versions() | tools | {"commit": commit()},
        "load": os.getloadavg()[0],  # processes that want a core, this one included
        "how": " ".join((__doc__ or "").split()),
    }  # fmt: skip


def main() -> None:
    """Measure all nets, write the file, print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of edge_speed.json")
    parser.add_argument("--steps", type=int, default=2000, help="of an arm in each turn")
    parser.add_argument("--turns", type=int, default=9, help="after one that warms up")
    parser.add_argument("--quick", action="store_true", help="200 steps, one turn")
    chosen = parser.parse_args()
    steps, turns = (200, 1) if chosen.quick else (chosen.steps, chosen.turns)
    torch.set_num_threads(1)
    command = f"python benchmarks/edge_speed.py --out results --steps {steps} --turns {turns}"
    record, rows = origin(command), []
    for net in NETS:
        for batch in BATCHES:
            rows += measure(Task(net, batch, steps), turns)
            print(table(rows[-len(ARMS) :]).splitlines()[1], flush=True)
    print(f"\n{table(rows)}")
    chosen.out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(record | {"rows": rows}, indent=1) + "\n"
    (chosen.out / "edge_speed.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
