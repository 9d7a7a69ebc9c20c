"""Accuracy of exported nets after 1, 5 and 20 passes, one sample at a time with plain SGD.

The scale and the gain of a readout under `tpsgd.export.c` (`with_plain_scales`) beside those set by
hand, the calibrated scale that Adam has, generated backprop and frozen hidden layers. All of it
runs in the exported C, on this machine. Learning rates are chosen on a fifth of the training
samples for every arm and number of passes; so is the best of the arms `BY_HAND`. Test samples are
read once, at the end. The IMU is synthetic: windows of two seconds of six axes, five activities
with overlapping frequencies, random phase and pose. EEG are sequences of 45 steps, of which there
are five passes at most. A row has the commit at which it was measured.
"""

import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import edge_nets
import numpy as np
import torch
from robustness import commit
from torch import Tensor, nn

import tpsgd
from tpsgd import rules
from tpsgd.data.sets.eeg import ROWS
from tpsgd.maths.random import Key, permutation
from tpsgd_export.plain_steps import with_plain_scales
from tpsgd_export.read_model import BACKPROP, read_model
from tpsgd_export.recipe import StepRecipe
from tpsgd_export.to_c.codes import with_codes
from tpsgd_export.to_c.source import sources

PASSES, RATES = (1, 5, 20), (0.001, 0.003, 0.01, 0.03)
SEARCH_SEEDS, SEEDS = 2, 5
CALIBRATION = 256  # samples
FLAGS = ("-std=c99", "-O3", "-march=native", "-ffp-contract=off")
ARMS: dict[str, tuple[Any, bool]] = {  # a rule, and whether the export chooses its scale
    "readout, scale 2": (rules.readout(scale=2.0), False),
    "readout, scale 4": (rules.readout(scale=4.0), False),
    "readout, scale 8": (rules.readout(scale=8.0), False),
    "readout, calibrated": (rules.readout(), False),
    "readout": (rules.readout(), True),
    "readout-learned, scale 4": (rules.readout(True, scale=4.0), False),
    "readout-learned, scale 2, gain 1": (rules.readout(True, scale=2.0, gain=1.0), False),
    "readout-learned, scale 1, gain 2": (rules.readout(True, scale=1.0, gain=2.0), False),
    "readout-learned, scale 2, gain 4": (rules.readout(True, scale=2.0, gain=4.0), False),
    "readout-learned (default)": (rules.default(), True),
    "backprop": (BACKPROP, False),
    "frozen": (rules.frozen(), False),
}
BY_HAND = [arm for arm, (_, chosen) in ARMS.items() if "scale" in arm and not chosen]
BEST = "best by hand"
Samples = tuple[Tensor, Tensor]
Row = dict[str, Any]


def cnn() -> nn.Sequential:
    """Two convolutions on digits of 8 x 8."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.LeakyReLU(), nn.Conv2d(8, 16, 3), nn.LeakyReLU(), nn.Flatten(),
        nn.Linear(256, 10),
    )  # fmt: skip


def imu_net() -> nn.Sequential:
    """Two convolutions over time on six axes."""
    return nn.Sequential(
        nn.Conv1d(6, 16, 5, 2), nn.LeakyReLU(), nn.Conv1d(16, 32, 3, 2), nn.LeakyReLU(),
        nn.Flatten(), nn.Linear(416, 5),
    )  # fmt: skip


def cell() -> nn.Sequential:
    """A leaky cell of 32 units."""
    return nn.Sequential(tpsgd.Recurrent(1, 32, leak=0.3), nn.Linear(32, 2))


def digits() -> tuple[Samples, Samples]:
    """The 8 x 8 digits."""
    data = tpsgd.data.load("digits")
    return data.train, data.test


def imu(count: int = 2500, test: int = 500) -> tuple[Samples, Samples]:
    """Windows of an accelerometer and a gyroscope, synthetic."""
    chance = np.random.default_rng(0)
    y, time = chance.integers(0, 5, count), np.arange(60) / 30.0
    pace = np.array([0.0, 1.5, 1.8, 2.3, 2.7])[y] + chance.normal(0, 0.15, count) * (y > 0)
    mixing, x = chance.normal(0, 1, (5, 6, 3)), np.zeros((count, 6, 60))
    for i in range(count):
        phase, strength = chance.uniform(0, 2 * np.pi), np.exp(chance.normal(0, 0.35))
        turn = 2 * np.pi * pace[i] * time + phase
        waves = np.stack([np.sin(turn), np.sin(2 * turn + 0.5), np.cos(turn) ** 3])
        moved = strength * (mixing[y[i]] + 0.5 * chance.normal(0, 1, (6, 3))) @ waves
        x[i] = moved if y[i] else 0.03 * chance.normal(0, 1, (6, 60)).cumsum(1)
        gravity = chance.normal(0, 1, 3)
        x[i, :3] += (gravity / np.linalg.norm(gravity))[:, None]
        x[i] += chance.normal(0, 0.7, (6, 60))
    samples, labels = torch.from_numpy(x).float(), torch.from_numpy(y)
    return (samples[:-test], labels[:-test]), (samples[-test:], labels[-test:])


def eeg() -> tuple[Samples, Samples]:
    """Seizures and healthy brain waves, split by recording."""
    data = tpsgd.data.load("eeg")
    return data.train, data.test


NETS: dict[str, tuple[Callable[[], nn.Sequential], tuple[int, ...], Any]] = {
    "64-32-10": (edge_nets.mlp(64, 32, 10), (64,), digits),
    "64-64-32-10": (edge_nets.mlp(64, 64, 32, 10), (64,), digits),
    "CNN 8x3x3, 16x3x3": (cnn, (1, 8, 8), digits),
    "IMU 16x5, 32x3": (imu_net, (6, 60), imu),
    "cell 1-32-2": (cell, (45, 1), eeg),
}


@cache
def data_of(net: str) -> tuple[Samples, Samples]:
    """Training and test samples of a net, in its shape."""
    _, shape, load = NETS[net]
    train, test = ((x.float().reshape(len(x), *shape), y) for x, y in load())
    return train, test


def held_out(net: str) -> tuple[Samples, Samples]:
    """Four fifths of the training samples and the others; of EEG, whole recordings."""
    (x, y), _ = data_of(net)
    order = torch.cat(list(permutation(len(x), Key(0))))
    if net.startswith("cell"):
        order = torch.arange(len(x)).view(-1, ROWS)[torch.randperm(len(x) // ROWS)].flatten()
    mask = torch.zeros(len(x), dtype=torch.bool)
    mask[order[: len(x) // 5]] = True
    return (x[~mask], y[~mask]), (x[mask], y[mask])


def recipe_of(net: str, arm: str, seed: int, codes: str = "flash") -> StepRecipe:
    """The step of an arm; readouts are calibrated with the first training samples."""
    build, shape, _ = NETS[net]
    rule, chooses = ARMS[arm]
    settings: dict[str, Any] = {"seed": seed, "samples": data_of(net)[0][0][:CALIBRATION]}
    torch.manual_seed(seed)
    model = build()
    recipe = read_model(model, rule, shape, **settings)
    if chooses:
        recipe = read_model(model, with_plain_scales(rule, recipe), shape, **settings)
    return with_codes(recipe, codes)


def write_samples(file: Path, *sets: Samples) -> None:
    """Samples as `passes.c` reads them."""
    sizes = [sets[0][0][0].numel(), *(len(x) for x, _ in sets)]
    content = [struct.pack("<3I", *sizes)]
    for x, y in sets:
        content += [x.numpy().astype("<f4").tobytes(), y.numpy().astype("<u2").tobytes()]
    file.write_bytes(b"".join(content))


def right(
    net: str, arm: str, seed: int, sets: tuple[Samples, Samples], rates: Iterable[float] = RATES
) -> Any:
    """Shares of the test samples that are right: a row for each rate, a column for 1, 5, 20."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for name, text in sources(recipe_of(net, arm, seed)).items():
            (folder / name).write_text(text)
        write_samples(folder / "samples", *sets)
        program = str(folder / "passes")
        files = [str(folder / "net.c"), str(Path(__file__).with_name("passes.c"))]
        subprocess.run(["gcc", *FLAGS, f"-I{folder}", *files, "-o", program], check=True)
        words = [program, str(folder / "samples"), str(seed), *map(str, rates)]
        said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    counts = np.array([[int(n) for n in line.split()] for line in said.splitlines()])
    return counts / len(sets[1][1])


def learned(net: str, arm: str) -> Row:
    """Rates by held-out samples, then test accuracies of the seeds."""
    torch.manual_seed(0)
    validation = held_out(net)
    scores = np.mean([right(net, arm, seed, validation) for seed in range(SEARCH_SEEDS)], 0)
    chosen = [RATES[i] for i in scores.argmax(0)]
    rates = sorted(set(chosen))
    tests = np.stack([right(net, arm, seed, data_of(net), rates) for seed in range(SEEDS)])
    row: Row = {"net": net, "arm": arm, "passes": {}}
    for i, lr in enumerate(chosen):
        accuracies = tests[:, rates.index(lr), i].tolist()
        row["passes"][str(PASSES[i])] = {
            "lr": lr, "validation": scores[:, i].max(), "accuracies": accuracies,
            "accuracy": fmean(accuracies), "deviation": stdev(accuracies),
        }  # fmt: skip
    return row


def best_by_hand(rows: list[Row], net: str) -> Row:
    """For every number of passes the arm set by hand that is best on held-out samples."""
    by_hand = [row for row in rows if row["net"] == net and row["arm"] in BY_HAND]
    row: Row = {"net": net, "arm": BEST, "passes": {}}
    for passes in by_hand[0]["passes"]:
        best = max(by_hand, key=lambda each: each["passes"][passes]["validation"])
        row["passes"][passes] = {"of": best["arm"]} | best["passes"][passes]
    return row


def measure(arms: Iterable[str], nets: Iterable[str], before: list[Row]) -> Iterator[Row]:
    """The section after every row; rows of other arms and nets stay as they were before.

    Backprop of the cell, which would go through time, is left out.
    """
    settings = {"rates": RATES, "seeds": SEEDS, "search_seeds": SEARCH_SEEDS, "by_hand": BY_HAND}
    rows = {(row["net"], row["arm"]): row for row in before if row["arm"] in ARMS}
    for arm in arms:
        for net in nets:
            if (net, arm) != ("cell 1-32-2", "backprop"):
                rows[net, arm] = {"commit": commit()} | learned(net, arm)
                scaled = dict.fromkeys(each for each, name in rows if name in BY_HAND)
                best = [best_by_hand(list(rows.values()), each) for each in scaled]
                yield {"settings": settings, "rows": [*rows.values(), *best]}
