"""The paper's rules for deep nets: targets of averages over cells, and of standardised output."""

from dataclasses import replace

import pytest
import torch
from helpers import close, images, quartic, same, seeded, state
from torch import nn

import tpsgd
from tpsgd import Place, TpsgdError, check_rule, projections, ridge, rules
from tpsgd.maths.kernels.memory_format import full
from tpsgd.maths.pooling import back_to_pixels, cells, grid_for
from tpsgd.maths.random import Key
from tpsgd.objectives import Site, differentiate

MAKES = {
    "l1": rules.tpsgd_l1,
    "l2": rules.tpsgd_l2,
    "any": lambda **options: rules.tpsgd(quartic, **options),
    "drtp": rules.drtp,
}
OPTIONS = [
    {"features": 12},
    {"features": 27},
    {"standardise": True},
    {"features": 12, "standardise": True},
    {"features": 1, "standardise": True},
]
SHAPES = [((6,), False), ((2, 3), False), ((3, 5), True), ((3, 4, 4), True), ((2, 3, 2, 4), True)]
CLASSES = 4
INDEX = torch.tensor([0, 3, 1, 1, 2])


def site(shape=(3, 4, 4), maps=True, **more):
    return Site(shape, CLASSES, Key(1), maps, dtype=torch.float64, **more)


def outputs(*shape, seed=1):
    return torch.randn(5, *shape, generator=torch.Generator().manual_seed(seed)).double()


def net(last=3):
    return seeded(
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(4, 4, 3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(36, last),
        )
    )


@pytest.mark.cover(2)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("shape", "maps"), SHAPES)
@pytest.mark.parametrize("name", MAKES)
def test_what_is_written_out_is_the_derivative_of_the_loss(name, shape, maps, options):
    objective = MAKES[name](**options).objective(site(shape, maps))
    y, rows = outputs(*shape), torch.rand(5, CLASSES).double()
    for s in (INDEX, rows):
        held = [t.clone() for t in (y, s, *objective.tensors)]
        found = objective(y, s)
        wanted = differentiate(objective.loss, y, s, objective.tensors, 0)
        torch.testing.assert_close(found.loss, wanted.loss, rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(found.dy, wanted.dy, rtol=1e-8, atol=1e-10)
        assert all(map(torch.equal, held, (y, s, *objective.tensors)))


@pytest.mark.parametrize("name", MAKES)
def test_they_keep_the_contract_of_a_rule(name):
    check_rule(MAKES[name](features=12, standardise=True))


def test_the_loss_of_averages_worked_by_hand():
    """Two by two cells of 4 x 4 pixels, their means against the codes of the sample's class."""
    objective = rules.tpsgd_l2(features=12).objective(site())
    (P,), y, total = objective.tensors, outputs(3, 4, 4), 0.0
    assert P.shape == (CLASSES, 3, 2, 2)
    for n, c in enumerate(INDEX.tolist()):
        for f in range(3):
            for i in range(2):
                for j in range(2):
                    mean = y[n, f, 2 * i : 2 * i + 2, 2 * j : 2 * j + 2].sum() / 4
                    total += float((P[c, f, i, j] - mean) ** 2) / 2
    assert float(objective(y, INDEX).loss) == pytest.approx(total / 5, rel=1e-12)


@pytest.mark.parametrize("features", [None, 12])
def test_the_loss_of_standardised_output_worked_by_hand(features):
    """Each filter over samples and pixels; of averages, each cell of each filter over samples."""
    objective = rules.tpsgd_l1(features=features, standardise=True).objective(site())
    y = outputs(3, 4, 4)
    seen = y if features is None else nn.functional.avg_pool2d(y, 2)
    columns = seen.transpose(0, 1).flatten(1)[:, :, None] if features is None else None
    if columns is None:
        mean, deviation = seen.mean(0), (seen.var(0, correction=0) + 1e-5).sqrt()
    else:
        mean = columns.mean(1).view(3, 1, 1)
        deviation = (columns.var(1, correction=0) + 1e-5).sqrt().view(3, 1, 1)
    wanted = (objective.tensors[0][INDEX] - (seen - mean) / deviation).abs().sum() / 5
    assert float(objective(y, INDEX).loss) == pytest.approx(float(wanted), rel=1e-9)


def test_no_constant_output_reaches_targets_that_differ_from_pixel_to_pixel():
    """What a convolution gives a plain picture: the same at every pixel. Averages it can reach."""
    plain, pooled = rules.tpsgd_l2(), rules.tpsgd_l2(features=3)
    P = plain.objective(site()).tensors[0]
    mean = P.mean((2, 3), keepdim=True)  # the best constant
    least = (P - mean).square().sum((1, 2, 3))[INDEX].mean() / 2
    found = plain.objective(site())(mean.expand_as(P)[INDEX], INDEX)
    assert float(found.loss) == pytest.approx(float(least)) and float(least) > 10
    assert found.dy.mean((2, 3)).abs().max() < 1e-12  # and no way to leave it
    target = pooled.objective(site()).tensors[0]
    y = target[INDEX].expand(5, 3, 4, 4)
    assert float(pooled.objective(site())(y, INDEX).loss) < 1e-20


@pytest.mark.parametrize("options", [{}, {"features": 12}], ids=str)
def test_standardised_output_gains_nothing_by_its_scale_or_shift(options):
    objective = rules.tpsgd_l2(standardise=True, **options).objective(site())
    y = outputs(3, 4, 4)
    once, again = objective(y, INDEX), objective(y * 7 + 3, INDEX)
    assert float(once.loss) == pytest.approx(float(again.loss), rel=1e-3)  # but for the epsilon
    per_filter = (0, 2, 3)
    assert once.dy.sum(per_filter).abs().max() < 1e-10
    assert (once.dy * y).sum(per_filter).abs().max() < 1e-3
    plain = rules.tpsgd_l2(**options).objective(site())(y, INDEX)
    assert (plain.dy * y).sum(per_filter).abs().max() > 1e-2


@pytest.mark.parametrize("options", [{}, {"features": 12}], ids=str)
def test_standardised_the_squared_error_and_the_inner_product_ask_for_the_same(options):
    """1/2 |t - f|^2 = 1/2 |t|^2 - <t, f> + 1/2 |f|^2, whose last term is given."""
    y = 10 * outputs(3, 4, 4)  # the epsilon is nothing to it
    pair = [
        make(standardise=True, **options).objective(site())(y, INDEX)
        for make in (rules.tpsgd_l2, rules.drtp)
    ]
    torch.testing.assert_close(pair[0].dy, pair[1].dy, rtol=1e-4, atol=1e-6)


def test_a_normalisations_scale_shrinks_under_a_target_for_each_pixel():
    """And stays where the output is standardised; weights move under both."""
    scales = {}
    for name, rule in {
        "plain": rules.tpsgd_l2(at=Place.BEFORE),
        "standardised": rules.tpsgd_l2(at=Place.BEFORE, standardise=True),
    }.items():
        model = net()
        before = model[0].weight.clone()
        x, y = images(96)
        tpsgd.fit(
            model, (torch.randn_like(x), y), rule=rule, epochs=20, batch_size=32,
            optimizer=torch.optim.SGD, lr=1e-2,
        )  # fmt: skip
        scales[name] = float(model[1].weight.detach().abs().mean())
        assert not torch.equal(before, model[0].weight)
    assert scales["plain"] < 0.7
    assert scales["standardised"] == pytest.approx(1.0, abs=1e-2)


# ---- the averages themselves ---------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("space", "grid"), [
    ((8,), (4,)), ((7,), (3,)), ((8, 6), (4, 2)), ((6, 6), (4, 4)), ((6, 4), (1, 1)),
    ((4, 4), (4, 4)), ((4, 6, 2), (2, 3, 1)), ((3, 4, 5), (2, 2, 2)),
])  # fmt: skip
def test_cells_are_those_of_adaptive_pooling(space, grid, dtype):
    pools = nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d
    y = outputs(3, *space).to(dtype)
    layouts = [y, y.to(memory_format=torch.channels_last)] if len(space) == 2 else [y]
    for y in layouts:
        wanted = pools[len(space) - 1](grid)(y).flatten(1)
        torch.testing.assert_close(cells(y, grid), wanted)


@pytest.mark.parametrize("grid", [(4, 4), (2, 2), (1, 1), (3, 4)])
def test_back_to_pixels_is_the_derivative_of_cells_in_both_memory_formats(grid):
    for layout in (torch.contiguous_format, torch.channels_last):
        y = outputs(3, 8, 8).to(memory_format=layout).requires_grad_()
        df = torch.randn(5, 3 * grid[0] * grid[1]).double()
        (wanted,) = torch.autograd.grad(cells(y, grid), y, df)
        torch.testing.assert_close(full(back_to_pixels(df, y.detach(), grid), y.detach()), wanted)


# ---- with everything else ------------------------------------------------------------------------


def test_nothing_changes_without_the_options():
    for name, make in MAKES.items():
        objective = make().objective(site())
        assert objective.tensors[0].shape == (CLASSES, 3, 4, 4)
        assert objective.closed_form_of_batch is None
        assert (objective.closed_form is None) is (name == "any")
        assert "features" not in make().options and "standardised" not in make().options


def test_vectors_have_nothing_to_average():
    y = outputs(6)
    found = rules.tpsgd_l2(features=2).objective(site((6,), False))(y, INDEX)
    wanted = rules.tpsgd_l2().objective(site((6,), False))(y, INDEX)
    assert torch.equal(found.dy, wanted.dy)


def test_the_options_are_on_record():
    options = rules.drtp(features=64, standardise=True).options
    assert "at most 64 features" in options and "standardised" in options
    run = tpsgd.fit(net(), images(), rule=rules.tpsgd_l2(features=16), epochs=1)
    assert "at most 16 features" in str(run.settings)


@pytest.mark.parametrize("features", [0, -3])
def test_no_features_at_all_are_refused(features):
    with pytest.raises(TpsgdError, match=f"features must be 1 or more, or None, got {features}"):
        rules.tpsgd_l2(features=features)


@pytest.mark.parametrize("options", [{"features": 8}, {"standardise": True}], ids=str)
def test_least_squares_cannot_solve_them(options):
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
    rule = rules.tpsgd_l2(at=Place.BEFORE, **options)
    with pytest.raises(TpsgdError, match="squared error"):
        tpsgd.fit(model, images(), rule=rule, optimizer=ridge())


def test_filter_codes_scale_with_the_filter_of_an_average():
    rule = rules.tpsgd_l2(projections.per_filter(), features=2000)
    P = rule.objective(Site((20, 16, 16), 100, Key(1), True)).tensors[0]
    assert P.shape == (100, 20, 10, 10)
    deviations = P.transpose(0, 1).flatten(1).std(1)
    assert torch.allclose(deviations, torch.arange(1, 21) / 20, rtol=0.05)


@pytest.mark.parametrize("options", OPTIONS[2:4], ids=str)
def test_codes_made_again_are_the_same_codes(options):
    models = [net(), net()]
    for model, redraw in zip(models, (False, True), strict=True):
        rule = rules.tpsgd_l2(**options)
        tpsgd.fit(
            model, images(), rule=rule, epochs=1, batch_size=16, memory=tpsgd.Memory(redraw=redraw)
        )
    close(state(models[0]), state(models[1]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", ["l1", "l2", "drtp"])
def test_stacked_they_give_each_what_it_gets_alone(name, options):
    rule = MAKES[name](**options)
    each = [rule.objective(replace(site(), key=Key(seed))) for seed in range(3)]
    y = torch.stack([outputs(3, 4, 4, seed=i) for i in range(3)])
    P = torch.stack([objective.tensors[0] for objective in each])

    def one(y, P):
        local = each[0](y, INDEX, P)
        return local.loss, local.dy

    loss, dy = torch.vmap(one)(y, P)
    for i, objective in enumerate(each):
        alone = objective(y[i], INDEX)
        torch.testing.assert_close(loss[i], alone.loss)
        torch.testing.assert_close(dy[i], alone.dy)


def test_restarts_run():
    rule = rules.tpsgd_l2(features=16, standardise=True)
    many = tpsgd.fit_many(net_plain, images(), rule=rule, restarts=2, epochs=1)
    assert not same(*map(state, many.models))


def net_plain():
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))


def test_a_plan_says_which_batches_cannot_be_cut():
    def remarks(**options):
        rule = rules.tpsgd_l2(**options)
        found = tpsgd.plan(
            net_plain(), (2, 6, 6), rule=rule, batch_size=16, others=False,
            memory=tpsgd.Memory(micro_batch=4),
        )  # fmt: skip
        return " ".join(found.remarks)

    assert "whole batch" in remarks(standardise=True)
    assert "whole batch" not in remarks(features=8)


def test_pieces_of_a_batch_add_up_to_the_same_step_when_averaged():
    models = [seeded(net_plain).double() for _ in range(2)]
    for model, piece in zip(models, (None, 4), strict=True):
        tpsgd.fit(
            model, images(), rule=rules.tpsgd_l2(features=16), epochs=1, batch_size=16,
            memory=tpsgd.Memory(micro_batch=piece), optimizer=torch.optim.SGD,
        )  # fmt: skip
    close(state(models[0]), state(models[1]), rtol=1e-9, atol=1e-11)
    assert not same(state(models[0]), state(seeded(net_plain).double()))


def test_recurrent_blocks_standardise_their_states():
    model = seeded(lambda: nn.Sequential(tpsgd.Recurrent(3, 8), nn.Linear(8, 3)))
    before = state(model)
    x = torch.randn(24, 4, 3)
    rule = rules.tpsgd_l1(features=4, standardise=True)
    tpsgd.fit(model, (x, torch.arange(24) % 3), rule=rule, epochs=1, batch_size=8)
    assert not same(before, state(model)) and grid_for((4, 6, 6), 16) == (2, 2)
