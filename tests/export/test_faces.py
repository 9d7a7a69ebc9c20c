"""What a program in C or C++ sees of a net: names of classes, predictions, warnings."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from helpers import with_full
from torch import nn

import tpsgd
from tpsgd import rules
from tpsgd.common.errors import TpsgdError
from tpsgd_export.to_c import check
from tpsgd_export.to_c.check import _refusal
from tpsgd_export.to_c.compiled import CompiledNet
from tpsgd_export.to_c.inputs import c_string

pytestmark = [
    pytest.mark.skipif(shutil.which("cc") is None, reason="no cc"),
    pytest.mark.usefixtures("unwatched"),
]
CPP = ["-std=c++17", "-pedantic", "-Wall", "-Wextra", "-Wconversion", "-Wshadow", "-Werror"]


def mlp(outputs: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 6), nn.LeakyReLU(), nn.Linear(6, outputs))


def sets(spread: float = 4.0) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    y = torch.arange(200) % 3
    x = torch.randn(200, 8)
    x[:, :3] += spread * nn.functional.one_hot(y, 3)
    return {"samples": x, "labels": y}


def cnn() -> nn.Module:
    layers = [nn.Conv2d(1, 4, 3), nn.Tanh(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 3)]
    return nn.Sequential(*layers)


def recurrent(cell: nn.Module) -> nn.Module:
    return nn.Sequential(cell, nn.Linear(5, 3))


NETS = {
    "int8": lambda: (mlp(), {"shape": (8,), "numbers": "int8", "rule": rules.readout(), **sets()}),
    "cnn": lambda: (cnn(), {"shape": (1, 8, 8), "rule": rules.readout()}),
    "learned, adam": lambda: (mlp(), {"shape": (8,), "optimizer": "adam", "batch": 2, "spare": 2}),
    "targets": lambda: (mlp(), {"shape": (8,), "rule": "tpsgd-l2", "codes": "hash"}),
    "cells": lambda: (recurrent(tpsgd.Recurrent(2, 5)), {"shape": (4, 2)}),
    "diagonal": lambda: (
        recurrent(tpsgd.Recurrent.diagonal(2, 5, loss_at="last")),
        {"shape": (4, 2), "rule": rules.readout()},
    ),
    "numbers": lambda: (
        mlp(2),
        {"shape": (8,), "rule": "tpsgd-l2", **sets(), "labels": torch.randn(200, 2)},
    ),
}


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
@pytest.mark.parametrize("net", with_full(NETS, ["targets", "cells", "numbers", "learned, adam"]))
def test_a_compiler_of_cpp_has_nothing_to_say(net, tmp_path):
    model, options = NETS[net]()
    tpsgd.export.c(model, tmp_path, classes=["a"] * 3 if net == "cnn" else None, **options)
    command = ["g++", *CPP, "-x", "c++", "-c", str(tmp_path / "net.c"), "-o", "/dev/null"]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert not ran.returncode and not ran.stderr, ran.stderr


def names_of(folder: Path, kind: str, count: int) -> list[str]:
    array = (ctypes.c_char_p * count).in_dll(CompiledNet(folder).net._library, f"net_{kind}_names")
    return [word.decode() for word in array if word is not None]


def test_names_of_classes_are_an_array(tmp_path):
    names = ['"; int main(void) { for(;;); } //', "Übung 7\\n??/", "net_save 0x41\t"]
    tpsgd.export.c(mlp(), tmp_path, shape=(8,), spare=1, classes=names, rule=rules.readout())
    assert names_of(tmp_path, "class", 4) == [*names, ""]
    header = (tmp_path / "net.h").read_text()
    assert "extern const char *const net_class_names[4];" in header


def test_strings_of_c_have_no_sign_that_means_something():
    assert c_string('a"b\\??/\n9é') == '"a\\042b\\134\\077\\077\\057\\0129\\303\\251"'


@pytest.mark.parametrize("outputs", [3, 1])
def test_a_prediction_is_the_largest_logit(outputs, tmp_path):
    options = {"loss": tpsgd.bce} if outputs == 1 else {}
    tpsgd.export.c(mlp(outputs), tmp_path, shape=(8,), spare=2 * (outputs > 1), **options)
    net, x = CompiledNet(tmp_path), sets()["samples"]
    label, logits = ctypes.c_uint16(9), (ctypes.c_float * 5)()
    seen = set()
    for sample in x:
        arguments = net.state, net.arena, ctypes.c_void_p(sample.data_ptr()), logits
        assert net.net.net_predict(*arguments, ctypes.byref(label)) == 0
        own = net.forward(sample)
        assert label.value == (int(own.argmax()) if outputs > 1 else int(own > 0))
        seen.add(label.value)
    assert len(seen) > 1


@pytest.mark.parametrize("numbers", ["int8", "float32"])
def test_samples_that_lack_a_class_are_refused(tmp_path, numbers):
    """An untrained net is right on all samples of one class, and says nothing of the others."""
    x = sets()["samples"]
    options = {"shape": (8,), "rule": rules.readout(), "samples": x, "numbers": numbers}
    for y in (torch.zeros(200), torch.arange(200) % 2):
        with pytest.raises(TpsgdError, match=r"none of [12] of the 3 classes \((dog, )?emu\)"):
            tpsgd.export.c(
                mlp(), tmp_path, labels=y.long(), classes=("cat", "dog", "emu"), **options
            )
    with pytest.raises(TpsgdError, match="a class from 0 to 2 for each of the samples, got 3"):
        tpsgd.export.c(mlp(), tmp_path, labels=torch.arange(200) % 4, **options)
    assert not any(tmp_path.iterdir())


def test_the_check_of_integers_takes_some_of_every_class(tmp_path, monkeypatch):
    """Of more than a thousand samples in the order of their classes, too."""
    measure, seen = check.accuracy_in_integers, []
    monkeypatch.setattr(
        check, "accuracy_in_integers", lambda *a: seen.append(a[2][1].bincount()) or measure(*a)
    )
    y = torch.arange(3).repeat_interleave(600)
    x = torch.randn(1800, 8, generator=torch.Generator().manual_seed(0))
    x[:, :3] += 4 * torch.nn.functional.one_hot(y, 3)
    options = {"shape": (8,), "rule": rules.readout(), "samples": x, "numbers": "int8"}
    checked = tpsgd.export.c(mlp(), tmp_path, labels=y, **options).checked
    assert "on 1,000 of your samples" in checked and min(seen[0].tolist()) > 330


def test_integers_that_are_right_too_seldom_are_refused(tmp_path):
    """Labels that say nothing: floats are as bad, and that is no reason to pass."""
    x, generator = sets()["samples"], torch.Generator().manual_seed(0)
    y = torch.randint(0, 3, (200,), generator=generator)
    options = {"shape": (8,), "rule": rules.readout(), "samples": x, "numbers": "int8"}
    folder, slow = tmp_path / "net", 2.0**-12
    with pytest.raises(TpsgdError, match=r"epochs at the rate 0.0002.* least=60.0%: no.*floats"):
        tpsgd.export.c(mlp(), folder, labels=y, **options, rate=slow, least=0.6)
    y[::2] = 2
    most = float(y.bincount().max()) / 2
    with pytest.raises(TpsgdError, match=f"one class alone has {most:.1f}%"):
        tpsgd.export.c(mlp(), folder, labels=y, **options, rate=2.0**-16, least=0)
    assert not folder.exists()
    assert "float32" not in _refusal("int8", (0.3, 0.3), 0.01, 0.5, 0.2).split("floats are too")[1]
    assert "with int16 or float32" in _refusal("int8", (0.6, 0.9), 0.01, 0.5, 0.2)
    assert "it with float32" in _refusal("int16", (0.3, 0.9), 0.01, 0.5, 0.2)
    assert "least=50.0%: nothing was written; train" in _refusal("int8", (0.49, 0.5), 0.01, 0.5, 0)
    with pytest.raises(TpsgdError, match="least must be a share"):
        tpsgd.export.c(mlp(), folder, labels=y, **options, least=40)
