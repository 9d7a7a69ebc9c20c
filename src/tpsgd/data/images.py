"""A folder of images: one subfolder a class, and `train/` and `val/` or `test/` above them."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from tpsgd.data.entry import Dataset
from tpsgd.data.rows import Array, Pair, Raw, encode
from tpsgd.errors import TpsgdError

SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}


def read_folder(root: Path, size: int | None = None) -> Raw:
    """Images in RGB, all of `size` x `size` or of the first one's size; read when asked for."""
    if not root.is_dir():
        raise TpsgdError(f"{root} is no folder; expected one of images, in a subfolder a class.")
    top, *parts = _parts(root)
    if (train := _listed(top)) is None:
        loose = any(f.suffix.lower() in SUFFIXES for f in top.iterdir())
        what = "images but no subfolders named after their classes" if loose else "no images"
        raise TpsgdError(f"{top} holds {what}; expected {top.name}/CLASS/IMAGE.png and the like.")
    if size == 0:
        raise TpsgdError(f"{root}@0 asks for images of no size; give {root}@64 or the like.")
    height, width = (size, size) if size else _open(train[0][0]).shape[1:]
    test = next((pair for part in parts if (pair := _listed(part))), None)
    return Raw(
        *encode(str(root), train, test),
        partial(_decode, shape=(height, width)),
        f"images as RGB, {height} x {width} pixels",
    )


def imagenette(root: Path, entry: Dataset) -> Raw:
    """Imagenette, whose folders are numbered as in WordNet, with the names of its classes."""
    raw = read_folder(root, entry.shape[-1])
    if len(raw.classes) != len(entry.classes):
        raise TpsgdError(
            f"{root} has {len(raw.classes)} classes, Imagenette has 10; unpack it anew"
        )
    return replace(raw, classes=entry.classes)


def image_files(root: Path) -> Iterator[Path]:
    """Every image below `root` that may count, in order."""
    for part in _parts(root):
        for folder in _class_folders(part):
            yield from _images(folder)


def _parts(root: Path) -> list[Path]:
    """The folder to train on, and those that may hold a test part."""
    if not (root / "train").is_dir():
        return [root]
    return [root / part for part in ("train", "test", "val") if (root / part).is_dir()]


def _class_folders(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.is_dir() and p.name[0] != ".")


def _images(folder: Path) -> list[Path]:
    return sorted(f for f in folder.rglob("*") if f.suffix.lower() in SUFFIXES and f.is_file())


def _listed(folder: Path) -> Pair | None:
    """Image files below the class folders and the class of each, or None where there are none."""
    files: list[str] = []  # a path takes several times as much memory
    names: list[str] = []
    for sub in _class_folders(folder):
        mine = [str(file) for file in _images(sub)]
        files += mine
        names += [sub.name] * len(mine)
    return (np.array(files, dtype=object), np.array(names)) if files else None


def _decode(files: Array, shape: tuple[int, int]) -> Array:
    """Read, resize and scale to [0, 1], straight into the one float32 array."""
    try:
        x = np.empty((len(files), 3, *shape), np.float32)
    except MemoryError as error:
        raise TpsgdError(
            f"{len(files)} images of {shape[0]} x {shape[1]} do not fit in memory; ask for a"
            " smaller size, FOLDER@64, or for less with max_train."
        ) from error

    def put(i: int) -> None:
        np.divide(_open(files[i], shape), np.float32(255), out=x[i])

    with ThreadPoolExecutor() as pool:
        for _ in pool.map(put, range(len(files))):
            pass
    return x


def _open(file: str, shape: tuple[int, int] | None = None) -> Array:
    """One image as RGB bytes, (3, height, width)."""
    try:
        from PIL import Image
    except ImportError as error:
        raise TpsgdError("to read images pillow is needed; run: pip install pillow") from error
    try:
        with Image.open(file) as image:
            if image.mode[0] in "IF":  # more than 8 bits: pillow would clip them all to white
                raise ValueError(f"mode {image.mode}; save it with 8 bits a channel")
            rgb = image.convert("RGB")
        if shape is not None and rgb.size != (shape[1], shape[0]):
            rgb = rgb.resize((shape[1], shape[0]), Image.Resampling.BILINEAR)
    except Exception as error:  # decoders raise whatever they like
        raise TpsgdError(f"{file} cannot be read as an image ({error}).") from error
    return np.asarray(rgb).transpose(2, 0, 1)
