"""Where a model is cut, which blocks have a closed form, and the fallback to autograd."""

import warnings

import pytest
import torch
from helpers import DRAWN, Probe, Residual, images, mlp, points, same, seeded, state
from torch import nn

import tpsgd
from tpsgd import Place, Recurrent, rules, split
from tpsgd.maths.random import Key
from tpsgd.nets.autograd import Autograd
from tpsgd.nets.blocks import shapes
from tpsgd.nets.closed_form import ClosedForm
from tpsgd.nets.stacked import Stacked
from tpsgd.objectives import Site, l2

# torch's remark on an even kernel with 'same' padding
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")


def cut(*modules):
    return [str(block) for block in split(nn.Sequential(*modules))]


# ---- where blocks end ----------------------------------------------------------------------------


def test_a_block_is_layer_norm_activation_pool():
    blocks = split(
        nn.Sequential(
            nn.Conv2d(1, 4, 3),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(16, 3),
        )
    )
    assert [str(b) for b in blocks] == [
        "0: Conv2d + BatchNorm2d + ReLU + MaxPool2d + Flatten",
        "5: Linear",
    ]


def test_what_comes_before_the_first_layer_rides_with_it():
    first = split(nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(4, 2)))[0]
    assert [type(m) for m in first.prologue] == [nn.Flatten, nn.Dropout]


@pytest.mark.parametrize(
    "rider", [nn.Dropout(), nn.AlphaDropout(), nn.LayerNorm(4), nn.BatchNorm1d(4)]
)
def test_dropout_and_late_norms_ride_with_the_next_block(rider):
    first, second = split(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), rider, nn.Linear(4, 2)))
    assert first.tail == [] and second.prologue == [rider]


def test_a_recurrent_layer_is_a_block_with_its_activation_inside():
    blocks = split(
        nn.Sequential(
            Recurrent(4, 5, sequence=True),
            nn.Dropout(),
            Recurrent(5, 5, sequence=True),
            nn.Tanh(),  # a shape-less follower: it acts on the states that are handed on
            nn.Flatten(),
            nn.Linear(25, 3),
        )
    )
    assert [str(b) for b in blocks] == [
        "0: Recurrent",
        "2: Recurrent + Tanh + Flatten",
        "5: Linear",
    ]
    assert [b.recurrent for b in blocks] == [True, True, False]
    assert blocks[1].activation is None and not blocks[0].maps
    assert [type(m) for m in blocks[1].prologue] == [nn.Dropout]


def test_torchs_rnn_is_a_block_per_layer():
    rnn = nn.RNN(4, 5, 2, batch_first=True, bidirectional=True)
    first, second, last = split(nn.Sequential(nn.Identity(), nn.Sequential(rnn), nn.Linear(10, 3)))
    assert [str(b) for b in (first, second, last)] == [
        "1.0.0: Recurrent",
        "1.0.1: Recurrent",
        "2: Linear",
    ]
    assert first.layer.sequence and not second.layer.sequence
    ours = {id(p) for b in (first, second) for p in b.named_parameters().values()}
    assert ours == {id(p) for p in rnn.parameters()}
    assert len(first.named_parameters()) == 8


def test_what_follows_dropout_rides_with_it():
    drop, flat = nn.Dropout(), nn.Flatten()
    first, second = split(
        nn.Sequential(nn.Conv1d(1, 4, 3), nn.ReLU(), nn.MaxPool1d(2), drop, flat, nn.Linear(4, 2))
    )
    assert [type(m) for m in first.tail] == [nn.MaxPool1d] and second.prologue == [drop, flat]


def test_the_last_block_keeps_all_that_follows():
    last = split(nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), nn.Dropout()))[-1]
    assert [type(m) for m in last.modules] == [nn.Linear, nn.Sigmoid, nn.Dropout]


def test_pooling_between_layer_and_activation_comes_before_the_activation():
    block = split(
        nn.Sequential(nn.Conv2d(1, 4, 3), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(4, 2, 1))
    )[0]
    assert [type(m) for m in block.between] == [nn.MaxPool2d]
    assert type(block.activation) is nn.ReLU


def test_nested_sequentials_are_cut_and_named_by_their_path():
    model = nn.Sequential(
        nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 3))), nn.Linear(3, 2)
    )
    assert [b.name for b in split(model)] == ["0.0", "0.1.1", "1"]


def test_a_custom_module_is_one_block():
    assert cut(Residual(4), nn.ReLU(), nn.Linear(4, 2)) == ["0: Residual + ReLU", "2: Linear"]


def test_a_single_layer_is_a_model():
    assert [str(b) for b in split(nn.Linear(4, 2))] == ["Linear: Linear"]


def test_a_shared_activation_stands_wherever_it_stands():
    """torch lists a module's children once each; the model runs them as often as they stand."""
    act = nn.Tanh()
    model = nn.Sequential(nn.Linear(4, 4), act, nn.Linear(4, 4), act, nn.Linear(4, 2), act)
    assert [str(b).split(": ")[1] for b in split(model)] == ["Linear + Tanh"] * 3


@pytest.mark.parametrize(
    "model",
    [
        lambda: mlp(4, 5, 5, 2),
        lambda: nn.Sequential(
            nn.Identity(), nn.Linear(4, 4), nn.Identity(), nn.ReLU(), nn.Linear(4, 2)
        ),
        lambda: nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 6), nn.GELU(), Residual(6), nn.PReLU()),
        lambda: nn.Sequential(
            nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Sequential(), Residual(4)
        ),
    ],
)
def test_the_blocks_compute_what_the_model_computes(model):
    model, x = seeded(model), torch.randn(3, 4)
    y = x
    for block in split(model):
        outputs = block.outputs(y)
        y = block(y)
        assert torch.equal(outputs[Place.END], y)
    torch.testing.assert_close(y, model(x))


def test_a_shared_activation_is_applied_each_time_in_training():
    act = nn.Tanh()
    layers = [nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)]
    shared = nn.Sequential(layers[0], act, layers[1], act, layers[2])
    own = mlp(6, 6, 6, 3)
    own.load_state_dict(shared.state_dict())
    for model in (shared, own):
        tpsgd.fit(model, points(), epochs=2)
    assert same(state(shared), state(own))


def test_shapes_of_every_block_at_every_place():
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 3)
    )
    first, last = shapes(split(model), torch.randn(2, 2, 6, 6))
    assert first == {Place.BEFORE: (4, 4, 4), Place.AFTER: (4, 4, 4), Place.END: (16,)}
    assert last == dict.fromkeys(Place, (3,))


# ---- which blocks have a closed form -------------------------------------------------------------

CLOSED = {
    "Linear": nn.Linear(4, 4),
    "Conv1d": nn.Conv1d(4, 4, 3, padding="same"),
    "Conv2d": nn.Conv2d(4, 4, 3, stride=2, padding=1, dilation=2, groups=2),
    "Conv2d valid": nn.Conv2d(4, 4, 3, padding="valid"),
}
TRACED = {
    "Conv3d": nn.Conv3d(4, 4, 3),
    "ConvTranspose2d": nn.ConvTranspose2d(4, 4, 3),
    "reflecting padding": nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"),
    "uneven same padding": nn.Conv1d(4, 4, 2, padding="same"),
    "Bilinear": nn.Bilinear(4, 4, 4),
    "Embedding": nn.Embedding(4, 4),
    "Residual": Residual(4),
    "weight norm": torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
    "spectral norm": torch.nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)),
}


def block_of(*modules):
    return split(nn.Sequential(*modules, nn.Linear(4, 2)))[0]


@pytest.mark.parametrize("name", CLOSED)
def test_layers_with_a_closed_form(name):
    assert block_of(CLOSED[name], nn.ReLU()).closed_form(Place.AFTER)


@pytest.mark.parametrize("name", TRACED)
def test_layers_left_to_autograd(name):
    assert not block_of(TRACED[name], nn.ReLU()).closed_form(Place.AFTER)


def test_a_subclass_of_a_layer_is_left_to_autograd():
    class Doubling(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    assert not block_of(Doubling(4, 4)).closed_form(Place.AFTER)


def test_a_hooked_layer_is_left_to_autograd():
    layer = nn.Linear(4, 4)
    layer.register_forward_hook(lambda m, x, y: y * 2)
    assert not block_of(layer).closed_form(Place.AFTER)


@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm1d(4, affine=False),
        nn.BatchNorm1d(4, track_running_stats=False),
        nn.BatchNorm1d(4, momentum=None),
        nn.LayerNorm(4),
        nn.GroupNorm(2, 4),
        nn.InstanceNorm1d(4),
    ],
    ids=str,
)
def test_norms_left_to_autograd(norm):
    assert not block_of(nn.Linear(4, 4), norm, nn.ReLU()).closed_form(Place.AFTER)


@pytest.mark.parametrize("at", Place, ids=lambda p: p.name)
def test_a_pool_has_no_closed_form_at_the_blocks_end(at):
    pooled = block_of(nn.Conv1d(4, 4, 3), nn.ReLU(), nn.AvgPool1d(2))
    assert pooled.closed_form(at) is (at is not Place.END)
    assert block_of(nn.Conv1d(4, 4, 3), nn.ReLU(), nn.Flatten()).closed_form(at)


def test_a_learning_norm_before_the_layer_needs_autograd_and_a_frozen_one_does_not():
    norm = nn.LayerNorm(4)
    assert not block_of(norm, nn.Linear(4, 4)).closed_form(Place.AFTER)
    norm.requires_grad_(False)
    assert block_of(norm, nn.Linear(4, 4)).closed_form(Place.AFTER)


# ---- the fallback learns, exactly ----------------------------------------------------------------


class Hidden(nn.Module):
    """A known layer behind an unknown type: the same maths by autograd."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)


NETS = {
    "mlp": (points, lambda: [nn.Linear(6, 8), nn.Linear(8, 7), nn.Linear(7, 3)], nn.Tanh),
    "cnn": (
        images,
        lambda: [nn.Conv2d(2, 4, 3), nn.Conv2d(4, 4, 3, padding=1), nn.LazyLinear(3)],
        nn.GELU,
    ),
}


@pytest.mark.cover(2)
@pytest.mark.parametrize("name", DRAWN)
@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("at", [Place.BEFORE, Place.AFTER])
def test_training_by_the_fallback_equals_training_in_closed_form(net, name, at):
    data, layers, activation = NETS[net]
    x, y = data()
    x = x.double()

    def build(wrap):
        a, b, c = seeded(layers)
        model = nn.Sequential(wrap(a), activation(), wrap(b), activation(), nn.Flatten(), wrap(c))
        model.double()
        model(x)
        return model

    plain, hidden = seeded(lambda: build(lambda m: m)), seeded(lambda: build(Hidden))
    for model, how in ((plain, "closed form"), (hidden, "autograd")):
        run = tpsgd.fit(
            model,
            (x, y),
            rule=DRAWN[name](at=at),
            order=tpsgd.simultaneous,
            epochs=2,
            batch_size=16,
        )
        assert [b.learning for b in run.blocks] == [how] * 3
    pairs = zip(plain.parameters(), hidden.parameters(), strict=True)
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)


def conv_pool_relu():
    return [nn.Conv2d(2, 4, 3), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten()]


def weight_normed():
    return [torch.nn.utils.parametrizations.weight_norm(nn.Linear(72, 8)), nn.ReLU()]


def weight_normed_by_hook():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls it old
        return [torch.nn.utils.weight_norm(nn.Linear(72, 8)), nn.ReLU()]


FALLBACK = {
    "residual": lambda: [nn.Flatten(), Residual(72), nn.Tanh()],
    "PReLU": lambda: [nn.Flatten(), nn.Linear(72, 8), nn.PReLU()],
    "LayerNorm": lambda: [nn.Flatten(), nn.Linear(72, 8), nn.LayerNorm(8), nn.ReLU()],
    "GroupNorm": lambda: [nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.SiLU(), nn.Flatten()],
    "weight norm": lambda: [nn.Flatten(), *weight_normed()],
    "weight norm by a hook": lambda: [nn.Flatten(), *weight_normed_by_hook()],
    "conv, pool, relu": conv_pool_relu,
    "norm before the layer": lambda: [
        nn.BatchNorm2d(2),
        nn.Conv2d(2, 4, 3),
        nn.ReLU(),
        nn.Flatten(),
    ],
    "Conv3d": lambda: [nn.Unflatten(1, (1, 2)), nn.Conv3d(1, 4, 2), nn.ReLU(), nn.Flatten()],
    "ELU": lambda: [nn.Flatten(), nn.Linear(72, 8), nn.ELU(), nn.Identity()],
    "odd same padding": lambda: [nn.Conv2d(2, 4, 2, padding="same"), nn.ReLU(), nn.Flatten()],
}


@pytest.mark.parametrize("order", [tpsgd.sequential, tpsgd.simultaneous])
@pytest.mark.parametrize("name", FALLBACK)
def test_the_fallback_says_so_and_moves_every_parameter(name, order):
    x, y = images()
    model = seeded(lambda: nn.Sequential(*FALLBACK[name](), nn.LazyLinear(3)))
    model(x)
    before = state(model)
    run = tpsgd.fit(model, (x, y), rule=rules.readout(), order=order, epochs=2, batch_size=8)
    assert [b.learning for b in run.blocks] == ["autograd", "closed form"]
    for p_name, p in model.named_parameters():
        assert not torch.equal(p, before[p_name]), p_name
    losses = [e.loss for e in run.history if e.block == 1]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.BatchNorm1d])
@pytest.mark.parametrize("order", [tpsgd.sequential, tpsgd.simultaneous])
def test_a_norm_after_the_activation_learns_with_the_next_block(norm, order):
    model = seeded(lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), norm(8), nn.Linear(8, 3)))
    before = state(model)
    run = tpsgd.fit(model, points(), order=order, epochs=[0, 2], batch_size=16)
    assert [b.learning for b in run.blocks] == ["closed form", "autograd"]
    moved = {k for k, p in model.named_parameters() if not torch.equal(p, before[k])}
    assert moved == {"2.weight", "2.bias", "3.weight", "3.bias"}


@pytest.mark.parametrize("name", ["residual", "PReLU", "LayerNorm", "conv, pool, relu"])
def test_the_fallbacks_gradient_is_autograds_of_the_local_loss(name):
    x, _ = images(n=6)
    model = seeded(lambda: nn.Sequential(*FALLBACK[name](), nn.LazyLinear(3))).double()
    model(x.double())
    block, labels = split(model)[0], torch.arange(6) % 3
    seen = block.outputs(x.double())[Place.AFTER]
    P = torch.randn(3, *seen.shape[1:], dtype=torch.float64)
    params = block.named_parameters()
    ((P[labels] - seen) ** 2).sum().div(2 * 6).backward()
    wanted = {k: p.grad.clone() for k, p in params.items()}
    engine = Autograd(block, Place.AFTER, l2(P))
    _, (found,) = engine.gradients(params, engine.forward(params, x.double()), labels, (P,))
    for key in wanted:
        torch.testing.assert_close(found[key], wanted[key])


@pytest.mark.parametrize("at", [Place.AFTER, Place.BEFORE])
def test_an_activation_in_place_does_not_spoil_what_the_objective_sees(at):
    x, y = points()
    plain, written = (mlp(6, 8, 3, activation=nn.ReLU) for _ in range(2))
    written[1] = nn.ReLU(inplace=True)
    for model in (plain, written):
        tpsgd.fit(model, (x, y), rule=rules.tpsgd_l2(at=at), epochs=2, batch_size=16)
    assert same(state(plain), state(written)) and written[1].inplace


class Squeeze(nn.Module):
    """A custom module whose first step writes into its input where told to."""

    def __init__(self, inplace):
        super().__init__()
        self.act, self.layer = nn.ReLU(inplace=inplace), nn.Linear(8, 8)

    def forward(self, x):
        return self.layer(self.act(x))


@pytest.mark.cover(1)
@pytest.mark.parametrize("name", DRAWN)
@pytest.mark.parametrize(
    "second", [lambda w: nn.Dropout(0.5, inplace=w), lambda w: nn.ReLU6(inplace=w), Squeeze]
)
def test_a_module_in_place_does_not_spoil_an_earlier_blocks_output(second, name):
    """DFA's blocks learn after the whole forward pass: their values must still be there."""

    def build(in_place):
        return nn.Sequential(
            nn.Linear(6, 8),
            nn.Tanh(),
            second(in_place),
            nn.Linear(8, 8),
            nn.Tanh(),
            nn.Linear(8, 3),
        )

    plain, written = seeded(lambda: build(False)), seeded(lambda: build(True))
    for model in (plain, written):
        tpsgd.fit(
            model,
            points(),
            rule=DRAWN[name](),
            order=tpsgd.simultaneous,
            epochs=2,
            batch_size=16,
        )
    assert same(state(plain), state(written))


@pytest.mark.parametrize("reuse", [True, False])
def test_dropout_draws_fresh_masks_each_epoch_even_from_kept_inputs(reuse):
    probe = Probe(lambda x: (x.shape[0], (x == 0).flatten().tolist()) if model.training else None)
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Dropout(0.5), probe, nn.Linear(9, 3))
    x, y = points(n=12)
    tpsgd.fit(model, (x, y), epochs=[1, 4], batch_size=12, memory=tpsgd.Memory(reuse=reuse))
    masks = [seen for seen in probe.seen if seen and seen[0] == 12 and any(seen[1])]
    assert len(masks) == 4
    assert len({tuple(mask) for _, mask in masks}) == 4
    dropped = sum(map(sum, (mask for _, mask in masks))) / (4 * 12 * 9)
    assert 0.35 < dropped < 0.65


def test_dropout_belongs_to_the_next_block_alone():
    """The block before it learns, and is passed on, as if it were not there."""
    with_dropout = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.9), nn.Linear(8, 3))
    without = mlp(6, 8, 3)
    with_dropout[0].load_state_dict(without[0].state_dict())
    for model in (with_dropout, without):
        tpsgd.fit(model, points(), epochs=2)
    assert same(state(with_dropout[0]), state(without[0]))


def test_every_source_of_gradients_has_the_same_methods():
    names = ("label", "set_objective", "forward", "objective_input", "gradients", "measure")
    block = split(mlp(3, 2))[0]
    stacked = Stacked(ClosedForm(block, tpsgd.Place.AFTER))
    for name in (*names, "error", "output"):
        assert all(hasattr(source, name) for source in (ClosedForm, Autograd, stacked))


def test_split_with_samples_leaves_the_model_and_the_samples_as_they_are():
    model = nn.Sequential(
        nn.ReLU(inplace=True),
        nn.Linear(4, 4),
        nn.ReLU(inplace=True),
        nn.Linear(4, 4),
        nn.Linear(4, 2),
    ).train()
    x = torch.randn(3, 4)
    before = x.clone()
    assert len(split(model, x, blocks=2)) == 2
    assert torch.equal(x, before) and all(m.training for m in model.modules())


@pytest.mark.parametrize("blocks", [2.0, "2", True, 0, 9, [1, 1], [1, 2.0], []])
def test_blocks_that_are_no_numbers_of_layers_are_refused(blocks):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    with pytest.raises(tpsgd.TpsgdError, match="blocks"):
        split(model, blocks=blocks)


class Rows(nn.Module):
    """A view of the maps, by a module that the library does not know."""

    def forward(self, x):
        return x.flatten(1)


@torch.no_grad()
def test_an_output_that_is_a_view_of_the_activation_is_not_overwritten():
    x, y = images(8, size=18)
    [block] = split(nn.Sequential(nn.Conv2d(2, 8, 3), nn.ReLU(), Rows()))
    site = Site((8, 16, 16), 3, Key(), maps=True)
    source = ClosedForm(
        block, Place.AFTER, rules.readout(learned=True, features=32).objective(site)
    )
    saved = source.forward({}, x)
    output = source.output(saved)
    before = output.clone()
    list(source.gradients({}, saved, y, source.objective.tensors)[1])
    assert torch.equal(output, before)


class Halved(nn.Module):
    """Writes into its input."""

    def forward(self, x):
        return x.mul_(0.5)


def test_a_module_may_write_into_the_activation_before_a_pool():
    layers = [nn.Tanh(), Halved(), nn.MaxPool2d(2), nn.Flatten()]
    [block, _] = split(nn.Sequential(nn.Conv2d(2, 8, 3), *layers, nn.Linear(8 * 64, 3)))
    assert not block.pools
    [block, _] = split(
        nn.Sequential(nn.Conv2d(2, 8, 3), nn.Tanh(), nn.MaxPool2d(2), nn.Linear(8, 3))
    )
    assert block.pools


def test_a_block_that_learns_alone_pools_no_batch():
    maps = nn.Conv2d(2, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
    [block, _] = split(nn.Sequential(*maps, nn.Linear(8 * 64, 3)))
    site = Site((8, 16, 16), 3, Key(), maps=True)
    objective = rules.readout(learned=True, features=32).objective(site)
    source = ClosedForm(block, Place.AFTER, objective)
    x, y = images(8, size=18)
    with torch.no_grad():
        for output_unused, calls in ((True, 0), (False, 1)):
            saved = source.forward({}, x)
            list(source.gradients({}, saved, y, objective.tensors, output_unused)[1])
            assert len(saved.output) == calls


def test_a_layer_that_does_not_fit_is_named_before_the_cut():
    layers = [nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Flatten()]
    with pytest.raises(tpsgd.TpsgdError, match=r"block 1 .* cannot take an input of shape"):
        split(nn.Sequential(*layers, nn.Linear(16, 3)), torch.randn(2, 1, 6, 6), blocks=2)
