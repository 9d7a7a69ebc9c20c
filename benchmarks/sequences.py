"""Bytes and seconds of learning over time, against backprop through time, by sequence length.

    python benchmarks/sequences.py --out results [--quick]

Random signals of 10 to 1,000 steps, 16 features, 256 units, batches of 64. The rules read them in
windows of 1 and of 16 steps; the memory is all that training holds beyond the data set, the batch
of input included. Arms take turns and the fastest turn counts: a busy machine only ever adds time.
Seconds hold the cost of following the memory in the first two batches, of 16 or of 4, for all.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tpsgd
from tpsgd import Memory, Run, rules
from tpsgd.common.units import size
from tpsgd.comparison.provenance import machine, versions

FEATURES, HIDDEN, BATCH, CLASSES = 16, 256, 64, 10
ARMS = {"readout": rules.readout(), "tpsgd-l1": rules.tpsgd_l1(), "drtp": rules.drtp()}


def model(layers: int) -> nn.Sequential:
    """Recurrent layers and a linear classifier."""
    stack = [
        tpsgd.Recurrent(HIDDEN if i else FEATURES, HIDDEN, sequence=i < layers - 1)
        for i in range(layers)
    ]
    return nn.Sequential(*stack, nn.Linear(HIDDEN, CLASSES))


def arms(data: Any, layers: int) -> dict[str, Run]:
    """Every arm once; the recurrent layers and the classifier have an epoch each."""
    torch.manual_seed(0)
    settings: dict[str, Any] = {"epochs": 1, "batch_size": BATCH}
    runs = {"backprop through time": tpsgd.fit_backprop(model(layers), data, **settings)}
    settings["memory"] = Memory(reuse=False)
    torch.manual_seed(0)
    runs["frozen"] = tpsgd.fit(model(layers), data, rule=rules.frozen(), **settings)
    for name, rule in ARMS.items():
        for window in (1, 16):
            torch.manual_seed(0)
            runs[f"{name}, window {window}"] = tpsgd.fit(
                model(layers), data, rule=rule, window=window, **settings
            )
    return runs


def measure(steps: int, layers: int, turns: int, batches: int) -> dict[str, Any]:
    """One length: each arm's peak and its fastest turn."""
    x = torch.randn(batches * BATCH, steps, FEATURES)
    data = x, torch.arange(len(x)) % CLASSES
    best: dict[str, Run] = {}
    for _ in range(turns):
        for arm, run in arms(data, layers).items():
            if arm not in best or run.seconds < best[arm].seconds:
                best[arm] = run
    reference = best["backprop through time"]
    rows = {
        arm: {
            "peak_bytes": run.peak_bytes,
            "seconds": run.seconds,
            "memory_ratio": run.peak_bytes / reference.peak_bytes,
            "time_ratio": run.seconds / reference.seconds,
        }
        for arm, run in best.items()
    }
    return {"steps": steps, "layers": layers, "arms": rows}


def main() -> None:
    """Measure, write `sequences.json` and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--quick", action="store_true", help="shorter sequences, one turn")
    options = parser.parse_args()
    lengths, turns = ((10, 50), 1) if options.quick else ((10, 100, 1000), 2)
    rows = []
    torch.set_flush_denormal(True)  # vanished gradients would slow backprop through time down
    for layers in (1, 2):
        for steps in lengths:
            rows.append(measure(steps, layers, turns, batches=4 if steps > 100 else 16))
            print(f"\n{steps} steps, {layers} layer{'s' * (layers > 1)}", flush=True)
            for arm, row in rows[-1]["arms"].items():
                print(
                    f"  {arm:22} {size(row['peak_bytes']):>9}  {row['memory_ratio']:5.2f}"
                    f"  {row['seconds']:7.2f} s  {row['time_ratio']:5.2f}",
                    flush=True,
                )
    record = {
        "benchmark": "sequences",
        "command": "python benchmarks/sequences.py" + (" --quick" if options.quick else ""),
        "machine": machine(),
        "versions": versions(),
        "settings": {"features": FEATURES, "hidden": HIDDEN, "batch_size": BATCH, "turns": turns},
        "rows": rows,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "sequences.json").write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
