"""`tpsgd export`: the three commands, from words and from saved models."""

import shutil
import subprocess
from pathlib import Path

import pytest

import tpsgd
from tpsgd.export.to_c.compiled import CompiledNet, compiler
from tpsgd.export.to_page import wasm

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C compiler")
SMALL = ("--data", "digits", "--model", "mlp:8")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """An empty folder to work in."""
    monkeypatch.chdir(tmp_path)


def test_c_prints_the_bytes_and_writes_a_net_that_learns(says):
    status, out, _ = says("export", "c", *SMALL, "--ram", "4KB", "--out", "net")
    assert status == 0 and "multiply-adds a step" in out and "run beside tpsgd.fit" in out
    net = CompiledNet("net")
    assert f"{net.ram:,} B" in out and net.params == 64 * 8 + 8 + 8 * 10 + 10


@pytest.mark.parametrize(
    "words, sentence",
    [
        (("--ram", "1KB"), "B of RAM"),
        (("--rule", "dfa"), "needs the error of the output"),
        (("--rule", "zorb"), "no local rule"),
        (("--activation", "gelu"), "GELU is not exported"),
        (("--numbers", "int4"), "float32, int8, int16"),
    ],
)
def test_mistakes_are_one_sentence_and_nothing_is_written(says, words, sentence):
    status, _, error = says("export", "c", *SMALL, *words, "--out", "net")
    assert status == 2 and sentence in error
    assert error.count("\n") == 1 and not list(Path("net").glob("*.c"))


def test_a_saved_model_is_exported_with_its_weights(says):
    assert says("train", "--epochs", "1", "--save", "model", *SMALL)[0] == 0
    assert says("export", "c", "--model", "model", "--data", "digits", "--out", "net")[0] == 0
    model = tpsgd.load("model").model
    first = next(p for p in model.parameters()).detach().flatten()
    assert first.equal(CompiledNet("net").weights[: first.numel()])


def test_onnx(says):
    pytest.importorskip("onnx")
    assert says("export", "onnx", *SMALL, "--out", "step.onnx")[0] == 0
    assert {"step.onnx", "predict.onnx", "run.py"} <= {p.name for p in Path().iterdir()}
    status, _, error = says("export", "onnx", *SMALL, "--out", "step.onnx")
    assert status == 2 and "--overwrite" in error


@pytest.mark.skipif(wasm.wasm_compiler() is None, reason="no compiler for WebAssembly")
def test_a_page(says):
    assert says("export", "page", *SMALL, "--out", "learns.html")[0] == 0
    assert Path("learns.html").stat().st_size < 300_000


ARDUINO_H = """
#include <stdint.h>
struct Port {
  void begin(long) {}
  int available() { return 0; } int peek() { return 0; } int read() { return 0; }
  float parseFloat() { return 0; } long parseInt() { return 0; }
  void println(long) {} void println(float) {} void println(unsigned) {} void println(int) {}
};
static Port Serial;
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_the_arduino_sketch_compiles(says, tmp_path):
    assert says("export", "c", *SMALL, "--files", "arduino", "--out", "lib")[0] == 0
    library = tmp_path / "lib"
    assert "architectures=*" in (library / "library.properties").read_text()
    (tmp_path / "Arduino.h").write_text(ARDUINO_H)
    sketch, net, program = (tmp_path / name for name in ("learn.cpp", "net.o", "learn"))
    text = (library / "examples" / "learn" / "learn.ino").read_text()
    sketch.write_text(f'#include "Arduino.h"\n{text}\nint main() {{ setup(); loop(); }}\n')
    subprocess.run(["gcc", "-c", str(library / "src" / "net.c"), "-o", str(net)], check=True)
    command = ["g++", "-Wall", "-Werror", f"-I{library / 'src'}", f"-I{tmp_path}"]
    subprocess.run([*command, str(sketch), str(net), "-o", str(program)], check=True)
    subprocess.run([str(program)], check=True)
