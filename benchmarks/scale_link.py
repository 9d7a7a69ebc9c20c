"""Seconds of an all-reduce by its bytes, and how busy the core is meanwhile; `scale.py` starts it.

torchrun --nproc-per-node 2 benchmarks/scale_link.py
"""

import argparse
import json
import statistics
import time

import torch
import torch.distributed as dist
from data_parallel import pin

SIZES = [4 << n for n in range(10, 23, 2)]  # bytes, from 4 KB to 16 MB


def all_reduce(count: int, repeats: int) -> tuple[float, float]:
    """Seconds of the sum of some bytes, and of the processor in it; a median of several."""
    numbers, taken = torch.ones(count // 4), []
    for _ in range(repeats):
        dist.barrier()
        wall, busy = time.perf_counter(), time.process_time()
        dist.all_reduce(numbers)
        taken.append((time.perf_counter() - wall, time.process_time() - busy))
        numbers.fill_(1.0)
    return statistics.median(t[0] for t in taken), statistics.median(t[1] for t in taken)


def main() -> None:
    """Print a row for each size."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=9, help="of each sum")
    repeats = parser.parse_args().repeats
    pin()
    dist.init_process_group("gloo")
    for count in SIZES:
        seconds, busy = all_reduce(count, repeats)
        if dist.get_rank() == 0:
            row = {"ranks": dist.get_world_size(), "bytes": count}
            print(json.dumps(row | {"seconds": seconds, "busy_seconds": busy}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
