"""The last block's losses: sums over units, means over the batch, derivative link(y) - y*."""

import pytest
import torch
from helpers import LOSSES
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from tpsgd import bce, cross_entropy, mse
from tpsgd.losses import minus_labels

Y = torch.tensor([[0.3, -1.2, 2.0], [1.0, 0.0, -0.5]], dtype=torch.float64)
INDEX = torch.tensor([2, 0])
ROWS = F.one_hot(INDEX, 3).double()

batches = st.tuples(st.integers(1, 6), st.integers(2, 5), st.integers(0, 2**31))


def drawn(n, classes, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randn(n, classes, generator=g, dtype=torch.float64) * 3
    index = torch.randint(classes, (n,), generator=g)
    return y, index, torch.rand(n, classes, generator=g, dtype=torch.float64)


def test_mse_by_hand():
    wanted = ((0.3**2 + 1.2**2 + 1.0**2) / 2 + (0.0 + 0.0 + 0.25) / 2) / 2
    assert float(mse.value(Y, INDEX)) == pytest.approx(wanted)


@given(batches)
def test_cross_entropy_is_torchs(size):
    y, index, rows = drawn(*size)
    torch.testing.assert_close(cross_entropy.value(y, index), F.cross_entropy(y, index))
    soft = rows / rows.sum(1, keepdim=True)
    torch.testing.assert_close(cross_entropy.value(y, soft), F.cross_entropy(y, soft))


@given(batches)
def test_bce_is_torchs_summed_over_the_classes(size):
    y, index, rows = drawn(*size)
    wanted = F.binary_cross_entropy_with_logits(y, rows, reduction="none").sum(1).mean()
    torch.testing.assert_close(bce.value(y, rows), wanted)
    hot = F.one_hot(index, y.shape[1]).to(y)
    torch.testing.assert_close(bce.value(y, index), bce.value(y, hot))


@pytest.mark.parametrize("loss", LOSSES, ids=lambda x: x.name)
@given(batches)
def test_an_index_stands_for_its_one_hot_row(loss, size):
    y, index, _ = drawn(*size)
    hot = F.one_hot(index, y.shape[1]).to(y)
    torch.testing.assert_close(loss.value(y, index), loss.value(y, hot))
    torch.testing.assert_close(loss.grad(y, index), loss.grad(y, hot))


@pytest.mark.parametrize("loss", LOSSES, ids=lambda x: x.name)
@given(batches)
def test_the_derivative_is_autograds_for_indices_and_any_rows(loss, size):
    """Times the batch: `grad` is each sample's own."""
    y, index, rows = drawn(*size)
    for labels in (index, rows):
        leaf = y.clone().requires_grad_()
        loss.value(leaf, labels).backward()
        torch.testing.assert_close(loss.grad(y, labels), leaf.grad * len(y))


@pytest.mark.parametrize("loss", LOSSES, ids=lambda x: x.name)
def test_the_derivative_leaves_its_inputs_alone(loss):
    for labels in (INDEX, ROWS):
        y, s = Y.clone(), labels.clone()
        loss.grad(y, s)
        loss.value(y, s)
        assert torch.equal(y, Y) and torch.equal(s, labels)


@pytest.mark.parametrize("loss", LOSSES, ids=lambda x: x.name)
def test_losses_are_means_over_the_batch(loss):
    twice = loss.value(torch.cat([Y, Y]), torch.cat([INDEX, INDEX]))
    torch.testing.assert_close(twice, loss.value(Y, INDEX))


@pytest.mark.parametrize("loss", [mse, bce], ids=lambda x: x.name)
def test_losses_are_sums_over_the_units(loss):
    wide = loss.value(torch.cat([Y, Y], 1), torch.cat([ROWS, ROWS], 1))
    torch.testing.assert_close(wide, 2 * loss.value(Y, ROWS))


@pytest.mark.parametrize("loss", LOSSES, ids=lambda x: x.name)
def test_large_logits_stay_finite(loss):
    y = torch.tensor([[1e4, -1e4, 0.0]])
    for labels in (torch.tensor([1]), torch.tensor([[0.0, 1.0, 0.0]])):
        assert torch.isfinite(loss.value(y, labels)) and torch.isfinite(loss.grad(y, labels)).all()


def test_subtracting_labels_writes_into_p_but_a_derivative_not_into_y():
    for labels in (INDEX, ROWS):
        p, y = Y.clone(), Y.clone()
        torch.testing.assert_close(minus_labels(p, labels), Y - ROWS)
        torch.testing.assert_close(p, Y - ROWS)
        for loss in LOSSES:
            loss.grad(y, labels)
            assert torch.equal(y, Y)
