"""Data sets: the built-in ones by name, your own by path.

`loading` is `load`, and `new_samples` reads samples for a trained model, by the same readers:
`user_files` finds the one for a file of yours (`npz_files`, `csv_files`, `images`), and `arrays`
checks its arrays. `registry` lists the built-in sets, which are in `sets/`, and `download` fetches
them; `split` holds out test samples; `scaling` scales tables and series; `mapped` keeps samples on
disk. Pillow, pooch, rich and scikit-learn are imported where they are used.

Examples:
    >>> from tpsgd import data
    >>> digits = data.load("digits")
    >>> digits.shape, digits.train[0].shape, len(digits.classes)
    ((1, 8, 8), torch.Size([1438, 1, 8, 8]), 10)
"""

from tpsgd.data.download import fetch
from tpsgd.data.loading import Data, load
from tpsgd.data.new_samples import read_new
from tpsgd.data.registry import describe, path

__all__ = ["Data", "describe", "fetch", "load", "path", "read_new"]
