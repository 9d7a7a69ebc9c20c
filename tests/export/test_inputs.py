"""What an export says of its inputs and classes, and what it refuses to read."""

import re
from itertools import pairwise

import numpy as np
import pytest
import torch
from helpers import with_full
from torch import nn

import tpsgd
from tpsgd.common.errors import TpsgdError
from tpsgd.saved.scaling import scaled
from tpsgd_export.to_c.compiled import CompiledNet, CompiledReader, compiler

pytestmark = [
    pytest.mark.skipif(compiler() is None, reason="no C compiler"),
    pytest.mark.usefixtures("unwatched"),
]
SCALING = {"method": "standard", "shift": [100.0, 1e-3, -55.5], "scale": [8.15, 8e-4, 955.1]}
INPUTS = {"shape": [3], "columns": ["a", "b */ int", "c\n"], "label": "kind", "scaling": SCALING}
CLASSES = ("x", "/* yy", "z*/")


def mlp(*sizes: int) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [[nn.Linear(a, b), nn.Tanh()] for a, b in pairwise(sizes)]
    return nn.Sequential(*[m for pair in layers for m in pair][:-1])


def exported(folder, model, shape, **options):
    return tpsgd.export.c(model, folder, shape=shape, **options)


@pytest.mark.parametrize("numbers", ["float32", "int8"])
def test_net_scale_is_the_scaling_of_training(tmp_path, numbers):
    x, y = torch.randn(60, 3), torch.arange(60) % 3
    options = {"samples": x, "labels": y, "least": 0} if numbers == "int8" else {}
    written = exported(
        tmp_path, mlp(3, 4, 3), (3,), inputs=INPUTS, classes=CLASSES, numbers=numbers, **options
    )
    header = (tmp_path / "net.h").read_text()
    assert "x[0] a: 100, 8.15" in header and "0 x, 1 " in header
    assert "net_scale standardises them as for training" in str(written)
    assert written.memory and written.memory.flash["shift and scale of the inputs"] == 24
    if numbers == "float32":
        raw = np.array([111.0, 2e-3, 400.0], np.float32)
        on_device = CompiledNet(tmp_path).scale(raw).numpy()
        np.testing.assert_allclose(on_device, scaled(raw, SCALING), rtol=1e-6)


def test_pixels_that_were_bytes_are_divided(tmp_path):
    inputs = {"shape": [1, 2, 2], "scaling": {"method": "bytes"}}
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    exported(tmp_path, model, (1, 2, 2), inputs=inputs)
    assert CompiledNet(tmp_path).scale([0.0, 51.0, 102.0, 255.0]).tolist() == pytest.approx(
        [0, 0.2, 0.4, 1]
    )


def test_each_time_step_of_a_series_is_scaled(tmp_path):
    model = nn.Sequential(tpsgd.Recurrent(3, 4), nn.Linear(4, 2))
    exported(tmp_path, model, (5, 3), inputs={"shape": [5, 3], "scaling": SCALING})
    raw = np.array([1.0, 2.0, 3.0], np.float32)
    np.testing.assert_allclose(CompiledReader(tmp_path).scale(raw), scaled(raw, SCALING), rtol=1e-6)


def test_a_feature_that_float32_has_no_digits_for_is_a_warning(tmp_path):
    far = {"method": "standard", "shift": [525_200_020.0, 0.0, 1e3], "scale": [16.0, 1.0, 1.0]}
    inputs = {"shape": [3], "columns": ["gps", "b", "c"], "scaling": far}
    with pytest.warns(UserWarning, match=r"lie 32 apart near 525200020, and 'gps' varies") as seen:
        exported(tmp_path / "net", mlp(3, 4, 3), (3,), inputs=inputs)
    assert sum("net_scale takes" in str(w.message) for w in seen) == 1


@pytest.mark.parametrize(
    "inputs, classes, sentence",
    [
        ({"columns": ["a"]}, None, "1 columns"),
        ({"scaling": {"shift": [1, 2], "scale": [1, 2]}}, None, "each of the 3 features"),
        ({"scaling": {"shift": [1.0], "scale": [0.0]}}, None, "other than 0"),
        ({"scaling": {"shift": ["a"], "scale": [0.0]}}, None, "without numbers"),
        ({"scaling": {"shift": [10**400], "scale": [1.0]}}, None, "without numbers"),
        ({"scaling": {"shift": [1e300], "scale": [1.0]}}, None, "a finite shift"),
        ([3], None, "data.inputs"),
        ({"shape": [3], "foo": 1}, None, "inputs= has 'foo'"),
        (None, ("a", "b"), "2 names"),
    ],
)
def test_inputs_of_another_net_are_refused(tmp_path, inputs, classes, sentence):
    with pytest.raises(TpsgdError, match=sentence):
        exported(tmp_path, mlp(3, 4, 3), (3,), inputs=inputs, classes=classes)


def test_a_compiled_net_reads_no_byte_beyond_its_arguments(tmp_path):
    exported(tmp_path, mlp(3, 4, 3), (3,))
    net = CompiledNet(tmp_path)
    for x in (torch.zeros(2), torch.zeros(4), "abc"):
        with pytest.raises(TpsgdError, match="x must"):
            net.step(x, [0], 0.1)
        with pytest.raises(TpsgdError, match="x must"):
            net.forward(x)
    for labels in ([0, 1], [-1], [70_000], None):
        with pytest.raises(TpsgdError, match="labels must"):
            net.step(torch.zeros(3), labels, 0.1)
    with pytest.raises(TpsgdError, match="bytes, got 5"):
        net.load(b"TPS11")


def test_a_compiled_reader_reads_whole_time_steps(tmp_path):
    exported(tmp_path, nn.Sequential(tpsgd.Recurrent(3, 4), nn.Linear(4, 2)), (5, 3))
    reader = CompiledReader(tmp_path)
    for x in (torch.zeros(5, 2), torch.zeros(0, 3)):
        with pytest.raises(TpsgdError, match="for each time step"):
            reader.step(x, [0], 0.1)
        with pytest.raises(TpsgdError, match="for each time step"):
            reader.forward(x)
    with pytest.raises(TpsgdError, match="labels must"):
        reader.step(torch.zeros(2, 3), [0, 1], 0.1)
    assert reader.step(np.zeros((2, 3)), 1, 0.1).shape == (2,)


@pytest.mark.parametrize(
    "samples, sentence",
    [
        (torch.zeros(0, 3), "one or more inputs"),
        (torch.zeros(5, 2), "of shape (3,), got shape (5, 2)"),
        (torch.zeros(3), "one or more inputs"),
        (torch.full((5, 3), torch.nan), "not finite"),
        (np.full((5, 3), np.inf), "not finite"),
        ((torch.zeros(5, 3), torch.zeros(5)), "without labels"),
        (np.array([["a", "b", "c"]]), "without labels"),
        (tpsgd.Padded.of([torch.ones(2, 3), torch.ones(1, 3)]), "different lengths"),
    ],
)
def test_samples_that_calibrate_nothing_are_refused(tmp_path, samples, sentence):
    with pytest.raises(TpsgdError, match=re.escape(sentence)):
        exported(tmp_path / "net", mlp(3, 4, 3), (3,), samples=samples)
    assert not (tmp_path / "net").exists()


@pytest.mark.parametrize("kind", with_full([np.asarray, torch.as_tensor, list], [list]))
def test_samples_may_be_arrays_and_lists(tmp_path, kind):
    exported(tmp_path, mlp(3, 4, 3), (3,), samples=kind([[1.0, 2.0, 3.0], [0.5, 1.0, 2.0]]))


def with_weights(model: nn.Module, factor: float) -> nn.Module:
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(factor)
    return model


REFUSED = {
    "a number for a shape": (lambda: mlp(3, 4, 3), 3, "such as (64,)"),
    "half": (lambda: mlp(3, 4, 3).half(), (3,), "float16: convert it with model.float()"),
    "double": (lambda: mlp(3, 4, 3).double(), (3,), "float64: convert it with model.float()"),
    "huge weights": (lambda: with_weights(mlp(3, 4, 3), 1e30), (3,), "too large for float32"),
    "classes": (lambda: mlp(3, 70_000), (3,), "70,000 classes"),
    "blocks": (lambda: mlp(*[3] * 34), (3,), "33 blocks"),
    "long convolution": (
        lambda: nn.Sequential(
            nn.Conv1d(1, 1, 3), nn.ReLU(), nn.MaxPool1d(70_000), nn.Flatten(), nn.Linear(1, 2)
        ),
        (1, 70_002),
        "a size of 70,002",
    ),
    "reflected": (
        lambda: nn.Sequential(
            nn.Conv1d(1, 2, 3, padding=1, padding_mode="reflect"), nn.ReLU(), nn.Flatten(),
            nn.Linear(10, 2),
        ),
        (1, 5),
        "because of its padding_mode='reflect'",
    ),
    "uneven": (
        lambda: nn.Sequential(
            nn.Conv1d(1, 2, 2, padding="same"), nn.ReLU(), nn.Flatten(), nn.Linear(10, 2)
        ),
        (1, 5),
        "padding='same'",
    ),
    "volumes": (
        lambda: nn.Sequential(nn.Conv3d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(2, 2)),
        (1, 3, 3, 3),
        "because it is a Conv3d",
    ),
    "both directions": (
        lambda: nn.Sequential(tpsgd.Recurrent(3, 4, bidirectional=True), nn.Linear(8, 2)),
        (5, 3),
        "because it reads in two directions",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_exported_is_named_and_leaves_no_folder(tmp_path, name):
    model, shape, sentence = REFUSED[name]
    with pytest.raises(TpsgdError, match=re.escape(sentence)):
        exported(tmp_path / "net", model(), shape)
    assert not (tmp_path / "net").exists()


def test_a_softmax_at_the_end_is_said_to_be_left_out(tmp_path):
    exported(tmp_path, nn.Sequential(*mlp(3, 4, 3), nn.Softmax(1)), (3,))
    assert "the model's Softmax is left out" in (tmp_path / "net.h").read_text()


def test_adaptive_pools_of_one_dimension(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv1d(2, 3, 3), nn.Tanh(), nn.AdaptiveAvgPool1d(3), nn.Flatten(), nn.Linear(9, 4)
    )
    written = exported(tmp_path, model, (2, 10))
    assert "run beside tpsgd.fit" in written.checked
    x = torch.randn(1, 2, 10)
    assert torch.allclose(CompiledNet(tmp_path).forward(x), model(x)[0], atol=1e-6)


@pytest.mark.parametrize(
    ("labels", "problem"),
    [
        ("abc", "'abc'"),
        ([0, 1], "2 labels for 60 samples"),
        (torch.arange(60) % 4, "3"),
        (torch.arange(60) % 3 - 1, "-1"),
    ],
)
def test_labels_of_integers_are_classes(tmp_path, labels, problem):
    options = {"numbers": "int8", "samples": torch.randn(60, 3), "labels": labels}
    with pytest.raises(TpsgdError, match=f"a class from 0 to 2 .*, got {problem}$"):
        exported(tmp_path, mlp(3, 4, 3), (3,), **options)
