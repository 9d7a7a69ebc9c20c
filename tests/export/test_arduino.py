"""Libraries of Arduino: their sketches compile for other processors, and the specification holds.

The rules are those of the Arduino library specification, as arduino-lint checks them at its
level "specification", as far as they can be checked without the index of all libraries.
"""

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import tpsgd
from tpsgd import rules
from tpsgd_export.to_c.compiled import compiler

pytestmark = [
    pytest.mark.skipif(compiler() is None, reason="no C compiler"),
    pytest.mark.usefixtures("unwatched"),
]
CORE = Path(__file__).parent / "sketch"
PROCESSORS = {
    "Cortex-M0": ["arm-none-eabi-g++", "-std=gnu++17", "-mcpu=cortex-m0", "-mthumb"],
    "ESP32-C3": [
        *("riscv64-unknown-elf-g++", "-std=gnu++17"),
        *("-march=rv32imc", "-mabi=ilp32", "-misa-spec=2.2"),
    ],
    "ATmega2560": ["avr-g++", "-std=gnu++11", "-mmcu=atmega2560"],
}
WINDOW = {"shape": (2, 12), "scaling": {"method": "standard", "shift": [5.0], "scale": [4.0]}}
REQUIRED = (
    *("name", "version", "author", "maintainer", "sentence", "paragraph", "category", "url"),
    *("architectures", "includes"),
)
OPTIONAL = ("depends", "dot_a_linkage", "precompiled", "ldflags", "email", "license")
CATEGORIES = (
    *("Display", "Communication", "Signal Input/Output", "Sensors", "Device Control", "Timing"),
    *("Data Storage", "Data Processing", "Other"),
)
NAME = r"[A-Za-z0-9][A-Za-z0-9 _.-]{,62}"
FORMS = {  # of the fields of library.properties
    "name": rf"(?![Aa]rduino)(?=.*[A-Za-z]){NAME}",
    "version": r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)",
    "maintainer": r"(?![Aa]rduino).+",
    "sentence": r".+\.",
    "category": "|".join(map(re.escape, CATEGORIES)),
    "url": r"https?://\S+",
    "architectures": r"(\*|\w+)(, ?(\*|\w+))*",
}
KEYWORD = re.compile(r"[A-Za-z_]\w*\t(KEYWORD[123]|LITERAL[12])")
FOREIGN = (".exe", ".pde", ".a", ".o")


@pytest.fixture(scope="module", params=["class names", "no names", "numbers"])
def library(request, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("library")
    torch.manual_seed(0)
    layers = [nn.Conv1d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(40, 2)]
    options = {"shape": (2, 12), "rule": rules.readout(), "name": "gait", "inputs": WINDOW}
    if request.param == "class names":
        options["classes"] = ["rest", "walk"]
    if request.param == "numbers":
        layers = [nn.Linear(3, 4), nn.LeakyReLU(), nn.Linear(4, 1)]
        x = torch.randn(100, 3)
        options = {"shape": (3,), "rule": "tpsgd-l2", "samples": x, "labels": x[:, :1]}
    tpsgd.export.c(nn.Sequential(*layers), folder, files="arduino", **options)
    return folder


def properties(folder: Path) -> list[tuple[str, str]]:
    lines = (folder / "library.properties").read_text().splitlines()
    return [(key, value) for key, _, value in (line.partition("=") for line in lines if line)]


def violations(folder: Path) -> Iterator[str]:
    """What the specification of libraries forbids."""
    pairs = properties(folder)
    fields = dict(pairs)
    yield from (f"no {key}" for key in REQUIRED if not fields.get(key))
    yield from (f"unknown {key}" for key, _ in pairs if key not in REQUIRED + OPTIONAL)
    if len(fields) < len(pairs):
        yield "a field twice"
    for key, form in FORMS.items():
        if not re.fullmatch(form, fields.get(key, "")):
            yield f"{key}: {fields.get(key)}"
    if fields.get("sentence", "") in fields.get("paragraph", ""):
        yield "the paragraph repeats the sentence"
    headers = {path.name for path in (folder / "src").glob("*.h")}
    included = fields.get("includes", "").split(",")
    yield from (f"no {name}" for name in included if name not in headers)
    yield from structure(folder)


def structure(folder: Path) -> Iterator[str]:
    """What the specification forbids of the folder of a library."""
    for path in folder.rglob("*"):
        if path.is_symlink() or path.suffix in FOREIGN or path.name.startswith("."):
            yield f"{path.name} in a library"
    if (folder / "utility").exists() or list(folder.glob("*.[ch]*")):
        yield "sources beside src"
    if not (folder / "README.md").exists():
        yield "no README"
    sketches = list(folder.glob("examples/*"))
    if not sketches:
        yield "no examples"
    for sketch in sketches:
        if not (sketch / f"{sketch.name}.ino").is_file() or not re.fullmatch(NAME, sketch.name):
            yield f"the sketch {sketch.name}"
    for line in (folder / "keywords.txt").read_text().splitlines():
        if not KEYWORD.fullmatch(line):
            yield f"keywords.txt: {line}"


def test_a_library_keeps_to_the_specification(library):
    assert not list(violations(library))


CHANGES = {
    "a name of Arduino's": ("library.properties", "name=tpsgd", "name=Arduino_tpsgd"),
    "a sign in the name": ("library.properties", "name=tpsgd", "name=tpsgd/"),
    "a long name": ("library.properties", "name=tpsgd", f"name={60 * 'x'}"),
    "two numbers of a version": ("library.properties", "version=1.0.0", "version=1.0"),
    "an unknown category": ("library.properties", "Data Processing", "Learning"),
    "a header that is not there": ("library.properties", "includes=", "includes=my_"),
    "no author": ("library.properties", "author=tpsgd.export", "author="),
    "no full stop": ("library.properties", "backpropagation.", "backpropagation"),
    "spaces for a tab": ("keywords.txt", "\t", "    "),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_the_specification_forbids_is_noticed(change, library, tmp_path):
    file, right, wrong = CHANGES[change]
    copy = Path(shutil.copytree(library, tmp_path / "copy"))
    text = (copy / file).read_text()
    assert right in text
    (copy / file).write_text(text.replace(right, wrong))
    assert list(violations(copy))


def test_a_sketch_in_a_folder_of_another_name_is_noticed(library, tmp_path):
    copy = Path(shutil.copytree(library, tmp_path / "copy"))
    (copy / "examples/learn").rename(copy / "examples/train")
    (copy / "src/link.h").symlink_to("net.h")
    assert len(list(violations(copy))) == 2


@pytest.mark.full
@pytest.mark.parametrize("processor", PROCESSORS)
def test_sketches_compile_for_another_processor(processor, library):
    tool, standard, *flags = PROCESSORS[processor]
    if shutil.which(tool) is None:
        pytest.skip(f"{tool} not installed")
    common = [*flags, "-Os", "-Wall", "-Wextra", "-Werror", "-ffreestanding", f"-I{library}/src"]
    for sketch in library.glob("examples/*/*.ino"):
        command = [tool, standard, *common, f"-I{CORE}", "-include", "Arduino.h", "-x", "c++"]
        subprocess.run([*command, "-c", str(sketch), "-o", "/dev/null"], check=True)
    for source in library.glob("src/*.c"):
        command = [tool.replace("g++", "gcc"), "-std=gnu11", *common]
        subprocess.run([*command, "-c", str(source), "-o", "/dev/null"], check=True)
