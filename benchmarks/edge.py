"""Exported nets on emulated microcontrollers, an adaptor on a device, and what saves the RAM.

    TPSGD_DATA=FOLDER python benchmarks/edge.py --out results [--only digits] [--features FILE]

- `sizes`: RAM (planned, and as the linker placed it), flash, stack (painted before the start),
  instructions of a step and of an inference, for several nets on an emulated Cortex-M4F.
- `digits`: nets that learn the 8 x 8 digits there from one sample at a time, with the frozen
  control and backprop in Python beside them; one of them on other processors, too.
- `split`: what the fused update saves and what the local rule saves, computed.
- `table`: steps of the local rule beside generated backprop and rivals, in bytes, instructions and
  accuracy (`edge_table`, `edge_passes`); `--rivals FOLDER` has the sources of rivals; `--arms`
  and `--nets` measure some rows of the passes again, and the others stay.
- `adaptor`: heads on features of a frozen VGG16, in C, beside ridge and backprop in Python.

QEMU counts instructions. They are not cycles: it has no flash that makes a processor wait, and no
caches; its Cortex-M0 has no clock to count with. No board was measured. AIfES was not measured:
npm, PyPI and Debian have no package of that name, and PlatformIO's client got none in a minute.

Learning rates are chosen on a fifth of the training samples, not on the test samples. `readout` is
`readout(scale=4.0)`; "readout, calibrated" is the default, which measures the first sample. The
digits were measured twice before, in the order of their file, in which the frozen CNN was better
than the CNN under readout, and binary codes than others: the order of the samples changes such
differences, and five seeds do not settle them.
"""

import argparse
import json
import subprocess
from pathlib import Path
from typing import Any

import edge_adaptor
import edge_nets
import edge_passes
import edge_split
import edge_table
import emulated
import torch
from machines import machines
from robustness import commit

from tpsgd.common.units import columns
from tpsgd.comparison.provenance import versions

COMMAND = "python benchmarks/edge.py --out results"
SECTIONS = ("sizes", "digits", "split", "table", "passes", "adaptor")
Row = dict[str, Any]


def measure(section: str, features: Path, rivals: Path | None = None) -> Row:
    """The figures of a section."""
    if section == "sizes":
        return {"rows": edge_nets.sizes()}
    if section == "split":
        return edge_split.measure()
    if section == "table":
        return edge_table.measure(rivals)
    if section == "adaptor":
        return edge_adaptor.measure(features)
    return digits()


def digits() -> Row:
    """Digits learned on the Cortex-M4F, by backprop, and on other processors."""
    rows, (train, test) = [], edge_nets.digits()
    for case in edge_nets.DIGITS:
        rows.append(edge_nets.on_digits(case))
        print(f"{case}: {rows[-1]['accuracies']}", flush=True)
    nets = dict.fromkeys(case.net for case in edge_nets.DIGITS)
    binary = next(row["lr"] for row in rows if row["codes"] == "binary")
    settings = {
        "epochs": edge_nets.EPOCHS, "batch_size": 1, "optimizer": "sgd",
        "train": len(train[1]), "test": len(test[1]),
        "rates": edge_nets.RATES, "seeds": edge_nets.SEEDS,
        "on_the_board": "the first seed; the others on this machine, by the same program",
    }  # fmt: skip
    return {
        "settings": settings,
        "rows": rows,
        "backprop": [edge_nets.backprop_on_digits(net) for net in nets],
        "boards": edge_nets.on_other_boards(binary),
    }


def tools() -> Row:
    """The versions of the compilers and of the emulator."""
    commands = {"gcc": "gcc", "arm-gcc": emulated.COMPILER, "qemu": emulated.EMULATOR}
    return {name: _first_line(command) for name, command in commands.items()}


def _first_line(command: str) -> str:
    said = subprocess.run([command, "--version"], capture_output=True, text=True, check=True)
    return said.stdout.splitlines()[0]


def table(record: Row) -> str:
    """The figures for people."""
    parts = [
        _sizes(record["sizes"]["rows"]) if "sizes" in record else "",
        _digits(record["digits"]) if "digits" in record else "",
        _split(record["split"]) if "split" in record else "",
        _table(record) if "table" in record else "",
        _adaptor(record["adaptor"]) if "adaptor" in record else "",
    ]
    return "\n\n".join(part for part in parts if part)


def _sizes(rows: list[Row]) -> str:
    head = ["net", "batch", "RAM", "+ samples", "+ stack", "code", "constants", "step", "inference"]
    lines = [
        [f"{row['net']}, {row['optimizer']}", str(row["batch"]), *_bytes(row), *_counts(row)]
        for row in rows
    ]
    return columns([head, *lines])


def _bytes(row: Row) -> list[str]:
    names = ("ram_bytes", "samples_bytes", "stack_bytes", "code_bytes", "constants_bytes")
    return [f"{row[name]:,}" for name in names]


def _counts(row: Row) -> list[str]:
    return [f"{row[name]:,}" if name in row else "-" for name in COUNTS]


COUNTS = ("step_instructions", "inference_instructions")


def _digits(section: Row) -> str:
    head = ["digits", "board", "accuracy", "rate", "RAM", "stack", "code", "step", "inference"]
    lines = [
        [
            f"{row['net']} {row['rule']} ({row['codes']})", row["board"], _accuracy(row),
            f"{row['lr']:g}", f"{row['ram_bytes']:,}", f"{row['stack_bytes']:,}",
            f"{row['code_bytes']:,}", *_counts(row),
        ]
        for row in (*section["rows"], *section["boards"])
    ]  # fmt: skip
    lines += [
        [f"{row['net']} {row['rule']}", "-", _accuracy(row), f"{row['lr']:g}", *"-----"]
        for row in section["backprop"]
    ]
    return columns([head, *lines])


def _accuracy(row: Row) -> str:
    if "accuracy" not in row:
        return f"{row['right']} right"
    return f"{100 * row['accuracy']:.2f} ± {100 * row['deviation']:.2f} %"


def _split(section: Row) -> str:
    head = ["computed, bytes", "batch", "weights", "local arena", "backprop", "recomputing"]
    rows = [*section["by_depth"], *section["by_length"]]
    names = ("weights", "local_arena", "backprop_arena", "recomputing_backprop_arena")
    lines = [
        [
            f"{row['net']}, {row.get('convolutions') or row['steps']}", str(row.get("batch", 1)),
            *(f"{row[f'{name}_bytes']:,}" for name in names), f"{row['arena_ratio']:.2f}",
            f"{row['ram_ratio']:.2f}",
        ]
        for row in rows
    ]  # fmt: skip
    return columns([[*head, "arena x", "with weights x"], *lines])


def _table(record: Row) -> str:
    head = ["step, -Os", "arm", "RAM", "code", "step", "inference", "after 1, 5, 20 passes, %"]
    learned = record["passes"]["rows"] if "passes" in record else []
    passes = {(row["net"], row["arm"]): row["passes"] for row in learned}
    names = ("ram_bytes", "code_bytes", *COUNTS)
    lines = [
        [
            row["net"], row["arm"], *(f"{row[name]:,}" for name in names),
            ", ".join(
                f"{100 * each['accuracy']:.1f}"
                for each in passes.get((row["net"], row["arm"]), {}).values()
            ),
        ]
        for row in record["table"]["rows"]
    ]  # fmt: skip
    return columns([head, *lines])


def _adaptor(section: Row) -> str:
    head = ["adaptor", "photos a class", "accuracy", "rate", "RAM, bytes", "step"]
    lines = []
    for row in section["rows"]:
        board = section["boards"].get(row["arm"], {})
        most = board.get("total_bytes") or section["peak_bytes_in_python"][row["arm"]]
        lines.append([
            row["arm"], row["photos_of_a_class"], _accuracy(row), f"{row.get('lr', '-')}",
            f"{most:,}", _counts(board)[0],
        ])  # fmt: skip
    return columns([head, *lines])


def main() -> None:
    """Measure some sections, write them beside the others, print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of edge.json")
    parser.add_argument("--only", choices=SECTIONS, nargs="+", default=SECTIONS)
    parser.add_argument("--features", type=Path, default=Path("vgg16_imagenette.npz"))
    parser.add_argument("--rivals", type=Path, help="folder of rivals' sources, for the table")
    for word, names in (("--arms", edge_passes.ARMS), ("--nets", edge_passes.NETS)):
        parser.add_argument(word, choices=names, nargs="+", default=names, help="of the passes")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    file = arguments.out / "edge.json"
    before = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    record = before | {
        "benchmark": "edge", "command": COMMAND, "machine": machines(before),
        "versions": versions() | tools(), "how": " ".join((__doc__ or "").split()),
    }  # fmt: skip
    for section in arguments.only:
        if section == "passes":  # a row after another: the others stay
            rows = record.get(section, {}).get("rows", [])
            stages = edge_passes.measure(arguments.arms, arguments.nets, rows)
        else:
            stages = iter([measure(section, arguments.features, arguments.rivals)])
        for figures in stages:
            record[section] = {"commit": commit()} | figures
            file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(table(record))


if __name__ == "__main__":
    main()
