"""CIFAR-10: the binary files are read right when complete and refused when not."""

import numpy as np
import pytest
import torch

from tpsgd import TpsgdError, data
from tpsgd.data.registry import DATASETS
from tpsgd.data.sets import cifar10


@pytest.fixture
def cifar(tmp_path, monkeypatch):
    """A tiny CIFAR-10, two records a file, in TPSGD_DATA; yields its folder."""
    monkeypatch.setattr(cifar10, "PER_FILE", 2)
    monkeypatch.setenv("TPSGD_DATA", str(tmp_path))
    (folder := tmp_path / "cifar-10-batches-bin").mkdir()
    records = np.random.default_rng(0).integers(0, 256, (12, 3073), dtype=np.uint8)
    records[:, 0] = np.arange(12) % 10
    for i, name in enumerate(cifar10.FILES):
        records[2 * i : 2 * i + 2].tofile(folder / name)
    return folder


def test_cifar10_is_read_from_binary_files(cifar):
    loaded = data.load("cifar10")
    records = np.concatenate(
        [np.fromfile(cifar / name, np.uint8).reshape(2, 3073) for name in cifar10.FILES]
    )
    x = torch.tensor(records[:, 1:].reshape(-1, 3, 32, 32), dtype=torch.float32) / 255
    assert torch.equal(loaded.train[0], x[:10]) and torch.equal(loaded.test[0], x[10:])
    assert loaded.train[1].tolist() == [*range(10)] and loaded.test[1].tolist() == [0, 1]
    assert loaded.train[0].is_contiguous() and loaded.classes[3] == "cat"


@pytest.mark.parametrize("cut", [1, 3073, 2 * 3073])
def test_cifar10_file_that_is_cut_short_is_refused(cifar, cut):
    file = cifar / "data_batch_3.bin"
    file.write_bytes(file.read_bytes()[:-cut])
    with pytest.raises(TpsgdError, match=r"data_batch_3.bin has \d+ bytes, not 6146"):
        data.load("cifar10")


def test_cifar10_file_with_a_wrong_label_is_refused(cifar):
    file = cifar / "test_batch.bin"
    file.write_bytes(b"\x0b" + file.read_bytes()[1:])
    with pytest.raises(
        TpsgdError, match=r"test_batch.bin has the label 11, which is not a class of cifar10"
    ):
        data.load("cifar10")


def test_missing_cifar10_file_is_named(cifar):
    (cifar / "data_batch_1.bin").unlink()
    with pytest.raises(TpsgdError, match=r"data_batch_1.bin cannot be read .*No such file"):
        cifar10.read(cifar, DATASETS["cifar10"])


@pytest.mark.real_data("cifar-10-batches-bin")
def test_real_cifar10():
    cifar = data.load("cifar10", max_train=5000)
    x, y = cifar.train
    assert x.shape == (5000, 3, 32, 32) and y.bincount().tolist() == [500] * 10
    assert cifar.test[1][:4].tolist() == [3, 8, 8, 0]
    assert cifar.test[0].mean((0, 2, 3)).tolist() == pytest.approx([0.494, 0.485, 0.450], abs=1e-3)
