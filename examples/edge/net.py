"""The net of the Makefile: an MLP for digits as C, and the digits as bytes in `data.h`.

python net.py FOLDER [EPOCHS]
"""

import sys
from pathlib import Path

import torch
from torch import nn

import tpsgd
from tpsgd import rules

RATE, SCALE = 0.01, 1 / 16  # of the steps on the board; of its bytes, which are 0 to 16


def table(name: str, numbers: list[int], width: int = 1) -> str:
    """An array of bytes as C; rows of `width` numbers."""
    rows = f"[][{width}]" if width > 1 else "[]"
    each = [", ".join(map(str, numbers[i : i + width])) for i in range(0, len(numbers), width)]
    body = ",\n".join(f"{{{row}}}" if width > 1 else row for row in each)
    return f"static const uint8_t {name}{rows} = {{{body}}};\n"


def main(folder: Path, epochs: int = 5) -> None:
    """Write `net.h`, `net.c`, `tpsgd.h` and `data.h`."""
    digits = tpsgd.data.load("digits")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.LeakyReLU(), nn.Linear(32, 10))
    exported = tpsgd.export.c(
        model, folder, rule=rules.readout(scale=4.0), shape=(1, 8, 8), ram="16KB", overwrite=True
    )
    text = f"#include <stdint.h>\n#define EPOCHS {epochs}\n#define RATE {RATE}f\n"
    text += f"#define SCALE {SCALE}f\n"
    for name, (x, y) in {"train": digits.train, "test": digits.test}.items():
        pixels = (x.flatten(1) / SCALE).round().byte()
        text += f"#define {name.upper()} {len(x)}\n"
        text += table(f"{name}_x", pixels.flatten().tolist(), 64) + table(f"{name}_y", y.tolist())
    (folder / "data.h").write_text(text)
    print(exported)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:3]))
