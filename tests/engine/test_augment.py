"""Augmentation: each function against its definition, and what training sees of it."""

import numpy as np
import pytest
import torch
from helpers import folded, images, mlp, points, ragged, same, seeded, sequences, state
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tpsgd
from tpsgd import Recurrent, TpsgdError
from tpsgd.engine.sources.augment import (
    RandomNumbers,
    chain,
    crop,
    cutout,
    flip,
    jitter,
    resized_crop,
)
from tpsgd.maths.random import Key

pytestmark = pytest.mark.usefixtures("unwatched")

ORDERS = [tpsgd.sequential, tpsgd.simultaneous]
SHORT = {"epochs": 2, "batch_size": 8}
EVERY = {
    "flip": flip(),
    "crop": crop(2),
    "mirrored crop": crop(2, reflect=True),
    "cutout": cutout(3),
    "resized crop": resized_crop(),
    "jitter": jitter(),
    "chain": chain(flip(), crop(1), cutout(2)),
}


def pictures(n=6, channels=3, height=8, width=10):
    return torch.randn(n, channels, height, width, generator=torch.Generator().manual_seed(0))


def changed(change, x, key=Key(), batch=0, start=0):  # noqa: B008
    """Images changed with the random numbers that they get in an epoch of `fit`."""
    return change(x, random_numbers(key, change.numbers, batch, start, len(x)))


def random_numbers(key, count, batch, start, size):
    return RandomNumbers(key, count, 1, torch.device("cpu"))(batch, start, size)


# ---- each function -------------------------------------------------------------------------------


def test_numbers_are_uniform_and_different():
    u = random_numbers(Key(), 2, 0, 0, 20_000)
    assert float(u.min()) >= 0 and float(u.max()) < 1
    shares = torch.histc(u[0], 10, 0, 1) / 20_000
    assert torch.allclose(shares, torch.full((10,), 0.1), atol=0.01)
    assert abs(float(np.corrcoef(u.numpy())[0, 1])) < 0.03


def test_flip():
    x = pictures()
    assert torch.equal(flip(1.0)(x), x.flip(-1)) and torch.equal(flip(0.0)(x), x)
    x = pictures(400, 1, 2, 2)
    made = changed(flip(0.25), x)
    flipped = (made == x.flip(-1)).flatten(1).all(1)
    assert 0.2 < float(flipped.float().mean()) < 0.3
    assert torch.equal(made[~flipped], x[~flipped])


@pytest.mark.parametrize("reflect", [False, True])
def test_crop_is_a_window_of_the_padded_picture(reflect):
    """numpy pads; the window that fits is looked for, and every shift is met."""
    x, padding = pictures(200, 2, 5, 6), 2
    made = changed(crop(padding, reflect), x)
    mode = "reflect" if reflect else "constant"
    padded = np.pad(x.numpy(), ((0, 0), (0, 0), (padding, padding), (padding, padding)), mode)
    met = set()
    for i in range(len(x)):
        shifts = [
            (a, b)
            for a in range(2 * padding + 1)
            for b in range(2 * padding + 1)
            if np.array_equal(padded[i, :, a : a + 5, b : b + 6], made[i].numpy())
        ]
        assert len(shifts) == 1
        met.update(shifts)
    assert len(met) == 25


def test_cutout_is_a_square_inside():
    x = pictures(300, 2, 7, 9).abs() + 1
    made, met = changed(cutout(3), x), set()
    for before, after in zip(x, made, strict=True):
        rows, columns = (after[0] == 0).nonzero(as_tuple=True)
        top, left = int(rows.min()), int(columns.min())
        wanted = before.clone()
        wanted[:, top : top + 3, left : left + 3] = 0
        assert torch.equal(after, wanted)
        met.add((top, left))
    assert met == {(a, b) for a in range(5) for b in range(7)}


def test_a_resized_crop_of_everything_is_the_picture():
    x = pictures()
    torch.testing.assert_close(changed(resized_crop((1.0, 1.0)), x), x, rtol=0, atol=1e-5)


def test_a_resized_crop_of_a_ramp_is_a_part_of_it():
    """A picture whose value is its place: a crop of a quarter has half of the slope, each way."""
    down, across = torch.linspace(0, 1, 40)[:, None], torch.linspace(0, 1, 60)[None]
    x = torch.stack([down.expand(40, 60), across.expand(40, 60)]).expand(50, 2, 40, 60)
    made = changed(resized_crop((0.25, 0.25)), x)[:, :, 1:-1, 1:-1]
    slopes = made[:, 0].diff(dim=1), made[:, 1].diff(dim=2)
    for slope, whole in zip(slopes, (1 / 39, 1 / 59), strict=True):
        torch.testing.assert_close(slope, torch.full_like(slope, whole / 2), rtol=1e-3, atol=1e-6)
    middle = made[:, 0].mean((1, 2))
    assert float(middle.min()) < 0.35 and float(middle.max()) > 0.65


@pytest.mark.parametrize("reflect", [False, True])
def test_a_shift_beyond_the_image_is_refused_before_memory_is_taken(reflect):
    x = pictures()
    assert crop(7 if reflect else 10, reflect)(x).shape == x.shape
    for padding in (11, 10**9):
        with pytest.raises(TpsgdError, match=f"crop cannot .* {padding} pixels of 8 x 10: take"):
            crop(padding, reflect)(x)


@pytest.mark.parametrize("scale", [5, (1, 2, 3), ("a", 1), None, (0.5, 2), (float("nan"), 1)])
def test_shares_of_a_resized_crop_that_are_none(scale):
    with pytest.raises(TpsgdError, match="resized_crop's scale must be two shares"):
        resized_crop(scale)


def test_the_ratio_of_a_resized_crop():
    """Twice as wide as high, an eighth of the area: a quarter of the height, half of the width."""
    down, across = torch.linspace(0, 1, 40)[:, None], torch.linspace(0, 1, 40)[None]
    x = torch.stack([down.expand(40, 40), across.expand(40, 40)]).expand(5, 2, 40, 40)
    made = changed(resized_crop((0.125, 0.125), ratio=(2.0, 2.0)), x)[:, :, 2:-2, 2:-2]
    assert float(made[:, 0].diff(dim=1).mean()) == pytest.approx(1 / 39 / 4, rel=1e-2)
    assert float(made[:, 1].diff(dim=2).mean()) == pytest.approx(1 / 39 / 2, rel=1e-2)


def test_jitter_is_affine_about_the_mean():
    x = 5 + 3 * pictures(200)
    made = changed(jitter(0.3, 0.1), x)
    mean, std = x.mean((1, 2, 3)), x.std((1, 2, 3), correction=0)
    gain = made.std((1, 2, 3), correction=0) / std
    moved = (made.mean((1, 2, 3)) - mean) / std
    assert 0.7 <= float(gain.min()) < 0.75 and 1.25 < float(gain.max()) <= 1.3
    assert -0.1 <= float(moved.min()) < -0.08 and 0.08 < float(moved.max()) <= 0.1
    wanted = (x - mean[:, None, None, None]) * gain[:, None, None, None]
    wanted += (mean + moved * std)[:, None, None, None]
    torch.testing.assert_close(made, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", EVERY)
def test_type_layout_and_input_stay(name, layout, dtype):
    plain = pictures().to(dtype)
    x = plain.to(memory_format=layout)
    made = changed(EVERY[name], x)
    assert made.dtype is dtype and made.stride() == x.stride() and torch.equal(x, plain)
    assert torch.allclose(made.float(), changed(EVERY[name], plain).float(), rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("name", EVERY)
def test_the_same_key_gives_the_same_pictures_in_pieces_too(name):
    x, change = pictures(), EVERY[name]
    whole = changed(change, x, Key(1))
    assert torch.equal(whole, changed(change, x, Key(1)))
    parts = [changed(change, x[:2], Key(1)), changed(change, x[2:], Key(1), start=2)]
    torch.testing.assert_close(whole, torch.cat(parts))
    others = ((Key(2), 0), (Key(1), 1), (Key(1, 1), 0), (Key(1, 0, 1), 0))
    assert not any(torch.equal(whole, changed(change, x, *other)) for other in others)


def test_without_a_key_torchs_generator_decides():
    x = pictures()
    with torch.random.fork_rng():
        torch.manual_seed(3)
        one, two = crop(2)(x), crop(2)(x)
        torch.manual_seed(3)
        assert torch.equal(one, crop(2)(x)) and not torch.equal(one, two)


def test_a_chain_is_its_parts_one_after_another():
    x, u = pictures(), torch.rand(3, 6)
    assert torch.equal(chain(flip(), crop(2))(x, u), crop(2)(flip()(x, u[:1]), u[1:]))
    assert torch.equal(chain(flip(), lambda x: -x, crop(2))(x, u), -chain(flip(), crop(2))(x, u))
    assert torch.equal(chain(flip(1.0), lambda x: -x)(x), -x.flip(-1))


# ---- in training ---------------------------------------------------------------------------------


def convnet():
    return seeded(
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(),
            nn.Flatten(), nn.Linear(144, 3),
        )
    )  # fmt: skip


def trained(order=tpsgd.sequential, **settings):
    model = convnet()
    tpsgd.fit(model, images(), order=order, **folded(**(SHORT | settings)))
    return state(model)


@pytest.mark.parametrize("order", ORDERS, ids=lambda f: f.__name__)
def test_the_seed_decides_what_augmentation_draws(order):
    both = chain(flip(), crop(1))
    first = trained(order, augment=both)
    assert same(first, trained(order, augment=both))
    assert not same(first, trained(order))
    assert not same(first, trained(order, augment=both, seed=1))


@pytest.mark.parametrize("order", ORDERS, ids=lambda f: f.__name__)
def test_nothing_changes_with_a_function_that_changes_nothing(order):
    """Kept inputs and those that are computed again are the same; so are numbers for dropout."""
    assert same(trained(order), trained(order, augment=lambda x: x))


@pytest.mark.parametrize("order", ORDERS, ids=lambda f: f.__name__)
def test_micro_batches_see_the_same_pictures(order):
    settings = {"augment": chain(flip(), crop(1)), "optimizer": tpsgd.sgd, "lr": 0.1}
    whole, pieces = trained(order, **settings), trained(order, micro_batch=3, **settings)
    for name in whole:
        torch.testing.assert_close(whole[name], pieces[name], rtol=1e-4, atol=1e-5)


class Recorder:
    """Hands batches on and keeps them."""

    def __init__(self):
        self.seen = []

    def __call__(self, x):
        self.seen.append(x.clone())
        return x


def test_every_epoch_of_every_block_sees_new_versions():
    """One batch an epoch: the versions of the whole data, sorted by what crop cannot change.

    A hidden block is calibrated on the version that it learns from first.
    """
    x, y = images(8)
    recorder = Recorder()
    tpsgd.fit(convnet(), (x, y), augment=chain(flip(), crop(1), recorder), epochs=3, batch_size=8)
    versions = [tuple(batch.flatten(1).sum(1).sort().values.tolist()) for batch in recorder.seen]
    assert len(versions) == 2 + 9  # two calibrations; three blocks, three epochs
    assert versions[0] == versions[1] and versions[4] == versions[5]
    assert len(set(versions)) == 9


def test_validation_and_handing_on_take_samples_as_they_are():
    recorder = Recorder()
    run = tpsgd.fit(convnet(), images(), augment=recorder, validation=images(seed=1), **SHORT)
    assert sum(map(len, recorder.seen)) == 32 * 2 * 3 + 8 * 2  # two blocks are calibrated
    settings = {"rule": tpsgd.rules.readout(scale=4.0), "epochs": 1, "lr": 0.0, "batch_size": 8}
    noisy, plain = (
        tpsgd.fit(convnet(), images(), augment=augment, validation=images(seed=1), **settings)
        for augment in (lambda x: x + 9, None)
    )
    assert [e.val_loss for e in noisy.history] == [e.val_loss for e in plain.history]
    assert [e.loss for e in noisy.history] != [e.loss for e in plain.history]
    assert run.kept_bytes == 0


def test_backprop_is_augmented_too():
    models = [convnet() for _ in range(3)]
    for model, augment in zip(models, (flip(), flip(), None), strict=True):
        run = tpsgd.fit_backprop(model, images(), augment=augment, **SHORT)
    assert same(state(models[0]), state(models[1])) and not same(state(models[0]), state(models[2]))
    assert run.settings["augment"] is None


def test_a_loaders_batches_are_augmented():
    data, found = TensorDataset(*images()), []
    for shuffle in (False, False):
        model = convnet()
        loader = DataLoader(data, 8, shuffle=shuffle)
        tpsgd.fit(model, loader, augment=crop(1), epochs=1)
        found.append(state(model))
    assert same(*found)


def test_vectors_take_a_function_of_ones_own():
    model, before = mlp(6, 8, 3), state(mlp(6, 8, 3))
    run = tpsgd.fit(model, points(), augment=lambda x: x + torch.randn_like(x), **SHORT)
    again = mlp(6, 8, 3)
    tpsgd.fit(again, points(), augment=lambda x: x + torch.randn_like(x), **SHORT)
    assert same(state(model), state(again)) and not same(state(model), before)
    assert run.settings["augment"] == "<lambda>"


def test_the_record_says_what_was_done():
    run = tpsgd.fit(convnet(), images(), augment=chain(flip(), crop(1)), **SHORT)
    assert run.settings["augment"] == "chain(flip(0.5), crop(1))"


def test_restarts_are_augmented_one_by_one():
    many = tpsgd.fit_many(convnet, images(), restarts=2, augment=flip(), **SHORT)
    assert not many.stacked
    flat = lambda: nn.Sequential(nn.Flatten(), mlp(72, 8, 3))  # noqa: E731
    with pytest.raises(TpsgdError, match="one model at a time"):
        tpsgd.fit_many(flat, images(), restarts=2, augment=flip(), stacked=True, **SHORT)


def test_numbers_computed_for_several_batches_are_those_of_single_ones():
    """Two batches and a part of a third, cut into micro-batches or not; more than are kept."""
    key = Key(5, 1, -3)
    for at_a_time in (1, 300, 1 << 16):
        several = RandomNumbers(key, 3, 40, torch.device("cpu"))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("tpsgd.engine.sources.augment.AT_A_TIME", at_a_time)
            for batch, start, size in ((0, 0, 40), (1, 0, 16), (1, 16, 24), (2, 0, 9), (3, 0, 50)):
                wanted = random_numbers(key, 3, batch, start, size)
                assert torch.equal(several(batch, start, size), wanted)
                assert torch.equal(wanted[:2], random_numbers(key, 2, batch, start, size))


def test_a_chain_knows_its_numbers_and_whether_it_has_a_function_of_the_users():
    library, own = chain(flip(), crop(1)), chain(flip(), lambda x: x, chain(crop(1)))
    assert library.numbers == own.numbers == 3
    assert library.library_only and not own.library_only and not chain(own, flip()).library_only


# ---- what is refused -----------------------------------------------------------------------------

REFUSED = {
    "reuse=True keeps one version": {"augment": flip(), "reuse": True},
    "reuse=.* keeps one version": {"augment": flip(), "reuse": "."},
    "a memory budget does not count": {"augment": flip(), "budget": "10MB"},
    "augment must be a function.*chain.*got a list": {"augment": [flip(), crop()]},
    "flip's p must be .* got float32 of shape": {"augment": flip},
    "but <lambda> gave float32 of shape": {"augment": lambda x: x[:, :, 1:]},
    "but <lambda> gave a NoneType": {"augment": lambda x: None},
    "cannot mirror 6 pixels of 6 x 6": {"augment": crop(6, reflect=True)},
    "cutout of 7 pixels does not fit into 6 x 6": {"augment": cutout(7)},
}


@pytest.mark.parametrize("message", REFUSED)
def test_an_augmentation_that_cannot_work_is_refused_in_one_sentence(message):
    with pytest.raises(TpsgdError, match=message):
        tpsgd.fit(convnet(), images(), **folded(**REFUSED[message]))


def test_flip_is_for_pictures():
    with pytest.raises(TpsgdError, match=r"flip\(0.5\) is for images.*got float32 of shape"):
        tpsgd.fit(mlp(6, 3), points(), augment=flip())


@pytest.mark.parametrize("window", [None, 2])
def test_sequences_of_different_lengths_or_in_windows(window):
    model = nn.Sequential(Recurrent(4, 6), nn.Linear(6, 3)).double()
    x, y = sequences()
    data = (ragged(x), y) if window is None else (x, y)
    with pytest.raises(TpsgdError, match="augment cannot change sequences"):
        tpsgd.fit(model, data, augment=lambda x: x, window=window)


@pytest.mark.parametrize(
    "make",
    [
        lambda: flip(1.5),
        lambda: crop(-1),
        lambda: crop(1.5),
        lambda: cutout(0),
        lambda: resized_crop((0.0, 1.0)),
        lambda: resized_crop((0.5, 1.5)),
        lambda: resized_crop(ratio=(2.0, 1.0)),
        lambda: jitter(-0.1),
        lambda: chain(flip(), 3),
    ],
)
def test_arguments_that_make_no_sense(make):
    with pytest.raises(TpsgdError, match=r"must be|takes functions"):
        make()
