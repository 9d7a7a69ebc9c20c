"""Tweets, glad or sad (Sentiment140): as tokens to look up, or as vectors of their words."""

from __future__ import annotations

import csv
import io
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tpsgd.data.rows import Array, Raw, tokens
from tpsgd.data.split import stratified
from tpsgd.data.words import most_frequent, numbered, words
from tpsgd.errors import TpsgdError

if TYPE_CHECKING:
    from tpsgd.data.entry import Dataset

STEPS = 15
VOCABULARY = 1000  # 0 for padding, then the most frequent words
TRAIN, TEST, GLOVE = "training.csv", "test.csv", "glove.6B.100d.txt"
SHARE = 0.25
SEED = 0
CLASSES = {"0": 0, "4": 1}
NEUTRAL = "2"  # a few tweets of the publisher's own test part; they are left out
CUT = f"other words left out, then the most frequent ones beyond {STEPS}; padded at the left"


class Part(NamedTuple):
    """Tweets as lists of words, and their classes."""

    texts: list[list[str]]
    y: Array


def as_tokens(folder: Path, entry: Dataset) -> Raw:
    """Numbers of words: 1 to 999 for the train part's most frequent ones, 0 for padding."""
    train, test, note = _parts(folder, entry)
    rank = most_frequent(train.texts, VOCABULARY - 1)
    pairs = [(numbered(texts, rank, STEPS), y) for texts, y in (train, test)]
    note += f"; the train part's {len(rank)} most frequent words, {CUT}"
    note += "; <user> and <url> stand for names and links"
    return Raw(entry.classes, pairs[0], pairs[1], tokens, note, VOCABULARY)


def as_vectors(folder: Path, entry: Dataset) -> Raw:
    """GloVe vectors of the words; they stay numbers until it is known which are asked for."""
    train, test, note = _parts(folder, entry)
    used = {word for part in (train, test) for text in part.texts for word in text}
    rank, table = _glove(folder / GLOVE, used)
    pairs = [(numbered(texts, rank, STEPS), y) for texts, y in (train, test)]
    note += f"; words that GloVe has a vector for, {CUT}"
    return Raw(entry.classes, pairs[0], pairs[1], partial(np.take, table, axis=0), note)


def _parts(folder: Path, entry: Dataset) -> tuple[Part, Part, str]:
    """The train and the test part: two files, or a quarter of the one file held out."""
    whole = _tweets(folder / TRAIN)
    if TEST in entry.files:
        return whole, _tweets(folder / TEST), f"tested on {TEST}"
    train = stratified(whole.y, len(whole.y) - round(SHARE * len(whole.y)), SEED)
    parts = [
        Part([text for text, mine in zip(whole.texts, mask, strict=True) if mine], whole.y[mask])
        for mask in (train, ~train)
    ]
    return parts[0], parts[1], f"{SHARE:.0%} of {TRAIN} held out as test, the same for every seed"


def _tweets(file: Path) -> Part:
    """The first column is the class, the sixth the text; UTF-8 or, as published, Latin-1."""
    content = file.read_bytes()
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        text = content.decode("latin-1")
    part = Part([], np.empty(0))
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
                part.texts.append(words(row[5]))
    except csv.Error as error:
        raise TpsgdError(f"{file}, line {rows.line_num}: no table ({error}).") from error
    if len(set(labels)) < 2:
        raise TpsgdError(f"{file} lacks negative or positive tweets; it may be cut short.")
    return part._replace(y=np.array(labels, np.int64))


def _glove(file: Path, used: set[str]) -> tuple[dict[str, int], Array]:
    """The vectors of the words that are used, in the file's order (of frequency); row 0 is zero."""
    rank: dict[str, int] = {}
    found: list[Array] = []
    with file.open(encoding="utf-8", errors="replace") as stream:
        for line in stream:
            word, _, values = line.partition(" ")
            if word in used and word not in rank:
                rank[word] = len(rank) + 1
                found.append(_vector(file, word, values))
    widths = {len(vector) for vector in found}
    if len(widths) != 1:
        raise TpsgdError(f"{file} holds vectors of different lengths, or of none of the words.")
    return rank, np.concatenate([np.zeros((1, *widths), np.float32), np.stack(found)])


def _vector(file: Path, word: str, values: str) -> Array:
    try:
        vector = np.array(values.split(), np.float32)
    except ValueError as error:
        raise TpsgdError(f"{file}: the vector of '{word}' is no row of numbers.") from error
    if not np.isfinite(vector).all():
        raise TpsgdError(f"{file}: the vector of '{word}' is not finite.")
    return vector
