"""Processors that an emulator plays here: exported C, compiled for them, learns and says its bits.

`steps/steps.c` is the same program on all of them: it computes its samples and prints hashes of
the weights, outputs, losses and records.
"""

import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = Path(__file__).parent / "steps"
WARNINGS = ("-Wall", "-Wextra", "-Wshadow", "-Werror")
STEPS = PROGRAMS / "steps.c"
LINE = re.compile(r"([a-z]+) ([0-9a-f]{8})")


@dataclass(frozen=True)
class Machine:
    """How programs are compiled, linked and run for a processor.

    Args:
        compiler: of C.
        emulator: the command in front of a program; none on this machine.
        flags: of the processor and the language.
        linking: of the C library and of the places in memory.
        end: the file with `put` and, if the processor needs it, `main`.
        main: what `main` of the program is called, if `end` has its own.
        level: of optimisation; where a unit could fuse multiply-adds, one that looks for them.
    """

    compiler: str
    emulator: tuple[str, ...] = ()
    flags: tuple[str, ...] = ("-std=gnu11", "-Wconversion")
    linking: tuple[str, ...] = ()
    end: str = "hosted.c"
    main: str = "main"
    level: str = "-Os"

    @property
    def missing(self) -> str:
        """What is not installed, as the reason of a test that is skipped; "" if all is there."""
        tools = (self.compiler, *self.emulator[:1])
        lost = [tool for tool in tools if shutil.which(tool) is None]
        return f"{' and '.join(lost)} not installed" if lost else ""

    def tool(self, name: str) -> str:
        """Another program of the compiler's family: size, nm, objdump, g++."""
        return f"{self.compiler.removesuffix('gcc')}{name}"


def _risc_v(march: str, mabi: str, level: str = "-Os") -> Machine:
    """A core of QEMU's virt board, in whose RAM from 0x80000000 on picolibc puts the program."""
    places = {"flash": 0x80000000, "flash_size": 1 << 22, "ram": 0x80400000, "ram_size": 1 << 22}
    words = (f"-Wl,--defsym=__{name}={value:#x}" for name, value in places.items())
    library = ("--specs=picolibc.specs", "--oslib=semihost", "--crt0=semihost", "-Tpicolibc.ld")
    target = (f"-march={march}", f"-mabi={mabi}", "-misa-spec=2.2")
    emulator = ("qemu-system-riscv32", "-M", "virt", "-bios", "none", "-nographic", "-serial")
    emulator += ("none", "-monitor", "none", "-semihosting-config", "enable=on,target=native")
    return Machine(
        "riscv64-unknown-elf-gcc",
        (*emulator, "-kernel"),
        (*target, "-std=gnu11", "-Wconversion", "--specs=picolibc.specs"),
        (*target, *library, *words),
        level=level,
    )


def _avr(mcu: str) -> Machine:
    simulator = ("simavr", "-m", mcu, "-f", "16000000")
    flags = (f"-mmcu={mcu}", "-std=gnu99")
    return Machine("avr-gcc", simulator, flags, flags, "avr.c", "program")


HERE = Machine("gcc", level="-O2")
MACHINES = {
    "RV32IMC": _risc_v("rv32imc", "ilp32"),  # as an ESP32-C3
    "RV32IMFC": _risc_v("rv32imfc", "ilp32f", "-O2"),  # with a floating-point unit, which fuses
    "PowerPC": Machine("powerpc-linux-gnu-gcc", ("qemu-ppc",), linking=("-static",), level="-O2"),
    "ATmega1284P": _avr("atmega1284p"),
}


def compiled(machine: Machine, folder: Path, defines: Sequence[str]) -> Path:
    """The program for a machine, with its objects beside it."""
    folder.mkdir(exist_ok=True)
    source, objects = folder.parent, []
    for file in (*sorted(source.glob("*.c")), STEPS, PROGRAMS / machine.end):
        objects.append(folder / f"{file.stem}.o")
        main = [f"-Dmain={machine.main}"] * (file == STEPS)
        own = [*machine.flags, machine.level, *WARNINGS, *main, *(f"-D{word}" for word in defines)]
        command = [machine.compiler, *own, f"-I{source}", "-c", str(file), "-o", str(objects[-1])]
        subprocess.run(command, check=True)
    program = folder / "steps"
    command = [machine.compiler, *machine.linking, *map(str, objects), "-o", str(program)]
    subprocess.run(command, check=True)
    return program


def said(machine: Machine, program: Path) -> dict[str, str]:
    """What a program says: hashes by what they are of."""
    command = [*machine.emulator, str(program)]
    ran = subprocess.run(command, capture_output=True, timeout=120)
    text = re.sub(rb"\x1b\[[0-9;]*m", b"", ran.stdout + ran.stderr).decode(errors="replace")
    return dict(LINE.findall(text))


def sections(machine: Machine, file: Path) -> dict[str, int]:
    """Bytes of each section of an object or a program."""
    command = [machine.tool("size"), "-A", str(file)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name: int(size) for name, size in re.findall(r"^(\.\S+)\s+(\d+)", text, re.MULTILINE)}


def ram_of(machine: Machine, file: Path) -> int:
    """Bytes of RAM: of variables, and on an AVR of constants that are not in flash."""
    kinds = (".data", ".bss", ".rodata") if machine.compiler == "avr-gcc" else (".data", ".bss")
    return sum(n for name, n in sections(machine, file).items() if name.startswith(kinds))


def instructions(machine: Machine, file: Path) -> set[str]:
    """The instructions of an object, without their operands."""
    command = [machine.tool("objdump"), "-d", "--no-show-raw-insn", str(file)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return set(re.findall(r"^\s*[0-9a-f]+:\s+(\S+)", text, re.MULTILINE))
