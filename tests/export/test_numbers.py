"""Nets that learn real numbers, and models of a class of one's own, exported as C."""

import re
import warnings
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from helpers import with_full
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import tpsgd
from tpsgd import rules
from tpsgd.common.errors import TpsgdError
from tpsgd_export.read_model import read_model
from tpsgd_export.records import fingerprint
from tpsgd_export.to_c.check import distances, samples
from tpsgd_export.to_c.compiled import CompiledNet, compiler
from tpsgd_export.to_c.memory import layout
from tpsgd_export.to_c.source import sources

pytestmark = [
    pytest.mark.skipif(compiler() is None, reason="no C compiler"),
    pytest.mark.usefixtures("unwatched"),
]
X = torch.randn(120, 12, generator=torch.Generator().manual_seed(2))
Y = torch.stack([150 + 70 * X[:, 0] - 30 * X[:, 1] ** 2, 0.01 * X[:, 2] - 3], 1)


def mlp(outputs: int = 2) -> nn.Module:
    torch.manual_seed(0)
    sizes = [nn.Linear(a, b) for a, b in pairwise((12, 8, 6, outputs))]
    return nn.Sequential(sizes[0], nn.LeakyReLU(), sizes[1], nn.Tanh(), sizes[2])


def cnn() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Unflatten(1, (1, 3, 4)), nn.Conv2d(1, 4, 2), nn.ReLU(), nn.MaxPool2d((1, 2), 1),
        nn.Flatten(), nn.Linear(16, 2),
    )  # fmt: skip


def without_bias() -> nn.Module:
    model = mlp()
    model[4] = nn.Linear(6, 2, bias=False)
    return model


NETS = {"mlp": mlp, "cnn": cnn, "no bias": without_bias}
CASES = [  # net, rule, loss, optimizer, batch, order
    ("mlp", rules.default(), None, "sgd", 1, tpsgd.simultaneous),
    ("mlp", rules.tpsgd_l2(), None, "sgd", 1, tpsgd.simultaneous),
    ("cnn", rules.tpsgd_l2(), None, "adam", 3, tpsgd.sequential),
    ("cnn", rules.readout(scale=1.0), "huber", "sgd", 2, tpsgd.sequential),
    ("mlp", rules.readout(), "l1", "momentum", 2, tpsgd.simultaneous),
    ("mlp", rules.tpsgd_l1(), "huber", "sgd", 2, tpsgd.simultaneous),
    ("no bias", rules.drtp(), "l1", "sgd", 2, tpsgd.sequential),
    ("no bias", rules.frozen(), None, "adam", 1, tpsgd.simultaneous),
    ("cnn", rules.default(), "mse", "adam", 4, tpsgd.simultaneous),
]


def recipe_of(model, rule, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return read_model(model, rule, (12,), samples=X, labels=Y, **options)


@pytest.mark.cover(1)
@pytest.mark.parametrize("case", with_full(CASES, CASES[5:]))
def test_a_net_learns_numbers_as_fit_does(case):
    net, rule, loss, optimizer, batch, order = case
    model = NETS[net]()
    recipe = recipe_of(model, rule, loss=loss, optimizer=optimizer, batch=batch)
    apart = distances(model, recipe, sources(recipe), order, 20, rule=rule, loss=loss)
    assert apart.equal and apart.ours < 2e-6 * (1 + apart.largest), apart


MUTANTS = {
    "the deviation": ("- t.mean[c]) / t.deviation[c]", "- t.mean[c])"),
    "the mean": ("(t.numbers[c] - t.mean[c])", "(t.numbers[c])"),
    "the first sample's label": ("labels + n * net->classes;", "labels;"),
    "one number of the projected label": ("c < truth.count; c++", "c < 1; c++"),
    "the bound of huber": ("rest > 1.0f ? 1.0f", "rest > 2.0f ? 2.0f"),
}  # fmt: skip


@pytest.mark.parametrize("mutant", with_full(MUTANTS, list(MUTANTS)[1:4]))
def test_a_mutant_does_not_pass(mutant):
    right, wrong = MUTANTS[mutant]
    options = {"loss": "huber"} if "huber" in mutant else {}
    model, rule = mlp(), rules.tpsgd_l2()
    recipe = recipe_of(model, rule, batch=2, **options)
    texts = sources(recipe)
    assert right in texts["tpsgd.h"]
    texts["tpsgd.h"] = texts["tpsgd.h"].replace(right, wrong)
    assert not distances(model, recipe, texts, tpsgd.simultaneous, rule=rule, **options).equal


def exported(folder: Path, model: nn.Module, rule=None, **options) -> CompiledNet:
    options = {"samples": X, "labels": Y, "shape": (12,), **options}
    tpsgd.export.c(model, folder, rule=rule or rules.tpsgd_l2(), **options)
    return CompiledNet(folder)


@pytest.mark.parametrize("net, loss", [("mlp", "mse"), ("cnn", "l1")])
def test_the_device_predicts_what_fit_predicts(tmp_path, net, loss):
    """`fit` standardises by itself here, and both have the same labels in their order."""
    model = NETS[net]()
    device = exported(tmp_path, model, batch=4, loss=loss)
    batches = DataLoader(TensorDataset(X, Y), batch_size=4)
    options = {"lr": 0.02, "epochs": 5, "optimizer": tpsgd.sgd, "order": tpsgd.simultaneous}
    tpsgd.fit(model, batches, rule="tpsgd-l2", loss=loss, progress=False, **options)
    for _ in range(5):
        for x, y in zip(X.split(4), Y.split(4), strict=True):
            device.step(x, y, 0.02)
    ours = torch.stack([device.forward(x) for x in X])
    with torch.no_grad():
        assert torch.allclose((ours - model(X)) / Y.std(0), torch.zeros(()), atol=1e-4)
    assert tpsgd.evaluate(model, (X, Y)) > 0.1


def test_a_record_has_the_units_of_the_labels(tmp_path):
    model = mlp()
    device = exported(tmp_path, model)
    for x, y in zip(X, Y, strict=True):
        device.step(x, y, 0.01)
    record, numbers = device.save(), torch.stack([device.forward(x) for x in X])
    assert tpsgd.export.read_weights(model, record) == 2
    with torch.no_grad():
        assert torch.allclose(model(X), numbers, rtol=1e-5)
    again = CompiledNet(tmp_path)
    again.load(record)
    assert torch.equal(again.forward(X[0]), device.forward(X[0]))
    trained = exported(tmp_path, model, overwrite=True)  # its outputs have the units already
    assert torch.allclose(trained.forward(X[0]), numbers[0], rtol=1e-5)
    of_classes = read_model(mlp(), rules.tpsgd_l2(), (12,))
    assert fingerprint(of_classes) != fingerprint(recipe_of(mlp(), rules.tpsgd_l2()))


def test_a_bad_label_changes_no_weight(tmp_path):
    device = exported(tmp_path, mlp(), optimizer="adam")
    before = bytes(device.state)
    for number in (float("nan"), float("inf"), 1e30):
        with pytest.raises(TpsgdError, match="BAD_LABEL"):
            device.step(X[0], [1.0, number], 0.01)
    with pytest.raises(TpsgdError, match="2 numbers for each of 1 samples, got 1"):
        device.step(X[0], [1.0], 0.01)
    assert bytes(device.state) == before


def test_numbers_cost_two_floats_each_and_are_in_the_header(tmp_path):
    rule = rules.tpsgd_l2()
    ours, of_classes = recipe_of(mlp(), rule), read_model(mlp(), rule, (12,))
    assert layout(ours).ram_bytes - layout(of_classes).ram_bytes == 16
    inputs = {"columns": [f"c{i}" for i in range(12)], "targets": ["price", "area"]}
    device = exported(tmp_path, mlp(), inputs=inputs)
    assert device.ram == layout(ours).ram_bytes and device.capacity == device.classes == 2
    header = (tmp_path / "net.h").read_text()
    assert f"number 0: mean {Y[:, 0].mean():.4g}" in header and "1 area" in header
    assert "net_add_class" not in header


def test_the_check_has_labels_like_those_of_the_model():
    recipe = recipe_of(mlp(), rules.tpsgd_l2())
    y = samples(recipe, 500)[1]
    assert torch.allclose(y.mean(0), Y.mean(0), rtol=0.1)
    assert torch.allclose(y.std(0), Y.std(0), rtol=0.1)


REFUSED = {
    "integers": ({"numbers": "int8"}, "int8 learns classes"),
    "without samples": ({"samples": None}, "from samples= and labels= together"),
    "another count": ({"labels": Y[:, :1]}, "1 numbers for each sample, and the last layer 2"),
    "nan": ({"labels": Y * float("nan")}, "not finite"),
    "pixels": ({"labels": Y[:, None].expand(120, 3, 2)}, "labels of steps or pixels"),
    "classes of steps": ({"labels": Y.long()}, "labels of steps or pixels"),
    "spare": ({"spare": 1}, "no spare classes"),
    "bce": ({"labels": None, "loss": "l1"}, "l1 is for labels that are numbers"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_numbers_cannot_have_is_named(case, tmp_path):
    options, sentence = REFUSED[case]
    with pytest.raises(TpsgdError, match=sentence) as caught:
        exported(tmp_path, mlp(), **options)
    assert "\n" not in str(caught.value) and not list(tmp_path.iterdir())


def test_other_exports_refuse_numbers(tmp_path):
    with pytest.raises(TpsgdError, match="a recurrent net is exported for classes"):
        model = nn.Sequential(tpsgd.Recurrent(3, 4), nn.Linear(4, 2))
        tpsgd.export.c(model, tmp_path, shape=(4, 3), samples=X.view(120, 4, 3), labels=Y)
    with pytest.raises(TpsgdError, match=r"huber learns numbers, and .* ONNX"):
        tpsgd.export.onnx(mlp(), tmp_path / "step.onnx", shape=(12,), loss="huber")
    data = tpsgd.data.Data("d", (X, Y), (X, Y), (), (12,), "", reading={"targets": ["a", "b"]})
    with pytest.raises(TpsgdError, match="a page learns a class"):
        tpsgd.export.page(mlp(), data, tmp_path / "page.html")


def test_labels_that_float32_cannot_tell_apart_warn():
    with pytest.warns(UserWarning, match="subtract the same constant from all labels"):
        read_model(mlp(1), rules.frozen(), (12,), samples=X, labels=1e8 + X[:, 0].double())


# ---- models of a class -----------------------------------------------------------------------


class LeNet(nn.Module):
    """Two convolutions and two dense layers, whose maps become rows in one of several spellings."""

    def __init__(self, spelling: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv1, self.conv2 = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 6, 3)
        self.fc1, self.fc2, self.spelling = nn.Linear(6, 12), nn.Linear(12, 5), spelling

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        if self.spelling == "flatten":
            x = torch.flatten(x, 1)
        else:
            x = x.view(-1, 6) if self.spelling == "view" else x.view(x.size(0), -1)
        return self.fc2(torch.tanh(self.fc1(x)))

    def sequential(self) -> nn.Sequential:
        pool = nn.MaxPool2d(2)
        return nn.Sequential(
            self.conv1, nn.ReLU(), pool, self.conv2, nn.ReLU(), pool, nn.Flatten(), self.fc1,
            nn.Tanh(), self.fc2,
        )  # fmt: skip


@pytest.mark.parametrize("spelling", with_full(["view", "flatten", "size"], ["flatten", "size"]))
def test_a_class_is_exported_as_the_same_sequential(spelling, tmp_path):
    model, x = LeNet(spelling), torch.randn(1, 8, 8)
    nets = []
    for name, each in (("a", model), ("b", model.sequential())):
        exported = tpsgd.export.c(each, tmp_path / name, shape=(1, 8, 8))
        assert "run beside tpsgd.fit" in exported.checked
        nets.append(CompiledNet(tmp_path / name))
        assert nets[-1].step(x, [3], 0.01).shape == (4,)
    assert torch.equal(nets[0].weights, nets[1].weights)
    tpsgd.export.read_weights(model, nets[0].save())
    with torch.no_grad():
        assert torch.allclose(model(x[None])[0], nets[0].forward(x), atol=1e-5)


class Dense(nn.Module):
    """Three dense layers, as the classes below connect them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)


class HalfResidual(Dense):
    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.a(x))
        return self.c(F.relu(x * 0.5 + self.b(x)))


class InputAgain(Dense):
    def forward(self, x: Tensor) -> Tensor:
        return self.c(F.relu(self.b(F.relu(self.a(x))) + x))


class TwoInputs(Dense):
    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        return self.c(F.relu(self.b(F.relu(self.a(x))) + z))


class Shared(Dense):
    def forward(self, x: Tensor) -> Tensor:
        return self.c(F.relu(self.a(F.relu(self.a(x)))))


class Scaled(Dense):
    def forward(self, x: Tensor) -> Tensor:
        return self.c(F.relu(self.a(x)) * 2)


class Pixels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv1d(1, 3, 3), nn.Conv1d(3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.conv(x[:, None])))


CLASSES = {
    "a scaled shortcut": (HalfResidual, r"block \d \(.*mul is not exported inside a block"),
    "the input again": (InputAgain, r"block \d \(.*reads more than the activation"),
    "two inputs": (TwoInputs, r"block \d \(.*reads more than the activation"),
    "shared weights": (Shared, r"block 1 \(a: 2 x Linear\): Linear is called twice"),
    "a product": (Scaled, r"block 1 \(a: Linear \+ ReLU \+ mul\): mul is not exported"),
    "pixels": (Pixels, r"the last block \(head: Conv1d.*steps or pixels"),
}


@pytest.mark.parametrize("case", CLASSES)
def test_a_block_of_a_class_that_cannot_be_exported_is_named(case, tmp_path):
    kind, sentence = CLASSES[case]
    with pytest.raises(TpsgdError) as caught:
        tpsgd.export.c(kind(), tmp_path, shape=(6,))
    assert re.search(sentence, str(caught.value)) and "\n" not in str(caught.value)


# ---- the command line ------------------------------------------------------------------------


def test_the_command_line_exports_numbers(tmp_path, monkeypatch, says):
    monkeypatch.chdir(tmp_path)
    rows = [",".join(f"{v:.6g}" for v in (*x[:4], *y)) for x, y in zip(X, Y, strict=True)]
    Path("t.csv").write_text("\n".join(["a,b,c,d,price,area", *rows]))
    data = ("--data", "t.csv", "--task", "regression", "--label", "price,area")
    words = ("export", "c", "--model", "mlp:8", "--rule", "tpsgd-l2")
    assert says(*words, *data, "--out", "net")[0] == 0
    header = Path("net/net.h").read_text()
    assert "0 price, 1 area" in header and "x[3] d: " in header
    for other in ("onnx --out a.onnx", "page --out a.html"):
        status, _, error = says("export", *other.split(), "--model", "mlp:8", *data)
        assert status == 2 and error.count("\n") == 1 and "learns" in error
    run = ("train", "--model", "mlp:8", "--rule", "tpsgd-l2", "--epochs", "1", "--save", "m")
    assert says(*run, *data)[0] == 0
    assert says("export", "c", "--model", "m", "--data", "t.csv", "--out", "saved")[0] == 0
    saved, device = tpsgd.load("m"), CompiledNet("saved")
    expected = saved.outputs(saved.scaled(X[:1, :4]))[0]
    assert torch.allclose(device.forward(device.scale(X[0, :4])), expected, rtol=1e-4)
    assert "saved one has its own" in says("export", "c", "--model", "m", *data, "--out", "n")[2]
    assert "name its data" in says("export", "c", "--model", "m", "--out", "n")[2]
