"""Positive and negative tweets (Sentiment140), as tokens for an embedding or as GloVe vectors.

Go, Bhayani and Huang, Twitter Sentiment Classification, Stanford, 2009; no licence stated.
Pennington, Socher and Manning, GloVe, EMNLP 2014.
"""

import csv
import io
import re
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from tpsgd.common.errors import TpsgdError
from tpsgd.data.dataset import Array, Dataset, Pair, RawData, readable, tokens
from tpsgd.data.split import hold_out

STEPS = 15
VOCABULARY = 1000  # token 0 is padding, the others are the most frequent words
TRAIN, TEST, GLOVE = "training.csv", "test.csv", "glove.6B.100d.txt"
SHARE = 0.25
CLASSES = {"0": 0, "4": 1}
NEUTRAL = "2"  # a few tweets of the published test file; they are left out
CUT = f"other words left out, then the most frequent ones beyond {STEPS}; padded at the left"

USER, URL = "<user>", "<url>"
USER_PATTERN = re.compile(r"@\w+")
URL_PATTERN = re.compile(r"(?:https?://|www\.)\S+")
ENTITY_PATTERN = re.compile(r"&#?\w+;")
REPEATED_LETTER = re.compile(r"(\w)\1{2,}")
WORD_PATTERN = re.compile(rf"{USER}|{URL}|[^\W\d_]+(?:'[^\W\d_]+)*")


def read_tokens(folder: Path, entry: Dataset) -> RawData:
    """Tokens 1 to 999 for the most frequent words of the training set, 0 for padding."""
    train, test, note = _train_and_test(folder, entry)
    counts = Counter(word for text in train[0] for word in text)
    rank = {word: i for i, (word, _) in enumerate(counts.most_common(VOCABULARY - 1), start=1)}
    note += f"; the training set's {len(rank)} most frequent words, {CUT}"
    note += f"; {USER} is any name, {URL} any link"
    pairs = _numbered(train, rank), _numbered(test, rank)
    return RawData(entry.classes, *pairs, tokens, note, VOCABULARY)


def read_vectors(folder: Path, entry: Dataset) -> RawData:
    """GloVe vectors of the words; only samples that are used are converted from tokens."""
    train, test, note = _train_and_test(folder, entry)
    vocabulary = {word for texts, _ in (train, test) for text in texts for word in text}
    rank, vectors = _read_glove(folder / GLOVE, vocabulary)
    note += f"; words that GloVe has a vector for, {CUT}"
    pairs = _numbered(train, rank), _numbered(test, rank)
    return RawData(entry.classes, *pairs, partial(np.take, vectors, axis=0), note)


def words(text: str) -> list[str]:
    """The words of a tweet in lower case, with one word for all users and one for all links.

    Numbers, punctuation and apostrophes are removed, and a letter that is repeated three times or
    more is written twice.

    Examples:
        >>> words("@ann I'm sooooo happy!!! http://x.com/1 &lt;3")
        ['<user>', 'im', 'soo', 'happy', '<url>']
    """
    text = URL_PATTERN.sub(f" {URL} ", text.lower())
    text = ENTITY_PATTERN.sub(" ", USER_PATTERN.sub(f" {USER} ", text)).replace("’", "'")
    text = REPEATED_LETTER.sub(r"\1\1", text)
    return [word.replace("'", "") for word in WORD_PATTERN.findall(text)]


def _numbered(tweets: Pair, rank: dict[str, int]) -> Pair:
    """A row of numbers for each tweet: the ranks of its words, padded with 0 at the left.

    Words without a rank are left out. If more than `STEPS` remain, the most frequent ones (those
    of the lowest ranks) are left out too, because they say least about the text.
    """
    texts, y = tweets
    rows = np.zeros((len(texts), STEPS), np.int32)
    for row, text in zip(rows, texts, strict=True):
        ranks = [rank[word] for word in text if word in rank]
        if len(ranks) > STEPS:
            rarest = sorted(range(len(ranks)), key=ranks.__getitem__)[-STEPS:]
            ranks = [ranks[i] for i in sorted(rarest)]
        row[STEPS - len(ranks) :] = ranks
    return rows, y


def _train_and_test(folder: Path, entry: Dataset) -> tuple[Pair, Pair, str]:
    """Two files, or one of which a quarter is held out; and the note on the split."""
    texts, y = _read_tweets(folder / TRAIN)
    if TEST in entry.files:
        return (texts, y), _read_tweets(folder / TEST), f"tested on {TEST}"
    train = hold_out(y, SHARE, 0, str(folder / TRAIN))
    note = f"{SHARE:.0%} of {TRAIN} held out as test, the same for every seed"
    return (texts[train], y[train]), (texts[~train], y[~train]), note


def _read_tweets(file: Path) -> Pair:
    """The class is in column 1, the text in column 6; UTF-8 or, as published, Latin-1."""
    with readable(file, "a table of tweets", "get it again"):
        content = file.read_bytes()
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        text = content.decode("latin-1")
    texts: list[list[str]] = []
    labels: list[int] = []
    rows = csv.reader(io.StringIO(text, newline=""))
    try:
        for row in rows:
            if len(row) != 6 or row[0] not in (*CLASSES, NEUTRAL):
                raise TpsgdError(
                    f"{file}, line {rows.line_num}: expected six cells, the first of them 0"
                    f" (negative) or 4 (positive), got {len(row)}, the first '{''.join(row[:1])}'."
                )
            if row[0] != NEUTRAL:
                labels.append(CLASSES[row[0]])
                texts.append(words(row[5]))
    except csv.Error as error:
        raise TpsgdError(f"{file}, line {rows.line_num} is not a table ({error}).") from error
    if len(set(labels)) < 2:
        raise TpsgdError(f"{file} lacks negative or positive tweets; it may be cut short.")
    return np.fromiter(texts, object), np.array(labels, np.int64)


def _read_glove(file: Path, vocabulary: set[str]) -> tuple[dict[str, int], Array]:
    """The ranks and vectors of these words, most frequent first as in the file; row 0 is zero."""
    vectors: dict[str, str] = {}
    opened = readable(file, "GloVe's vectors", "get it again")
    with opened, file.open(encoding="utf-8", errors="replace") as stream:
        for line in stream:
            word, _, values = line.partition(" ")
            if word in vocabulary:
                vectors.setdefault(word, values)
    if not vectors:
        raise TpsgdError(f"{file} has no vector of a word in the tweets.")
    try:
        table = np.loadtxt(vectors.values(), np.float32, comments=None, ndmin=2)
    except ValueError as error:
        raise TpsgdError(f"{file} has vectors that are not rows of numbers ({error}).") from error
    if not np.isfinite(table).all():
        raise TpsgdError(f"{file} has a number that is not finite.")
    rank = {word: i for i, word in enumerate(vectors, start=1)}
    return rank, np.pad(table, [(1, 0), (0, 0)])


TWEETS = Dataset(
    name="tweets",
    classes=("negative", "positive"),
    shape=(STEPS,),
    train=100_000,
    test=18_736,
    read=read_tokens,
    folder="sentiment140",
    files=(TRAIN, TEST),
    by_hand="Stanford's Sentiment140 page offers tables of six columns without a header (0 negative"
    " or 4 positive, id, date, query, user, text); take two that share no tweets",
    vocabulary=VOCABULARY,
)
VECTORS = replace(
    TWEETS,
    name="tweets-vectors",
    shape=(STEPS, 100),
    read=read_vectors,
    files=(TRAIN, TEST, GLOVE),
    by_hand=TWEETS.by_hand + ", and glove.6B.100d.txt from Stanford's GloVe page",
    vocabulary=None,
)
HELD_OUT = {"train": 75_000, "test": 25_000}
ENTRIES = (
    TWEETS,
    replace(TWEETS, name="tweets-holdout", files=(TRAIN,), **HELD_OUT),
    VECTORS,
    replace(VECTORS, name="tweets-vectors-holdout", files=(TRAIN, GLOVE), **HELD_OUT),
)
