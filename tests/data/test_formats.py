"""The publishers' formats: read right when whole, refused when not."""

import gzip
from dataclasses import replace

import numpy as np
import pytest
import torch

from tpsgd import data
from tpsgd.data import formats
from tpsgd.errors import TpsgdError

IMAGES, LABELS = "train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"


def idx(array, magic=None, dims=None):
    """The bytes of an idx file; magic and dims can be made to lie."""
    array = np.asarray(array, np.uint8)
    head = bytes((0, 0, 8, array.ndim)) if magic is None else magic
    return head + b"".join(n.to_bytes(4, "big") for n in dims or array.shape) + array.tobytes()


@pytest.fixture
def mnist(tmp_path, monkeypatch):
    """A tiny MNIST of 20 + 10 in TPSGD_DATA; yields its folder."""
    small = replace(data.DATASETS["mnist"], train=20, test=10)
    monkeypatch.setitem(data.DATASETS, "mnist", small)
    monkeypatch.setenv("TPSGD_DATA", str(tmp_path))
    (folder := tmp_path / "mnist").mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (30, 28, 28))
    for part, rows in (("train", slice(20)), ("t10k", slice(20, 30))):
        images, labels = pixels[rows], np.arange(30)[rows] % 10
        (folder / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(images)))
        (folder / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(labels)))
    return folder


@pytest.fixture
def cifar(tmp_path, monkeypatch):
    """A tiny CIFAR-10, two records a file, in TPSGD_DATA; yields its folder."""
    monkeypatch.setattr(formats, "CIFAR_PER_FILE", 2)
    monkeypatch.setenv("TPSGD_DATA", str(tmp_path))
    (folder := tmp_path / "cifar-10-batches-bin").mkdir()
    records = np.random.default_rng(0).integers(0, 256, (12, 3073), dtype=np.uint8)
    records[:, 0] = np.arange(12) % 10
    for i, name in enumerate(formats.CIFAR_FILES):
        records[2 * i : 2 * i + 2].tofile(folder / name)
    return folder


def test_idx(mnist):
    got = data.load("mnist")
    want = np.random.default_rng(0).integers(0, 256, (30, 28, 28))
    assert torch.equal(got.train[0], torch.tensor(want[:20, None], dtype=torch.float32) / 255)
    assert torch.equal(got.test[0], torch.tensor(want[20:, None], dtype=torch.float32) / 255)
    assert got.train[1].tolist() == [*range(10)] * 2 and got.shape == (1, 28, 28)
    assert got.note == "the publisher's own split"


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        (IMAGES, b"", "it starts with ''"),
        (IMAGES, b"these are no gzip bytes", "cannot be read"),
        (IMAGES, gzip.compress(idx(np.zeros((20, 28, 28))))[:-30], "it may be cut short"),
        (IMAGES, gzip.compress(b"\0\0"), "it starts with '0000', not '00000803'"),
        (IMAGES, gzip.compress(idx(np.zeros(20))), "it starts with '00000801', not '00000803'"),
        (LABELS, gzip.compress(idx(np.zeros(20), b"\0\0\x0d\1")), "starts with '00000d01'"),
        (IMAGES, gzip.compress(idx(np.zeros((20, 28, 27)))), "says it holds 20 x 28 x 27 bytes"),
        (LABELS, gzip.compress(idx(np.zeros(19))), "holds 19 bytes, expected 20"),
        (LABELS, gzip.compress(idx(np.zeros(19), dims=(20,))), "unpacks to 27 bytes, expected 28"),
        (LABELS, gzip.compress(idx(np.zeros(21), dims=(20,))), "unpacks to 29 bytes, expected 28"),
        (LABELS, gzip.compress(idx(np.full(20, 10))), "the label 10, but mnist has 10 classes"),
    ],
    ids=range(11),
)
def test_idx_that_is_not_right(mnist, file, content, says):
    (mnist / file).write_bytes(content)
    with pytest.raises(TpsgdError, match=says) as error:
        data.load("mnist")
    assert str(mnist / file) in str(error.value) and "\n" not in str(error.value)


def test_idx_with_a_flipped_byte(mnist):
    content = bytearray((mnist / IMAGES).read_bytes())
    content[len(content) // 2] ^= 0xFF
    (mnist / IMAGES).write_bytes(content)
    with pytest.raises(TpsgdError, match="cannot be read"):
        data.load("mnist")


def test_idx_that_is_missing(tmp_path):
    with pytest.raises(TpsgdError, match="is missing; put it there or fetch it again"):
        formats.read_idx(tmp_path / "none.gz", (1,))


def test_cifar(cifar):
    got = data.load("cifar10")
    records = np.concatenate(
        [np.fromfile(cifar / name, np.uint8).reshape(2, 3073) for name in formats.CIFAR_FILES]
    )
    x = torch.tensor(records[:, 1:].reshape(-1, 3, 32, 32), dtype=torch.float32) / 255
    assert torch.equal(got.train[0], x[:10]) and torch.equal(got.test[0], x[10:])
    assert got.train[1].tolist() == [*range(10)] and got.test[1].tolist() == [0, 1]
    assert got.train[0].is_contiguous() and got.classes[3] == "cat"


@pytest.mark.parametrize("cut", [1, 3073, 2 * 3073])
def test_cifar_that_is_cut_short(cifar, cut):
    file = cifar / "data_batch_3.bin"
    file.write_bytes(file.read_bytes()[:-cut])
    with pytest.raises(TpsgdError, match=r"data_batch_3.bin is \d+ bytes long, expected 2 records"):
        data.load("cifar10")


def test_cifar_with_a_wrong_label(cifar):
    file = cifar / "test_batch.bin"
    file.write_bytes(b"\x0b" + file.read_bytes()[1:])
    with pytest.raises(TpsgdError, match=r"test_batch.bin holds the label 11"):
        data.load("cifar10")


def test_cifar_that_cannot_be_opened(cifar, monkeypatch):
    (cifar / "data_batch_1.bin").unlink()
    with pytest.raises(TpsgdError, match=r"data_batch_1.bin is missing"):
        formats.cifar(cifar, data.DATASETS["cifar10"])
