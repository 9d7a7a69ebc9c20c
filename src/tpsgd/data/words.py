"""From a tweet to its words, and from words to a row of numbers."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from tpsgd.data.rows import Array

USER, URL = "<user>", "<url>"
_USER = re.compile(r"@\w+")
_URL = re.compile(r"(?:https?://|www\.)\S+")
_ENTITY = re.compile(r"&#?\w+;")
_LONG = re.compile(r"(\w)\1{2,}")
_WORD = re.compile(rf"{USER}|{URL}|[^\W\d_]+(?:'[^\W\d_]+)*")


def words(text: str) -> list[str]:
    """The words of a tweet, in lower case; people and links become one word each.

    Numbers and punctuation are left out, apostrophes taken out, and a letter that comes three
    times or more comes twice.

    Examples:
        >>> words("@ann I'm sooooo happy!!! http://x.com/1 &lt;3")
        ['<user>', 'im', 'soo', 'happy', '<url>']
    """
    text = _URL.sub(f" {URL} ", text.lower())
    text = _ENTITY.sub(" ", _USER.sub(f" {USER} ", text)).replace("’", "'")
    return [word.replace("'", "") for word in _WORD.findall(_LONG.sub(r"\1\1", text))]


def most_frequent(texts: Iterable[Sequence[str]], size: int) -> dict[str, int]:
    """Numbers 1 to `size` for the most frequent words, the most frequent first.

    Examples:
        >>> most_frequent([["so", "sad"], ["so", "so", "glad"]], 2)
        {'so': 1, 'sad': 2}
    """
    counts = Counter(word for text in texts for word in text)
    return {word: i for i, (word, _) in enumerate(counts.most_common(size), start=1)}


def numbered(texts: Sequence[Sequence[str]], rank: Mapping[str, int], steps: int) -> Array:
    """A row of `steps` numbers a text: its known words in their order, at the row's end.

    0 fills the row from the left. Words without a rank are left out; of more than `steps`, the
    most frequent ones (of the lowest ranks) are left out too, as they say least.

    Examples:
        >>> numbered([["so", "so", "glad"], ["glad", "what"]], {"so": 1, "glad": 2}, 2)
        array([[1, 2],
               [0, 2]], dtype=int32)
    """
    rows = np.zeros((len(texts), steps), np.int32)
    for row, text in zip(rows, texts, strict=True):
        known = [rank[word] for word in text if word in rank]
        if len(known) > steps:
            rarest = sorted(range(len(known)), key=known.__getitem__)[-steps:]
            known = [known[i] for i in sorted(rarest)]
        if known:
            row[-len(known) :] = known
    return rows
