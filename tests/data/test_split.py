"""Choosing samples with the class shares kept."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpsgd import TpsgdError, data
from tpsgd.data.split import hold_out, of_every_class, stratified


@given(st.lists(st.integers(0, 5), min_size=1, max_size=60), st.data(), st.integers(0, 9))
def test_stratified_keeps_the_class_shares(labels, draw, seed):
    y = np.array(labels)
    k = draw.draw(st.integers(0, len(y)))
    chosen = stratified(y, k, seed)
    assert chosen.sum() == k
    if k >= len(np.unique(y)):
        assert set(y[chosen]) == set(y)
    share, n = np.bincount(y[chosen], minlength=6), np.bincount(y, minlength=6)
    assert (np.abs(share - n * k / len(y)) <= len(np.unique(y)) + 1).all()
    assert (chosen == stratified(y, k, seed)).all()


@given(st.lists(st.integers(0, 3), min_size=20, max_size=80), st.integers(0, 9))
def test_hold_out_never_takes_a_whole_class(labels, seed):
    y = np.array(labels)
    train = hold_out(y, 0.2, seed, "here")
    assert (~train).sum() == round(0.2 * len(y))
    assert set(y[train]) == set(y)
    assert (train == stratified(y, train.sum(), seed)).all()


def test_classes_that_a_hold_out_lacks_are_noted(tmp_path):
    rows = [f"{i},{'ab'[i % 2] if i < 40 else 'c'}" for i in range(41)]
    (tmp_path / "own.csv").write_text("\n".join(["x,label", *rows]))
    note = data.load(tmp_path / "own.csv").note
    assert "seed 0, without 1 of 3 classes, of which there are too few" in note


def test_the_first_samples_or_others_have_every_class():
    y = np.repeat([0, 1, 2], [30, 5, 5])
    assert of_every_class(y[::-1], 20) == slice(20) and of_every_class(y, None) == slice(None)
    mask = of_every_class(y, 20)
    assert mask.sum() == 20 and set(y[mask]) == {0, 1, 2}
    assert set(y[of_every_class(y, 2)]) == {0, 1, 2}
    assert of_every_class(None, 7) == of_every_class(np.ones(30), 7) == slice(7)


def test_hold_out_refuses_too_few_samples():
    with pytest.raises(TpsgdError, match=r"^here: 3 samples are too few to hold out 1 of them"):
        hold_out(np.arange(3), 0.2, 0, "here")
