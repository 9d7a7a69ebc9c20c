"""Files that are whole or not there."""

import os
import tempfile
from pathlib import Path

from ..errors import TpsgdError


def write_whole(path: Path, content: bytes) -> Path:
    """Write a file under another name first, so that `path` never holds half of it."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_bytes(content)
        part.replace(path)
    except OSError as error:  # a full disk does not say where
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        part.unlink(missing_ok=True)
    return path


def usable(folder: Path) -> Path:
    """The folder, made where it is not there, or an error if nothing can be written to it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x")
    except OSError as error:
        why = error.strerror or error
        raise TpsgdError(f"cannot write to {folder} ({why}); name another folder") from error
    return folder
