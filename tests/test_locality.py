"""Learning is local: no graph spans two blocks, and no earlier block depends on a later one."""

import pytest
import torch
from helpers import (
    DRAWN,
    LOCAL,
    LOCKED,
    Probe,
    Residual,
    Wall,
    folded,
    leaves,
    mlp,
    points,
    same,
    seeded,
    sequences,
    state,
)
from torch import nn

import tpsgd
from tpsgd import Recurrent, adapt, rules
from tpsgd.engine.learners.optimizers import adam
from tpsgd.engine.sources import augment
from tpsgd.nets.autograd import Autograd

pytestmark = pytest.mark.usefixtures("unwatched")

ORDERS = [tpsgd.sequential, tpsgd.simultaneous]
MIXED = {"epochs": 2, "batch_size": 16}


def by_name(f):
    return f.__name__


def local_runs():
    """Every rule under every order that it can follow."""
    return [(name, s) for name in LOCAL for s in ORDERS] + [
        (name, tpsgd.simultaneous) for name in LOCKED
    ]


@pytest.mark.parametrize(("name", "order"), local_runs())
def test_closed_form_blocks_save_nothing_for_a_backward_pass(name, order):
    """Autograd would pack tensors into its graph.

    `tpsgd` alone differentiates the loss that it is given, with respect to the block's output.
    """
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        run = tpsgd.fit(mlp(6, 8, 8, 3), points(), rule=DRAWN[name](), order=order, **MIXED)
    assert [b.learning for b in run.blocks] == ["closed form"] * 3
    if name == "tpsgd":
        assert all(leaf.shape[1:] == (8,) for t in packed for leaf in leaves(t))
    else:
        assert not packed


def unrolled_net(both_ways=False, between=nn.Identity):
    """Two recurrent layers, 6 and 8 units, and a classifier."""
    return seeded(
        lambda: nn.Sequential(
            Recurrent(4, 6, sequence=True, bidirectional=both_ways),
            between(),
            Recurrent(6 * (1 + both_ways), 8),
            nn.Linear(8, 3),
        ).double()
    )


@pytest.mark.cover(1)
@pytest.mark.parametrize("both_ways", [False, True])
@pytest.mark.parametrize(("name", "order"), local_runs())
def test_recurrent_blocks_save_nothing_for_a_backward_pass(name, order, both_ways):
    """`tpsgd` differentiates its loss with respect to one step's states at a time."""
    packed = []
    settings = folded(rule=DRAWN[name](), order=order, reuse=False) | {"optimizer": adam}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        run = tpsgd.fit(unrolled_net(both_ways), sequences(), window=3, **(MIXED | settings))
    assert [b.learning for b in run.blocks] == ["closed form"] * 3
    assert (name == "tpsgd") == bool(packed)
    for t in packed:
        assert t.dim() == 2 and t.shape[1] in (6, 8)
        assert all(leaf.shape[1:] in ((6,), (8,)) and leaf.dim() == 2 for leaf in leaves(t))


@pytest.mark.parametrize("order", ORDERS, ids=by_name)
def test_recurrent_blocks_run_with_grad_mode_off(order):
    probe = Probe(lambda x: (torch.is_grad_enabled(), x.requires_grad, x.grad_fn))
    model = unrolled_net(between=lambda: probe)
    tpsgd.fit(model, sequences(), order=order, **MIXED)
    assert set(probe.seen) == {(False, False, None)}


@pytest.mark.cover(1)
@pytest.mark.parametrize("order", ORDERS, ids=by_name)
@pytest.mark.parametrize("name", LOCAL)
def test_a_recurrent_layer_does_not_depend_on_what_comes_after_it(name, order):
    found = []
    for seed, later in ((0, 8), (1, 8), (0, 5)):
        model = unrolled_net()
        upper = seeded(lambda n=later: [Recurrent(6, n), nn.Linear(n, 3)], seed)
        model = nn.Sequential(model[0], *upper).double()
        tpsgd.fit(model, sequences(), rule=LOCAL[name](), order=order, **MIXED)
        found.append(state(model[0]))
    assert same(found[0], found[1]) and same(found[0], found[2])
    assert not same(found[0], state(unrolled_net()[0]))


@pytest.mark.parametrize("name", LOCAL)
def test_a_step_does_not_depend_on_the_steps_after_it(name):
    """The sums of the gradients after each step are final: nothing comes back from later ones."""
    x, y = sequences()
    other = x.clone()
    other[:, 2:] = 7 * x.flip(0)[:, 2:]
    grads = []
    for data in (x, other):
        model, seen = unrolled_net(), []
        kept = []
        settings = {"order": kept.append, "batch_size": 100, "window": 1}
        tpsgd.fit(model, (data, y), rule=LOCAL[name](), **settings)
        learner = kept[0].learners[0]
        learner.start()
        batch, labels = next(kept[0].source.batches()).load()
        with torch.no_grad():
            saved = learner.forward(batch)
            learner.gradient.prepare_gradients(saved, labels, learner.tensors)
            for window in saved.windows():
                seen.append({k: g.clone() for k, g in saved.cells[0].gradients().items()})
                assert window.values.shape[0] == 1
        grads.append(seen)
    for t, (a, b) in enumerate(zip(*grads, strict=True)):
        assert same(a, b) == (t < 2), t


def test_a_recurrent_layer_inside_a_custom_module_learns_through_time_and_says_so():
    class Inside(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = Recurrent(4, 6)

        def forward(self, x):
            return self.layer(x)

    model = nn.Sequential(Inside(), nn.Linear(6, 3)).double()
    run = tpsgd.fit(model, sequences(), **MIXED)
    assert [b.learning for b in run.blocks] == ["autograd through time", "closed form"]


def test_saved_tensors_hooks_do_see_backprops_graph():
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        tpsgd.fit_backprop(mlp(6, 8, 8, 3), points(), **MIXED)
    assert packed


@pytest.mark.parametrize("order", ORDERS, ids=by_name)
def test_closed_form_blocks_run_with_grad_mode_off(order):
    probe = Probe(lambda x: (torch.is_grad_enabled(), x.requires_grad, x.grad_fn))
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), probe, nn.Linear(8, 3))
    run = tpsgd.fit(model, points(), order=order, **MIXED)
    assert run.blocks[0].learning == "closed form"
    assert set(probe.seen) == {(False, False, None)}


def residual_net():
    return nn.Sequential(
        Residual(6), nn.Tanh(), Residual(6), nn.LayerNorm(6), nn.PReLU(), nn.Linear(6, 3)
    )


@pytest.mark.parametrize(("name", "order"), local_runs())
def test_a_traced_blocks_graph_ends_at_its_own_parameters(name, order, monkeypatch):
    graphs = []

    def watched(self, params, x, forward=Autograd.forward):
        saved = forward(self, params, x)
        own = set(map(id, self.block.named_parameters().values()))
        found = {id(leaf) for y in saved.values() for leaf in leaves(y)}
        assert found <= own and not x.requires_grad
        if found:  # none is built while inputs are passed on
            graphs.append(self.block.index)
        return saved

    monkeypatch.setattr(Autograd, "forward", watched)
    run = tpsgd.fit(seeded(residual_net), points(), rule=DRAWN[name](), order=order, **MIXED)
    assert [b.learning for b in run.blocks] == ["autograd", "autograd", "closed form"]
    assert set(graphs) == {0, 1}


def walled_net():
    """Every block begins with a wall that no gradient may pass."""
    return nn.Sequential(
        nn.Linear(6, 8),
        nn.Tanh(),
        nn.Sequential(Wall(), Residual(8)),
        nn.Tanh(),
        Wall(),
        nn.Dropout(0.1),
        nn.Linear(8, 8),
        nn.PReLU(),
        Wall(),
        nn.Linear(8, 3),
    )


@pytest.mark.parametrize(("name", "order"), local_runs())
def test_no_gradient_crosses_a_wall_between_blocks(name, order):
    tpsgd.fit(seeded(walled_net), points(), rule=DRAWN[name](), order=order, **MIXED)


def test_backprop_runs_into_the_wall():
    with pytest.raises(AssertionError, match="crossed from one block into another"):
        tpsgd.fit_backprop(seeded(walled_net), points(), **MIXED)


# ---- an earlier block knows nothing of later ones ------------------------------------------------


def tower(last_width: int = 5, seed: int = 0, later_seed: int = 0, later=nn.Linear):
    """Four blocks; the first two always start from `seed`."""
    early = seeded(lambda: [nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 7), nn.Tanh()], seed)
    late = seeded(
        lambda: [later(7, last_width), nn.GELU(), nn.Linear(last_width, 3)], later_seed + 100
    )
    return nn.Sequential(*early, *late)


def early(model):
    return state(model[:4])


def trained(model, rule, order, **settings):
    tpsgd.fit(model, points(), rule=rule, order=order, **(MIXED | settings))
    return early(model)


class Doubled(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.a, self.b = nn.Linear(inputs, outputs), nn.Linear(inputs, outputs)

    def forward(self, x):
        return self.a(x) * self.b(x)


NOT_COMPUTED = {
    "other weights": {"later_seed": 1},
    "another width": {"last_width": 9},
    "another kind of block": {"later": Doubled},
}


@pytest.mark.cover(1)
@pytest.mark.parametrize("order", ORDERS, ids=by_name)
@pytest.mark.parametrize("name", LOCAL)
def test_earlier_blocks_do_not_depend_on_later_ones(name, order):
    rule = LOCAL[name]()
    before = early(tower())
    first = trained(tower(), rule, order)
    assert not same(first, before)
    for what, change in NOT_COMPUTED.items():
        assert same(trained(tower(**change), rule, order), first), what
    for other in (rules.frozen(), rules.readout(), rules.tpsgd_l1()):
        assert same(trained(tower(), [rule, rule, other, other], order), first), other.name
    longer = trained(tower(), rule, order, epochs=[2, 2, 4, 3], lr=[1e-3, 1e-3, 0.1, 0.2])
    assert same(longer, first)


@pytest.mark.parametrize("order", ORDERS, ids=by_name)
@pytest.mark.parametrize("name", ["readout", "tpsgd_l2", "drtp"])
def test_nor_in_steps_that_are_replayed(name, order, tapes):
    settings = {"order": order, "epochs": 10, "batch_size": 8}
    first = trained(tower(), LOCAL[name](), **settings)
    for change in ({"later_seed": 1}, {"last_width": 9}):
        assert same(trained(tower(**change), LOCAL[name](), **settings), first)
    assert tapes and all(tape.count for tape in tapes)


@pytest.mark.parametrize("name", LOCKED)
@pytest.mark.parametrize("change", ["other weights", "another width"])
def test_under_dfa_earlier_blocks_do_depend_on_later_ones(name, change):
    """With the squared error: cross-entropy's error has the signs of the labels, whatever y is."""
    rule, settings = LOCKED[name](), {"loss": tpsgd.mse, "order": tpsgd.simultaneous}
    first = trained(tower(), rule, **settings)
    assert not same(trained(tower(**NOT_COMPUTED[change]), rule, **settings), first)


def test_a_local_block_below_a_dfa_block_stays_local():
    mixed = [rules.drtp(), rules.dfa(), rules.dfa(), rules.dfa()]
    first = trained(tower(), mixed, tpsgd.simultaneous)
    second = trained(tower(later_seed=1), mixed, tpsgd.simultaneous)
    assert all(torch.equal(first[k], second[k]) for k in ("0.weight", "0.bias"))
    assert not torch.equal(first["2.weight"], second["2.weight"])


@pytest.mark.parametrize("order", ORDERS, ids=by_name)
def test_the_frozen_control_leaves_hidden_blocks_alone(order):
    model = tower()
    before = state(model[:-1])
    tpsgd.fit(model, points(), rule=rules.frozen(), order=order, **MIXED)
    assert same(state(model[:-1]), before)


def test_sequential_freezes_a_block_once_it_is_trained():
    """Its weights after the whole run are those it had when the next block began."""
    model, seen = tower(), {}

    def look(record):
        seen.setdefault(record.block, state(model[0]))

    tpsgd.fit(model, points(), callbacks=[look], **MIXED)
    assert not same(seen[1], seen[2])
    assert same(seen[2], seen[3]) and same(seen[2], state(model[0]))


# ---- deep nets: losses over a batch, a lower precision, augmentation, a frozen backbone ----------

DEEP = {
    "predsim": rules.predsim,
    "auxiliary": rules.auxiliary,
    "lls": rules.lls,
    "auxiliary, similar": lambda: rules.auxiliary(share=0.9),
    "predsim, no convolution": lambda: rules.predsim(share=0.9, convolve=False),
    "l2, pooled and standardised": lambda: rules.tpsgd_l2(features=16, standardise=True),
    "readout": rules.readout,
}
WAYS = {
    "float32": {},
    "bfloat16": {"precision": torch.bfloat16},
    "augmented": {"augment": augment.flip()},
}


def deep_net(last: float = 1.0) -> nn.Sequential:
    """Two normalised convolutions and a classifier, which may begin elsewhere."""
    net = seeded(
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(),
            nn.Linear(4 * 9, 3),
        )
    )  # fmt: skip
    with torch.no_grad():
        for p in (*net[4].parameters(), *net[-1].parameters()):
            p.mul_(last)
    return net


def small_pictures() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(40, 2, 6, 6, generator=torch.Generator().manual_seed(0)), torch.arange(
        40
    ) % 3


@pytest.mark.cover(2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("order", ORDERS, ids=by_name)
@pytest.mark.parametrize("name", DEEP)
def test_a_later_convolution_does_not_reach_an_earlier_one(name, order, way):
    first = []
    for last in (1.0, -3.0):
        net = deep_net(last)
        options = WAYS[way] | {"order": order, "epochs": 2, "batch_size": 20}
        tpsgd.fit(net, small_pictures(), rule=DEEP[name](), **options)
        first.append([t.clone() for t in (*net[0].parameters(), *net[1].state_dict().values())])
    assert all(torch.equal(a, b) for a, b in zip(*first, strict=True))
    assert not torch.equal(first[0][0], deep_net()[0].weight)  # it has learned


@pytest.mark.cover(1)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", DEEP)
def test_deep_blocks_in_closed_form_save_nothing_for_a_backward_pass(name, way):
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        run = tpsgd.fit(
            deep_net(), small_pictures(), rule=DEEP[name](), epochs=1, batch_size=20, **WAYS[way]
        )
    assert [b.learning for b in run.blocks] == ["closed form"] * 3 and not packed


@pytest.mark.parametrize("reuse", [True, False])
def test_no_graph_reaches_into_a_backbone(reuse):
    backbone = adapt.Backbone(nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh()), ["1"])
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        adapt.fit(backbone, small_pictures(), memory=tpsgd.Memory(reuse=reuse), epochs=1)
    assert not packed
