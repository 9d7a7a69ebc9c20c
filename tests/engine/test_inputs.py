"""Arrays larger than memory: shared, not copied, and looked at a little at a time."""

import tracemalloc
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import tpsgd
from tpsgd.common.errors import TpsgdError
from tpsgd.engine.sources.inputs import PART, check_finite, labels, tensor
from tpsgd.losses import bce, cross_entropy

RNG = np.random.default_rng(0)
WHOLE = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor made while it is on, views left out."""

    def __init__(self, *given):
        super().__init__()
        self.known, self.bytes = {t.untyped_storage()._cdata for t in given}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for one in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(one, torch.Tensor) and one.untyped_storage()._cdata not in self.known:
                self.bytes = max(self.bytes, one.nbytes)
        return out


@pytest.fixture
def mapped(tmp_path):
    def save(array, name="x.npy"):
        np.save(tmp_path / name, array)
        return np.load(tmp_path / name, mmap_mode="r")

    return save


# shared


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, np.uint8, np.int64, bool])
def test_a_mapped_file_is_not_copied(mapped, dtype):
    array = mapped(RNG.integers(0, 2, (300, 40)).astype(dtype))
    before = list(warnings.filters)
    tracemalloc.start()
    x = tensor(array, "x")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert x.data_ptr() == array.ctypes.data and peak < array.nbytes
    assert torch.equal(x, torch.tensor(np.array(array))) and warnings.filters == before


def test_a_read_only_view_keeps_its_strides(mapped):
    array = mapped(RNG.normal(size=(20, 6)))[::2, 1:4]
    x = tensor(array, "x")
    assert x.data_ptr() == array.ctypes.data and x.stride() == (12, 1)


def test_what_torch_cannot_share_is_copied(mapped):
    array = mapped(RNG.normal(size=(20, 6)))
    assert torch.equal(tensor(array[::-1], "x"), torch.tensor(np.array(array)).flip(0))
    for kind in (np.uint16, np.uint32, np.uint64):
        x = tensor(mapped(np.arange(12, dtype=kind).reshape(4, 3)), "x")
        assert x.dtype == torch.int64 and x.flatten().tolist() == list(range(12))


# finite


@pytest.mark.cover(2)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("at", [0, 41, 42, 63, 64, 900])
def test_the_first_sample_that_is_not_finite(bad, dtype, at):
    x = torch.zeros(901, 40, 80, dtype=dtype)
    x[at, 3, 79] = x[-1, 0, 0] = bad
    for given in (x, x.transpose(1, 2), x.unflatten(2, (8, 10))):
        with pytest.raises(TpsgdError, match=rf"NaN or infinity \(first in sample {at}\)$"):
            check_finite(given)


def test_the_largest_numbers_are_finite():
    check_finite(torch.full((5000, 30), torch.finfo(torch.float32).max))
    check_finite(torch.full((5000, 30), torch.finfo(torch.float32).min))


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0,), (1,), (1, 2**17)])
def test_finite_arrays_of_odd_shapes(shape):
    check_finite(torch.zeros(shape))
    check_finite(torch.zeros(shape, dtype=torch.int32))


@pytest.mark.parametrize("shape", [(3000, 784), (200_000, 3), (9, 3, 100, 100)])
def test_looking_takes_little_memory(shape):
    x = torch.zeros(shape)
    with Largest(x) as largest:
        check_finite(x)
        assert largest.bytes < PART
        x.view(-1)[-1] = torch.nan
        with pytest.raises(TpsgdError):
            check_finite(x)
    assert largest.bytes <= PART


def test_parts_are_small_but_not_too_small(monkeypatch):
    parts = []
    split = torch.Tensor.split
    monkeypatch.setattr(torch.Tensor, "split", lambda x, n: parts.append((x, n)) or split(x, n))
    x = torch.zeros(3000, 784)
    check_finite(x)
    [(_, step)] = parts
    assert step * 784 * 4 <= PART < (step + 1) * 784 * 4


# labels


@pytest.mark.parametrize("dtype", WHOLE)
@pytest.mark.parametrize("column", [False, True])
def test_labels_stay_as_they_came(dtype, column):
    y = (torch.arange(50_000) % 3).to(dtype)
    given = y[:, None] if column else y
    with Largest(y) as largest:
        found = labels(given, cross_entropy, 3)
    assert found.dtype == dtype and found.data_ptr() == y.data_ptr() and torch.equal(found, y)
    assert largest.bytes < 1000


def test_truth_values_are_bytes():
    y = torch.arange(50_000) % 2 == 1
    with Largest(y) as largest:
        found = labels(y, cross_entropy, 2)
    assert found.data_ptr() == y.data_ptr() and found.tolist()[:3] == [0, 1, 0]
    assert not found.is_floating_point() and largest.bytes < 1000


@pytest.mark.parametrize("dtype", WHOLE)
def test_labels_out_of_range_in_every_type(dtype):
    y = torch.tensor([0, 1, 7, 2], dtype=dtype)
    with pytest.raises(TpsgdError, match=r"^label 7 is out of range: the model's last block has 3"):
        labels(y, cross_entropy, 3)
    if dtype is not torch.uint8:
        with pytest.raises(TpsgdError, match=r"^label -7 is out of range: .* go from 0 to 2$"):
            labels(-y, cross_entropy, 3)
        with pytest.raises(TpsgdError, match=r"^label -7 is out of range: classes are counted"):
            labels(-y, None, None)
    with pytest.warns(UserWarning, match="1 of 9 classes have no samples: 5"):
        labels(torch.tensor([0, 1, 2, 3, 4, 6, 7, 8], dtype=dtype), cross_entropy, 9)


def test_truth_values_for_one_output():
    assert labels(torch.tensor([True, False]), bce, 1).tolist() == [[1.0], [0.0]]


# learning


@pytest.mark.parametrize("kind", [np.uint8, np.int32, np.int64])
def test_learning_from_mapped_files(mapped, kind):
    x, y = RNG.normal(size=(64, 5)).astype(np.float32), (np.arange(64) % 3).astype(kind)

    def learnt(data):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(inplace=True), nn.Linear(8, 3))
        run = tpsgd.fit(model, data, epochs=2, batch_size=16)
        return model[2].weight, run.history[-1].loss, tpsgd.evaluate(model, data)

    found = learnt((mapped(x), mapped(y, "y.npy")))
    wanted = learnt((torch.tensor(x), torch.tensor(y).long()))
    assert torch.equal(found[0], wanted[0]) and found[1:] == wanted[1:]


def test_nobody_writes_into_x():
    x, y = torch.randn(64, 5), torch.arange(64) % 3
    before = x.clone()
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
    tpsgd.fit(model, (x, y), epochs=1, batch_size=64)
    tpsgd.fit_backprop(model, (x, y), epochs=1, batch_size=64)
    tpsgd.evaluate(model, (x, y))
    assert torch.equal(x, before)
