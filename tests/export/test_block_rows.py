"""Blocks read as rows, what is refused of them, and the plan of the arena."""

import operator
import re

import pytest
import torch
from export.joined_nets import MAPS, NETS, Around, Basic, Inverted, chain, net, seen
from torch import Tensor, nn
from torch.nn import functional as F

import tpsgd
from tpsgd import rules
from tpsgd.common.errors import TpsgdError
from tpsgd_export.block_rows import INPUT, cut, rows_of
from tpsgd_export.read_model import BACKPROP, read_model
from tpsgd_export.to_c.lifetimes import Life, lives_of, lowest, placed
from tpsgd_export.to_c.memory import layout

RULE = rules.readout(scale=3.0)


def rows(model: nn.Module, i: int = 0, blocks="layers"):
    """Row by row of a block: the kind of layer, what it reads, what is added, its activation."""
    return [
        (type(r.block.layer).__name__, r.source, r.added, type(r.block.activation).__name__)
        for r in rows_of(cut(model, blocks)[i])
    ]


def test_a_residual_block_is_read_in_the_order_of_its_sums():
    conv = "Conv2d"
    plain = [(conv, INPUT, None, "ReLU"), (conv, 0, INPUT, "ReLU")]
    assert rows(Around(Basic(4, 4), channels=4), 1) == plain
    projected = [(conv, INPUT, None, "ReLU"), (conv, 0, None, "NoneType"), (conv, INPUT, 1, "ReLU")]
    assert rows(Around(Basic(4, 6, 2), channels=6), 1) == projected
    mobile = [(conv, INPUT, None, "ReLU6"), (conv, 0, None, "ReLU6"), (conv, 1, INPUT, "NoneType")]
    assert rows(chain(Inverted(4, 4), channels=4), 1) == mobile


def test_a_shortcut_that_is_written_first_and_ends_in_an_activation_waits_for_its_sum():
    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.short, self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            short = self.short(x)
            return torch.add(short, F.relu(self.b(F.relu(self.a(x)))))

    gate = nn.Sequential(Gate(), nn.Linear(4, 2))
    each = [(r.block.name, r.source, r.added) for r in rows_of(cut(gate, "layers")[0])]
    assert each == [("0.a", INPUT, None), ("0.b", 0, None), ("0.short", INPUT, 1)]


@pytest.mark.parametrize(
    "flat",
    [
        lambda x: x.view(x.size(0), -1),
        lambda x: x.reshape(x.shape[0], -1),
        lambda x: torch.flatten(x, 1),
        lambda x: x.mean((2, 3), keepdim=True).flatten(1),
        lambda x: torch.mean(x, dim=(-1, -2)),
    ],
)
def test_reshaping_inside_of_a_block(flat):
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.fc = nn.Conv2d(2, 3, 3), nn.LazyLinear(4)

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(self.fc(flat(torch.relu(self.conv(x)))))

    model = nn.Sequential(Flat(), nn.Linear(4, 2))
    model(torch.zeros(1, *MAPS))
    recipe = read_model(model, RULE, MAPS)
    inner, own = recipe.blocks[0].rows
    assert own.layer.inputs == inner.pooled == model[0].fc.in_features


class Body(nn.Module):
    """Something in the forward of a module."""

    def __init__(self, run) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.c = nn.Conv2d(4, 4, 3, padding=1)
        self.wide, self.bn = nn.Conv2d(4, 1, 3, padding=1), nn.BatchNorm2d(4)
        self.act, self.pool = nn.SiLU(), nn.MaxPool2d(3, 1, 1)
        self.scale, self.run = nn.Parameter(torch.ones(4, 1, 1)), run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


class Dense(nn.Module):
    """x + W x."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(7, 7)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.a(x))


BODIES = {
    "a product": (lambda m, x: x * torch.sigmoid(m.a(x)), "mul is not exported inside a block"),
    "a sum of activations": (lambda m, x: x + F.relu(m.a(x)), "a sum without a layer"),
    "a second sum": (lambda m, x: m.a(x) + x + m.b(x).relu(), "a sum without a layer"),
    "a sum before its layer": (
        lambda m, x: (lambda y: y + F.relu(m.b(y)))(m.a(x)),
        "a sum without a layer",
    ),
    "a sum in place of an activation": (
        lambda m, x: (lambda h: m.b(h.add_(m.a(h))))(F.relu(m.c(x))),
        "a sum in place",
    ),
    "a sum in place of the input, as +=": (
        lambda m, x: F.relu(operator.iadd(x, m.a(x))),
        "a sum in place",
    ),
    "a sum in place of the input": (lambda m, x: F.relu(x.add_(m.a(x))), "a sum in place"),
    "a sum in place, read before": (
        lambda m, x: (lambda y, z: (y.add_(z), F.relu(m.c(F.relu(y)) + y))[1])(m.a(x), m.b(x)),
        "two ways before its activation",
    ),
    "a sum in place of what a layer reads": (
        lambda m, x: (lambda y: F.relu(operator.iadd(y, m.b(y))))(m.a(x)),
        "before and after",
    ),
    "twice the input": (lambda m, x: m.a(x + x), "a sum without a layer"),
    "channels that spread": (lambda m, x: F.relu(m.wide(x) + x), "a sum of shapes"),
    "a layer twice": (lambda m, x: F.relu(m.a(F.relu(m.a(x))) + x), "is called twice"),
    "two ways": (lambda m, x: F.relu(m.bn(m.a(x))) + m.b(m.bn(m.a(x))), "called twice"),
    "before its norm": (lambda m, x: (lambda z: m.b(z) + m.bn(z))(m.a(x)), "before and after"),
    "a norm of inputs": (lambda m, x: m.a(F.relu(m.bn(x))) + x, "directly after a layer only"),
    "an activation of inputs": (lambda m, x: m.a(F.relu(x)) + x, "after a layer or a sum only"),
    "an unknown activation": (lambda m, x: m.b(m.act(m.a(x))) + x, "SiLU is not exported"),
    "padding of a pool": (lambda m, x: F.relu(m.b(m.pool(F.relu(m.a(x)))) + x), "MaxPool2d"),
    "a pool at its end": (lambda m, x: F.max_pool2d(F.relu(m.a(x) + x), 2), "after a pool"),
    "a parameter": (lambda m, x: m.a(x) * m.scale + x, "scale is not exported"),
    "dropout": (lambda m, x: F.relu(m.a(F.dropout(x, 0.5, m.training)) + x), "nn.Dropout"),
    "numbers": (lambda m, x: F.relu(m.a(x) + x) if x.sum() > 0 else m.b(x), "torch.fx"),
    "nothing reads it": (
        lambda m, x: (m.b(x), F.relu(m.a(x) + x))[1],
        "nothing .* reads",
    ),
    "two results": (lambda m, x: (m.b(x), F.relu(m.a(x) + x)), "one tensor"),
}


@pytest.mark.parametrize("case", BODIES)
def test_what_is_no_row_is_refused_in_one_sentence(case, tmp_path):
    run, sentence = BODIES[case]
    with pytest.raises(TpsgdError) as caught:
        tpsgd.export.c(chain(Body(run), channels=4), tmp_path, shape=MAPS)
    assert re.search(sentence, str(caught.value)), caught.value
    assert "block 2" in str(caught.value) and "\n" not in str(caught.value)
    assert not any(tmp_path.iterdir())


def test_other_exports_and_rules_refuse_such_a_block(tmp_path):
    model, shape, _ = net("stacked")
    settings = {"shape": shape, "rule": rules.readout()}
    labelled = {"samples": torch.randn(9, *shape), "labels": torch.arange(9) % 3}
    for refused in (
        lambda: tpsgd.export.onnx(model, tmp_path / "a.onnx", **settings),
        lambda: tpsgd.export.c(model, tmp_path / "a", **settings, **labelled, numbers="int8"),
    ):
        with pytest.raises(TpsgdError, match=r"block 2 \(2: Basic\) is more than a layer"):
            refused()
    with pytest.raises(TpsgdError, match="without skip connections"):
        read_model(model, BACKPROP, shape)
    model[2].conv1.requires_grad_(False)
    with pytest.raises(TpsgdError, match="freeze all of the block"):
        read_model(model, RULE, shape)
    shared = chain(Basic(4, 4), channels=4)
    shared[2].conv2.weight = shared[2].conv1.weight
    with pytest.raises(TpsgdError, match="share a parameter"):
        read_model(shared, RULE, MAPS)
    cell = nn.Sequential(tpsgd.Recurrent(2, 7), Dense(), nn.Linear(7, 2))
    with pytest.raises(TpsgdError, match="not as a net that reads sequences"):
        read_model(cell, RULE, (5, 2))
    grey = tpsgd.data.load("digits")
    one = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), Basic(4, 4), nn.Flatten(), nn.Linear(144, 10)
    )
    with pytest.raises(TpsgdError, match="not as a page"):
        tpsgd.export.page(one, grey, tmp_path / "a.html")
    deep = nn.Sequential(*[nn.Linear(2, 2) for _ in range(33)])
    with pytest.raises(TpsgdError, match="join some with blocks="):
        read_model(deep, RULE, (2,))
    assert len(read_model(deep, RULE, (2,), blocks=[32, 1]).blocks[0].rows) == 32


def test_the_mean_of_maps_is_a_pool_that_backprop_is_not_exported_with():
    model = Around(channels=4)
    assert [p.kind for p in read_model(model, RULE, MAPS).blocks[0].pools] == ["cells"]
    with pytest.raises(TpsgdError, match="without pools"):
        read_model(model, BACKPROP, MAPS)


# ---- the plan of the arena -----------------------------------------------------------------------


@pytest.mark.parametrize("learns", [True, False])
@pytest.mark.parametrize("name", NETS)
def test_no_plan_has_a_smaller_arena(name, learns):
    model, shape, blocks = net(name)
    recipe = read_model(model, RULE if learns else rules.frozen(), shape, blocks=blocks)
    lives = lives_of(recipe)
    assert placed(lives) == lowest(lives)
    every = list({id(life): life for row in lives for life in row.values()}.values())
    for i, life in enumerate(every):
        for other in every[:i]:
            for tick in range(max(life.first, other.first), 1 + min(life.last, other.last)):
                ends = life.place + life.at(tick), other.place + other.at(tick)
                assert ends[0] <= other.place or ends[1] <= life.place


def test_numbers_that_shrink_make_room():
    pooled, later = Life(100, 0, 5, 10, 0), Life(50, 1, 5, 50, 5)
    lives = [{"output": pooled}, {"output": later}]
    assert placed(lives) == 100 and later.place == 10


def test_bytes_of_a_residual_block():
    """A frozen block needs two maps, one that learns four: x, h, y and the derivatives of h."""
    model, maps = seen(chain(Basic(4, 4), channels=4)), 4 * 6 * 5
    learning = layout(read_model(model, RULE, MAPS))
    frozen = layout(read_model(model, rules.frozen(), MAPS))
    logits = 3
    assert learning.arena == 4 * maps + 30 + logits
    assert frozen.arena == 2 * maps + 1
    whole = layout(read_model(model, RULE, MAPS, blocks=1))
    assert whole.arena > learning.arena
