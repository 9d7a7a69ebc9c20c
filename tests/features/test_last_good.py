"""A loss that breaks: which block and epoch, why, and weights as they were before that epoch."""

import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers import mlp as any_mlp
from helpers import points, same, state
from torch import nn
from torch.utils.data import DataLoader, Dataset

import tpsgd
from tpsgd import TpsgdError, rules
from tpsgd.features import last_good

X, Y = points(n=60)
mlp = partial(any_mlp, activation=nn.ReLU)


class Explodes(torch.optim.SGD):
    """Steps as usual for some epochs, then far away."""

    def __init__(self, params, good_steps, lr=0.1):
        super().__init__(params, lr=lr)
        self.good_steps, self.steps = good_steps, 0

    def step(self, closure=None):
        self.steps += 1
        super().step()
        if self.steps > self.good_steps:
            for group in self.param_groups:
                for p in group["params"]:
                    p.data.fill_(1e38)


def explodes(good_steps):
    return partial(Explodes, good_steps=good_steps)


def weights_after(epochs, model, **settings):
    """Weights of every epoch, by a callback."""
    states = []
    note = lambda epoch: states.append(state(model))  # noqa: E731
    tpsgd.fit(model, (X, Y), epochs=epochs, callbacks=[note], batch_size=20, **settings)
    return states


def model_with_norm():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


@pytest.mark.parametrize("make", [lambda: mlp(6, 8, 3), model_with_norm])
@pytest.mark.parametrize("order", [tpsgd.sequential, tpsgd.simultaneous])
def test_weights_are_those_after_the_last_good_epoch(make, order):
    settings = {"order": order, "rule": rules.tpsgd_l2()}
    good = weights_after(2, make(), optimizer=explodes(99), **settings)
    net = make()
    with pytest.raises(
        TpsgdError, match=r"block 1 .* in epoch 3: .*; its weights .* after epoch 2$"
    ):
        tpsgd.fit(net, (X, Y), epochs=5, batch_size=20, optimizer=explodes(7), **settings)
    expected = good[1] if order is tpsgd.sequential else good[-1]
    names = [k for k in expected if k[0] < "3"] if order is tpsgd.sequential else expected
    assert same({k: state(net)[k] for k in names}, {k: expected[k] for k in names})
    assert all(torch.isfinite(t).all() for t in state(net).values())


def test_blocks_before_keep_what_they_have_learned():
    net = mlp(6, 8, 3)
    good = weights_after(2, net, optimizer=[explodes(99), explodes(99)])
    after_first = {k: v for k, v in good[1].items() if k[0] == "0"}
    net = mlp(6, 8, 3)
    before = state(net)
    with pytest.raises(
        TpsgdError, match=r"block 2 .* in epoch 1: .*weights are those before train"
    ):
        optimizers = [explodes(99), explodes(0)]
        tpsgd.fit(net, (X, Y), epochs=2, batch_size=20, optimizer=optimizers)
    assert same({k: state(net)[k] for k in after_first}, after_first)
    assert torch.equal(state(net)["2.weight"], before["2.weight"])


def test_backprop_too():
    net = mlp(6, 8, 3)
    before = state(net)
    with pytest.raises(TpsgdError, match="those before training"):
        tpsgd.fit_backprop(net, (X, Y), optimizer=explodes(0))
    assert same(state(net), before)


def test_large_weights_go_to_a_file_and_memory_formats_come_back(monkeypatch):
    monkeypatch.setattr(last_good, "IN_MEMORY", 10)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
    net = net.to(memory_format=torch.channels_last)
    before = state(net)
    with pytest.raises(TpsgdError, match="those before training"):
        tpsgd.fit(net, (torch.randn(20, 2, 6, 6), Y[:20]), optimizer=explodes(0))
    assert same(state(net), before)
    assert net[0].weight.is_contiguous(memory_format=torch.channels_last)


def test_a_full_temporary_folder_ends_no_training(monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "SpooledTemporaryFile", full)
    assert len(tpsgd.fit(mlp(6, 8, 3), (X, Y), epochs=1).history) == 2
    with pytest.raises(TpsgdError, match="its weights are lost"):
        tpsgd.fit(mlp(6, 8, 3), (X, Y), optimizer=explodes(0))


def test_the_likely_reason_is_the_size_of_the_inputs():
    with pytest.raises(TpsgdError, match=r"its inputs reach \S+e\+30: scale them to about 1; its"):
        tpsgd.fit(mlp(6, 8, 3), (X * 1e30, Y), rule=rules.tpsgd_l2())
    with pytest.raises(TpsgdError, match=r": lower its learning rate or bound its activation; its"):
        tpsgd.fit(mlp(6, 8, 3), (X, Y), rule=rules.tpsgd_l2(), optimizer=explodes(0))


def test_a_validation_loss_that_breaks_stops_too():
    with pytest.raises(
        TpsgdError, match=r"the validation loss of block 1 .* became (inf|nan) in epoch 1"
    ):
        tpsgd.fit(mlp(6, 8, 3), (X, Y), validation=(X * 1e30, Y), rule=rules.tpsgd_l2())


def test_nothing_is_counted_as_memory_of_training():
    before = tpsgd.fit(mlp(6, 8, 3), (X, Y), epochs=2).peak_bytes
    assert tpsgd.fit(mlp(6, 8, 3), (X, Y), epochs=6).peak_bytes == before
    assert (
        before == tpsgd.plan(mlp(6, 8, 3), (6,), samples=60, order=tpsgd.sequential).lines[0].peak
    )


# ---- loaders -------------------------------------------------------------------------------------


class Samples(Dataset):
    def __init__(self, bad=None):
        self.bad = bad

    def __len__(self):
        return 60

    def __getitem__(self, i):
        if i == self.bad:
            raise OSError("the disk is gone")
        return X[i], Y[i]


def test_a_loader_that_raises_is_one_sentence():
    net = mlp(6, 8, 3)
    loader = DataLoader(Samples(bad=45), batch_size=10)
    with pytest.raises(
        TpsgdError, match="loader failed after 4 batches of epoch 1: OSError: the d"
    ):
        tpsgd.fit(net, loader, rule=rules.drtp())
    assert all(torch.isfinite(t).all() for t in state(net).values())
    with pytest.raises(
        TpsgdError, match="loader failed after 4 batches: OSError: the disk is gone"
    ):
        tpsgd.evaluate(net, loader)


def test_a_worker_that_raises_is_one_sentence():
    loader = DataLoader(Samples(bad=45), batch_size=10, num_workers=1)
    with pytest.raises(TpsgdError, match=r"failed after .* of epoch 1: OSError: the d.* gone$"):
        tpsgd.fit(mlp(6, 8, 3), loader, rule=rules.drtp())


DYING = """
import os, torch, tpsgd
from torch import nn
from torch.utils.data import DataLoader, Dataset

class Samples(Dataset):
    def __len__(self):
        return 60

    def __getitem__(self, i):
        if i == 45:
            os.kill(os.getpid(), 9)
        return torch.ones(6), i % 2

try:
    loader = DataLoader(Samples(), batch_size=10, num_workers=1)
    tpsgd.fit(nn.Sequential(nn.Linear(6, 2)), loader)
except tpsgd.TpsgdError as error:
    print(error, flush=True)
os._exit(0)
"""


@pytest.mark.full
def test_a_worker_that_dies_is_one_sentence():  # in a process: torch raises it anywhere, and later
    source = os.environ | {"PYTHONPATH": str(Path(tpsgd.__file__).parents[1])}
    call = [sys.executable, "-c", DYING]
    done = subprocess.run(call, capture_output=True, text=True, env=source, timeout=60)
    assert done.stdout.startswith("the data loader failed")
    assert len(done.stdout.splitlines()) == 1
    assert "DataLoader worker" in done.stdout


def test_large_weights_are_not_written_in_every_epoch(monkeypatch):
    monkeypatch.setattr(last_good, "MOST", 10)
    x, y = points(64)
    broken = partial(torch.optim.SGD, lr=1e30)
    with pytest.raises(TpsgdError, match=r"its weights are lost \(a checkpoint"):
        tpsgd.fit(mlp(6, 8, 3), (x, y), epochs=4, optimizer=broken)
