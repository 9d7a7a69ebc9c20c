"""Models by a word."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import tpsgd
from tpsgd import TpsgdError
from tpsgd.models import ACTIVATIONS, factory


def test_an_mlp():
    model = factory("mlp:8,6", (1, 4, 4), 3)()
    assert [str(b) for b in tpsgd.split(model)] == [
        "1: Linear + LeakyReLU",
        "3: Linear + LeakyReLU",
        "5: Linear",
    ]
    assert model(torch.randn(2, 1, 4, 4)).shape == (2, 3)


def test_an_mlp_without_hidden_layers():
    assert [type(m) for m in factory("mlp", (5,), 3)()] == [nn.Flatten, nn.Linear]


def test_a_cnn_is_the_papers():
    model = factory("cnn:16x5,8x3", (3, 12, 10), 7)()
    convs = [m for m in model if isinstance(m, nn.Conv2d)]
    assert [(m.out_channels, m.kernel_size, m.stride, m.padding) for m in convs] == [
        (16, (5, 5), (1, 1), (0, 0)),
        (8, (3, 3), (1, 1), (0, 0)),
    ]
    assert model(torch.randn(2, 3, 12, 10)).shape == (2, 7)


def test_the_kernel_is_three_by_default():
    assert factory("cnn:4", (1, 8, 8), 2)()[0].kernel_size == (3, 3)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name):
    model = factory("mlp:4", (3,), 2, activation=name)()
    assert type(model[2]) is ACTIVATIONS[name]


def test_each_call_makes_a_new_model():
    make = factory("mlp:4", (3,), 2)
    assert make() is not make()
    assert not torch.equal(make()[1].weight, make()[1].weight)


@given(
    st.lists(st.integers(1, 20), max_size=3),
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
    st.integers(1, 5),
)
def test_any_mlp_fits_its_data(widths, shape, classes):
    word = "mlp:" + ",".join(map(str, widths)) if widths else "mlp"
    model = factory(word, tuple(shape), classes)()
    assert model(torch.randn(2, *shape)).shape == (2, classes)


@pytest.mark.parametrize(
    ("word", "match"),
    [
        ("mlp:0", "cannot read 'mlp:0'"),
        ("mlp:a", "cannot read 'mlp:a': write widths like mlp:256,128"),
        ("mlp:4,", "cannot read"),
        ("mlp:-3", "cannot read"),
        ("cnn:", "cannot read 'cnn:'"),
        ("cnn:4xx", "cannot read"),
        ("cnn:0x3", "cannot read"),
        ("cnn:4x3,", "cannot read"),
        ("cnn:4x9", r"leaves nothing of images of 8 x 8 pixels"),
        ("cnn:4x5,4x5", "leaves nothing"),
        ("vgg:16", "unknown model 'vgg:16'.*mlp:256,256"),
        ("", "unknown model ''"),
        ("nowhere.py:make", "there is no file nowhere.py"),
    ],
)
def test_words_that_cannot_be_read(word, match):
    with pytest.raises(TpsgdError, match=match):
        factory(word, (1, 8, 8), 3)


def test_a_cnn_needs_images():
    with pytest.raises(TpsgdError, match=r"needs images \(channels, height, width\), not \(8,\)"):
        factory("cnn:4x3", (8,), 3)


def test_an_unknown_activation():
    with pytest.raises(TpsgdError, match="unknown activation 'swish': choose leaky-relu, relu"):
        factory("mlp:4", (8,), 3, activation="swish")


def test_a_factory_of_ones_own(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("from torch import nn\n\ndef make():\n    return nn.Linear(4, 2)\n")
    assert isinstance(factory(f"{path}:make", (4,), 2)(), nn.Linear)


@pytest.mark.parametrize(
    ("text", "name", "match"),
    [
        ("x = 1\n", "make", "has no function 'make'"),
        ("make = 3\n", "make", "has no function 'make'"),
        ("def make(:\n", "make", "does not run: SyntaxError"),
        ("1 / 0\n", "make", "does not run: ZeroDivisionError"),
        ("import no_such_module\n", "make", "does not run: ModuleNotFoundError"),
    ],
)
def test_a_factory_that_is_not_one(tmp_path, text, name, match):
    path = tmp_path / "mine.py"
    path.write_text(text)
    with pytest.raises(TpsgdError, match=match) as caught:
        factory(f"{path}:{name}", (4,), 2)
    assert "\n" not in str(caught.value)


def test_a_factory_of_something_else(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def make():\n    return 'model'\n")
    with pytest.raises(TpsgdError, match=r"gave a str, not an nn\.Module"):
        factory(f"{path}:make", (4,), 2)()


def test_images_with_their_channels_last_are_noticed():
    with pytest.raises(TpsgdError, match="channels first"):
        factory("cnn:8x3", (16, 16, 3), 4)
