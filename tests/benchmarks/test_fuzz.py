"""A few damaged files and words for every reader; `benchmarks/fuzz.py` has thousands."""

import json
import signal
import sys
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
from helpers import with_full
from PIL import Image

import tpsgd
from tpsgd import TpsgdError
from tpsgd.cli.options import block_numbers
from tpsgd.data.user_files import find
from tpsgd.engine.device import forget_resident_peak, resident
from tpsgd.zoo.words import factory

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import fuzz
import robustness


@pytest.mark.parametrize("name", with_full(fuzz.TARGETS, ["npz", "checkpoints", "images"]))
def test_only_tpsgd_errors_come_out(name):
    outcome = fuzz.run(name, cases=80, seed=1)
    assert not outcome.bad
    assert outcome.read + outcome.refused == 80 and outcome.refused > 20
    assert outcome.most_bytes < fuzz.MOST_BYTES


def test_a_bad_case_is_counted_and_kept(monkeypatch, tmp_path):
    def read(path):
        raise KeyError("lost")

    target = fuzz.TARGETS["csv"]
    monkeypatch.setitem(fuzz.TARGETS, "csv", fuzz.Target(target.seeds, target.change, read))
    outcome = fuzz.run("csv", cases=5, keep=tmp_path)
    assert sum(outcome.bad.values()) == 5 and "KeyError" in next(iter(outcome.bad))
    assert len(list(tmp_path.glob("csv-0-0/*.csv"))) == 1


@pytest.mark.full
def test_a_slow_case_is_bad_and_does_not_end_the_process(monkeypatch):
    target = fuzz.TARGETS["words"]
    slow = fuzz.Target(target.seeds, target.change, lambda _: time.sleep(9))
    monkeypatch.setitem(fuzz.TARGETS, "words", slow)
    monkeypatch.setattr(fuzz, "MOST_SECONDS", 1)
    handler = signal.getsignal(signal.SIGALRM)
    outcome = fuzz.run("words", cases=1)
    assert "TimeoutError" in next(iter(outcome.bad)) and outcome.most_seconds < 9
    assert signal.getsignal(signal.SIGALRM) is handler


def test_checkpoints_that_were_not_changed_are_resumed(tmp_path):
    seeds = fuzz.checkpoint_seeds(tmp_path)
    assert len(seeds) == 6 + 3 + 6 + 4
    for seed in seeds:
        fuzz.resume(seed)


def test_pieces_of_a_benchmark_are_added_and_other_commits_are_not(tmp_path, monkeypatch):
    for cases, seconds in ((2, 0.5), (3, 0.1)):
        outcome = fuzz.Outcome(read=cases - 1, refused=1, most_seconds=seconds)
        figures = {"csv": fuzz.figures(cases, outcome)}
        robustness.add_figures(tmp_path, "fuzz", figures)
    robustness.add_figures(tmp_path, "kills", {"compare": {"kills": 7}})
    record = json.loads((tmp_path / "robustness.json").read_text())
    row = {"cases": 5, "read": 3, "refused": 2, "bad": 0, "most_mb": 0.0, "most_seconds": 0.5}
    assert record["fuzz"]["figures"] == {"csv": row}
    assert record["kills"]["figures"] == {"compare": {"kills": 7}} and record["machine"]["cpu"]
    monkeypatch.setattr(robustness, "commit", lambda: "another")
    robustness.add_figures(tmp_path, "kills", {"compare": {"kills": 1}})
    record = json.loads((tmp_path / "robustness.json").read_text())
    assert record["kills"]["figures"]["compare"]["kills"] == 1


# ---- what it has found ---------------------------------------------------------------------------


def refuses(text, read, *args):
    with pytest.raises(TpsgdError, match=text) as caught:
        read(*args)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1200


def load(file):
    return tpsgd.data.load(str(file))


def test_an_array_whose_header_ends_early(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.zeros((9, 2)), y=np.arange(9) % 2)
    with (
        zipfile.ZipFile(tmp_path / "a.npz") as old,
        zipfile.ZipFile(tmp_path / "b.npz", "w") as new,
    ):
        for name in old.namelist():
            new.writestr(name, old.read(name).replace(b"}", b"("))
    refuses(r"is not a complete .npz file", load, tmp_path / "b.npz")


@pytest.mark.parametrize("code", [0x110000, 0xFFFFFFFF, 0xD800])
def test_labels_that_are_no_letters(tmp_path, code):
    y = np.array(["a", "b"] * 5)
    y.view(np.uint32)[3] = code
    np.savez(tmp_path / "a.npz", x=np.zeros((10, 2)), y=y)
    refuses("the labels are no text", load, tmp_path / "a.npz")


@pytest.mark.full
def test_small_files_that_would_fill_the_memory(tmp_path):
    np.savez_compressed(tmp_path / "b.npz", x=np.zeros((64, 1024, 1024), "u1"), y=np.arange(64) % 2)
    refuses(r"would become an array of 256", load, tmp_path / "b.npz")
    long, short = ["0,1,a"] * 60_000, [f"{i},1,{'ab'[i % 2]}" for i in range(1, 20_000)]
    (tmp_path / "s.csv").write_text("\n".join(["sequence,x,label", *long, *short]))
    refuses(r"20,000 sequences, padded to the 60,000 steps .* 8.94 GB", load, tmp_path / "s.csv")
    rows = [f"{i},{'ab'[i % 2]}" for i in range(40_000)]
    (tmp_path / "l.csv").write_text("\n".join(["x,label", *rows, "1," + "c" * 100_000]))
    refuses(r"has 100,000 characters and is no name of a class", load, tmp_path / "l.csv")
    for name in ("a", "b"):
        (tmp_path / "images" / name).mkdir(parents=True)
        for i in range(3):
            Image.new("1", (9000, 9000)).save(tmp_path / "images" / name / f"{i}.png")
    refuses(r"9000 x 9000 pixels in such a small file", load, f"{tmp_path}/images@16")


def mostly_zeros(shape, dtype, others):
    """An array that is compressed well, but not as well as zeros alone."""
    rng, x = np.random.default_rng(0), np.zeros(shape, dtype)
    x.reshape(-1)[rng.integers(0, x.size, others)] = rng.integers(1, 100, others)
    return x


def taken(read, *args):
    """The bytes that reading takes."""
    forget_resident_peak()
    before = resident()[1]
    read(*args)
    return resident()[1] - before


@pytest.mark.full
def test_an_archive_below_a_megabyte_takes_less_than_256_at_the_limit(tmp_path):
    y = np.arange(40_000) % 2
    for rows, others in ((18_000, 240_000), (40_000, 200_000)):  # 72 and 160 MB
        x = mostly_zeros((rows, 1000), "f4", others)
        np.savez_compressed(tmp_path / f"{rows}.npz", x=x, y=y[:rows])
        assert (tmp_path / f"{rows}.npz").stat().st_size < 2**20
    assert taken(load, tmp_path / "18000.npz") < fuzz.MOST_BYTES
    refuses("would become an array of 152.6 MB, x of shape", load, tmp_path / "40000.npz")
    half = np.zeros((10_000, 1000), "f4")  # each would be read
    arrays = {"x": half, "y": y[:10_000], "x_test": half, "y_test": y[:10_000]}
    np.savez_compressed(tmp_path / "two.npz", **arrays)
    refuses("would become an array of 38.1 MB", load, tmp_path / "two.npz")


@pytest.mark.full
def test_images_below_a_megabyte_take_less_than_256_at_the_limit(tmp_path):
    for i in range(8):  # threads that decode at the same time
        file = tmp_path / "ab"[i % 2] / f"{i}.png"
        file.parent.mkdir(exist_ok=True)
        Image.new("RGBA" if i < 5 else "I;16", (2800, 2800)).save(file)
    assert taken(load, f"{tmp_path}@64") < fuzz.MOST_BYTES
    pixels = mostly_zeros((4900, 4900, 4), "u1", 180_000)
    Image.fromarray(pixels).save(tmp_path / "a" / "0.png")
    assert (tmp_path / "a" / "0.png").stat().st_size < 2**20
    refuses("4900 x 4900 pixels in such a small file", load, f"{tmp_path}@64")


@pytest.mark.full
def test_a_few_small_files_do_not_all_take_the_size_of_a_large_one(tmp_path):
    for i in range(6):
        file = tmp_path / "ab"[i % 2] / f"{i}.png"
        file.parent.mkdir(exist_ok=True)
        Image.fromarray(mostly_zeros((90, 120, 3), "u1", 9000)).resize((2000, 1500), 0).save(file)
    refuses(r"2000 x 1500 pixels, and 6 images .* 206.0 MB; give a size", load, tmp_path)


@pytest.mark.parametrize(
    ("read", "word", "text"),
    [
        (block_numbers, ",", "write a number of blocks"),
        (block_numbers, "9" * 5000, "write a number of blocks"),
        (block_numbers, "2\n3", "write a number of blocks"),
        (tpsgd.common.units.as_bytes, "9" * 400 + "MB", "is no amount of memory"),
        (find, "photos@" + "9" * 5000, "asks for images that are too large"),
        (find, "a/" + "x" * 5000 + ".csv", "there is no a/x"),
        (find, "~nobody-of-that-name/x.csv", "there is no ~nobody"),
        (lambda word: factory(word, (6,), 2), "mlp:" + "9" * 5000, "cannot read 'mlp:999"),
        (lambda word: factory(word, (6,), 2), "mlp:99999999,99999999", "has weights of .* GB"),
        (lambda word: factory(word, (7, 3), 2), "rnn:99999999", "has weights of .* GB"),
    ],
)
def test_words(read, word, text):
    refuses(text, read, word)


def test_images_that_would_all_take_the_size_of_an_absurd_one(tmp_path):
    for i in range(8):
        file = tmp_path / "ab"[i % 2] / f"{i}.png"
        file.parent.mkdir(exist_ok=True)
        Image.new("1", (8, 300_000) if i == 0 else (8, 9)).save(file)
    refuses(r"8 x 300000 pixels, and 8 images .* 73.2 MB; give a size", load, tmp_path)
