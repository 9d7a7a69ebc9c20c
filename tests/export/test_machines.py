"""Exported C on emulated RISC-V cores, a PowerPC, whose highest byte is first, and an AVR."""

import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from export.joined_nets import Basic, Pooled
from export.machines import HERE, MACHINES, WARNINGS, compiled, instructions, ram_of, said
from torch import nn

import tpsgd
from tpsgd import projections, rules

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(bool(HERE.missing), reason=HERE.missing),
    pytest.mark.usefixtures("unwatched"),
]
AVR = MACHINES["ATmega1284P"]
NAMES = ["rest", "walk", "run", "jump"]
GENERATOR = torch.Generator().manual_seed(1)
ROWS, MAPS = (torch.rand(200, *size, generator=GENERATOR) for size in ((12,), (2, 9, 6)))
LABELS, NUMBERS = torch.arange(200) % 4, torch.randn(200, 2, generator=GENERATOR)
SCALED = {"shape": (12,), "scaling": {"method": "standard", "shift": [0.1] * 12, "scale": [3] * 12}}


@dataclass
class Case:
    """A net, how it is exported, and what `steps.c` must know of it.

    Args:
        layers: of the model.
        options: of the export.
        defines: for `steps.c`.
        frozen: the layers that do not learn.
        descriptors: bytes of the tables that an AVR keeps in RAM, at most: sizes; of recurrent and
            joined layers also rows.
    """

    layers: Callable[[], list[nn.Module]]
    options: dict[str, Any]
    defines: tuple[str, ...] = ("BATCH=1",)
    frozen: tuple[int, ...] = ()
    descriptors: int = 72
    head: bool = False

    def write(self, folder: Path) -> Path:
        torch.manual_seed(0)
        if self.head:
            model = nn.Sequential(*self.layers()) if self.layers() else None
            tpsgd.export.one_pass(folder, model=model, samples=ROWS, **self.options)
            return folder
        model = nn.Sequential(*self.layers())
        for i in self.frozen:
            model[i].requires_grad_(False)
        tpsgd.export.c(model, folder, **self.options)
        return folder


def dense() -> list[nn.Module]:
    return [
        nn.Linear(12, 8), nn.LeakyReLU(), nn.Linear(8, 9), nn.Tanh(), nn.Linear(9, 4),
    ]  # fmt: skip


def maps() -> list[nn.Module]:
    return [
        nn.Conv2d(2, 6, (3, 2), stride=(2, 1), padding=2, dilation=2), nn.ReLU(),
        nn.Conv2d(6, 4, 3, groups=2, padding=1), nn.Sigmoid(), nn.MaxPool2d(2, 1), nn.Flatten(),
        nn.Linear(112, 4),
    ]  # fmt: skip


def plain_maps() -> list[nn.Module]:
    return [
        nn.Conv2d(2, 5, 3, stride=2), nn.ReLU(), nn.Conv2d(5, 4, 2), nn.LeakyReLU(), nn.Flatten(),
        nn.Linear(12, 4),
    ]  # fmt: skip


def residuals() -> list[nn.Module]:
    return [
        nn.Conv2d(2, 4, 3, stride=2), nn.LeakyReLU(), Basic(4, 4), Basic(4, 5, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, 4),
    ]  # fmt: skip


def pool_inside() -> list[nn.Module]:
    return [
        nn.Conv2d(2, 4, 3, stride=2), nn.ReLU(), Pooled(nn.MaxPool2d(2)), nn.Flatten(),
        nn.Linear(10, 4),
    ]  # fmt: skip


def cells() -> list[nn.Module]:
    first = tpsgd.Recurrent(3, 6, sequence=True)
    return [first, tpsgd.Recurrent(6, 5), nn.Linear(5, 4)]


def diagonals() -> list[nn.Module]:
    first = tpsgd.Recurrent.diagonal(3, 5, loss_at="last", sequence=True)
    return [first, tpsgd.Recurrent(5, 4), nn.Linear(4, 4)]


SEQUENCES = ("BATCH=1", "SEQUENCES")
INTEGERS = ("BATCH=1", "INTEGERS")
FLAT, MAP, STEPS = {"shape": (12,)}, {"shape": (2, 9, 6)}, {"shape": (7, 3)}
BYTES = {"numbers": "int8", "least": 0, "labels": LABELS}
CASES = {
    "codes in flash, scaling, names": Case(
        dense,
        FLAT | {"rule": "readout", "codes": "flash", "inputs": SCALED, "classes": NAMES},
        ("BATCH=1", "SCALED"),
    ),
    "learned codes": Case(dense, FLAT | {"optimizer": "momentum"}),
    "hash of normal numbers": Case(
        dense,
        FLAT | {"rule": rules.readout(projection=projections.normal()), "codes": "hash"},
    ),
    "frozen maps, bits": Case(
        maps, MAP | {"rule": "readout", "codes": "binary"}, frozen=(0,), descriptors=152
    ),
    "maps frozen in bytes": Case(
        maps, MAP | {"rule": "readout", "frozen": "int8"}, frozen=(0, 2), descriptors=152
    ),
    "targets, adam, batch": Case(
        maps, MAP | {"rule": "tpsgd-l2", "optimizer": "adam", "batch": 2, "codes": "hash"},
        ("BATCH=2",), descriptors=152,
    ),
    "backprop through frozen maps": Case(
        plain_maps, MAP | {"rule": "backprop"}, frozen=(2,), descriptors=96
    ),
    "backprop through a frozen layer": Case(dense, FLAT | {"rule": "backprop"}, frozen=(2,)),
    "residual, one frozen in bytes": Case(
        residuals, MAP | {"rule": "readout", "frozen": "int8"}, frozen=(0, 2), descriptors=1000
    ),
    "residual, learned codes": Case(
        residuals, MAP | {"optimizer": "momentum"}, frozen=(0, 2), descriptors=1000
    ),
    "residual, the last block with the head": Case(
        pool_inside, MAP | {"rule": "readout", "codes": "hash", "blocks": [1, 2]}, descriptors=700
    ),
    "residual, a pool inside": Case(
        pool_inside, MAP | {"rule": "readout", "codes": "hash", "batch": 2}, ("BATCH=2",),
        descriptors=700,
    ),
    "numbers": Case(
        lambda: [nn.Linear(12, 6), nn.Tanh(), nn.Linear(6, 2)],
        FLAT | {"rule": "tpsgd-l2", "samples": ROWS, "labels": NUMBERS},
        ("BATCH=1", "NUMBERS"),
    ),
    "frozen cells": Case(
        cells,
        STEPS | {"rule": [rules.frozen(), rules.tpsgd_l2(), rules.readout()], "codes": "hash"},
        SEQUENCES, descriptors=512,
    ),
    "frozen diagonal": Case(
        diagonals, STEPS | {"rule": [rules.frozen(), rules.readout(), rules.readout()]},
        SEQUENCES, descriptors=512,
    ),
    "integers": Case(dense, FLAT | BYTES | {"samples": ROWS}, INTEGERS, descriptors=96),
    "frozen integers": Case(
        dense, FLAT | BYTES | {"samples": ROWS}, INTEGERS, frozen=(0,), descriptors=96
    ),
    "frozen integer maps": Case(
        lambda: [nn.Conv2d(2, 6, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 4)],
        MAP | BYTES | {"samples": MAPS, "numbers": "int16"}, INTEGERS, (0,), descriptors=160,
    ),
    "integer maps that learn": Case(  # by ReLU, whose slope has a binary point of 0
        lambda: [
            nn.Conv2d(2, 6, 3), nn.ReLU(), nn.Conv2d(6, 5, 3), nn.ReLU(), nn.Flatten(),
            nn.Linear(50, 4),
        ],
        MAP | BYTES | {"samples": MAPS, "rate": 0.03}, INTEGERS, descriptors=200,
    ),
    "head": Case(
        list, FLAT | {"features": 24, "classes": NAMES, "inputs": SCALED},
        ("BATCH=1", "HEAD", "SCALED"), head=True,
    ),
    "head behind an encoder": Case(
        lambda: [nn.Linear(12, 7), nn.LeakyReLU()], FLAT | {"features": 20, "classes": 4},
        ("BATCH=1", "HEAD"), head=True,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """The exports that a test of this session has asked for."""
    return {}


@pytest.fixture
def folder(case, folders, tmp_path_factory) -> Path:
    if case not in folders:
        folders[case] = CASES[case].write(tmp_path_factory.mktemp("net"))
    return folders[case]


def skip_without(machine) -> None:
    if machine.missing:
        pytest.skip(machine.missing)


def here(case: str, folder: Path) -> dict[str, str]:
    return said(HERE, compiled(HERE, folder / "here", CASES[case].defines))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", MACHINES)
def test_another_machine_learns_the_bits_of_this_one(name, case, folder):
    machine = MACHINES[name]
    skip_without(machine)
    ours = here(case, folder)
    assert {"begin", "weights", "outputs"} <= set(ours) and ours["begin"] != ours["weights"]
    assert ours["errors"] == "050c5d1f"  # a hash of 0
    program = compiled(machine, folder / name, CASES[case].defines)
    assert said(machine, program) == ours


@pytest.mark.parametrize("case", CASES)
def test_on_an_avr_constants_take_no_ram(case, folder):
    skip_without(AVR)
    program = compiled(AVR, folder / "ram", CASES[case].defines)
    objects = {file: ram_of(AVR, file) for file in program.parent.glob("*.o")}
    own = objects.pop(program.with_name("steps.o"))
    assert sum(objects.values()) <= CASES[case].descriptors
    header = "".join(path.read_text() for path in folder.glob("*.h"))
    planned = max(int(n) for n in re.findall(r"_RAM_BYTES (\d+) ", header))
    harness = own - planned
    assert 0 < harness < 300 + 4 * 12 * 18
    assert ram_of(AVR, program) <= planned + CASES[case].descriptors + harness + 2  # even addresses


def changed(folder: Path, target: Path, right: str, wrong: str) -> Path:
    """The files of an export with other words."""
    target.mkdir()
    texts = {path.name: path.read_text() for path in folder.glob("*.[ch]")}
    assert any(right in text for text in texts.values())
    for name, text in texts.items():
        (target / name).write_text(text.replace(right, wrong))
    return target


@pytest.mark.parametrize("case", ["codes in flash, scaling, names", "integers"])
def test_a_record_in_the_order_of_a_processors_bytes_is_noticed(case, folder, tmp_path):
    machine = MACHINES["PowerPC"]
    skip_without(machine)
    right = "uint8_t byte = (uint8_t)(number & 255u);"
    files = changed(folder, tmp_path / "net", right, "uint8_t byte = *(uint8_t *)&number;")
    ours, theirs = (
        here(case, files),
        said(machine, compiled(machine, files / "ppc", CASES[case].defines)),
    )
    assert ours == here(case, folder) and ours["record"] != theirs.pop("record")
    assert theirs == {name: word for name, word in ours.items() if name != "record"}


@pytest.mark.parametrize("case", ["codes in flash, scaling, names"])
def test_without_flash_an_avr_would_need_ram_for_its_constants(case, folder, tmp_path):
    skip_without(AVR)
    tables = changed(folder, tmp_path / "net", "defined(__AVR__)", "0")
    program = compiled(AVR, tables / "ram", CASES[case].defines)
    assert ram_of(AVR, program.with_name("net.o")) > 1000


FROZEN = [
    "frozen maps, bits", "backprop through frozen maps", "backprop through a frozen layer",
    "frozen cells", "frozen diagonal", "codes in flash, scaling, names",
    "residual, one frozen in bytes",
]  # fmt: skip


@pytest.mark.parametrize("case", FROZEN)
def test_an_avr_that_looks_for_its_tables_in_ram_learns_other_bits(case, folder, tmp_path):
    skip_without(AVR)
    lost = changed(folder, tmp_path / "net", "#define TPS_AVR 1", "#define TPS_AVR 0")
    program = compiled(AVR, lost / "lost", CASES[case].defines)
    assert said(AVR, program)["weights"] != here(case, folder)["weights"]


@pytest.mark.parametrize("case", ["codes in flash, scaling, names"])
@pytest.mark.parametrize("pragma", [True, False])
def test_a_unit_that_fuses_is_told_not_to(pragma, case, folder, tmp_path):
    machine = MACHINES["RV32IMFC"]
    skip_without(machine)
    right = '#pragma GCC optimize("fp-contract=off", "no-tree-loop-distribute-patterns")'
    files = changed(folder, tmp_path / "net", right, right if pragma else "")
    program = compiled(machine, files / "fused", CASES[case].defines)
    words = instructions(machine, program.with_name("net.o"))
    fused = [word for word in words if re.match(r"fn?m(add|sub)\.", word)]
    assert bool(fused) != pragma and any(word.startswith("fadd") for word in words)


CPP = [
    "codes in flash, scaling, names", "maps frozen in bytes", "frozen diagonal", "frozen integers",
    "residual, one frozen in bytes", "residual, a pool inside", "head",
]  # fmt: skip


@pytest.mark.parametrize("name", ["RV32IMC", "ATmega1284P"])
@pytest.mark.parametrize("case", CPP)
def test_a_compiler_of_cpp_for_another_machine_takes_the_files(name, case, folder):
    machine = MACHINES[name]
    skip_without(machine)
    standard = "-std=gnu++14" if machine is AVR else "-std=gnu++17"
    flags = [flag for flag in machine.flags if flag.startswith("-m")]
    for file in folder.glob("*.c"):
        command = [machine.compiler, "-x", "c++", standard, *flags, *WARNINGS, "-ffreestanding"]
        command += ["-Os", f"-I{folder}", "-c", str(file), "-o", "/dev/null"]
        subprocess.run(command, check=True)
