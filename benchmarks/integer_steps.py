"""Steps in integers beside steps in floats on emulated microcontrollers: instructions, bytes.

    python benchmarks/integer_steps.py --out results/integer_steps.json

The exported C of a dense and of a convolutional net learns the digits of 8 x 8 by a readout with
binary codes and a scale of 4, one sample at a time, compiled with -Os. Instructions are QEMU's, not
cycles. A step in int8 takes as many as its gradients ask for, so its mean over the first samples of
training is given; later ones take fewer. A step in floats takes the same number for every sample;
it is that of `edge_table`, with class codes from flash, the quickest.
The Cortex-M0's program is counted on a board that has a clock, of a Cortex-M3.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import edge_nets
import edge_passes
import emulated
import torch

from tpsgd import rules
from tpsgd.common.units import columns
from tpsgd.comparison.provenance import machine, versions
from tpsgd.projections import binary
from tpsgd_export.read_model import read_model
from tpsgd_export.recipe import StepRecipe
from tpsgd_export.to_c.integer_scales import IntegerNet, integer_net
from tpsgd_export.to_c.integer_source import integer_source
from tpsgd_export.to_c.source import sources

MAIN = Path(__file__).with_suffix(".c")
NETS = ("64-32-10", "CNN 8x3x3, 16x3x3")
BOARDS = {"m4f": "Cortex-M4F", "m3": "Cortex-M3", "m0": "Cortex-M0, counted"}
LEVEL, RATE, STEPS, CALIBRATION = "-Os", 0.01, 500, 1000
Row = dict[str, Any]


def recipe_of(net: str) -> StepRecipe:
    """The step of a net, as torch initialises it."""
    build, shape, _ = edge_passes.NETS[net]
    torch.manual_seed(0)
    return read_model(build(), rules.readout(projection=binary(), scale=4.0), shape)


def integers_of(net: str, numbers: str) -> IntegerNet:
    """The net in integers, with binary points for the training samples."""
    (x, y), _ = edge_passes.data_of(net)
    return integer_net(recipe_of(net), x[:CALIBRATION], y[:CALIBRATION], numbers, rate=RATE)


def written(
    net: IntegerNet, folder: Path, x: torch.Tensor, y: torch.Tensor, epochs: int = 1
) -> None:
    """The C of a net of integers, and samples as the bytes that it reads."""
    for name, text in integer_source(net).items():
        (folder / name).write_text(text)
    data = torch.from_numpy(net.quantised(x).view("uint8")), y
    numbers = {"EPOCHS": str(epochs), "RATE": str(round(RATE * 65536))}
    emulated.write_data(folder, data, (data[0][:20], data[1][:20]), **numbers)


def of_integers(net: str, numbers: str, board: str) -> dict[str, str]:
    """What the board says, whose bits are those of this machine; a step is the mean of all."""
    train, _ = edge_nets.digits()
    x, y = train[0][:STEPS].float() / 16, train[1][:STEPS]
    with tempfile.TemporaryDirectory() as place:
        written(integers_of(net, numbers), Path(place), x, y)
        here = emulated.on_host(Path(place), main=MAIN)
        there = emulated.on_board(Path(place), board, LEVEL, main=MAIN)
    if here["weights"] != there["weights"]:
        raise RuntimeError(f"{net} in {numbers} on {board}: other bits than on this machine")
    return there | {"step": str(round(int(there["steps"]) / STEPS))}


def of_floats(net: str, board: str) -> dict[str, str]:
    """What the board says of a few steps in floats."""
    (x, y), _ = edge_nets.digits()
    few = x[: edge_nets.STEPS].view(-1, *edge_passes.NETS[net][1]), y[: edge_nets.STEPS]
    with tempfile.TemporaryDirectory() as place:
        for name, text in sources(edge_passes.recipe_of(net, "readout", 0)).items():
            Path(place, name).write_text(text)
        numbers = {"EPOCHS": "1", "RATE": f"{RATE}f", "SCALE": "0.0625f"}
        emulated.write_data(Path(place), few, (few[0][:1], few[1][:1]), **numbers)
        return emulated.on_board(Path(place), board, LEVEL)


def row_of(net: str, numbers: str) -> Row:
    """A net in some numbers on all boards."""
    row: Row = {"net": net, "numbers": numbers}
    for key, board in BOARDS.items():
        said = of_floats(net, board) if numbers == "float32" else of_integers(net, numbers, board)
        row[key] = {
            "step_instructions": int(said["step"]),
            "inference_instructions": int(said["inference"]),
            "code_bytes": int(said["linked"]),
            "ram_bytes": int(said["static"]) + int(said["stack"]),
        }
        print(net, numbers, board, row[key], flush=True)
    return row


def main() -> None:
    """Measure, write the figures, print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    rows = [row_of(net, numbers) for net in NETS for numbers in ("float32", "int8", "int16")]
    record = {
        "benchmark": "integer_steps",
        "command": "python benchmarks/integer_steps.py --out results/integer_steps.json",
        "machine": machine(), "versions": versions(),
        "settings": {"level": LEVEL, "rate": RATE, "steps": STEPS}, "rows": rows,
    }  # fmt: skip
    out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    lines = [
        [row["net"], row["numbers"], *(f"{row[key]['step_instructions']:,}" for key in BOARDS)]
        for row in rows
    ]
    print(columns([["net", "numbers", *BOARDS.values()], *lines]))


if __name__ == "__main__":
    main()
