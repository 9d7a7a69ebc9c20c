"""Imagenette: an image folder whose classes get names."""

import shutil

import pytest
from PIL import Image

from tpsgd import TpsgdError, data


def test_imagenette_classes_have_names(root):
    folder = root / "imagenette2-160"
    numbers = [f"n{i:08}" for i in (*range(1440764, 1440773), 2102040)]
    for place in [folder / part / n for part in ("train", "val") for n in numbers]:
        place.mkdir(parents=True)
        Image.new("RGB", (200, 160), "red").save(place / "one.png")
    loaded = data.load("imagenette")
    assert loaded.shape == (3, 160, 160) and len(loaded.train[1]) == len(loaded.test[1]) == 10
    assert (loaded.classes[0], loaded.classes[-1]) == ("tench", "parachute")
    for part in ("train", "val"):
        shutil.rmtree(folder / part / numbers[-1])
    with pytest.raises(TpsgdError, match="has 9 classes, expected 10"):
        data.load("imagenette")
