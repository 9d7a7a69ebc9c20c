"""Shifts: against scipy and hand-worked pictures, and the same however a data set is cut."""

import pickle

import numpy as np
import pytest
import torch
from scipy import ndimage

from experiments import corruptions as shifts
from experiments.corruptions import SHIFTS, blur, dim, edges, grey, invert, noise
from tpsgd.common.errors import TpsgdError

EVERY = pytest.mark.parametrize("shift", SHIFTS.values(), ids=SHIFTS)


def pictures(n=5, c=3, h=20, w=24, dtype=torch.float32):
    drawn = torch.randint(0, 256, (n, c, h, w), generator=torch.Generator().manual_seed(1))
    drawn = drawn.to(torch.uint8)
    return drawn if dtype == torch.uint8 else drawn.to(dtype) / 255


def luminance(x):
    return 0.299 * x[:, 0] + 0.587 * x[:, 1] + 0.114 * x[:, 2]


def test_grey_is_the_luminance():
    colours = torch.tensor([[255, 0, 0], [0, 255, 0], [0, 0, 255], [200, 100, 50]])
    images = colours.to(torch.uint8).view(4, 3, 1, 1).expand(4, 3, 2, 2)
    for value, image in zip((76, 150, 29, 124), grey()(images), strict=True):
        assert image.unique().tolist() == [value]


@pytest.mark.parametrize("sigma", [0.01, 0.1, 0.4])
def test_blur_is_scipys(sigma):
    x = pictures(dtype=torch.float64)
    pixels = sigma * 20
    wanted = ndimage.gaussian_filter(x.numpy(), (0, 0, pixels, pixels), mode="nearest")
    np.testing.assert_allclose(blur(sigma)(x), wanted, atol=1e-12)


def test_blur_is_two_pixels_at_160():
    point = torch.zeros(1, 1, 160, 160)
    point[..., 80, 80] = 1
    spread = blur()(point)[0, 0].sum(0)
    at = torch.arange(160.0) - 80
    assert float((spread * at.square()).sum() / spread.sum()) == pytest.approx(4, rel=0.01)


def test_edges_are_scipys_gradients_of_the_smoothed_picture():
    x = pictures(dtype=torch.float64)
    found = edges(sigma=0.05)(x)
    for picture, one in zip(luminance(x).numpy(), found, strict=True):
        smooth = ndimage.gaussian_filter(picture, 1.0, mode="nearest")
        steep = np.hypot(*(ndimage.sobel(smooth, axis, mode="nearest") for axis in (0, 1)))
        np.testing.assert_allclose(one[1], steep / steep.max(), atol=1e-12)
        assert torch.equal(one[0], one[1]) and torch.equal(one[0], one[2])


@pytest.mark.parametrize("value", [0.0, 0.3, 1.0])
def test_a_flat_picture_has_no_edges(value):
    assert float(edges()(torch.full((2, 3, 9, 9), value)).max()) < 1e-3


def test_twice_inverted_is_the_same():
    x = pictures(dtype=torch.uint8)
    assert torch.equal(invert()(x), 255 - x)
    assert torch.equal(invert()(invert()(x)), x)


def test_noise_has_its_deviation_and_is_clipped():
    middle = torch.full((20, 3, 40, 40), 0.5)
    made = noise(std=0.1)(middle)
    assert float(made.mean()) == pytest.approx(0.5, abs=2e-3)
    assert float(made.std()) == pytest.approx(0.1, rel=0.01)
    correlated = torch.corrcoef(made.flatten(1)).fill_diagonal_(0).abs().max()
    assert float(correlated) < 6 / 4800**0.5
    loud = noise(std=2.0)(middle)
    assert float(loud.min()) == 0 and float(loud.max()) == 1


def test_noise_depends_on_the_seed_and_the_index_alone():
    x = pictures()
    whole = noise(seed=3)(x)
    assert torch.equal(noise(seed=3)(x[3:], first=3), whole[3:])
    assert not torch.equal(noise(seed=4)(x), whole)
    assert not torch.equal(noise(seed=3)(x[3:]), whole[3:])


def test_dim_is_a_power_and_a_factor():
    x = torch.tensor([0.0, 0.5, 1.0]).view(1, 1, 1, 3)
    assert dim(scale=0.4, gamma=3)(x).flatten().tolist() == pytest.approx([0, 0.05, 0.4])


@EVERY
@pytest.mark.parametrize("channels", [1, 3])
def test_bytes_and_floats_agree_within_rounding(shift, channels):
    as_bytes = pictures(2, channels, 80, 90, torch.uint8)
    found, wanted = shift(as_bytes), shift(as_bytes / 255)
    assert found.dtype == torch.uint8 and found.shape == as_bytes.shape
    assert float((found - 255 * wanted).abs().max()) <= 0.5001
    assert not torch.equal(found, as_bytes) or (shift.name, channels) == ("grey", 1)


@EVERY
def test_the_cut_does_not_matter(shift, monkeypatch):
    x = pictures(7, dtype=torch.uint8)
    whole = shift(x)
    monkeypatch.setattr(shifts, "CHUNK", 2 * x[0].numel() + 1)
    assert torch.equal(shift(x), whole)
    parts = [shift(x[at : at + 3], first=at) for at in (0, 3, 6)]
    assert torch.equal(torch.cat(parts), whole)


@EVERY
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.uint8])
def test_type_range_and_input_stay(shift, dtype):
    x = pictures(2, dtype=dtype)
    before = x.clone()
    made = shift(x)
    assert made.dtype == dtype and torch.equal(x, before)
    assert float(made.min()) >= 0 and float(made.max()) <= (255 if dtype == torch.uint8 else 1)


@EVERY
def test_other_layouts_small_pictures_and_none(shift):
    x = pictures(3)
    laid_out = x.contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(shift(laid_out), shift(x))
    assert shift(x[:, :, :1, :1]).shape == (3, 3, 1, 1)
    assert shift(x[:0]).shape == (0, 3, 20, 24)
    assert pickle.loads(pickle.dumps(shift)).name == shift.name


def test_a_name_leads_to_its_shift():
    assert list(SHIFTS) == ["grey", "edges", "blur", "noise", "invert", "dim"]
    assert all(name == shift.name for name, shift in SHIFTS.items())


@pytest.mark.parametrize(
    ("images", "match"),
    [
        (torch.zeros(3, 8, 8), r"\(n, 3 or 1, h, w\), got \(3, 8, 8\)"),
        (torch.zeros(2, 4, 8, 8), "got \\(2, 4, 8, 8\\)"),
        (np.zeros((2, 3, 8, 8)), "got ndarray"),
        (torch.zeros(2, 3, 0, 8), "with pixels"),
        (torch.zeros(2, 3, 8, 8, dtype=torch.int64), "uint8 or floats"),
        (torch.full((2, 3, 8, 8), float("nan")), r"\[0, 1\], got nan"),
        (torch.full((2, 3, 8, 8), 200.0), r"\[0, 1\], got 200"),
        (torch.full((2, 3, 8, 8), -0.1), "before they are normalised"),
    ],
)
def test_what_is_no_image_is_refused(images, match):
    with pytest.raises(TpsgdError, match=match):
        grey()(images)


@pytest.mark.parametrize(
    "make", [lambda: blur(0), lambda: noise(-1), lambda: dim(scale=2), lambda: edges(float("nan"))]
)
def test_what_is_no_setting_is_refused(make):
    with pytest.raises(TpsgdError, match="above 0"):
        make()
