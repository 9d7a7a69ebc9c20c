"""Kill training at random moments and resume it: the weights must be those of an unkilled run.

    python benchmarks/kill_and_resume.py --kills 200

Each run trains in a process of its own, which is killed with SIGKILL after a random time and
started again until it ends by itself. A checkpoint is written after every epoch of a net so small
that much of the time goes into writing: many kills come while a file is written. The processes are
forks, which have torch already.
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import tpsgd
from tpsgd.files import write_whole
from tpsgd.saved.tensors import from_bytes, to_bytes

RESULT = "weights.safetensors"
MOMENTUM = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
RUNS: dict[str, dict[str, Any]] = {
    "sequential, Adam": {"epochs": 3},
    "simultaneous, momentum": {
        "schedule": tpsgd.simultaneous, "optimizer": MOMENTUM, "epochs": [4, 6, 5],
        "lr_schedule": tpsgd.one_cycle(),
    },
    "learned codes, ridge head": {
        "rule": tpsgd.rules.readout(learned=True), "epochs": 4,
        "optimizer": [tpsgd.sgd, tpsgd.sgd, tpsgd.ridge()],
    },
}  # fmt: skip


def train(name: str, folder: Path | None = None) -> dict[str, Tensor]:
    """The weights of a small net after training; in a folder, with checkpoints."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Linear(12, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 64), nn.Tanh()),
        nn.Linear(64, 4),
    )
    data = torch.randn(256, 12), torch.arange(256) % 4
    settings = dict(RUNS[name])
    if folder is not None:
        settings["checkpoint"] = tpsgd.Checkpoint(folder, every=0, resume=True)
    tpsgd.fit(model, data, batch_size=32, **settings)
    return {key: p.detach() for key, p in model.state_dict().items()}


def start(name: str, folder: Path) -> int:
    """Train in another process, which ends with status 0 once its weights are in the folder."""
    if process := os.fork():
        return process
    status = 1
    try:
        write_whole(folder / RESULT, to_bytes(train(name, folder)))
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


def main() -> None:
    """Kill and resume until there were enough kills; the last line says how many."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    draw = random.Random(options.seed)
    expected, seconds = {}, {}
    for name in RUNS:
        expected[name] = train(name)
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            train(name, Path(folder))
        seconds[name] = time.monotonic() - began
    kills = runs = while_writing = 0
    while kills < options.kills or not runs:
        name = list(RUNS)[runs % len(RUNS)]
        with tempfile.TemporaryDirectory() as text:
            folder = Path(text)
            while not ended(start(name, folder), _life(draw, seconds[name], kills < options.kills)):
                kills += 1
                files = [file.name for file in folder.iterdir() if file.name != RESULT]
                part = any(file.endswith(".part") for file in files)
                while_writing += part or sum(f.endswith(".safetensors") for f in files) > 1
            weights = from_bytes((folder / RESULT).read_bytes(), folder)
        for key, value in expected[name].items():
            if not torch.equal(value, weights[key]):
                sys.exit(f"{name}: {key} differs after {kills} kills")
        runs += 1
    print(f"{kills} kills, {while_writing} while a checkpoint was written; {runs} runs equal")


def _life(draw: random.Random, seconds: float, killed: bool) -> float:
    """The time until a process is killed; without a kill, ten minutes are enough for any."""
    return draw.uniform(0, 1.2) * seconds if killed else 600.0


if __name__ == "__main__":
    main()
