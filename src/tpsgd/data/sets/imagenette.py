"""Imagenette: photographs of ten easy classes of ImageNet.

Howard, Imagenette, 2019; Deng et al., ImageNet, CVPR 2009. Apache-2.0 (the collection); ImageNet's
terms for the photographs.
"""

from dataclasses import replace
from pathlib import Path

from tpsgd.common.errors import TpsgdError
from tpsgd.data.dataset import Dataset, RawData
from tpsgd.data.images import read_folder


def read(folder: Path, entry: Dataset) -> RawData:
    """A folder of images whose subfolders are WordNet numbers; the classes get their names."""
    raw = read_folder(folder, entry.shape[-1], entry.shape[0])
    if len(raw.classes) != len(entry.classes):
        raise TpsgdError(f"{folder} has {len(raw.classes)} classes, expected {len(entry.classes)}.")
    return replace(raw, classes=entry.classes)


IMAGENETTE = Dataset(
    name="imagenette",
    classes=(
        *("tench", "English springer", "cassette player", "chain saw", "church"),
        *("French horn", "garbage truck", "gas pump", "golf ball", "parachute"),
    ),
    shape=(3, 160, 160),
    train=9469,
    test=3925,
    read=read,
    folder="imagenette2-160",
    files=("train/n01440764", "val/n01440764"),
    by_hand="take imagenette2-160.tgz from fast.ai's page of Imagenette and unpack it",
)
ENTRIES = (IMAGENETTE,)
