"""UCF101: features of videos, read by the publisher's lists; and the script that makes them."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from benchmarks import ucf101_features as script
from tpsgd import TpsgdError, data
from tpsgd.data.sets import ucf101


@pytest.fixture
def videos(root):
    """Two classes of three videos each, of 4 to 30 frames with 5 features."""
    folder = root / "ucf101"
    folder.mkdir()
    (folder / "classInd.txt").write_text("1 Archery\n2 Biking\n")
    train, test = [], []
    for label, kind in enumerate(("Archery", "Biking"), start=1):
        for i, n in enumerate((4, 10, 30)):
            name = f"v_{kind}_g0{i}_c01"
            (test if i == 2 else train).append(
                f"{kind}/{name}.avi" + (f" {label}" if i != 2 else "")
            )
            file = folder / "features" / kind / f"{name}.npy"
            file.parent.mkdir(parents=True, exist_ok=True)
            np.save(file, np.arange(n)[:, None] * np.ones(5, np.float16))
    (folder / "trainlist01.txt").write_text("\r\n".join(train) + "\r\n")
    (folder / "testlist01.txt").write_text("\n".join(test) + "\n")
    return folder


def test_videos_become_ten_steps(videos):
    loaded = data.load("ucf101")
    assert loaded.shape == (10, 5) and loaded.classes == ("Archery", "Biking")
    assert loaded.train[1].tolist() == [0, 0, 1, 1] and loaded.test[1].tolist() == [0, 1]
    assert loaded.train[0].dtype == torch.float32
    assert loaded.train[0][0, :, 0].tolist() == [0, 0, 1, 1, 1, 2, 2, 3, 3, 3]
    assert loaded.train[0][1, :, 4].tolist() == list(range(10))
    assert loaded.test[0][0, :, 0].tolist() == list(range(1, 30, 3))
    assert len(data.load("ucf101", max_train=2).train[1]) == 2


def test_missing_feature_files_are_named(refused, videos):
    for file in sorted(videos.rglob("*Biking*.npy"))[:2]:
        file.unlink()
    refused("ucf101", r"2 of 6 feature files are missing, the first is .*Biking_g00_c01.npy; make")


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.ones((3, 4)), "has 4 features, the first file 5"),
        (np.ones(5), r"must have numbers of shape \(frames, features\)"),
        (np.ones((0, 5)), r"must have numbers of shape \(frames, features\)"),
        (np.full((3, 5), np.nan), "has numbers that are not finite"),
        (np.array([[None]]), "cannot be read as a .npy file"),
        (b"half", "cannot be read as a .npy file"),
    ],
)
def test_feature_files_that_are_wrong_are_refused(refused, videos, array, message):
    file = videos / "features" / "Biking" / "v_Biking_g02_c01.npy"
    if isinstance(array, bytes):
        file.write_bytes(array)
    else:
        np.save(file, array)
    refused("ucf101", message)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("classInd.txt", "1 Archery\n3 Biking\n", "not a list of numbers from 1 and names"),
        ("classInd.txt", "", "not a list of numbers from 1 and names"),
        (
            "trainlist01.txt",
            "Diving/v_Diving_g01.avi 1\n",
            "is not a video of a class in",
        ),
        ("testlist01.txt", "\n", "testlist01.txt is empty"),
    ],
)
def test_lists_that_are_wrong_are_refused(refused, videos, name, text, message):
    (videos / name).write_text(text)
    refused("ucf101", message)


def test_frames_are_evenly_spread():
    for n in range(1, 40):
        chosen = ucf101.evenly(n)
        assert len(chosen) == 10 and (np.diff(chosen) >= 0).all()
        assert chosen[0] >= 0 and abs(chosen[0] - (n - 1 - chosen[-1])) <= 1
        assert chosen[-1] < n and np.ptp(np.diff(chosen)) <= 1


# benchmarks/ucf101_features.py


class Mean(nn.Module):
    """Three features: a frame's mean colours."""

    def forward(self, x):
        assert not self.training and x.min() >= 0 and x.max() <= 1
        return x.mean((2, 3))


@pytest.fixture
def clips(tmp_path):
    """Videos as folders of frames: frame t is a grey of 20 t."""
    for kind in ("Archery", "Biking"):
        folder = tmp_path / "videos" / kind / f"v_{kind}_g01_c01"
        folder.mkdir(parents=True)
        for t in range(12):
            Image.new("RGB", (8, 6), (20 * t,) * 3).save(folder / f"{t}.png")
        (folder / "notes.txt").touch()
    return tmp_path / "videos"


def test_frames_become_features_that_ucf101_reads(refused, clips, videos, tmp_path):
    for file in videos.rglob("*_g01_c01.npy"):
        file.unlink()
    refused("ucf101", "2 of 6 feature files are missing")
    seen = []
    options = {"frames": 4, "size": 5, "progress": lambda *a: seen.append(a)}
    assert script.make(clips, videos / "features", Mean(), **options) == 2
    assert seen[-1] == (2, 2, str(Path("Biking", "v_Biking_g01_c01")))
    for kind in ("Archery", "Biking"):
        loaded = np.load(videos / "features" / kind / f"v_{kind}_g01_c01.npy")
        assert loaded == pytest.approx(np.array([1, 4, 7, 10])[:, None] * 20 / 255 * np.ones(3))
    refused("ucf101", "features, the first file")  # the others have five
    for file in videos.rglob("*.npy"):
        np.save(file, np.load(file)[:, :3])
    assert data.load("ucf101").shape == (10, 3)


def test_the_script_continues_where_it_stopped(clips, tmp_path):
    class Failing(Mean):
        def forward(self, x):
            if len(list(tmp_path.rglob("*.npy"))) == 1:
                raise RuntimeError("stopped")
            return super().forward(x)

    out = tmp_path / "features"
    with pytest.raises(RuntimeError, match="stopped"):
        script.make(clips, out, Failing())
    (first,) = out.rglob("*.*")
    stamp = first.stat().st_mtime_ns
    assert script.make(clips, out, Mean(), size=4) == 1
    assert first.stat().st_mtime_ns == stamp and len([*out.rglob("*.npy")]) == 2
    assert script.make(clips, out, Mean()) == 0 and not [*out.rglob("*.part")]


def test_the_middle_square_of_a_frame_is_used():
    wide = np.zeros((4, 8, 3), np.uint8)
    wide[:, 2:6] = 255
    assert torch.equal(script._square(wide, 4), torch.ones(3, 4, 4))


def encoder(tmp_path, body):
    (tmp_path / "enc.py").write_text("import torch\nfrom torch import nn\n" + body)
    return ["--encoder", f"{tmp_path / 'enc.py'}:make", "--size", "6"]


POOL = "def make(): return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())\n"


def test_the_script_on_the_command_line(clips, tmp_path, capsys):
    words = [str(clips), str(tmp_path / "out"), *encoder(tmp_path, POOL), "--frames", "3"]
    assert script.main(words) == 0
    out, err = capsys.readouterr()
    assert out == f"2 files written to {tmp_path / 'out'}\n" and err == "2 of 2\n"
    assert np.load(next((tmp_path / "out").rglob("*.npy"))).shape == (3, 3)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("def make(): return 3\n", "must return an nn.Module, got int"),
        ("def make(): return nn.Identity()\n", r"must return \(10, features\), got"),
        ("def make(): raise OSError('oh')\n", "failed with OSError: oh"),
        ("x = 1\n", "has no function 'make'"),
    ],
)
def test_encoders_that_are_wrong_are_refused(clips, tmp_path, capsys, body, message):
    assert script.main([str(clips), str(tmp_path / "out"), *encoder(tmp_path, body)]) == 2
    err = capsys.readouterr().err
    assert re.search(message, err) and err.count("\n") == 1
    assert not [*(tmp_path / "out").rglob("*.npy*")]


def test_a_folder_without_videos_is_refused(tmp_path, capsys):
    with pytest.raises(TpsgdError, match=r"has no CLASS/VIDEO\.avi"):
        script.make(tmp_path, tmp_path / "out", Mean())
    assert script.main([str(tmp_path), "out", "--encoder", "nothing"]) == 2
    assert "is not a FILE.py:FUNCTION" in capsys.readouterr().err


def test_reading_videos_needs_pyav(tmp_path, monkeypatch):
    (tmp_path / "in" / "Archery").mkdir(parents=True)
    (tmp_path / "in" / "Archery" / "v.avi").write_bytes(b"RIFF")
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(TpsgdError, match=r"pip install av \(or give folders of frame images\)"):
        script.make(tmp_path / "in", tmp_path / "out", Mean())


class Container:
    """What PyAV opens: seven frames, or none."""

    def __init__(self, name):
        self.count = 0 if "empty" in name else 7

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def decode(self, video):
        for t in range(self.count):
            image = np.full((4, 6, 3), 10 * t, np.uint8)
            yield SimpleNamespace(to_ndarray=lambda format, p=image: p)


def test_videos_are_read_with_pyav(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "av", SimpleNamespace(open=Container))
    (tmp_path / "in" / "Archery").mkdir(parents=True)
    (tmp_path / "in" / "Archery" / "v_a.b.avi").touch()
    script.make(tmp_path / "in", tmp_path / "out", Mean(), frames=7, size=4)
    loaded = np.load(tmp_path / "out" / "Archery" / "v_a.b.npy")
    assert loaded[:, 0] == pytest.approx(np.arange(7) * 10 / 255)
    (tmp_path / "in" / "Archery" / "empty.avi").touch()
    with pytest.raises(TpsgdError, match=r"empty.avi cannot be read as a video"):
        script.make(tmp_path / "in", tmp_path / "out", Mean())
