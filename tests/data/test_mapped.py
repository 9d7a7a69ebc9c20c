"""Samples on disk: the same as in memory, complete or not there, written a few at a time."""

import errno
import gc
import json
import os
import shutil
import tracemalloc

import numpy as np
import pytest
import torch
from helpers import with_full
from PIL import Image
from torch import nn

import tpsgd
from tpsgd import TpsgdError, data
from tpsgd.data import mapped

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(20, 3)), np.arange(20) % 2


def images(root, count, size=(6, 4)):
    for i in range(count):
        file = root / ("cat", "dog")[i % 2] / f"{i:04}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        pixels = RNG.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
        Image.fromarray(pixels).save(file)
    return root


@pytest.fixture
def pets(tmp_path):
    return images(tmp_path / "pets", 20)


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def npz(tmp_path):
    np.savez(tmp_path / "own.npz", x=X, y=Y)
    return tmp_path / "own.npz"


def same(one, other):
    for (x, y), (x2, y2) in ((one.train, other.train), (one.test, other.test)):
        assert x.dtype == x2.dtype and torch.equal(x, x2) and torch.equal(y, y2)
        assert y2.dtype == torch.int64
    assert (one.classes, one.shape, one.vocabulary) == (
        other.classes,
        other.shape,
        other.vocabulary,
    )
    assert other.note == "; ".join(filter(None, (one.note, "read from disk")))


def refused(message, spec, cache, **options):
    with pytest.raises(TpsgdError, match=message) as error:
        data.load(str(spec), on_disk=cache, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


ARRAYS = ("train-x.npy", "train-y.npy", "test-x.npy", "test-y.npy")


def names(cache):
    return sorted(str(file.relative_to(cache)) for file in cache.rglob("*") if file.is_file())


# the same samples


def specs(tmp_path):
    (tmp_path / "make.py").write_text(
        "import numpy as np\ndef make(): return np.arange(60.).reshape(20, 3), [0, 1] * 10\n"
    )
    (tmp_path / "own.csv").write_text("a,y\n" + "".join(f"{i},{i % 3}\n" for i in range(30)))
    grey = RNG.integers(0, 256, (20, 5, 6, 3), dtype=np.uint8)
    both = {"x": X, "y": Y, "x_test": X[:6], "y_test": Y[:6]}
    np.savez(tmp_path / "plain.npz", x=X, y=Y)
    np.savez_compressed(tmp_path / "packed.npz", x=X, y=Y)
    np.savez(tmp_path / "both.npz", **both)
    np.savez(tmp_path / "fortran.npz", x=np.asfortranarray(X.astype(np.float32)), y=Y)
    np.savez(tmp_path / "pixels.npz", x=grey, y=Y)
    np.savez(tmp_path / "tokens.npz", tokens=np.arange(100).reshape(20, 5) % 7, y=Y)
    images(tmp_path / "pets", 20)
    images(tmp_path / "parts" / "train", 9)
    images(tmp_path / "parts" / "val", 4)
    names = ("plain.npz packed.npz both.npz fortran.npz pixels.npz tokens.npz own.csv make.py:make"
           " pets pets@3 parts")  # fmt: skip
    return ["digits", *(str(tmp_path / name) for name in names.split())]


@pytest.mark.parametrize("options", [{}, {"seed": 3, "max_train": 7}])
def test_samples_on_disk_are_the_same_bit_for_bit(tmp_path, cache, monkeypatch, options):
    monkeypatch.setattr(mapped, "DECODED_BYTES", 100)
    for spec in specs(tmp_path):
        expected = data.load(spec, **options)
        first = data.load(spec, on_disk=cache, **options)
        again = data.load(spec, on_disk=str(cache), **options)
        same(expected, first)
        same(expected, again)
        assert first.train[0].is_contiguous()


@pytest.mark.real_data("mnist")
def test_real_sets_on_disk_are_the_same(cache):
    for name in ("mnist", "seq-mnist-pixels"):
        same(data.load(name, max_train=3000), data.load(name, max_train=3000, on_disk=cache))


def test_a_model_learns_the_same_from_mapped_samples(pets, cache):
    def accuracy(**options):
        torch.manual_seed(0)
        loaded = data.load(str(pets), **options)
        model = nn.Sequential(nn.Flatten(), nn.Linear(72, 8), nn.ReLU(), nn.Linear(8, 2))
        tpsgd.fit(model, loaded.train, epochs=2, batch_size=4)
        return model[3].weight, tpsgd.evaluate(model, loaded.test)

    mapped_result, result = accuracy(on_disk=cache), accuracy()
    assert torch.equal(mapped_result[0], result[0]) and mapped_result[1] == result[1]


def test_samples_are_mapped_and_labels_are_not(pets, cache):
    loaded = data.load(str(pets), on_disk=cache)
    [file] = cache.glob("*/train-x.npy")
    with file.open("r+b") as stream:
        stream.seek(-4, os.SEEK_END)
        stream.write(np.float32(7).tobytes())
    assert loaded.train[0][-1, -1, -1, -1] == 7
    shutil.rmtree(cache)
    assert loaded.train[1].bincount().tolist() == [8, 8] and loaded.train[0].mean() > 0


# found again


def test_a_later_call_uses_the_files_and_decodes_nothing(pets, npz, cache, monkeypatch):
    before = [data.load(str(spec), on_disk=cache) for spec in (pets, npz, "digits")]
    readers = (
        "images._open",
        "images.decode_images",
        "npz_files._read_arrays",
        "sets.digits.hold_out_test",
    )
    for reader in readers:
        monkeypatch.setattr(f"tpsgd.data.{reader}", None)
    for one in before:
        again = data.load(one.name, on_disk=cache)
        assert torch.equal(one.train[0], again.train[0]) and one.note == again.note
    assert len(names(cache)) == 3 * 5


def test_files_are_named_after_their_data_and_described(pets, cache):
    data.load(f"{pets}@3", on_disk=cache)
    [about] = cache.glob("*/about.json")
    assert about.parent.name.startswith("pets_3-") and about.stat().st_size < 1000
    content = json.loads(about.read_text())
    assert content["name"] == f"{pets}@3" and content["classes"] == ["cat", "dog"]
    assert names(about.parent) == sorted([*ARRAYS, "about.json"])


def touch(pets):
    os.utime(pets / "cat" / "0000.png", ns=(1, 1))


def rename(pets):
    (pets / "cat" / "0000.png").rename(pets / "cat" / "zz.png")


def rename_class(pets):
    (pets / "cat").rename(pets / "ape")


def grow(pets):
    file = pets / "cat" / "0000.png"
    then = file.stat().st_mtime_ns
    file.write_bytes(file.read_bytes() + b" ")
    os.utime(file, ns=(then, then))


def remove(pets):
    (pets / "cat" / "0000.png").unlink()


@pytest.mark.parametrize("change", [touch, rename, rename_class, grow, remove])
def test_changed_images_are_decoded_again(pets, cache, change):
    data.load(str(pets), on_disk=cache)
    change(pets)
    same(data.load(str(pets)), data.load(str(pets), on_disk=cache))
    assert len(names(cache)) == 10


def test_each_seed_size_and_max_train_has_files_of_its_own(pets, cache):
    for options in ({}, {"seed": 1}, {"max_train": 5}, {"max_train": 6}):
        same(data.load(str(pets), **options), data.load(str(pets), on_disk=cache, **options))
    long = pets.rename(pets.with_name("pets" * 20))
    for size in (3, 4):
        same(data.load(f"{long}@{size}"), data.load(f"{long}@{size}", on_disk=cache))
    assert len(names(cache)) == 6 * 5


def test_a_changed_npz_and_one_of_the_same_name_elsewhere(npz, cache, tmp_path, monkeypatch):
    data.load(str(npz), on_disk=cache)
    np.savez(npz, x=X + 1, y=Y)
    same(data.load(str(npz)), data.load(str(npz), on_disk=cache))
    for i in range(2):
        (tmp_path / str(i)).mkdir()
        monkeypatch.chdir(tmp_path / str(i))
        np.savez("own.npz", x=X + i, y=Y)
        os.utime("own.npz", ns=(1, 1))
        same(data.load("own.npz"), data.load("own.npz", on_disk=cache))


def test_the_result_of_a_function_is_written_on_every_call(tmp_path, cache):
    (tmp_path / "make.py").write_text(
        "import numpy as np\nfrom pathlib import Path\n"
        f"def make(): return np.load({str(tmp_path / 'x.npy')!r}), np.arange(20) % 2\n"
    )
    spec = f"{tmp_path / 'make.py'}:make"
    np.save(tmp_path / "x.npy", X)
    old = data.load(spec, on_disk=cache)
    before = old.train[0].clone()
    np.save(tmp_path / "x.npy", X + 1)
    same(data.load(spec), data.load(spec, on_disk=cache))
    assert torch.equal(old.train[0], before) and len(names(cache)) == 5


@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize("harm", ["cut", "empty", "gone", "another"])
def test_incomplete_files_are_written_again(pets, cache, name, harm):
    expected = data.load(str(pets), on_disk=cache)
    x = expected.train[0].clone()
    [file] = cache.glob(f"*/{name}")
    if harm == "cut":
        content = file.read_bytes()
        file.unlink()
        file.write_bytes(content[:-1])
    elif harm == "empty":
        file.unlink()
        file.touch()
    elif harm == "another":
        np.save(file, np.load(file)[:-1])
    else:
        file.unlink()
    again = data.load(str(pets), on_disk=cache)
    assert torch.equal(again.train[0], x) and len(names(cache)) == 5


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "null"])
def test_a_damaged_description_is_written_again(pets, cache, text):
    expected = data.load(str(pets))
    data.load(str(pets), on_disk=cache)
    [about] = cache.glob("*/about.json")
    about.write_text(text)
    same(expected, data.load(str(pets), on_disk=cache))


# all or nothing


def test_a_corrupt_image_leaves_nothing_behind(pets, cache, monkeypatch):
    monkeypatch.setattr(mapped, "DECODED_BYTES", 1000)
    good = (pets / "dog" / "0019.png").read_bytes()
    (pets / "dog" / "0019.png").write_bytes(b"no image")
    refused("0019.png cannot be read as an image", pets, cache)
    assert names(cache) == []
    (pets / "dog" / "0019.png").write_bytes(good)
    same(data.load(str(pets)), data.load(str(pets), on_disk=cache))


def test_an_interruption_leaves_nothing_behind(pets, cache, monkeypatch):
    from tpsgd.data import images as reader

    opened, real = [], reader._open
    seen = []

    def interrupted(file, *settings):
        opened.append(file)
        if len(opened) == 15:
            seen.extend(names(cache))
            assert all(".part/" in name for name in seen)
            raise KeyboardInterrupt
        return real(file, *settings)

    monkeypatch.setattr(mapped, "DECODED_BYTES", 300)
    monkeypatch.setattr(reader, "_open", interrupted)
    with pytest.raises(KeyboardInterrupt):
        data.load(str(pets), on_disk=cache)
    assert seen and list(cache.iterdir()) == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("after", range(2))
def test_a_disk_that_fills_up_leaves_no_files(pets, cache, monkeypatch, code, after):
    written, real = [], os.fsync

    def fsync(handle):
        written.append(handle)
        if len(written) > after:
            raise OSError(code, os.strerror(code))
        real(handle)

    monkeypatch.setattr("tpsgd.data.mapped.os.fsync", fsync)
    message = rf"cannot write to .*cache \({os.strerror(code)}\)"
    refused(message, pets, cache)
    assert list(cache.iterdir()) == []


def test_a_full_disk_is_not_written_to(pets, cache, monkeypatch):
    needed = 20 * (3 * 6 * 4 * 4 + 8)
    usage = shutil.disk_usage(".")
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage._replace(free=needed - 1))
    monkeypatch.setattr(mapped, "_save", None)
    refused(f"needs {needed:,} bytes in .*, where {needed - 1:,} are free; free some", pets, cache)
    assert names(cache) == []
    monkeypatch.undo()
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage._replace(free=needed))
    data.load(str(pets), on_disk=cache)


def test_a_folder_that_cannot_be_written_to_is_refused(pets, cache):
    cache.write_text("a file")
    refused(r"cannot write to .*cache \(Not a directory\)", pets, cache)
    refused(r"cannot write to .*inner \(Not a directory\)", pets, cache / "inner")


def test_sequences_of_different_lengths_stay_in_memory(tmp_path, cache):
    np.savez(
        tmp_path / "own.npz", x=RNG.normal(size=(20, 5, 2)), y=Y, lengths=np.arange(20) % 5 + 1
    )
    message = "own.npz has sequences of different lengths; load it without on_disk"
    refused(message, tmp_path / "own.npz", cache)
    assert not cache.exists()


@pytest.mark.parametrize("spec", ["no/such.npz", "elephants", "no/folder@3", "", "no.py:make"])
def test_wrong_paths_give_the_same_error_as_without_on_disk(spec, cache):
    with pytest.raises(TpsgdError) as expected:
        data.load(spec)
    assert refused(".", spec, cache) == str(expected.value) and not cache.exists()


# what lies in a .npz


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("order", ["C", "F"])
def test_npz_arrays_of_either_memory_order(tmp_path, cache, save, order):
    x = np.array(RNG.normal(size=(20, 3, 5)), np.float32, order=order)
    save(tmp_path / "own.npz", x=x, y=Y, x_test=x[:4], y_test=Y[:4])
    for options in ({}, {"on_disk": cache}):
        loaded = data.load(str(tmp_path / "own.npz"), **options)
        assert torch.equal(loaded.train[0], torch.tensor(x.copy("C")))
        assert torch.equal(loaded.test[0], torch.tensor(x[:4].copy("C")))


def test_held_out_and_thinned_samples_keep_their_labels(tmp_path, cache):
    x = np.arange(100.0)[:, None]
    np.savez(tmp_path / "own.npz", x=x, y=np.arange(100) // 25)
    for options in ({}, {"on_disk": cache}):
        loaded = data.load(str(tmp_path / "own.npz"), seed=5, max_train=40, **options)
        for x, y in (loaded.train, loaded.test):
            assert torch.equal(x[:, 0].long() // 25, y)
        rows = torch.cat([loaded.train[0], loaded.test[0]]).unique()
        assert len(rows) == 60


def test_a_number_that_is_not_finite_is_found_late_in_the_file(tmp_path, cache, monkeypatch):
    monkeypatch.setattr("tpsgd.data.arrays.CHECKED_BYTES", 50)
    x = X.copy()
    x[17, 2] = np.inf
    np.savez(tmp_path / "own.npz", x=x, y=Y)
    refused(r"x\[17, 2\] is inf; replace it by a .* drop sample 17", tmp_path / "own.npz", cache)


# memory


def peak(spec, **options):
    """The most bytes that Python and numpy had allocated while the data was loaded."""
    gc.collect()
    tracemalloc.start()
    data.load(str(spec), **options)
    nbytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return nbytes


@pytest.mark.full
def test_memory_is_flat_in_the_number_of_images(tmp_path, cache, monkeypatch):
    sample = 3 * 64 * 64 * 4
    monkeypatch.setattr(mapped, "DECODED_BYTES", 4 * sample)
    few = images(tmp_path / "few", 40, (64, 64))
    many = images(tmp_path / "many", 160, (64, 64))
    peak(few, on_disk=cache, max_train=8)  # imports are not counted
    # two pieces of four samples, and room for threads and other objects of the test run
    assert 4 * sample < peak(few, on_disk=cache) < 32 * sample
    assert 4 * sample < peak(many, on_disk=cache) < 32 * sample
    assert peak(many) > 120 * sample


def test_the_expected_number_of_samples_is_decoded_together(pets, cache, monkeypatch):
    from tpsgd.data import images as reader

    pieces, real = [], reader.decode_images

    def decode(files, shape):
        pieces.append(len(files))
        return real(files, shape)

    monkeypatch.setattr(reader, "decode_images", decode)
    monkeypatch.setattr(mapped, "DECODED_BYTES", 5 * 3 * 6 * 4 * 4 + 1)
    data.load(str(pets), on_disk=cache)
    assert pieces == [1, 5, 5, 5, 1, 4]
    monkeypatch.setattr(mapped, "DECODED_BYTES", 1)
    pieces.clear()
    data.load(str(pets), on_disk=cache, seed=1)
    assert pieces == [1] * 21


@pytest.mark.parametrize("of_bytes", with_full([False, True], [False]))
def test_uncompressed_arrays_are_never_in_memory_as_a_whole(tmp_path, cache, monkeypatch, of_bytes):
    monkeypatch.setattr(mapped, "DECODED_BYTES", 2**16)
    monkeypatch.setattr("tpsgd.data.arrays.CHECKED_BYTES", 2**16)
    kind = np.uint8 if of_bytes else np.float64
    x = RNG.integers(0, 256, (2000, 1000)).astype(kind)
    y = np.arange(2000) % 2
    np.savez(tmp_path / "own.npz", x=x, y=y)
    np.save(tmp_path / "x.npy", x)
    (tmp_path / "make.py").write_text(
        "import numpy as np\n"
        f"def make(): return np.load({str(tmp_path / 'x.npy')!r}, mmap_mode='r'), "
        "np.arange(2000) % 2\n"
    )
    for spec in (tmp_path / "own.npz", f"{tmp_path / 'make.py'}:make"):
        peak(spec, on_disk=cache, seed=1)
        assert peak(spec, on_disk=cache) < 2**20 < x.nbytes


def test_an_uncompressed_npz_with_a_flipped_byte_is_refused(tmp_path, cache):
    np.savez(tmp_path / "own.npz", x=X, y=Y)
    content = bytearray((tmp_path / "own.npz").read_bytes())
    content[content.index(X.tobytes()) + 100] ^= 1
    (tmp_path / "own.npz").write_bytes(content)
    refused("not a complete .npz file", tmp_path / "own.npz", cache)
    with pytest.raises(TpsgdError, match="not a complete"):
        data.load(str(tmp_path / "own.npz"))
