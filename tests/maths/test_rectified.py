"""ReLU and ReLU with max pooling that store little: torch's values and gradients, fewer bytes."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tpsgd.maths.kernels import rectified as module
from tpsgd.maths.kernels.rectified import (
    chain,
    rectified,
    rectified_and_pooled,
    tiled_max,
    without_indices,
)
from tpsgd.memory.meter import LiveBytes
from tpsgd.nets.blocks import hooked

FORMATS = {"contiguous": torch.contiguous_format, "channels last": torch.channels_last}


def maps(memory_format, shape=(3, 4, 7, 6), dtype=torch.float64):
    """Feature maps with ties, negative cells and zeros."""
    z = torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    return z.contiguous(memory_format=memory_format).requires_grad_()


def value_and_gradient(function, z):
    z = z.detach().clone().requires_grad_()
    y = function(z * 1.0)  # no leaf, which must not be overwritten
    weights = torch.arange(y.numel(), dtype=y.dtype).view(y.shape) - 5.0
    (dz,) = torch.autograd.grad((y * weights).sum(), z)
    return y, dz


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("size", [(2, 2), (3, 2), (1, 1)])
@pytest.mark.parametrize("memory_format", FORMATS)
def test_relu_with_pooling_is_torchs(memory_format, size, large, monkeypatch):
    if large:
        monkeypatch.setattr(module, "SMALL", 0)
    z = maps(FORMATS[memory_format])
    y, dz = value_and_gradient(lambda z: rectified_and_pooled(z, size), z)
    expected = value_and_gradient(lambda z: F.max_pool2d(F.relu(z), size), z)
    assert torch.equal(y, expected[0]) and torch.equal(dz, expected[1])
    assert dz.stride() == z.stride()
    with torch.no_grad():
        assert torch.equal(rectified_and_pooled(z.detach(), size), y)


@pytest.mark.parametrize("memory_format", FORMATS)
def test_relu_is_torchs(memory_format):
    z = maps(FORMATS[memory_format])
    for ours, theirs in zip(
        value_and_gradient(rectified, z), value_and_gradient(F.relu, z), strict=True
    ):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("size", [(2, 2), (3, 2), (1, 1), (2, 4)])
@pytest.mark.parametrize("memory_format", FORMATS)
def test_the_largest_of_every_tile_is_torchs(memory_format, size):
    y = maps(FORMATS[memory_format]).detach()
    assert torch.equal(tiled_max(y, size), F.max_pool2d(y, size))
    pool = nn.MaxPool2d(size)
    assert torch.equal(without_indices(pool, hooked)(y), pool(y))
    pool.register_forward_hook(lambda *_: None)
    assert without_indices(pool, hooked) is pool


def test_a_derivative_with_other_strides_is_not_overwritten():
    z = maps(torch.contiguous_format)
    y, dz = value_and_gradient(lambda z: rectified(z).mean((2, 3), keepdim=True), z)
    expected = value_and_gradient(lambda z: F.relu(z).mean((2, 3), keepdim=True), z)
    assert torch.equal(y, expected[0]) and torch.equal(dz, expected[1])


def test_a_view_is_not_overwritten():
    z = torch.randn(2, 3, 4, dtype=torch.float64)
    layer = nn.Linear(4, 4).double()
    for ours, theirs in zip(
        value_and_gradient(lambda z: rectified(layer(z)), z),
        value_and_gradient(lambda z: F.relu(layer(z)), z),
        strict=True,
    ):
        assert torch.equal(ours, theirs)


def net(pool=None):
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), pool or nn.MaxPool2d(2),
        nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(4),
        nn.Flatten(), nn.Linear(64, 5), nn.ReLU(),
    )  # fmt: skip


POOLS = {
    "overlapping": lambda: nn.MaxPool2d(3, 2, padding=1),
    "dilated": lambda: nn.MaxPool2d(2, dilation=2),
    "rounded up": lambda: nn.MaxPool2d(2, ceil_mode=True),
    "average": lambda: nn.AvgPool2d(2),
}


def replaced(modules):
    return [not isinstance(f, nn.Module) for f in chain(modules, hooked)]


def test_which_relus_are_replaced():
    assert replaced(list(net())) == [False, False, True, False, True, False, False, False, True]
    for make in POOLS.values():  # the ReLU alone
        assert replaced(list(net(make())))[2:4] == [True, False]


class Shift(nn.Module):
    """Its parameter's derivative is that of its output, the very tensor."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(3, 4))

    def forward(self, x):
        return x + self.shift


def test_a_relu_next_to_an_unknown_module_stays():
    assert replaced([nn.ReLU(), nn.Linear(4, 4)]) == [False, False]
    assert replaced([Shift(), nn.ReLU()]) == [False, False]
    assert replaced([nn.Linear(4, 4), nn.ReLU(), Shift()]) == [False] * 3
    assert replaced([nn.Linear(4, 4), nn.ReLU(), nn.Flatten(), Shift()]) == [False] * 4
    watched = nn.ReLU()
    watched.register_forward_hook(lambda *_: None)
    assert replaced([nn.Linear(4, 4), watched]) == [False, False]


@pytest.mark.parametrize("pool", [None, *POOLS])
def test_a_chain_is_the_modules_one_after_another(pool):
    torch.manual_seed(0)
    model = net(None if pool is None else POOLS[pool]()).double()
    x = torch.randn(3, 2, 8, 8, dtype=torch.float64)
    y = model(x)
    expected = torch.autograd.grad(y.square().sum(), list(model.parameters()))
    ours = x
    for function in chain(list(model), hooked):
        ours = function(ours)
    grads = torch.autograd.grad(ours.square().sum(), list(model.parameters()))
    assert torch.equal(ours, y)
    assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))


def test_fewer_bytes_are_stored():
    stored = {}
    for name, functions in {"torch": list(net()), "ours": chain(list(net()), hooked)}.items():
        y = torch.randn(16, 2, 8, 8)
        with LiveBytes() as live:
            for function in functions:
                y = function(y)
            stored[name] = live.live
    assert stored["ours"] < 0.75 * stored["torch"]
