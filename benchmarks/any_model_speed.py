"""Models of a class: an epoch of `fit` beside the plain torch loop that one would write.

    python benchmarks/any_model_speed.py --out results

The loop has fused Adam and shuffles, and reads nothing back. Ways take turns in one process, on one
thread; the time of a way is the least CPU time of its turns, over that of the loop.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tpsgd
from experiments.common import origin, result_file
from experiments.models import BATCH, NETS

NAMES = ("LeNet", "VGG", "ResNet18", "MobileNetV2", "MLP-Mixer", "GRU", "two inputs")
TURNS, EPOCHS = 3, 3
Way = Callable[[nn.Module, Any, Tensor], Any]


def plain_loop(model: nn.Module, x: Any, y: Tensor) -> None:
    """Backprop as one would write it."""
    parts = x if isinstance(x, tuple) else (x,)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    model.train()
    for _ in range(EPOCHS):
        for index in torch.randperm(len(y)).split(BATCH):
            loss = F.cross_entropy(model(*(part[index] for part in parts)), y[index])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def of_library(model: nn.Module, x: Any, y: Tensor, train: Any, **settings: Any) -> None:
    """The same epochs by the library."""
    settings |= {"epochs": EPOCHS, "batch_size": BATCH, "lr": 1e-3, "progress": False}
    train(model, (x, y), **settings)


WAYS: dict[str, Way] = {
    "loop": plain_loop,
    "backprop": partial(of_library, train=tpsgd.fit_backprop),
    "default": partial(of_library, train=tpsgd.fit),
    "simultaneous": partial(of_library, train=tpsgd.fit, order=tpsgd.simultaneous),
    "frozen": partial(of_library, train=tpsgd.fit, rule="frozen"),
}


def seconds(name: str, way: Way, x: Any, y: Tensor) -> float:
    """The CPU seconds of a fresh net's epochs."""
    torch.manual_seed(0)
    model = NETS[name].make()
    began = time.process_time()
    way(model, x, y)
    return time.process_time() - began


def main() -> None:
    """All nets, all ways, in turns."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results"))
    options = parser.parse_args()
    options.smoke = False
    torch.set_num_threads(1)
    record, save = result_file(options, "any_model_speed")
    record |= origin("any_model_speed", "cpu")
    record |= {"command": "python benchmarks/any_model_speed.py --out results", "epochs": EPOCHS}
    digits = tpsgd.data.load("digits")
    for name in NAMES:
        x, y = NETS[name].view(*digits.train)
        turns = [{way: seconds(name, WAYS[way], x, y) for way in WAYS} for _ in range(TURNS)]
        least = {way: min(turn[way] for turn in turns) for way in WAYS}
        ratios = {way: value / least["loop"] for way, value in least.items()}
        record.setdefault("nets", {})[name] = {"seconds": least, "ratio": ratios}
        print(f"{name:12}", {way: round(ratio, 2) for way, ratio in ratios.items()}, flush=True)
        save()


if __name__ == "__main__":
    main()
