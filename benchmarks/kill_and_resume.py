"""Kill training at random moments and resume it: the weights must be those of an unkilled run.

    python benchmarks/kill_and_resume.py --kills 200 --out results

Each run trains in a process of its own, which is killed with SIGKILL after a random time and
started again until it ends by itself. A checkpoint is written after every epoch of a net so small
that much of the time goes into writing: many kills come while a file is written. The processes are
forks, which have torch already. Of a comparison, the accuracies and losses of all arms are
compared. With --out, the figures go into FOLDER/robustness.json; those of pieces with different
seeds are added.
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from robustness import add_figures
from torch import Tensor, nn

import tpsgd
from tpsgd.common.files import write_whole
from tpsgd.saved.folder import from_bytes, to_bytes

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a fork cannot use the GPU of its parent
RESULT = "weights.safetensors"
MOMENTUM = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
Tensors = dict[str, Tensor]


def samples(*shape: int) -> tuple[Tensor, Tensor]:
    """Random samples of four classes."""
    random_numbers = torch.Generator().manual_seed(0)
    return torch.randn(*shape, generator=random_numbers), torch.arange(shape[0]) % 4


def mlp() -> nn.Module:
    """A small net with dropout."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Linear(12, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 64), nn.Tanh()),
        nn.Linear(64, 4),
    )


def recurrent() -> nn.Module:
    """Two recurrent layers; the default solves the last layer."""
    torch.manual_seed(0)
    return nn.Sequential(
        tpsgd.Recurrent(3, 24, sequence=True), tpsgd.Recurrent(24, 24), nn.Linear(24, 4)
    )


def train(
    make: Callable[[], nn.Module], shape: tuple[int, ...], checkpoint: Any, **settings: Any
) -> Tensors:
    """The weights of a net after training."""
    model = make()
    tpsgd.fit(model, samples(*shape), batch_size=32, checkpoint=checkpoint, **settings)
    return {key: p.detach() for key, p in model.state_dict().items()}


def compare(checkpoint: Any) -> Tensors:
    """The accuracies and losses of all arms of a comparison."""
    x, y = samples(256, 12)
    data = tpsgd.data.Data("random", (x, y), (x, y), ("a", "b", "c", "d"), (12,), "")
    record = tpsgd.compare(
        data, mlp, ["readout", "zorb"], restarts=2, epochs=2, batch_size=32, checkpoint=checkpoint
    )
    losses = {r.arm.name: [e.loss for run in r.runs for e in run.history] for r in record.results}
    if any(r.error for r in record.results):
        raise SystemExit(str([r.error for r in record.results]))
    return {
        r.arm.name: torch.tensor([*r.accuracies, *losses[r.arm.name]], dtype=torch.float64)
        for r in record.results
    }


FLAT, SERIES = (256, 12), (128, 9, 3)
RUNS: dict[str, Callable[[Any], Tensors]] = {
    "sequential, Adam": lambda kept: train(mlp, FLAT, kept, epochs=3),
    "simultaneous, momentum": lambda kept: train(
        mlp, FLAT, kept, order=tpsgd.simultaneous, optimizer=MOMENTUM, epochs=[4, 6, 5],
        lr_schedule=tpsgd.one_cycle(),
    ),
    "learned codes, ridge head": lambda kept: train(
        mlp, FLAT, kept, rule=tpsgd.rules.readout(learned=True), epochs=4,
        optimizer=[tpsgd.sgd, tpsgd.sgd, tpsgd.ridge()],
    ),
    "recurrent": lambda kept: train(recurrent, SERIES, kept, epochs=3),
    "recurrent, simultaneous": lambda kept: train(
        recurrent, SERIES, kept, epochs=3, order=tpsgd.simultaneous
    ),
    "compare": compare,
}  # fmt: skip


def in_folder(folder: Path) -> tpsgd.Checkpoint:
    """A checkpoint after every epoch, to go on from."""
    return tpsgd.Checkpoint(folder, every=0, resume=True)


def start(name: str, folder: Path) -> int:
    """Train in another process, which ends with status 0 once its result is beside the folder."""
    if process := os.fork():
        return process
    status = 1
    try:
        write_whole(folder.parent / RESULT, to_bytes(RUNS[name](in_folder(folder))))
        status = 0
    finally:
        os._exit(status)


def ended(process: int, seconds: float) -> bool:
    """Whether a process has ended by itself after this time; it is killed if it has not."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pid, status = os.waitpid(process, os.WNOHANG)
        if pid:
            if status:
                raise SystemExit(f"a process ended with status {status}")
            return True
        time.sleep(0.0005)
    os.kill(process, signal.SIGKILL)
    _, status = os.waitpid(process, 0)
    return not status  # it may have ended just before


def half_written(folder: Path) -> bool:
    """Whether a process was killed while it wrote: a folder has a part, or tensors of two."""
    folders = [folder, *(f for f in folder.rglob("*") if f.is_dir())]
    names = [[file.name for file in f.iterdir()] for f in folders if f.is_dir()]
    return any(
        any(name.endswith(".part") for name in each)
        or sum(name.endswith(".safetensors") for name in each) > 1
        for each in names
    )


def kill_until_it_ends(
    name: str, draw: random.Random, seconds: float, most: int
) -> tuple[Tensors, Counter[str]]:
    """The result of a run that was killed at most so often, and the kills."""
    counts: Counter[str] = Counter(kills=0, while_writing=0, runs=1)
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text) / "checkpoint"
        while True:
            life = draw.uniform(0, 1.2) * seconds if counts["kills"] < most else 600.0
            if ended(start(name, folder), life):
                return from_bytes((folder.parent / RESULT).read_bytes(), folder), counts
            counts["kills"] += 1
            counts["while_writing"] += half_written(folder)


def main() -> None:
    """Kill and resume until there were enough kills; the last line says how many."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    draw = random.Random(options.seed)
    expected, seconds = {}, {}
    for name in options.only:
        expected[name] = RUNS[name](None)
    for name in options.only:
        began = time.monotonic()
        kill_until_it_ends(name, draw, seconds=600.0, most=0)
        seconds[name] = time.monotonic() - began
    counts: dict[str, Counter[str]] = {name: Counter() for name in options.only}
    total: Counter[str] = Counter()
    while total["kills"] < options.kills or not all(counts.values()):
        name = min(options.only, key=lambda n: counts[n]["kills"])
        most = max(1, options.kills - total["kills"])
        tensors, of_run = kill_until_it_ends(name, draw, seconds[name], most)
        counts[name] += of_run
        total += of_run
        for key, value in expected[name].items():
            if not torch.equal(value, tensors[key]):
                sys.exit(f"{name}: {key} differs after {of_run['kills']} kills")
    if options.out is not None:
        figures = ("kills", "while_writing", "runs")
        rows = {name: {key: each[key] for key in figures} for name, each in counts.items()}
        add_figures(options.out, "kills", rows)
    kills, writing, runs = (total[key] for key in ("kills", "while_writing", "runs"))
    print(f"{kills} kills, {writing} while a checkpoint was written; {runs} runs equal")


if __name__ == "__main__":
    main()
