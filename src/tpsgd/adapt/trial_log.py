"""Finished trials in a file, so that a search that was stopped can go on."""

import json
import os
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tpsgd.adapt.trials import Trial

FILE = "trials.jsonl"


class Log:
    """Finished trials in a file, a line each; a line that was cut short is dropped."""

    def __init__(self, folder: str | Path | None) -> None:
        from tpsgd.files import writable_folder

        self.file = None if folder is None else writable_folder(Path(folder).expanduser()) / FILE
        self.found: dict[str, Trial] = {}
        if self.file is None or not self.file.exists():
            return
        content = self.file.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            os.truncate(self.file, len(whole))
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                values = json.loads(line)
                key = _text(values.pop("key"))
                self.found[key] = Trial(**values)
            except (ValueError, KeyError, TypeError, AttributeError):
                warnings.warn(f"{self.file}, line {number}: no trial, passed over", stacklevel=3)

    def get(self, key: dict[str, Any]) -> Trial | None:
        """What a trial has shown, if it is there."""
        return self.found.get(_text(key))

    def add(self, key: dict[str, Any], trial: Trial) -> None:
        """Keep a trial: one write at the end of the file."""
        self.found[_text(key)] = trial
        if self.file is None:
            return
        line = json.dumps({"key": key, **asdict(trial)}) + "\n"
        place = os.open(self.file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            os.write(place, line.encode())
            os.fsync(place)
        finally:
            os.close(place)


def _text(key: Any) -> str:
    return json.dumps(key, sort_keys=True)
