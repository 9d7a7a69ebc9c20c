"""Make the feature files that the data set `ucf101` reads, with an encoder of your choice.

    python benchmarks/ucf101_features.py UCF-101 "$TPSGD_DATA/ucf101/features" --encoder FILE.py:FUNCTION

The encoder turns a few frames of each video into features, so that a recurrent net can be trained
on them. Videos whose features exist are skipped, so the script may be stopped and started again.
"""  # noqa: E501

import argparse
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import interpolate

from tpsgd import TpsgdError
from tpsgd.common.files import call_function, is_function
from tpsgd.data.images import SUFFIXES
from tpsgd.data.sets.ucf101 import STEPS, evenly

Array = NDArray[Any]
VIDEO_SUFFIXES = {".avi", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".webm"}


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
    """Write `features/CLASS/VIDEO.npy`, (frames, features), for every video without such a file.

    Args:
        videos: a folder of files `CLASS/VIDEO.avi`, or of folders `CLASS/VIDEO/` of frame images.
        features: the folder to write to.
        encoder: maps frames (n, 3, size, size) in [0, 1] to (n, features).
        frames: the number of frames of each video, evenly spread.
        size: the middle square of each frame is resized to `size` x `size`.
        device: where the encoder runs.
        progress: called with the number of videos done, the number of all, and the last one's name.

    Returns:
        The number of files written.
    """
    sources = _videos(videos)
    encoder = encoder.to(device).eval()
    written = 0
    for done, video in enumerate(sources, start=1):
        name = video.relative_to(videos)
        target = features / name.parent / f"{video.stem if video.is_file() else video.name}.npy"
        if not target.is_file():
            batch = torch.stack([_square(frame, size) for frame in _read(video, frames)])
            _write(target, _encode(encoder, batch.to(device), video))
            written += 1
        if progress is not None:
            progress(done, len(sources), str(name))
    return written


def _videos(root: Path) -> list[Path]:
    """Video files, and folders of frame images, in the folders of the classes."""
    paths = sorted(root.glob("*/*")) if root.is_dir() else []
    videos = [
        path
        for path in paths
        if path.suffix.lower() in VIDEO_SUFFIXES or (path.is_dir() and _images(path))
    ]
    if not videos:
        raise TpsgdError(f"{root} has no CLASS/VIDEO.avi, and no folders CLASS/VIDEO/ of images.")
    return videos


def _images(folder: Path) -> list[Path]:
    """The frames of a video in the order of their names; 10 comes after 9."""
    images = [path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES]
    return sorted(images, key=lambda path: (len(path.stem), path.stem))


def _read(video: Path, n: int) -> list[Array]:
    """`n` frames of a video, each as bytes (height, width, 3)."""
    if video.is_dir():
        files = _images(video)
        return [_read_image(files[i]) for i in evenly(len(files), n)]
    try:
        import av  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise TpsgdError(
            "reading videos needs PyAV; run: pip install av (or give folders of frame images)"
        ) from error
    try:
        with av.open(str(video)) as container:
            frames: list[Any] = list(container.decode(video=0))
        return [frames[i].to_ndarray(format="rgb24") for i in evenly(len(frames), n)]
    except Exception as error:  # decoders raise exceptions of any class
        raise TpsgdError(f"{video} cannot be read as a video ({error}).") from error


def _read_image(file: Path) -> Array:
    from PIL import Image

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


def _encode(encoder: nn.Module, batch: Tensor, video: Path) -> Array:
    with torch.inference_mode():
        features = encoder(batch)
    if not isinstance(features, Tensor) or features.dim() != 2 or len(features) != len(batch):
        result = tuple(features.shape) if isinstance(features, Tensor) else type(features).__name__
        raise TpsgdError(f"the encoder must return ({len(batch)}, features), got {result}.")
    if not bool(features.isfinite().all()):
        raise TpsgdError(f"the encoder's features of {video} are not finite.")
    return features.float().cpu().numpy()


def _write(file: Path, array: Array) -> None:
    """Write a .npy file, which gets its name only when it is complete."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(f"{file.name}.part")
    try:
        with unfinished.open("wb") as stream:
            np.save(stream, array)
        unfinished.replace(file)
    finally:
        unfinished.unlink(missing_ok=True)


def _encoder(spec: str) -> nn.Module:
    if not is_function(spec):
        raise TpsgdError(f"'{spec}' is not a FILE.py:FUNCTION.")
    encoder = call_function(spec)
    if not isinstance(encoder, nn.Module):
        raise TpsgdError(f"{spec} must return an nn.Module, got {type(encoder).__name__}.")
    return encoder


def _print_progress(done: int, total: int, name: str) -> None:
    """One line that is rewritten on a terminal, otherwise a line every 100 videos."""
    if sys.stderr.isatty():
        end = "\n" if done == total else ""
        print(f"\r\x1b[K{done} of {total}: {name}", end=end, file=sys.stderr, flush=True)
    elif done % 100 == 0 or done == total:
        print(f"{done} of {total}", file=sys.stderr)


def _arguments(words: Iterable[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Write FEATURES/CLASS/VIDEO.npy for every video without such a file."
    )
    add = parser.add_argument
    add("videos", type=Path, help="a folder of CLASS/VIDEO.avi, or of CLASS/VIDEO/ of frame images")
    add("features", type=Path, help="the folder to write to: $TPSGD_DATA/ucf101/features")
    add(
        "--encoder",
        required=True,
        metavar="FILE.py:FUNCTION",
        help="returns an nn.Module that maps frames (n, 3, size, size) in [0, 1] to (n, features)",
    )
    add("--frames", type=int, default=STEPS, help="frames of each video (default: %(default)s)")
    add("--size", type=int, default=224, help="height and width of a frame (default: %(default)s)")
    add("--device", default="cpu", help="where the encoder runs (default: %(default)s)")
    arguments = parser.parse_args(None if words is None else list(words))
    if arguments.frames < 1 or arguments.size < 1:
        parser.error("--frames and --size must be 1 or more")
    return arguments


def main(words: Iterable[str] | None = None) -> int:
    """The command line; after a mistake of the caller's, one line and exit status 2."""
    arguments = _arguments(words)
    try:
        written = make(
            arguments.videos,
            arguments.features,
            _encoder(arguments.encoder),
            frames=arguments.frames,
            size=arguments.size,
            device=arguments.device,
            progress=_print_progress,
        )
    except TpsgdError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{written} files written to {arguments.features}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
