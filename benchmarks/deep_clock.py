"""Seconds and memory of VGG11 on a GPU: blocks, backprop and its two ways to save memory.

    python benchmarks/deep_clock.py --device cuda --out results

Random images of the size and batches of the recipe; all arms in one process, each in its turn.
"""

from itertools import pairwise
from typing import Any

import torch

import tpsgd
from experiments.common import Row, Samples, arguments, origin, result_file
from experiments.deep import NETS
from tpsgd import rules

STEPS, EPOCHS, SIDE = 30, 3, 160
LOCAL, SMALL = {"rule": rules.auxiliary()}, tpsgd.Memory(micro_batch=16)
ARMS: dict[str, Row] = {
    "backprop": {},
    "4 blocks": LOCAL | {"blocks": 4},
    "1, 1, 2 and 6 layers": LOCAL | {"blocks": [1, 1, 2, 6]},
    "a layer per block": LOCAL,
    "4 blocks, micro-batches of 16": LOCAL | {"blocks": 4, "memory": SMALL},
    "backprop, micro-batches of 16": {"memory": SMALL},
    "backprop, 4 checkpointed segments": {"segments": 4},
}


def clock(arm: Row, data: Samples, device: str) -> dict[str, float]:
    """Milliseconds of a step, the least of some epochs, and the peak memory beyond the data."""
    torch.manual_seed(0)
    net, shape = NETS["vgg11"], tuple(data[0].shape[1:])
    model = net.model(shape).to(device)
    settings: Any = net.recipe.settings(shape, device, epochs=EPOCHS, seed=0) | arm
    train = tpsgd.fit if "rule" in arm else tpsgd.fit_backprop
    run = train(model, data, **settings)
    last = max(e.block for e in run.history)
    times = [e.seconds for e in run.history if e.block == last]
    seconds = min(b - a for a, b in pairwise(times))
    return {"ms": 1e3 * seconds / STEPS, "peak_bytes": run.peak_bytes or 0}


def main() -> None:
    """Measure every arm; the file is written after each."""
    options = arguments(__doc__).parse_args()
    record, save = result_file(options, "deep_clock")
    record |= origin("deep_clock", options.device)
    record["command"] = "python benchmarks/deep_clock.py --device cuda --out results"
    count = NETS["vgg11"].recipe.batch_size * STEPS
    x = torch.randn(count, 3, SIDE, SIDE, device=options.device)
    y = torch.arange(count, device=options.device) % 10
    data = x.contiguous(memory_format=torch.channels_last), y
    for name, arm in ARMS.items():
        row = record.setdefault("arms", {})[name] = clock(arm, data, options.device)
        base = record["arms"]["backprop"]
        time, memory = (row[key] / base[key] for key in ("ms", "peak_bytes"))
        print(f"{name:36} {row['ms']:8.2f} ms, time x{time:.2f}, memory x{memory:.2f}")
        save()


if __name__ == "__main__":
    main()
