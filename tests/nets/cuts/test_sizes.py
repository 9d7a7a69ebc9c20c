"""What a `forward` asks of sizes is answered by a few samples, and by nothing else of them."""

import pytest
import torch
from helpers import seeded
from torch import nn
from torch.nn import functional as F

import tpsgd
from tpsgd import TpsgdError, split

X = torch.randn(12, 1, 8, 8, generator=torch.Generator().manual_seed(0))
SHAPE = (1, 8, 8)


class Net(nn.Module):
    """Two convolutions and a linear layer; subclasses look at sizes."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        self.middle = nn.Conv2d(4, 4, 3, padding=1)
        self.head = nn.Linear(4 * 64, 10)

    def forward(self, x):
        x = self.look(F.relu(self.stem(x)))
        return self.head(F.relu(self.middle(x)).flatten(1))


class Conditions(Net):
    def look(self, x):
        assert x.dim() == 4, "pictures"
        if x.ndim > 4 or x.shape[1] != 4 or x.dtype == torch.long:
            raise ValueError
        return x * 2 if x.size(2) == 8 else x


class Numbers(Net):
    def look(self, x):
        for _ in range(x.shape[3] // 4):
            x = x + int(x.shape[2])
        return x


class Entries(Net):
    def look(self, x):
        samples, *others = x.shape
        assert len(x.shape) == 4
        return x.reshape(samples, *others).reshape(x.shape[0], *x.shape[1:])


@pytest.mark.parametrize("kind", [Conditions, Numbers, Entries])
def test_sizes_do_not_keep_a_model_from_being_cut(kind):
    model = seeded(kind)
    cut = split(model, SHAPE)
    assert len(cut) == 3
    y, x = model.eval()(X), X
    for block in cut:
        block.train(False)
        x = block(x)
    torch.testing.assert_close(x, y)
    assert len(tpsgd.fit(model, (X, torch.arange(12) % 10), epochs=1).blocks) == 3


class OfValues(Net):
    def look(self, x):
        return x * 2 if x.mean() > 1000 else x


class OfItem(Net):
    def look(self, x):
        return x * 2 if x.sum().item() > 1e9 else x


class OfSamples(Net):
    def look(self, x):
        return x if x.shape[0] > 1 else x * 2


class CountsSamples(Net):
    def look(self, x):
        return x * int(x.shape[0])


class Length(Net):
    def look(self, x):
        return x.reshape(len(x), 4, 8, 8)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (OfValues, "it decides by the values of a tensor"),
        (OfItem, "it decides by the values of a tensor"),
        (CountsSamples, "it makes a number of the values of a tensor, or of the number of samples"),
        (Length, r"take x.shape\[0\] \(line \d+ of test_sizes.py\)"),
    ],
)
def test_values_and_the_number_of_samples_are_no_sizes(kind, message):
    with pytest.raises(TpsgdError, match=message):
        split(kind(), SHAPE)


def test_what_holds_for_several_numbers_of_samples_is_an_answer():
    assert len(split(OfSamples(), SHAPE)) == 3


def test_without_a_sample_there_is_no_answer():
    with pytest.raises(TpsgdError, match="which the shape of a sample would tell"):
        split(Conditions())


def test_a_question_leaves_no_trace():
    model = Conditions()
    model.add_module("norm", nn.BatchNorm2d(4))
    model.look = lambda x: Conditions.look(model, model.norm(x))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    state = torch.get_rng_state()
    split(model.train(), SHAPE)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(m.training for m in model.modules()) and torch.equal(state, torch.get_rng_state())


class Embedded(nn.Module):
    """Tokens and places; a mask may keep tokens out."""

    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(9, 8), nn.Embedding(6, 8)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(8, 3)

    def forward(self, tokens, absent=None):
        steps = tokens.shape[1]
        assert steps <= 6
        x = self.words(tokens) + self.places(torch.arange(6)[:steps])
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=absent)
        return self.head(x.mean(1))


@pytest.mark.parametrize("masked", [False, True])
def test_embeddings_learn_with_the_layer_behind_them(masked):
    x = {"tokens": torch.zeros(2, 6, dtype=torch.long)}
    x |= {"absent": torch.zeros(2, 6, dtype=torch.bool)} if masked else {}
    cut = split(Embedded(), x if masked else x["tokens"])
    assert [block.name for block in cut[1:]] == ["layers.1", "head" if masked else "output"]


class Remembers(nn.Module):
    """A language model that returns its state, too."""

    def __init__(self):
        super().__init__()
        self.words, self.lstm = nn.Embedding(9, 8), nn.LSTM(8, 8, batch_first=True)
        self.head = nn.Linear(8, 9)

    def forward(self, tokens, state=None):
        steps, state = self.lstm(self.words(tokens), state)
        return self.head(steps), state


def test_what_is_returned_besides_the_answer_crosses_no_cut():
    tokens = torch.randint(9, (16, 5))
    run = tpsgd.fit(Remembers(), (tokens, tokens.roll(-1, 1)), epochs=1)
    assert [block.learning for block in run.blocks] == ["autograd through time", "closed form"]


def test_a_class_of_a_notebook_has_no_file():
    names = {"__name__": "__main__", "Net": Net}
    source = "class Own(Net):\n    def look(self, x):\n        return x if x.mean() > 0 else -x\n"
    exec(compile(source, "<cell 1>", "exec"), names)
    with pytest.raises(TpsgdError, match="it decides by the values of a tensor"):
        split(names["Own"](), SHAPE)
