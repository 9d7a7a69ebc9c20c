"""Models by a word."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import tpsgd
from tpsgd import Padded, Recurrent, TpsgdError
from tpsgd.nets.inits import BY_NAME
from tpsgd.nets.recurrent import connect
from tpsgd.zoo.words import ACTIVATIONS, CELLS, factory, is_recurrent, reservoir


def test_an_mlp():
    model = factory("mlp:8,6", (1, 4, 4), 3)()
    assert [str(b) for b in tpsgd.split(model)] == [
        "1: Linear + LeakyReLU",
        "3: Linear + LeakyReLU",
        "5: Linear",
    ]
    assert model(torch.randn(2, 1, 4, 4)).shape == (2, 3)


def test_a_cnn_is_the_papers():
    model = factory("cnn:16x5,8x3", (3, 12, 10), 7)()
    convs = [m for m in model if isinstance(m, nn.Conv2d)]
    assert [(m.out_channels, m.kernel_size, m.stride, m.padding) for m in convs] == [
        (16, (5, 5), (1, 1), (0, 0)),
        (8, (3, 3), (1, 1), (0, 0)),
    ]
    assert model(torch.randn(2, 3, 12, 10)).shape == (2, 7)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name):
    model = factory("mlp:4", (3,), 2, activation=name)()
    assert type(model[2]) is ACTIVATIONS[name]


def test_each_call_makes_a_new_model():
    make = factory("mlp:4", (3,), 2)
    assert make() is not make()
    assert not torch.equal(make()[1].weight, make()[1].weight)


@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=3),
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
    st.integers(1, 5),
)
def test_any_mlp_fits_its_data(widths, shape, classes):
    word = "mlp:" + ",".join(map(str, widths))
    model = factory(word, tuple(shape), classes)()
    assert model(torch.randn(2, *shape)).shape == (2, classes)


@pytest.mark.parametrize(
    ("word", "match"),
    [
        ("mlp:0", "cannot read 'mlp:0'"),
        ("mlp:a", "cannot read 'mlp:a': write widths like mlp:256,128"),
        ("mlp:4,", "cannot read"),
        ("mlp:-3", "cannot read"),
        ("mlp", "cannot read 'mlp': write widths like mlp:256,128"),
        ("mlp:", "cannot read 'mlp:': write widths"),
        ("cnn:4", r"cannot read 'cnn:4': write layers like cnn:16x5 \(filters x kernel\)"),
        ("cnn:4x", "cannot read 'cnn:4x': write layers"),
        ("cnn:", "cannot read 'cnn:'"),
        ("cnn:4xx", "cannot read"),
        ("cnn:0x3", "cannot read"),
        ("cnn:4x3,", "cannot read"),
        ("cnn:4x9", r"leaves nothing of images of 8 x 8 pixels"),
        ("cnn:4x5,4x5", "leaves nothing"),
        ("resnext:18", "unknown model 'resnext:18'.*mlp:256,256"),
        ("lstm:16", "unknown model 'lstm:16'.*rnn:512"),
        ("mpl:16", r"unknown model 'mpl:16': did you mean 'mlp'\?"),
        ("paper-rn:16", r"did you mean 'paper-rnn'\?"),
        ("rnn", "cannot read 'rnn': write units like rnn:512 or rnn:512,512\\+256"),
        ("rnn:", "cannot read"),
        ("rnn:8+", "cannot read"),
        ("rnn:+8", "cannot read"),
        ("rnn:0", "cannot read"),
        ("birnn:8,x", "cannot read"),
        ("rnn:8+4+4", "cannot read"),
        ("rnn:8", r"needs sequences \(steps, features\), not .* \(1, 8, 8\); seq-mnist-rows"),
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
    with pytest.raises(
        TpsgdError, match="unknown activation 'swish': choose from leaky-relu, relu"
    ):
        factory("mlp:4", (8,), 3, activation="swish")


def test_a_factory_from_a_file(tmp_path):
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
def test_files_without_a_usable_factory(tmp_path, text, name, match):
    path = tmp_path / "mine.py"
    path.write_text(text)
    with pytest.raises(TpsgdError, match=match) as caught:
        factory(f"{path}:{name}", (4,), 2)
    assert "\n" not in str(caught.value)


def test_a_factory_that_returns_no_module(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def make():\n    return 'model'\n")
    with pytest.raises(TpsgdError, match=r"returned a str, not an nn\.Module"):
        factory(f"{path}:make", (4,), 2)()


def test_images_with_their_channels_last_are_noticed():
    with pytest.raises(TpsgdError, match="channels first"):
        factory("cnn:8x3", (16, 16, 3), 4)


def sequences(tokens: int | None = None, padded: bool = False):
    """Three sequences of five steps: four numbers a step, or tokens."""
    x = torch.randn(3, 5, 4) if tokens is None else torch.randint(tokens, (3, 5))
    return Padded(x, torch.tensor([2, 5, 1])) if padded else x


@pytest.mark.cover(2)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("tokens", [None, 9])
@pytest.mark.parametrize("layers", ["6", "6,6", "6,3", "6,3+4"])
@pytest.mark.parametrize("kind", CELLS)
def test_a_recurrent_word(kind, layers, tokens, padded):
    shape = (5, 4) if tokens is None else (5,)
    model = factory(f"{kind}:{layers}", shape, 2, "tanh", tokens=tokens)()
    assert is_recurrent(model) and isinstance(model[-1], nn.Linear)
    assert connect(model)(sequences(tokens, padded)).shape == (3, 2)
    cells = [b.layer for b in tpsgd.split(model) if b.recurrent]
    assert [c.hidden for c in cells] == [int(n) for n in layers.partition("+")[0].split(",")]
    assert {c.bidirectional for c in cells} == {kind.endswith("birnn")}
    assert ("+" in layers) == any(isinstance(m, nn.Tanh) for m in model)


def test_cells_by_their_words():
    ours, papers = factory("rnn:6", (5, 4), 2)()[0], factory("paper-rnn:6", (5, 4), 2)()[0]
    assert ours.leak < 1 and isinstance(ours.activation, nn.Tanh)
    assert papers.leak == 1 and isinstance(papers.activation, nn.Sigmoid)
    torchs = factory("torch-rnn:6,6,6", (5, 4), 2)()[0]
    assert type(torchs) is nn.RNN and torchs.num_layers == 3 and torchs.batch_first
    assert [type(m) for m in factory("torch-rnn:6,3", (5, 4), 2)()] == [nn.RNN, nn.RNN, nn.Linear]


def test_the_papers_perceptron_after_two_layers():
    model = factory("rnn:6,6+3", (5, 4), 2)()
    assert [str(b).partition(": ")[2] for b in tpsgd.split(model)] == [
        "Recurrent", "Recurrent", "Linear + LeakyReLU", "Linear",
    ]  # fmt: skip
    assert [m.sequence for m in model if isinstance(m, Recurrent)] == [True, False]


@pytest.mark.parametrize("kind", ["rnn", "birnn", "paper-rnn"])
@pytest.mark.parametrize("name", BY_NAME)
def test_inits_of_recurrent_words(kind, name):
    cell = factory(f"{kind}:40", (5, 4), 2, init=name)()[0].cells[0]
    reach = {"zeros": 0.0, "uniform": 0.01, "scaled_uniform": 1.0, "reservoir": 3.0}[name]
    assert 0.5 * reach <= cell.weight_x.abs().max() <= reach


def test_leak():
    assert factory("birnn:6,6", (5, 4), 2, leak=0.7)()[1].leak == 0.7
    with pytest.raises(TpsgdError, match="leak must be over 0 and at most 1"):
        factory("rnn:6", (5, 4), 2, leak=2.0)()


@pytest.mark.parametrize(
    ("word", "options", "match"),
    [
        ("mlp:4", {"init": "zeros"}, "init and leak are for recurrent models such as rnn:512"),
        ("cnn:4x3", {"leak": 0.5}, "not for cnn:4x3"),
        ("rnn:4", {"init": "ones"}, "unknown init 'ones': choose zeros, uniform"),
        ("torch-rnn:4", {"init": "zeros"}, "init is not for torch-rnn:4"),
        ("torch-birnn:4", {"leak": 0.5}, "leak is not for torch-birnn:4"),
        ("paper-rnn:4", {"leak": 0.5}, "leak is not for paper-rnn:4"),
        ("lru:4", {"leak": 0.5}, "init and leak are not for lru:4"),
        ("rnn:4", {"loss_at": "last"}, "loss_at is for diagonal recurrences .*, not for rnn:4"),
        ("mlp:4", {"loss_at": "last"}, "loss_at is for .* such as lru:256, not for mlp:4"),
        ("rnn:4", {"tokens": 7}, r"needs sequences .*, not samples of shape \(5, 4\)"),
        ("mlp:4", {"tokens": 7}, "mlp:4 cannot read tokens"),
        ("cnn:4x3", {"tokens": 7}, "cnn:4x3 cannot read tokens"),
    ],
)
def test_options_that_do_not_go_with_a_word(word, options, match):
    with pytest.raises(TpsgdError, match=match) as caught:
        factory(word, (5, 4), 2, **options)
    assert "\n" not in str(caught.value)


def test_where_the_loss_of_diagonal_layers_looks():
    assert [m.loss_at.value for m in factory("lru:4,4", (5, 4), 2, loss_at="last")()[:2]] == [
        "last", "last",
    ]  # fmt: skip
    assert factory("lru:4", (5, 4), 2)()[0].loss_at.value == "mean"


def test_a_table_is_no_sequence():
    with pytest.raises(TpsgdError, match=r"not samples of shape \(6,\); x\[..., None\]"):
        factory("rnn:4", (6,), 2)


def test_an_mlp_reads_sequences_whole():
    assert factory("mlp:4", (5, 4), 2)()(sequences()).shape == (3, 2)


@pytest.mark.parametrize(
    "word", ["rnn:6,5", "paper-birnn:6,5+3", "torch-rnn:6,5", "torch-rnn:6,6", "lru:6,5"]
)
def test_a_reservoir_has_the_sizes_of_a_model_and_our_cells(word):
    make = factory(word, (5, 4), 2)
    sizes = [b.layer.hidden for b in tpsgd.split(make()) if b.recurrent]
    made = reservoir(make)()
    assert [m.hidden for m in made[:-1]] == sizes and len(made) == len(sizes) + 1
    assert all(m.leak == Recurrent(1, 1).leak for m in made[:-1])
    assert made(sequences()).shape == (3, 2)
    assert reservoir(make)() is not reservoir(make)()


def test_a_reservoir_leaks_as_its_model():
    assert reservoir(factory("rnn:6", (5, 4), 2, leak=0.6))()[0].leak == 0.6


def test_a_reservoir_needs_a_recurrent_model():
    with pytest.raises(TpsgdError, match="begin with a recurrent layer"):
        reservoir(factory("mlp:4", (6,), 2))
    embedded = [nn.Embedding(7, 4), nn.RNN(4, 6, batch_first=True), nn.Linear(6, 2)]
    with pytest.raises(TpsgdError, match="begin with a recurrent layer"):
        reservoir(lambda: nn.Sequential(*embedded))


def test_vgg_has_a_norm_after_every_layer_but_the_last():
    model = factory("vgg:8", (3, 16, 16), 5)()
    assert [bool(block.between) for block in tpsgd.split(model)] == [True] * 7 + [False]
    assert model(torch.randn(2, 3, 16, 16)).shape == (2, 5)


@pytest.mark.parametrize(
    ("word", "options", "message"),
    [
        ("vgg", {}, "write vgg:8, vgg:11 or vgg:16"),
        ("vgg:13", {}, "write vgg:8, vgg:11 or vgg:16"),
        ("vgg:8", {"activation": "tanh"}, "vgg:8 has ReLUs"),
        ("vgg:8", {"tokens": 9}, "cannot read tokens"),
    ],
)
def test_a_vgg_that_cannot_be(word, options, message):
    with pytest.raises(TpsgdError, match=message):
        factory(word, (3, 16, 16), 5, **options)


@pytest.mark.parametrize(("side", "kernel"), [(32, 3), (64, 7)])
def test_a_resnet_has_a_word(side, kernel):
    net = factory("resnet:18", (3, side, side), 10)()
    assert net.conv1.kernel_size == (kernel, kernel) and len(tpsgd.split(net)) == 10
    with pytest.raises(TpsgdError, match="write resnet:18 or resnet:34"):
        factory("resnet:50", (3, side, side), 10)
