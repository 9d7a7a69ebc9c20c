"""Backbones in int8 and bfloat16: fewer bytes, the same names, nearly the same features."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

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


# ---- int8 ----------------------------------------------------------------------------------------


def test_int8_weights_and_scales_by_hand() -> None:
    layer = nn.Linear(3, 3, bias=False)
    layer.weight.data = torch.tensor([[127.0, 1.4, -2.6], [0.5, -0.25, 0.0], [0.0, 0.0, 0.0]])
    light = quantize.int8(layer)
    q, scale = light.state_dict().values()
    assert q.dtype is torch.int8 and scale.dtype is torch.float32
    assert q.tolist() == [[127, 1, -3], [127, -64, 0], [0, 0, 0]]
    torch.testing.assert_close(scale.flatten(), torch.tensor([1, 0.5 / 127, 0]))
    want = torch.tensor([[127, 1, -3], [0.5, -64 * 0.5 / 127, 0], [0, 0, 0]])
    torch.testing.assert_close(light(torch.eye(3)).T, want)


@pytest.mark.parametrize(
    "layer",
    [nn.Linear(9, 4), nn.Conv1d(3, 4, 3), nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect")],
    ids=lambda layer: type(layer).__name__,
)
def test_every_weight_is_half_a_step_away_at_most(layer: Any) -> None:
    light: Any = quantize.int8(layer)
    w = layer.weight.detach()
    step = w.abs().flatten(1).amax(1) / 127
    away = (light.weight - w).abs().flatten(1).amax(1)
    assert (away <= step * 0.5001).all() and away.max() > 0
    x = (
        torch.randn(2, 9)
        if isinstance(layer, nn.Linear)
        else torch.randn(2, 3, *[8] * (w.dim() - 2))
    )
    again = copy.deepcopy(layer)
    again.weight.data = light.weight
    assert torch.equal(light(x), again(x))  # the layer's own forward, padding and all
    assert isinstance(light, type(layer))


def test_int8_keeps_names_and_the_model() -> None:
    model = net()
    before, x = copy.deepcopy(model.state_dict()), images()
    light = quantize.int8(model)
    assert [n for n, _ in model.named_modules()] == [
        n for n, _ in light.named_modules() if "parametrizations" not in n
    ]
    after = model.state_dict()
    assert after.keys() == before.keys() and all(torch.equal(after[k], before[k]) for k in before)
    for name in ("features.0", "features.6", "features", "head"):
        want, found = output_of(model, name, x), output_of(light, name, x)
        assert found.dtype is torch.float32 and cosine(want, found) > 0.999
        assert not torch.equal(want, found)


def test_int8_keeps_a_layer_that_is_used_twice_as_one() -> None:
    layer = nn.Linear(4, 4)
    light: Any = quantize.int8(nn.Sequential(layer, nn.ReLU(), layer))
    assert light[0] is light[2]


@pytest.mark.parametrize("make", [quantize.int8, quantize.bf16])
def test_state_dicts_can_be_saved_and_loaded(make: Any, tmp_path: Path) -> None:
    light, fresh, x = make(net()), make(net().apply(_randomise)), images()
    assert not torch.equal(light(x), fresh(x))
    torch.save(light.state_dict(), tmp_path / "a.pth")
    fresh.load_state_dict(torch.load(tmp_path / "a.pth", weights_only=True))
    assert torch.equal(light(x), fresh(x))
    assert torch.equal(light(x), copy.deepcopy(light)(x))


def _randomise(module: nn.Module) -> None:
    for p in module.parameters(recurse=False):
        nn.init.normal_(p)


def test_int8_gives_the_same_in_channels_last() -> None:
    light: Any = quantize.int8(net())
    x = images()
    want = light(x)
    light.to(memory_format=torch.channels_last)
    torch.testing.assert_close(light(x.contiguous(memory_format=torch.channels_last)), want)


def test_what_int8_refuses() -> None:
    with pytest.raises(TpsgdError, match=r"ReLU has no Conv1d, Conv2d or Linear"):
        quantize.int8(nn.ReLU())
    with pytest.raises(TpsgdError, match=r"give the float model"):
        quantize.int8(quantize.int8(nn.Linear(2, 2)))
    bad = nn.Linear(2, 2)
    bad.weight.data[0, 0] = float("nan")
    with pytest.raises(TpsgdError, match=r"Linear\(.*not finite"):
        quantize.int8(bad)


# ---- bf16 ----------------------------------------------------------------------------------------


def test_bf16_takes_and_gives_float32() -> None:
    model, x = net(), images()
    light = quantize.bf16(model)
    assert model.state_dict()["head.weight"].dtype is torch.float32
    assert quantize.weight_bytes(light) / quantize.weight_bytes(model) == pytest.approx(
        0.5, abs=0.01
    )
    assert [n for n, _ in light.named_modules()] == [n for n, _ in model.named_modules()]
    assert light(x).dtype is torch.float32
    for name in ("features.0", "features.6", "features", "head"):
        want, found = output_of(model, name, x), output_of(light, name, x)
        assert found.dtype is torch.bfloat16 and cosine(want, found) > 0.999
    part = light.get_submodule("features")
    assert torch.equal(
        part(x), output_of(light, "features", x)
    )  # a part by itself takes float32 too


def test_bf16_computes_in_bfloat16() -> None:
    layer = nn.Linear(2, 1, bias=False)
    layer.weight.data = torch.tensor([[1.0, 2.0**-10]])
    light = quantize.bf16(layer)
    assert light(torch.tensor([[1.0, 0.0], [0.0, 1.0]])).flatten().tolist() == [1.0, 2.0**-10]
    assert light(torch.tensor([[1.0 + 2.0**-10, 0.0]])).item() == 1.0  # rounded on its way in


def test_bf16_leaves_whole_numbers_and_sees_into_containers() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.line = nn.Embedding(5, 3), nn.Linear(3, 2)

        def forward(self, i: Tensor, more: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
            # float32 made on the way meets weights in bfloat16
            return self.line(self.table(i) + torch.ones(3)), [i, more["x"]]

    y, (i, x) = quantize.bf16(Two())(torch.tensor([1, 4]), more={"x": torch.ones(1) / 3})
    assert y.dtype is torch.float32 and y.shape == (2, 2) and i.dtype is torch.int64
    assert x.dtype is torch.float32 and x.item() == (torch.ones(1) / 3).bfloat16().item()


def test_int8_and_bf16_can_be_combined() -> None:
    model, x = net(), images()
    for light in (quantize.bf16(quantize.int8(model)), quantize.int8(quantize.bf16(model))):
        assert cosine(model(x), light(x)) > 0.999
        assert quantize.weight_bytes(light) < 0.4 * quantize.weight_bytes(model)


def test_weight_bytes_count_shared_tensors_once() -> None:
    layer = nn.Linear(4, 4)
    assert quantize.weight_bytes(nn.Sequential(layer, layer)) == 80
    assert quantize.weight_bytes(nn.BatchNorm1d(3)) == 4 * 12 + 8


def test_vgg16_in_int8_takes_less_than_a_third() -> None:
    from tpsgd.zoo.vgg import vgg

    features: Any = vgg(16, (3, 32, 32), 10).features
    light = quantize.int8(features)
    assert quantize.weight_bytes(features) == 4 * 14_714_688
    biases = scales = 4 * 4_224
    assert quantize.weight_bytes(light) == 14_714_688 - 4_224 + biases + scales
    assert quantize.weight_bytes(light) < 0.3 * quantize.weight_bytes(features)
