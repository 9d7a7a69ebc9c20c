"""Vision transformers: their tokens, their blocks, and what they learn."""

import pytest
import torch
from helpers import images, seeded

import tpsgd
from tpsgd.zoo import recipes
from tpsgd.zoo.vit import vit
from tpsgd.zoo.words import factory

pytestmark = pytest.mark.usefixtures("unwatched")


def small():
    return vit((2, 8, 8), 3, depth=4, width=16, patch=4)


def test_a_token_reads_its_patch_and_its_place():
    net = seeded(small)
    x = torch.zeros(1, 2, 8, 8)
    blank = net.patches(x)
    x[..., :4, 4:] = 1.0  # the second of four patches
    changed = (net.patches(x) != blank).any(-1).flatten()
    assert changed.tolist() == [False, True, False, False]
    assert len(set(map(tuple, blank[0].tolist()))) == 4


@pytest.mark.parametrize(
    ("side", "patch"),
    [(1, 1), (8, 2), (28, 4), (29, None), (32, 4), (64, 8), (96, 16), (100, 20), (224, 16)],
)
def test_patches_suit_the_image(side, patch):
    if patch is None:
        with pytest.raises(tpsgd.TpsgdError, match="whole patches"):
            vit((3, side, side), 10)
    else:
        assert vit((3, side, side), 10, depth=1).patches.patch == patch


@pytest.mark.parametrize(("width", "heads"), [(16, 1), (192, 3), (200, 2), (211, 1)])
def test_heads_divide_the_width(width, heads):
    assert vit((3, 8, 8), 10, depth=1, width=width).layer1.heads == heads


@pytest.mark.parametrize("name", ["depth", "width", "heads", "patch", "hidden"])
@pytest.mark.parametrize("number", [0, -4, 2.5])
def test_sizes_are_whole_numbers(name, number):
    with pytest.raises(tpsgd.TpsgdError, match=f"{name} must be a whole number, 1 or more, got"):
        vit((3, 32, 32), 10, **{name: number})


@pytest.mark.parametrize("chosen", [{"patch": 3}, {"heads": 5}, {"shape": (3, 32, 16)}], ids=str)
def test_sizes_fit_one_another(chosen):
    with pytest.raises(tpsgd.TpsgdError, match="square images of whole patches"):
        vit(**{"shape": (3, 32, 32), "classes": 10, **chosen})


@pytest.mark.parametrize("blocks", [1, 2, 4, None])
def test_patches_learn_with_the_first_layer(blocks):
    cut = tpsgd.split(small(), (2, 8, 8), blocks=blocks)
    assert cut[0].ends[0] == "patches" and len(cut[0].layers) >= 2
    assert len(cut) == (blocks or 5)


def test_one_block_is_backprop():
    x, y = images(24, 2, 8)
    settings = recipes.vit.settings((2, 8, 8), epochs=2, batch_size=8, lr_schedule=None)
    nets = [seeded(small) for _ in range(2)]
    tpsgd.fit(nets[0], (x, y), blocks=1, **settings)
    tpsgd.fit_backprop(nets[1], (x, y), **settings)
    for p, q in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


def test_it_is_saved_and_loaded(tmp_path):
    x, y = images(24, 2, 8)
    net = seeded(small)
    run = tpsgd.fit(net, (x, y), epochs=1, blocks=2, rule="auxiliary")
    run.save(tmp_path / "net")
    loaded = tpsgd.load(tmp_path / "net").model
    assert torch.equal(loaded.eval()(x), net.eval()(x))


def test_a_word_names_it():
    net = factory("vit:3x64", (3, 32, 32), 10)()
    assert len(tpsgd.split(net)) == 4 and net.patches.width == 64


def test_the_recipes_settings_are_adamw_s_and_nesterov_s():
    x, y = images(24, 2, 8)
    for recipe, optimizer in ((recipes.vit, "adam"), (recipes.residual, "momentum")):
        run = tpsgd.fit(seeded(small), (x, y), **recipe.settings((2, 8, 8), epochs=1))
        assert run.settings["optimizer"] == optimizer
        assert run.settings["weight_decay"] == recipe.weight_decay
        assert run.settings["clip"] == recipe.clip
