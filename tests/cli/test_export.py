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


ARDUINO_H = r"""
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
/* As Arduino's Stream, but what has not arrived never will: numbers that are not there are 0. */
struct Port {
  const char *text = "";
  void begin(long) {}
  int available() { return (int)strlen(text); }
  int peek() { return *text ? *text : -1; }
  int read() { return *text ? *text++ : -1; }
  float parseFloat() {
    char *end;
    while (*text && !strchr("-0123456789", *text)) text++;
    float number = strtof(text, &end);
    text = end;
    return number;
  }
  long parseInt() { return (long)parseFloat(); }
  void println(float number) { printf("loss %g\n", number); }
  void println(int number) { printf("error %d\n", number); }
  void println(unsigned number) { printf("class %u\n", number); }
};
static Port Serial;
"""
TALK = """
int main() {
  setup();
  const char *lines[] = {"QUESTION\\n", "QUESTION 3\\n", "QUESTION 3\\r\\n", "QUESTION\\r\\n"};
  for (int i = 0; i < 4; i++) {
    Serial.text = lines[i];
    for (int turn = 0; turn < 5; turn++) loop();
  }
}
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_the_arduino_sketch_learns_from_lines_with_a_label_alone(says, tmp_path):
    assert says("export", "c", *SMALL, "--files", "arduino", "--out", "lib")[0] == 0
    library = tmp_path / "lib"
    assert "esp32" in (library / "library.properties").read_text()
    (tmp_path / "Arduino.h").write_text(ARDUINO_H)
    sketch, net, program = (tmp_path / name for name in ("learn.cpp", "net.o", "learn"))
    text = (library / "examples" / "learn" / "learn.ino").read_text()
    talk = TALK.replace("QUESTION", " ".join(["0.5"] * 64))
    sketch.write_text(f'#include "Arduino.h"\n{text}{talk}')
    subprocess.run(["gcc", "-c", str(library / "src" / "net.c"), "-o", str(net)], check=True)
    command = ["g++", "-Wall", "-Werror", f"-I{library / 'src'}", f"-I{tmp_path}"]
    subprocess.run([*command, str(sketch), str(net), "-o", str(program)], check=True)
    said = subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout
    assert [line.split()[0] for line in said.splitlines()] == ["class", "loss", "loss", "class"]
