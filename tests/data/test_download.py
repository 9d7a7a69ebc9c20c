"""Downloads from a server on this machine: complete or not at all, and every way to fail."""

import errno
import gzip
import hashlib
import http.server
import io
import math
import tarfile
import threading
from dataclasses import replace
from pathlib import Path

import pooch
import pytest
import requests

from tpsgd import TpsgdError, data
from tpsgd.data import download
from tpsgd.data.registry import DATASETS
from tpsgd.data.sets import cifar10
from tpsgd.data.sets import mnist as mnist_set


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves the server's `files`; what is in `halved` breaks off in the middle."""

    def do_GET(self):
        name = self.path.rsplit("/", 1)[-1]
        self.server.asked.append(self.path)
        content = self.server.files.get(name)
        if content is None or self.path.startswith("/gone/"):
            return self.send_error(404)
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: len(content) // 2] if name in self.server.halved else content)

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.files, server.halved, server.asked = {}, set(), []
        server.url = f"http://127.0.0.1:{server.server_port}/"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.delenv("TPSGD_DATA", raising=False)
    monkeypatch.setenv("TPSGD_CACHE", str(tmp_path / "cache"))
    pooch.get_logger().setLevel("WARNING")
    return tmp_path / "cache"


def offered(server, monkeypatch, entry, files):
    """Put `files` on the server and make `entry` point at it, checksums and all."""
    server.files.update(files)
    sums = tuple((name, "md5:" + hashlib.md5(body).hexdigest()) for name, body in files.items())
    entry = replace(entry, mirrors=(server.url,), downloads=sums)
    monkeypatch.setitem(DATASETS, entry.name, entry)
    return entry


@pytest.fixture
def mnist(server, cache, monkeypatch):
    """A tiny MNIST of 4 + 2 on the server; yields the folder it is to be fetched into."""

    def idx(*dims):
        head = bytes((0, 0, 8, len(dims))) + b"".join(n.to_bytes(4, "big") for n in dims)
        return gzip.compress(head + bytes(math.prod(dims)))

    dims = [(4, 28, 28), (4,), (2, 28, 28), (2,)]
    files = {name: idx(*d) for name, d in zip(mnist_set.FILES, dims, strict=True)}
    offered(server, monkeypatch, replace(DATASETS["mnist"], train=4, test=2), files)
    return cache / "mnist"


@pytest.fixture
def cifar(server, cache, monkeypatch):
    """A tiny CIFAR-10 archive on the server; yields the folder it is to be unpacked into."""
    monkeypatch.setattr(cifar10, "PER_FILE", 2)
    offered(server, monkeypatch, DATASETS["cifar10"], {"cifar-10-binary.tar.gz": archive()})
    return cache / "cifar-10-batches-bin"


def archive(files=cifar10.FILES):
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name in files:
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            member.size = 2 * 3073
            tar.addfile(member, io.BytesIO(bytes(member.size)))
    return packed.getvalue()


def everything(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.rglob("*") if p.is_file())


def test_load_downloads_a_set_only_once(mnist, server):
    assert data.path("mnist") is None
    assert data.load("mnist").train[0].shape == (4, 1, 28, 28)
    assert everything(mnist.parent) == sorted(mnist_set.FILES)
    assert data.path("mnist") == data.fetch("mnist") == mnist
    assert data.describe()[1].where == str(mnist)
    assert len(server.asked) == 4


def test_fetch_replaces_missing_and_damaged_files(mnist, server):
    data.fetch("mnist")
    (mnist / mnist_set.FILES[2]).unlink()
    (mnist / mnist_set.FILES[0]).write_bytes(b"half")
    data.fetch("mnist")
    assert server.asked[4:] == [f"/{mnist_set.FILES[0]}", f"/{mnist_set.FILES[2]}"]
    data.load("mnist")


def test_archive_is_unpacked_and_removed(cifar):
    assert data.load("cifar10").train[0].shape == (10, 3, 32, 32)
    assert everything(cifar.parent) == sorted(cifar10.FILES)


def test_the_data_folder_is_used_before_the_cache(mnist, server, tmp_path, monkeypatch):
    data.fetch("mnist")
    mnist.rename(tmp_path / "mnist")
    monkeypatch.setenv("TPSGD_DATA", str(tmp_path))
    assert data.fetch("mnist") == tmp_path / "mnist" and len(server.asked) == 4


def test_the_second_mirror_is_tried(mnist, server, monkeypatch):
    entry = DATASETS["mnist"]
    both = replace(entry, mirrors=(server.url + "gone/", server.url))
    monkeypatch.setitem(DATASETS, "mnist", both)
    assert data.fetch("mnist") == mnist


def refused(name, message, folder):
    with pytest.raises(TpsgdError, match=message) as error:
        data.load(name)
    assert "\n" not in str(error.value)
    assert data.path(name) is None
    assert set(everything(folder)) < {*mnist_set.FILES}, "an incomplete file is left behind"
    return str(error.value)


def test_a_download_that_breaks_off_leaves_no_incomplete_file(mnist, server):
    server.halved.add(mnist_set.FILES[1])
    refused("mnist", "ChunkedEncodingError", mnist.parent)
    assert everything(mnist) == [mnist_set.FILES[0]]
    server.halved.clear()
    assert data.fetch("mnist") == mnist


def test_a_file_with_another_checksum_is_refused(mnist, server):
    server.files[mnist_set.FILES[0]] += b"!"
    refused("mnist", "its checksum is not the published one", mnist.parent)


def test_a_file_that_the_server_lacks_is_named(mnist, server):
    server.files.clear()
    refused("mnist", r"train-images-idx3-ubyte.gz \(HTTP status 404\)", mnist.parent)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (requests.exceptions.ConnectionError("no route"), "ConnectionError"),
        (requests.exceptions.ConnectTimeout(), "ConnectTimeout"),
        (requests.exceptions.SSLError(), "SSLError"),
        (ConnectionResetError(errno.ECONNRESET, "reset"), "ConnectionResetError"),
    ],
)
def test_network_errors_say_what_to_do(mnist, monkeypatch, error, message):
    def fails(*_, **__):
        raise error

    monkeypatch.setattr(requests, "get", fails)
    text = refused("mnist", message, mnist.parent)
    assert "fetch it on another machine and put train-images-idx3-ubyte.gz, " in text
    assert text.endswith("into $TPSGD_DATA/mnist/.")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
        (PermissionError("pooch could not write"), "no permission"),
    ],
)
def test_a_full_or_read_only_disk_is_reported(mnist, monkeypatch, error, message):
    def fails(*_, **__):
        raise error

    monkeypatch.setattr(pooch, "retrieve", fails)
    refused("mnist", rf"cannot write to .*cache \({message}\); free some space", mnist.parent)


def test_a_disk_that_fills_up_while_unpacking_leaves_the_archive(cifar, monkeypatch):
    def fails(file, content):
        with file.open("wb") as stream:
            stream.write(b"a little")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", fails)
    with pytest.raises(TpsgdError, match="No space left on device"):
        data.load("cifar10")
    assert everything(cifar.parent) == ["cifar-10-binary.tar.gz"]


@pytest.mark.parametrize(
    "content",
    [archive(cifar10.FILES[:3]), archive()[:200], b"no tar"],
    ids=["lacks files", "half", "no tar"],
)
def test_an_archive_that_cannot_be_unpacked_is_refused(server, cifar, monkeypatch, content):
    offered(server, monkeypatch, DATASETS["cifar10"], {"cifar-10-binary.tar.gz": content})
    with pytest.raises(TpsgdError, match="cannot be unpacked"):
        data.fetch("cifar10")
    assert data.path("cifar10") is None


def test_a_cache_that_is_a_file_is_refused(mnist, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TPSGD_CACHE", str(tmp_path / "file"))
    with pytest.raises(TpsgdError, match="set TPSGD_CACHE to another folder"):
        data.load("mnist")


def test_the_default_cache_is_that_of_pooch(monkeypatch):
    monkeypatch.delenv("TPSGD_CACHE", raising=False)
    assert download.cache_root() == Path(pooch.os_cache("tpsgd"))


def test_progress_bar_is_drawn_on_a_terminal(mnist, monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    data.fetch("mnist")
    assert "train-images" in capsys.readouterr().err
