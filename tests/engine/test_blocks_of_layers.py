"""Blocks of several layers: autograd inside each, and nothing between them."""

from functools import partial

import pytest
import torch
from helpers import Probe, Residual, Wall, close, images, leaves, mlp, points, same, seeded, state
from torch import nn

import tpsgd
from tpsgd import Memory, Place, Recurrent, TpsgdError, rules, split
from tpsgd.engine.sources import augment
from tpsgd.maths.random import Key
from tpsgd.nets.autograd import Autograd
from tpsgd.objectives import Site, output

ORDERS = [tpsgd.sequential, tpsgd.simultaneous]
sgd = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
READOUT = partial(rules.readout, scale=4.0)  # by hand: the plain loop does not calibrate
RULES = {
    "readout": READOUT,
    "readout, at the end": partial(READOUT, at=Place.END),
    "readout, before": partial(READOUT, at=Place.BEFORE),
    "learned": partial(READOUT, learned=True),
    "predsim": rules.predsim,
    "tpsgd-l2": rules.tpsgd_l2,
    "l2, pooled and standardised": partial(rules.tpsgd_l2, features=16, standardise=True),
    "drtp": rules.drtp,
    "frozen": rules.frozen,
}
CUT = [2, 2, 3]


def by_name(f):
    return f.__name__


def net():
    """Seven layers: convolutions with and without a norm, pooling, a residual layer, dense ones."""
    return nn.Sequential(
        nn.Conv2d(2, 5, 3, padding=1), nn.BatchNorm2d(5), nn.ReLU(inplace=True),
        nn.Conv2d(5, 5, 3, padding=1), nn.BatchNorm2d(5), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(5, 6, 3, padding=1), nn.Tanh(),
        nn.Conv2d(6, 6, 3, padding=1), nn.ReLU(), nn.Flatten(),
        nn.Linear(54, 8), nn.ReLU(), Residual(8), nn.ReLU(), nn.Linear(8, 3),
    )  # fmt: skip


def reads_token_mean(block, rule, shape):
    return rule.classifies and len(shape) == 2 and any("Attention" in str(m) for m in block.layers)


def by_hand(model, data, rule, counts, order, epochs, batch_size, seed=0):
    """A plain loop: blocks of these numbers of layers, with a detach between them."""
    x, y = data
    blocks = split(model, blocks=counts)
    last = len(blocks) - 1
    shapes, here = [], x[:2]
    for block in blocks:
        block.train(False)
        outputs = block.outputs(here)
        shapes.append(tuple(outputs[rule.at].shape[1:]))
        here = outputs[Place.END].detach()
    objectives, optimizers = [], []
    for i, block in enumerate(blocks):
        objective = output(rule.loss)
        if i < last and rule.objective is not None:
            shape = shapes[i][1:] if reads_token_mean(block, rule, shapes[i]) else shapes[i]
            maps = block.maps and len(shapes[i]) > 1
            objective = rule.objective(Site(shape, 3, Key(seed, i), maps=maps, dtype=x.dtype))
        tensors, learned = objective.tensors, objective.learned_tensors
        for t in learned:
            t.requires_grad_()
        objectives.append((objective.loss, tensors))
        frozen = i < last and rule.objective is None
        parameters = [*block.named_parameters().values(), *learned]
        optimizers.append(None if frozen else sgd(parameters))

    def step(block_numbers, order):
        here = x[order]
        for i, block in enumerate(blocks):
            learning = i in block_numbers and optimizers[i] is not None
            block.train(learning)
            outputs = block.outputs(here.detach())
            here = outputs[Place.END].detach()
            if learning:
                loss, tensors = objectives[i]
                optimizers[i].zero_grad()
                y_i = outputs[rule.at if i < last else Place.END]
                tokens = i < last and reads_token_mean(block, rule, shapes[i])
                loss(y_i.mean(1) if tokens else y_i, y[order], *tensors).backward()
                optimizers[i].step()

    stages = [[i] for i in range(len(blocks))]
    for stage in stages if order is tpsgd.sequential else [list(range(len(blocks)))]:
        for epoch in range(epochs):
            for order in orders(len(y), stage[0], epoch, batch_size, seed):
                step(stage, order)


def orders(samples, block, epoch, batch_size, seed):
    """The order in which `fit` shows samples to a block."""
    source = []
    numbered = torch.arange(samples, dtype=torch.float64)[:, None]
    probe = Probe(lambda x: source.append(x[:, 0].long()))
    layers = [nn.Linear(1, 1) for _ in range(block)]
    model = nn.Sequential(*layers, probe, nn.Linear(1, 3)).double()
    for layer in layers:
        nn.init.ones_(layer.weight)
        nn.init.zeros_(layer.bias)
    tpsgd.fit(
        model, (numbered, torch.arange(samples) % 3), rule=rules.frozen(), epochs=epoch + 1,
        order=tpsgd.sequential, batch_size=batch_size, seed=seed, memory=Memory(reuse=False),
    )  # fmt: skip
    batches = [order for order in source if len(order) == batch_size]
    return batches[epoch * (samples // batch_size) :][: samples // batch_size]


@pytest.mark.cover(1)
@pytest.mark.parametrize("order", ORDERS, ids=by_name)
@pytest.mark.parametrize("name", RULES)
def test_the_weights_are_those_of_a_plain_loop_with_detached_edges(name, order):
    x, y = images(32)
    data = x.double(), y
    rule = RULES[name]()
    ours, theirs = seeded(net).double(), seeded(net).double()
    settings = {"rule": rule, "order": order, "epochs": 2, "batch_size": 16}
    run = tpsgd.fit(ours, data, blocks=CUT, optimizer=sgd, **settings)
    by_hand(theirs, data, rule, CUT, order, 2, 16)
    close(state(ours), state(theirs), rtol=1e-8, atol=1e-10)
    assert not same(state(ours), state(seeded(net).double()))
    assert [b.name.partition(": ")[2] for b in run.blocks] == [
        "2 x Conv2d", "2 x Conv2d", "Linear + Residual + Linear",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["dfa", "sdfa"])
def test_dfa_reaches_every_layer_of_a_block(name):
    model = seeded(net)
    before = state(model)
    run = tpsgd.fit(model, images(), rule=rules.ALL[name].make(), blocks=CUT, epochs=1)
    assert run.settings["order"] == "simultaneous"
    changed = {k for k, t in state(model).items() if not torch.equal(t, before[k])}
    assert {f"{i}.weight" for i in (0, 3, 7, 9, 12, 16)} <= changed


@pytest.mark.cover(1)
@pytest.mark.parametrize("order", ORDERS, ids=by_name)
@pytest.mark.parametrize("name", ["readout", "learned", "predsim", "tpsgd-l2", "frozen"])
def test_a_block_per_layer_is_the_default(name, order):
    states = []
    for blocks in (None, 7, [1] * 7):
        model = seeded(net)
        settings = {"rule": RULES[name](), "order": order, "epochs": 2, "batch_size": 16}
        tpsgd.fit(model, images(), blocks=blocks, **settings)
        states.append(state(model))
    assert same(states[0], states[1]) and same(states[0], states[2])


@pytest.mark.parametrize("data", ["images", "points"])
@pytest.mark.parametrize("micro_batch", [None, 8])
def test_one_block_is_backprop(data, micro_batch):
    make, samples = (net, images()) if data == "images" else (lambda: mlp(6, 8, 8, 3), points())
    ours, theirs = seeded(make), seeded(make)
    settings = {"epochs": 2, "batch_size": 16, "memory": Memory(micro_batch=micro_batch)}
    run = tpsgd.fit(ours, samples, blocks=1, **settings)
    other = tpsgd.fit_backprop(theirs, samples, **settings)
    close(state(ours), state(theirs), rtol=1e-5, atol=1e-6)
    if micro_batch is None:
        assert same(state(ours), state(theirs))
    assert run.sample_passes == other.sample_passes
    assert [e.block for e in run.history] == [1, 1]


@pytest.mark.cover(1)
@pytest.mark.parametrize("order", ORDERS, ids=by_name)
@pytest.mark.parametrize("name", RULES)
def test_no_graph_leaves_a_block(name, order, monkeypatch):
    graphs = set()

    def watched(self, params, x, forward=Autograd.forward):
        saved = forward(self, params, x)
        own = set(map(id, self.block.named_parameters().values()))
        reached = {id(leaf) for y in saved.values() for leaf in leaves(y)}
        assert reached <= own and not x.requires_grad
        graphs.update([self.block.index] if reached else [])
        return saved

    monkeypatch.setattr(Autograd, "forward", watched)
    settings = {"rule": RULES[name](), "order": order, "epochs": 1, "batch_size": 16}
    tpsgd.fit(seeded(net), images(), blocks=CUT, **settings)
    assert graphs == ({2} if name == "frozen" else {0, 1, 2})


def walled(edge):
    """Five layers with a wall, which no gradient may pass, before one of them."""
    layers = [m for _ in range(4) for m in (nn.Linear(6, 6), nn.Tanh())]
    return nn.Sequential(*layers[: 2 * edge], Wall(), *layers[2 * edge :], nn.Linear(6, 3))


@pytest.mark.parametrize("order", ORDERS, ids=by_name)
@pytest.mark.parametrize("edge", [1, 2, 3, 4])
def test_gradients_stop_at_the_edges_of_blocks_and_nowhere_else(edge, order):
    settings = {"blocks": [2, 3], "order": order, "epochs": 1}
    if edge == 2:
        tpsgd.fit(seeded(lambda: walled(edge)), points(), **settings)
        return
    with pytest.raises(AssertionError, match="crossed from one block into another"):
        tpsgd.fit(seeded(lambda: walled(edge)), points(), **settings)


@pytest.mark.parametrize("order", ORDERS, ids=by_name)
@pytest.mark.parametrize("name", ["readout", "learned", "predsim", "tpsgd-l2"])
def test_earlier_blocks_do_not_depend_on_later_ones(name, order):
    first = []
    for scale in (1.0, -3.0):
        model = seeded(net)
        with torch.no_grad():
            for p in model[7:].parameters():
                p.mul_(scale)
        settings = {"rule": RULES[name](), "order": order, "epochs": 1, "batch_size": 16}
        tpsgd.fit(model, images(), blocks=CUT, **settings)
        first.append(state(model[:7]))
    assert same(*first) and not same(first[0], state(seeded(net)[:7]))


def test_micro_batches_add_up_to_the_whole_batch():
    states = []
    for micro_batch in (None, 4):
        model = seeded(lambda: mlp(6, 8, 8, 8, 8, 3)).double()
        x, y = points()
        settings = {"rule": rules.readout(learned=True), "epochs": 2, "batch_size": 16}
        settings |= {"memory": Memory(micro_batch=micro_batch), "optimizer": sgd}
        tpsgd.fit(model, (x.double(), y), blocks=2, **settings)
        states.append(state(model))
    close(*states)


def test_lists_have_an_entry_per_block():
    model = seeded(net)
    chosen = [rules.readout(), rules.frozen(), rules.readout()]
    run = tpsgd.fit(
        model, images(), blocks=CUT, rule=chosen, epochs=[2, 1, 3], lr=[1e-3, 1e-3, 1e-2],
        order=tpsgd.sequential,
    )  # fmt: skip
    assert [b.rule for b in run.blocks] == ["readout", "frozen", "head"]
    assert [e.block for e in run.history] == [1, 1, 3, 3, 3]
    assert same(state(model[7:12]), state(seeded(net)[7:12]))
    with pytest.raises(TpsgdError, match="epochs has 7 entries, but the model has 3 blocks"):
        tpsgd.fit(model, images(), blocks=3, epochs=[1] * 7)
    with pytest.raises(TpsgdError, match="a list of 3, one per block"):
        tpsgd.fit(model, images(), blocks=3, rule=[rules.readout()] * 7)


@pytest.mark.parametrize("order", ORDERS, ids=by_name)
def test_lower_precision_and_augmentation(order):
    for name in ("readout", "learned", "predsim"):
        model = seeded(net)
        before = state(model)
        run = tpsgd.fit(
            model, images(), rule=RULES[name](), blocks=3, order=order, epochs=1,
            precision=torch.bfloat16, augment=augment.flip(),
        )  # fmt: skip
        after = state(model)
        assert not any(torch.equal(after[k], before[k]) for k in after if k.endswith("weight"))
        assert all(e.loss == e.loss for e in run.history)


def test_a_deep_net_with_batch_norm_trains_its_few_blocks_together():
    run = tpsgd.fit(seeded(net), images(), blocks=2, epochs=1)
    assert run.settings["order"] == "simultaneous" and run.settings["blocks"] == "2"


def test_it_learns():
    model, data = seeded(net), images(96)
    tpsgd.fit(model, data, blocks=3, epochs=30, lr=3e-3)
    assert tpsgd.evaluate(model, data) > 0.9


@pytest.mark.parametrize("solver", [tpsgd.ridge, tpsgd.rls])
def test_a_solver_refuses_a_block_of_several_layers(solver):
    settings = {"optimizer": [tpsgd.sgd, solver()], "order": tpsgd.sequential}
    with pytest.raises(TpsgdError, match="several layers, and a solver needs a block of one"):
        tpsgd.fit(mlp(6, 8, 8, 3), points(), blocks=[1, 2], loss=tpsgd.mse, **settings)
    run = tpsgd.fit(mlp(6, 8, 8, 3), points(), blocks=[2, 1], loss=tpsgd.mse, **settings)
    assert [b.learning for b in run.blocks] == ["autograd", "solved"]


def test_restarts_run_one_by_one():
    many = partial(tpsgd.fit_many, lambda: mlp(6, 8, 8, 3), points(), restarts=2, epochs=1)
    assert len(many(blocks=2)) == 2
    with pytest.raises(TpsgdError, match="cannot be stacked: blocks of several layers"):
        many(blocks=2, stacked=True)
    assert many(blocks=3, stacked=True).stacked


def test_recurrent_layers_stay_blocks():
    model = nn.Sequential(Recurrent(4, 6), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    data = torch.randn(12, 5, 4), torch.arange(12) % 3
    run = tpsgd.fit(model, data, blocks=2, epochs=1)
    assert [b.learning for b in run.blocks] == ["closed form", "autograd"]
    with pytest.raises(TpsgdError, match="a recurrent layer"):
        tpsgd.fit(model, data, blocks=1)


class Attention(nn.Module):
    """x + attention(x): a module that holds attention."""

    def __init__(self, width):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)

    def forward(self, x):
        return x + self.attention(x, x, x, need_weights=False)[0]


def transformer():
    encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return nn.Sequential(
        nn.Linear(6, 8), Attention(8), encoder, nn.Flatten(), nn.Linear(40, 3)
    )  # fmt: skip


@pytest.mark.cover(1)
@pytest.mark.parametrize("order", ORDERS, ids=by_name)
@pytest.mark.parametrize("blocks", [None, 2])
@pytest.mark.parametrize("name", ["readout", "learned", "predsim", "tpsgd-l2"])
def test_attention_learns_inside_a_block(name, blocks, order):
    x, y = points(30, 30)
    data, model = (x.view(30, 5, 6), y), seeded(transformer)
    before = state(model)
    settings = {"rule": RULES[name](), "order": order, "epochs": 2, "batch_size": 10}
    run = tpsgd.fit(model, data, blocks=blocks, **settings)
    after = state(model)
    assert not any(torch.equal(after[k], before[k]) for k in after if k.endswith("weight"))
    assert run.blocks[1].learning == "autograd"
    plan = tpsgd.plan(
        seeded(transformer), (5, 6), blocks=blocks, samples=30, others=False, **settings
    )
    assert plan.lines[0].peak == run.peak_bytes


def test_tokens_are_no_feature_maps():
    first, attention, encoder, head = split(transformer())
    assert not any(b.maps for b in (first, attention, encoder, head))


def test_an_encoder_layer_learns_as_a_plain_loop_does():
    x, y = points(20, 30)
    data = x.view(20, 5, 6).double(), y
    ours, theirs = seeded(transformer).double(), seeded(transformer).double()
    settings = {"rule": READOUT(), "order": tpsgd.simultaneous}
    tpsgd.fit(ours, data, blocks=[2, 1, 1], optimizer=sgd, epochs=2, batch_size=10, **settings)
    by_hand(theirs, data, READOUT(), [2, 1, 1], tpsgd.simultaneous, 2, 10)
    close(state(ours), state(theirs), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("blocks", ["4", 2.0, {2}])
def test_blocks_of_another_type_are_refused(blocks):
    with pytest.raises(TpsgdError, match=r"^blocks must be a number of blocks, 'auto'"):
        tpsgd.fit(mlp(6, 8, 3), points(), blocks=blocks)
