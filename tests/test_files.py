"""A file is written whole: its content is on the disk before its name is."""

import os
from pathlib import Path

from tpsgd.files import write_whole


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
