"""What the experiments share: arguments, result files, decaying rates, choices on held-out data."""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

import tpsgd
from experiments.merge import read
from tpsgd.common.files import writable_folder, write_whole
from tpsgd.comparison.provenance import machine, versions

Row = dict[str, Any]
Samples = tuple[Tensor, Tensor]
T = TypeVar("T")


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """A parser with the arguments that every experiment has."""
    parser = argparse.ArgumentParser(
        description=(doc or "").splitlines()[0], conflict_handler="resolve"
    )
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder of the file")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--again", action="store_true", help="also what the file has already")
    parser.add_argument(
        "--smoke", action="store_true", help="artificial samples, one short run: does it work?"
    )
    return parser


def load(name: str, options: argparse.Namespace) -> tpsgd.data.Data:
    """A data set, or artificial samples in its form for `--smoke`."""
    if options.smoke:
        return _stand_in(name)
    return tpsgd.data.load(name, max_train=getattr(options, "max_train", None))


def with_data(names: Iterable[str], build: Callable[[str], T]) -> Iterator[tuple[str, T]]:
    """Each name and what is built of its data set; one that cannot be had is left out."""
    for name in names:
        try:
            built = build(name)
        except tpsgd.TpsgdError as error:
            print(f"{name} is left out: {error}", flush=True)
            continue
        yield name, built


def program(main: Callable[[], None]) -> None:
    """Run an experiment's `main`; a mistake is one line, and so is Ctrl-C."""
    try:
        main()
    except tpsgd.TpsgdError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


def is_complete(row: Row | None, restarts: int, options: argparse.Namespace) -> bool:
    """Whether a row of the file has all its restarts, so that a stopped run goes on after it."""
    return bool(row) and len(row["accuracies"]) >= restarts and not options.again


def result_file(options: argparse.Namespace, name: str) -> tuple[Row, Callable[[], Any]]:
    """The record in a file, empty if there is none, and a function that writes it back.

    Smoke runs have a file of their own, so that they never mix with results.
    """
    name += "-smoke" * options.smoke
    file = writable_folder(options.out) / f"{name}.json"
    record: Row = read(file) if file.exists() else {}
    record["experiment"] = name
    return record, lambda: write_whole(file, json.dumps(record, indent=1).encode())


def origin(name: str, device: str, *words: str) -> Row:
    """The command, the machine and the versions of a record."""
    command = " ".join([f"python -m experiments.{name} --out results", *words])
    used = versions() | {"commit": commit()}
    return {"command": command, "machine": machine(device), "versions": used}


@cache
def commit() -> str | None:
    """The commit of the code: `$TPSGD_COMMIT`, for a copy without its history, or git's."""
    if word := os.environ.get("TPSGD_COMMIT"):
        return word
    words = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def accuracies(shares: Sequence[float], before: Row | None = None) -> Row:
    """Test accuracies of the restarts, 0..1, with those of a row; their mean and deviation.

    The commit is that of the last restarts, `commits` has that of each.
    """
    row: Row = before or {"accuracies": []}
    every = [*row["accuracies"], *shares]
    commits = row.get("commits", [row.get("commit")] * len(row["accuracies"]))
    deviation = stdev(every) if len(every) > 1 else 0.0
    figures = {"accuracy": fmean(every), "deviation": deviation, "accuracies": every}
    return figures | {"commit": commit(), "commits": [*commits, *[commit()] * len(shares)]}


def best_rate(rates: Iterable[float], score: Callable[[float], float]) -> Row:
    """The learning rate with the highest score on held-out samples, and all the scores."""
    scores: dict[float, float] = {}
    for lr in rates:
        try:
            scores[lr] = score(lr)
        except tpsgd.TpsgdError:  # training diverged
            scores[lr] = 0.0
    return {"lr": max(scores, key=lambda lr: scores[lr]), "held_out": scores}


def linear_decay(epochs: int) -> Callable[[Optimizer], LambdaLR]:
    """A learning rate that falls to 0 in a straight line."""

    def decay(optimizer: Optimizer) -> LambdaLR:
        return LambdaLR(optimizer, lambda epoch: 1 - epoch / epochs)

    return decay


def hold_out_last(x: Tensor, y: Tensor, count: int) -> tuple[Samples, Samples]:
    """All samples but the last ones, and the last ones."""
    return (x[:-count], y[:-count]), (x[-count:], y[-count:])


def load_images(
    name: str, folder: Path | None = None, smoke: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images and classes, to train and to test on; from NAME.npz in a folder if there is one."""
    file = None if folder is None else folder / f"{name}.npz"
    if smoke or file is None or not file.exists():
        loaded = _stand_in(name) if smoke else tpsgd.data.load(name)
        return (*loaded.train, *loaded.test)
    arrays = np.load(file)
    x, y, x_test, y_test = (torch.from_numpy(arrays[k]) for k in ("x", "y", "x_test", "y_test"))
    return x, y.long(), x_test, y_test.long()


def _stand_in(name: str) -> tpsgd.data.Data:
    """Artificial samples, which need a plug-in that real ones do not."""
    from experiments import stand_in

    return stand_in.data(name)
