"""A pipeline of blocks that learn by themselves, beside pipelines of backprop, on the same ranks.

    python benchmarks/pipeline.py --data mnist --model mlp:512,512,512,512,512 --out results

Ways to train: `simultaneous`, backprop and random hidden layers in one process; `pipeline`, that is
`simultaneous` on several ranks; `gpipe` and `1f1b`, backprop by torch.distributed.pipelining with
micro-batches, on the same stages. Every rank is a process pinned to a core, with one thread; if
there are more ranks than cores, several share a core, and what is then measured is not speed but
that nothing else goes wrong: `cores` is in every row.

A rank is busy when it does not wait for another (`utilisation`, the filling included);
`cpu_utilisation` is the share of the time in which its thread had the core. `peak_bytes` counts
tensors: of a `pipeline` the weights of the whole model, which every rank holds, of the peers those
of the rank. With --out, the rows go into the section "pipeline" of FOLDER/many.json.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from many import write_section
from torch import nn

import tpsgd
from tpsgd.common.units import columns, size
from tpsgd.comparison.provenance import describe
from tpsgd.engine.device import resident
from tpsgd.zoo.words import factory
from tpsgd_parallel.pipeline import Pipeline

ALONE, TOGETHER = ("simultaneous", "backprop", "frozen"), ("pipeline", "gpipe", "1f1b")
Row = dict[str, Any]


class TimedPipeline(Pipeline):
    """A pipeline that also measures how long its thread had the core."""

    cpu_seconds = 0.0

    def train(self, net: Any) -> None:
        """Train, and look at the thread's clock."""
        began = time.thread_time()
        super().train(net)
        self.cpu_seconds = time.thread_time() - began


def model_of(data: Any, options: argparse.Namespace) -> nn.Module:
    """The same net on every rank."""
    torch.manual_seed(options.seed)
    return factory(options.model, data.shape, len(data.classes), "relu")()


def stages_of(data: Any, options: argparse.Namespace, ranks: int) -> list[int]:
    """The stages that the plan chooses."""
    plan = tpsgd.plan(
        model_of(data, options), data.shape, batch_size=options.batch_size, others=False,
        ranks=ranks,
    )  # fmt: skip
    assert plan.pipeline is not None
    return plan.pipeline.stages


def fitted(way: str, model: nn.Module, data: Any, stages: list[int], options: Any) -> Row:
    """Train by `fit` or `fit_backprop`: what this rank has measured."""
    settings = {"epochs": options.epochs, "batch_size": options.batch_size, "seed": options.seed}
    if way == "backprop":
        run = tpsgd.fit_backprop(model, data.train, **settings)
    elif way in ALONE:
        rule = tpsgd.rules.frozen() if way == "frozen" else tpsgd.rules.readout()
        settings["order"] = tpsgd.simultaneous
        run = tpsgd.fit(model, data.train, rule=rule, **settings)
    else:
        parallel = TimedPipeline(stages)
        run = tpsgd.fit(model, data.train, parallel=parallel, **settings)
        rank, figures = int(os.environ["RANK"]), run.settings["pipeline"]
        row = {name: figures[name][rank] for name in ("busy_seconds", "peak_bytes")}
        return row | {"seconds": figures["seconds"], "cpu_seconds": parallel.cpu_seconds}
    row = {name: run.seconds for name in ("seconds", "busy_seconds", "cpu_seconds")}
    return row | {"peak_bytes": run.peak_bytes}


def work(way: str, file: Path, stages: list[int], options: argparse.Namespace) -> None:
    """Be a rank: train, and write what was measured."""
    rank = int(os.environ["RANK"])
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    data = tpsgd.data.load(options.data, max_train=options.max_train)
    model = model_of(data, options)
    if way in ("gpipe", "1f1b"):
        from pipeline_peer import train

        row = train(way, model, data.train, stages, options)
    else:
        row = fitted(way, model, data, stages, options)
    row["resident_bytes"] = resident()[1]
    if rank == 0:
        row["accuracy"] = tpsgd.evaluate(model, data.test)
    file.write_text(json.dumps(row))


def launch(way: str, stages: list[int], words: list[str]) -> list[Row]:
    """Start a process for each rank: what each of them has measured."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(len(stages))}
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{rank}.json" for rank in range(len(stages))]
        processes = [
            subprocess.Popen(
                [sys.executable, __file__, *words, "--rank", way, str(file), json.dumps(stages)],
                env=os.environ | place | {"RANK": str(rank), "OMP_NUM_THREADS": "1"},
            )
            for rank, file in enumerate(files)
        ]
        for process in processes:
            if process.wait():
                raise SystemExit(f"a rank of {way} ended with status {process.returncode}")
        return [json.loads(file.read_text()) for file in files]


def joined(way: str, stages: list[int], ranks: list[Row], options: argparse.Namespace) -> Row:
    """The measurements of all ranks as a row."""
    seconds = max(rank["seconds"] for rank in ranks)
    return {
        "way": way,
        "ranks": len(ranks),
        "cores": min(len(ranks), len(os.sched_getaffinity(0))),
        "stages": stages,
        "micro_batches": options.micro_batches if way in ("gpipe", "1f1b") else 1,
        "seconds_per_epoch": seconds / options.epochs,
        "utilisation": [rank["busy_seconds"] / seconds for rank in ranks],
        "cpu_utilisation": [rank["cpu_seconds"] / seconds for rank in ranks],
        "peak_bytes": [rank["peak_bytes"] for rank in ranks],
        "resident_bytes": [rank["resident_bytes"] for rank in ranks],
        "accuracy": ranks[0]["accuracy"],
    }


def table(rows: list[Row]) -> str:
    """The rows in aligned columns."""
    head = "way", "ranks", "cores", "s/epoch", "busy", "on core", "peak", "resident", "accuracy"
    return columns(
        [head]
        + [
            (
                row["way"], str(row["ranks"]), str(row["cores"]),
                f"{row['seconds_per_epoch']:.2f}", f"{mean(row['utilisation']):.0%}",
                f"{mean(row['cpu_utilisation']):.0%}", size(max(row["peak_bytes"])),
                size(max(row["resident_bytes"])), f"{row['accuracy']:.2%}",
            )
            for row in rows
        ]
    )  # fmt: skip


def parsed() -> argparse.Namespace:
    """The words of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", default="digits")
    parser.add_argument("--model", default="mlp:512,512,512,512,512")
    parser.add_argument("--max-train", type=int)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--micro-batches", type=int, default=8, help="of a batch, for backprop")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--ways", nargs="+", default=[*ALONE, *TOGETHER])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rank", nargs=3, help=argparse.SUPPRESS)  # way, file and stages
    return parser.parse_args()


def main() -> None:
    """Measure every way on every number of ranks."""
    options = parsed()
    if options.rank is not None:
        way, file, stages = options.rank
        return work(way, Path(file), json.loads(stages), options)
    data = tpsgd.data.load(options.data, max_train=options.max_train)
    blocks = len(tpsgd.split(model_of(data, options)))
    jobs = [(way, [blocks]) for way in ALONE if way in options.ways]
    for count in options.ranks:
        stages = stages_of(data, options, count)
        jobs += [(way, stages) for way in TOGETHER if way in options.ways]
    rows: list[Row] = []
    for way, stages in jobs:
        rows.append(joined(way, stages, launch(way, stages, sys.argv[1:]), options))
        print(json.dumps(rows[-1]), flush=True)
    print(table(rows))
    if options.out is not None:
        record = {"data": describe(data), "model": options.model, "epochs": options.epochs}
        record |= {"batch_size": options.batch_size, "rows": rows}
        write_section(options.out, "pipeline", record)


if __name__ == "__main__":
    main()
