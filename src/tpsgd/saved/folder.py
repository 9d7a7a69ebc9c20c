"""A folder with a description in JSON and tensors in safetensors: written whole, read with checks.

The description is the point of commitment. It has the checksum of the tensors and a checksum of
itself, and the tensors' file is named after its content. New tensors are written beside old ones,
then the description is replaced, then the old tensors are removed: a process that is killed at any
moment leaves the old content or the new. No code is ever run.
"""

import contextlib
import hashlib
import json
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
        """The file of the description."""
        return folder / f"{self.name}.json"

    def tensors(self, folder: Path, checksum: Any) -> Path:
        """The file of the tensors with this checksum."""
        return folder / f"{self.name}-{str(checksum)[:16]}.safetensors"


def write(
    kind: FolderFormat, folder: Path, description: dict[str, Any], tensors: dict[str, Tensor]
) -> Path:
    """Write both files; what the folder held before is kept until the new content is complete."""
    content = to_bytes(tensors)
    checksum = hashlib.sha256(content).hexdigest()
    description = {"format": kind.format, **description, WEIGHTS: checksum}
    try:
        description[SEAL] = _seal(description)
        text = json.dumps(description, indent=1)
    except (TypeError, ValueError) as error:
        raise TpsgdError(f"a {kind.name} is described by plain values: {error}") from error
    writable_folder(folder)
    file, old = kind.tensors(folder, checksum), None
    with contextlib.suppress(TpsgdError, OSError):
        old = kind.tensors(folder, read_description(kind, folder).get(WEIGHTS))
    write_whole(file, content)
    try:
        write_whole(kind.description(folder), text.encode())
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


def holds(kind: FolderFormat, folder: Path) -> bool:
    """Whether a folder holds a description of this kind, of any format."""
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


def read_description(kind: FolderFormat, folder: Path) -> dict[str, Any]:
    """The description, if it is whole and of the format that this version reads."""
    file, noun = kind.description(folder), kind.name
    if not file.is_file():
        raise TpsgdError(f"{folder} holds no {noun}: there is no {file.name}")
    if file.stat().st_size > LARGEST_DESCRIPTION:
        raise TpsgdError(f"{file} is too large for the description of a {noun}")
    try:
        description = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise TpsgdError(f"{file} is not whole: {error}") from error
    version = description.get("format") if isinstance(description, dict) else None
    if type(version) is not int:
        raise TpsgdError(f"{file} describes no {noun} of tpsgd")
    if version != kind.format:
        advice = "install a newer tpsgd" if version > kind.format else f"make the {noun} again"
        formats = f"format {version}, this version of tpsgd reads format {kind.format}"
        raise TpsgdError(f"{file} has {formats}: {advice}")
    if description.pop(SEAL, None) != _seal(description):
        raise TpsgdError(f"{file} was edited or damaged, by its checksum; save the {noun} again")
    return description


def remove_leftovers(kind: FolderFormat, folder: Path) -> None:
    """Remove what killed processes have left, in a folder that no other process writes to."""
    file = kind.tensors(folder, read_description(kind, folder).get(WEIGHTS))
    _remove_others(kind, folder, file, 0)


def remove(kind: FolderFormat, folder: Path) -> None:
    """Remove a description, then its tensors, then the folder if it is empty."""
    with contextlib.suppress(OSError):
        kind.description(folder).unlink()
        _remove_others(kind, folder, None, 0)
        folder.rmdir()


def to_bytes(tensors: Mapping[str, Tensor]) -> bytes:
    """The content of a .safetensors file; tensors that share memory are written separately."""
    import safetensors.torch

    try:
        copies = {
            name: t.detach().cpu().clone(memory_format=torch.contiguous_format)
            for name, t in tensors.items()
        }
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


def _remove_others(kind: FolderFormat, folder: Path, file: Path | None, seconds: float) -> None:
    """Remove what killed processes have left beside a file of tensors, but not what is fresh.

    A file of fewer than these seconds may belong to a process that is about to write the
    description.
    """
    tensors = rf"{kind.name}-[0-9a-f]{{16}}\.safetensors"
    pattern = re.compile(rf"{tensors}|\.({tensors}|{kind.name}\.json)\.[\d-]+\.part")
    for other in folder.iterdir():
        with contextlib.suppress(OSError):
            is_old = time.time() - other.stat().st_mtime >= seconds
            if pattern.fullmatch(other.name) and is_old and other != file:
                other.unlink()


def _seal(description: dict[str, Any]) -> str:
    """A checksum of the description, whatever the spaces and line ends of its file."""
    text = json.dumps(description, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
