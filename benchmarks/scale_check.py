"""The model of scale on this machine: calibrated by one process and by all-reduces, then checked.

A process alone, with batches of several sizes, says how fast it computes; all-reduces of two
processes say how fast they send. Steps of two and four processes are then predicted, and set beside
what `data_parallel.py` and `pipeline.py` have measured (of several turns, the fastest: others may
have used the cores). Nothing is fitted to those.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import data_parallel
import numpy as np
from scale_model import (
    Block,
    Layout,
    Link,
    Machine,
    Place,
    backprop_seconds,
    local_seconds,
    local_total,
)
from scale_nets import blocks_of
from scipy.optimize import nnls

from tpsgd.zoo.words import factory

Row = dict[str, Any]
ARMS = {"local": "readout, overlapped", "backprop": "backprop, DDP"}


def machine_from(rows: Sequence[Row], nets: dict[str, list[Block]], way: str) -> Machine:
    """The speed of a process: least squares on the relative errors of its steps."""
    terms, seconds = [], []
    for row in rows:
        if row["arm"] == ARMS[way]:
            blocks = nets[row["net"]]
            products = sum(b.local if way == "local" else b.forward + b.backward for b in blocks)
            weights = sum(b.weights for b in blocks)
            terms.append([row["batch"] * products, weights, len(blocks)])
            seconds.append(min(row["turns"]))
    per_product, per_weight, per_block = fitted(terms, seconds)
    return Machine(inverse(per_product), inverse(per_weight), per_block)


def link_from(rows: Sequence[Row]) -> Link:
    """Latency and bandwidth from all-reduces of two ranks, and the core's share in the largest."""
    latency, per_byte = fitted([[2.0, row["bytes"]] for row in rows], [r["seconds"] for r in rows])
    largest = max(rows, key=lambda row: row["bytes"])
    return Link(latency, inverse(per_byte), min(1.0, largest["busy_seconds"] / largest["seconds"]))


def fitted(terms: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Coefficients, 0 or more, whose sums of terms are nearest to the seconds in proportion."""
    matrix = np.array(terms) / np.array(seconds)[:, None]
    scale = matrix.max(axis=0)
    return (nnls(matrix / scale, np.ones(len(seconds)))[0] / scale).tolist()


def inverse(seconds: float) -> float:
    """How many per second."""
    return 1 / seconds if seconds else math.inf


def crowded(place: Place, ranks: int, cores: int) -> Place:
    """The speed of ranks of which several share a core."""
    times = max(1.0, ranks / cores)
    machine, link = place.machine, place.link
    slower = 1 + link.host * (times - 1)
    return Place(
        Machine(machine.products / times, machine.weights / times, machine.overhead * times),
        replace(link, latency=link.latency * slower, bandwidth=link.bandwidth / slower),
    )


def benchmark_nets() -> dict[str, list[Block]]:
    """The blocks of the nets of `data_parallel.py`."""
    return {
        name: blocks_of(data_parallel.mlp(*sizes), (data_parallel.FEATURES,))
        for name, sizes in data_parallel.NETS.items()
    }


def check_data_parallel(
    rows: Sequence[Row], nets: dict[str, list[Block]], places: dict[str, Place]
) -> list[Row]:
    """Predicted and measured steps of data-parallel training."""
    checked = []
    for row in rows:
        for way, arm in ARMS.items():
            if row["arm"] == arm:
                blocks, ranks = nets[row["net"]], row["ranks"]
                place = crowded(places[way], ranks, row["cores"])
                seconds = local_seconds if way == "local" else backprop_seconds
                layout = Layout((len(blocks),), ranks)
                predicted = seconds(blocks, layout, row["batch"] / ranks, place)
                name = f"data-parallel {way}"
                checked.append(comparison(name, row["net"], row, min(row["turns"]), predicted))
    return checked


def check_pipeline(section: Row, places: dict[str, Place]) -> list[Row]:
    """Predicted and measured steps of pipelines."""
    data, size = section["data"], section["batch_size"]
    shape = tuple(data["shape"])
    blocks = blocks_of(factory(section["model"], shape, data["classes"], "relu")(), shape)
    checked = []
    for row in section["rows"]:
        way, ranks = row["way"], row["ranks"]
        if way not in ("pipeline", "gpipe", "1f1b"):
            continue
        local = way == "pipeline"
        place = crowded(places["local" if local else "backprop"], ranks, row["cores"])
        layout = Layout(tuple(row["stages"]), 1, row["micro_batches"], way == "1f1b")
        if local:
            steps = -(-data["train"] // size)
            batches = steps * section["epochs"]
            predicted = local_total(blocks, layout, size, place, batches) / batches
        else:
            steps = data["train"] // size  # it leaves out the last batch, which is smaller
            predicted = backprop_seconds(blocks, layout, size, place)
        name = "pipelined local" if local else f"pipelined backprop, {way}"
        measured = row["seconds_per_epoch"] / steps
        checked.append(comparison(name, section["model"], row, measured, predicted))
    return checked


def comparison(way: str, net: str, row: Row, measured: float, predicted: float) -> Row:
    """A row of the check."""
    return {
        "way": way,
        "net": net,
        "ranks": row["ranks"],
        "cores": row["cores"],
        "measured": measured,
        "predicted": predicted,
        "error": predicted / measured - 1,
    }
