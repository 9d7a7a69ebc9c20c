"""A strided 1 x 1 convolution never reaches oneDNN's kernel of its weight gradient (issue 6035).

There the process would end, or the gradient be wrong, depending on the CPU. That depends on the
machine, so the tests look at what is called: strides of 1 only.
"""

import copy

import pytest
import torch
from helpers import seeded
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import tpsgd
from tpsgd.engine.sources.batches import suits_channels_last
from tpsgd.nets.layers import LAYERS, pixels_read, reading_pixels_first, skips_pixels
from tpsgd.zoo.resnet import Residual

aten = torch.ops.aten
FORMATS = {"first": torch.contiguous_format, "last": torch.channels_last}


class Strides(TorchDispatchMode):
    """The strides of 1 x 1 convolutions whose weight gradient is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is aten.convolution_backward.default and max(args[2].shape[2:]) == 1:
            self.seen.append(tuple(args[4]))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("layer", "skips"),
    [
        (nn.Conv2d(4, 8, 1, stride=2), True),
        (nn.Conv2d(4, 8, 1, stride=(1, 3), padding="valid"), True),
        (nn.Conv1d(4, 8, 1, stride=2, dilation=2, groups=2), True),
        (nn.Conv3d(4, 8, 1, stride=2), True),
        (nn.Conv2d(4, 8, 1), False),
        (nn.Conv2d(4, 8, 3, stride=2), False),
        (nn.Conv2d(4, 8, 1, stride=2, padding=1), False),
        (nn.Conv2d(4, 8, 1, stride=2, padding=1, padding_mode="reflect"), True),
        (nn.ConvTranspose2d(4, 8, 1, stride=2), False),
        (nn.Linear(4, 8), False),
    ],
    ids=str,
)
def test_which_layers_skip_pixels(layer, skips):
    assert skips_pixels(layer) is skips


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("stride", [2, (1, 2), (3, 1)])
@pytest.mark.parametrize("groups", [1, 2])
def test_closed_form_is_autograd(memory_format, stride, groups):
    layer = nn.Conv2d(4, 6, 1, stride=stride, groups=groups).double()
    x = torch.randn(5, 4, 7, 9, dtype=torch.float64)
    z = layer(x)
    dz = torch.randn_like(z)
    (expected,) = torch.autograd.grad(z, layer.weight, dz)
    x, dz = (t.contiguous(memory_format=FORMATS[memory_format]) for t in (x, dz))
    with Strides() as strides:
        dw = LAYERS[nn.Conv2d].weight_gradient(layer, x, dz, layer.weight.detach(), None)
    assert strides.seen == [(1, 1)]
    torch.testing.assert_close(dw, expected)


@pytest.mark.parametrize("padding", ["none", "valid", "circular", "reflect"])
@pytest.mark.parametrize("make", [nn.Conv1d, nn.Conv2d, nn.Conv3d])
def test_the_same_values_and_gradients_and_nothing_left_behind(make, padding):
    pads = range(1, 1 + {nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3}[make])
    options = {"none": {}, "valid": {"padding": "valid"}}
    options = options.get(padding, {"padding": tuple(pads), "padding_mode": padding})
    layer = make(4, 6, 1, stride=2, **options).double()
    x = torch.randn(3, 4, *[5] * len(layer.stride), dtype=torch.float64, requires_grad=True)
    expected = layer(x)
    dz = torch.randn_like(expected)
    grads = torch.autograd.grad(expected, (x, *layer.parameters()), dz)
    attributes = dict(vars(layer))
    with Strides() as strides, reading_pixels_first([layer]):
        z = layer(x)
        copy.deepcopy(layer)
        torch.testing.assert_close(z, expected)
        torch.testing.assert_close(torch.autograd.grad(z, (x, *layer.parameters()), dz), grads)
    assert set(sum(strides.seen, ())) == {1}
    assert vars(layer) == attributes


def test_pixels_keep_their_memory_format():
    x = torch.randn(2, 4, 6, 6).contiguous(memory_format=torch.channels_last)
    pixels = pixels_read(nn.Conv2d(4, 8, 1, stride=2), x)
    assert pixels.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(pixels, x[:, :, ::2, ::2], rtol=0, atol=0)


def net():
    return nn.Sequential(
        *(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), Residual(4, 6, stride=2)),
        *(nn.Conv2d(6, 8, 1, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(32, 3)),
    )


@pytest.mark.parametrize("of_weights", FORMATS)
@pytest.mark.parametrize("of_samples", FORMATS)
@pytest.mark.parametrize(
    "train",
    [
        tpsgd.fit,
        lambda *a, **k: tpsgd.fit(*a, rule=tpsgd.rules.auxiliary(), blocks=2, **k),
        tpsgd.fit_backprop,
        lambda *a, **k: tpsgd.fit_backprop(*a, segments=True, **k),
    ],
    ids=["fit", "blocks", "backprop", "checkpointed"],
)
def test_no_run_takes_the_strided_kernel(train, of_samples, of_weights, unwatched):
    model = seeded(net).to(memory_format=FORMATS[of_weights])
    formats = [p.stride() for p in model.parameters()]
    x = torch.randn(12, 2, 8, 8).contiguous(memory_format=FORMATS[of_samples])
    with Strides() as strides:
        train(model, (x, torch.arange(12) % 3), epochs=1, batch_size=6)
    assert strides.seen and set(strides.seen) == {(1, 1)}
    assert [p.stride() for p in model.parameters()] == formats  # as the user had them
    assert not any("_conv_forward" in vars(m) for m in model.modules())


def test_a_transposed_convolution_with_output_padding_keeps_channels_first():
    def wanted(padding):
        layer = nn.ConvTranspose2d(8, 4, 1, stride=2, output_padding=padding)
        return suits_channels_last([nn.Conv2d(3, 8, 3), layer])

    assert wanted(0) and not wanted(1)


def test_an_encoder_keeps_its_memory_format():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 8, 1, stride=2))
    formats = [p.stride() for p in model.parameters()]
    backbone = tpsgd.adapt.Backbone(model, ["2"])
    backbone(torch.randn(2, 3, 8, 8))
    assert backbone.channels_last
    assert [p.stride() for p in model.parameters()] == formats


def test_on_a_gpu_the_layer_computes_as_always():
    calls = []

    class Watched(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func is F.conv2d:
                calls.append(args[3])
            return func(*args, **(kwargs or {}))

    layer = nn.Conv2d(4, 8, 1, stride=2)
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), Watched(), reading_pixels_first([layer]):
        layer.__dict__["_conv_forward"](
            torch.empty(2, 4, 6, 6, device="cuda"), torch.empty(8, 4, 1, 1, device="cuda"), None
        )
    assert calls == [(2, 2)]
