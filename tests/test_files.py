"""A file is written whole: its content is on the disk before its name is."""

import os
from pathlib import Path

import pytest

from tpsgd.common import files
from tpsgd.common.files import write_together, write_whole


def test_the_content_then_the_name_then_the_folder_go_to_the_disk(tmp_path, monkeypatch):
    """A power cut between two of these steps leaves the old file, or the new one, never half."""
    events, paths = [], {}
    open_, fsync, replace = os.open, os.fsync, os.replace

    def opened(path, *args, **options):
        descriptor = open_(path, *args, **options)
        paths[descriptor] = os.fspath(path)
        return descriptor

    def synced(descriptor):
        path = paths[descriptor]
        folder = os.path.isdir(path)
        content = sorted(os.listdir(path)) if folder else Path(path).read_bytes()
        events.append(("folder" if folder else "file", content))
        fsync(descriptor)

    def replaced(old, new, **options):
        events.append(("name", os.path.basename(new)))
        replace(old, new, **options)

    for name, function in (("open", opened), ("fsync", synced), ("replace", replaced)):
        monkeypatch.setattr(os, name, function)
    write_whole(tmp_path / "a.json", b"all of it")
    assert events == [("file", b"all of it"), ("name", "a.json"), ("folder", ["a.json"])]


@pytest.mark.parametrize("fails", [1, 2, 3, 4])
def test_files_that_belong_together_are_never_half_old(tmp_path, monkeypatch, fails):
    """Whatever file is not written any more, the first is there only if all are of one kind."""
    paths = [tmp_path / name for name in ("net.h", "net.c", "src/more.h")]
    write_together(dict.fromkeys(paths, b"old"))
    written = []

    def killed(path, content):
        written.append(path)
        if len(written) == fails:
            raise KeyboardInterrupt
        return write_whole(path, content)

    monkeypatch.setattr(files, "write_whole", killed)
    try:
        assert write_together(dict.fromkeys(paths, b"new")) == tuple(paths) and fails == 4
    except KeyboardInterrupt:
        assert not paths[0].exists()
    else:
        assert {path.read_bytes() for path in paths} == {b"new"}
