"""Sequences: the built-in sets in their publishers' formats, one's own, and frames to features."""

import gzip
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from tpsgd import data
from tpsgd.data import eeg, formats, frames, tweets, ucf101
from tpsgd.errors import TpsgdError
from tpsgd.nets.padded import Padded

RNG = np.random.default_rng(0)
Y = np.arange(20) % 2


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A TPSGD_DATA of the test's own, and no cache."""
    monkeypatch.setenv("TPSGD_DATA", str(tmp_path))
    monkeypatch.setenv("TPSGD_CACHE", str(tmp_path / "cache"))
    return tmp_path


def refused(spec, says):
    with pytest.raises(TpsgdError, match=says) as error:
        data.load(str(spec))
    assert "\n" not in str(error.value)


# MNIST, row by row and pixel by pixel


@pytest.fixture
def images(root, monkeypatch):
    """A tiny MNIST of 4 + 2; yields the four images."""
    for name in ("seq-mnist-rows", "seq-mnist-pixels"):
        entry = replace(data.DATASETS[name], train=4, test=2)
        monkeypatch.setitem(data.DATASETS, name, entry)
    (root / "mnist").mkdir()
    x = RNG.integers(0, 256, (4, 28, 28), dtype=np.uint8)
    arrays = [x, np.arange(4, dtype=np.uint8), x[:2], np.arange(2, dtype=np.uint8)]
    for name, array in zip(formats.IDX_FILES, arrays, strict=True):
        head = bytes((0, 0, 8, array.ndim)) + b"".join(n.to_bytes(4, "big") for n in array.shape)
        (root / "mnist" / name).write_bytes(gzip.compress(head + array.tobytes()))
    return x


def test_mnist_rows(images):
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
def test_real_mnist(name, shape):
    x, y = (mnist := data.load(f"seq-mnist-{name}")).train
    assert mnist.shape == shape and len(y) == 60_000 and len(mnist.test[1]) == 10_000
    assert x.min() == 0 and x.max() == 1 and y.bincount().tolist()[:3] == [5923, 6742, 5958]
    assert x.mean().item() == pytest.approx(0.1307, abs=1e-4)
    if name == "rows":
        assert (x == 0).float().mean().item() == pytest.approx(0.809, abs=1e-3)


# EEG


def eeg_table(root, recordings=8, rows=eeg.ROWS, change=None):
    """`recordings` of each of the five kinds; a sample tells its recording and its place."""
    lines = [["", *eeg.COLUMNS]]
    for kind in range(1, 6):
        for i in range(recordings):
            number = (kind - 1) * recordings + i
            suffix = f".{number}" if number else ""  # as published: the first has no number
            for chunk in range(1, rows + 1):
                signal = [number * 10 + j % 4 for j in range(eeg.SAMPLES)]
                lines.append([f"X{chunk}.V1{suffix}", *map(str, signal), str(kind)])
    if change is not None:
        change(lines)
    (root / "eeg").mkdir(exist_ok=True)
    (root / "eeg" / "data.csv").write_text("\n".join(map(",".join, lines)) + "\n")


def shown(part):
    """The recordings in a part, out of what `eeg_table` wrote into the samples."""
    return {round(v) for v in (part[0][:, 0, 0] * eeg.SCALE / 10).tolist()}


@pytest.mark.parametrize(
    ("name", "other", "kinds"),
    [("eeg", "healthy", range(32, 40)), ("eeg-tumour", "tumour", range(8, 16))],
)
def test_eeg_holds_out_whole_recordings(root, name, other, kinds):
    eeg_table(root)
    made = data.load(name, seed=5)
    assert made.classes == (other, "seizure") and made.shape == (45, 1)
    assert made.train[1].bincount().tolist() == [6 * 23] * 2
    assert made.test[1].bincount().tolist() == [2 * 23] * 2
    train, test = shown(made.train), shown(made.test)
    assert not train & test and train | test == {*range(8), *kinds}
    assert (made.train[0][:, :, 0] * eeg.SCALE % 10).round().unique().tolist() == [0]
    assert "of the recordings held out, the same for every seed" in made.note
    assert torch.equal(data.load(name, seed=6).test[0], made.test[0])
    seizures = made.test[0][made.test[1] == 1]
    assert shown((seizures,)) <= set(range(8))


def test_eeg_split_by_rows_leaks_recordings(root):
    eeg_table(root)
    made = data.load("eeg-rows")
    assert made.test[1].bincount().tolist() == [46, 46] and "of the rows held out" in made.note
    assert shown(made.train) & shown(made.test)


def rename(lines):
    lines[1][0] = "X1.V1.7"


def relabel(lines):
    lines[1][-1] = "5"


@pytest.mark.parametrize("change", [rename, relabel])
def test_eeg_whose_names_do_not_tell_recordings(root, change):
    eeg_table(root, change=change)
    refused("eeg", "do not tell the recordings apart .* take the split by rows")
    assert len(data.load("eeg-rows").train[1]) > 0


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda lines: lines[0].pop(), "does not have the columns of UCI's table"),
        (lambda lines: lines[3].__setitem__(9, "nan"), "no whole table of finite numbers"),
        (lambda lines: lines[3].__setitem__(9, "abc"), "no whole table of numbers"),
        (lambda lines: lines[3].pop(), "no whole table of numbers"),
        (lambda lines: lines.__delitem__(slice(30, None)), "has no rows of y = 1 or none of y = 5"),
        (lambda lines: lines.clear(), "does not have the columns"),
    ],
)
def test_eeg_that_is_not_right(root, change, says):
    eeg_table(root, recordings=2, change=change)
    refused("eeg", says)


@pytest.mark.real_data("eeg")
@pytest.mark.parametrize("name", ["eeg", "eeg-rows", "eeg-tumour", "eeg-tumour-rows"])
def test_real_eeg(name):
    made = data.load(name)
    assert made.train[0].shape == (3450, 45, 1) and made.test[0].shape == (1150, 45, 1)
    assert made.train[1].bincount().tolist() == [1725] * 2
    assert made.test[1].bincount().tolist() == [575] * 2
    both = torch.cat([made.train[0], made.test[0]])
    assert both.min() >= -1885 / 200 and both.max() <= 2047 / 200 and both.abs().max() > 9
    assert (both * 200 - (both * 200).round()).abs().max() < 1e-3


@pytest.mark.real_data("eeg")
def test_real_eeg_recordings_are_told_right_and_kept_apart(data_root):
    table = eeg._table(data_root / "eeg" / "data.csv")
    assert np.bincount(table.recording).tolist() == [23] * 500
    x = table.x[np.argsort(table.recording, kind="stable")].reshape(500, 23, 178)
    within, inside = np.abs(x[:, 1:, 0] - x[:, :-1, -1]).mean(), np.abs(np.diff(x)).mean()
    assert within == pytest.approx(inside, rel=0.05)  # a row goes on where the last one ended
    where = {row.tobytes(): r for row, r in zip(table.x[:, ::4], table.recording, strict=True)}
    for name, leaks in (("eeg", False), ("eeg-tumour", False), ("eeg-rows", True)):
        made = data.load(name)
        sides = [
            {where[row.tobytes()] for row in (x[:, :, 0] * 200).round().numpy()}
            for x, _ in (made.train, made.test)
        ]
        assert bool(sides[0] & sides[1]) == leaks and len(sides[0] | sides[1]) == 200


# tweets


def tweet_file(file, tweets, encoding="utf-8"):
    file.parent.mkdir(exist_ok=True)
    lines = [f'"{y}","1","Mon","NO_QUERY","ann","{text}"\n' for y, text in tweets]
    file.write_bytes("".join(lines).encode(encoding))


@pytest.fixture
def sentiment(root):
    folder = root / "sentiment140"
    mine = [(4, "@bob good day 7!"), (0, "sad sad day :( http://t.co/x")] * 10
    tweet_file(folder / "training.csv", mine)
    tweet_file(folder / "test.csv", [(4, "A GOOOOOD day, unseen"), (0, "nothing known"), (2, "x")])
    lines = [f"{w} {' '.join([str(i + 1)] * 3)}\n" for i, w in enumerate(["day", "good", "known"])]
    (folder / "glove.6B.100d.txt").write_text("".join(lines) + "never 1 2 broken\n")
    return folder


def test_tweets_are_tokens_at_the_end(sentiment):
    made = data.load("tweets")
    x, y = made.train
    assert x.dtype == torch.int64 and x.shape == (20, 15) and made.shape == (15,)
    assert made.vocabulary == 1000 and made.classes == ("negative", "positive")
    # by frequency: day 20 and sad 20 (seen later), then <user>, good and <url> with 10 each
    assert x[0].tolist() == [0] * 12 + [3, 4, 1] and x[1].tolist() == [0] * 11 + [2, 2, 1, 5]
    assert y[:2].tolist() == [1, 0] and made.test[1].tolist() == [1, 0]
    assert made.test[0].tolist() == [[0] * 13 + [4, 1], [0] * 15]
    assert "the train part's 5 most frequent words" in made.note


def test_tweets_as_vectors(sentiment):
    made = data.load("tweets-vectors", max_train=4)
    x, _ = made.train
    assert x.shape == (4, 15, 3) and x.dtype == torch.float32 and made.vocabulary is None
    assert made.test[0][0].tolist() == [[0.0] * 3] * 13 + [[2.0] * 3, [1.0] * 3]
    assert made.test[0][1, -1].tolist() == [3.0] * 3 and not made.test[0][1, :-1].any()
    assert "4 of 20 training samples" in made.note


@pytest.mark.parametrize("name", ["tweets-holdout", "tweets-vectors-holdout"])
def test_tweets_held_out(sentiment, name):
    (sentiment / "test.csv").unlink()
    made = data.load(name, seed=3)
    assert sorted(made.train[1].bincount().tolist()) == [7, 8]
    assert len(made.test[1]) == 5 and "25% of training.csv held out" in made.note
    assert torch.equal(made.test[0], data.load(name, seed=4).test[0])


def test_held_out_tweets_are_counted_in_no_vocabulary(root):
    texts = [(4 * (i % 2), f"word{chr(97 + i)}") for i in range(20)]
    tweet_file(root / "sentiment140" / "training.csv", texts)
    made = data.load("tweets-holdout")
    assert (made.train[0][:, -1] > 0).all() and not made.test[0].any()


def test_long_tweets_lose_unknown_and_then_frequent_words(root, monkeypatch):
    monkeypatch.setattr(tweets, "VOCABULARY", 18)
    folder = root / "sentiment140"
    letters = [chr(97 + i) * 2 for i in range(20)]
    mine = [(4 * (i % 2), " ".join(letters[:i])) for i in range(1, 21)]
    tweet_file(folder / "training.csv", mine)
    tweet_file(folder / "test.csv", [(0, " ".join(reversed(letters))), (4, "aa")])
    long = data.load("tweets").test[0][0].tolist()
    assert long == list(range(17, 2, -1))  # 18 and up unknown; 1 and 2 the most frequent


def test_tweets_in_latin_1(root):
    texts = [(4, "café très"), (0, "triste")] * 2
    for file in ("training.csv", "test.csv"):
        tweet_file(root / "sentiment140" / file, texts, "latin-1")
    made = data.load("tweets")
    assert made.train[0][0].count_nonzero() == 2 and torch.equal(made.train[0], made.test[0])


@pytest.mark.parametrize(
    ("file", "text", "says"),
    [
        ("training.csv", "", "lacks negative or positive tweets"),
        ("training.csv", '"4","","","","","good"\n', "lacks negative or positive tweets"),
        ("test.csv", '"4","","","","","a"\n"7","","","","","b"\n', "line 2: expected six .* '7'"),
        ("test.csv", '"4","good"\n', "line 1: expected six cells.*got 2"),
        ("glove.6B.100d.txt", "", "or of none of the words"),
        ("glove.6B.100d.txt", "day 1 2\ngood 1 2 3\n", "vectors of different lengths"),
        ("glove.6B.100d.txt", "day 1 x\n", "vector of 'day' is no row of numbers"),
        ("glove.6B.100d.txt", "day 1 nan\n", "vector of 'day' is not finite"),
    ],
)
def test_tweets_that_are_not_right(sentiment, file, text, says):
    (sentiment / file).write_text(text)
    refused("tweets-vectors", says)


@pytest.mark.real_data("sentiment140")
def test_real_tweets():
    made = data.load("tweets")
    x, y = made.train
    assert x.shape == (100_000, 15) and made.test[0].shape == (18_736, 15)
    assert y.bincount().tolist() == [50_000] * 2
    assert made.test[1].bincount().tolist() == [9318, 9418]
    assert x.min() == 0 and x.max() == 999 and len(x.unique()) == 1000
    real = x != 0
    assert (real[:, 1:] | ~real[:, :-1]).all()  # once a word has come, words follow
    assert 9 < real.sum(1).float().mean() < 10
    counts = x.flatten().bincount()[1:]
    assert counts[-1] < counts[20] and not torch.isin(made.test[0], x).logical_not().any()


@pytest.mark.real_data("sentiment140")
def test_real_tweets_as_vectors_held_out():
    made = data.load("tweets-vectors-holdout", max_train=1000)
    assert made.train[0].shape == (1000, 15, 100) and made.test[0].shape == (25_000, 15, 100)
    assert made.test[1].bincount().tolist() == [12_500] * 2
    x = made.test[0]
    assert -4 < x.min() < -3 and 3 < x.max() < 4
    assert 0.3 < (x == 0).all(2).float().mean() < 0.4


# videos


@pytest.fixture
def videos(root):
    """Two classes of three videos each, of 4 to 30 frames with 5 features."""
    folder = root / "ucf101"
    folder.mkdir()
    (folder / "classInd.txt").write_text("1 Archery\n2 Biking\n")
    train, test = [], []
    for label, kind in enumerate(("Archery", "Biking"), start=1):
        for i, n in enumerate((4, 10, 30)):
            name = f"v_{kind}_g0{i}_c01"
            (test if i == 2 else train).append(
                f"{kind}/{name}.avi" + (f" {label}" if i != 2 else "")
            )
            file = folder / "features" / kind / f"{name}.npy"
            file.parent.mkdir(parents=True, exist_ok=True)
            np.save(file, np.arange(n)[:, None] * np.ones(5, np.float16))
    (folder / "trainlist01.txt").write_text("\r\n".join(train) + "\r\n")
    (folder / "testlist01.txt").write_text("\n".join(test) + "\n")
    return folder


def test_videos_are_brought_to_ten_steps(videos):
    made = data.load("ucf101")
    assert made.shape == (10, 5) and made.classes == ("Archery", "Biking")
    assert made.train[1].tolist() == [0, 0, 1, 1] and made.test[1].tolist() == [0, 1]
    assert made.train[0].dtype == torch.float32
    assert made.train[0][0, :, 0].tolist() == [0, 0, 1, 1, 1, 2, 2, 3, 3, 3]
    assert made.train[0][1, :, 4].tolist() == list(range(10))
    assert made.test[0][0, :, 0].tolist() == list(range(1, 30, 3))
    assert len(data.load("ucf101", max_train=2).train[1]) == 2


def test_videos_without_features(videos):
    for file in sorted(videos.rglob("*Biking*.npy"))[:2]:
        file.unlink()
    refused("ucf101", r"2 of 6 feature files are missing, .*v_Biking_g00_c01.npy the first; make")


@pytest.mark.parametrize(
    ("array", "says"),
    [
        (np.ones((3, 4)), "holds 4 features a frame, the first file 5"),
        (np.ones(5), r"must hold numbers of shape \(frames, features\)"),
        (np.ones((0, 5)), r"must hold numbers of shape \(frames, features\)"),
        (np.full((3, 5), np.nan), "holds numbers that are not finite"),
        (np.array([[None]]), "cannot be read as a .npy file"),
        (b"half", "cannot be read as a .npy file"),
    ],
)
def test_features_that_are_not_right(videos, array, says):
    file = videos / "features" / "Biking" / "v_Biking_g02_c01.npy"
    if isinstance(array, bytes):
        file.write_bytes(array)
    else:
        np.save(file, array)
    refused("ucf101", says)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("classInd.txt", "1 Archery\n3 Biking\n", "no list of numbers from 1 and names"),
        ("classInd.txt", "", "no list of numbers from 1 and names"),
        ("trainlist01.txt", "Diving/v_Diving_g01.avi 1\n", "names no video of a known class"),
        ("testlist01.txt", "\n", "testlist01.txt is empty"),
    ],
)
def test_lists_that_are_not_right(videos, name, text, says):
    (videos / name).write_text(text)
    refused("ucf101", says)


# what cannot be downloaded


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("eeg", r"UCI withdrew .* X1 to X178, y from 1 to 5\); put data.csv into .*/eeg/\.$"),
        ("tweets", "six columns .* put training.csv, test.csv into"),
        ("tweets-vectors-holdout", "GloVe page; put training.csv, glove.6B.100d.txt into"),
        ("ucf101", "python -m tpsgd.data.frames; put classInd.txt, trainlist01.txt, testlist01"),
    ],
)
def test_fetch_says_where_to_get_it(root, monkeypatch, name, says):
    refused(name, says)
    monkeypatch.delenv("TPSGD_DATA")
    with pytest.raises(TpsgdError, match=r"into \$TPSGD_DATA/"):
        data.fetch(name)
    assert not (root / "cache").exists()


def test_fetch_names_only_what_is_lost(root):
    tweet_file(root / "sentiment140" / "training.csv", [(4, "a"), (0, "b")] * 5)
    refused("tweets", "; put test.csv into")
    assert data.path("tweets-holdout") == root / "sentiment140"


def test_sequence_sets_are_described(root):
    rows = {row.name: row for row in data.describe()}
    assert rows["eeg"][1:4] == ("3450 + 1150", "45 x 1", "2")
    assert rows["tweets"].shape == "15 of 1000" and rows["tweets-vectors"].shape == "15 x 100"
    assert rows["ucf101"].classes == "101"


# one's own, .npz


def npz(tmp_path, **arrays):
    np.savez(tmp_path / "own.npz", **arrays)
    return str(tmp_path / "own.npz")


X = RNG.normal(size=(20, 6, 3)).astype(np.float32)
LENGTHS = RNG.integers(1, 6, 20)
TOKENS = RNG.integers(0, 9, (20, 6))
TOKENS[0, 0] = 8


def test_npz_of_sequences(tmp_path):
    own = data.load(npz(tmp_path, x=X, y=Y))
    assert own.shape == (6, 3) and own.train[0].shape == (16, 6, 3) and own.vocabulary is None


def test_npz_with_lengths(tmp_path):
    nan = X.copy()
    nan[np.arange(6) >= LENGTHS[:, None]] = np.nan  # padding may be anything
    own = data.load(npz(tmp_path, x=nan, y=Y, lengths=LENGTHS))
    for (x, y), n in ((own.train, 16), (own.test, 4)):
        assert isinstance(x, Padded) and len(x) == len(y) == n
        assert (
            x.data.shape[1:] == own.shape == (LENGTHS.max(), 3) and x.lengths.dtype is torch.int64
        )
        for row, length, label in zip(x.data, x.lengths, y, strict=True):
            (i,) = np.flatnonzero((X[:, 0] == row[0].numpy()).all(1))
            assert length == LENGTHS[i] and label == Y[i] and not row[length:].any()
            assert np.array_equal(row[:length], X[i, :length])
    assert own.note.startswith(f"{LENGTHS.min()} to {LENGTHS.max()} steps; 20 % held out")


def test_padded_data_is_thinned(tmp_path):
    own = data.load(npz(tmp_path, x=X, y=Y, lengths=LENGTHS), max_train=6, seed=2)
    assert len(own.train[0]) == 6 and own.train[1].bincount().tolist() == [3, 3]
    assert own.train[0].shape[1:] == own.shape and "6 of 16 training samples" in own.note


def test_npz_with_lengths_and_a_test_part_of_more_steps(tmp_path):
    test = {"x_test": np.ones((2, 9, 3)), "y_test": Y[:2], "lengths_test": np.array([9, 2])}
    own = data.load(npz(tmp_path, x=X, y=Y, lengths=LENGTHS, **test))
    assert own.train[0].shape == (20, 9, 3) and own.test[0].lengths.tolist() == [9, 2]
    assert own.test[0].data.sum().item() == 11 * 3
    assert own.train[0].lengths.tolist() == LENGTHS.tolist()


def test_lengths_that_are_all_alike_make_a_tensor(tmp_path):
    own = data.load(npz(tmp_path, x=X, y=Y, lengths=np.full(20, 4)))
    assert isinstance(own.train[0], torch.Tensor) and own.shape == (4, 3)


def test_bytes_with_lengths_are_sequences(tmp_path):
    x = RNG.integers(0, 256, (20, 6, 3), dtype=np.uint8)
    assert data.load(npz(tmp_path, x=x, y=Y)).shape == (1, 6, 3)
    own = data.load(npz(tmp_path, x=x, y=Y, lengths=LENGTHS))
    assert own.shape == (LENGTHS.max(), 3) and own.train[0].data.max() > 1


def test_npz_of_tokens(tmp_path):
    own = data.load(npz(tmp_path, tokens=TOKENS.astype(np.uint16), y=Y))
    assert own.train[0].dtype == torch.int64 and own.shape == (6,) and own.vocabulary == 9
    table = data.load(npz(tmp_path, x=TOKENS, y=Y))
    assert table.train[0].dtype == torch.float32 and table.vocabulary is None


def test_npz_of_tokens_with_lengths(tmp_path):
    tokens = np.where(np.arange(6) < LENGTHS[:, None], TOKENS, 99)  # 99 is padding: not counted
    part = {"tokens_test": tokens, "y_test": Y, "lengths_test": LENGTHS}
    own = data.load(npz(tmp_path, tokens=tokens, y=Y, lengths=LENGTHS, **part))
    x = own.train[0]
    assert isinstance(x, Padded) and x.dtype == torch.int64 and own.vocabulary == 9
    assert x.data.max() < 9 and torch.equal(x.data, own.test[0].data)


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ({"x": X, "tokens": TOKENS}, "tokens in place of x"),
        ({"x": X, "lengths_test": LENGTHS}, "lengths, for both parts"),
        ({"x": X, "lengths": LENGTHS, "x_test": X, "y_test": Y}, "lengths, for both parts"),
        ({"tokens": TOKENS, "x_test": X, "y_test": Y}, "expected x and y"),
        ({"x": X, "lengths": LENGTHS[:-1]}, "a whole number for each of the 20 samples"),
        ({"x": X, "lengths": LENGTHS + 0.5}, "a whole number for each of the 20 samples"),
        ({"x": X, "lengths": LENGTHS * 0}, "length of sample 0 is 0; expected 1 to 6"),
        ({"x": X, "lengths": LENGTHS * 0 + 7}, "length of sample 0 is 7; expected 1 to 6"),
        ({"x": X[:, :, 0], "lengths": LENGTHS}, r"expected numbers \(samples, steps, features\)"),
        ({"x": X * np.inf, "lengths": LENGTHS}, r"x\[0, 0, 0\] is .*inf; fill it in"),
        ({"x": X[:0], "lengths": LENGTHS[:0]}, "x has 0 samples but y has 20"),
        ({"tokens": X}, r"expected whole numbers \(samples, steps\)"),
        ({"tokens": X[:, 0]}, "tokens is float32"),
        ({"tokens": -TOKENS}, "token -8 is below 0"),
        (
            {"tokens": TOKENS, "tokens_test": TOKENS + 3, "y_test": Y},
            "tokens_test has the token 11",
        ),
        (
            {"tokens": TOKENS, "tokens_test": TOKENS[:, :3], "y_test": Y},
            "pad them and give lengths",
        ),
        (
            {
                **{"x": X, "lengths": LENGTHS, "x_test": X[:, :, :2]},
                **{"y_test": Y, "lengths_test": LENGTHS},
            },
            "make them alike",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_npz_of_sequences_that_is_not_right(tmp_path, arrays, says):
    refused(npz(tmp_path, y=Y, **arrays), says)


# one's own, a function


@pytest.mark.parametrize(
    ("made", "dtype", "vocabulary"),
    [("torch.ones(n, 2)", torch.float32, None), ("torch.arange(n)", torch.int64, 5)],
)
def test_function_that_returns_padded(tmp_path, made, dtype, vocabulary):
    (tmp_path / "make.py").write_text(
        "import torch\nfrom tpsgd.nets.padded import Padded\ndef make():\n"
        f"    return Padded.of([{made} for n in [5, 2] * 5]), [0, 1] * 5\n"
    )
    own = data.load(f"{tmp_path / 'make.py'}:make")
    assert own.train[0].dtype == dtype and own.vocabulary == vocabulary
    assert own.train[0].lengths.tolist() == [5 - 3 * y for y in own.train[1].tolist()]


def test_function_that_pads_one_part_alone(tmp_path):
    (tmp_path / "make.py").write_text(
        "import torch\nfrom tpsgd.nets.padded import Padded\ndef make():\n"
        "    x = Padded.of([torch.ones(n, 2) for n in (3, 2)])\n"
        "    return (x, [0, 1]), (x.data, [0, 1])\n"
    )
    refused(f"{tmp_path / 'make.py'}:make", "one part as Padded and one not")


# one's own, a table of time steps


def csv(tmp_path, text):
    (tmp_path / "own.csv").write_text(text)
    return str(tmp_path / "own.csv")


def steps(lengths, line="s{i},{t},{a},{b},{y}"):
    """A line a step; a tells the sequence, b the time."""
    return [
        line.format(i=i, t=t, a=i, b=10 * t, y="cat" if i % 2 else "dog")
        for i, n in enumerate(lengths)
        for t in range(n)
    ]


def test_csv_of_steps(tmp_path):
    lines = steps([4] * 10)
    RNG.shuffle(lines)  # the column step puts them in order
    own = data.load(csv(tmp_path, "\n".join(["sequence,step,a,b,label", *lines])))
    x, y = own.train
    assert x.shape == (8, 4, 2) and own.shape == (4, 2) and own.classes == ("cat", "dog")
    assert (x[:, :, 1] == torch.tensor([0.0, 10, 20, 30])).all()
    assert (x[:, :, 0] == x[:, :1, 0]).all() and (y == 1 - x[:, 0, 0].long() % 2).all()
    assert "label column 'label', features unscaled, 4 steps; 20 % held out" in own.note


def test_csv_of_steps_of_different_lengths(tmp_path):
    lengths = [3, 1, 5, 2, 4, 3, 2, 5, 1, 4]
    lines = steps(lengths, "{y};{b};{a};s{i}")
    own = data.load(csv(tmp_path, "\n".join(["y;b;a;Sequence_ID", *lines])), max_train=5)
    x, y = own.train
    assert isinstance(x, Padded) and x.data.shape == (5, 5, 2) and "1 to 5 steps" in own.note
    for row, length, label in zip(x.data, x.lengths, y, strict=True):
        i = int(row[0, 1])
        assert length == lengths[i] and label == 1 - i % 2 and not row[length:].any()
        assert row[:length, 0].tolist() == [10 * t for t in range(length)]


def test_csv_of_times_that_float32_cannot_tell_apart(tmp_path):
    lines = [f"s{i},{1_700_000_000 + 9 - t},{9 - t},{i % 2}" for i in range(10) for t in range(10)]
    x = data.load(csv(tmp_path, "\n".join(["sequence,time,a,y", *lines]))).train[0]
    assert (x[:, :, 0] == torch.arange(10)).all()


def test_time_is_a_feature_where_there_are_no_sequences(tmp_path):
    lines = [f"{i},1,{i % 2}" for i in range(10)]
    assert data.load(csv(tmp_path, "\n".join(["time,a,y", *lines]))).shape == (2,)


GOOD = "s0,0,1,cat\ns0,1,2,cat\ns1,0,3,dog\ns1,1,4,dog\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("sequence,step,a,b\n" + GOOD, "a column 'sequence' but none for the label"),
        ("sequence,step,y\ns0,0,1\n", "has no column beside the label"),
        ("sequence,step,a,y\n", "has a header but no rows"),
        ("sequence,step,a,y\n" + GOOD + "s1,2,5,cat\n", "of the sequence 's1' changes from dog to"),
        ("sequence,step,a,y\n" + GOOD + "s1,1,5,dog\n", "sequence 's1' has two steps at 1; drop"),
        ("sequence,step,a,y\n" + GOOD + "s1,3,5,dog\n", "'s1' goes from step 1 to 3; fill the gap"),
        ("sequence,step,a,y\n" + GOOD + "s1,2,,dog\n", "line 6, column 'a': '' is no finite"),
        ("sequence,step,a,y\n" + GOOD + "s1,2,nan,dog\n", "line 6, column 'a': 'nan'"),
        ("sequence,step,a,y\n" + GOOD + "s1,2,1e300,dog\n", "line 6, column 'a': '1e300'"),
        ("sequence,step,a,y\n" + GOOD + "s1,,5,dog\n", "line 6, column 'step': ''"),
        ("sequence,step,a,y\n" + GOOD + "s1,2,5,\n", "line 6 has no label"),
        ("sequence,step,a,y\n" + GOOD + ",2,5,dog\n", "line 6 names no sequence in 'sequence'"),
        ("sequence,step,a,y\n" + GOOD + "s1,2,dog\n", "line 6 has 3 cells, the header has 4"),
        ("sequence,step,a,y\n" + GOOD, "2 samples are too few to hold 20 % out"),
    ],
)
def test_csv_of_steps_that_is_not_right(tmp_path, text, says):
    refused(csv(tmp_path, text), says)


# frames to features


class Mean(nn.Module):
    """Three features: a frame's mean colours."""

    def forward(self, x):
        assert not self.training and x.min() >= 0 and x.max() <= 1
        return x.mean((2, 3))


@pytest.fixture
def clips(tmp_path):
    """Videos as folders of frames: frame t is a grey of 20 t."""
    for kind in ("Archery", "Biking"):
        folder = tmp_path / "videos" / kind / f"v_{kind}_g01_c01"
        folder.mkdir(parents=True)
        for t in range(12):
            Image.new("RGB", (8, 6), (20 * t,) * 3).save(folder / f"{t}.png")
        (folder / "notes.txt").touch()
    return tmp_path / "videos"


def test_frames_become_features_that_ucf101_reads(clips, videos, tmp_path):
    for file in videos.rglob("*_g01_c01.npy"):
        file.unlink()
    refused("ucf101", "2 of 6 feature files are missing")
    seen = []
    told = {"frames": 4, "size": 5, "progress": lambda *a: seen.append(a)}
    assert frames.make(clips, videos / "features", Mean(), **told) == 2
    assert seen[-1] == (2, 2, str(Path("Biking", "v_Biking_g01_c01")))
    for kind in ("Archery", "Biking"):
        made = np.load(videos / "features" / kind / f"v_{kind}_g01_c01.npy")
        assert made == pytest.approx(np.array([1, 4, 7, 10])[:, None] * 20 / 255 * np.ones(3))
    refused("ucf101", "features a frame, the first file")  # the others have five
    for file in videos.rglob("*.npy"):
        np.save(file, np.load(file)[:, :3])
    assert data.load("ucf101").shape == (10, 3)


def test_frames_go_on_where_they_stopped(clips, tmp_path):
    class Failing(Mean):
        def forward(self, x):
            if len(list(tmp_path.rglob("*.npy"))) == 1:
                raise RuntimeError("stopped")
            return super().forward(x)

    out = tmp_path / "features"
    with pytest.raises(RuntimeError, match="stopped"):
        frames.make(clips, out, Failing())
    (first,) = out.rglob("*.*")
    stamp = first.stat().st_mtime_ns
    assert frames.make(clips, out, Mean(), size=4) == 1
    assert first.stat().st_mtime_ns == stamp and len([*out.rglob("*.npy")]) == 2
    assert frames.make(clips, out, Mean()) == 0 and not [*out.rglob("*.part")]


def test_a_frame_loses_its_sides():
    wide = np.zeros((4, 8, 3), np.uint8)
    wide[:, 2:6] = 255
    assert torch.equal(frames._square(wide, 4), torch.ones(3, 4, 4))


def encoder(tmp_path, body):
    (tmp_path / "enc.py").write_text("import torch\nfrom torch import nn\n" + body)
    return ["--encoder", f"{tmp_path / 'enc.py'}:make", "--size", "6"]


POOL = "def make(): return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())\n"


def test_frames_on_the_command_line(clips, tmp_path, capsys):
    words = [str(clips), str(tmp_path / "out"), *encoder(tmp_path, POOL), "--frames", "3"]
    assert frames.main(words) == 0
    out, err = capsys.readouterr()
    assert out == f"2 files written to {tmp_path / 'out'}\n" and err == "2 of 2\n"
    assert np.load(next((tmp_path / "out").rglob("*.npy"))).shape == (3, 3)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("def make(): return 3\n", "must return an nn.Module, got int"),
        ("def make(): return nn.Identity()\n", r"must return \(10, features\), got"),
        ("def make(): raise OSError('oh')\n", "failed with OSError: oh"),
        ("x = 1\n", "has no function 'make'"),
    ],
)
def test_encoders_that_are_not_right(clips, tmp_path, capsys, body, says):
    assert frames.main([str(clips), str(tmp_path / "out"), *encoder(tmp_path, body)]) == 2
    err = capsys.readouterr().err
    assert re.search(says, err) and err.count("\n") == 1
    assert not [*(tmp_path / "out").rglob("*.npy*")]


def test_frames_of_nothing(tmp_path, capsys):
    with pytest.raises(TpsgdError, match=r"holds no CLASS/VIDEO\.avi"):
        frames.make(tmp_path, tmp_path / "out", Mean())
    assert frames.main([str(tmp_path), "out", "--encoder", "nothing"]) == 2
    assert "is no FILE.py:FUNCTION" in capsys.readouterr().err


def test_videos_need_pyav(tmp_path, monkeypatch):
    (tmp_path / "in" / "Archery").mkdir(parents=True)
    (tmp_path / "in" / "Archery" / "v.avi").write_bytes(b"RIFF")
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(TpsgdError, match=r"pip install av \(or give folders of frame images\)"):
        frames.make(tmp_path / "in", tmp_path / "out", Mean())


class Container:
    """What PyAV opens: seven frames, or none."""

    def __init__(self, name):
        self.count = 0 if "empty" in name else 7

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def decode(self, video):
        for t in range(self.count):
            picture = np.full((4, 6, 3), 10 * t, np.uint8)
            yield SimpleNamespace(to_ndarray=lambda format, p=picture: p)


def test_videos_through_pyav(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "av", SimpleNamespace(open=Container))
    (tmp_path / "in" / "Archery").mkdir(parents=True)
    (tmp_path / "in" / "Archery" / "v_a.b.avi").touch()
    frames.make(tmp_path / "in", tmp_path / "out", Mean(), frames=7, size=4)
    made = np.load(tmp_path / "out" / "Archery" / "v_a.b.npy")
    assert made[:, 0] == pytest.approx(np.arange(7) * 10 / 255)
    (tmp_path / "in" / "Archery" / "empty.avi").touch()
    with pytest.raises(TpsgdError, match=r"empty.avi cannot be read as a video"):
        frames.make(tmp_path / "in", tmp_path / "out", Mean())


def test_evenly():
    for n in range(1, 40):
        chosen = ucf101.evenly(n)
        assert len(chosen) == 10 and (np.diff(chosen) >= 0).all()
        assert chosen[0] >= 0 and abs(chosen[0] - (n - 1 - chosen[-1])) <= 1
        assert chosen[-1] < n and np.ptp(np.diff(chosen)) <= 1


def test_a_function_may_return_a_list_of_different_lengths(tmp_path):
    file = tmp_path / "make.py"
    file.write_text(
        "import numpy as np\n"
        "def make(): return [np.ones((n, 2)) for n in (3, 5) * 10], [0, 1] * 10\n"
    )
    x, y = data.load(f"{file}:make").train
    assert isinstance(x, Padded) and set(x.lengths.tolist()) == {3, 5} and len(y) == 16
