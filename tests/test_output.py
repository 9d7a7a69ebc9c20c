"""Where results go: one writer at a time, nothing replaced unasked, a copy on a full disk."""

import errno
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from filelock import FileLock

from tpsgd import TpsgdError
from tpsgd.common import output
from tpsgd.common.files import write_whole
from tpsgd.common.output import LOCK, check_new, output_folder, write_or_rescue

HOLDER = """
import sys, time
from pathlib import Path
from tpsgd.common.output import output_folder
with output_folder(Path(sys.argv[1])):
    print("locked", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def other_process(tmp_path):
    """A process that writes to the folder."""
    source = os.environ | {"PYTHONPATH": str(Path(output.__file__).parents[1])}
    call = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(call, stdout=subprocess.PIPE, text=True, env=source) as process:
        assert process.stdout.readline() == "locked\n"
        yield process
        process.kill()


def test_a_folder_has_one_writer_and_a_kill_frees_it(tmp_path, other_process):
    with pytest.raises(TpsgdError, match="another process is writing to"), output_folder(tmp_path):
        pass
    other_process.kill()
    other_process.wait()
    with output_folder(tmp_path) as folder:
        assert folder == tmp_path and (folder / LOCK).exists()
    assert not list(tmp_path.iterdir())


def test_a_process_may_enter_its_folder_twice_and_leaves_it_free(tmp_path):
    for _ in range(2):
        with output_folder(tmp_path), output_folder(tmp_path):
            assert (tmp_path / LOCK).exists()
    assert not list(tmp_path.iterdir())


def in_thread(function):
    """What a function raises in another thread, in words."""
    messages = []

    def call():
        try:
            function()
        except TpsgdError as error:
            messages.append(str(error))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    return messages


def test_a_folder_has_one_thread(tmp_path):
    def enter():
        with output_folder(tmp_path):
            pass

    with output_folder(tmp_path):
        (message,) = in_thread(enter)
        assert message.startswith(f"another thread is writing to {tmp_path}")
    assert not in_thread(enter) and not list(tmp_path.iterdir())


FORKED = """
import os, sys, time
from pathlib import Path
from tpsgd.common.output import output_folder
with output_folder(Path(sys.argv[1])):
    if not os.fork():
        print(os.getpid(), flush=True)  # by the worker, which has let go of the lock by now
    time.sleep(60)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked")
def test_a_kill_frees_a_folder_though_a_worker_lives_on(tmp_path):
    source = os.environ | {"PYTHONPATH": str(Path(output.__file__).parents[1])}
    call = [sys.executable, "-c", FORKED, str(tmp_path)]
    with subprocess.Popen(call, stdout=subprocess.PIPE, text=True, env=source) as process:
        worker = int(process.stdout.readline())
        process.kill()
        process.wait()
        try:
            with output_folder(tmp_path) as folder:
                assert folder == tmp_path
        finally:
            os.kill(worker, signal.SIGKILL)


def test_results_that_another_process_wrote_in_the_meantime_are_refused(tmp_path, monkeypatch):
    real = FileLock.acquire

    def lock_later(lock):
        (tmp_path / "run.json").write_text("{}")  # by the process that had the folder before
        return real(lock)

    monkeypatch.setattr(FileLock, "acquire", lock_later)
    with (
        pytest.raises(TpsgdError, match=r"run.json is already there"),
        output_folder(tmp_path, ("run.json",), overwrite=False),
    ):
        pass


def test_threads_do_not_share_a_temporary_file(tmp_path, monkeypatch):
    names, replace = [], Path.replace

    def noted(self, target):
        names.append(self.name)
        if len(names) == 1:  # another thread writes the same file before this one renames its own
            in_thread(lambda: write_whole(target, b"second"))
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", noted)
    write_whole(tmp_path / "x", b"first")
    assert len(set(names)) == 2 and (tmp_path / "x").read_bytes() == b"first"
    assert [file.name for file in tmp_path.iterdir()] == ["x"]


def test_a_lock_whose_file_was_removed_is_taken_anew(tmp_path, monkeypatch):
    real, removed = os.open, []

    def open_then_lose(path, *args):
        descriptor = real(path, *args)
        if str(path).endswith(LOCK) and not removed:
            removed.append(os.unlink(path))  # by the process that had it before
        return descriptor

    monkeypatch.setattr(os, "open", open_then_lose)
    with output_folder(tmp_path):
        assert removed and (tmp_path / LOCK).exists()


def test_earlier_results_are_refused_unless_they_may_be_replaced(tmp_path):
    (tmp_path / "run.json").write_text("{}")
    with (
        pytest.raises(
            TpsgdError,
            match=r"run.json is already there.*another name.*overwrite=True \(--overwrite\)",
        ),
        output_folder(tmp_path, ("model.pt", "run.json"), overwrite=False),
    ):
        pass
    with output_folder(tmp_path, ("model.pt", "run.json"), overwrite=True):
        pass
    with pytest.raises(TpsgdError, match="already there"):
        check_new(tmp_path / "run.json", overwrite=False)
    check_new(tmp_path / "plan.png", overwrite=False)


def test_a_disk_without_room_is_refused_before_anything_is_computed(tmp_path):
    with (
        pytest.raises(TpsgdError, match=r"left on its disk, and the results need .* GB"),
        output_folder(tmp_path, nbytes=1 << 60),
    ):
        pass


# ---- rescue --------------------------------------------------------------------------------------


def full(error, places=()):
    def write(folder):
        if folder in places or not places:
            raise error
        return (folder / "x").write_text("result")

    return write


NO_SPACE = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("wrapped", [False, True])
def test_results_of_a_full_disk_are_in_a_temporary_folder(tmp_path, monkeypatch, wrapped):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    error = TpsgdError("cannot write") if wrapped else NO_SPACE
    error.__cause__ = NO_SPACE if wrapped else None
    with pytest.raises(OSError, match=r"No space left on device\); the results are in") as caught:
        write_or_rescue(full(error, [tmp_path / "out"]), tmp_path / "out")
    (copy,) = tmp_path.glob("tpsgd-*")
    assert (copy / "x").read_text() == "result" and str(copy) in str(caught.value)
    assert caught.value.filename == str(tmp_path / "out")


def test_if_there_is_no_room_at_all_that_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(OSError, match="nor to a temporary folder"):
        write_or_rescue(full(NO_SPACE), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_mistakes_that_are_not_the_disks_stay_what_they_are(tmp_path):
    with pytest.raises(TpsgdError, match=r"^a mistake$"):
        write_or_rescue(full(TpsgdError("a mistake")), tmp_path)
