"""Values in a file, one per line with a checksum, on the disk as soon as they are added."""

import json
import os
import zlib
from pathlib import Path
from typing import Any

CHECKSUM = "crc32"


class JsonLines:
    """A file of JSON objects that only grows; an incomplete last line is dropped when it is read.

    Attributes:
        objects: those that the file had, in their order; None for a line that is damaged.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.objects: list[dict[str, Any] | None] = []
        if not file.exists():
            return
        content = file.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            os.truncate(file, len(whole))
        self.objects = [_object(line) for line in whole.splitlines()]

    def add(self, values: dict[str, Any]) -> None:
        """Append an object to the file."""
        with self.file.open("a") as file:
            file.write(json.dumps(values | {CHECKSUM: _checksum(values)}) + "\n")
            file.flush()
            os.fsync(file.fileno())


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        return None
    whole = isinstance(values, dict) and values.pop(CHECKSUM, None) == _checksum(values)
    return values if whole else None


def _checksum(values: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(values).encode())
