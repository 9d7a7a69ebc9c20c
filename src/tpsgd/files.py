"""Files that are whole or not there."""

import io
import os
import tempfile
from pathlib import Path
from typing import Any

from tpsgd.errors import TpsgdError

FORMATS = {".png": {"Software": None}, ".svg": {"Date": None}}  # and what not to write into them


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


def writable_folder(folder: Path) -> Path:
    """The folder, made where it is not there, or an error if nothing can be written to it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x")
    except OSError as error:
        why = error.strerror or error
        raise TpsgdError(f"cannot write to {folder} ({why}); name another folder") from error
    return folder


def check_picture(file: Path, what: str) -> None:
    """Refuse a file that no picture can be written to, as far as its name tells."""
    if file.suffix.lower() not in FORMATS:
        raise TpsgdError(f"a picture of a {what} is FILE.png or FILE.svg, not {file}")
    if not file.parent.is_dir():
        raise TpsgdError(f"cannot write {file}: there is no folder {file.parent}")


def write_picture(figure: Any, file: Path) -> Path:
    """A figure as a PNG or an SVG by the file's name, whole or not at all."""
    kind, content = file.suffix.lower(), io.BytesIO()
    figure.savefig(content, format=kind[1:], dpi=160, metadata=FORMATS[kind])
    try:
        return write_whole(file, content.getvalue())
    except OSError as error:
        raise TpsgdError(f"cannot write {file}: {error.strerror or error}") from None
