"""What is known of one built-in data set."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tpsgd.data.rows import Raw


@dataclass(frozen=True)
class Dataset:
    """One built-in set; `downloads` maps a published file to its published checksum.

    A set that cannot be downloaded has no `downloads`, and `by_hand` says where to get it. Where
    only the set's own files name the classes, `classes` is empty and `unnamed` their number.
    """

    name: str
    about: str
    classes: tuple[str, ...]
    shape: tuple[int, ...]
    train: int
    test: int
    licence: str
    citation: str
    read: Callable[[Path, "Dataset"], Raw]
    folder: str = ""
    files: tuple[str, ...] = ()
    mirrors: tuple[str, ...] = ()
    downloads: tuple[tuple[str, str], ...] = ()
    by_hand: str = ""
    vocabulary: int | None = None
    unnamed: int = 0

    @property
    def urls(self) -> tuple[str, ...]:
        """Where the publisher offers each file."""
        return tuple(self.mirrors[0] + file for file, _ in self.downloads)
