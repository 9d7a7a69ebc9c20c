"""Training on 8 to 4,096 ranks on paper: local learning and backprop, data-parallel and pipelined.

    python benchmarks/data_parallel.py --out results; python benchmarks/pipeline.py --out results
    python benchmarks/scale.py --out results

The model (`scale_model.py`) computes the seconds and bytes of a step from the multiplications of
the plan, and from the speed of a machine and its link. First it is calibrated on this machine by
one process and by all-reduces, and checked against the steps of 2 and 4 processes that the other
two benchmarks have left in FOLDER/many.json (`scale_check.py`); `--no-check` leaves this out.

Then it says what larger places would do. The batch is that of all ranks together. A pipeline has
the number of stages that makes it fastest, with replicas on the other ranks; pipelined backprop
also has the best number of micro-batches: 1, 2 or 4 for every stage. With --out, all goes into the
section "scale" of many.json.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import data_parallel
from many import read, write_section
from scale_check import (
    Row,
    benchmark_nets,
    check_data_parallel,
    check_pipeline,
    link_from,
    machine_from,
)
from scale_model import (
    Block,
    Layout,
    Link,
    Machine,
    Place,
    backprop_seconds,
    local_seconds,
    rank_bytes,
)
from scale_nets import NETS, net, stages_of

from tpsgd.common.units import columns, size

RANKS = [1, *(2**n for n in range(3, 13))]
PLACES = {  # achieved speeds, not those of a data sheet
    "accelerators": Place(Machine(1e14, 1e11), Link(5e-6, 50e9)),
    "servers": Place(Machine(5e11, 4e9), Link(50e-6, 1.25e9)),
    "small boards": Place(Machine(1e10, 2e8), Link(5e-3, 6.25e6)),
}
Layouts = Callable[[list[Block], int, int], Iterator[Layout]]


def replicated(blocks: list[Block], ranks: int, batch: int) -> Iterator[Layout]:
    """Data-parallel: the whole net on every rank."""
    yield Layout((len(blocks),), ranks)


def pipelines(in_turns: bool = False, each: Sequence[int] = (1, 2, 4)) -> Layouts:
    """Pipelines of 2, 4, 8 ... stages, in as many replicas as there are ranks for.

    `each` has the micro-batches for every stage.
    """

    def layouts(blocks: list[Block], ranks: int, batch: int) -> Iterator[Layout]:
        count = 2
        while count <= min(ranks, len(blocks)):
            stages, replicas = stages_of(blocks, count), ranks // count
            for number in sorted({max(1, min(n * count, batch // replicas)) for n in each}):
                yield Layout(stages, replicas, number, in_turns)
            count *= 2

    return layouts


WAYS: dict[str, tuple[Layouts, bool]] = {  # whether it is backprop
    "data-parallel local": (replicated, False),
    "data-parallel backprop": (replicated, True),
    "pipelined local": (pipelines(each=[0]), False),
    "pipelined backprop, GPipe": (pipelines(), True),
    "pipelined backprop, 1F1B": (pipelines(in_turns=True), True),
}


def scale_rows(name: str, blocks: list[Block], batch: int, ranks: Sequence[int]) -> Iterator[Row]:
    """A row for each place, way and number of ranks; of a pipeline, with the fastest layout.

    `relative` is the number of samples per second and rank over that of backprop on one rank.
    """
    for where, place in PLACES.items():
        alone = backprop_seconds(blocks, Layout((len(blocks),)), batch, place)
        for way, (layouts, backprop) in WAYS.items():
            for count in ranks:
                rows = []
                for layout in layouts(blocks, count, batch):
                    samples = batch / layout.replicas
                    model = backprop_seconds if backprop else local_seconds
                    seconds = model(blocks, layout, samples, place)
                    row = {"net": name, "place": where, "way": way, "ranks": count}
                    row |= {"stages": len(layout.stages), "step_seconds": seconds}
                    row |= {"micro_batches": layout.micro_batches}
                    row |= {"samples_per_second": batch / seconds}
                    row |= {"relative": alone / seconds / count}
                    rows.append(row | {"bytes": rank_bytes(blocks, layout, samples, backprop)})
                if rows:
                    yield min(rows, key=lambda row: row["step_seconds"])


def leads(rows: Sequence[Row]) -> Row:
    """How much faster local learning is than backprop: the least and the most, on several ranks.

    `beyond_products` is the most beyond what it gains by fewer multiplications.
    """
    speed = {(r["net"], r["place"], r["ranks"], r["way"]): r["relative"] for r in rows}
    figures = {}
    for kind in ("data-parallel", "pipelined"):
        lead, beyond = [], []
        for *where, ranks, way in speed:
            if ranks > 1 and way == f"{kind} local":
                names = [name for name in WAYS if name.startswith(f"{kind} backprop")]
                best = max(speed[*where, ranks, name] for name in names)
                lead.append(speed[*where, ranks, way] / best)
                beyond.append(lead[-1] / speed[*where, 1, "data-parallel local"])
        figures[kind] = {"least": min(lead), "most": max(lead), "beyond_products": max(beyond)}
    return figures


def check(folder: Path, steps: int, turns: int) -> Row:
    """Calibrate the model on this machine, and set it beside what has been measured here."""
    words = [["--batch-size", str(size)] for size in (64, 128, 256)]
    words = [[*each, "--steps", str(steps), "--turns", str(turns)] for each in words]
    alone = [row for each in words for row in data_parallel.launch(1, each)]
    sums = data_parallel.launch(2, [], str(Path(__file__).with_name("scale_link.py")))
    nets, link, record = benchmark_nets(), link_from(sums), read(folder)
    places = {way: Place(machine_from(alone, nets, way), link) for way in ("local", "backprop")}
    rows: list[Row] = []
    if "data_parallel" in record:
        rows += check_data_parallel(record["data_parallel"]["rows"], nets, places)
    if "pipeline" in record:
        rows += check_pipeline(record["pipeline"], places)
    speeds = {way: asdict(place) for way, place in places.items()}
    return {"calibration": speeds, "alone": alone, "sums": sums, "check": rows}


def calibration_table(speeds: dict[str, Row]) -> str:
    """How fast a process of this machine is."""
    head = "way", "multiplications/s", "weights/s", "s per block", "latency", "bytes/s", "core"
    cells = [
        [way, *(f"{value:.3g}" for kind in ("machine", "link") for value in place[kind].values())]
        for way, place in speeds.items()
    ]
    return columns([head, *cells])


def check_table(rows: Sequence[Row]) -> str:
    """Predicted and measured milliseconds per step."""
    head = "way", "net", "ranks", "cores", "measured, ms", "predicted, ms", "error"
    cells = [
        (
            row["way"], row["net"], str(row["ranks"]), str(row["cores"]),
            f"{1e3 * row['measured']:.2f}", f"{1e3 * row['predicted']:.2f}", f"{row['error']:+.0%}",
        )
        for row in rows
    ]  # fmt: skip
    return columns([head, *cells])


def scale_table(rows: Sequence[Row], ranks: Sequence[int]) -> str:
    """Samples per second and rank over those of backprop on one rank, and bytes on most ranks."""
    lines: dict[tuple[str, str, str], dict[int, Row]] = {}
    for row in rows:
        lines.setdefault((row["net"], row["place"], row["way"]), {})[row["ranks"]] = row
    head = ["net", "place", "way", *map(str, ranks), "bytes"]
    cells = [
        [
            *key,
            *(f"{line[n]['relative']:.2f}" if n in line else "" for n in ranks),
            size(line[max(line)]["bytes"]),
        ]
        for key, line in lines.items()
    ]
    return columns([head, *cells])


def options() -> argparse.Namespace:
    """The words of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="folder of many.json")
    parser.add_argument("--batch-size", type=int, default=8192, help="of all ranks together")
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--steps", type=int, default=20, help="of a turn, to calibrate")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--no-check", action="store_true", help="the model alone")
    return parser.parse_args()


def main() -> None:
    """Check the model, then print what it says about many ranks."""
    chosen = options()
    record: Row = {}
    if not chosen.no_check:
        record = check(chosen.out or Path("results"), chosen.steps, chosen.turns)
        print(f"{calibration_table(record['calibration'])}\n\n{check_table(record['check'])}\n")
    nets = {name: net(name) for name in NETS}
    rows = [
        row
        for name, blocks in nets.items()
        for row in scale_rows(name, blocks, chosen.batch_size, chosen.ranks)
    ]
    print(scale_table(rows, chosen.ranks))
    if chosen.out is not None:
        record |= {"batch": chosen.batch_size, "nets": {k: figures(v) for k, v in nets.items()}}
        record |= {"places": {name: asdict(place) for name, place in PLACES.items()}}
        write_section(chosen.out, "scale", record | {"leads": leads(rows), "rows": rows})


def figures(blocks: Sequence[Block]) -> Row:
    """What a net takes as a whole."""
    return {
        "blocks": len(blocks),
        "weights": sum(block.weights for block in blocks),
        "local": sum(block.local for block in blocks),
        "backprop": sum(block.forward + block.backward for block in blocks),
    }


if __name__ == "__main__":
    main()
