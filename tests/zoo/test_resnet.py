"""ResNets: torchvision's sizes and names, and residual blocks that learn by themselves."""

import pytest
import torch
from helpers import Wall, images, leaves, same, seeded, state
from torch import nn

import tpsgd
from tpsgd import TpsgdError, rules
from tpsgd.engine.sources.batches import suits_channels_last
from tpsgd.nets.autograd import Autograd
from tpsgd.zoo.resnet import LAYERS, Residual, resnet

ORDERS = [tpsgd.sequential, tpsgd.simultaneous]
RULES = {"readout": rules.readout, "predsim": rules.predsim}
SHORT = {"epochs": 1, "batch_size": 8}


def tiny(seed=0, classes=3):
    return seeded(lambda: resnet(18, (2, 16, 16), classes, small=True, width=4), seed)


@pytest.mark.parametrize(("depth", "parameters"), [(18, 11_689_512), (34, 21_797_672)])
def test_as_many_parameters_as_torchvisions(depth, parameters):
    with torch.device("meta"):
        net = resnet(depth, (3, 224, 224), 1000)
    assert sum(p.numel() for p in net.parameters()) == parameters


def batch_norm(name):
    kept = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    return [f"{name}.{key}" for key in kept]


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("depth", [18, 34])
def test_torchvisions_keys(depth, small):
    wanted = ["conv1.weight", *batch_norm("bn1")]
    for stage, count in enumerate(LAYERS[depth], 1):
        for i in range(count):
            block = f"layer{stage}.{i}"
            wanted += [f"{block}.conv1.weight", *batch_norm(f"{block}.bn1")]
            wanted += [f"{block}.conv2.weight", *batch_norm(f"{block}.bn2")]
            if stage > 1 and i == 0:
                wanted += [f"{block}.downsample.0.weight", *batch_norm(f"{block}.downsample.1")]
    with torch.device("meta"):
        net = resnet(depth, (3, 64, 64), 10, small)
    assert list(net.state_dict()) == [*wanted, "fc.weight", "fc.bias"]


@pytest.mark.parametrize(
    ("small", "shape", "sides"),
    [
        (False, (3, 224, 224), (56, 28, 14, 7)),
        (True, (3, 32, 32), (32, 16, 8, 4)),
        (True, (1, 28, 28), (28, 14, 7, 4)),
        (False, (5, 100, 70), (25, 13, 7, 4)),
    ],
)
def test_the_sizes_of_the_stages(small, shape, sides):
    with torch.device("meta"):
        net, x = resnet(18, shape, 7, small), torch.empty(1, *shape)
        found = []
        for name, module in net.named_children():
            x = module(x)
            if name.startswith("layer"):
                found.append(x.shape[2])
    assert tuple(found) == sides and x.shape == (1, 7)


def test_a_residual_block_is_its_definition():
    block, x = seeded(lambda: Residual(4, 6, 2)).eval(), torch.randn(3, 4, 8, 8)
    inside = block.bn2(block.conv2(torch.relu(block.bn1(block.conv1(x)))))
    shortcut = block.downsample[1](block.downsample[0](x))
    torch.testing.assert_close(block(x), torch.relu(inside + shortcut))
    plain = seeded(lambda: Residual(4, 4)).eval()
    inside = plain.bn2(plain.conv2(torch.relu(plain.bn1(plain.conv1(x)))))
    torch.testing.assert_close(plain(x), torch.relu(inside + x))


def test_a_block_for_the_stem_each_residual_and_the_classes():
    blocks = tpsgd.split(tiny())
    named = [str(b) for b in blocks[:2]]
    assert named == ["conv1: Conv2d + BatchNorm2d + ReLU", "layer1.0: Residual"]
    assert [type(b.layer) for b in blocks] == [nn.Conv2d, *[Residual] * 8, nn.Linear]


@pytest.mark.parametrize("order", ORDERS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("rule", RULES)
def test_every_block_learns_and_no_graph_leaves_it(rule, order, monkeypatch):
    graphs = set()

    def watched(self, params, x, forward=Autograd.forward):
        saved = forward(self, params, x)
        parameters = set(map(id, self.block.named_parameters().values()))
        leaf_ids = {id(leaf) for y in saved.values() for leaf in leaves(y)}
        assert leaf_ids <= parameters and not x.requires_grad
        graphs.update([self.block.index] if leaf_ids else [])
        return saved

    monkeypatch.setattr(Autograd, "forward", watched)
    net = tiny()
    before = {name: p.clone() for name, p in net.named_parameters()}
    run = tpsgd.fit(net, images(16, 2, 16), rule=RULES[rule](), order=order, **SHORT)
    assert [b.learning for b in run.blocks] == ["closed form", *["autograd"] * 8, "closed form"]
    assert graphs >= set(range(1, 9))
    assert not any(torch.equal(p, before[name]) for name, p in net.named_parameters())


@pytest.mark.cover(1)
@pytest.mark.parametrize("blocks", [None, 4])
@pytest.mark.parametrize("rule", [rules.readout(), rules.readout(learned=True), rules.predsim()])
def test_every_parameter_learns_in_lower_precision(rule, blocks):
    net, data = tiny(), images(16, 2, 16)
    assert suits_channels_last(list(net.modules()))
    before = {name: p.clone() for name, p in net.named_parameters()}
    settings = {"precision": torch.bfloat16, "order": tpsgd.simultaneous, "blocks": blocks}
    run = tpsgd.fit(net, data, rule=rule, **settings, **SHORT)
    assert not any(torch.equal(p, before[name]) for name, p in net.named_parameters())
    assert all(e.loss == e.loss for e in run.history)
    plan = tpsgd.plan(tiny(), (2, 16, 16), rule=rule, samples=16, others=False, **settings, **SHORT)
    norms = [[m for m in layer.modules() if isinstance(m, nn.BatchNorm2d)] for layer in net]
    most = max(sum(m.num_features for m in each) for each in norms)
    # a plan's batch norms keep mean and variance of a channel in two bytes each, real ones in four
    assert 0 <= run.peak_bytes - plan.lines[0].peak <= 2 * 2 * most


@pytest.mark.parametrize("order", ORDERS, ids=lambda f: f.__name__)
def test_no_gradient_crosses_a_wall_between_residual_blocks(order):
    def walled():
        blocks = [part for _ in range(2) for part in (Wall(), Residual(2, 2))]
        return nn.Sequential(*blocks, Wall(), nn.Flatten(), nn.Linear(72, 3))

    tpsgd.fit(seeded(walled), images(16), order=order, **SHORT)
    with pytest.raises(AssertionError, match="crossed from one block into another"):
        tpsgd.fit_backprop(seeded(walled), images(16), **SHORT)


def test_early_stages_do_not_depend_on_later_ones():
    found = []
    for seed in (1, 2):
        net = tiny()
        net.layer2.load_state_dict(tiny(seed).layer2.state_dict())
        tpsgd.fit(net, images(16, 2, 16), order=tpsgd.simultaneous, **SHORT)
        found.append(state(net.layer1))
    assert same(*found) and not same(found[0], state(tiny().layer1))


@pytest.mark.full
@pytest.mark.usefixtures("unwatched")
def test_both_ways_learn_what_can_be_learned():
    """Stripes: across, down, or none."""
    x, y = torch.randn(48, 2, 16, 16, generator=torch.Generator().manual_seed(0)), images(48)[1]
    stripes = (torch.arange(16) % 4 < 2).float().expand(16, 16)
    data = x + 2 * torch.stack([stripes, stripes.T, torch.zeros(16, 16)])[y, None], y
    local = {"rule": rules.predsim(), "order": tpsgd.simultaneous}
    for fit, how in ((tpsgd.fit, local), (tpsgd.fit_backprop, {})):
        net = tiny()
        assert tpsgd.evaluate(net, data) < 0.5
        fit(net, data, epochs=8, batch_size=8, lr=1e-2, **how)
        assert tpsgd.evaluate(net, data) > 0.9


def test_channels_last_is_for_our_modules_too():
    assert suits_channels_last(tiny().modules())
    assert not suits_channels_last([*tiny().modules(), Wall()])


WRONG = {
    "no ResNet50": {"depth": 50},
    "shape must be an image's": {"shape": (32, 32)},
    "classes must be": {"classes": 0},
    "width must be": {"width": 0},
}


@pytest.mark.parametrize("message", WRONG)
def test_what_cannot_be_built_is_refused(message):
    given = {"depth": 18, "shape": (3, 32, 32), "classes": 10} | WRONG[message]
    with pytest.raises(TpsgdError, match=message):
        resnet(**given)
