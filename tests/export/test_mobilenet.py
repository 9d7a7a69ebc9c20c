"""The MobileNet-like net of `examples/edge`: a frozen body of bytes and a tail that learns."""

import pytest
import torch
from torch import nn

import tpsgd
from examples.edge import mobilenet
from tpsgd_export.read_model import read_model
from tpsgd_export.to_c.codes import with_codes
from tpsgd_export.to_c.compiled import CompiledNet
from tpsgd_export.to_c.memory import layout
from tpsgd_export.to_c.small import with_small_weights

SHAPE = (3, 32, 32)


def net() -> nn.Sequential:
    """The net with norms that have measured some pictures."""
    torch.manual_seed(0)
    model = mobilenet.mobilenet()
    with torch.no_grad():
        model.train()(torch.rand(8, *SHAPE))
    return mobilenet.with_new_head(model.eval())


def test_the_tail_and_the_head_learn_and_the_body_is_bytes():
    recipe = with_small_weights(read_model(net(), mobilenet.RULE, SHAPE))
    learning = [block.number for block in recipe.blocks if block.learns]
    assert learning == [len(recipe.blocks) - 3 + i for i in range(3)]
    assert all((row.scales is None) == row.learns for row in recipe.rows)
    assert recipe.blocks[-3].joined and recipe.blocks[-3].added == -1


def test_it_fits_into_256_kb():
    recipe = with_small_weights(read_model(net(), mobilenet.RULE, SHAPE))
    assert layout(with_codes(recipe, "auto")).ram_bytes <= 256 * 1024


@pytest.mark.full
def test_the_c_learns_with_its_tail_and_leaves_the_body(tmp_path):
    x, y = torch.rand(30, *SHAPE), torch.arange(30) % 5
    tpsgd.export.c(
        net(), tmp_path, shape=SHAPE, rule=mobilenet.RULE, ram="256KB", frozen="int8", samples=x
    )
    moved = {}
    for name, blocks in mobilenet.LEARNS.items():
        device = mobilenet.learned(tmp_path, (x, y), 0.01, passes=3, last_blocks=blocks)
        moved[name] = int((device.weights != CompiledNet(tmp_path).weights).sum())
    head = 5 * mobilenet.WIDTH + 5
    assert 0 < moved["the head alone"] <= head < moved["the tail and the head"]
