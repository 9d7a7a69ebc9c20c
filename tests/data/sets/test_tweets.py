"""Tweets: as tokens and as vectors, tested on a second file or on a part of the first."""

import pytest
import torch

from tpsgd import data
from tpsgd.data.sets import tweets


def tweet_file(file, rows, encoding="utf-8"):
    file.parent.mkdir(exist_ok=True)
    lines = [f'"{y}","1","Mon","NO_QUERY","ann","{text}"\n' for y, text in rows]
    file.write_bytes("".join(lines).encode(encoding))


@pytest.fixture
def sentiment(root):
    folder = root / "sentiment140"
    rows = [(4, "@bob good day 7!"), (0, "sad sad day :( http://t.co/x")] * 10
    tweet_file(folder / "training.csv", rows)
    tweet_file(folder / "test.csv", [(4, "A GOOOOOD day, unseen"), (0, "nothing known"), (2, "x")])
    lines = [f"{w} {' '.join([str(i + 1)] * 3)}\n" for i, w in enumerate(["day", "good", "known"])]
    (folder / "glove.6B.100d.txt").write_text("".join(lines) + "never 1 2 broken\n")
    return folder


def test_tweets_are_tokens_padded_at_the_left(sentiment):
    loaded = data.load("tweets")
    x, y = loaded.train
    assert x.dtype == torch.int64 and x.shape == (20, 15) and loaded.shape == (15,)
    assert loaded.vocabulary == 1000 and loaded.classes == ("negative", "positive")
    # by frequency: day 20 and sad 20 (seen later), then <user>, good and <url> with 10 each
    assert x[0].tolist() == [0] * 12 + [3, 4, 1] and x[1].tolist() == [0] * 11 + [2, 2, 1, 5]
    assert y[:2].tolist() == [1, 0] and loaded.test[1].tolist() == [1, 0]
    assert loaded.test[0].tolist() == [[0] * 13 + [4, 1], [0] * 15]
    assert "the training set's 5 most frequent words" in loaded.note


def test_tweets_as_vectors(sentiment):
    loaded = data.load("tweets-vectors", max_train=4)
    x, _ = loaded.train
    assert x.shape == (4, 15, 3) and x.dtype == torch.float32 and loaded.vocabulary is None
    assert loaded.test[0][0].tolist() == [[0.0] * 3] * 13 + [[2.0] * 3, [1.0] * 3]
    assert loaded.test[0][1, -1].tolist() == [3.0] * 3 and not loaded.test[0][1, :-1].any()
    assert "4 of 20 training samples" in loaded.note


@pytest.mark.parametrize("name", ["tweets-holdout", "tweets-vectors-holdout"])
def test_tweets_are_held_out_the_same_for_every_seed(sentiment, name):
    (sentiment / "test.csv").unlink()
    loaded = data.load(name, seed=3)
    assert sorted(loaded.train[1].bincount().tolist()) == [7, 8]
    assert len(loaded.test[1]) == 5 and "25% of training.csv held out" in loaded.note
    assert torch.equal(loaded.test[0], data.load(name, seed=4).test[0])


def test_words_of_held_out_tweets_are_not_in_the_vocabulary(root):
    texts = [(4 * (i % 2), f"word{chr(97 + i)}") for i in range(20)]
    tweet_file(root / "sentiment140" / "training.csv", texts)
    loaded = data.load("tweets-holdout")
    assert (loaded.train[0][:, -1] > 0).all() and not loaded.test[0].any()


def test_long_tweets_lose_unknown_words_then_the_most_frequent(root, monkeypatch):
    monkeypatch.setattr(tweets, "VOCABULARY", 18)
    folder = root / "sentiment140"
    letters = [chr(97 + i) * 2 for i in range(20)]
    rows = [(4 * (i % 2), " ".join(letters[:i])) for i in range(1, 21)]
    tweet_file(folder / "training.csv", rows)
    tweet_file(folder / "test.csv", [(0, " ".join(reversed(letters))), (4, "aa")])
    long = data.load("tweets").test[0][0].tolist()
    assert long == list(range(17, 2, -1))  # 18 and up unknown; 1 and 2 the most frequent


def test_tweets_in_latin_1_are_read(root):
    texts = [(4, "café très"), (0, "triste")] * 2
    for file in ("training.csv", "test.csv"):
        tweet_file(root / "sentiment140" / file, texts, "latin-1")
    loaded = data.load("tweets")
    assert loaded.train[0][0].count_nonzero() == 2 and torch.equal(loaded.train[0], loaded.test[0])


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("training.csv", "", "lacks negative or positive tweets"),
        ("training.csv", '"4","","","","","good"\n', "lacks negative or positive tweets"),
        ("test.csv", '"4","","","","","a"\n"7","","","","","b"\n', "line 2: expected six .* '7'"),
        ("test.csv", '"4","good"\n', "line 1: expected six cells.*got 2"),
        ("glove.6B.100d.txt", "", "has no vector of a word in the tweets"),
        (
            "glove.6B.100d.txt",
            "day 1 2\ngood 1 2 3\n",
            "not rows of numbers .the number of columns changed",
        ),
        ("glove.6B.100d.txt", "day 1 x\n", "not rows of numbers .could not convert string 'x'"),
        ("glove.6B.100d.txt", "day 1 nan\n", "has a number that is not finite"),
    ],
)
def test_tweet_files_that_are_wrong_are_refused(refused, sentiment, file, text, message):
    (sentiment / file).write_text(text)
    refused("tweets-vectors", message)


@pytest.mark.real_data("sentiment140")
def test_real_tweets():
    loaded = data.load("tweets")
    x, y = loaded.train
    assert x.shape == (100_000, 15) and loaded.test[0].shape == (18_736, 15)
    assert y.bincount().tolist() == [50_000] * 2
    assert loaded.test[1].bincount().tolist() == [9318, 9418]
    assert x.min() == 0 and x.max() == 999 and len(x.unique()) == 1000
    real = x != 0
    assert (real[:, 1:] | ~real[:, :-1]).all()  # once a word has come, words follow
    assert 9 < real.sum(1).float().mean() < 10
    counts = x.flatten().bincount()[1:]
    assert counts[-1] < counts[20] and not torch.isin(loaded.test[0], x).logical_not().any()


@pytest.mark.real_data("sentiment140")
def test_real_tweets_as_vectors_held_out():
    loaded = data.load("tweets-vectors-holdout", max_train=1000)
    assert loaded.train[0].shape == (1000, 15, 100) and loaded.test[0].shape == (25_000, 15, 100)
    assert loaded.test[1].bincount().tolist() == [12_500] * 2
    x = loaded.test[0]
    assert -4 < x.min() < -3 and 3 < x.max() < 4
    assert 0.3 < (x == 0).all(2).float().mean() < 0.4


def test_fetch_names_only_the_missing_files(refused, root):
    tweet_file(root / "sentiment140" / "training.csv", [(4, "a"), (0, "b")] * 5)
    refused("tweets", "; put test.csv into")
    assert data.path("tweets-holdout") == root / "sentiment140"
