"""Exported nets on emulated microcontrollers: bytes, stack, and instructions of a step.

QEMU counts instructions (`-icount shift=0`: one takes a nanosecond), not cycles: it has no flash
that makes a processor wait, and no caches.
"""

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from tpsgd_export.to_c.source import array

PROGRAM = Path(__file__).parent.parent / "examples" / "edge" / "cortex_m"
LEARN = PROGRAM / "learn.c"
STRICT = ("-std=c99", "-pedantic", "-Wall", "-Wextra", "-Wconversion", "-Wshadow", "-Werror")
COMPILER, EMULATOR = "arm-none-eabi-gcc", "qemu-system-arm"


@dataclass(frozen=True)
class Board:
    """A machine that QEMU has: its processor, RAM, and instructions in a tick of its clock."""

    machine: str
    flags: tuple[str, ...]
    ram: str
    instructions: int = 40  # the clock has 25 MHz, and an instruction takes a nanosecond


FPU = ("-mfpu=fpv4-sp-d16", "-mfloat-abi=hard")
BOARDS = {
    "Cortex-M0": Board("microbit", ("-mcpu=cortex-m0", "-mfloat-abi=soft"), "16K", 0),
    "Cortex-M3": Board("mps2-an385", ("-mcpu=cortex-m3", "-mfloat-abi=soft"), "4M"),
    "Cortex-M4F": Board("mps2-an386", ("-mcpu=cortex-m4", *FPU), "4M"),
    "Cortex-M7": Board("mps2-an500", ("-mcpu=cortex-m7", "-mfpu=fpv5-sp-d16", FPU[1]), "4M"),
}
COUNTED = {  # instructions of a Cortex-M0, which a Cortex-M3 has, too, on a board with a clock
    "Cortex-M0, counted": Board("mps2-an385", ("-mcpu=cortex-m0", "-mfloat-abi=soft"), "4M"),
}


def missing() -> str | None:
    """What is not installed, if anything."""
    tools = [tool for tool in (COMPILER, EMULATOR) if shutil.which(tool) is None]
    return f"{' and '.join(tools)} not installed" if tools else None


def write_data(
    folder: Path, train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], **numbers: str
) -> None:
    """Samples as bytes in `data.h`; `numbers` are EPOCHS, RATE and SCALE."""
    texts = [f"#define {name} {value}" for name, value in numbers.items()]
    for name, (x, y) in {"train": train, "test": test}.items():
        width = x[0].numel()
        flat = array("uint8_t", f"{name}_bytes", map(str, x.flatten().tolist()))
        texts += [
            f"#define {name.upper()} {len(x)}",
            flat,
            f"#define {name}_x ((const uint8_t (*)[{width}]){name}_bytes)",
            array("uint8_t", f"{name}_y", map(str, y.tolist())),
        ]
    (folder / "data.h").write_text("#include <stdint.h>\n\n" + "\n".join(texts))


def on_host(folder: Path, compiler: str = "gcc", *flags: str, main: Path = LEARN) -> dict[str, str]:
    """What the program says on this machine."""
    program = folder / "learn"
    sources = [folder / "net.c", main, PROGRAM / "host.c"]
    command = [compiler, *STRICT, *(flags or ("-O2",)), f"-I{folder}", f"-I{PROGRAM}"]
    subprocess.run([*command, *map(str, sources), "-o", str(program)], check=True)
    return _said(subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout)


def on_board(folder: Path, name: str, optimise: str = "-O2", main: Path = LEARN) -> dict[str, str]:
    """What the program says on an emulated board, and the sizes of its parts."""
    board = (BOARDS | COUNTED)[name]
    script, elf = folder / "link.ld", folder / "learn.elf"
    text = (PROGRAM / "link.ld.in").read_text()
    script.write_text(text.replace("@FLASH@", "0x0").replace("@RAM@", board.ram))
    command = [COMPILER, "-mthumb", *board.flags, *STRICT, optimise, "-ffreestanding"]
    command += ["-fno-tree-loop-distribute-patterns", "-ffunction-sections", "-fdata-sections"]
    objects = []
    for source in (*sorted(folder.glob("*.c")), main, PROGRAM / "start.c"):
        objects.append(folder / f"{source.stem}.o")
        include = [f"-I{folder}", f"-I{PROGRAM}"]
        subprocess.run([*command, *include, "-c", str(source), "-o", str(objects[-1])], check=True)
    linking = ["-nostdlib", "-Wl,--gc-sections", f"-Wl,-Map={folder / 'learn.map'}", "-T"]
    libraries = ["-lc", "-lm", "-lgcc"]  # of which exported nets use the last one, if any
    linked = [*linking, str(script), *map(str, objects), *libraries, "-o", str(elf)]
    subprocess.run([COMPILER, "-mthumb", *board.flags, *linked], check=True)
    emulator = [EMULATOR, "-M", board.machine, "-nographic", "-monitor", "none", "-serial", "none"]
    emulator += ["-icount", "shift=0", "-semihosting-config", "enable=on,target=native"]
    ran = subprocess.run(
        [*emulator, "-kernel", str(elf)], capture_output=True, text=True, timeout=300
    )
    if ran.returncode:
        raise RuntimeError(f"{name} ended with status {ran.returncode}: {ran.stderr[-300:]}")
    said = _said(ran.stdout + ran.stderr)
    for what in ("step", "steps", "inference"):
        ticks = int(said.pop(what, 0))
        if board.instructions:
            said[what] = str(ticks * board.instructions)
    return said | _sizes(folder) | _linked(elf, objects[:-2])


def _said(text: str) -> dict[str, str]:
    return dict(line.split()[:2] for line in text.strip().splitlines())  # "right 350 of 359"


def _linked(elf: Path, objects: list[Path]) -> dict[str, str]:
    """Bytes of functions and of variables of some objects, as far as the linker kept them."""
    own = [entry for file in objects for entry in _symbols(file).items()]
    kept = _symbols(elf)
    code = sum(size for name, (kind, size) in own if kind in "tT" and name in kept)
    return {"linked": str(code), "static": str(_static(elf))}


def _symbols(file: Path) -> dict[str, tuple[str, int]]:
    """Kinds and bytes of what a file has, by their names."""
    command = ["arm-none-eabi-nm", "-S", str(file)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    sizes = re.findall(r"^\w+ (\w+) (\w) (\S+)$", text, re.MULTILINE)
    return {name: (kind, int(size, 16)) for size, kind, name in sizes}


def _static(elf: Path) -> int:
    """Bytes of all variables but the sample that the program holds."""
    symbols = _symbols(elf)
    return sum(size for name, (kind, size) in symbols.items() if kind in "bBdD" and name != "input")


def _sizes(folder: Path) -> dict[str, str]:
    """Bytes of code and constants of the net, and of its two structs as the linker placed them."""
    text = subprocess.run(
        ["arm-none-eabi-size", "-A", str(folder / "net.o")],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    sections = re.findall(r"^\.(text|rodata)\S*\s+(\d+)", text, re.MULTILINE)
    sizes = {kind: sum(int(n) for k, n in sections if k == kind) for kind in ("text", "rodata")}
    placed = (folder / "learn.map").read_text()
    structs = re.findall(r"^ \.bss\.(?:state|arena)\s+0x\w+\s+(0x\w+)", placed, re.MULTILINE)
    return {
        "code": str(sizes["text"]),
        "constants": str(sizes["rodata"]),
        "placed": str(sum(int(n, 16) for n in structs)),
    }
