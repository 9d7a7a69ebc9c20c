"""Make the feature files that `ucf101` reads: python -m tpsgd.data.frames --help

An encoder of one's own sees some frames of each video and its features are kept, so that a
recurrent net can train on them. Videos already done are passed over: stop and start at will.
"""

import argparse
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from tpsgd.data import user_files as own
from tpsgd.data.images import SUFFIXES
from tpsgd.data.rows import Array
from tpsgd.data.ucf101 import STEPS, evenly
from tpsgd.errors import TpsgdError

VIDEOS = {".avi", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".webm"}


def make(
    videos: Path,
    features: Path,
    encoder: nn.Module,
    *,
    frames: int = STEPS,
    size: int = 224,
    device: str = "cpu",
    progress: Callable[[int, int, str], None] | None = None,
) -> int:
    """Write `features/CLASS/VIDEO.npy`, (frames, features), for every video that has none.

    Args:
        videos: holds `CLASS/VIDEO.avi` and the like, or folders `CLASS/VIDEO/` of frame images.
        features: where the files go.
        encoder: maps frames (n, 3, size, size) in [0, 1] to (n, features).
        frames: how many frames of a video to take, evenly spread.
        size: a frame's shorter side is brought to it, and the middle square is kept.
        device: where the encoder runs.
        progress: called with the videos done, their number and the name of the last.

    Returns:
        How many files were written.
    """
    found = _videos(videos)
    encoder = encoder.to(device).eval()
    written = 0
    for done, video in enumerate(found, start=1):
        name = video.relative_to(videos)
        target = features / name.parent / f"{video.stem if video.is_file() else video.name}.npy"
        if not target.is_file():
            batch = torch.stack([_square(frame, size) for frame in _read(video, frames)])
            _write(target, _encoded(encoder, batch.to(device), video))
            written += 1
        if progress is not None:
            progress(done, len(found), str(name))
    return written


def _videos(root: Path) -> list[Path]:
    """Video files, and folders that hold frame images, one level below the class folders."""
    inside = sorted(root.glob("*/*")) if root.is_dir() else []
    found = [p for p in inside if p.suffix.lower() in VIDEOS or (p.is_dir() and _images(p))]
    if not found:
        raise TpsgdError(f"{root} holds no CLASS/VIDEO.avi, nor folders CLASS/VIDEO/ of images.")
    return found


def _images(folder: Path) -> list[Path]:
    """The frames of a video in the order of their names; 10 comes after 9."""
    images = [p for p in folder.iterdir() if p.suffix.lower() in SUFFIXES]
    return sorted(images, key=lambda p: (len(p.stem), p.stem))


def _read(video: Path, n: int) -> list[Array]:
    """`n` frames of a video, each as bytes (height, width, 3)."""
    if video.is_dir():
        files = _images(video)
        return [_image(files[i]) for i in evenly(len(files), n)]
    try:
        import av  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise TpsgdError(
            "to read videos PyAV is needed; run: pip install av (or give folders of frame images)"
        ) from error
    try:
        with av.open(str(video)) as container:
            every: list[Any] = list(container.decode(video=0))
        chosen = [every[i].to_ndarray(format="rgb24") for i in evenly(len(every), n)]
    except Exception as error:  # decoders raise whatever they like
        raise TpsgdError(f"{video} cannot be read as a video ({error}).") from error
    return chosen


def _image(file: Path) -> Array:
    try:
        from PIL import Image
    except ImportError as error:
        raise TpsgdError("to read images pillow is needed; run: pip install pillow") from error
    try:
        with Image.open(file) as image:
            return np.asarray(image.convert("RGB"))
    except Exception as error:
        raise TpsgdError(f"{file} cannot be read as an image ({error}).") from error


def _square(frame: Array, size: int) -> Tensor:
    """The middle square of a frame, (3, size, size) in [0, 1]."""
    x = torch.from_numpy(frame.copy()).permute(2, 0, 1)[None].float() / 255
    height, width = x.shape[2:]
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    x = x[:, :, top : top + side, left : left + side]
    return interpolate(x, (size, size), mode="bilinear", antialias=True)[0].clamp(0, 1)


def _encoded(encoder: nn.Module, batch: Tensor, video: Path) -> Array:
    with torch.inference_mode():
        out = encoder(batch)
    if not isinstance(out, Tensor) or out.dim() != 2 or len(out) != len(batch):
        got = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise TpsgdError(f"the encoder must return ({len(batch)}, features), got {got}.")
    if not bool(out.isfinite().all()):
        raise TpsgdError(f"the encoder's features of {video} are not finite.")
    return out.float().cpu().numpy()


def _write(file: Path, array: Array) -> None:
    """Under its name only when it is whole."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f"{file.name}.part")
    try:
        with part.open("wb") as stream:
            np.save(stream, array)
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)


def _encoder(spec: str) -> nn.Module:
    file, _, name = spec.rpartition(":")
    if not file.endswith(".py") or not Path(file).expanduser().is_file():
        raise TpsgdError(f"'{spec}' is no FILE.py:FUNCTION.")
    made = own.call(Path(file).expanduser(), name)
    if not isinstance(made, nn.Module):
        raise TpsgdError(f"{spec} must return an nn.Module, got {type(made).__name__}.")
    return made


def _progress(done: int, total: int, name: str) -> None:
    """One line that counts on a terminal, else a line now and then."""
    if sys.stderr.isatty():
        end = "\n" if done == total else ""
        print(f"\r\x1b[K{done} of {total}: {name}", end=end, file=sys.stderr, flush=True)
    elif done % 100 == 0 or done == total:
        print(f"{done} of {total}", file=sys.stderr)


def _arguments(words: Iterable[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m tpsgd.data.frames",
        description="Write FEATURES/CLASS/VIDEO.npy for every video that has none.",
    )
    say = parser.add_argument
    say("videos", type=Path, help="CLASS/VIDEO.avi and the like, or CLASS/VIDEO/ of frame images")
    say("features", type=Path, help="where they go: $TPSGD_DATA/ucf101/features")
    say(
        "--encoder",
        required=True,
        metavar="FILE.py:FUNCTION",
        help="gives an nn.Module that maps frames (n, 3, size, size) in [0, 1] to (n, features)",
    )
    say("--frames", type=int, default=STEPS, help="frames a video (default: %(default)s)")
    say("--size", type=int, default=224, help="of the square frames (default: %(default)s)")
    say("--device", default="cpu", help="where the encoder runs (default: %(default)s)")
    made = parser.parse_args(None if words is None else list(words))
    if made.frames < 1 or made.size < 1:
        parser.error("--frames and --size must be 1 or more")
    return made


def main(words: Iterable[str] | None = None) -> int:
    """The command line; a mistake of the caller's is one line and exit status 2."""
    told = _arguments(words)
    try:
        written = make(
            told.videos, told.features, _encoder(told.encoder), frames=told.frames,
            size=told.size, device=told.device, progress=_progress,
        )  # fmt: skip
    except TpsgdError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{written} files written to {told.features}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
