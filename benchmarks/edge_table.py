"""A step of the exported local rule beside generated backprop and, where there are any, rivals.

All are compiled with -Os for an emulated Cortex-M4F and learn from one sample at a time by plain
SGD, with class codes from flash. RAM is what the linker placed and the stack that was used, without
samples; code is that of the functions that a program needs which learns and asks. Accuracies are
those of `edge_passes`.

Rivals are folders FOLDER/NAME/NET with `net.h` and C files that have the functions and types which
`examples/edge/cortex_m/learn.c` uses (`net_begin`, `net_step`, `net_forward`, `net_classes`, the
types `net_state` and `net_arena`, and the numbers of a sample, of classes, and of a step); `net.h`
may leave `net_arena` a byte. Memory that a rival allocates comes from an array of its own. NET is
a name of `edge_passes.NETS`, with a dash for each blank and none for commas.
"""

import shutil
import tempfile
from pathlib import Path
from typing import Any

import edge_nets
import edge_passes
import emulated
import torch

from tpsgd_export.to_c.source import sources

BOARD, LEVEL = "Cortex-M4F", "-Os"
NETS = [net for net in edge_passes.NETS if not net.startswith("cell")]
ARMS = ("readout", "readout-learned (default)", "backprop")
Row = dict[str, Any]


def folder_name(net: str) -> str:
    """The folder of a net among those of a rival."""
    return net.replace(",", "").replace(" ", "-")


def random_samples(net: str, folder: Path) -> None:
    """A few random samples, for what does not depend on them."""
    _, shape, _ = edge_passes.NETS[net]
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (edge_nets.STEPS, *shape), generator=generator, dtype=torch.uint8)
    y = torch.arange(edge_nets.STEPS)
    numbers = {"EPOCHS": "1", "RATE": "0.001f", "SCALE": "0.00390625f"}
    emulated.write_data(folder, (x, y), (x[:1], y[:1]), **numbers)


def row_of(net: str, arm: str, folder: Path) -> Row:
    """The bytes and instructions of the C in a folder."""
    random_samples(net, folder)
    said = emulated.on_board(folder, BOARD, LEVEL)
    ram = int(said["static"]) + int(said["stack"])
    return {
        "net": net, "arm": arm, "ram_bytes": ram, "static_bytes": int(said["static"]),
        "stack_bytes": int(said["stack"]), "code_bytes": int(said["linked"]),
        "step_instructions": int(said["step"]), "inference_instructions": int(said["inference"]),
    }  # fmt: skip


def ours(net: str, arm: str) -> Row:
    """An arm of `edge_passes`."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for name, text in sources(edge_passes.recipe_of(net, arm, 0)).items():
            (folder / name).write_text(text)
        return row_of(net, arm, folder)


def rivals(root: Path) -> list[Row]:
    """Every net that is there of every rival."""
    rows = []
    for net in NETS:
        for source in sorted(root.glob(f"*/{folder_name(net)}")):
            with tempfile.TemporaryDirectory() as place:
                folder = Path(place, "net")
                shutil.copytree(source, folder)
                rows.append(row_of(net, source.parent.name, folder))
    return rows


def measure(root: Path | None = None) -> Row:
    """Bytes and instructions of all arms, then of rivals."""
    rows = [ours(net, arm) for net in NETS for arm in ARMS]
    return {"rows": rows + (rivals(root) if root else [])}
