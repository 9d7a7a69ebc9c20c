"""UCF101's loader end to end on synthetic clips, whose classes no single frame can tell apart.

    python -m experiments.clips --out results

A bright square drifts to the left, to the right or upwards over a noisy torus, from a random place:
every frame of every class has the same distribution, so only the order of frames says which class
it is. The clips are encoded as MPEG-4 in AVI by PyAV, `benchmarks/ucf101_features.py` decodes them
and writes features, an 8 x 8 average of each frame, and `tpsgd.data.load("ucf101")` reads them with
split lists in the publisher's format. Without PyAV the clips are folders of PNG frames, which the
same script reads; the file says which.

A recurrent net learns from ten frames. The controls are a random recurrent layer under a trained
head, a single frame, and all frames in random order. The paper's row on UCF101 itself needs its
videos, which are not here.
"""

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import tpsgd
from benchmarks import ucf101_features
from experiments.common import Row, Samples, program
from experiments.rows import Rows, row_arguments, shown
from tpsgd import Recurrent, rules
from tpsgd.data.sets.ucf101 import CLASS_LIST, TEST_LIST, TRAIN_LIST
from tpsgd.engine.restarts import Restarts

Array = NDArray[Any]
MOTIONS = {"Left": (0, -1), "Right": (0, 1), "Up": (-1, 0)}  # rows and columns
SIDE, SQUARE, GRID = 64, 12, 8  # pixels, pixels, cells
FRAMES, SPEED, NOISE = 20, 3, 0.1
UNITS, LEAK = 256, 0.5


@dataclass(frozen=True)
class Size:
    """How many clips, and how long nets learn from them."""

    train: int = 900
    test: int = 300
    epochs: int = 40


SMOKE = Size(30, 15, 2)


def draw_clip(motion: str, generator: np.random.Generator) -> Array:
    """A clip as bytes (frames, height, width, 3)."""
    start = generator.integers(SIDE, size=2)
    clip = generator.normal(0.2, NOISE, (FRAMES, SIDE, SIDE))
    for number, frame in enumerate(clip):
        rows, columns = (
            (place + SPEED * number * direction + np.arange(SQUARE)) % SIDE
            for place, direction in zip(start, MOTIONS[motion], strict=True)
        )
        frame[np.ix_(rows, columns)] += 0.7
    grey = (clip.clip(0, 1) * 255).astype(np.uint8)
    return np.repeat(grey[..., None], 3, axis=3)


def write_video(clip: Array, file: Path) -> None:
    """Encode a clip as MPEG-4 in AVI, the kind of file that UCF101 has."""
    import av  # pyright: ignore[reportMissingImports]

    with av.open(str(file.with_suffix(".avi")), "w") as container:
        stream: Any = container.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = SIDE, SIDE, "yuv420p"
        stream.bit_rate = 1_000_000
        for frame in clip:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())


def write_images(clip: Array, folder: Path) -> None:
    """Write a clip as a folder of PNG frames."""
    from PIL import Image

    folder.mkdir()
    for number, frame in enumerate(clip):
        Image.fromarray(frame).save(folder / f"{number}.png")


WRITERS: dict[str, Callable[[Array, Path], None]] = {"PyAV": write_video, "PNG": write_images}


class FrameAverage(nn.Module):
    """The encoder: grey frames, averaged over 8 x 8 cells, of mean 0 within a frame."""

    def forward(self, frames: Tensor) -> Tensor:
        """Frames (n, 3, height, width) to (n, 64)."""
        cells = nn.functional.adaptive_avg_pool2d(frames.mean(1, keepdim=True), GRID).flatten(1)
        return 4 * (cells - cells.mean(1, keepdim=True))


def make_set(root: Path, size: Size, kind: str) -> None:
    """Write the clips, their features and the lists of classes and splits."""
    folder, generator, names = root / "ucf101", np.random.default_rng(0), list(MOTIONS)
    lists: dict[str, list[str]] = {TRAIN_LIST: [], TEST_LIST: []}
    for number in range(size.train + size.test):
        motion = names[number % len(names)]
        clip = root / "videos" / motion / f"v_{motion}_{number:04}"
        clip.parent.mkdir(parents=True, exist_ok=True)
        WRITERS[kind](draw_clip(motion, generator), clip)
        split = TRAIN_LIST if number < size.train else TEST_LIST
        lists[split].append(f"{motion}/{clip.name}.avi")
    ucf101_features.make(root / "videos", folder / "features", FrameAverage(), size=SIDE)
    lists[CLASS_LIST] = [f"{i} {name}" for i, name in enumerate(names, 1)]
    for name, lines in lists.items():
        (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")


@contextmanager
def data_root(folder: Path) -> Iterator[None]:
    """Look for data sets in this folder."""
    before = os.environ.get("TPSGD_DATA")
    os.environ["TPSGD_DATA"] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ["TPSGD_DATA"]
        else:
            os.environ["TPSGD_DATA"] = before


def load(size: Size, kind: str) -> tuple[Samples, Samples]:
    """Clips to train and to test on: written, decoded, encoded and loaded."""
    with tempfile.TemporaryDirectory() as name:
        make_set(Path(name), size, kind)
        with data_root(Path(name)):
            data = tpsgd.data.load("ucf101")
    return data.train, data.test


def all_frames(x: Tensor) -> Tensor:
    """Ten frames in their order."""
    return x


def one_frame(x: Tensor) -> Tensor:
    """The frame in the middle."""
    return x[:, x.shape[1] // 2, None]


def shuffled_frames(x: Tensor) -> Tensor:
    """All frames of each clip in a random order of its own."""
    order = torch.rand(x.shape[:2], generator=torch.Generator().manual_seed(0)).argsort(1)
    return x.gather(1, order[..., None].to(x.device).expand_as(x))


ARMS: dict[str, tuple[rules.Rule | None, Callable[[Tensor], Tensor]]] = {
    "readout": (rules.readout(), all_frames),
    "tpsgd-l1": (rules.tpsgd_l1(), all_frames),
    "drtp": (rules.drtp(), all_frames),
    "backprop": (None, all_frames),
    "frozen": (rules.frozen(), all_frames),
    "readout, one frame": (rules.readout(), one_frame),
    "backprop, one frame": (None, one_frame),
    "readout, shuffled": (rules.readout(), shuffled_frames),
    "backprop, shuffled": (None, shuffled_frames),
}


def fit(arm: str, train: Samples, size: Size, device: str, **more: Any) -> Restarts:
    """Restarts of one arm; backprop's head learns with the rest, other heads are solved."""
    rule, view = ARMS[arm]
    settings: Row = {"rule": rule, "backprop": rule is None, "epochs": size.epochs}
    settings["batch_size"] = 64

    def make() -> nn.Module:
        layer = Recurrent(train[0].shape[-1], UNITS, leak=LEAK)
        return nn.Sequential(layer, nn.Linear(UNITS, len(MOTIONS))).to(device)

    return tpsgd.fit_many(make, (view(train[0]), train[1]), **settings, **more)


def main() -> None:
    """Make the clips and train every arm; the file is written after every restart."""
    parser = row_arguments(__doc__)
    parser.add_argument("--only", choices=list(ARMS))
    parser.add_argument(
        "--kind", choices=list(WRITERS), help="of clips; PyAV where it is installed"
    )
    options = parser.parse_args()
    size = SMOKE if options.smoke else Size()
    kind = options.kind or ("PyAV" if find_spec("av") else "PNG")
    if kind == "PNG":
        print("Clips are folders of PNG frames: videos need PyAV (pip install av).", flush=True)
    rows = Rows("clips", options, {"frames": FRAMES, "units": UNITS, "leak": LEAK, "kind": kind})
    train, test = ((x.to(options.device), y.to(options.device)) for x, y in load(size, kind))
    for arm in [options.only] if options.only else list(ARMS):
        settings = {"arm": arm, "kind": kind, "train": size.train, "epochs": size.epochs}
        view = ARMS[arm][1]
        learn = partial(fit, arm, train, size, options.device)
        row = rows.restart(arm, settings, learn, (view(test[0]), test[1]))
        if row is not None:
            print(f"{arm:20} {shown(row)}", flush=True)


if __name__ == "__main__":
    program(main)
