"""The benchmark's translator of torch backbones to int8 ONNX files."""

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.onnx_backbone import file_bytes, onnx_int8
from tpsgd.common.errors import TpsgdError
from tpsgd_adapt import quantize


def net() -> nn.Sequential:
    """Convolutions, BatchNorm with statistics of its own, pooling and a head."""
    torch.manual_seed(0)
    made = nn.Sequential()
    norm = nn.BatchNorm2d(8)
    features = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), norm, nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, stride=2, padding=1, groups=2, bias=False), nn.LeakyReLU(0.1),
        nn.AvgPool2d(2, padding=1),
    )  # fmt: skip
    for t in (norm.running_mean, norm.running_var, norm.weight.data, norm.bias.data):
        assert t is not None
        t.copy_(torch.rand(8) + 0.5)
    made.add_module("features", features)
    made.add_module("flatten", nn.Flatten())
    made.add_module("head", nn.Linear(8 * 9, 5))
    return made.eval()


class Residual(nn.Module):
    """Sums, functions and a global mean."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(3, 8, 3, padding="same", dilation=2)
        self.layer = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.ReLU6())
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.drop = nn.Dropout()
        self.head = nn.Linear(8, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        x = torch.relu(self.layer(x) + x)
        return self.head(self.drop(torch.flatten(self.pool(x), 1)))


def output_of(model: nn.Module, name: str, x: Tensor) -> Tensor:
    """The output of a submodule when the whole model runs."""
    found: list[Tensor] = []
    hook = model.get_submodule(name).register_forward_hook(lambda m, a, y: found.append(y.clone()))
    with torch.no_grad():
        model(x)
    hook.remove()
    return found[0]


def cosine(a: Tensor, b: Tensor) -> float:
    return F.cosine_similarity(a.flatten(1).float(), b.flatten(1).float()).min().item()


def images(count: int = 4) -> Tensor:
    return torch.randn(count, 3, 16, 16, generator=torch.Generator().manual_seed(1))


def needs_onnx() -> None:
    pytest.importorskip("onnx", reason="onnx is not installed")
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")


@pytest.mark.parametrize("tap", ["features.1", "features", "flatten", "head"])
def test_onnx_gives_a_taps_features(tap: str, tmp_path: Path) -> None:
    needs_onnx()
    model, x = net(), images()
    light = onnx_int8(model, tap, images(16), tmp_path)
    want = output_of(model, tap, x)
    found = light(x)
    assert found.shape == want.shape and found.dtype is torch.float32
    assert cosine(want, found) > 0.99 and not torch.equal(want, found)
    assert torch.equal(output_of(light, tap, x), found)
    assert light(x[:1]).shape == want[:1].shape
    assert torch.equal(copy.deepcopy(light)(x), found)


def test_onnx_on_sums_and_functions(tmp_path: Path) -> None:
    needs_onnx()
    model, x = Residual().train(), images()
    light = onnx_int8(model, "head", images(16), tmp_path)
    assert model.training
    assert cosine(model.eval()(x), light(x)) > 0.98
    from_light = onnx_int8(quantize.int8(model), "layer", images(16), tmp_path / "deeper")
    assert cosine(output_of(model, "layer", x), from_light(x)) > 0.99


def test_onnx_weights_are_bytes(tmp_path: Path) -> None:
    needs_onnx()
    model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Conv2d(64, 256, 3))
    light = onnx_int8(model, "2", images(2), tmp_path)
    assert [f.name for f in tmp_path.iterdir()] == ["2-int8.onnx"]
    assert 0.25 < file_bytes(light) / quantize.weight_bytes(model) < 0.3


def test_what_onnx_refuses(tmp_path: Path) -> None:
    needs_onnx()

    class Deciding(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else -x

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.line(x.cumsum(1))

    def make(model: nn.Module, tap: str, x: Tensor) -> nn.Module:
        return onnx_int8(model, tap, x, tmp_path)

    with pytest.raises(TpsgdError, match="cannot be traced"):
        make(Deciding(), "a", images())
    with pytest.raises(TpsgdError, match=r"never runs a submodule 'features\.9'"):
        make(net(), "features.9", images())
    with pytest.raises(TpsgdError, match="cumsum"):
        make(Odd(), "line", torch.ones(2, 4))
    with pytest.raises(TpsgdError, match="GELU"):
        make(nn.Sequential(nn.Linear(4, 4), nn.GELU()), "1", torch.ones(2, 4))
    with pytest.raises(TpsgdError, match="reflect"):
        make(nn.Sequential(nn.Conv2d(3, 3, 3, padding=1, padding_mode="reflect")), "0", images())
    with pytest.raises(TpsgdError, match=r"affine=False.*running statistics"):
        make(nn.Sequential(nn.BatchNorm2d(3, affine=False)), "0", images())
    with pytest.raises(TpsgdError, match=r"AdaptiveAvgPool2d\(output_size=7\).*one cell"):
        make(nn.Sequential(nn.AdaptiveAvgPool2d(7)), "0", images())
    with pytest.raises(TpsgdError, match="does not compute"):
        make(nn.Sequential(nn.Linear(4, 4)), "0", torch.ones(2, 3, 4))
    with pytest.raises(TpsgdError, match="at least one input"):
        make(net(), "head", images(0))
    light = make(net(), "features", images())
    with pytest.raises(TpsgdError, match=r"shape \(3, 16, 16\).*got \(3, 8, 8\)"):
        light(images()[..., ::2, ::2])
    (tmp_path / "features-int8.onnx").write_bytes(b"broken")
    with pytest.raises(TpsgdError, match="missing or damaged"):
        copy.deepcopy(light)(images())


@pytest.mark.parametrize(("can", "careful"), [({}, "1"), ({"avx512_vnni": True}, "0")])
def test_onnx_is_careful_without_vnni(
    can: Any, careful: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    needs_onnx()
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: can, raising=False)
    light: Any = onnx_int8(net(), "features", images(16), tmp_path)
    light(images())
    options = light.features.session.get_session_options()
    assert options.get_session_config_entry("session.x64quantprecision") == careful


def test_a_wrong_translation_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    needs_onnx()
    monkeypatch.setattr(nn.LeakyReLU, "forward", lambda self, x: x.abs())
    with pytest.raises(TpsgdError, match="does not compute what the model does"):
        onnx_int8(net(), "features", images(), tmp_path)


def test_without_onnxruntime_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime.quantization.shape_inference", None)
    with pytest.raises(TpsgdError, match="pip install onnx onnxruntime"):
        onnx_int8(net(), "features", images(), "nowhere")
