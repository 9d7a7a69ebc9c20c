"""Data sets: built-in ones by name, one's own by path.

Examples:
    >>> from tpsgd import data
    >>> digits = data.load("digits")
    >>> digits.shape, digits.train[0].shape, len(digits.classes)
    ((1, 8, 8), torch.Size([1438, 1, 8, 8]), 10)
"""

from tpsgd.data.download import fetch
from tpsgd.data.folders import Row, describe, path
from tpsgd.data.loading import Data, load
from tpsgd.data.registry import DATASETS, Dataset

__all__ = ["DATASETS", "Data", "Dataset", "Row", "describe", "fetch", "load", "path"]
