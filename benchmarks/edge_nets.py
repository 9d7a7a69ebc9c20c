"""Exported nets on emulated boards: RAM, flash, stack and instructions, and digits learned there.

Planned RAM is compared with the map file of the linker, and the learned weights with those of the
same program on this machine, bit for bit. Instructions are QEMU's, not cycles of a processor.
"""

import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import emulated
import torch
from torch import Tensor, nn

import tpsgd
from tpsgd import rules
from tpsgd.data.split import hold_out
from tpsgd.maths.random import Key, permutation
from tpsgd_export.read_model import read_model
from tpsgd_export.recipe import StepRecipe
from tpsgd_export.to_c.codes import with_binary_codes, with_codes
from tpsgd_export.to_c.memory import FLOAT, layout
from tpsgd_export.to_c.source import sources

EPOCHS, SEEDS, SEARCH_SEEDS = 5, 5, 3
RATES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
STEPS = 3  # of nets that learn from random samples; the second is measured
Row = dict[str, Any]
Samples = tuple[Tensor, Tensor]


def mlp(*widths: int) -> Callable[[], nn.Sequential]:
    """Dense layers with leaky ReLUs between them."""

    def build() -> nn.Sequential:
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(widths):
            layers += [nn.Linear(inputs, outputs), nn.LeakyReLU()]
        return nn.Sequential(*layers[:-1])

    return build


def small_cnn() -> nn.Sequential:
    """Eight filters on digits of 8 x 8."""
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.LeakyReLU(), nn.Flatten(), nn.Linear(288, 10))


def strided_cnn() -> nn.Sequential:
    """Two convolutions with stride 2 on pictures of 28 x 28."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 5, 2), nn.LeakyReLU(), nn.Conv2d(8, 16, 3, 2), nn.LeakyReLU(),
        nn.Flatten(), nn.Linear(400, 10),
    )  # fmt: skip


NETS: dict[str, tuple[Callable[[], nn.Sequential], tuple[int, ...]]] = {
    "64-32-10": (mlp(64, 32, 10), (64,)),
    "784-32-10": (mlp(784, 32, 10), (784,)),
    "head 512-10": (mlp(512, 10), (512,)),
    "head 512-64-10": (mlp(512, 64, 10), (512,)),
    "head 1280-10": (mlp(1280, 10), (1280,)),
    "CNN 8x8: 8x3": (small_cnn, (1, 8, 8)),
    "CNN 28x28: 8x5 s2, 16x3 s2": (strided_cnn, (1, 28, 28)),
}
RULES = {
    "readout": rules.readout(scale=4.0),
    "readout, calibrated": rules.readout(),
    "tpsgd-l2": rules.tpsgd_l2(),
    "frozen": rules.frozen(),
}


@dataclass(frozen=True)
class Case:
    """A net and how it is exported."""

    net: str
    rule: str = "readout"
    codes: str = "binary"
    batch: int = 1
    optimizer: str = "sgd"

    def recipe(self, seed: int = 0) -> StepRecipe:
        """Its training step."""
        build, shape = NETS[self.net]
        torch.manual_seed(seed)
        rule = RULES[self.rule]
        recipe = read_model(
            build(), with_binary_codes(rule) if self.codes == "binary" else rule, shape,
            batch=self.batch, optimizer=self.optimizer, seed=seed,
        )  # fmt: skip
        return with_codes(recipe, self.codes)

    def write(self, folder: Path, seed: int = 0) -> None:
        """Its C."""
        for name, text in sources(self.recipe(seed)).items():
            (folder / name).write_text(text)


SIZES = [
    Case(net, batch=batch, optimizer=optimizer)
    for net in NETS
    for batch, optimizer in ((1, "sgd"), (16, "sgd"), (16, "adam"))
]
DIGITS = [
    Case("64-32-10", "readout", "hash"),
    Case("64-32-10", "readout", "flash"),
    Case("64-32-10", "readout", "binary"),
    Case("64-32-10", "readout, calibrated", "hash"),
    Case("64-32-10", "tpsgd-l2", "hash"),
    Case("64-32-10", "frozen", "hash"),
    Case("CNN 8x8: 8x3", "readout", "hash"),
    Case("CNN 8x8: 8x3", "readout, calibrated", "hash"),
    Case("CNN 8x8: 8x3", "frozen", "hash"),
]
OTHER_BOARDS = ("Cortex-M0", "Cortex-M3", "Cortex-M7")
TIMED = ("step", "inference")


# ---- bytes and instructions ----------------------------------------------------------------------


def measured(case: Case, board: str, data: Callable[[Path], None]) -> Row:
    """What a board says of a net that learns from data, after it was compared with this machine."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        case.write(folder)
        data(folder)
        here, there = emulated.on_host(folder), emulated.on_board(folder, board)
    recipe = case.recipe()
    memory = layout(recipe)
    if not int(there["placed"]) == int(there["ram"]) == memory.ram_bytes:
        raise RuntimeError(f"{case}: planned {memory.ram_bytes} B, the linker has {there}")
    if here["weights"] != there["weights"] or here["right"] != there["right"]:
        raise RuntimeError(f"{case} on {board}: other bits than on this machine")
    samples, stack = FLOAT * recipe.batch * recipe.inputs, int(there["stack"])
    row = {
        **vars(case), "board": board, "parameters": recipe.all_weights,
        "ram": memory.ram, "ram_bytes": memory.ram_bytes, "placed_bytes": int(there["placed"]),
        "samples_bytes": samples, "stack_bytes": stack,
        "total_bytes": memory.ram_bytes + samples + stack,
        "code_bytes": int(there["code"]), "constants_bytes": int(there["constants"]),
        "constants": memory.flash, "right": int(there["right"]),
        "weights_hash": there["weights"], "same_bits_as_this_machine": True,
    }  # fmt: skip
    counts = {f"{what}_instructions": int(there[what]) for what in TIMED if what in there}
    return row | counts


def random_bytes(case: Case) -> Callable[[Path], None]:
    """Random samples for a few steps."""
    inputs, count = case.recipe().inputs, STEPS * case.batch
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (count, inputs), generator=generator, dtype=torch.uint8)
    y = torch.randint(0, 10, (count,), generator=generator)

    def write(folder: Path) -> None:
        numbers = {"EPOCHS": "1", "RATE": "0.001f", "SCALE": "0.00390625f"}
        emulated.write_data(folder, (x, y), (x[:1], y[:1]), **numbers)

    return write


def sizes() -> list[Row]:
    """Every net on a Cortex-M4F, for a few steps."""
    return [measured(case, "Cortex-M4F", random_bytes(case)) for case in SIZES]


# ---- digits --------------------------------------------------------------------------------------


def digits() -> tuple[Samples, Samples]:
    """The 8 x 8 digits of scikit-learn as bytes, from 0 to 16.

    Those to train on are shuffled: in their file, writers come one after another, and the program
    on the board walks through the samples in steps that may be short.
    """
    data = tpsgd.data.load("digits")
    (x, y), test = (((x * 16).round().to(torch.uint8), y) for x, y in (data.train, data.test))
    order = torch.cat(list(permutation(len(x), Key(0))))
    return (x[order], y[order]), test


def held_out(train: Samples) -> tuple[Samples, Samples]:
    """Four fifths of the training samples, and the others for validation."""
    x, y = train
    mask = torch.from_numpy(hold_out(y.numpy(), 0.2, 0))
    return (x[mask], y[mask]), (x[~mask], y[~mask])


def written(train: Samples, test: Samples, rate: float) -> Any:
    """A function that writes digits into a folder."""
    numbers = {"EPOCHS": str(EPOCHS), "RATE": f"{rate}f", "SCALE": "0.0625f"}
    return lambda folder: emulated.write_data(folder, train, test, **numbers)


def in_c(case: Case, train: Samples, test: Samples, rate: float, seed: int) -> float:
    """The accuracy that the C program says on this machine."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        case.write(folder, seed)
        written(train, test, rate)(folder)
        try:
            return int(emulated.on_host(folder)["right"]) / len(test[1])
        except subprocess.CalledProcessError as error:
            if error.cmd[0] != str(folder / "learn"):
                raise
            return 0.0  # the net diverged


def by_backprop(net: str, train: Samples, test: Samples, rate: float, seed: int) -> float:
    """The accuracy of the net after backprop in Python, one sample at a time."""
    build, shape = NETS[net]
    torch.manual_seed(seed)
    model = build()
    sets = [(x.float().view(-1, *shape) / 16, y) for x, y in (train, test)]
    tpsgd.fit_backprop(
        model, sets[0], optimizer=tpsgd.sgd, lr=rate, epochs=EPOCHS, batch_size=1, seed=seed,
        progress=False,
    )  # fmt: skip
    return tpsgd.evaluate(model, sets[1])


def learned(arm: Callable[..., float]) -> Row:
    """The rate by validation, then the accuracies on the test set."""
    train, test = digits()
    part, validation = held_out(train)
    scores = {
        rate: fmean(arm(part, validation, rate, seed) for seed in range(SEARCH_SEEDS))
        for rate in RATES
    }
    rate = max(scores, key=lambda r: scores[r])
    accuracies = [arm(train, test, rate, seed) for seed in range(SEEDS)]
    return {
        "lr": rate, "validation": {str(r): s for r, s in scores.items()}, "accuracies": accuracies,
        "accuracy": fmean(accuracies), "deviation": stdev(accuracies),
    }  # fmt: skip


def on_digits(case: Case) -> Row:
    """A net that learns digits on the Cortex-M4F, with the first seed; others on this machine."""
    row = learned(lambda *arguments: in_c(case, *arguments))
    train, test = digits()
    return row | measured(case, "Cortex-M4F", written(train, test, row["lr"]))


def backprop_on_digits(net: str) -> Row:
    """The same net by backprop, in Python."""
    row = learned(lambda *arguments: by_backprop(net, *arguments))
    return {"net": net, "rule": "backprop, in Python"} | row


def on_other_boards(rate: float) -> list[Row]:
    """One net on other processors."""
    case, (train, test) = Case("64-32-10", "readout", "binary"), digits()
    return [
        {"lr": rate} | measured(case, board, written(train, test, rate)) for board in OTHER_BOARDS
    ]
