"""Libraries of Arduino and Zephyr: sketches that run, and what other processors' compilers say."""

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

import tpsgd
from tpsgd import rules
from tpsgd.common.errors import TpsgdError
from tpsgd_export.to_c.compiled import CompiledNet

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="no g++"),
    pytest.mark.usefixtures("unwatched"),
]
BOARD = Path(__file__).parent / "board"
FLAGS = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-Wno-unused-variable"]
HEAD = '#include "Arduino.h"\nPort Serial;\nuint32_t now;\nint held = -1, samples;\n'
PROCESSORS = {
    "Cortex-M0": ["arm-none-eabi-g++", "-mcpu=cortex-m0", "-mthumb"],
    "ESP32-C3": ["riscv64-unknown-elf-g++", "-march=rv32imc", "-mabi=ilp32", "-misa-spec=2.2"],
}


def exported(folder: Path, *layers: nn.Module, files: str = "arduino", **options) -> Path:
    torch.manual_seed(0)
    tpsgd.export.c(nn.Sequential(*layers), folder, files=files, **options)
    return folder


def signals(folder: Path, **options) -> Path:
    layers = [nn.Conv1d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(40, 2)]
    options = {"rule": rules.readout(), "name": "gait", "classes": ["rest", "walk"], **options}
    return exported(folder, *layers, shape=(2, 12), **options)


def run(folder: Path, sketch: str, main: str) -> str:
    """What a sketch prints on a board that `main` plays."""
    text = HEAD + (folder / f"examples/{sketch}/{sketch}.ino").read_text() + main
    (folder / "sketch.cpp").write_text(text)
    program, sources = str(folder / "sketch"), sorted(map(str, folder.glob("src/*.c")))
    objects = [str(folder / "net.o")]
    subprocess.run(["gcc", "-c", *sources, "-o", *objects], check=True)
    command = ["g++", *FLAGS, f"-I{BOARD}", f"-I{folder}/src", str(folder / "sketch.cpp")]
    subprocess.run([*command, *objects, "-o", program], check=True)
    return subprocess.run([program], capture_output=True, text=True, check=True).stdout


WINDOW = """
#include <cstdio>
int main() {
  setup();
  for (int i = 0; i < 24; i++) { now += 10000; loop(); }  // three windows
  bool same = samples == 24;
  for (int c = 0; c < 2; c++)
    for (int t = 0; t < 12; t++) {
      int n = 12 + t;  // the sensor's counter, when this sample was read
      float raw = (float)(c ? ((n + 1) * 7 + A0 + 1) % 991 : n % 997);
      same = same && x[c * 12 + t] == (raw - 5.0f) / 4.0f;
    }
  held = 3;
  for (int i = 0; i < 6; i++) { now += 10000; loop(); }
  printf("%d\\n%s", same, Serial.out.c_str());
}
"""


def test_a_sketch_asks_and_teaches_windows_of_a_sensor(tmp_path):
    inputs = {"shape": (2, 12), "scaling": {"method": "standard", "shift": [5.0], "scale": [4.0]}}
    said = run(signals(tmp_path, inputs=inputs), "window", WINDOW).split()
    assert said[0] == "1" and len(said) == 5
    assert set(said[1:4]) <= {"rest", "walk"} and float(said[4]) > 0


LINES = """
#include <cstdio>
int main() {
  setup();
  Serial.in = "%s";
  while (Serial.available()) loop();
  printf("%%s", Serial.out.c_str());
}
"""


def test_a_sketch_learns_classes_from_lines(tmp_path):
    layers = [nn.Linear(3, 4), nn.LeakyReLU(), nn.Linear(4, 2)]
    folder = exported(tmp_path, *layers, shape=(3,), rule=rules.readout())
    lines = "1 0 -1 1\\n" * 60 + "-1 0 1 0\\n" * 60
    said = run(folder, "learn", LINES % (lines + "1 0 -1\\n-1 0 1\\n")).split()
    losses = [float(word) for word in said[:-2]]
    assert len(losses) == 120 and losses[59] < losses[0] and said[-1] == "0"
    assert not (folder / "examples/window").exists()  # three numbers are no window


@pytest.mark.full
def test_a_sketch_learns_numbers_from_lines(tmp_path):
    x = torch.randn(200, 3)
    layers = [nn.Linear(3, 4), nn.LeakyReLU(), nn.Linear(4, 1)]
    folder = exported(
        tmp_path, *layers, shape=(3,), rule="tpsgd-l2", samples=x, labels=20 + x[:, :1]
    )
    lines = "1 0 -1 21\\n-1 0 1 19\\n" * 500
    said = run(folder, "learn", LINES % (lines + "1 0 -1\\n")).split()
    assert len(said) == 1001 and abs(float(said[-1]) - 21) < 0.3


def test_a_module_of_zephyr_has_its_files(tmp_path):
    signals(tmp_path, files="zephyr")
    module = yaml.safe_load((tmp_path / "zephyr/module.yml").read_text())
    assert module == {"name": "tpsgd_gait", "build": {"cmake": ".", "kconfig": "Kconfig"}}
    cmake = (tmp_path / "CMakeLists.txt").read_text()
    assert "CONFIG_TPSGD_GAIT" in cmake and "src/gait.c" in cmake
    assert "config TPSGD_GAIT\n\tbool" in (tmp_path / "Kconfig").read_text()
    assert (tmp_path / "src/gait.c").exists()
    readme = (tmp_path / "README.md").read_text()
    program = (
        readme.split("```c\n")[1].split("```")[0].replace("<zephyr/storage/flash_map.h>", '"map.h"')
    )
    (tmp_path / "map.h").write_text(
        "#include <stdint.h>\n#include <stddef.h>\nstruct flash_area;\n"
        "int flash_area_erase(const struct flash_area *, long, size_t);\n"
        "int flash_area_write(const struct flash_area *, long, const void *, size_t);\n"
        "int flash_area_read(const struct flash_area *, long, void *, size_t);\n"
    )
    (tmp_path / "keep.c").write_text(program)
    command = [
        "gcc",
        "-Wall",
        "-Wextra",
        "-Wno-unused-variable",
        "-Werror",
        "-Isrc",
        "-c",
        "keep.c",
    ]
    subprocess.run(command, cwd=tmp_path, check=True)


def parts_of_module(folder: Path, *settings: str) -> dict[str, str]:
    """What CMakeLists.txt of a module adds to a build of Zephyr, by its kind."""
    script = str(Path(__file__).with_name("zephyr.cmake"))
    command = ["cmake", *settings, f"-DMODULE={folder}", "-P", script]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    words = (line.partition(" ") for line in ran.stderr.splitlines())
    return {kind: name for kind, _, name in words}


@pytest.mark.skipif(shutil.which("cmake") is None, reason="cmake is not installed")
def test_cmake_finds_the_files_of_a_module_if_it_is_chosen(tmp_path):
    signals(tmp_path, files="zephyr")
    assert parts_of_module(tmp_path) == {}
    parts = parts_of_module(tmp_path, "-DCONFIG_TPSGD_GAIT=y")
    assert parts == {"library": "", "source": "src/gait.c", "include": "src"}
    command = ["gcc", *FLAGS[1:], "-std=gnu11", "-ffreestanding", f"-I{parts['include']}"]
    command += ["-c", parts["source"], "-o", "gait.o"]
    subprocess.run(command, cwd=tmp_path, check=True)
    (tmp_path / "src/gait.c").unlink()
    with pytest.raises(subprocess.CalledProcessError):
        parts_of_module(tmp_path, "-DCONFIG_TPSGD_GAIT=y")


def test_lines_of_kconfig_are_an_option_with_help(tmp_path):
    signals(tmp_path, files="zephyr")
    first, kind, word, *text = (tmp_path / "Kconfig").read_text().splitlines()
    assert first == "config TPSGD_GAIT" and word == "\thelp"
    assert kind.startswith('\tbool "') and kind.endswith('"') and kind.count('"') == 2
    assert text and all(line.startswith("\t  ") for line in text)


def test_zephyr_needs_another_name_than_its_own(tmp_path):
    with pytest.raises(TpsgdError, match=r"needs a name=.*NET_OK"):
        signals(tmp_path, files="zephyr", name="net")
    with pytest.raises(TpsgdError, match="not recurrent, with batch=1"):
        signals(tmp_path, batch=2)


@pytest.mark.parametrize("processor", PROCESSORS)
def test_a_library_compiles_for_another_processor(processor, tmp_path):
    tool, *flags = PROCESSORS[processor]
    if shutil.which(tool) is None:
        pytest.skip(f"{tool} is not installed")
    folder = signals(tmp_path)
    for compiler, standard in ((tool, "-std=gnu++17"), (tool.replace("g++", "gcc"), "-std=gnu11")):
        command = [
            compiler,
            *flags,
            standard,
            "-Os",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-ffreestanding",
        ]
        language = ["-x", "c++"] if compiler == tool else []
        source = str(folder / "src/gait.c")
        subprocess.run([*command, *language, "-c", source, "-o", "/dev/null"], check=True)


AVR = """
#include <string.h>
#define PROGMEM __attribute__((section("progmem")))
static inline float pgm_read_float(const float *p) { return *p; }
#define pgm_read_byte(p) (*(const uint8_t *)(p))
#define pgm_read_word(p) (*(const uint16_t *)(p))
#define pgm_read_dword(p) (*(const uint32_t *)(p))
#define memcpy_P memcpy
"""
AS_AN_AVR = ["-D__AVR__", "-fno-strict-aliasing"]


def with_avr_header(folder: Path) -> list[str]:
    """Flags for a compiler of this machine, as if it were one for an AVR: a header of avr-libc."""
    (folder / "avr").mkdir()
    (folder / "avr/pgmspace.h").write_text(AVR)
    return ["-std=c99", *AS_AN_AVR, f"-I{folder}"]


def test_an_avr_keeps_its_tables_out_of_its_ram(tmp_path):
    """`test_machines.py` runs programs of an AVR, where its compiler is installed."""
    layers = [nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 3)]
    exported(tmp_path, *layers, shape=(12,), files="plain", codes="flash", rule="readout")
    flags, target = with_avr_header(tmp_path), str(tmp_path / "net.o")
    command = ["gcc", *flags, "-fno-pie", "-c", "net.c", "-o", target]
    subprocess.run(command, cwd=tmp_path, check=True)
    sizes = subprocess.run(
        ["size", "-A", target], capture_output=True, text=True, check=True
    ).stdout
    (placed,) = [int(row.split()[1]) for row in sizes.splitlines() if row.startswith("progmem ")]
    assert placed >= 4 * (12 * 8 + 8 + 8 * 3 + 3) + 4 * 3 * 8
    text = (tmp_path / "net.c").read_text()
    assert "initial[i]" not in text and "TPS_NUMBER(initial + i)" in text


@pytest.mark.parametrize("frozen", ["float32", "int8"])
def test_tables_that_are_read_as_an_avr_does_give_the_same_bits(frozen, tmp_path):
    first = nn.Conv2d(2, 5, 3, groups=1)
    first.requires_grad_(False)
    layers = [first, nn.ReLU(), nn.Flatten(), nn.Linear(60, 6), nn.Tanh(), nn.Linear(6, 3)]
    options = {"shape": (2, 6, 5), "files": "plain", "rule": "readout", "codes": "flash"}
    exported(tmp_path, *layers, **options, frozen=frozen)
    x, weights = torch.randn(30, 60), []
    for flags in (("-std=c99",), with_avr_header(tmp_path)):
        net = CompiledNet(tmp_path, flags=flags)
        for i, sample in enumerate(x):
            net.step(sample, torch.tensor([i % 3]), 0.05)
        weights.append(net.weights)
    assert torch.equal(*weights) and weights[0].isfinite().all()


def test_an_avr_refuses_constants_that_it_cannot_reach(tmp_path):
    layers = [nn.Linear(200, 90), nn.ReLU(), nn.Linear(90, 3)]
    exported(tmp_path, *layers, shape=(200,), files="plain", rule="readout")
    flags = with_avr_header(tmp_path)
    command = ["gcc", *flags, "-c", "net.c", "-o", "/dev/null"]
    refused = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert refused.returncode and "first 64 KB of flash" in refused.stderr
