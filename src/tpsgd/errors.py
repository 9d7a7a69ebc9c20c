"""The one exception of the library, and the hint for a word that does not exist."""

import difflib
from collections.abc import Iterable


class TpsgdError(ValueError):
    """An argument cannot be used; the message says what was expected."""


def suggestion(word: str, words: Iterable[str]) -> str:
    """The closest word that exists, or the list of words.

    Examples:
        >>> suggestion("epoch", ["lr", "epochs"])
        "did you mean 'epochs'?"
    """
    words = list(words)
    close = difflib.get_close_matches(word.lower(), words, n=1)
    return f"did you mean {close[0]!r}?" if close else f"choose from {', '.join(words)}"
