"""Small nets are trained with one thread, large ones with the user's number, which comes back."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tpsgd
from tpsgd.engine.device import WORTH_SHARING, limit_threads, threads_restored
from tpsgd.nets.blocks import products_of_layers

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def two_threads():
    with threads_restored(2):
        yield


def net(width=16, features=8):
    return nn.Sequential(nn.Linear(features, width), nn.ReLU(), nn.Linear(width, 2))


def data(samples=64, features=8):
    return torch.randn(samples, features), torch.arange(samples) % 2


@pytest.mark.parametrize("fit", [tpsgd.fit, tpsgd.fit_backprop])
def test_small_nets_take_one_thread_and_large_ones_the_user_s(fit):
    small = fit(net(), data(), epochs=1)
    large = fit(
        net(width=2048, features=512), data(samples=32, features=512), epochs=1, batch_size=32
    )
    assert small.settings["threads"] == 1
    assert large.settings["threads"] == 2
    assert torch.get_num_threads() == 2


def test_never_more_threads_than_the_user_s():
    torch.set_num_threads(1)
    run = tpsgd.fit(net(width=2048, features=512), data(samples=32, features=512), epochs=1)
    assert run.settings["threads"] == 1 and torch.get_num_threads() == 1


@pytest.mark.parametrize("batch_size, threads", [(4, 1), (64, 2)])
def test_the_batch_size_decides_that_of_micro_batches_and_loaders_too(batch_size, threads):
    x, y = data(features=512)
    loader = DataLoader(TensorDataset(x, y), batch_size=batch_size)
    micro_batch = tpsgd.Memory(micro_batch=batch_size)
    for run in (
        tpsgd.fit(net(1024, 512), (x, y), epochs=1, batch_size=batch_size),
        tpsgd.fit(net(1024, 512), (x, y), epochs=1, batch_size=64, memory=micro_batch),
        tpsgd.fit(net(1024, 512), loader, epochs=1),
    ):
        assert run.settings["threads"] == threads


def test_the_number_is_restored_after_an_error():
    def fail(epoch):
        raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        tpsgd.fit(net(), data(), epochs=1, callbacks=[fail])
    assert torch.get_num_threads() == 2
    with pytest.raises(tpsgd.TpsgdError):
        tpsgd.fit(net(), data(features=9), epochs=1)
    assert torch.get_num_threads() == 2


def test_training_has_one_thread_and_callbacks_have_the_user_s():
    seen = []

    def augment(x):
        seen.append(torch.get_num_threads())
        return x

    def callback(epoch):
        seen.append(-torch.get_num_threads())
        torch.set_num_threads(3)  # does not reach the training

    tpsgd.fit(net(), data(), epochs=2, augment=augment, callbacks=[callback])
    assert set(seen) == {1, -2}
    assert torch.get_num_threads() == 2


def test_a_gpu_s_run_keeps_the_threads():
    assert limit_threads(torch.device("cuda"), 0) == 2 and torch.get_num_threads() == 2
    assert limit_threads(CPU, WORTH_SHARING) == 2 and torch.get_num_threads() == 2
    assert limit_threads(CPU, WORTH_SHARING - 1) == 2 and torch.get_num_threads() == 1


def test_products_are_those_of_dense_convolutional_and_recurrent_layers():
    cnn = nn.Sequential(nn.Conv2d(3, 8, 5, stride=2), nn.BatchNorm2d(8), nn.Flatten())
    rnn = tpsgd.Recurrent(7, 11, sequence=True)
    with products_of_layers() as products:
        cnn(torch.zeros(2, 3, 13, 13))
        nn.Linear(6, 4)(torch.zeros(2, 6))
        rnn(torch.zeros(2, 9, 7))
    assert products == [8 * 3 * 25 * 25, 24, 77, 121]  # a map of 5 x 5
    nn.Linear(6, 4)(torch.zeros(2, 6))
    assert len(products) == 4
