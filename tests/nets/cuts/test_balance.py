"""Where a model is cut into blocks of several layers."""

from itertools import combinations, pairwise

import pytest
import torch
from helpers import mlp
from torch import nn

from tpsgd import Recurrent, TpsgdError, split
from tpsgd.nets.blocks import footprints
from tpsgd.nets.cuts.balance import TIE, Footprint, _peaks, layers_per_block


def prints(*sizes):
    return [Footprint({i: n}, n) for i, n in enumerate(sizes)]


def every_cut(layers, blocks):
    for inner in combinations(range(1, layers), blocks - 1):
        yield [b - a for a, b in pairwise((0, *inner, layers))]


def highest(counts, sizes):
    ends = [sum(counts[:i]) for i in range(len(counts))]
    return max(_peaks(sizes)[start][count - 1] for start, count in zip(ends, counts, strict=True))


@pytest.mark.parametrize("blocks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("seed", range(4))
def test_no_other_cut_has_a_lower_peak_or_is_more_even(seed, blocks):
    g = torch.Generator().manual_seed(seed)
    sizes = prints(*torch.randint(1, 100, (7,), generator=g).tolist())
    counts = layers_per_block(blocks, 7, (), sizes)
    lowest = min(highest(other, sizes) for other in every_cut(7, blocks))
    assert sum(counts) == 7 and highest(counts, sizes) <= TIE * lowest
    even = [
        sum(n * n for n in other)
        for other in every_cut(7, blocks)
        if highest(other, sizes) <= TIE * lowest
    ]
    assert sum(n * n for n in counts) == min(even)


def test_a_storage_of_two_layers_counts_once():
    shared = [Footprint({1: 10, 2: 10}, 0), Footprint({2: 10, 3: 10}, 0)]
    assert _peaks(shared) == [[20, 30], [20]]


def test_a_closed_form_alone_has_no_derivative_with_respect_to_its_input():
    layers = [Footprint({1: 10}, 7, True), Footprint({2: 20}, 5)]
    assert _peaks(layers) == [[10 + 7, 30 + 2 * 5], [20 + 2 * 5]]


@pytest.mark.parametrize("closed_form, counts", [(False, [2, 3]), (True, [1, 4])])
def test_a_first_layer_in_closed_form_is_cut_off(closed_form, counts):
    first, second = Footprint({0: 100}, 100, closed_form), Footprint({1: 20}, 100)
    others = [Footprint({i: 10}, 50) for i in (2, 3, 4)]
    assert layers_per_block(2, 5, (), [first, second, *others]) == counts


def test_memory_decides_before_the_number_of_layers():
    assert layers_per_block(2, 6, (), prints(500, 400, 40, 30, 20, 10)) == [1, 5]
    assert layers_per_block(2, 6) == [3, 3]


def test_what_must_be_alone_stays_alone():
    assert layers_per_block(3, 5, [0, 1]) == [1, 1, 3]
    with pytest.raises(TpsgdError, match="blocks=2 puts a recurrent layer"):
        layers_per_block(2, 5, [0, 1])
    with pytest.raises(TpsgdError, match="a block of its own"):
        layers_per_block([2, 3], 5, [1])


WRONG = {
    "none": 0,
    "more than layers": 4,
    "too few": [1, 1],
    "an empty block": [3, 0],
    "no block": [],
    "no number": [1.5, 1.5],
    "a truth": True,
}


@pytest.mark.parametrize("blocks", WRONG.values(), ids=WRONG)
def test_a_cut_that_is_none_is_refused(blocks):
    with pytest.raises(TpsgdError, match=r"^blocks.*layers"):
        split(mlp(4, 4, 4, 3), blocks=blocks)


def convolutions():
    layers = []
    for inputs, outputs in pairwise((3, 8, 32, 16, 16)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16, 3))


def test_the_modules_of_joined_blocks_are_the_models_in_order():
    net = convolutions()
    for blocks in (None, 1, 2, 3, [2, 3], [1, 1, 1, 1, 1]):
        modules = [m for block in split(net, blocks=blocks) for m in block.modules]
        assert modules == list(net)
    names = [str(b) for b in split(net, blocks=[2, 3])]
    assert names == ["0-4: 2 x Conv2d", "8-17: 2 x Conv2d + Linear"]


def test_dropout_after_a_block_belongs_to_the_next_one():
    net = nn.Sequential(
        nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Dropout(), nn.Linear(4, 3)
    )
    first, second = split(net, blocks=[2, 1])
    assert first.modules == list(net[:4]) and second.prologue == [net[4]]


def test_joined_blocks_compute_the_same():
    net, x = convolutions().eval(), torch.randn(2, 3, 16, 16)
    y = x
    for block in split(net, blocks=2):
        y = block(y)
    assert torch.equal(y, net(x))


def test_samples_decide_where_a_net_is_cut():
    net, x = convolutions(), torch.randn(2, 3, 16, 16)
    before = {name: t.clone() for name, t in net.state_dict().items()}
    assert [len(b.layers) for b in split(net, blocks=2)] == [2, 3]
    assert [len(b.layers) for b in split(net, x, blocks=2)] == [1, 4]
    assert all(torch.equal(t, before[name]) for name, t in net.state_dict().items())


def test_footprints_count_what_autograd_stores():
    net, x = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)), torch.randn(2, 4)
    first, second = footprints(split(net), x)
    assert sorted(first.stored.values()) == [4 * 2 * 4, 4 * 2 * 6]  # x and the activation
    assert list(second.stored.values()) == [4 * 2 * 6]
    assert set(second.stored) < set(first.stored)  # the same activation
    assert (first.largest, second.largest) == (48, 48)
    assert first.closed_form and second.closed_form
    attention = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    net = nn.Sequential(attention, nn.Flatten(), nn.Linear(12, 3))
    kinds = [layer.closed_form for layer in footprints(split(net), torch.randn(2, 3, 4))]
    assert kinds == [False, True]


def test_a_recurrent_layer_is_a_block_of_its_own():
    net = nn.Sequential(Recurrent(4, 6), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    assert [len(b.layers) for b in split(net, blocks=2)] == [1, 2]
    with pytest.raises(TpsgdError, match="a recurrent layer"):
        split(net, blocks=1)
    with pytest.raises(TpsgdError, match="a recurrent layer"):
        split(net, blocks=[2, 1])
