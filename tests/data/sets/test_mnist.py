"""MNIST: idx files are read right when complete and refused when not; as images and sequences."""

import gzip
from dataclasses import replace

import numpy as np
import pytest
import torch

from tpsgd import TpsgdError, data
from tpsgd.data.registry import DATASETS
from tpsgd.data.sets.mnist import FILES, read_idx

RNG = np.random.default_rng(0)
IMAGES, LABELS = "train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"


def idx(array, magic=None, dims=None):
    """The bytes of an idx file; magic and dims may be wrong on purpose."""
    array = np.asarray(array, np.uint8)
    head = bytes((0, 0, 8, array.ndim)) if magic is None else magic
    return head + b"".join(n.to_bytes(4, "big") for n in dims or array.shape) + array.tobytes()


@pytest.fixture
def mnist(tmp_path, monkeypatch):
    """A tiny MNIST of 20 + 10 in TPSGD_DATA; yields its folder."""
    small = replace(DATASETS["mnist"], train=20, test=10)
    monkeypatch.setitem(DATASETS, "mnist", small)
    monkeypatch.setenv("TPSGD_DATA", str(tmp_path))
    (folder := tmp_path / "mnist").mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (30, 28, 28))
    for part, rows in (("train", slice(20)), ("t10k", slice(20, 30))):
        images, labels = pixels[rows], np.arange(30)[rows] % 10
        (folder / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(images)))
        (folder / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(labels)))
    return folder


def test_mnist_is_read_from_idx_files(mnist):
    loaded = data.load("mnist")
    expected = np.random.default_rng(0).integers(0, 256, (30, 28, 28))
    assert torch.equal(
        loaded.train[0], torch.tensor(expected[:20, None], dtype=torch.float32) / 255
    )
    assert torch.equal(loaded.test[0], torch.tensor(expected[20:, None], dtype=torch.float32) / 255)
    assert loaded.train[1].tolist() == [*range(10)] * 2 and loaded.shape == (1, 28, 28)
    assert loaded.note == "the publisher's own split"


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (IMAGES, b"", "not a complete idx file of shape .20, 28, 28."),
        (IMAGES, b"these are no gzip bytes", "cannot be read"),
        (IMAGES, gzip.compress(idx(np.zeros((20, 28, 28))))[:-30], "cannot be read"),
        (IMAGES, gzip.compress(b"\0\0"), "not a complete idx file"),
        (IMAGES, gzip.compress(idx(np.zeros(20))), "not a complete idx file"),
        (
            LABELS,
            gzip.compress(idx(np.zeros(20), b"\0\0\x0d\1")),
            "not a complete idx file of shape .20,.",
        ),
        (IMAGES, gzip.compress(idx(np.zeros((20, 28, 27)))), "not a complete idx file"),
        (LABELS, gzip.compress(idx(np.zeros(19))), "not a complete idx file"),
        (LABELS, gzip.compress(idx(np.zeros(19), dims=(20,))), "not a complete idx file"),
        (LABELS, gzip.compress(idx(np.zeros(21), dims=(20,))), "not a complete idx file"),
        (
            LABELS,
            gzip.compress(idx(np.full(20, 10))),
            "the label 10, which is not a class of mnist",
        ),
    ],
    ids=range(11),
)
def test_idx_files_that_are_wrong_are_refused(mnist, file, content, message):
    (mnist / file).write_bytes(content)
    with pytest.raises(TpsgdError, match=message) as error:
        data.load("mnist")
    assert str(mnist / file) in str(error.value) and "\n" not in str(error.value)


def test_idx_file_with_a_flipped_byte_is_refused(mnist):
    content = bytearray((mnist / IMAGES).read_bytes())
    content[len(content) // 2] ^= 0xFF
    (mnist / IMAGES).write_bytes(content)
    with pytest.raises(TpsgdError, match="cannot be read"):
        data.load("mnist")


def test_missing_idx_file_is_named(tmp_path):
    with pytest.raises(TpsgdError, match=r"none.gz cannot be read .*; fetch it again"):
        read_idx(tmp_path / "none.gz", (1,))


@pytest.fixture
def images(root, monkeypatch):
    """A tiny MNIST of 4 + 2 samples; yields the four images."""
    for name in ("seq-mnist-rows", "seq-mnist-pixels"):
        entry = replace(DATASETS[name], train=4, test=2)
        monkeypatch.setitem(DATASETS, name, entry)
    (root / "mnist").mkdir()
    x = RNG.integers(0, 256, (4, 28, 28), dtype=np.uint8)
    arrays = [x, np.arange(4, dtype=np.uint8), x[:2], np.arange(2, dtype=np.uint8)]
    for name, array in zip(FILES, arrays, strict=True):
        head = bytes((0, 0, 8, array.ndim)) + b"".join(n.to_bytes(4, "big") for n in array.shape)
        (root / "mnist" / name).write_bytes(gzip.compress(head + array.tobytes()))
    return x


def test_mnist_as_a_sequence_of_rows(images):
    rows = data.load("seq-mnist-rows")
    assert rows.shape == (28, 28) and rows.note.startswith("rows from top to bottom")
    assert torch.equal(rows.train[0], torch.tensor(images).float() / 255)
    assert rows.train[1].tolist() == [0, 1, 2, 3] and len(rows.test[1]) == 2


def test_mnist_pixels_are_averages_read_row_by_row(images):
    x = data.load("seq-mnist-pixels").train[0]
    assert x.shape == (4, 49, 1) and x.dtype == torch.float32
    for step, (row, column) in {0: (0, 0), 1: (0, 1), 7: (1, 0), 48: (6, 6)}.items():
        square = images[2, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4]
        assert x[2, step, 0].item() == pytest.approx(square.mean() / 255, abs=1e-6)


@pytest.mark.real_data("mnist")
@pytest.mark.parametrize(("name", "shape"), [("rows", (28, 28)), ("pixels", (49, 1))])
def test_real_mnist_sequences(name, shape):
    x, y = (mnist := data.load(f"seq-mnist-{name}")).train
    assert mnist.shape == shape and len(y) == 60_000 and len(mnist.test[1]) == 10_000
    assert x.min() == 0 and x.max() == 1 and y.bincount().tolist()[:3] == [5923, 6742, 5958]
    assert x.mean().item() == pytest.approx(0.1307, abs=1e-4)
    if name == "rows":
        assert (x == 0).float().mean().item() == pytest.approx(0.809, abs=1e-3)


@pytest.mark.real_data("mnist")
def test_real_mnist_images(data_root):
    mnist = data.load("mnist")
    assert data.path("mnist") == data_root / "mnist"
    assert mnist.train[0].shape == (60_000, 1, 28, 28)
    assert mnist.train[1].bincount().tolist()[:3] == [5923, 6742, 5958]
    assert mnist.test[1][:5].tolist() == [7, 2, 1, 0, 4]
    assert mnist.train[0].mean().item() == pytest.approx(0.1307, abs=1e-4)
    assert mnist.train[0].std().item() == pytest.approx(0.3081, abs=1e-4)
