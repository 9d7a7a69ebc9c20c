"""Objectives: the derivative written out is the derivative of the loss, and nothing is touched."""

from math import nan, prod

import pytest
import torch
from helpers import DRAWN, LOSSES, quartic
from hypothesis import given
from hypothesis import strategies as st

from tpsgd import TpsgdError, bce, cross_entropy, mse, objectives, projections, rules
from tpsgd.maths.pooling import grid_for
from tpsgd.maths.random import Key
from tpsgd.objectives import (
    LossAndGrads,
    Objective,
    Site,
    aim,
    any_loss,
    differentiate,
    l1,
    l2,
    move,
    output,
)
from tpsgd.objectives import readout as read_out

SHAPES = [((6,), False), ((2, 3), False), ((3, 5), True), ((3, 4, 4), True), ((2, 3, 2, 4), True)]
CLASSES = 4
INDEX = torch.tensor([0, 3, 1, 1, 2])


def signals(seed: int = 0):
    g = torch.Generator().manual_seed(seed)
    error = torch.randn(5, CLASSES, generator=g, dtype=torch.float64)
    return INDEX, error.softmax(1), error.sigmoid()


def compare(objective, y, s):
    found = objective(y, s)
    learned = len(objective.learned_tensors)
    wanted = differentiate(objective.loss, y, s, objective.tensors, learned)
    torch.testing.assert_close(found.loss, wanted.loss)
    torch.testing.assert_close(found.dy, wanted.dy)
    assert len(found.dtensors) == len(wanted.dtensors) == learned
    for a, b in zip(found.dtensors, wanted.dtensors, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("loss", LOSSES, ids=lambda x: x.name)
@pytest.mark.parametrize(("shape", "maps"), SHAPES)
@pytest.mark.parametrize("name", DRAWN)
def test_closed_form_is_the_derivative_of_the_loss(name, shape, maps, loss):
    rule = DRAWN[name]()
    objective = rule.objective(Site(shape, CLASSES, Key(1), maps, loss, dtype=torch.float64))
    y = torch.randn(5, *shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for s in signals():
        held = [t.clone() for t in (y, s, *objective.tensors)]
        compare(objective, y, s)
        assert all(map(torch.equal, held, (y, s, *objective.tensors)))


@pytest.mark.parametrize("features", [1, 6, 12, 27, 48])
@pytest.mark.parametrize("shape", [(3, 7), (3, 4, 5), (3, 2, 3, 5)])
def test_every_grid_of_the_readout(shape, features):
    site = Site(shape, CLASSES, Key(2), True, dtype=torch.float64)
    y = torch.randn(5, *shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    for learned in (False, True):
        compare(read_out(site, projections.normal(), learned, features, 2.0), y, INDEX)


@given(
    st.integers(1, 64),
    st.lists(st.integers(1, 20), min_size=1, max_size=3),
    st.integers(1, 4096),
)
def test_the_grid_is_the_finest_that_keeps_to_the_features(filters, space, features):
    grid = grid_for((filters, *space), features)
    assert len(grid) == len(space)
    assert all(1 <= g <= n for g, n in zip(grid, space, strict=True))
    side = max(grid)
    assert side == 1 or filters * side ** len(space) <= features or side == max(space)
    assert filters * torch.tensor(grid).prod() <= max(features, filters)
    if any(g < n for g, n in zip(grid, space, strict=True)):  # one step finer is too much
        assert filters * (side + 1) ** len(space) > features


def test_the_projected_signal_of_a_label_is_a_row_of_p():
    P = torch.randn(CLASSES, 2, 3)
    hot = torch.nn.functional.one_hot(INDEX, CLASSES).float()
    assert torch.equal(aim(P, INDEX), P[INDEX])
    torch.testing.assert_close(aim(P, hot), P[INDEX])


@pytest.mark.parametrize("turned", [False, True])
def test_the_projected_signal_is_fresh_memory(turned):
    P = torch.randn(CLASSES, 2, 3, 3)
    P = P.to(memory_format=torch.channels_last) if turned else P
    aim(P, INDEX).zero_()
    assert P.abs().min() > 0
    torch.testing.assert_close(aim(P, INDEX), P[INDEX])


def test_l1_and_l2_are_zero_at_the_target():
    P = torch.randn(CLASSES, 6)
    for make in (l1, l2):
        found = make(P)(P[INDEX], INDEX)
        assert float(found.loss) < 1e-12 and found.dy.abs().max() < 1e-6


def test_any_loss_reproduces_l2():
    P = torch.randn(CLASSES, 6, dtype=torch.float64)
    y = torch.randn(5, 6, dtype=torch.float64)
    mine = any_loss(P, lambda y, t: (y - t).square().sum() / (2 * len(y)))(y, INDEX)
    torch.testing.assert_close(mine.dy, l2(P)(y, INDEX).dy)


@pytest.mark.parametrize("loss", LOSSES, ids=lambda x: x.name)
def test_the_last_blocks_objective_is_the_loss_of_the_labels(loss):
    y = torch.randn(5, CLASSES, dtype=torch.float64)
    for s in signals():
        compare(output(loss), y, s)
    assert output(loss)(y, INDEX).logits is y


def test_readout_is_cross_entropy_unless_the_net_answers_yes_or_no():
    """Whatever the last block's loss: a squared error there does not change the hidden blocks."""
    y, s = torch.randn(5, 6, dtype=torch.float64), INDEX
    made = {
        loss.name: rules.readout().objective(Site((6,), CLASSES, Key(), False, loss, dtype=y.dtype))
        for loss in LOSSES
    }
    assert torch.equal(made["mse"](y, s).dy, made["cross_entropy"](y, s).dy)
    assert not torch.allclose(made["bce"](y, s).dy, made["cross_entropy"](y, s).dy)
    P = made["bce"].tensors[0]
    logits = made["bce"](y, s).logits
    torch.testing.assert_close(made["bce"](y, s).loss, bce.value(logits, s))
    torch.testing.assert_close(logits / (y @ P.T), (logits / (y @ P.T))[0, 0].expand(5, CLASSES))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(("shape", "features"), [((3, 6, 6), 48), ((3, 4, 8), 12), ((3, 5, 4), 1)])
def test_small_maps_are_read_out_by_codes_of_their_pixels(shape, features, layout, monkeypatch):
    """The same as by codes of cells, in either memory format of the maps and of the codes."""
    site = Site(shape, CLASSES, Key(1), True, dtype=torch.float64)
    pixels = rules.readout(features=features).objective(site)
    monkeypatch.setattr(objectives, "PIXEL_CODES", CLASSES * prod(shape) - 1)
    cells = rules.readout(features=features).objective(site)
    grid = grid_for(shape, features)
    assert pixels.tensors[0].shape == (CLASSES, *shape)
    assert cells.tensors[0].shape == (CLASSES, shape[0] * prod(grid))
    y = torch.randn(5, *shape, dtype=torch.float64).to(memory_format=layout)
    turned = move(pixels, lambda t: t.to(memory_format=torch.channels_last))
    wanted = cells(y, INDEX)
    for found in (pixels(y, INDEX), turned(y, INDEX)):
        torch.testing.assert_close(found.loss, wanted.loss)
        torch.testing.assert_close(found.logits, wanted.logits)
        torch.testing.assert_close(found.dy, wanted.dy)
        assert found.dy.is_contiguous(memory_format=layout)


def test_learned_codes_and_codes_of_many_classes_belong_to_cells():
    shape = (3, 6, 6)
    learned = rules.readout(learned=True).objective(Site(shape, CLASSES, Key(), True))
    many = rules.readout().objective(
        Site(shape, objectives.PIXEL_CODES // prod(shape) + 1, Key(), True)
    )
    assert learned.tensors[0].dim() == many.tensors[0].dim() == 2


def test_the_readouts_logits_predict():
    site = Site((6,), CLASSES, Key(), dtype=torch.float64)
    objective = read_out(site, projections.orthogonal(), False, 2048, 1.0)
    y = objective.tensors[0][INDEX]
    assert objective(y, INDEX).logits.argmax(1).tolist() == INDEX.tolist()


def test_the_scale_multiplies_the_logits():
    site = Site((6,), CLASSES, Key(), dtype=torch.float64)
    y = torch.randn(5, 6, dtype=torch.float64)
    one, three = (
        read_out(site, projections.normal(), False, 2048, s)(y, INDEX) for s in (1.0, 3.0)
    )
    torch.testing.assert_close(3 * one.logits, three.logits)


def test_a_gain_leaves_the_first_logits_and_changes_how_fast_codes_move():
    """The readout's weights are gain times code: after a step they differ by gain^2 times."""
    site = Site((3, 4, 4), CLASSES, Key(), maps=True, dtype=torch.float64)
    y = torch.randn(5, 3, 4, 4, dtype=torch.float64)
    objectives = [
        rules.readout(True, scale=2.0, gain=gain).objective(site) for gain in (None, 0.5, 1.0)
    ]
    plain, half, one = (objective(y, INDEX) for objective in objectives)
    moved = [o.tensors[1] * o(y, INDEX).dtensors[0] for o in objectives]
    assert [float(o.tensors[1]) for o in objectives] == pytest.approx([2 / 48**0.5, 0.5, 1.0])
    for other in (half, one):
        torch.testing.assert_close(other.logits, plain.logits)
        torch.testing.assert_close(other.dy, plain.dy)
    torch.testing.assert_close(moved[1], moved[2] * 0.5**2)
    torch.testing.assert_close(moved[0], moved[2] * 2.0**2 / 48)
    assert rules.readout(True, scale=2.0, gain=1.0).options.endswith("scale 2, gain 1")


@pytest.mark.parametrize(
    "wrong", [{}, {"scale": 2.0, "calibrate": True}, {"scale": 2.0, "learned": False}]
)
def test_a_gain_is_for_learned_codes_that_are_not_calibrated(wrong):
    with pytest.raises(TpsgdError, match="gain= is for learned codes"):
        rules.readout(**({"learned": True, "gain": 1.0} | wrong))


def test_a_learned_readout_learns_its_codes_and_a_fixed_one_does_not():
    site = Site((6,), CLASSES, Key())
    y = torch.randn(5, 6)
    assert rules.readout(learned=True).objective(site)(y, INDEX).dtensors[0].shape == (CLASSES, 6)
    assert rules.readout().objective(site)(y, INDEX).dtensors == ()


@pytest.mark.parametrize("name", DRAWN)
def test_losses_are_sums_over_units_and_means_over_the_batch(name):
    """Doubling the batch leaves the loss; its derivative, being of a mean, is halved."""
    rule = DRAWN[name]()
    objective = rule.objective(Site((6,), CLASSES, Key(1), dtype=torch.float64))
    y = torch.randn(5, 6, dtype=torch.float64)
    s = signals()[1] if rule.needs_output else INDEX
    once, twice = objective(y, s), objective(torch.cat([y, y]), torch.cat([s, s]))
    torch.testing.assert_close(twice.loss, once.loss)
    torch.testing.assert_close(twice.dy[:5], once.dy / 2)


def test_the_projection_of_a_site_follows_its_key_and_shape():
    site = Site((2, 3), CLASSES, Key(3, 1), dtype=torch.float64)
    P = site.draw(projections.normal())
    assert P.shape == (CLASSES, 2, 3) and P.dtype == torch.float64
    assert torch.equal(P, projections.normal()((2, 3), CLASSES, Key(3, 1)).double())
    assert site.draw(projections.normal(), (7,)).shape == (CLASSES, 7)


def test_codes_of_another_shape_are_the_same_stored_or_made_again():
    for redraw in (False, True):
        site = Site((2, 3, 3), CLASSES, Key(3), True, dtype=torch.float64, redraw=redraw)
        P = site.codes(projections.normal(), (2, 5))
        wanted = projections.normal()((2, 5), CLASSES, Key(3)).double()
        torch.testing.assert_close(aim(P, INDEX), wanted[INDEX])


def test_a_loss_that_is_no_mean_over_samples_has_a_closed_form_of_its_own():
    """So that nothing cuts its batches into micro-batches."""
    y = torch.randn(5, 6, dtype=torch.float64)
    objective = Objective(
        lambda y, s: y.square().sum(),
        closed_form_of_batch=lambda y, s: LossAndGrads(y.sum(), 2 * y),
    )
    moved = move(objective, lambda t: t)
    assert objective.closed_form is None and objective.written_out
    assert torch.equal(moved(y, INDEX).dy, 2 * y)


def test_what_one_needs_to_write_a_rule_is_public():
    public = {"Key", "LossAndGrads", "Objective", "Site", "aim"}
    assert public <= set(objectives.__all__)
    assert all(hasattr(objectives, name) for name in objectives.__all__)


def test_default_losses_of_the_last_block():
    for make in (rules.tpsgd_l1, rules.tpsgd_l2, lambda: rules.tpsgd(quartic)):
        assert make().loss is mse
    for make in (rules.drtp, rules.dfa, rules.sdfa, rules.readout, rules.frozen):
        assert make().loss is cross_entropy


@pytest.mark.parametrize(
    "wrong", [{"features": 0}, {"features": -1}, {"scale": 0.0}, {"scale": nan}, {"gain": 0.0}]
)
def test_a_readout_without_features_or_scale_is_refused(wrong):
    with pytest.raises(TpsgdError, match=f"{next(iter(wrong))} must be"):
        rules.readout(**wrong)
