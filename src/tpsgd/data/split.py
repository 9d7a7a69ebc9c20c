"""Choosing samples: seeded, with the shares of the classes kept."""

import numpy as np

from tpsgd.data.rows import Array
from tpsgd.errors import TpsgdError


def stratified(y: Array, k: int, seed: int) -> Array:
    """Mask of `k` samples whose class shares are those of `y`; each class is served once first.

    Sample number r (shuffled) of a class of n gets the rank (r + 1/2) / n; the k lowest win.

    Examples:
        >>> y = np.array([0] * 8 + [1] * 4)
        >>> np.bincount(y[stratified(y, 6, seed=0)])
        array([4, 2])
    """
    order = np.random.default_rng(seed).permutation(len(y))
    by_class = order[np.argsort(y[order], kind="stable")]
    n = np.bincount(y)
    r = np.arange(len(y)) - np.repeat(np.cumsum(n) - n, n)
    rank = np.empty(len(y))
    rank[by_class] = np.where(r == 0, 0, (r + 0.5) / np.repeat(n, n))
    chosen = np.zeros(len(y), dtype=bool)
    chosen[order[np.argsort(rank[order], kind="stable")[:k]]] = True
    return chosen


def hold_out(where: str, y: Array, seed: int) -> tuple[Array, str]:
    """Mask of the samples to train on, the rest being the test part, and the note that says so."""
    train = stratified(y, len(y) - max(1, round(0.2 * len(y))), seed)
    if not np.isin(y[~train], y[train]).all():
        raise TpsgdError(
            f"{where}: {len(y)} samples are too few to hold 20 % out as a test part;"
            " give two of each class or more, or a test part of your own."
        )
    return train, f"20 % held out as test, stratified, seed {seed}"
