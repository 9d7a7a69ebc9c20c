"""Plain values and tensors on the disk, whole or refused: a folder of two files, or lines in one.

A folder has a description in JSON and tensors in safetensors. The description is the point of
commitment: it has the checksum of the tensors and one of itself, and the tensors' file is named
after its content. New tensors are written first, then the description is replaced, then the old
tensors are removed: a process that is killed at any moment leaves the old content or the new.
A file of lines has a JSON object with a checksum in each. No code is ever run.
"""

import contextlib
import hashlib
import json
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tpsgd.common.errors import TpsgdError
from tpsgd.common.files import named_folder, writable_folder, write_whole

LARGEST_DESCRIPTION = 1 << 26  # bytes; a description of a thousand modules has 200 KB
LEFT_OVER = 3600  # seconds after which no process is still between the two files
WEIGHTS, SEAL = "weights_sha256", "sha256"  # keys of the two checksums


@dataclass(frozen=True)
class FolderFormat:
    """The files of one kind of thing: NAME.json, and NAME-CHECKSUM.safetensors.

    Args:
        name: "model", "adaptor": the noun in errors, and how the files' names begin.
        format: the number of the format that is written and read.
    """

    name: str
    format: int

    def description(self, folder: Path) -> Path:
        return folder / f"{self.name}.json"

    def tensors(self, folder: Path, checksum: Any) -> Path:
        return folder / f"{self.name}-{str(checksum)[:16]}.safetensors"


def write(
    kind: FolderFormat, folder: Path, description: dict[str, Any], tensors: Mapping[str, Tensor]
) -> Path:
    """Write both files; the earlier content of the folder stays until the new one is complete."""
    content = to_bytes(tensors)
    checksum = hashlib.sha256(content).hexdigest()
    try:
        text = sealed({"format": kind.format, **description, WEIGHTS: checksum}, indent=1)
    except (TypeError, ValueError) as error:
        raise TpsgdError(f"a {kind.name} is described by plain values: {error}") from error
    writable_folder(folder)
    file, old = kind.tensors(folder, checksum), None
    with contextlib.suppress(TpsgdError, OSError):
        old = kind.tensors(folder, read_description(kind, folder).get(WEIGHTS))
    write_whole(file, content)
    try:
        write_whole(kind.description(folder), text)
    except OSError:
        if file != old:
            file.unlink()
        raise
    if old is not None and file != old:
        with contextlib.suppress(OSError):
            old.unlink()
    _remove_others(kind, folder, file, LEFT_OVER)
    return folder


def read(kind: FolderFormat, folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The description and the tensors, if the files are whole and belong together."""
    description = read_description(kind, folder)
    checksum = description.get(WEIGHTS)
    file = kind.tensors(folder, checksum)
    if not isinstance(checksum, str) or not file.is_file():
        raise TpsgdError(f"{folder} holds no {kind.name}: there is no {file.name}")
    content = file.read_bytes()
    if hashlib.sha256(content).hexdigest() != checksum:
        raise TpsgdError(f"{file} is damaged, or it and {kind.name}.json do not belong together")
    return description, from_bytes(content, file)


def read_description(kind: FolderFormat, folder: Path) -> dict[str, Any]:
    """The description, if it is whole and of the format that this version reads."""
    file, noun = kind.description(folder), kind.name
    if not file.is_file():
        raise TpsgdError(f"{folder} holds no {noun}: there is no {file.name}")
    if file.stat().st_size > LARGEST_DESCRIPTION:
        raise TpsgdError(f"{file} is too large for the description of a {noun}")
    content = file.read_bytes()
    try:
        description = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise TpsgdError(f"{file} is not whole: {error}") from error
    version = description.get("format") if isinstance(description, dict) else None
    if type(version) is not int:
        raise TpsgdError(f"{file} describes no {noun} of tpsgd")
    if version != kind.format:
        advice = "install a newer tpsgd" if version > kind.format else f"make the {noun} again"
        formats = f"format {version}, this version of tpsgd reads format {kind.format}"
        raise TpsgdError(f"{file} has {formats}: {advice}")
    description.pop(SEAL, None)
    if content != sealed(description, indent=1):
        raise TpsgdError(f"{file} was edited or damaged, by its checksum; save the {noun} again")
    return description


def holds(kind: FolderFormat, folder: Path) -> bool:
    return kind.description(folder).exists()


def check_free(kind: FolderFormat, folder: str | Path, overwrite: bool) -> Path:
    """The folder, unless it holds something of this kind that may not be replaced."""
    path = named_folder(folder, f"to save the {kind.name} in")
    if holds(kind, path) and not overwrite:
        raise TpsgdError(
            f"{path} already holds a {kind.name}: name another folder, or replace it with "
            "overwrite=True (--overwrite)"
        )
    return path


def remove_leftovers(kind: FolderFormat, folder: Path) -> None:
    """Remove files of killed processes, in a folder that no other process writes to."""
    file = kind.tensors(folder, read_description(kind, folder).get(WEIGHTS))
    _remove_others(kind, folder, file, 0)


def remove(kind: FolderFormat, folder: Path) -> None:
    """Remove a description, then its tensors, then the folder if it is empty."""
    with contextlib.suppress(OSError):
        kind.description(folder).unlink()
        _remove_others(kind, folder, None, 0)
        folder.rmdir()


def _remove_others(kind: FolderFormat, folder: Path, file: Path | None, seconds: float) -> None:
    """Remove all tensors but `file`, and half-written files, if they are at least so old.

    A younger file may belong to a process that is about to write the description.
    """
    tensors = rf"{kind.name}-[0-9a-f]{{16}}\.safetensors"
    pattern = re.compile(rf"{tensors}|\.({tensors}|{kind.name}\.json)\.[\d-]+\.part")
    for other in folder.iterdir():
        with contextlib.suppress(OSError):
            is_old = time.time() - other.stat().st_mtime >= seconds
            if pattern.fullmatch(other.name) and is_old and other != file:
                other.unlink()


def to_bytes(tensors: Mapping[str, Tensor]) -> bytes:
    """The content of a .safetensors file; tensors that share memory are written separately."""
    import safetensors.torch

    form = torch.contiguous_format
    try:
        copies = {k: t.detach().cpu().clone(memory_format=form) for k, t in tensors.items()}
        return safetensors.torch.save(copies)
    except (KeyError, RuntimeError, ValueError) as error:
        kinds = ", ".join(sorted({str(t.dtype).removeprefix("torch.") for t in tensors.values()}))
        raise TpsgdError(f"safetensors cannot hold tensors of type {kinds} ({error})") from error


def from_bytes(content: bytes, source: Any) -> dict[str, Tensor]:
    """The tensors of a .safetensors file; `source` is named in errors."""
    import safetensors.torch

    try:
        return safetensors.torch.load(content)
    except Exception as error:  # a damaged file makes its reader raise anything
        raise TpsgdError(f"{source} is no whole .safetensors file: save it again") from error


def sealed(values: dict[str, Any], indent: int | None = None) -> bytes:
    """Plain values as JSON with a checksum as the last entry.

    A reader compares its file with the text that this function makes of the values in it, so that
    a change is noticed even where the values are the same, as those of 1e-05 and 1E-05 are.
    """
    text = json.dumps(values, separators=(",", ":"))
    checksum = hashlib.sha256(text.encode()).hexdigest()
    return json.dumps({**values, SEAL: checksum}, indent=indent).encode()


class JsonLines:
    """A file of JSON objects that only grows; an incomplete last line is dropped when it is read.

    Attributes:
        objects: those that the file had, in their order; None for a line that is damaged.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        content = file.read_bytes() if file.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            os.truncate(file, len(whole))
        self.objects = [_object(line) for line in whole.splitlines()]

    def add(self, values: dict[str, Any]) -> None:
        """Append an object, which is on the disk when this returns."""
        with self.file.open("ab") as file:
            file.write(sealed(values) + b"\n")
            file.flush()
            os.fsync(file.fileno())


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(values, dict):
        return None
    values.pop(SEAL, None)
    return values if line == sealed(values) else None
