"""`tpsgd export`: the three commands, from words and from saved models."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tpsgd.export.to_c.compiled import CompiledNet, compiler
from tpsgd.export.to_page import wasm

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C compiler")
SMALL = ("--data", "digits", "--model", "mlp:8")


def tpsgd(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tpsgd", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


def test_c_prints_the_bytes_and_writes_a_net_that_learns(tmp_path):
    done = tpsgd("export", "c", *SMALL, "--ram", "4KB", "--out", "net", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "RAM" in done.stdout and "multiply-adds a step" in done.stdout
    assert "run beside tpsgd.fit" in done.stdout
    net = CompiledNet(tmp_path / "net")
    assert f"{net.ram:,} B" in done.stdout and net.params == 64 * 8 + 8 + 8 * 10 + 10


def test_mistakes_are_one_sentence_and_nothing_is_written(tmp_path):
    for words, sentence in (
        (("--ram", "1KB"), "B of RAM"),
        (("--rule", "dfa"), "needs the error of the output"),
        (("--rule", "zorb"), "no local rule"),
        (("--activation", "gelu"), "GELU is not exported"),
        (("--numbers", "int4"), "float32, int8, int16"),
    ):
        done = tpsgd("export", "c", *SMALL, *words, "--out", "net", folder=tmp_path)
        assert done.returncode == 2 and sentence in done.stderr
        assert done.stderr.count("\n") == 1 and not list(tmp_path.glob("net/*.c"))


def test_a_saved_model_is_exported_with_its_weights(tmp_path):
    words = ("--epochs", "1", "--save", "model", *SMALL)
    assert tpsgd("train", *words, folder=tmp_path).returncode == 0
    words = ("--model", "model", "--data", "digits", "--out", "net")
    assert tpsgd("export", "c", *words, folder=tmp_path).returncode == 0
    import tpsgd as library

    model = library.load(tmp_path / "model").model
    first = next(p for p in model.parameters()).detach().flatten()
    assert first.equal(CompiledNet(tmp_path / "net").weights[: first.numel()])


def test_onnx_and_page(tmp_path):
    pytest.importorskip("onnx")
    done = tpsgd("export", "onnx", *SMALL, "--out", "step.onnx", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert {"step.onnx", "predict.onnx", "run.py"} <= {p.name for p in tmp_path.iterdir()}
    done = tpsgd("export", "onnx", *SMALL, "--out", "step.onnx", folder=tmp_path)
    assert done.returncode == 2 and "--overwrite" in done.stderr
    if wasm.wasm_compiler() is None:
        pytest.skip("no compiler for WebAssembly")
    done = tpsgd("export", "page", *SMALL, "--out", "learns.html", folder=tmp_path)
    assert done.returncode == 0 and (tmp_path / "learns.html").stat().st_size < 300_000


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
def test_the_arduino_sketch_compiles(tmp_path):
    words = (*SMALL, "--files", "arduino", "--out", "lib")
    assert tpsgd("export", "c", *words, folder=tmp_path).returncode == 0
    library = tmp_path / "lib"
    assert "architectures=*" in (library / "library.properties").read_text()
    (tmp_path / "Arduino.h").write_text(ARDUINO_H)
    sketch = tmp_path / "learn.cpp"
    text = (library / "examples" / "learn" / "learn.ino").read_text()
    sketch.write_text(f'#include "Arduino.h"\n{text}\nint main() {{ setup(); loop(); }}\n')
    net = tmp_path / "net.o"
    subprocess.run(["gcc", "-c", str(library / "src" / "net.c"), "-o", str(net)], check=True)
    include = [f"-I{library / 'src'}", f"-I{tmp_path}"]
    command = ["g++", "-Wall", "-Werror", *include, str(sketch), str(net), "-o"]
    subprocess.run([*command, str(tmp_path / "learn")], check=True)
    subprocess.run([str(tmp_path / "learn")], check=True)
