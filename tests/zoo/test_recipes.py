"""Recipes: the settings of a deep net in one value, and what they give."""

from dataclasses import replace
from inspect import signature

import pytest
import torch
from helpers import images, seeded
from torch import nn

import tpsgd
from tpsgd import TpsgdError
from tpsgd.zoo.recipes import ALL, Recipe, deep

pytestmark = pytest.mark.usefixtures("unwatched")


def test_the_recipe_is_read_as_it_is_written():
    assert str(deep) == (
        "Recipe(lr=0.001, lr_schedule=one_cycle(0.2), epochs=12, batch_size=64, flip=0.5, "
        "shift=0.075, cutout=0.0, optimizer=None, weight_decay=0.0, clip=None)"
    )
    assert ALL["deep"] is tpsgd.zoo.recipes.deep is deep


@pytest.mark.parametrize(
    ("side", "shift"), [(8, 1), (28, 3), (32, 4), (64, 5), (96, 7), (160, 12), (224, 17)]
)
def test_shifts_are_a_share_of_the_side(side, shift):
    for shape in ((3, side, side), (1, side, 2 * side), (3, 2 * side, side)):
        assert str(deep.augmentation(shape)) == f"chain(flip(0.5), crop({shift}, reflect))"


def test_every_part_of_the_augmentation_can_be_changed():
    shape = (3, 32, 32)
    assert str(replace(deep, cutout=0.25).augmentation(shape)).endswith("cutout(8))")
    assert str(Recipe(flip=0, shift=0.25).augmentation(shape)) == "chain(crop(8, reflect))"
    nothing = Recipe(flip=0, shift=0).augmentation(shape)
    x = torch.randn(2, *shape)
    assert torch.equal(nothing(x), x)


def test_settings_are_those_of_fit_and_others_replace_them():
    settings = deep.settings((3, 32, 32), epochs=30, window=3)
    assert set(settings) <= set(signature(tpsgd.fit).parameters)
    assert (settings["epochs"], settings["lr"], settings["window"]) == (30, 1e-3, 3)
    assert "precision" not in settings and "device" not in settings
    assert "precision" not in deep.settings((3, 32, 32), "cpu")
    for device in ("cuda", "cuda:1", torch.device("cuda")):
        assert deep.settings((3, 32, 32), device)["precision"] is torch.bfloat16


def test_a_setting_that_fit_does_not_have_is_refused():
    with pytest.raises(TpsgdError, match="fit has no argument 'epoch': did you mean 'epochs'"):
        deep.settings((3, 32, 32), epoch=1)
    assert deep.settings((3, 32, 32), rule="drtp")["rule"] == "drtp"


@pytest.mark.parametrize("shape", [32, (784,), (28, 28), (4, 3, 32, 32)])
def test_samples_that_are_no_images_are_refused(shape):
    with pytest.raises(TpsgdError, match="this recipe is for images"):
        deep.settings(shape)


def test_every_layer_but_the_last_has_its_norm():
    blocks = tpsgd.split(deep.vgg(8, (3, 16, 16), 10, dense=(8,)))
    norms = [any("BatchNorm" in type(m).__name__ for m in b.between) for b in blocks]
    assert norms == [True] * 7 + [False]
    plain = deep.vgg(8, (3, 16, 16), 10, dense=(8,), dense_norm=False)
    assert not any(isinstance(m, nn.BatchNorm1d) for m in plain.modules())


@pytest.mark.full
@pytest.mark.parametrize("train", [tpsgd.fit, tpsgd.fit_backprop])
def test_local_rules_and_backprop_take_the_same_settings(train):
    x, y = images(24, 2, 16)
    net = seeded(lambda: deep.vgg(8, (2, 16, 16), 3, dense=(8,)))
    run = train(net, (x, y), **deep.settings((2, 16, 16), epochs=2, batch_size=8))
    assert run.settings["lr_schedule"] == "one_cycle(0.2)"
    assert run.settings["augment"] == "chain(flip(0.5), crop(2, reflect))"
    if train is tpsgd.fit:
        assert run.settings["order"] == "simultaneous"
        assert [b.learning for b in run.blocks] == ["closed form"] * 8
