"""Every kind of layer comes back from its folder, with the same outputs bit for bit."""

import json
from pathlib import Path

import pytest
import torch
from helpers import images, points, ragged, same, seeded, sequences, state, tokens
from torch import nn

import tpsgd
from tpsgd import Recurrent, TpsgdError
from tpsgd.saved import modules
from tpsgd.zoo import resnet, words

FLAT = points()
IMAGES = images(channels=3, size=8)
SIGNALS = IMAGES[0].flatten(2), IMAGES[1]
VOLUMES = IMAGES[0].reshape(-1, 3, 4, 4, 4), IMAGES[1]
STEPS = sequences()[0].float(), sequences()[1]
RAGGED = ragged(STEPS[0]), STEPS[1]
TOKENS = tokens()


def word(text, shape, vocabulary=None):
    return lambda: words.factory(text, shape, 3, tokens=vocabulary)()


MODELS = {
    "linear": (
        lambda: nn.Sequential(nn.Linear(6, 4, bias=False), nn.GELU("tanh"), nn.Linear(4, 3)), FLAT,
    ),
    "mlp": (word("mlp:8,5", (6,)), FLAT),
    "norms of features": (
        lambda: nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8, eps=1e-4, momentum=None), nn.LeakyReLU(0.2),
            nn.LayerNorm(8, bias=False), nn.Dropout(0.3), nn.Linear(8, 8), nn.RMSNorm(8), nn.SiLU(),
            nn.Linear(8, 3),
        ), FLAT,
    ),
    "conv1d": (
        lambda: nn.Sequential(
            nn.Conv1d(3, 4, 5, stride=2, padding=1), nn.BatchNorm1d(4), nn.ReLU(inplace=True),
            nn.AvgPool1d(2), nn.Conv1d(4, 4, 3, padding="same", groups=2), nn.Tanh(),
            nn.AdaptiveMaxPool1d(3), nn.Flatten(), nn.Linear(12, 3),
        ), SIGNALS,
    ),
    "conv2d": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, (3, 2), dilation=(1, 2), bias=False), nn.GroupNorm(2, 8), nn.PReLU(8),
            nn.MaxPool2d(2, ceil_mode=True), nn.Conv2d(8, 4, 1, padding_mode="circular"),
            nn.InstanceNorm2d(4, affine=True), nn.Softplus(2), nn.AdaptiveAvgPool2d((None, 2)),
            nn.Flatten(1, -1), nn.LazyLinear(3),
        ), IMAGES,
    ),
    "cnn": (word("cnn:8x3,4x3", (3, 8, 8)), IMAGES),
    "conv3d": (
        lambda: nn.Sequential(
            nn.Conv3d(3, 4, 2), nn.BatchNorm3d(4, affine=False), nn.Hardtanh(-2, 2),
            nn.MaxPool3d(2), nn.Flatten(), nn.Linear(4, 3),
        ), VOLUMES,
    ),
    "nested, with names": (
        lambda: seeded(lambda: nn.Sequential(
            nn.Sequential(nn.Flatten(), nn.Linear(6, 4)), nn.Sequential(), nn.Sigmoid(),
            nn.Identity(), nn.Linear(4, 3),
        )), FLAT,
    ),
    "leaky": (lambda: nn.Sequential(Recurrent(4, 5, leak=0.3), nn.Linear(5, 3)), STEPS),
    "leaky, both ways": (
        lambda: nn.Sequential(
            Recurrent(4, 5, bidirectional=True, sequence=True, activation=nn.ReLU),
            nn.LayerNorm(10), Recurrent(10, 3), nn.Linear(3, 3),
        ), RAGGED,
    ),
    "paper": (lambda: nn.Sequential(Recurrent.paper(4, 5), nn.Linear(5, 3)), STEPS),
    "diagonal": (
        lambda: nn.Sequential(
            Recurrent.diagonal(4, 6, states=3, sequence=True),
            Recurrent.diagonal(6, 5, loss_at="last"), nn.Linear(5, 3),
        ), RAGGED,
    ),
    "lru of tokens": (word("lru:6", (5,), 7), TOKENS),
    "nn.RNN": (
        lambda: nn.Sequential(
            nn.RNN(4, 5, 2, nonlinearity="relu", batch_first=True, bidirectional=True, dropout=0.1),
            nn.Linear(10, 3),
        ), STEPS,
    ),
    "nn.RNN without bias": (
        lambda: nn.Sequential(nn.RNN(7, 5, bias=False, batch_first=True), nn.Linear(5, 3)), TOKENS,
    ),
    "residual": (lambda: resnet.resnet(18, (3, 8, 8), 3, small=True, width=2), IMAGES),
    "vgg": (word("vgg:8", (3, 16, 16)), (IMAGES[0].repeat(1, 1, 2, 2), IMAGES[1])),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_outputs_are_the_same_after_loading(name, tmp_path, unwatched):
    make, data = MODELS[name]
    model = seeded(make)
    with torch.no_grad():
        if any(isinstance(m, nn.LazyLinear) for m in model.modules()):
            model(data[0])
    run = tpsgd.fit(model, data, epochs=1, batch_size=16)
    before = tpsgd.Trained(model, run)
    run.save(tmp_path, classes=list("abc"), overwrite=True)
    random = torch.get_rng_state()
    trained = tpsgd.load(tmp_path)
    assert torch.equal(torch.get_rng_state(), random)
    assert same(state(trained.model), state(model))
    assert repr(trained.model) == repr(model)
    assert torch.equal(trained.outputs(data[0]), before.outputs(data[0]))
    assert trained.evaluate(data) == tpsgd.evaluate(model, data)
    assert trained.run == run and trained.run.model is trained.model
    assert trained.classes == ("a", "b", "c") and not trained.model.training
    assert all(p.requires_grad for p in trained.model.parameters())


def test_every_torch_type_on_the_list_describes_itself():
    values = {
        "Upsample": {"scale_factor": 2}, "Unflatten": {"dim": 1, "unflattened_size": (2, 3)},
        "GroupNorm": {"num_groups": 2, "num_channels": 4},
        "Threshold": {"threshold": 1, "value": 2},
    }  # fmt: skip
    numbers = {"num_layers": 1, "normalized_shape": 3, "size": 2, "value": 1}
    for name in modules.TORCH:
        needed = [k for k, v in modules._defaults(name).items() if v is None]
        optional = {"stride", "divisor_override", "padding_idx", "max_norm", "dim", "bias", "eps"}
        arguments = {k: numbers.get(k, 2) for k in needed if k not in optional}
        module = getattr(nn, name)(**values.get(name, arguments))
        copy = modules.build(json.loads(json.dumps(modules.describe(module))))
        assert repr(copy) == repr(module)
        assert state(copy).keys() == state(module).keys()


def test_other_number_formats_memory_formats_and_frozen_parameters_come_back(tmp_path):
    x, y = IMAGES
    model = seeded(
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
    )
    model.double().to(memory_format=torch.channels_last)
    run = tpsgd.fit(model, (x.double(), y), epochs=1)
    model[0].weight.requires_grad_(False)
    run.save(tmp_path)
    loaded = tpsgd.load(tmp_path).model
    assert loaded[0].weight.dtype is torch.float64
    assert loaded[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert [p.requires_grad for p in loaded.parameters()] == [False, True, True, True]
    assert same(state(loaded), state(model))


def test_a_loaded_model_learns_on_as_the_saved_one_would(tmp_path):
    model = seeded(word("mlp:8", (6,)))
    run = tpsgd.fit(model, FLAT, epochs=1)
    run.save(tmp_path)
    loaded = tpsgd.load(tmp_path).model
    tpsgd.fit(model, FLAT, epochs=2)
    tpsgd.fit(loaded, FLAT, epochs=2)
    assert same(state(loaded), state(model))


@pytest.mark.parametrize(
    "train", [tpsgd.fit_backprop, tpsgd.peers.fit_dladmm, tpsgd.peers.fit_zorb]
)
def test_every_way_to_train_can_save(train, tmp_path):
    model = seeded(word("mlp:8", (6,)))
    run = train(model, FLAT)
    run.save(tmp_path)
    assert same(state(tpsgd.load(tmp_path).model), state(model))


def test_stacked_restarts_save_their_own_models(tmp_path):
    many = tpsgd.fit_many(word("mlp:8", (6,)), FLAT, restarts=2, epochs=1, stacked=True)
    for i, (model, run) in enumerate(many):
        run.save(tmp_path / str(i))
        assert same(state(tpsgd.load(tmp_path / str(i)).model), state(model))


# ---- models that cannot be described -------------------------------------------------------------

OWN = """
import torch
from torch import nn

class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.same = self.inner
        self.register_buffer("rows", torch.arange(3.0), persistent=False)

    def forward(self, x):
        return self.same(torch.tanh(self.inner(x))) + self.rows[1]

def net():
    return nn.Sequential(Twice(), nn.Linear(6, 3))

def other():
    return nn.Linear(6, 3)
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(OWN)
    model = tpsgd.common.files.load_function("own.py:net")()
    return tpsgd.fit_backprop(model, FLAT, epochs=1)


def test_a_model_of_your_own_file_asks_for_it_and_shares_parameters_again(own):
    with pytest.raises(TpsgdError, match=r"Twice \(module '0'\).*factory='FILE.py:FUNCTION'"):
        own.save("model")
    assert not Path("model").exists()
    own.save("model", factory="own.py:net")
    with pytest.raises(TpsgdError, match=r"made by own.py:net: name that file"):
        tpsgd.load("model")
    loaded = tpsgd.load("model", factory="own.py:net").model
    assert torch.equal(loaded(FLAT[0]), own.model(FLAT[0]))
    assert loaded[0].inner.weight is loaded[0].same.weight


def test_a_file_that_changed_is_refused_before_it_is_run(own):
    own.save("model", factory="own.py:net")
    Path("own.py").write_text(OWN + "\nraise SystemExit('this ran')\n")
    with pytest.raises(TpsgdError, match="the file has changed, or is another one"):
        tpsgd.load("model", factory="own.py:net")
    Path("own.py").write_text(OWN)
    with pytest.raises(TpsgdError, match="is not what the model in model was made by"):
        tpsgd.load("model", factory="own.py:other")
    with pytest.raises(TpsgdError, match=r"there is no file gone.py"):
        tpsgd.load("model", factory="gone.py:net")
    for factory in ("own.py", "mlp:8"):
        with pytest.raises(TpsgdError, match=r"must be 'FILE.py:FUNCTION'"):
            tpsgd.load("model", factory=factory)


def test_a_function_that_makes_another_model_than_the_one_trained(own):
    own.save("model", factory="own.py:other")
    with pytest.raises(TpsgdError, match="not those of the model that it describes"):
        tpsgd.load("model", factory="own.py:other")


def test_a_model_that_needs_no_file_takes_none(tmp_path):
    tpsgd.fit(nn.Sequential(nn.Linear(6, 3)), FLAT, epochs=1).save(tmp_path)
    with pytest.raises(TpsgdError, match="needs no file"):
        tpsgd.load(tmp_path, factory="own.py:net")


class Mine(nn.Linear):
    pass


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: nn.Sequential(Mine(6, 3)), "Mine"),
        (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 3)), "Parametrized"),
        (lambda: nn.Sequential(nn.utils.spectral_norm(nn.Linear(6, 3))), "hooks"),
        (lambda: nn.TransformerEncoderLayer(6, 2), "TransformerEncoderLayer"),
    ],
)  # fmt: skip
def test_what_cannot_be_described_is_named(make, said):
    with pytest.raises(TpsgdError, match=said):
        modules.describe(make())


def test_shared_parameters_are_refused_and_shared_activations_are_not():
    layer, act = nn.Linear(6, 6), nn.Tanh()
    with pytest.raises(TpsgdError, match=r"'0.weight' and '2.weight' are one shared parameter"):
        modules.describe(nn.Sequential(layer, act, layer))
    modules.describe(nn.Sequential(layer, act, nn.Linear(6, 3), act))


@pytest.mark.parametrize("last", [(), (nn.Softmax(1),), (nn.Dropout(0.1), nn.LogSoftmax(1))])
def test_names_for_other_outputs_than_the_model_has_are_refused(tmp_path, last):
    run = tpsgd.Run("x", 0, {}, model=nn.Sequential(nn.Linear(6, 10), *last))
    with pytest.raises(TpsgdError, match="tells 10 classes apart, but classes has 2 names"):
        run.save(tmp_path / "m", classes=["a", "b"])
    assert not (tmp_path / "m").exists()
    run.save(tmp_path / "m", classes=[*"abcdefghij"])
    tpsgd.Run("x", 0, {}, model=nn.Linear(6, 1)).save(tmp_path / "n", classes=["no", "yes"])


@pytest.mark.parametrize("folder", ["", 5, None])
def test_what_names_no_folder_is_refused(tmp_path, monkeypatch, folder):
    monkeypatch.chdir(tmp_path)
    run = tpsgd.Run("x", 0, {}, model=nn.Linear(6, 2))
    for call in (run.save, tpsgd.load, tpsgd.Checkpoint):
        with pytest.raises(TpsgdError, match=f"got {folder!r}"):
            call(folder)
    assert not list(tmp_path.iterdir())
