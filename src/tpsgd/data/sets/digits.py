"""The 8 x 8 digits that come with scikit-learn.

Alpaydin and Kaynak, Optical Recognition of Handwritten Digits, UCI, 1998; CC BY 4.0.
"""

from pathlib import Path

import numpy as np

from tpsgd.data.dataset import Array, Dataset, RawData
from tpsgd.data.split import hold_out_test


def read(folder: Path, entry: Dataset) -> RawData:
    """The digits of scikit-learn; the test set is the same for every seed."""
    from sklearn.datasets import load_digits

    x, y = map(np.asarray, load_digits(return_X_y=True))
    x = x.reshape(-1, *entry.shape)
    train, note = hold_out_test(y, seed=0, source=entry.name)
    return RawData(entry.classes, (x[train], y[train]), (x[~train], y[~train]), _scaled, note)


def _scaled(x: Array) -> Array:
    return (x / 16).astype(np.float32)


DIGITS = tuple("0123456789")
ENTRIES = (Dataset("digits", DIGITS, shape=(1, 8, 8), train=1438, test=359, read=read),)
