"""Models that are no `nn.Sequential`, and what a model was trained on, through a folder."""

from pathlib import Path

import pytest
import torch
from torch import nn

import tpsgd
from tpsgd import TpsgdError

NETS = """
import torch
from torch import nn

class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.inner, self.head = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 3)
    def forward(self, x):
        x = torch.relu(self.first(x))
        return self.head(x + torch.relu(self.inner(x)))

class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = nn.Linear(6, 16), nn.Linear(2, 16), nn.Linear(16, 3)
    def forward(self, x, z):
        return self.head(torch.relu(self.a(x) + self.b(z)))

class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.embedding, self.head = nn.Embedding(10, 8), nn.Linear(8, 3)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    def forward(self, tokens):
        return self.head(self.layers(self.embedding(tokens)).mean(1))

class Answers(Residual):
    def forward(self, x):
        return {"logits": super().forward(x)}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("nets.py").write_text(NETS)
    return tmp_path


def samples(name):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 6, generator=generator)
    y = x[:, :3].argmax(1)
    if name == "TwoInputs":
        return (x, torch.randn(60, 2, generator=generator)), y
    return ((x * 3).long().clamp(0, 9), y) if name == "Transformer" else (x, y)


@pytest.mark.parametrize("name", ["Residual", "TwoInputs", "Transformer", "Answers"])
def test_a_class_of_the_users_is_saved_and_loaded(name):
    word, (x, y) = f"nets.py:{name}", samples(name)
    model = tpsgd.zoo.words.from_file(word)()
    run = tpsgd.fit(model, (x, y), epochs=20, lr=0.01, batch_size=16)
    run.save("m", factory=word, classes=["a", "b", "c"])
    trained = tpsgd.load("m", factory=word)
    for p, q in zip(model.parameters(), trained.model.parameters(), strict=True):
        assert torch.equal(p, q)
    accuracy = trained.evaluate((x, y))
    assert accuracy == tpsgd.evaluate(model, (x, y)) > 0.5
    assert (trained.predict(x) == y).double().mean().item() == pytest.approx(accuracy)
    assert trained.confusion((x, y)).accuracy == pytest.approx(accuracy)
    assert torch.allclose(trained.probabilities(x).sum(1), torch.ones(60))
    if name != "TwoInputs":
        assert torch.equal(trained.scaled(x), x)
    with pytest.raises(TpsgdError, match="is no module of torch or tpsgd on its list"):
        run.save("n")


def test_several_inputs_by_name():
    (x, z), y = samples("TwoInputs")
    run = tpsgd.fit(tpsgd.zoo.words.from_file("nets.py:TwoInputs")(), ((x, z), y), epochs=1)
    run.save("m", factory="nets.py:TwoInputs")
    trained = tpsgd.load("m", factory="nets.py:TwoInputs")
    assert torch.equal(trained.predict((x, z)), trained.predict({"z": z, "x": x}))
    assert trained.scaled((x, z)).get("z", 1) is not None


def saved(model, data, **settings):
    tpsgd.fit(model, data, **({"epochs": 30, "lr": 0.02, "batch_size": 16} | settings)).save("m")
    return tpsgd.load("m")


@pytest.mark.parametrize("targets", [1, 2])
def test_a_model_of_numbers_predicts_numbers(targets):
    x = torch.randn(80, 4, generator=torch.Generator().manual_seed(0))
    y = 100 + 20 * x[:, 0] if targets == 1 else 100 + 20 * x[:, :2]
    trained = saved(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, targets)), (x, y))
    predicted = trained.predict(x)
    assert trained.gives_numbers and predicted.shape == y.shape
    assert trained.evaluate((x, y)) > 0.9
    errors = (predicted - y).abs().view(80, -1).mean(0)
    assert torch.allclose(trained.errors((x, y)).float(), errors, rtol=1e-4)
    for refused in (trained.probabilities, trained.predict_with_probabilities):
        with pytest.raises(TpsgdError, match="trained on numbers, which have no probabilities"):
            refused(x)
    with pytest.raises(TpsgdError, match="numbers, which have no confusion matrix: use evaluate"):
        trained.confusion((x, y))
    with pytest.raises(TpsgdError, match="leave the names of classes out"):
        trained.run.save("n", classes=["a", "b"])


def test_r_squared_of_labels_that_could_be_classes():
    x = torch.randn(80, 4, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0).float()
    trained = saved(nn.Sequential(nn.Linear(4, 1)), (x, y), loss="mse")
    assert 0.3 < trained.evaluate((x, y)) < 0.9  # the accuracy is higher
    assert trained.evaluate((x, y.long())) == trained.evaluate((x, y))
    classes = saved_classes(x, y.long())
    with pytest.raises(TpsgdError, match="trained on classes: evaluate gives their accuracy"):
        classes.errors((x, y.long()))


def saved_classes(x, y):
    tpsgd.fit(nn.Sequential(nn.Linear(4, 2)), (x, y), epochs=1).save("classes")
    return tpsgd.load("classes")


@pytest.mark.parametrize("kind", ["pixels", "steps"])
def test_classes_of_positions(kind):
    generator = torch.Generator().manual_seed(0)
    if kind == "pixels":
        x = torch.randn(40, 3, 5, 5, generator=generator)
        y, model = x.argmax(1), nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 3, 1))
    else:
        x = torch.randn(40, 5, 3, generator=generator)
        y, model = x.argmax(2), nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 3))
    labels = y.clone()
    labels[:, 0] = -100
    trained = saved(model, (x, labels))
    predicted, shares = trained.predict_with_probabilities(x)
    assert predicted.shape == y.shape and shares.shape == (*y.shape, 3)
    assert torch.equal(shares.argmax(-1), predicted)
    assert torch.allclose(shares.sum(-1), torch.ones(y.shape), atol=1e-5)
    known = labels >= 0
    accuracy = (predicted == labels)[known].double().mean().item()
    assert trained.evaluate((x, labels)) == pytest.approx(accuracy) and accuracy > 0.8
    matrix = trained.confusion((x, labels))
    assert matrix.samples == int(known.sum()) and matrix.accuracy == pytest.approx(accuracy)


def test_the_record_says_where_the_classes_of_steps_are():
    """A convolution's output is turned around: the last layer does not tell the dimension."""

    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Conv1d(4, 8, 1), nn.Conv1d(8, 4, 1)

        def forward(self, x):
            return self.head(torch.relu(self.body(x.transpose(1, 2)))).transpose(1, 2)

    x = torch.randn(40, 6, 4, generator=torch.Generator().manual_seed(0))
    y, model = x.argmax(2), Turned()
    run = tpsgd.fit(model, (x, y), epochs=30, lr=0.02, batch_size=16)
    trained = tpsgd.Trained(model.eval(), run, tuple("abcd"))
    assert run.settings["positions"] == "first" and trained.predict(x).shape == (40, 6)
    assert (trained.predict(x) == y).double().mean() > 0.8
