"""Loading: splits, thinning, what a Data holds, names and places."""

import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tpsgd import data
from tpsgd.data.split import hold_out, stratified
from tpsgd.errors import TpsgdError

IMAGES = ["digits", "mnist", "fashion-mnist", "cifar10", "imagenette"]
BUILT_IN = [
    *IMAGES,
    *("seq-mnist-rows", "seq-mnist-pixels", "eeg", "eeg-rows", "eeg-tumour", "eeg-tumour-rows"),
    *("tweets", "tweets-holdout", "tweets-vectors", "tweets-vectors-holdout", "ucf101"),
]


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """No data anywhere: an empty cache and no TPSGD_DATA."""
    monkeypatch.delenv("TPSGD_DATA", raising=False)
    monkeypatch.setenv("TPSGD_CACHE", str(tmp_path / "cache"))
    return tmp_path


def test_digits():
    digits = data.load("digits")
    x, y = digits.train
    assert (x.dtype, y.dtype) == (torch.float32, torch.int64)
    assert x.shape == (1438, 1, 8, 8) and digits.test[0].shape == (359, 1, 8, 8)
    assert x.min() == 0 and x.max() == 1 and x.is_contiguous()
    assert digits.classes == tuple("0123456789") and digits.shape == (1, 8, 8)
    assert digits.note == "20 % held out as test, stratified, seed 0"
    assert "tensor" not in repr(digits)


def test_the_digits_test_part_is_the_same_for_every_seed():
    one, two = data.load("digits", seed=1), data.load("digits", seed=2)
    assert torch.equal(one.test[0], two.test[0]) and torch.equal(one.train[0], two.train[0])


def test_max_train_is_seeded_stratified_and_leaves_the_test_part_alone():
    one, again, other = (data.load("digits", max_train=100, seed=s) for s in (1, 1, 2))
    assert torch.equal(one.train[0], again.train[0])
    assert not torch.equal(one.train[0], other.train[0])
    assert torch.equal(one.test[0], other.test[0])
    assert one.train[1].bincount().tolist() == pytest.approx([10] * 10, abs=1)
    assert "100 of 1438 training samples, stratified, seed 1" in one.note


def test_max_train_beyond_the_data_keeps_it_all():
    assert data.load("digits", max_train=10**6).note == data.load("digits").note


@pytest.mark.parametrize("wrong", [{"seed": -1}, {"max_train": 0}, {"max_train": -5}])
def test_wrong_seed_and_max_train(wrong):
    with pytest.raises(TpsgdError, match="seed is 0 or more, max_train 1 or more"):
        data.load("digits", **wrong)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=60), st.data(), st.integers(0, 9))
def test_stratified_keeps_shares(labels, draw, seed):
    y = np.array(labels)
    k = draw.draw(st.integers(0, len(y)))
    chosen = stratified(y, k, seed)
    assert chosen.sum() == k
    if k >= len(np.unique(y)):
        assert set(y[chosen]) == set(y)
    share, n = np.bincount(y[chosen], minlength=6), np.bincount(y, minlength=6)
    assert (np.abs(share - n * k / len(y)) <= len(np.unique(y)) + 1).all()
    assert (chosen == stratified(y, k, seed)).all()


@given(st.lists(st.integers(0, 3), min_size=20, max_size=80), st.integers(0, 9))
def test_hold_out_never_takes_a_whole_class(labels, seed):
    y = np.array(labels)
    train, _ = hold_out("here", y, seed)
    assert (~train).sum() == round(0.2 * len(y))
    assert set(y[train]) == set(y)


def test_too_few_to_hold_out():
    with pytest.raises(TpsgdError, match="3 samples are too few to hold 20 % out"):
        hold_out("here", np.arange(3), 0)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("mnits", "did you mean 'mnist'"),
        ("MNIST", "did you mean 'mnist'"),
        ("fashion", "did you mean 'fashion-mnist'"),
        ("cifar-10", "did you mean 'cifar10'"),
        ("elephants", "built in are digits, mnist"),
        ("", "built in are digits, mnist"),
    ],
)
@pytest.mark.parametrize("ask", [data.load, data.fetch, data.path])
def test_unknown_names(ask, name, hint):
    with pytest.raises(TpsgdError, match=hint):
        ask(name)


def test_registry_is_complete():
    assert list(data.DATASETS) == BUILT_IN
    for entry in data.DATASETS.values():
        assert entry.about and entry.licence and entry.citation
        assert len(set(entry.classes)) == len(entry.classes) and (entry.classes or entry.unnamed)
        assert len(entry.classes) == 10 or entry.name not in IMAGES
        assert bool(entry.by_hand) == bool(entry.files and not entry.downloads)
        assert len(entry.urls) == len(entry.downloads)
        assert all(url.startswith("http") for url in entry.urls)
        assert all(len(check) == len("md5:") + 32 for _, check in entry.downloads)


def test_describe_and_path_without_data(bare):
    rows = data.describe()
    assert [row.name for row in rows] == BUILT_IN
    assert rows[0] == ("digits", "1438 + 359", "1 x 8 x 8", "10", "comes with scikit-learn")
    assert rows[1].where == "not here: tpsgd data fetch mnist"
    assert all(isinstance(cell, str) for row in rows for cell in row)
    assert data.path("mnist") is None and data.path("digits") is not None


def test_digits_without_scikit_learn(bare, monkeypatch):
    monkeypatch.setattr("tpsgd.data.folders.find_spec", lambda name: None)
    assert data.path("digits") is None
    assert data.describe()[0].where == "not here: pip install scikit-learn"
    with pytest.raises(TpsgdError, match="pip install scikit-learn"):
        data.load("digits")


def test_data_folder_that_is_not_there(bare, monkeypatch):
    monkeypatch.setenv("TPSGD_DATA", str(bare / "nowhere"))
    with pytest.raises(TpsgdError, match="which is no folder; make it or unset it"):
        data.load("mnist")


def test_data_folder_that_lacks_files(bare, monkeypatch):
    (bare / "mnist").mkdir()
    (bare / "mnist" / "train-images-idx3-ubyte.gz").touch()
    monkeypatch.setenv("TPSGD_DATA", str(bare))
    assert data.path("mnist") is None
    with pytest.raises(TpsgdError, match=r"mnist lacks train-labels-idx1-ubyte.gz, t10k"):
        data.load("mnist")


ALONE = """
import sys

class Nothing_else:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[1:]:
            raise ModuleNotFoundError(f"there is no {name}")

sys.meta_path.insert(0, Nothing_else())
import tpsgd.adapt, tpsgd.data
for module in (tpsgd, tpsgd.adapt, tpsgd.data):
    for name in module.__all__:
        getattr(module, name)
print("all there")
"""


def test_importing_needs_torch_and_numpy_alone():
    """Whatever torch may import where it is there: it is not there, and every name is."""
    images, files = ("PIL", "matplotlib"), ("pooch", "requests", "safetensors", "onnx")
    others = ("onnxruntime", "optuna", "rich", "scipy", "sklearn", "tqdm", "typer")
    call = [sys.executable, "-c", ALONE, *images, *files, *others]
    done = subprocess.run(call, capture_output=True, text=True)
    assert done.stdout.strip() == "all there", done.stderr


def test_imagenettes_classes_have_names(bare, monkeypatch):
    folder = bare / "imagenette2-160"
    numbers = [f"n{i:08}" for i in (*range(1440764, 1440773), 2102040)]
    for place in [folder / part / n for part in ("train", "val") for n in numbers]:
        place.mkdir(parents=True)
        Image.new("RGB", (200, 160), "red").save(place / "one.png")
    monkeypatch.setenv("TPSGD_DATA", str(bare))
    found = data.load("imagenette")
    assert found.shape == (3, 160, 160) and len(found.train[1]) == len(found.test[1]) == 10
    assert (found.classes[0], found.classes[-1]) == ("tench", "parachute")
    for part in ("train", "val"):
        shutil.rmtree(folder / part / numbers[-1])
    with pytest.raises(TpsgdError, match="has 9 classes, Imagenette has 10"):
        data.load("imagenette")


@pytest.mark.real_data("mnist")
def test_real_mnist(data_root):
    mnist = data.load("mnist")
    assert data.path("mnist") == data_root / "mnist"
    assert mnist.train[0].shape == (60_000, 1, 28, 28)
    assert mnist.train[1].bincount().tolist()[:3] == [5923, 6742, 5958]
    assert mnist.test[1][:5].tolist() == [7, 2, 1, 0, 4]
    assert mnist.train[0].mean().item() == pytest.approx(0.1307, abs=1e-4)
    assert mnist.train[0].std().item() == pytest.approx(0.3081, abs=1e-4)


@pytest.mark.real_data("cifar-10-batches-bin")
def test_real_cifar10():
    cifar = data.load("cifar10", max_train=5000)
    x, y = cifar.train
    assert x.shape == (5000, 3, 32, 32) and y.bincount().tolist() == [500] * 10
    assert cifar.test[1][:4].tolist() == [3, 8, 8, 0]
    assert cifar.test[0].mean((0, 2, 3)).tolist() == pytest.approx([0.494, 0.485, 0.450], abs=1e-3)


@pytest.mark.real_data("eeg")
def test_real_table(data_root):
    eeg = data.load(str(data_root / "eeg" / "data.csv"), max_train=100)
    assert eeg.shape == (178,) and eeg.classes == tuple("12345")
    assert len(eeg.test[1]) == 2300 and eeg.train[1].bincount().tolist() == [20] * 5


@pytest.mark.real_data("imagenette2-160")
def test_real_image_folder(data_root, tmp_path):
    for part in ("train", "val"):
        for folder in sorted((data_root / "imagenette2-160" / part).iterdir())[:3]:
            (tmp_path / part / folder.name).mkdir(parents=True)
            for file in sorted(folder.iterdir())[:4]:
                (tmp_path / part / folder.name / file.name).symlink_to(file)
    few = data.load(f"{tmp_path}@32")
    assert few.train[0].shape == few.test[0].shape == (12, 3, 32, 32)
    assert few.classes == ("n01440764", "n02102040", "n02979186")
    assert 0.2 < few.train[0].mean() < 0.8
