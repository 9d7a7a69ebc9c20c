"""Inputs kept in a file: bit for bit, nameless, and with a word when the disk is full."""

import errno
import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from helpers import close, folded, images, mlp, points, same, seeded, sequences, state
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tpsgd
from tpsgd import Memory, Recurrent, TpsgdError
from tpsgd.engine.sources.disk_rows import DiskRows
from tpsgd.engine.sources.reuse import InputReuse
from tpsgd.maths.kernels.memory_format import channels_last
from tpsgd.memory.meter import LiveBytes


def random(shape, dtype):
    if dtype.is_floating_point:
        return torch.randn(shape, dtype=torch.float64).to(dtype)
    return torch.randint(-(2**62), 2**62, shape).to(dtype)


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32]


@pytest.mark.parametrize("shape", [(7,), (3, 5), (2, 4, 3), ()])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_come_back_bit_for_bit(dtype, shape, tmp_path):
    rows = random((20, *shape), dtype)
    stored = DiskRows(rows, 20, tmp_path)
    for start in (0, 8, 16):
        stored.write(start, rows[start : start + 8])
    index = torch.tensor([19, 0, 7, 7, 8, 3])
    found = stored[index]
    assert found.dtype == dtype and torch.equal(found, rows[index])
    assert stored.shape == rows.shape and len(stored) == 20
    assert stored.nbytes == rows.nbytes and stored.dtype == dtype


def test_numbers_that_are_none_come_back_too(tmp_path):
    rows = torch.tensor([[float("nan"), float("inf"), -0.0], [-float("inf"), 1e-45, 0.0]])
    stored = DiskRows(rows, 2, tmp_path)
    stored.write(0, rows)
    assert torch.equal(stored[torch.arange(2)].view(torch.int32), rows.view(torch.int32))


@pytest.mark.parametrize("shape", [(4, 3, 5), (1, 3, 5), (4, 1, 1), (4, 1, 3)])
@pytest.mark.parametrize("written", ["channels last", "channels first"])
def test_feature_maps_keep_their_layout(shape, written, tmp_path):
    """Those with one channel or one pixel have no layout to keep."""
    rows = random((9, *shape), torch.float32).contiguous(memory_format=torch.channels_last)
    stored = DiskRows(rows, 9, tmp_path)
    for start in (0, 4, 8):
        part = rows[start : start + 4]
        layout = torch.channels_last if written == "channels last" else torch.contiguous_format
        part = part.contiguous(memory_format=layout)
        stored.write(start, part)
    index = torch.tensor([8, 1, 1, 5])
    found = stored[index]
    assert torch.equal(found, rows[index])
    assert channels_last(found) == (min(shape[0], shape[1] * shape[2]) > 1)


def test_rows_that_are_views_are_written_as_they_read(tmp_path):
    wide = torch.randn(10, 12)
    rows = wide[:, ::2]
    stored = DiskRows(rows.contiguous(), 10, tmp_path)
    stored.write(0, rows)
    assert torch.equal(stored[torch.arange(10)], rows)


def test_rows_may_be_written_in_any_order_and_again(tmp_path):
    rows = torch.randn(6, 3)
    stored = DiskRows(rows, 6, tmp_path)
    stored.write(3, rows[3:])
    stored.write(0, torch.zeros(3, 3))
    stored.write(0, rows[:3])
    assert torch.equal(stored[torch.arange(6)], rows)


def test_the_last_rows_may_be_missing(tmp_path):
    rows = torch.randn(4, 3)
    stored = DiskRows(rows, 6, tmp_path)
    stored.write(0, rows)
    stored.samples = 4
    assert len(stored) == 4 and stored.shape == (4, 3) and stored.nbytes == rows.nbytes
    assert torch.equal(stored[torch.arange(4)], rows)


def test_reading_takes_the_memory_of_what_is_read(tmp_path):
    rows = torch.randn(4000, 100)
    stored = DiskRows(rows, 4000, tmp_path)
    stored.write(0, rows)
    index, live = torch.arange(0, 4000, 100), LiveBytes()
    with live:
        found = stored[index]
    assert live.peak <= found.nbytes


# ---- the file ------------------------------------------------------------------------------------


def held(folder):
    """The bytes of files in a folder that this process has open, named or not."""
    return [
        os.stat(f"/proc/self/fd/{fd}").st_size
        for fd in os.listdir("/proc/self/fd")
        if os.path.exists(f"/proc/self/fd/{fd}") or os.path.lexists(f"/proc/self/fd/{fd}")
        if _target(fd).startswith(str(folder))
    ]


def _target(fd):
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


def test_the_file_has_no_name_and_goes_with_its_owner(tmp_path):
    rows = torch.randn(50, 4)
    stored = DiskRows(rows, 50, tmp_path)
    stored.write(0, rows)
    assert not list(tmp_path.iterdir())
    if os.path.isdir("/proc/self/fd"):
        assert held(tmp_path) == [rows.nbytes]  # nothing waits in a buffer
    stored.file.close()
    del stored
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")
def test_training_leaves_no_file_during_or_after(tmp_path):
    seen, sizes = [], []

    def look(record):
        seen.append(list(tmp_path.iterdir()))
        sizes.append(sum(held(tmp_path)))

    model = mlp(6, 8, 7, 5, 3)
    tpsgd.fit(
        model, points(48), epochs=2, batch_size=16, memory=Memory(reuse=tmp_path), callbacks=[look]
    )
    assert not any(seen) and not list(tmp_path.iterdir())
    # inputs of block 2, 3 and 4 in turn; a file goes when the next one is complete
    assert sizes == [0, 0, *[48 * 8 * 4] * 2, *[48 * 7 * 4] * 2, *[48 * 5 * 4] * 2]
    assert held(tmp_path) == []


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")
def test_training_that_fails_leaves_no_file(tmp_path):
    def fail(record):
        if record.block == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tpsgd.fit(mlp(6, 8, 3), points(), memory=Memory(reuse=tmp_path), callbacks=[fail])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("make", [lambda p: p / "none", lambda p: str(p / "none" / "deep")])
def test_a_folder_that_is_not_there(make, tmp_path):
    folder = make(tmp_path)
    model = mlp(6, 8, 3)
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(TpsgdError, match=f"reuse='{folder}' is no folder"):
        tpsgd.fit(model, points(), epochs=1, memory=Memory(reuse=folder))
    assert all(map(torch.equal, before, model.parameters()))  # said before anything was learned


def test_a_folder_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(TpsgdError, match=r"cannot be kept in .*file: Not a directory"):
        DiskRows(torch.zeros(1, 2), 5, tmp_path / "file")


def test_a_folder_that_cannot_be_written_to(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)  # root may write everywhere
    with pytest.raises(TpsgdError, match=r"cannot be kept in .*: Permission denied"):
        tpsgd.fit(mlp(6, 8, 3), points(), epochs=1, memory=Memory(reuse=tmp_path))


def test_a_tilde_is_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert DiskRows(torch.zeros(1, 2), 5, "~").folder == tmp_path


# ---- a full disk ---------------------------------------------------------------------------------


def test_too_little_room_is_said_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=1000))
    with pytest.raises(TpsgdError, match=r"need 1\.5 KB in .*1000 B are free.*reuse=False"):
        tpsgd.fit(mlp(6, 8, 3), points(48), epochs=1, memory=Memory(reuse=tmp_path))


class Disk:
    """A file on a disk with so much room, that takes so many bytes at a time."""

    def __init__(self, file, room=1 << 40, at_once=1 << 40):
        self.file, self.room, self.at_once, self.writes = file, room, at_once, 0

    def write(self, data):
        self.writes += 1
        if self.room <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        done = self.file.write(data[: min(self.at_once, self.room)])
        self.room -= done
        return done

    def __getattr__(self, name):
        return getattr(self.file, name)


@pytest.mark.parametrize("at_once", [1, 7, 100])
def test_a_short_write_is_continued(at_once, tmp_path):
    rows = torch.randn(10, 6)
    stored = DiskRows(rows, 10, tmp_path)
    stored.file = Disk(stored.file, at_once=at_once)
    stored.write(0, rows)
    assert stored.file.writes == -(-rows.nbytes // at_once)
    assert torch.equal(stored[torch.arange(10)], rows)


@pytest.mark.parametrize("room", [0, 100])
def test_a_disk_that_fills_up(room, tmp_path):
    rows = torch.randn(10, 6)
    stored = DiskRows(rows, 10, tmp_path)
    stored.file = Disk(stored.file, room)
    with pytest.raises(TpsgdError, match=r"need 240 B in .*No space left.*reuse=False") as caught:
        stored.write(0, rows)
    assert "\n" not in str(caught.value)


# ---- training ------------------------------------------------------------------------------------


def cnn():
    return nn.Sequential(
        nn.Conv2d(2, 5, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(5, 4, 2),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(4, 3),
    )


def norm():
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def both():
    return nn.Sequential(
        Recurrent(4, 5, sequence=True, bidirectional=True), Recurrent(10, 5), nn.Linear(5, 3)
    )


NETS = {
    "mlp": (lambda: mlp(6, 8, 7, 3), lambda: points(40)),
    "float64": (lambda: mlp(6, 8, 7, 3).double(), lambda: points(40)),
    "bfloat16": (lambda: mlp(6, 8, 7, 3).bfloat16(), lambda: points(40)),
    "cnn": (cnn, lambda: images(40)),
    "batch norm": (norm, lambda: points(40)),
    "states": (lambda: both().double(), lambda: sequences(40)),
}


@pytest.mark.parametrize("kind", NETS)
def test_inputs_from_a_file_give_the_weights_of_inputs_in_memory(kind, tmp_path):
    make, data = NETS[kind]

    def trained(reuse, given=None, **settings):
        model = seeded(make)
        settings = {"epochs": 2, "batch_size": 16, "seed": 2, "reuse": reuse} | settings
        run = tpsgd.fit(model, given or data(), **folded(**settings))
        return state(model), run

    expected, plain = trained(True)
    for folder in (tmp_path, str(tmp_path)):
        found, run = trained(folder)
        assert same(found, expected)
        assert [e.loss for e in run.history] == [e.loss for e in plain.history]
        assert run.kept_bytes == 0 and plain.kept_bytes > 0
        assert run.forward_passes == plain.forward_passes
    close(trained(tmp_path, micro_batch=16)[0], expected)


def test_recomputed_inputs_go_through_every_frozen_block():
    def trained(reuse):  # of blocks so much alike that one could be left out
        model, (x, y) = mlp(5, 5, 5, 5, 3).double(), points(40, features=5)
        tpsgd.fit(model, (x.double(), y), epochs=1, batch_size=8, memory=Memory(reuse=reuse))
        return state(model)

    close(trained(False), trained(True))


def test_inputs_from_a_file_give_the_same_weights_with_validation_data_and_a_loader(tmp_path):
    def run(reuse):
        loader = DataLoader(TensorDataset(*points(40)), batch_size=12)
        model = mlp(6, 8, 7, 3)
        found = tpsgd.fit(
            model, loader, memory=Memory(reuse=reuse), epochs=2, validation=points(20, seed=1)
        )
        return state(model), [(e.loss, e.val_loss) for e in found.history]

    (weights, history), (expected, plain) = run(tmp_path), run(True)
    assert same(weights, expected) and history == plain


def test_a_file_keeps_the_inputs_out_of_memory(tmp_path):
    def peak(reuse):
        live = LiveBytes()
        with live:
            tpsgd.fit(
                mlp(6, 400, 4, 3), points(400), epochs=1, batch_size=8, memory=Memory(reuse=reuse)
            )
        return live.peak

    inputs = 400 * 400 * 4
    assert peak(True) > inputs > 3 * peak(tmp_path)


# ---- in memory, if they take less than half of what is free --------------------------------------


@pytest.mark.parametrize("spare", [0, 2])
@pytest.mark.parametrize("epochs", [1, 2])
def test_fast_keeps_inputs_if_they_take_less_than_half_of_the_free_memory(epochs, spare):
    inputs = 48 * 8 * 4

    def order(net):
        assert net.pass_on == InputReuse(None, fast=True)
        net.pass_on = replace(net.pass_on, free_bytes=lambda device: 2 * inputs + spare)
        tpsgd.sequential(net)

    run = tpsgd.fit(mlp(6, 8, 3), points(48), order=order, epochs=epochs, memory="fast")
    kept = spare > 0 and epochs > 1  # inputs that are read only once are not kept
    assert run.kept_bytes == (inputs if kept else 0)
    assert run.forward_passes == (48 if kept else 48 * epochs)
