"""Objectives of every step or pixel: their derivatives, and positions without a label."""

from dataclasses import replace

import pytest
import torch
from helpers import LOSSES
from torch import nn
from torch.nn import functional as F

import tpsgd
from tpsgd import objectives, rules
from tpsgd.losses import IGNORED, Loss, huber, l1, mse
from tpsgd.maths.positions import Layout, at_positions, of_token_mean
from tpsgd.maths.random import Key
from tpsgd.objectives import Signal, Site, differentiate
from tpsgd.projections import Projection, normal
from tpsgd.targets import Target

CLASSES, UNITS, N, STEPS = 3, 5, 4, 6
WIDE = torch.float64
OF_LABELS = [
    name
    for name, rule in rules.ALL.items()
    if rule.make().objective is not None
    and rule.make().signal is Signal.LABEL
    and not rule.make().compares
]
TARGET = Target(shape=(STEPS,), positions=(STEPS,), ignores=True)
LAYOUTS = {
    "steps": Layout((STEPS,), False, TARGET, CLASSES),
    "channels first": Layout((STEPS,), True, TARGET, CLASSES),
    "half as many": Layout((STEPS // 2,), True, TARGET, CLASSES),
    "one vector": Layout((), True, TARGET, CLASSES),
}


def generator():
    return torch.Generator().manual_seed(3)


def class_labels():
    s = torch.randint(0, CLASSES, (N, STEPS), generator=generator())
    s[:, 1] = IGNORED
    s[2] = IGNORED
    return s


def block_output(layout):
    shape = (N, UNITS, *layout.grid) if layout.channels_first else (N, *layout.grid, UNITS)
    return torch.randn(*shape, generator=generator(), dtype=WIDE)


def of_vectors(name, **options):
    make = rules.ALL[name].make().objective
    return make(Site((UNITS,), CLASSES, Key(1), dtype=WIDE, **options))


def labelled_rows(layout, y, s):
    """The outputs that have a label, and their labels, by plain indexing."""
    rows = y.movedim(1, -1).reshape(-1, UNITS) if layout.channels_first else y.reshape(-1, UNITS)
    labels = layout.labels(s)
    return rows[labels != IGNORED], labels[labels != IGNORED]


def assert_derivatives_are_those(objective, y, s, by_definition):
    """The loss, dy and the derivatives of learned tensors, against autograd of a definition."""
    local, count = objective(y, s), len(objective.learned_tensors)
    expected = differentiate(by_definition, y, s, objective.tensors, count)
    torch.testing.assert_close(local.loss, expected.loss)
    torch.testing.assert_close(local.dy, expected.dy)
    assert local.dy.shape == y.shape and len(local.dtensors) == len(expected.dtensors) == count
    for dtensor, of_autograd in zip(local.dtensors, expected.dtensors, strict=True):
        torch.testing.assert_close(dtensor, of_autograd)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("name", OF_LABELS)
def test_the_derivative_of_every_rule_is_that_of_its_loss_over_labelled_positions(name, layout):
    of_rows = of_vectors(name)

    def by_definition(y, s, *tensors):
        return of_rows.loss(*labelled_rows(layout, y, s), *tensors)

    y, s = block_output(layout), class_labels()
    assert_derivatives_are_those(at_positions(of_rows, layout), y, s, by_definition)


@pytest.mark.parametrize("name", [name for name in OF_LABELS if name != "auxiliary"])
def test_numbers_of_every_step_have_the_derivative_of_their_loss(name):
    of_rows = of_vectors(name, loss=mse, numbers=True)
    target = Target(True, (STEPS, CLASSES), True, (STEPS,))
    objective = at_positions(of_rows, Layout((STEPS // 2,), False, target, CLASSES))
    y = torch.randn(N, STEPS // 2, UNITS, generator=generator(), dtype=WIDE)
    s = torch.randn(N, STEPS, CLASSES, generator=generator(), dtype=WIDE)

    def by_definition(y, s, *tensors):
        pairs = s.reshape(N, STEPS // 2, 2, CLASSES).mean(2)
        return of_rows.loss(y.reshape(-1, UNITS), pairs.reshape(-1, CLASSES), *tensors)

    assert_derivatives_are_those(objective, y, s, by_definition)


@pytest.mark.parametrize("loss", [*LOSSES, l1, huber], ids=lambda loss: loss.name)
@pytest.mark.parametrize("channels_first", [False, True])
def test_the_output_has_the_derivative_of_the_net_s_loss(loss, channels_first):
    layout = Layout((STEPS,), channels_first, TARGET, CLASSES)
    shape = (N, CLASSES, STEPS) if channels_first else (N, STEPS, CLASSES)
    y = torch.randn(*shape, generator=generator(), dtype=WIDE)

    def by_definition(y, s):
        rows = y.mT.reshape(-1, CLASSES) if channels_first else y.reshape(-1, CLASSES)
        return loss.value(rows[s.flatten() != IGNORED], s[s != IGNORED])

    objective = at_positions(objectives.output(loss), layout)
    assert_derivatives_are_those(objective, y, class_labels(), by_definition)


def test_the_output_s_loss_is_torch_s_with_ignored_labels():
    y = torch.randn(N, CLASSES, STEPS, generator=generator(), dtype=WIDE)
    output = objectives.output(LOSSES[1])
    local = at_positions(output, LAYOUTS["channels first"])(y, class_labels())
    torch.testing.assert_close(local.loss, F.cross_entropy(y, class_labels()))


@pytest.mark.parametrize("name", OF_LABELS)
def test_positions_without_a_label_contribute_nothing(name):
    objective, s = at_positions(of_vectors(name), LAYOUTS["steps"]), class_labels()
    y = block_output(LAYOUTS["steps"])
    other = y.clone()
    other[s == IGNORED] = 7.0
    one, changed = objective(y, s), objective(other, s)
    assert (one.dy[s == IGNORED] == 0).all() and (one.dy[s != IGNORED] != 0).any()
    torch.testing.assert_close(one.dy, changed.dy)
    torch.testing.assert_close(one.loss, changed.loss)


@pytest.mark.parametrize("name", OF_LABELS)
def test_a_batch_without_labels_teaches_nothing(name):
    objective = at_positions(of_vectors(name), LAYOUTS["steps"])
    local = objective(block_output(LAYOUTS["steps"]), torch.full((N, STEPS), IGNORED))
    assert (local.dy == 0).all() and torch.isfinite(local.loss)
    assert all((dtensor == 0).all() for dtensor in local.dtensors)


def test_the_logits_have_a_row_and_a_label_for_every_position():
    objective = at_positions(of_vectors("readout"), LAYOUTS["channels first"])
    local = objective(block_output(LAYOUTS["channels first"]), class_labels())
    assert local.logits.shape == (N * STEPS, CLASSES)
    assert torch.equal(local.labels, class_labels().flatten())


@pytest.mark.parametrize("channels_first", [False, True])
def test_rows_in_the_shape_of_an_output_are_that_output(channels_first):
    layout = Layout((2, 3), channels_first, replace(TARGET, positions=(2, 3)), CLASSES)
    shape = (N, UNITS, 2, 3) if channels_first else (N, 2, 3, UNITS)
    y = torch.randn(*shape, generator=generator())
    assert torch.equal(layout.unrolled(layout.rows(y), y), y)


def test_a_loss_of_one_s_own_leaves_positions_without_a_label_out():
    own = Loss("own", torch.clone, mse.value)
    y, s = torch.randn(6, CLASSES, generator=generator()), torch.tensor([0, 1, IGNORED, 2, 0, 1])
    torch.testing.assert_close(own.mean(y, s), mse.mean(y, s))


# ---- one label for all tokens --------------------------------------------------------------------


@pytest.mark.parametrize("name", OF_LABELS)
def test_the_derivative_of_a_token_mean_is_autograds(name):
    objective = of_token_mean(of_vectors(name))
    y = torch.randn(N, STEPS, UNITS, generator=generator(), dtype=WIDE)
    s = torch.arange(N) % CLASSES
    local = objective(y, s)
    expected = differentiate(
        of_vectors(name).loss, y.mean(1), s, objective.tensors, len(objective.learned_tensors)
    )
    torch.testing.assert_close(local.loss, expected.loss)
    each = (expected.dy / STEPS).unsqueeze(1).expand(y.shape)  # the chain rule of a mean
    torch.testing.assert_close(local.dy, each)
    for ours, right in zip(local.dtensors, expected.dtensors, strict=True):
        torch.testing.assert_close(ours, right)
    if objective.calibration is not None:
        measured = objective.calibration.mean_square(y, s).loss
        torch.testing.assert_close(measured, y.mean(1).square().mean())


class Attention(nn.Module):
    """Tokens that read one another."""

    def __init__(self, width):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return x + self.out(F.scaled_dot_product_attention(q, k, v))


def test_blocks_that_mix_tokens_learn_from_their_mean_and_linear_layers_from_each():
    x, y = torch.randn(8, 5, 4), torch.arange(8) % 3
    shapes = []

    def rows(key, classes, shape, device):
        shapes.append(tuple(shape))
        return normal().rows(key, classes, shape, device)

    model = nn.Sequential(Attention(4), nn.Linear(4, 6), nn.ReLU(), nn.Flatten(), nn.Linear(30, 3))
    tpsgd.fit(model, (x, y), rule=rules.readout(projection=Projection("spy", rows)), epochs=1)
    assert set(shapes) == {(4,), (30,)}
