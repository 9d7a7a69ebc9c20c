"""Seconds per step on 1, 2 and 4 processes: a local rule's sums hidden behind compute, and DDP.

    python benchmarks/data_parallel.py --out results [--ranks 1 2 4] [--steps 60] [--quick]

Every process is pinned to a core and has one thread; gloo carries the sums. The batch is that of
all processes together. `waiting` waits for the sum of each block's gradients at once, so the
difference to `overlapped` is what the overlap hides. Backprop is torch's own
`DistributedDataParallel` in a plain loop, with the same optimizer. Figures are medians over turns.
With --out, the rows go into the section "data_parallel" of FOLDER/many.json.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from many import write_section
from torch import nn
from torch.nn import functional as F

import tpsgd
from tpsgd.common.units import columns
from tpsgd_parallel.ranks import Ranks, joined
from tpsgd_parallel.shares import span

FEATURES, CLASSES = 784, 10
Arm = Callable[[Ranks, int, nn.Module, Any], float]  # seconds, with batches of this size


def mlp(width: int, depth: int) -> nn.Sequential:
    """An MLP whose layers are equally wide."""
    widths = [FEATURES, *[width] * depth]
    layers = [m for a, b in pairwise(widths) for m in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(width, CLASSES))


NETS = {"mlp 256 x 4": (256, 4), "mlp 1024 x 4": (1024, 4)}


def local(overlap: bool) -> Arm:
    """Blocks that learn by `readout`, all of them from every batch."""

    def seconds(ranks: Ranks, batch_size: int, model: nn.Module, data: Any) -> float:
        run = tpsgd.fit(
            model, data, rule=tpsgd.rules.readout(), batch_size=batch_size, epochs=1,
            order=tpsgd.simultaneous, memory=tpsgd.Memory(measure=False), progress=False,
            parallel=tpsgd.data_parallel(overlap),
        )  # fmt: skip
        return run.seconds

    return seconds


def distributed_backprop(ranks: Ranks, batch_size: int, model: nn.Module, data: Any) -> float:
    """A plain loop with DistributedDataParallel, each process its share of the same batches."""
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer, (x, y) = torch.optim.Adam(wrapped.parameters(), fused=True), data
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    began = time.perf_counter()
    for batch in order.split(batch_size):
        index = batch[span(len(batch), ranks)]
        optimizer.zero_grad()
        F.cross_entropy(wrapped(x[index]), y[index]).backward()
        optimizer.step()
    return time.perf_counter() - began


ARMS: dict[str, Arm] = {
    "readout, overlapped": local(True),
    "readout, waiting": local(False),
    "backprop, DDP": distributed_backprop,
}


def pin() -> int:
    """Let this rank have one thread, on a core of its own if there are enough: their number."""
    torch.set_num_threads(1)
    cores = list(range(os.cpu_count() or 1))
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(os.environ["RANK"]) % len(cores)]})
    return min(len(cores), int(os.environ["WORLD_SIZE"]))


def rank_main(steps: int, turns: int, batch_size: int, nets: list[str]) -> None:
    """What one process does; rank 0 prints a row for each net and arm."""
    cores = pin()
    torch.manual_seed(0)
    samples = steps * batch_size
    data = torch.randn(samples, FEATURES), torch.randint(CLASSES, (samples,))
    few = tuple(t[: 4 * batch_size] for t in data)
    with joined() as ranks:
        for net in nets:
            taken: dict[str, list[float]] = {name: [] for name in ARMS}
            for turn in range(turns + 1):
                for name, arm in ARMS.items():
                    dist.barrier()
                    value = arm(ranks, batch_size, mlp(*NETS[net]), data if turn else few)
                    taken[name] += [value / steps] if turn else []
            for name, values in taken.items():
                row = {"net": net, "ranks": ranks.count, "arm": name, "batch": batch_size}
                row |= {"seconds": statistics.median(values), "turns": values, "cores": cores}
                if ranks.first:
                    print(json.dumps(row), flush=True)


def launch(count: int, words: list[str], script: str = __file__) -> list[dict[str, Any]]:
    """Run a job of some processes; the rows of rank 0."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count)}
    place |= {"OMP_NUM_THREADS": "1"}
    jobs = [
        subprocess.Popen(
            [sys.executable, script, *words],
            env=os.environ | place | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    texts = [job.communicate()[0] for job in jobs]
    if any(job.returncode for job in jobs):
        raise SystemExit(f"a job of {count} processes failed")
    return [json.loads(line) for line in texts[0].splitlines()]


def table(rows: list[dict[str, Any]]) -> str:
    """Milliseconds per step: a line for each net and arm, a column for each number of ranks."""
    counts = sorted({row["ranks"] for row in rows})
    head = ["net", "arm", *(f"{count} ranks, ms" for count in counts)]
    lines: dict[tuple[str, str], dict[int, float]] = {}
    for row in rows:
        lines.setdefault((row["net"], row["arm"]), {})[row["ranks"]] = row["seconds"]
    cells = [[*key, *(f"{1e3 * line[c]:.2f}" for c in counts)] for key, line in lines.items()]
    return columns([head, *cells])


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="folder of many.json")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=256, help="of all ranks together")
    parser.add_argument("--quick", action="store_true", help="the small net, few steps, one turn")
    return parser.parse_args()


def main() -> None:
    """Run the jobs and print a table, or be one of their ranks."""
    chosen = options()
    steps, turns = (8, 1) if chosen.quick else (chosen.steps, chosen.turns)
    nets = list(NETS)[:1] if chosen.quick else list(NETS)
    if "RANK" in os.environ:
        rank_main(steps, turns, chosen.batch_size, nets)
        return
    rows = [row for count in chosen.ranks for row in launch(count, sys.argv[1:])]
    print(table(rows))
    if chosen.out is not None:
        write_section(chosen.out, "data_parallel", {"rows": rows})


if __name__ == "__main__":
    main()
