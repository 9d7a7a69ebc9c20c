"""Kill a command at random moments and start it again: `python killed.py COMMAND KILLS SEED`.

Each run is a fork, which has torch already, in a folder of its own. After every kill, what is there
must be whole or nothing; the run that is not killed must end with the results of one that never
was. The last line says how many kills there were.
"""

import contextlib
import importlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file

from tpsgd.cli import app

NET = """
import torch
from torch import nn
from tpsgd_adapt import Backbone

def make():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Backbone(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)), ["1"])
"""
RESUMED = ("--checkpoint", "kept", "--resume", "--out", "out")
MODEL = ("--data", "points.npz", "--model", "mlp:8")
BACKBONE = ("--backbone", "net.py:make", "--data", "points.npz", "--convs", "0")
COMMANDS = {
    "compare": ("compare", *MODEL, "--rules", "readout,zorb", "--epochs", "3", *RESUMED),
    "adapt": ("adapt", *BACKBONE, "--dense", "1", "--epochs", "3", *RESUMED),
    "search": ("search", *MODEL, "--rule", "drtp", "--rates", ".01,.1", "--epochs", "3", *RESUMED),
    "search-adaptors": ("search", *BACKBONE, "--dense", "0,1", "--epochs", "2", *RESUMED),
    "export-c": ("export", "c", *MODEL, "--out", "out", "--overwrite"),
    "export-onnx": ("export", "onnx", *MODEL, "--out", "out/step.onnx", "--overwrite"),
}
MAIN = {"export-c": "net.h", "export-onnx": "step.onnx"}  # without which the others are of no use


def prepare(folder: Path) -> None:
    """The files that the commands read."""
    folder.mkdir()
    (folder / "net.py").write_text(NET)
    draw = np.random.default_rng(0)
    y = np.arange(60) % 3
    x = (draw.normal(size=(60, 6)) + y[:, None]).astype(np.float32)
    np.savez(folder / "points.npz", x=x, y=y)


def start(words: tuple[str, ...], folder: Path) -> int:
    """A process that runs a command in a folder."""
    if process := os.fork():
        return process
    status = 1
    try:
        os.chdir(folder)
        with open("printed", "w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            sys.argv = ["tpsgd", *words]
            try:
                app.main()
            except SystemExit as ended:
                status = int(ended.code or 0)
            sys.stdout.flush()
            sys.stderr.flush()
    finally:
        os._exit(status)


def status_of(process: int, seconds: float) -> int | None:
    """The exit status of a process; None if it had to be killed after this time."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pid, status = os.waitpid(process, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.001)
    os.kill(process, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    return None if status == -signal.SIGKILL else status


def results(command: str, folder: Path) -> object:
    """What a command has written, without what differs from run to run."""
    out = folder / "out"
    if command in MAIN:
        return {f.name: f.read_bytes() for f in sorted(out.iterdir()) if f.name[0] != "."}
    if command == "compare":
        record = json.loads((out / "results.json").read_text())
        assert (out / "report.html").exists()
        return accuracies(record["arms"])
    if command == "adapt":
        (file,) = out.glob("*.safetensors")
        tensors = {name: t.tolist() for name, t in load_file(file).items()}
        record = json.loads((out / "record.json").read_text())
        return tensors, [(row["arm"], row["accuracy"]) for row in record["arms"]]
    return accuracies(json.loads((out / "search.json").read_text()))


def accuracies(value: object) -> list[object]:
    """All accuracies in a record, wherever they are."""
    if isinstance(value, list):
        return [found for item in value for found in accuracies(item)]
    if not isinstance(value, dict):
        return []
    own = [value[key] for key in ("accuracy", "accuracies") if key in value]
    return own + [found for item in value.values() for found in accuracies(item)]


def main(command: str, kills: int, seed: int) -> None:
    """Kill a command so often, then let it end."""
    torch.set_num_threads(1)
    draw, words = random.Random(seed), COMMANDS[command]
    other = tuple("mlp:12" if word == "mlp:8" else word for word in words)
    with tempfile.TemporaryDirectory() as place:
        whole, folder = Path(place, "whole"), Path(place, "killed")
        prepare(whole)
        prepare(folder)
        expected, seconds = [], 0.0
        for variant in (other, words) if command in MAIN else (words,):
            began = time.monotonic()
            if status_of(start(variant, whole), 600):
                sys.exit((whole / "printed").read_text())
            seconds = time.monotonic() - began
            expected.append(results(command, whole))
        count = 0
        while count < kills:
            variant = draw.choice([words, other]) if command in MAIN else words
            status = status_of(start(variant, folder), draw.uniform(0.05, 1.1) * seconds)
            if status:
                sys.exit(f"status {status}: " + (folder / "printed").read_text())
            count += status is None
            main_file = folder / "out" / MAIN.get(command, "no file")
            if main_file.exists() and results(command, folder) not in expected:
                sys.exit(f"{main_file.parent} has files of two exports")
        unasked = tuple(word for word in words if word not in ("--resume", "--overwrite"))
        status = status_of(start(unasked, folder), 600)
        printed = (folder / "printed").read_text()
        # a plan may be printed first, where a checkpoint of a later arm is the reason
        *_, last = printed.splitlines() or [""]
        refused = status == 2 and last.startswith("tpsgd: ") and "Traceback" not in printed
        if status and not refused:
            sys.exit(f"status {status}: {printed}")
        if status_of(start(words, folder), 600):
            sys.exit((folder / "printed").read_text())
        if results(command, folder) != expected[-1]:
            sys.exit(f"{command} has other results after {count} kills")
        print(f"{count} kills in {seconds:.1f} s each; without being asked to go on: {printed}")


if __name__ == "__main__":
    for package in ("onnx", "onnxruntime", "matplotlib.figure", "sklearn.datasets"):
        with contextlib.suppress(ImportError):
            importlib.import_module(package)
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
