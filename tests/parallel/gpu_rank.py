"""A rank with a GPU: it trains some cases there, and writes its weights for `test_gpu.py`.

    RANK=0 WORLD_SIZE=1 ... python gpu_rank.py FOLDER BACKEND NAMES

NAMES are those of cases, separated by semicolons; "pipeline: NAME" trains one in a pipeline.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

from parallel.cases import CASES

import tpsgd


def main(folder: Path, backend: str, names: list[str]) -> None:
    """Train the cases; the backend of the library's choice is written with the weights."""
    if backend:
        dist.init_process_group(backend)
    results = {}
    for name in names:
        way, _, case = name.rpartition(": ")
        parallel = tpsgd.pipeline() if way else tpsgd.data_parallel()
        weights, _ = CASES[case].train(parallel=parallel, device="cuda")
        results[name] = {key: t.cpu() for key, t in weights.items()}
    rank = os.environ["RANK"]
    torch.save((dist.get_backend_config(), results), folder / f"{rank}.pt")


if __name__ == "__main__":
    folder, backend, names = sys.argv[1:]
    main(Path(folder), backend, names.split(";"))
