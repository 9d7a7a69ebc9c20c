"""Blocks of one layer that end in a pooling: the output has torch's bits, whenever it is computed.

Their output is computed before the gradients, which are then written over the feature maps.
"""

import pytest
import torch
from helpers import seeded
from torch import nn

from tpsgd import Place, rules, split
from tpsgd.maths.random import Key
from tpsgd.nets.autograd import Autograd
from tpsgd.nets.closed_form import ClosedForm
from tpsgd.objectives import Site

POOLS = {
    "tiles": lambda: nn.MaxPool2d(2),
    "a remainder": lambda: nn.MaxPool2d(3),
    "overlapping": lambda: nn.MaxPool2d(3, 2),
    "mean": lambda: nn.AvgPool2d(2),
    "adaptive": lambda: nn.AdaptiveAvgPool2d(2),
}
FORMATS = {"first": torch.contiguous_format, "last": torch.channels_last}


def pooled_block(pool):
    def make():
        layers = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), POOLS[pool]()
        return nn.Sequential(*layers, nn.Conv2d(4, 3, 2))

    block = split(seeded(make))[0]
    block.train(True)
    assert block.pools and block.closed_form(Place.AFTER)
    return block


def learned(pool, x, precision, output_first, kind=ClosedForm):
    """The output, torch's pooling of the activation, and the gradients, before or after these."""
    block = pooled_block(pool)
    objective = rules.tpsgd_l2(features=16).objective(Site((4, 8, 8), 3, Key(), True))
    params, labels = block.named_parameters(), torch.arange(len(x)) % 3
    engine = kind(block, Place.AFTER, objective, precision=precision)
    with torch.no_grad():
        saved = engine.forward(params, x)
        expected = None if kind is Autograd else POOLS[pool]()(saved.y.clone())
        output = engine.output(saved) if output_first else None
        _, slices = engine.gradients(params, saved, labels, objective.tensors)
        grads = {name: grad for part in slices for name, grad in part.items()}
        return engine.output(saved) if output is None else output, expected, grads


@pytest.mark.parametrize("precision", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize("pool", POOLS)
def test_output_and_gradients_do_not_depend_on_their_order(pool, layout, precision):
    x = torch.randn(6, 2, 8, 8).to(precision or torch.float32, memory_format=FORMATS[layout])
    before, after = (learned(pool, x, precision, first) for first in (True, False))
    for output, expected, grads in (before, after):
        assert torch.equal(output, expected) and output.dtype is x.dtype
        assert all(torch.equal(grad, before[2][name]) for name, grad in grads.items())


@pytest.mark.parametrize("pool", POOLS)
def test_the_gradients_are_those_of_autograd(pool):
    x = torch.randn(6, 2, 8, 8)
    *_, grads = learned(pool, x, None, False)
    *_, expected = learned(pool, x, None, False, Autograd)
    assert grads.keys() == expected.keys()
    for name, grad in expected.items():
        torch.testing.assert_close(grads[name], grad, rtol=1e-4, atol=1e-6)
