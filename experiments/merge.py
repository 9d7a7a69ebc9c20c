"""Join result files of runs that went on side by side: the later file wins where both have a value.

python -m experiments --merge part1/deep.json part2/deep.json --out results
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tpsgd import TpsgdError
from tpsgd.common.files import writable_folder, write_whole


def merged(first: Any, second: Any) -> Any:
    """Both records; dictionaries are joined key by key, but rows of two commits are not mixed."""
    if is_words(first) and is_words(second):
        return list(dict.fromkeys([*first, *second]))
    if not isinstance(first, dict) or not isinstance(second, dict):
        return second
    are_rows = "accuracies" in first and "accuracies" in second
    if are_rows and first.get("commit") != second.get("commit"):
        return second
    return first | {k: merged(first[k], v) if k in first else v for k, v in second.items()}


def is_words(value: Any) -> bool:
    """Whether a value is a list of words, such as the names of what has been measured."""
    return isinstance(value, list) and bool(value) and all(isinstance(v, str) for v in value)


def join(parts: Iterable[Path], folder: Path) -> list[Path]:
    """Add files, or all JSON files of folders, in this order, to those of the same name."""
    listed = [sorted(part.glob("*.json")) if part.is_dir() else [part] for part in parts]
    files = [file for files in listed for file in files]
    records: dict[Path, Any] = {}
    for file in files:
        target = folder / file.name
        if target not in records:
            records[target] = read(target) if target.exists() else {}
        records[target] = merged(records[target], read(file))
    if not records:
        raise TpsgdError("there are no files of results (*.json) in these folders")
    writable_folder(folder)
    return [write_whole(t, json.dumps(record, indent=1).encode()) for t, record in records.items()]


def read(file: Path) -> Any:
    """The record in a file of results."""
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TpsgdError(f"{file} is no file of results: {error}") from error
    if not isinstance(record, dict):
        raise TpsgdError(f"{file} is no file of results: it holds no object")
    return record
