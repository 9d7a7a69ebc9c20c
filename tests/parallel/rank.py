"""One rank of a job: trains the cases of a list, writes what it has, and then fails as told.

python rank.py FOLDER CASES FAILING_RANK FAILURE
"""

import math
import os
import shutil
import sys
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
sys.path.insert(0, str(Path(__file__).parents[1]))

from parallel.cases import CASES, MLP, OF_SAMPLES_TOGETHER, POINTS, TO_RESUME  # noqa: E402
from parallel.forked import forked  # noqa: E402

import tpsgd  # noqa: E402
from tpsgd.engine import assemble  # noqa: E402
from tpsgd.engine.sources.reuse import InputReuse  # noqa: E402


def this_rank() -> int:
    """The number of this process in its job."""
    return int(os.environ["RANK"])


def main(folder: Path, names: list[str], failing: int, failure: str) -> None:
    """What a rank does."""
    rank = this_rank()
    cases = CASES | OF_SAMPLES_TOGETHER
    shown, results = [], {}
    for name in names:
        weights, run = cases[name].train(
            parallel=tpsgd.data_parallel(),
            progress=lambda *numbers: shown.append(numbers),
            callbacks=[lambda epoch, name=name: shown.append(name)],
        )
        results[name] = weights, run.as_dict()
    refusals = {name: refusal(name, folder) for name in ("checkpoint", "loader", "batches")}
    results["after refusals"] = TO_RESUME.train(parallel=tpsgd.data_parallel())[0]
    results["resumed"] = resume(folder)
    results["interrupted"] = be_interrupted(folder)
    results["stopped by rank 0"] = stop_early()
    results["unequal memory"] = with_unequal_memory()
    results["dropped"] = dropped()
    record = {"results": results, "shown": shown, "refusals": refusals}
    torch.save(record, folder / f"{rank}.pt")
    (folder / f"{rank}.txt").write_text(fail(failing, failure))


def refusal(name: str, folder: Path) -> str:
    """The sentence that refuses ranks that differ; afterwards they can train together again."""
    rank, settings = this_rank(), {}
    data = TensorDataset(*POINTS())
    if name == "loader":
        generator = torch.Generator().manual_seed(rank)
        data = DataLoader(data, 10, shuffle=True, generator=generator)
    if name == "batches":
        data = DataLoader(data, 10 if rank else 15)
    if name == "checkpoint" and rank == 0:
        settings = {"checkpoint": folder / "of rank 0"}
    try:
        tpsgd.fit(MLP().double(), data, parallel=tpsgd.data_parallel(), epochs=1, **settings)
    except tpsgd.TpsgdError as error:
        return str(error)
    return ""


def dropped() -> torch.Tensor:
    """Which outputs of a dropout are zero in the first batch of an epoch."""
    seen = []
    model = nn.Sequential(nn.Linear(6, 64), nn.Dropout(), nn.Linear(64, 3)).double()
    model[1].register_forward_hook(lambda module, x, y: seen.append(y == 0))
    tpsgd.fit(model, POINTS(), epochs=1, parallel=tpsgd.data_parallel(), batch_size=12)
    return seen[-1][:3]


def resume(folder: Path) -> tuple:
    """Go on from the checkpoint that one process has written."""
    checkpoint = tpsgd.Checkpoint(folder / "of one", every=0, resume=True)
    weights, run = TO_RESUME.train(parallel=tpsgd.data_parallel(), checkpoint=checkpoint)
    return weights, run.as_dict()


def be_interrupted(folder: Path) -> tuple:
    """Leave a checkpoint of the middle of a run, for another number of processes."""
    checkpoint = tpsgd.Checkpoint(folder / "whole", every=0)

    def copy(epoch):
        if (epoch.block, epoch.epoch) == (2, 2):
            shutil.copytree(folder / "whole", folder / "of ranks")

    settings = {"checkpoint": checkpoint, "callbacks": [copy]}
    weights, run = TO_RESUME.train(parallel=tpsgd.data_parallel(), **settings)
    return weights, run.as_dict()


def with_unequal_memory() -> tuple:
    """Rank 0 alone has room for the inputs of the next block."""
    free_bytes = lambda device: math.inf if this_rank() == 0 else 0  # noqa: E731
    with patch.object(assemble, "InputReuse", partial(InputReuse, free_bytes=free_bytes)):
        weights, run = CASES["loader, sequential"].train(parallel=tpsgd.data_parallel())
    return weights, run.as_dict()


def stop_early() -> tuple:
    """A callback of rank 0 alone stops a block on all ranks."""
    stop = [lambda epoch: this_rank() == 0 and epoch.block == 1]
    weights, run = TO_RESUME.train(parallel=tpsgd.data_parallel(), callbacks=stop)
    return weights, run.as_dict()


def fail(failing: int, failure: str) -> str:
    """Train until a rank fails; what the others are told."""
    model, calls = MLP().double(), iter(range(1000))

    def hook(*_):
        if next(calls) == 7 and this_rank() == failing:
            if failure == "dies":
                os.kill(os.getpid(), 9)
            raise ValueError("broken on purpose")

    model[0].register_forward_hook(hook)
    settings = {"epochs": 50, "batch_size": 8, "order": tpsgd.simultaneous}
    try:
        tpsgd.fit(model, POINTS(), **settings, parallel=tpsgd.data_parallel())
    except tpsgd.TpsgdError as error:
        return str(error)
    except ValueError as error:
        return f"its own error: {error}"
    return "nothing"


if __name__ == "__main__":
    folder, count, port, names, failing, failure = sys.argv[1:]
    TO_RESUME.train()  # loads what torch loads when it is needed
    if not forked(int(count), port):
        main(Path(folder), names.split(";"), int(failing), failure)
