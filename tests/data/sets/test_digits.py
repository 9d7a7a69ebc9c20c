"""The digits of scikit-learn."""

import torch

from tpsgd import data


def test_digits_are_scaled_images_with_a_test_set():
    digits = data.load("digits")
    x, y = digits.train
    assert (x.dtype, y.dtype) == (torch.float32, torch.int64)
    assert x.shape == (1438, 1, 8, 8) and digits.test[0].shape == (359, 1, 8, 8)
    assert x.min() == 0 and x.max() == 1 and x.is_contiguous()
    assert digits.classes == tuple("0123456789") and digits.shape == (1, 8, 8)
    assert digits.note == "20 % held out as test, stratified, seed 0"
    assert "tensor" not in repr(digits)


def test_the_digits_test_set_is_the_same_for_every_seed():
    one, two = data.load("digits", seed=1), data.load("digits", seed=2)
    assert torch.equal(one.test[0], two.test[0]) and torch.equal(one.train[0], two.train[0])
