"""Residual nets in the exported C: bytes of the arena, and accuracy on digits.

    python benchmarks/edge_residual.py --out results

- `arenas`: the plan of the C, which its compiler checks, for a net whose body is frozen, one whose
  residual blocks learn by local losses, and the same net as one block, which is backprop.
- `digits`: small residual nets without norms learn the digits of 8 x 8, one sample at a time with
  plain SGD, in the C on this machine: one whose last layer reads the pixels of the last maps, and
  one that reads the means of maps, as ResNets do. Rates are chosen on a fifth of the training
  samples for every arm and number of passes; test samples are read once, at the end.
"""

import argparse
import json
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import edge_passes
import numpy as np
import torch
from edge_passes import FLAGS, PASSES, SEARCH_SEEDS, SEEDS, Samples
from robustness import commit
from torch import Tensor, nn

from tpsgd import rules
from tpsgd.common.units import columns
from tpsgd.comparison.provenance import machine, versions
from tpsgd.maths.random import Key, permutation
from tpsgd.nets.cuts.split import LAYERS
from tpsgd.zoo.resnet import Residual, resnet
from tpsgd_export.plain_steps import with_plain_scales
from tpsgd_export.read_model import read_model
from tpsgd_export.recipe import StepRecipe
from tpsgd_export.to_c.codes import with_codes
from tpsgd_export.to_c.memory import FLOAT, layout
from tpsgd_export.to_c.source import sources

COMMAND = "python benchmarks/edge_residual.py --out results"
Row = dict[str, Any]
RATES = (0.003, 0.01, 0.03)
PICTURE, DIGIT = (3, 32, 32), (1, 8, 8)
ARMS: dict[str, tuple[Any, Any]] = {  # a rule, and the blocks
    "readout": (rules.readout(), LAYERS),
    "readout-learned (default)": (rules.default(), LAYERS),
    "last block with the head": (rules.readout(), [1, 1, 2]),
    "default, last block with the head": (rules.default(), [1, 1, 2]),
    "backprop": (rules.readout(), 1),
    "frozen": (rules.frozen(), LAYERS),
}


class Inverted(nn.Module):
    """x + f(x), f wider by a factor of 4: over pixels, depthwise, over pixels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        wide = 4 * width
        self.path = nn.Sequential(
            nn.Conv2d(width, wide, 1), nn.ReLU6(),
            nn.Conv2d(wide, wide, 3, padding=1, groups=wide), nn.ReLU6(), nn.Conv2d(wide, width, 1),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return x + self.path(x)


def around(channels: int, width: int, outputs: int, *body: nn.Module) -> nn.Sequential:
    """A convolution, a body, the means of maps and a linear layer."""
    return nn.Sequential(
        nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(), *body, nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(outputs, 10),
    )  # fmt: skip


def resnet8() -> nn.Sequential:
    """Three residual blocks of 16, 32 and 64 filters, as in MLPerf Tiny."""
    return around(3, 16, 64, Residual(16, 16), Residual(16, 32, 2), Residual(32, 64, 2))


def inverted() -> nn.Sequential:
    """Four inverted residuals on pictures of half the size."""
    return around(3, 16, 16, nn.MaxPool2d(2), *(Inverted(16) for _ in range(4)))


NETS: dict[str, Callable[[], nn.Sequential]] = {
    "ResNet-8": resnet8,
    "ResNet-18, 8 filters": lambda: resnet(18, PICTURE, 10, small=True, width=8),
    "4 inverted residuals": inverted,
}


def without_norms(model: nn.Sequential) -> nn.Sequential:
    """The net with the identity for each norm, which have seen nothing, and biases."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.BatchNorm2d):
                setattr(module, name, nn.Identity())
            elif isinstance(child, nn.Conv2d) and child.bias is None:
                sizes = child.in_channels, child.out_channels, child.kernel_size
                with_bias = nn.Conv2d(*sizes, child.stride, child.padding)  # type: ignore[arg-type]
                setattr(module, name, with_bias)
    return model


# ---- bytes ---------------------------------------------------------------------------------------


def arenas() -> list[Row]:
    """Bytes of every net for one picture of 32 x 32 at a time."""
    rows = []
    for name, build in NETS.items():
        arms = [arm for arm, (_, blocks) in ARMS.items() if blocks in (LAYERS, 1)]
        recipes = {arm: recipe_of(build(), arm, PICTURE) for arm in arms}
        arena = {arm: FLOAT * layout(recipe).arena for arm, recipe in recipes.items()}
        weights = FLOAT * recipes["readout"].parameters
        local, whole = arena["readout"], arena["backprop"]
        rows.append(
            {
                "net": name, "weights_bytes": weights, "frozen_arena_bytes": arena["frozen"],
                "local_arena_bytes": local, "backprop_arena_bytes": whole,
                "arena_ratio": round(whole / local, 3),
                "ram_ratio": round((weights + whole) / (weights + local), 3),
            }
        )  # fmt: skip
    return rows


def recipe_of(
    model: nn.Sequential, arm: str, shape: tuple[int, ...], seed: int = 0, samples: Any = None
) -> StepRecipe:
    """The step of an arm, with the scale that an export gives it."""
    rule, blocks = ARMS[arm]
    settings: Row = {"seed": seed, "blocks": blocks, "samples": samples}
    recipe = read_model(model, rule, shape, **settings)
    recipe = read_model(model, with_plain_scales(rule, recipe), shape, **settings)
    return with_codes(recipe, "flash")


# ---- accuracy ------------------------------------------------------------------------------------


def of_means() -> nn.Sequential:
    """Two residual blocks for digits, with the initial weights of ResNets."""
    net = without_norms(around(1, 6, 12, Residual(6, 6), Residual(6, 12, 2)))
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return net


def of_pixels() -> nn.Sequential:
    """The same with a last layer that reads all pixels of the last maps."""
    *body, _, flatten, _ = of_means()
    return nn.Sequential(*body, flatten, nn.Linear(12 * 4 * 4, 10))


DIGITS: dict[str, Callable[[], nn.Sequential]] = {"pixels": of_pixels, "means": of_means}


def right(
    net: str, arm: str, seed: int, sets: tuple[Samples, Samples], rates: Iterable[float]
) -> Any:
    """Shares of the test samples that are right: a row for each rate, a column for 1, 5, 20."""
    torch.manual_seed(seed)
    recipe = recipe_of(DIGITS[net](), arm, DIGIT, seed, sets[0][0][: edge_passes.CALIBRATION])
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for name, text in sources(recipe).items():
            (folder / name).write_text(text)
        edge_passes.write_samples(folder / "samples", *sets)
        program = str(folder / "passes")
        files = [str(folder / "net.c"), str(Path(__file__).with_name("passes.c"))]
        subprocess.run(["gcc", *FLAGS, f"-I{folder}", *files, "-o", program], check=True)
        words = [program, str(folder / "samples"), str(seed), *map(str, rates)]
        said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    return np.array([line.split() for line in said.splitlines()], int) / len(sets[1][1])


def digits() -> tuple[tuple[Samples, Samples], tuple[Samples, Samples]]:
    """Training samples in two parts, to choose rates, and all of them with the test samples."""
    sets: Any = tuple((x.float().reshape(-1, *DIGIT), y) for x, y in edge_passes.digits())
    x, y = sets[0]
    order = torch.cat(list(permutation(len(x), Key(0))))
    held_out, rest = order[: len(x) // 5], order[len(x) // 5 :]
    return ((x[rest], y[rest]), (x[held_out], y[held_out])), sets


def learned(net: str, arm: str) -> Row:
    """Rates by held-out samples, then test accuracies of the seeds."""
    validation, sets = digits()
    scores = np.mean([right(net, arm, seed, validation, RATES) for seed in range(SEARCH_SEEDS)], 0)
    chosen = [RATES[i] for i in scores.argmax(0)]
    rates = sorted(set(chosen))
    tests = np.stack([right(net, arm, seed, sets, rates) for seed in range(SEEDS)])
    memory = layout(recipe_of(DIGITS[net](), arm, DIGIT))
    row: Row = {"net": net, "arm": arm, "ram_bytes": memory.ram_bytes, "passes": {}}
    for i, lr in enumerate(chosen):
        accuracies = tests[:, rates.index(lr), i].tolist()
        row["passes"][str(PASSES[i])] = {
            "lr": lr, "validation": float(scores[:, i].max()), "accuracies": accuracies,
            "accuracy": fmean(accuracies), "deviation": stdev(accuracies),
        }  # fmt: skip
    print(row, flush=True)
    return row


CASES = [(net, arm) for net in DIGITS for arm in ARMS]


def main() -> None:
    """Write the figures; cases of digits that the file has already are left as they are."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of edge_residual.json")
    file = parser.parse_args().out / "edge_residual.json"
    torch.set_num_threads(1)
    before = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    rows = before.get("digits", [])
    record = {
        "benchmark": "edge_residual", "command": COMMAND, "commit": commit(),
        "machine": machine(), "versions": versions(), "how": " ".join((__doc__ or "").split()),
        "settings": {"rates": RATES, "seeds": SEEDS, "search_seeds": SEARCH_SEEDS},
        "arenas": arenas(), "digits": rows,
    }  # fmt: skip
    known = {(row["net"], row["arm"]) for row in rows}
    for case in (case for case in CASES if case not in known):
        rows.append(learned(*case))
        file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    listed = record["arenas"]
    print(columns([[*listed[0]], *([*row.values()] for row in listed)]))


if __name__ == "__main__":
    main()
