"""Where results go: one writer at a time, nothing replaced unasked, a copy on a full disk."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from tpsgd.common.errors import TpsgdError
from tpsgd.common.files import writable_folder
from tpsgd.common.units import size

LOCK = ".tpsgd-lock"  # the file that a writer of a folder has locked
PATIENCE = 0.1  # seconds; the writer before may be about to remove its lock
_writers: dict[Path, Any] = {}  # what this process writes to, and the lock of it


def check_new(path: Path, overwrite: bool, *names: str) -> None:
    """Refuse to replace results: a file, or these names in a folder, that are already there."""
    files = [path / name for name in names] or [path]
    if not overwrite and (old := next((file for file in files if file.exists()), None)):
        raise TpsgdError(
            f"{old} is already there, from an earlier run: choose another name, or replace it with "
            "overwrite=True (--overwrite)"
        )


def check_apart(inputs: Iterable[Path], **outputs: Path | None) -> None:
    """Refuse results in place of what is read, or inside it: `log` is the option --log."""
    sources = [path.resolve() for path in inputs if path.exists()]
    for name, output in outputs.items():
        if output is None:
            continue
        path = output.expanduser().resolve()
        for source in sources:
            inside = source.is_dir() and path.is_relative_to(source)
            if inside or (path.exists() and path.samefile(source)):
                raise TpsgdError(
                    f"--{name} {output} would write to {source}, which this command reads: name "
                    "another place"
                )


@contextlib.contextmanager
def output_folder(
    folder: Path, names: tuple[str, ...] = (), overwrite: bool = True, nbytes: int = 0
) -> Iterator[Path]:
    """A folder to write to, which no other process and no other thread writes to in the meantime.

    The folder is created if it does not exist. It is refused, before anything is computed, if
    nothing can be written to it, if it has less room than `nbytes`, if another writer has it, or
    if it holds results with these `names` that are not to be overwritten.
    """
    path = writable_folder(folder)
    if (free := shutil.disk_usage(path).free) < nbytes:
        room = f"{size(free)} left on its disk, and the results need {size(nbytes)}"
        raise TpsgdError(f"{path} has {room}; name another folder")
    with _lock(path.resolve(), path.resolve() / LOCK):
        check_new(path, overwrite, *names)
        yield path


@contextlib.contextmanager
def output_file(file: Path) -> Iterator[Path]:
    """A file to write to, which no other process and no other thread writes to in the meantime.

    It is not locked where nothing can be written: the writer then raises the error.
    """
    path = file.expanduser().resolve()
    writable = os.access(path.parent, os.W_OK)
    with _lock(path, path.with_name(f".{path.name}{LOCK}")) if writable else nullcontext():
        yield path


@contextlib.contextmanager
def _lock(path: Path, file: Path) -> Iterator[None]:
    """Lock a folder or a file by another file; the system unlocks it if this process is killed."""
    from filelock import FileLock, Timeout

    writer = "thread" if path in _writers else "process"
    lock = _writers.setdefault(path, FileLock(file, timeout=PATIENCE))
    try:
        lock.acquire()
    except Timeout as error:
        if writer == "process":
            del _writers[path]
        other = "folder" if path.is_dir() else "file"
        raise TpsgdError(
            f"another {writer} is writing to {path}: wait for it, or name another {other}"
        ) from error
    except OSError:  # some network disks have no locks
        pass
    try:
        yield
    finally:
        if lock.lock_counter < 2:
            _writers.pop(path, None)
        if lock.lock_counter == 1:  # 0 in a process that was forked meanwhile
            with contextlib.suppress(OSError):  # Windows removes no open file
                file.unlink()
        lock.release()


def write_or_rescue(write: Callable[[Path], Any], folder: Path) -> Any:
    """Let a function write into a folder, or else into a temporary one: the error says where.

    For results that took long to compute, when the disk has become full.
    """
    try:
        return write(folder)
    except (OSError, TpsgdError) as error:
        reason = error if isinstance(error, OSError) else error.__cause__
        if not isinstance(reason, OSError):
            raise
        where = "nor to a temporary folder"
        with contextlib.suppress(OSError, TpsgdError), contextlib.ExitStack() as undo:
            copy = Path(tempfile.mkdtemp(prefix="tpsgd-"))
            undo.callback(shutil.rmtree, copy, ignore_errors=True)
            write(copy)
            undo.pop_all()
            where = f"the results are in {copy} instead"
        problem = f"cannot write to it ({reason.strerror or reason}); {where}"
        raise OSError(reason.errno or 0, problem, str(folder)) from error
