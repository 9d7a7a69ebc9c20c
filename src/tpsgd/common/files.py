"""Writing files completely or not at all, and loading functions from Python files."""

import contextlib
import functools
import importlib.util
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tpsgd.common.errors import TpsgdError


def write_whole(path: Path, content: bytes) -> Path:
    """Write a file under another name, then rename it, so that `path` is never incomplete.

    The content is on the disk before that: a power cut cannot leave an empty file.
    """
    writer = f"{os.getpid()}-{threading.get_ident()}"
    temporary = path.with_name(f".{path.name}.{writer}.part")
    try:
        temporary.write_bytes(content)
        _sync(temporary, os.O_RDWR)
        temporary.replace(path)
    except OSError as error:  # errors about a full disk name no file
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        with contextlib.suppress(OSError):  # a folder without the right to delete
            temporary.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # Windows cannot open a folder
        _sync(path.parent, os.O_RDONLY)
    return path


def write_together(contents: dict[Path, bytes]) -> tuple[Path, ...]:
    """Write files of which the others are of no use without the first.

    The first is removed before they change, and written last: a process that is killed in between
    does not leave new files next to old ones that fit them by chance.
    """
    first, *_ = contents
    for path in contents:
        path.parent.mkdir(parents=True, exist_ok=True)
    first.unlink(missing_ok=True)
    for path, content in reversed(contents.items()):
        write_whole(path, content)
    return tuple(contents)


def _sync(path: Path, mode: int) -> None:
    """Have a file's content, or the names in a folder, on the disk."""
    descriptor = os.open(path, mode)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def writable_folder(folder: Path) -> Path:
    """The folder, created if it does not exist; an error if nothing can be written to it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x")
    except OSError as error:
        reason = error.strerror or error
        raise TpsgdError(f"cannot write to {folder} ({reason}); name another folder") from error
    return folder


def named_folder(folder: Any, purpose: str) -> Path:
    """A folder as a path, ~ included; anything that is not the name of a folder is refused."""
    if not isinstance(folder, (str, Path)) or folder == "":
        raise TpsgdError(f"the folder {purpose} must be a path, got {folder!r}")
    return Path(folder).expanduser()


def user_path(text: str) -> Path:
    """A path as the user wrote it, ~ included; `os.path.isfile` takes any, `is_file` does not."""
    return Path(os.path.expanduser(text))


def path_in(word: str) -> Path:
    """The file or folder in a word: of FILE.py:FUNCTION, and of FOLDER@64 for images.

    Examples:
        >>> path_in("nets.py:build").name, path_in("photos@64").name
        ('nets.py', 'photos')
    """
    if is_function(word):
        return user_path(word.rpartition(":")[0])
    folder, _, size = word.rpartition("@")
    return user_path(folder if folder and size.isdecimal() else word)


def is_function(word: str) -> bool:
    """Whether a word is `FILE.py:FUNCTION`."""
    return word.rpartition(":")[0].endswith(".py")


def load_function(word: str) -> Callable[..., Any]:
    """The function that `FILE.py:FUNCTION` names; the file is run."""
    text, _, name = word.rpartition(":")
    path = user_path(text)
    if not os.path.isfile(path):
        raise TpsgdError(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(f"user_file_{path.stem}", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickles look themselves up there
    if (folder := str(path.resolve().parent)) not in sys.path:
        sys.path.append(folder)  # the file may import its neighbours, now or in its functions
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # sys.exit would end without a word
        raise TpsgdError(f"{path} does not run: {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise TpsgdError(f"{path} has no function {name!r}")

    @functools.wraps(function)
    def call(**arguments: Any) -> Any:
        try:
            return function(**arguments)
        except (Exception, SystemExit) as error:
            raise TpsgdError(f"{word} failed with {type(error).__name__}: {error}") from error

    return call


def call_function(word: str) -> Any:
    """The result of the function that `FILE.py:FUNCTION` names."""
    return load_function(word)()
