"""Layers of nets that people have: ReLU6, dropout, batch norms, depthwise convolutions."""

import re
import warnings

import pytest
import torch
from helpers import with_full
from torch import nn

import tpsgd
from tpsgd import rules
from tpsgd.common.errors import TpsgdError
from tpsgd_export.read_model import read_model
from tpsgd_export.to_c.check import distances
from tpsgd_export.to_c.compiled import CompiledNet, compiler
from tpsgd_export.to_c.source import sources

pytestmark = [
    pytest.mark.skipif(compiler() is None, reason="no C compiler"),
    pytest.mark.usefixtures("unwatched"),
]


def norm(maps: int) -> nn.Module:
    """A batch norm that has seen something."""
    layer = nn.BatchNorm2d(maps)
    layer.running_mean, layer.running_var = torch.randn(maps), torch.rand(maps) + 0.5
    nn.init.uniform_(layer.weight, 0.5, 2)
    nn.init.normal_(layer.bias)
    return layer


def separable(a: int, b: int, stride: int = 1) -> list[nn.Module]:
    """A depthwise convolution and one over pixels, with norms and ReLU6, as in MobileNets."""
    depthwise = nn.Conv2d(a, a, 3, stride, 1, groups=a, bias=False)
    return [
        depthwise, norm(a), nn.ReLU6(), nn.Conv2d(a, b, 1, bias=False), norm(b), nn.ReLU6()
    ]  # fmt: skip


def mobile() -> nn.Sequential:
    torch.manual_seed(0)
    first = [nn.Conv2d(2, 4, 3, 2, 1, bias=False), norm(4), nn.ReLU6()]
    pools = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(8, 3)]
    return nn.Sequential(*first, *separable(4, 6), *separable(6, 8, 2), *pools)


def dense() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Dropout(), nn.Linear(6, 20), nn.BatchNorm1d(20), nn.ReLU6(), nn.AlphaDropout()]
    return nn.Sequential(nn.Unflatten(1, (2, 3)), nn.Flatten(), *layers, nn.Linear(20, 3))


NETS = {"mobile": (mobile, (2, 9, 9)), "dense": (dense, (6,))}
RULES = {"readout": rules.readout(scale=3.0), "learned": rules.default(), "l2": rules.tpsgd_l2()}


@pytest.mark.parametrize("rule", with_full(RULES, ["learned"]))
@pytest.mark.parametrize("net", NETS)
def test_such_a_net_learns_the_weights_of_fit(net, rule):
    make, shape = NETS[net]
    model, recipe = make(), read_model(make(), RULES[rule], shape, batch=2)
    with torch.no_grad():
        model[-1].weight.mul_(20)
    recipe = read_model(model, RULES[rule], shape, batch=2)
    apart = distances(model, recipe, sources(recipe), tpsgd.simultaneous, 20, rule=RULES[rule])
    assert apart.equal and apart.ours < 1e-5


def test_relu6_has_its_ceiling_and_no_slope_above_it(tmp_path):
    first, last = nn.Linear(1, 3, bias=False), nn.Linear(3, 3, bias=False)
    with torch.no_grad():
        first.weight.copy_(torch.tensor([[-1.0], [2.0], [9.0]]))
        last.weight.copy_(torch.eye(3))
    model = nn.Sequential(first, nn.ReLU6(), last)
    tpsgd.export.c(
        model, tmp_path, shape=(1,), rule=rules.readout(scale=1.0), samples=torch.ones(2, 1)
    )
    net = CompiledNet(tmp_path)
    assert net.forward([1.0]).tolist() == [0.0, 2.0, 6.0]
    before = net.weights[:3].clone()
    net.step([1.0], [1], 0.1)
    assert (net.weights[:3] != before).tolist() == [False, True, False]


@pytest.mark.parametrize("net", NETS)
def test_norms_are_folded_and_weights_come_back(net, tmp_path):
    make, shape = NETS[net]
    model, rule = make(), rules.readout(scale=3.0)
    model.eval()
    tpsgd.export.c(model, tmp_path, shape=shape, rule=rule)
    board, x = CompiledNet(tmp_path), torch.randn(9, *shape)
    with torch.no_grad():
        for sample, logits in zip(x, model(x), strict=True):
            assert torch.allclose(board.forward(sample), logits, atol=1e-4)
    for sample in x:
        board.step(sample, [1], 0.05)
    assert tpsgd.export.read_weights(model, board.save()) == 3
    with torch.no_grad():
        for sample, logits in zip(x, model(x), strict=True):
            assert torch.allclose(board.forward(sample), logits, atol=1e-4)


def test_norms_that_cannot_be_folded_are_refused():
    for layer in (nn.LayerNorm(8), nn.BatchNorm1d(8, track_running_stats=False)):
        model = nn.Sequential(nn.Linear(4, 8), layer, nn.ReLU(), nn.Linear(8, 2))
        with pytest.raises(TpsgdError, match="with running statistics"):
            read_model(model, rules.readout(), (4,))


def test_a_graph_of_relu6_is_that_of_fit(tmp_path):
    pytest.importorskip("onnxruntime")
    first = nn.Linear(4, 8)
    with torch.no_grad():
        first.weight.mul_(20)
    model = nn.Sequential(first, nn.ReLU6(), nn.Linear(8, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checked = tpsgd.export.onnx(model, tmp_path / "step.onnx", shape=(4,)).checked
    assert "against tpsgd.fit" in checked


def frozen_body(bias: bool = False) -> nn.Sequential:
    model = mobile()
    if bias:
        model[0] = nn.Conv2d(2, 4, 3, 2, 1)
    model[:-1].requires_grad_(False)
    return model


@pytest.mark.parametrize(
    "frozen", with_full(["net", "first layers", "hidden dense layer"], ["net"])
)
def test_weights_of_a_byte_give_the_outputs_of_their_rounded_floats(frozen, tmp_path):
    model, shape = frozen_body(), (2, 9, 9)
    if frozen == "first layers":
        model[6:12].requires_grad_(True)
    if frozen == "hidden dense layer":
        model, shape = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)), (5,)
        model[0].requires_grad_(False)
    rule = rules.readout(scale=3.0)
    options = {"shape": shape, "rule": rule, "samples": torch.randn(20, *shape)}
    small = tpsgd.export.c(model, tmp_path / "a", **options, frozen="int8")
    large = tpsgd.export.c(model, tmp_path / "b", **options)
    assert "run beside tpsgd.fit" in small.checked
    floats, small_bytes = large.memory.flash["initial weights"], small.memory.flash
    count = small_bytes["weights of a byte"]
    assert floats - small_bytes["initial weights"] == 4 * count and count > 30
    text = (tmp_path / "a/net.c").read_text()
    numbers = re.findall(r"int8_t small\d+\[(\d+)\]", text)
    assert sum(map(int, numbers)) == count
    nets = [CompiledNet(tmp_path / name) for name in "ab"]
    outputs = torch.stack(
        [torch.stack([net.forward(x) for net in nets]) for x in options["samples"]]
    )
    apart = (outputs[:, 0] - outputs[:, 1]).abs().max()
    assert 0 < apart < 0.03 * outputs.abs().max()


def test_weights_of_a_byte_need_layers_that_do_not_learn(tmp_path):
    with pytest.raises(TpsgdError, match="all of these do"):
        tpsgd.export.c(dense(), tmp_path, shape=(6,), frozen="int8")
    with pytest.raises(TpsgdError, match="not recurrent"):
        model = nn.Sequential(tpsgd.Recurrent(2, 5), nn.Linear(5, 3))
        tpsgd.export.c(model, tmp_path, shape=(4, 2), frozen="int8", rule=rules.frozen())
