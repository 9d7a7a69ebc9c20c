"""Seconds of local rules over those of backprop, at equal sample passes, against stored goals.

    python benchmarks/speed.py --out results [--only cnn rnn] [--turns 5] [--quick] [--check]
    python benchmarks/speed.py --out results --device cuda

On a CPU, one thread: MLPs, CNNs, recurrent layers, an adaptor and scikit-learn's MLP
(`speed_nets.py`), then the peak memory of plain CNNs of 2, 4, 8 and 16 layers. On a GPU the nets of
`speed_gpu.py`. The ways to train a net take turns in one process and the figures are medians over
the turns. Ratios are over the faster of two peers: a plain torch loop with fused Adam, and
`fit_backprop`. On small nets most of the time is overhead, so written-out backprop, which has
little of it, stands beside them (`speed_peers.py`).

`speed.json` (`speed-gpu.json`) is written after every net. With `--check`, the exit status is 1 if
a figure is worse than its goal in `speed_goals.toml` by more than 15 %.
"""

import argparse
import json
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import speed_gpu
import torch
from speed_nets import NETS, contest, plain_cnn, random_data
from speed_table import rows, table
from speed_turns import Contest, Row, compete, cpu_clock, gpu_clock, missed

import tpsgd
from tpsgd import Memory, rules
from tpsgd.common.units import size
from tpsgd.comparison.provenance import machine, versions

GOALS = Path(__file__).with_name("speed_goals.toml")
DEPTHS = "memory by depth"


def cpu_contests(quick: bool) -> dict[str, Callable[[], Contest]]:
    """The nets by name; the data of a net are made when its turn comes."""
    return {net.name: lambda n=net: contest(n.quick() if quick else n) for net in NETS}


def memory_by_depth() -> list[Row]:
    """Peak bytes by depth: flat for a local rule, rising for backprop."""
    data = random_data(512, 3, 32, 32)
    peaks, length = [], {"batch_size": 128, "epochs": 1}
    for depth in (2, 4, 8, 16):
        row: Row = {"depth": depth}
        plan = tpsgd.plan(plain_cnn(depth), (3, 32, 32), samples=512, **length)
        segments = plan["backprop, checkpointed"].segments
        micro = {"memory": Memory(micro_batch=8, reuse=False)}
        backprop: dict[str, Row] = {"": {}, ", checkpointed": {"segments": segments}}
        for form, settings in (backprop | {", micro-batch 8": micro}).items():
            run = tpsgd.fit_backprop(plain_cnn(depth), data, **length, **settings)
            row[f"backprop{form}"] = run.peak_bytes
        whole = {"memory": Memory(reuse=False)}
        readout, l2 = rules.readout(), rules.tpsgd_l2()
        for rule, form, settings in (
            (readout, "", whole), (l2, "", whole), (readout, ", micro-batch 8", micro),
        ):  # fmt: skip
            run = tpsgd.fit(plain_cnn(depth), data, rule=rule, **length, **settings)
            row[f"{rule.name}{form}"] = run.peak_bytes
        peaks.append(row)
        print("  ".join(f"{k} {size(v) if k != 'depth' else v}" for k, v in row.items()))
    return peaks


def options() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", nargs="+", default=[""], help="nets with one of these words")
    parser.add_argument("--turns", type=int, default=3, help="after one that warms up")
    parser.add_argument("--quick", action="store_true", help="a few batches of each net")
    parser.add_argument("--check", action="store_true", help="exit 1 where a goal is missed")
    return parser.parse_args()


def main() -> None:
    """Measure, write the file after each net, print the table and the goals that are missed."""
    chosen = options()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # vanished gradients would slow backprop through time down
    on_gpu = chosen.device == "cuda"
    contests = speed_gpu.contests(chosen.quick) if on_gpu else cpu_contests(chosen.quick)
    clock, file = (gpu_clock, "speed-gpu.json") if on_gpu else (cpu_clock, "speed.json")
    command = f"python benchmarks/speed.py --turns {chosen.turns}" + " --device cuda" * on_gpu
    record = {
        "benchmark": "speed",
        "command": command + " --quick" * chosen.quick,
        "machine": machine(chosen.device),
        "versions": versions(),
        "turns": chosen.turns,
        "speed": {},
    }
    chosen.out.mkdir(parents=True, exist_ok=True)

    def wanted(name: str) -> bool:
        return any(word in name for word in chosen.only)

    goals = tomllib.loads(GOALS.read_text(encoding="utf-8"))[chosen.device]
    if chosen.quick:
        print("--quick: too few batches to measure anything, set-up is most of the time")
    for name in filter(wanted, contests):
        record["speed"][name] = compete(contests[name](), chosen.turns, clock)
        (chosen.out / file).write_text(json.dumps(record, indent=1))
        print("\n".join(rows(name, record["speed"][name]["arms"], goals.get(name, {}))), flush=True)
    if not on_gpu and wanted(DEPTHS):
        record["memory"] = memory_by_depth()
        (chosen.out / file).write_text(json.dumps(record, indent=1))
    print(f"\n{table(record['speed'], goals)}")
    lines = missed(record["speed"], goals) if chosen.check else []
    if lines:
        sys.exit("\n".join(["", "goals that are missed by more than 15 %", *lines]))


if __name__ == "__main__":
    main()
