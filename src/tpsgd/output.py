"""Where results go: one writer at a time, nothing replaced unasked, a copy on a full disk."""

import contextlib
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from tpsgd.errors import TpsgdError
from tpsgd.files import writable_folder
from tpsgd.units import size

LOCK = ".tpsgd-lock"  # the file that a writer of a folder has locked
_writers: dict[Path, int] = {}  # what this process writes to, and the thread that does
_descriptors: set[int] = set()  # of the files that this process has locked


def check_new(path: Path, overwrite: bool, *names: str) -> None:
    """Refuse to replace results: a file, or these names in a folder, that are already there."""
    files = [path / name for name in names] or [path]
    if not overwrite and (old := next((file for file in files if file.exists()), None)):
        raise TpsgdError(
            f"{old} is already there, from an earlier run: choose another name, or replace it with "
            "--overwrite"
        )


def check_apart(inputs: Iterable[Path], **outputs: Path | None) -> None:
    """Refuse results in place of what is read, or inside it: `log` is the option --log."""
    sources = [path.resolve() for path in inputs if path.exists()]
    for name, output in outputs.items():
        path = None if output is None else output.expanduser().resolve()
        source = next((s for s in sources if path and _is_within(path, s)), None)
        if source is not None:
            raise TpsgdError(
                f"--{name} {output} would write to {source}, which this command reads: name "
                "another place"
            )


def _is_within(path: Path, source: Path) -> bool:
    """Whether a path is this file, also by another name, or in this folder."""
    inside = source.is_dir() and path.is_relative_to(source)
    return inside or (path.exists() and path.samefile(source))


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
    check_new(path, overwrite, *names)
    free = shutil.disk_usage(path).free
    if free < nbytes:
        raise TpsgdError(
            f"{path} has {size(free)} left on its disk, and the results need {size(nbytes)}; name "
            "another folder"
        )
    with _lock(path.resolve(), path.resolve() / LOCK):
        check_new(path, overwrite, *names)  # what another process has written in the meantime
        yield path


@contextlib.contextmanager
def output_file(file: Path) -> Iterator[Path]:
    """A file to write to, which no other process and no other thread writes to in the meantime.

    Without a folder for it, or without the right to write there, it is not locked: the error is
    that of the writer.
    """
    path = file.expanduser().resolve()
    if not os.access(path.parent, os.W_OK):
        yield path
        return
    with _lock(path, path.with_name(f".{path.name}{LOCK}")):
        yield path


@contextlib.contextmanager
def _lock(path: Path, lock: Path) -> Iterator[None]:
    """Lock a folder or a file by this file; the system unlocks it if this process is killed.

    A thread that has the lock already may enter it again.
    """
    thread = threading.get_ident()
    if _writers.get(path) == thread:
        yield
        return
    if _writers.setdefault(path, thread) != thread:
        raise _taken(path, "thread")
    descriptor = None
    try:
        try:
            descriptor = _locked_file(lock)
        except BlockingIOError as error:
            raise _taken(path, "process") from error
        if descriptor is not None:
            _descriptors.add(descriptor)
        yield
    finally:
        in_parent = _writers.pop(path, None) is not None
        if descriptor is not None and in_parent:
            with contextlib.suppress(OSError):  # Windows removes no open file
                lock.unlink()
            _descriptors.discard(descriptor)
            os.close(descriptor)


def _forget_locks() -> None:
    """A process that was forked, such as the worker of a loader, holds no lock of its parent's.

    It may live on for a while when its parent has been killed.
    """
    for descriptor in _descriptors:
        os.close(descriptor)
    _descriptors.clear()
    _writers.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_locks)


def _taken(path: Path, writer: str) -> TpsgdError:
    other = "folder" if path.is_dir() else "file"
    return TpsgdError(
        f"another {writer} is writing to {path}: wait for it, or name another {other}"
    )


def _locked_file(file: Path) -> int | None:
    """The descriptor of a file that is locked; None if the disk, or the system, has no locks.

    A file that another process has locked raises BlockingIOError.
    """
    try:
        import fcntl
    except ImportError:
        return None
    while True:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise
        except OSError:  # some network disks
            os.close(descriptor)
            return None
        try:  # the process before may have removed the file after it was opened here
            if os.path.samestat(os.fstat(descriptor), file.stat()):
                return descriptor
        except FileNotFoundError:
            pass
        os.close(descriptor)


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
        copy = _copy_elsewhere(write)
        where = f"the results are in {copy} instead" if copy else "nor to a temporary folder"
        problem = f"cannot write to it ({reason.strerror or reason}); {where}"
        raise OSError(reason.errno or 0, problem, str(folder)) from error


def _copy_elsewhere(write: Callable[[Path], Any]) -> Path | None:
    """A temporary folder that a function has written into; None if that failed too."""
    try:
        copy = Path(tempfile.mkdtemp(prefix="tpsgd-"))
    except OSError:
        return None
    try:
        write(copy)
    except (OSError, TpsgdError):
        shutil.rmtree(copy, ignore_errors=True)
        return None
    return copy
