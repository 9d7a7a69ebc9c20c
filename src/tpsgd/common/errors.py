"""The one exception of the library, and the hint for a word that does not exist."""

import difflib
import sys
from collections.abc import Iterable

from tpsgd.common.names import printable

LONGEST = 1000  # characters of a message, whatever a file or a user's word has in it
LIBRARIES = {"tpsgd", "torch", "numpy", "typer", *sys.stdlib_module_names}


class TpsgdError(ValueError):
    """An argument cannot be used; the message says what was expected, in one line."""

    __module__ = "tpsgd"  # in a traceback it has its public name

    def __init__(self, message: str) -> None:
        text = printable(" ".join(str(message).split()))
        if len(text) > LONGEST:  # the advice is at the end
            text = f"{text[: LONGEST // 2]} ... {text[-LONGEST // 3 :]}"
        super().__init__(text)


def shortened(value: object, most: int = 100) -> str:
    """A value out of a file as text for one line, cut off where it is too long for a message.

    Examples:
        >>> shortened("a" * 30, most=10)
        'aaaaaaa...'
    """
    text = " ".join(str(value).split())
    return text if len(text) <= most else f"{text[: most - 3]}..."


def reason(error: Exception, place: str = "") -> str:
    """Why something has failed, in a line, with the user's line or else this place."""
    if isinstance(error, TpsgdError):
        return str(error)
    text = shortened(f"{type(error).__name__}: {error}", 200)
    place = user_line(error) or place
    return f"{text} ({place})" if place else text


def is_users(module: str) -> bool:
    """Whether a module is neither tpsgd's, nor of a library that it calls."""
    top = module.partition(".")[0]
    return top not in LIBRARIES and not top.startswith("tpsgd_")


def user_line(error: BaseException) -> str:
    """The last line of the user's code that an error came through: `rule.py, line 7`, or ""."""
    place, step = "", error.__traceback__
    while step is not None:
        if is_users(str(step.tb_frame.f_globals.get("__name__"))):
            place = f"{step.tb_frame.f_code.co_filename}, line {step.tb_lineno}"
        step = step.tb_next
    return place


def suggestion(word: str, words: Iterable[str]) -> str:
    """The closest word that exists, or the list of words.

    Examples:
        >>> suggestion("epoch", ["lr", "epochs"])
        "did you mean 'epochs'?"
    """
    words = list(words)
    close = difflib.get_close_matches(word.lower(), words, n=1)
    return f"did you mean {close[0]!r}?" if close else f"choose from {', '.join(words)}"
