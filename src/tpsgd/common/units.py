"""Bytes and tables as people read them."""

import re
from collections.abc import Sequence

from tpsgd.common.errors import TpsgdError
from tpsgd.common.names import printable
from tpsgd.common.numbers import is_whole

LARGEST = 1e18  # bytes
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows of text as aligned columns, for a terminal."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def as_bytes(text: str | int) -> int:
    """The number of bytes that a text such as "64MB" means; 1 KB is 1,024 bytes, as in `size`.

    Examples:
        >>> as_bytes("1.5 KB")
        1536
    """
    if isinstance(text, int) and is_whole(text, 1):
        return text
    match = re.fullmatch(r"\s*(\d+\.?\d*)\s*([KMGT]?)I?B?\s*", str(text).upper())
    number = float(match[1]) if match else 0.0
    if not isinstance(text, str) or not match or not 0 < number < LARGEST:
        raise TpsgdError(f"{text!r} is no amount of memory: write 64MB, 1.5GB or a number of bytes")
    return max(1, int(number * UNITS[match[2]]))


def size(count: float) -> str:
    """Bytes as a text.

    Examples:
        >>> size(1536)
        '1.5 KB'
    """
    count = min(count, LARGEST)  # a sum of whole numbers has no end
    for unit in ("B", "KB", "MB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GB"
