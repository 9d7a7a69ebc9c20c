"""A folder with a description in JSON and tensors in safetensors: written whole, read with checks.

The description is the point of commitment. It has the checksum of the tensors and a checksum of
itself, and the tensors' file is named after its content. New tensors are written beside old ones,
then the description is replaced, then the old tensors are removed: a process that is killed at any
moment leaves the old content or the new.
"""

import contextlib
import hashlib
import json
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from tpsgd.errors import TpsgdError
from tpsgd.files import writable_folder, write_whole
from tpsgd.saved.tensors import from_bytes, to_bytes

LARGEST_DESCRIPTION = 1 << 26  # bytes; a description of a thousand modules has 200 KB
LEFT_OVER = 3600  # seconds after which no process is still between the two files
WEIGHTS, SEAL = "weights_sha256", "sha256"  # keys of the two checksums


@dataclass(frozen=True)
class Layout:
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
    layout: Layout, folder: Path, description: dict[str, Any], tensors: dict[str, Tensor]
) -> Path:
    """Write both files; what the folder held before is kept until the new content is complete."""
    content = to_bytes(tensors)
    checksum = hashlib.sha256(content).hexdigest()
    description = {"format": layout.format, **description, WEIGHTS: checksum}
    try:
        description[SEAL] = _seal(description)
        text = json.dumps(description, indent=1)
    except (TypeError, ValueError) as error:
        raise TpsgdError(f"a {layout.name} is described by plain values: {error}") from error
    writable_folder(folder)
    old = _tensors_of_old_content(layout, folder)
    file = layout.tensors(folder, checksum)
    write_whole(file, content)
    try:
        write_whole(layout.description(folder), text.encode())
    except OSError:
        _remove_unless(file, old)
        raise
    if old is not None:
        _remove_unless(old, file)
    _remove_orphans(layout, folder, file, LEFT_OVER)
    return folder


def read(layout: Layout, folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The description and the tensors, if the files are whole and belong together."""
    description = read_description(layout, folder)
    checksum = description.get(WEIGHTS)
    file = layout.tensors(folder, checksum)
    if not isinstance(checksum, str) or not file.is_file():
        raise TpsgdError(f"{folder} holds no {layout.name}: there is no {file.name}")
    content = file.read_bytes()
    if hashlib.sha256(content).hexdigest() != checksum:
        name = layout.description(folder).name
        raise TpsgdError(
            f"{folder}: {name} and {file.name} do not belong together, or {file.name} is damaged"
        )
    return description, from_bytes(content, file)


def holds(layout: Layout, folder: Path) -> bool:
    """Whether a folder holds a description of this layout, of any format."""
    return layout.description(folder).exists()


def read_description(layout: Layout, folder: Path) -> dict[str, Any]:
    """The description, if it is whole and of the format that this version reads."""
    file, noun = layout.description(folder), layout.name
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
    if version != layout.format:
        advice = "install a newer tpsgd" if version > layout.format else f"make the {noun} again"
        raise TpsgdError(
            f"{file} has format {version}, this version of tpsgd reads format {layout.format}: "
            + advice
        )
    if description.pop(SEAL, None) != _seal(description):
        raise TpsgdError(
            f"{file} was edited or damaged: its checksum does not fit; save the {noun} again"
        )
    return description


def _remove_unless(file: Path, same: Path | None) -> None:
    """Remove a file that no description names, unless it is this one."""
    if file != same:
        with contextlib.suppress(OSError):
            file.unlink()


def remove_leftovers(layout: Layout, folder: Path) -> None:
    """Remove what killed processes have left, in a folder that no other process writes to."""
    file = layout.tensors(folder, read_description(layout, folder).get(WEIGHTS))
    _remove_orphans(layout, folder, file, 0)


def remove(layout: Layout, folder: Path) -> None:
    """Remove a description, then its tensors, then the folder if it is empty."""
    with contextlib.suppress(OSError):
        layout.description(folder).unlink()
        _remove_orphans(layout, folder, layout.description(folder), 0)
        folder.rmdir()


def _remove_orphans(layout: Layout, folder: Path, file: Path, seconds: float) -> None:
    """Remove what processes that were killed while they wrote have left, but not what is fresh.

    A file of fewer than these seconds may belong to a process that is about to write the
    description.
    """
    tensors = rf"{layout.name}-[0-9a-f]{{16}}\.safetensors"
    pattern = re.compile(rf"{tensors}|\.({tensors}|{layout.name}\.json)\.[\d-]+\.part")
    for other in folder.iterdir():
        with contextlib.suppress(OSError):
            is_old = time.time() - other.stat().st_mtime >= seconds
            if pattern.fullmatch(other.name) and is_old:
                _remove_unless(other, file)


def _seal(description: dict[str, Any]) -> str:
    """A checksum of the description, whatever the spaces and line ends of its file."""
    text = json.dumps(description, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _tensors_of_old_content(layout: Layout, folder: Path) -> Path | None:
    """The file of tensors that the present description names, if there is one."""
    try:
        checksum = read_description(layout, folder).get(WEIGHTS)
    except (TpsgdError, OSError):
        return None
    return layout.tensors(folder, checksum)
