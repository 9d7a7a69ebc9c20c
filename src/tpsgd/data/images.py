"""A folder of images: a subfolder for each class, perhaps below `train/` and `val/` or `test/`."""

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tpsgd.common.errors import TpsgdError
from tpsgd.common.units import size as in_units
from tpsgd.data.dataset import BYTES, Array, Pair, RawData
from tpsgd.data.labels import encode

PIXEL = 4  # bytes of a decoded pixel
MOST_RESIZED = 1000  # times the files' size, for all images with the size of the first
SMALL_FILES = 2**20  # bytes of all files, below which MOST_RESIZED does not count
MOST_SHRUNK, ALWAYS_READ = 80, 2**26  # times a file's size, and bytes that are always decoded
BULKY = 20  # times a file's size, and more than a megabyte: such images are decoded one by one
GREY = ("1", "L", "LA", "La")  # Pillow's modes of grey images of up to 8 bits
ORIENTATION = 0x112  # the number of an EXIF tag; how Pillow turns images back, by its values
TURNS = {
    **{2: "FLIP_LEFT_RIGHT", 3: "ROTATE_180", 4: "FLIP_TOP_BOTTOM", 5: "TRANSPOSE"},
    **{6: "ROTATE_270", 7: "TRANSVERSE", 8: "ROTATE_90"},
}
SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}


def read_folder(root: Path, size: int | None = None, channels: int | None = None) -> RawData:
    """Images, resized to `size` x `size` or to the size of the first one.

    They have one channel if all of them are grey, else three. Only the names of the files, and as
    much as tells whether they are grey, are read here; `decode` reads the images.
    """
    train_folder, *test_folders = _split_folders(root)
    if size == 0:
        raise TpsgdError(f"{root}@0 asks for images of size 0; give a size such as {root}@64.")
    skipped: list[str] = []  # the suffixes of files that are no images
    if not len((train := _labelled_images(train_folder, skipped))[0]):
        raise TpsgdError(f"{train_folder} has no images in subfolders of classes, CLASS/IMAGE.png.")
    tests = (_labelled_images(folder, skipped) for folder in test_folders)
    test = next((pair for pair in tests if len(pair[0])), None)
    channels = channels or _channels([*train[0], *(() if test is None else test[0])])
    shape = (channels, *((size, size) if size else _size_of_first(root, train[0], channels)))
    note = f"images as {'RGB' if channels > 1 else 'grey'}, {shape[1]} x {shape[2]} pixels"
    if skipped:
        kinds = ", ".join(sorted(set(skipped)))
        note += f", other files skipped: {len(skipped)} ({kinds})"
    decode = partial(decode_images, shape=shape)
    return encode(str(root), RawData((), train, test, decode, note, reading=BYTES))


def image_files(root: Path) -> Iterator[Path]:
    """The image files of all classes, for training and for testing, in order."""
    for folder in _split_folders(root):
        yield from _labelled_images(folder)[0]


def new_images(root: Path) -> Pair:
    """All image files below a folder, and their classes if each is in a subfolder of a class.

    Below `train/` and `test/` or `val/`, those for testing.
    """
    folder = _split_folders(root)[-1]
    files = [file for file in _visible_files(folder) if _is_image(file)]
    if not files:
        raise TpsgdError(f"{folder} has no images.")
    labelled = _labelled_images(folder)
    return labelled if len(labelled[0]) == len(files) else (np.array(files, dtype=object), None)


def _split_folders(root: Path) -> list[Path]:
    """The folder to train on, then the folders that may have test images."""
    if not os.path.isdir(root):
        raise TpsgdError(f"{root} is not a folder; expected a folder of images, CLASS/IMAGE.png.")
    if not (root / "train").is_dir():
        return [root]
    return [root / name for name in ("train", "test", "val") if (root / name).is_dir()]


def _visible_files(folder: Path) -> list[Path]:
    """Files without those that macOS hides on disks of other systems, such as `._NAME.png`."""
    return sorted(f for f in folder.rglob("*") if f.name[0] != "." and f.is_file())


def _is_image(file: Path) -> bool:
    return file.suffix.lower() in SUFFIXES


def _labelled_images(folder: Path, skipped: list[str] | None = None) -> Pair:
    """The images below the folders of the classes, and their classes.

    The suffixes of other files are added to `skipped`.
    """
    classes = sorted(p for p in folder.iterdir() if p.is_dir() and p.name[0] != ".")
    files = [(path.name, file) for path in classes for file in _visible_files(path)]
    if skipped is not None:
        skipped += [file.suffix or file.name for _, file in files if not _is_image(file)]
    images = [(file, label) for label, file in files if _is_image(file)]
    return np.array([f for f, _ in images], dtype=object), np.array([label for _, label in images])


def _channels(files: Iterable[Path]) -> int:
    """1 if all images are grey, else 3; files are opened up to the first image in colour."""

    def is_grey(file: Path) -> bool:
        with _opened(file) as image:
            return _is_grey(image)

    return 1 if all(map(is_grey, files)) else 3


def _size_of_first(root: Path, files: Array, channels: int) -> tuple[int, int]:
    """The height and width of the first image, unless all of them would fill the memory with it."""
    first = _open(files[0])
    assert first is not None
    _, height, width = first[0].shape
    nbytes = len(files) * channels * height * width * PIXEL
    stored = sum(map(os.path.getsize, files))
    if nbytes > max(ALWAYS_READ, MOST_RESIZED * stored if stored > SMALL_FILES else 0):
        raise TpsgdError(
            f"{files[0]} has {width} x {height} pixels, and {len(files)} images of that size would"
            f" take {in_units(nbytes)}; give a size such as {root}@64."
        )
    return height, width


def decode_images(files: Array, shape: tuple[int, ...]) -> Array:
    """Read the images as float32 from 0 to 1, each of this shape, (channels, height, width)."""
    try:
        x = np.empty((len(files), *shape), np.float32)
    except (MemoryError, ValueError) as error:  # numpy: more than any machine has
        raise TpsgdError(
            f"{len(files)} images of {shape[1]} x {shape[2]} do not fit in memory; ask for a"
            " smaller size (FOLDER@64), for fewer with max_train, or load them on_disk."
        ) from error

    def decode(i: int, bulky: bool = False) -> bool:
        if (image := _open(files[i], shape, bulky)) is None:
            return False
        pixels, white = image
        np.divide(pixels, np.float32(white), out=x[i])  # of grey ones, in all channels
        return True

    with ThreadPoolExecutor() as pool:
        decoded = list(pool.map(decode, range(len(files))))
    for i in [i for i, done in enumerate(decoded) if not done]:  # this thread frees its memory
        decode(i, bulky=True)
    return x


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """An image whose pixels are not read yet, and an error that names its file."""
    from PIL import Image

    try:
        with Image.open(file) as image:
            image.filename = ""  # else Pillow maps pixels of a TIFF by the size that it has upright
            yield image
    except Exception as error:  # decoders raise exceptions of any class
        raise TpsgdError(f"{file} cannot be read as an image ({error}).") from error


def _open(
    file: Path, shape: tuple[int, ...] | None = None, bulky: bool = True
) -> tuple[Array, int] | None:
    """The pixels of an image, (channels, height, width), and the number that is white.

    Grey images, and all for a shape of one channel, have one. None for a bulky image, unless it may
    be one.
    """
    from PIL import Image

    with _opened(file) as image:
        if _is_bulky(image, os.path.getsize(file)) and not bulky:
            return None
        image.load()
        white, picture = (65535 if _is_deep(image) else 255), _upright(image, _plain(image))
        if shape is not None and shape[0] == 1 and picture.mode == "RGB":
            picture = picture.convert("L")
        if shape is not None and picture.size != (shape[2], shape[1]):
            picture = picture.resize((shape[2], shape[1]), Image.Resampling.BILINEAR)
        pixels = np.asarray(picture)
    return (pixels.transpose(2, 0, 1) if pixels.ndim > 2 else pixels[None]), white


def _is_bulky(image: Any, stored: int) -> bool:
    """Whether a small file becomes a large image; much too large ones are refused."""
    nbytes = image.width * image.height * PIXEL * (2 if image.mode[0] == "I" else 1)
    if nbytes > max(ALWAYS_READ, MOST_SHRUNK * stored):
        raise ValueError(f"{image.width} x {image.height} pixels in such a small file")
    return nbytes > max(2**20, BULKY * stored)


def _is_deep(image: Any) -> bool:
    """Whether a grey image has 16 bits."""
    return image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM"))


def _is_grey(image: Any) -> bool:
    """Whether an image has one channel, or a palette of greys, beside its transparency."""
    if image.mode == "P":
        return not np.ptp(np.reshape(image.getpalette(), (-1, 3)), 1).any()
    return image.mode in GREY or _is_deep(image)


def _plain(image: Any) -> Any:
    """An image of any mode as grey, of 8 bits or as float32, or as RGB; transparency is white."""
    from PIL import Image

    if _is_deep(image):
        return Image.fromarray(np.asarray(image).astype(np.float32))
    if image.mode[0] in "IF":  # of unknown range: pillow would make every pixel white
        raise ValueError(f"mode {image.mode}; save it with 8 or 16 bits a channel")
    mode = "L" if _is_grey(image) else "RGB"
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert(mode)


def _upright(image: Any, picture: Any) -> Any:
    """The picture of an image, turned as its EXIF orientation says."""
    from PIL.Image import Transpose

    try:
        turn = TURNS.get(image.getexif().get(ORIENTATION))
    except Exception:  # of a damaged block, whatever it raises; the pixels are whole
        turn = None
    return picture if turn is None else picture.transpose(Transpose[turn])
