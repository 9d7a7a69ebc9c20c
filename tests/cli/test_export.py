"""`tpsgd export`: the three commands, from words and from saved models."""

import json
import shutil
import subprocess
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import tpsgd
from tpsgd import projections, rules
from tpsgd.saved.scaling import scaled
from tpsgd_export.exported_model import _saved_rule
from tpsgd_export.to_c.compiled import CompiledNet, compiler
from tpsgd_export.to_page import wasm

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C compiler")
SMALL = ("--data", "digits", "--model", "mlp:8")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """An empty folder to work in."""
    monkeypatch.chdir(tmp_path)


def test_c_prints_the_bytes_and_writes_a_net_that_learns(says):
    status, out, _ = says("export", "c", *SMALL, "--ram", "4KB", "--out", "net")
    assert status == 0 and "multiply-adds a step" in out and "run beside tpsgd.fit" in out
    net, codes = CompiledNet("net"), 10 * 8
    assert f"{net.ram:,} B" in out and net.params == 64 * 8 + 8 + 8 * 10 + 10 + codes


@pytest.mark.parametrize(
    "words, sentence",
    [
        (("--ram", "1KB"), "B of RAM"),
        (("--rule", "dfa"), "needs the error of the output"),
        (("--rule", "zorb"), "no local rule"),
        (("--activation", "gelu"), "GELU is not exported"),
        (("--numbers", "int4"), "float32, int8, int16"),
        (("--rule", "backprop", "--numbers", "int8"), "backprop is exported as float32"),
        (("--rate", "0.01"), "--rate is for the check of integers"),
        (("--least", "0"), "--least is for the check of integers"),
        (("--numbers", "int8", "--least", "2"), "least must be a share"),
        (("--numbers", "int8", "--rate", "1"), "rate must be between 0 and 1"),
    ],
)
def test_mistakes_are_one_sentence_and_nothing_is_written(says, words, sentence):
    status, _, error = says("export", "c", *SMALL, *words, "--out", "net")
    assert status == 2 and sentence in error
    assert error.count("\n") == 1 and not list(Path("net").glob("*.c"))


@pytest.fixture
def in_class_order():
    """A table of three classes, one after another, and the first rows alone of two of them."""
    rng = np.random.default_rng(0)
    for name, counts in (("sorted.csv", (300, 40, 40)), ("two.csv", (9, 9, 0))):
        y = np.repeat(np.arange(3), counts)
        x = rng.normal(size=(len(y), 3)) + 4 * np.eye(3)[y]
        lines = [f"{a:.3f},{b:.3f},{c:.3f},{'pqr'[k]}" for (a, b, c), k in zip(x, y, strict=True)]
        Path(name).write_text("\n".join(["a,b,c,kind", *lines]))
    return "sorted.csv"


def test_samples_in_class_order_are_calibrated_and_checked_with_all_classes(
    says, in_class_order, monkeypatch
):
    words = ("--model", "mlp:8", "--data", in_class_order, "--overwrite")
    asked, c = [], tpsgd.export.c
    monkeypatch.setattr(tpsgd.export, "c", lambda *a, **k: asked.append(k) or c(*a, **k))
    for numbers in (("--least", "0.9", "--numbers", "int8"), ("--numbers", "float32")):
        status, *_ = says("export", "c", *words, *numbers, "--out", "net")
        assert status == 0 and set(asked[-1]["labels"].tolist()) == {0, 1, 2}
    assert len(asked[-1]["samples"]) == 256
    status, *_ = says("train", "--data", in_class_order, "--epochs", "1", "--save", "model")
    status, *_ = says("export", "c", "--model", "model", "--data", in_class_order, "--out", "again")
    assert status == 0 and set(asked[-1]["labels"].tolist()) == {0, 1, 2}
    status, _, error = says("export", "c", "--model", "model", "--data", "two.csv", "--out", "two")
    assert status == 2 and "none of 1 of the 3 classes (r)" in error and not Path("two").exists()


def test_a_head_and_a_page_measure_samples_of_all_classes(says, in_class_order, monkeypatch):
    from tpsgd_export.to_page.page import _calibration

    asked, one_pass = [], tpsgd.export.one_pass
    monkeypatch.setattr(
        tpsgd.export, "one_pass", lambda *a, **k: asked.append(k) or one_pass(*a, **k)
    )
    assert says("export", "one-pass", "--data", in_class_order, "--out", "head")[0] == 0
    for x in (asked[0]["samples"], _calibration(tpsgd.data.load(in_class_order))):
        assert len(x) == 256 and (x.max(0).values > 1).all()  # each class is far off in one column


def test_integers_are_checked_at_the_rate_of_the_command_line(says):
    words = ("--data", "digits", "--numbers", "int8", "--rate", "0.02", "--least", "0.6")
    status, out, error = says("export", "c", "--model", "mlp:32", *words, "--out", "net")
    assert status == 0 and "5 epochs at the rate 0.02: " in out, error


def test_a_saved_model_is_exported_with_its_weights(says):
    assert says("train", "--epochs", "1", "--save", "model", *SMALL)[0] == 0
    assert says("export", "c", "--model", "model", "--data", "digits", "--out", "net")[0] == 0
    model = tpsgd.load("model").model
    first = next(p for p in model.parameters()).detach().flatten()
    assert first.equal(CompiledNet("net").weights[: first.numel()])
    words = ("--model", "model", "--data", "digits", "--rule", "backprop", "--out", "control")
    status, out, error = says("export", "c", *words)
    assert status == 0 and "rule backprop" in out, error
    assert first.equal(CompiledNet("control").weights[: first.numel()])
    assert "backprop" in Path("control/net.h").read_text()


OWN = """
from torch import nn

from tpsgd import rules

class Net(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.first, self.act, self.last = nn.Linear(64, 8), act, nn.Linear(8, 10)
    def forward(self, x):
        return self.last(self.act(self.first(x.flatten(1))))

def net():
    return Net(nn.ReLU())

def gelu():
    return Net(nn.GELU())

def l2():
    return rules.tpsgd_l2()
"""


@pytest.mark.parametrize("command, out", [("c", "net"), ("onnx", "s.onnx"), ("page", "a.html")])
def test_a_saved_model_of_your_own_is_exported_with_its_file(says, command, out):
    if command == "page" and wasm.wasm_compiler() is None:
        pytest.skip("no compiler for WebAssembly")
    if command == "onnx":
        pytest.importorskip("onnxruntime")
    Path("own.py").write_text(OWN)
    train = ("train", "--max-train", "200", "--epochs", "1", "--save", "model")
    assert says(*train, "--model", "own.py:net")[0] == 0
    words = ("export", command, "--model", "model", "--data", "digits", "--out", out)
    assert "--factory own.py:net" in says(*words)[2]
    status, printed, error = says(*words, "--factory", "own.py:net")
    assert status == 0 and "tpsgd.fit" in printed and Path(out).exists(), error
    for new in ("mlp:8", "own.py:net"):
        refused = says("export", command, "--model", new, "--factory", "own.py:net", "--out", "b")
        assert refused[0] == 2 and "--factory is for a saved model" in refused[2]


def test_a_diagonal_recurrence_is_exported_with_its_loss_at_the_last_step(says):
    x = np.random.default_rng(0).normal(size=(60, 5, 3)).astype("float32")
    np.savez("steps.npz", x=x, y=(x[:, 0, 0] > 0).astype(int))
    words = ("--data", "steps.npz", "--model", "lru:4")
    refused = says("export", "c", *words, "--out", "net")[2]
    assert "train the net with --loss-at last or --loss-at every" in refused
    for at in ("last", "every"):
        status, out, error = says("export", "c", *words, "--loss-at", at, "--out", at)
        assert status == 0 and "run beside tpsgd.fit" in out, error
    train = ("train", *words, "--epochs", "1", "--loss-at", "last", "--save", "model")
    assert says(*train)[0] == 0
    assert says("export", "c", "--model", "model", "--out", "net")[0] == 0
    again = says("export", "c", "--model", "model", "--loss-at", "every", "--out", "a")
    assert "--loss-at are for a fresh model" in again[2]
    assert "leave --loss-at out" in says("train", "--model", "model", *train[-4:-2], *words[:2])[2]


def test_what_is_not_exported_of_your_own_is_named(says):
    Path("own.py").write_text(OWN)
    words = ("export", "c", "--data", "digits", "--out", "net", "--model")
    sentence = "block 1 (first: Linear + GELU): GELU is not exported; of activations, ReLU"
    assert sentence in says(*words, "own.py:gelu")[2]
    status, printed, error = says(*words, "own.py:net", "--rule", "own.py:l2")
    assert status == 0 and "run beside tpsgd.fit" in printed, error
    assert "elm is no local rule with a step" in says(*words, "own.py:net", "--rule", "elm")[2]


@pytest.mark.parametrize("command, out", [("page", "a.html"), ("onnx", "step.onnx")])
def test_the_control_is_written_as_c_only(says, command, out):
    status, _, error = says("export", command, *SMALL, "--rule", "backprop", "--out", out)
    assert status == 2 and "as C only: tpsgd export c" in error and not Path(out).exists()


def test_a_folder_that_is_not_there(says):
    status, _, error = says("export", "c", "--model", "nosuch/", "--out", "net")
    assert status == 2 and "there is no folder nosuch/" in error


@pytest.fixture
def table(says):
    """A table, the same with its columns in another order, and a model that was trained on it."""
    random = np.random.default_rng(0)
    rows = [(i % 3, *random.normal(size=2)) for i in range(120)]
    columns = {
        "a": [f"{100 + 10 * k + u:.4f}" for k, u, _ in rows],
        "b": [f"{1e-3 * k + 2e-4 * v:.7f}" for k, _, v in rows],
        "kind": ["xyz"[k] for k, _, _ in rows],
    }
    for name, order in (("my.csv", "a b kind"), ("other.csv", "kind b a")):
        words = order.split()
        lines = [words, *zip(*(columns[word] for word in words), strict=True)]
        Path(name).write_text("".join(",".join(line) + "\n" for line in lines))
    words = ("--model", "mlp:8", "--rule", "tpsgd-l2", "--seed", "3", "--epochs", "2")
    assert says("train", "--data", "my.csv", *words, "--save", "model")[0] == 0
    return np.array([columns["a"], columns["b"]]).T.astype(np.float32)


def test_a_saved_model_leaves_with_its_scaling_rule_loss_and_seed(says, table):
    status, out, _ = says(
        "export", "c", "--model", "model", "--data", "other.csv", "--out", "net",
    )  # fmt: skip
    assert status == 0 and "from model: rule tpsgd-l2, loss mse, seed 3" in out
    assert "inputs: net_scale standardises them as for training" in out
    header = Path("net/net.h").read_text()
    assert (
        "x[0] a: " in header and "0 x, 1 y, 2 z" in header and "tpsgd-l2, sgd, loss mse" in header
    )
    net, trained = CompiledNet("net"), tpsgd.load("model")
    logits = torch.stack([net.forward(net.scale(row)) for row in table])
    x = torch.from_numpy(scaled(table, trained.inputs["scaling"]))
    assert torch.allclose(logits, trained.outputs(x), atol=1e-5)
    status, out, _ = says(
        "export", "c", "--model", "model", "--rule", "tpsgd-l1", "--seed", "4",
        "--out", "again",
    )  # fmt: skip
    assert status == 0 and "rule tpsgd-l1, loss mse, seed 4 (it was trained by tpsgd-l2)" in out


@pytest.mark.parametrize(
    ("rule", "options", "sentence"),
    [
        (rules.readout(scale=3, calibrate=True), "calibrated, scale 3", ""),
        (rules.readout(scale=3), "", "was trained by readout (normal codes, std 1, at most 16"),
        (rules.readout(features=9), "", "--rule readout exports it with the usual options"),
        (rules.tpsgd_l2(projections.binary()), "", "was trained by tpsgd-l2 (binary codes"),
        (replace(rules.drtp(), name="mine"), "", "was trained by mine (normal codes"),
        (rules.frozen(), "", ""),
    ],
)
def test_the_options_of_a_saved_models_rule_are_restored_or_refused(rule, options, sentence):
    described = [] if rule.objective is None else [f"{rule.options}, {rule.at.value}"]
    run = tpsgd.Run(rule.name, 0, {"options": described * 2})
    word = rules.ALL[rule.name if rule.name in rules.ALL else "readout"].make()
    with pytest.raises(tpsgd.TpsgdError) if sentence else nullcontext() as error:
        assert options in _saved_rule("model", run, word).options
    assert not sentence or sentence in str(error.value)


def test_calibration_reads_samples_as_the_model_was_trained(says, table):
    words = ("export", "c", "--model", "model", "--rule", "readout")
    for name in ("my.csv", "other.csv"):
        assert says(*words, "--data", name, "--out", name[:-4])[0] == 0
    assert Path("my/net.c").read_text() == Path("other/net.c").read_text()
    status, out, _ = says(*words, "--out", "without")
    assert status == 0 and "without --data its readouts are calibrated by the first" in out
    assert Path("my/net.c").read_text() != Path("without/net.c").read_text()


@pytest.mark.skipif(wasm.wasm_compiler() is None, reason="no compiler for WebAssembly")
def test_a_page_of_a_saved_model_has_its_scaling(says, table):
    words = ("export", "page", "--model", "model", "--out", "learns.html")
    status, _, error = says(*words)
    assert status == 2 and "with --data" in error
    assert says(*words, "--data", "other.csv")[0] == 0
    scaling = tpsgd.load("model").inputs["scaling"]
    assert json.dumps(scaling["shift"], separators=(",", ":")) in Path("learns.html").read_text()


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
  void println(const char *name) { printf("class %s\n", name); }
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


def test_a_head_of_one_pass_is_written_within_a_budget(says):
    words = ("export", "one-pass", "--data", "digits", "--ram", "4KB", "--out", "head")
    status, out, error = says(*words, "--spare", "2")
    assert status == 0, error
    assert "head/head.h" in out and "multiply-adds a step" in out
    assert "#define HEAD_CLASSES 12" in Path("head/head.h").read_text()
    status, _, error = says(*words)
    assert status and "head" in error  # it is there already
    status, out, error = says(*words, "--name", "gait", "--overwrite")
    assert status == 0 and "head/gait.h" in out, error
    status, _, error = says(*words, "--features", "90", "--overwrite")
    assert status and "a head of 90 features needs" in error
