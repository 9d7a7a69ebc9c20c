"""What the C of a head must learn, in float64: features, and ridge regression in closed form."""

from typing import Any

import numpy as np

from tpsgd_export.heads.recipe import HeadRecipe

Array = np.ndarray[Any, Any]


def signs(recipe: HeadRecipe) -> Array:
    """The random projection, (features, inputs) numbers -1 and +1, from the hash of the C."""
    words = -(-recipe.inputs // 32)
    z = np.arange(recipe.features * words, dtype=np.uint32) + np.uint32(recipe.stream)
    z = (z ^ z >> 16) * np.uint32(0x7FEB352D)
    z = (z ^ z >> 15) * np.uint32(0x846CA68B)
    z ^= z >> 16
    bits = z[:, None] >> np.arange(31, -1, -1, dtype=np.uint32) & 1
    return 1.0 - 2.0 * bits.reshape(recipe.features, 32 * words)[:, : recipe.inputs]


def features(recipe: HeadRecipe, x: Any) -> Array:
    """Features of some samples, a row each, and a 1 behind them."""
    x = np.asarray(x, np.float64).reshape(-1, recipe.inputs)
    scale = float(np.float32(recipe.scale))
    h = np.maximum(x @ signs(recipe).T, 0.0) * scale if recipe.features else x * scale
    return np.concatenate([h, np.ones((len(h), 1))], 1)


def one_hot(labels: Any, classes: int) -> Array:
    """A row with a 1 for each label."""
    return np.eye(classes)[np.asarray(labels, np.int64)]


def ridge(
    h: Array, labels: Any, recipe: HeadRecipe, kept: Array | None = None, weights: Any = 1.0
) -> Array:
    """The weights, (classes, units), that minimise the weighted squared error over all samples.

    `kept` is what older samples keep of their weights at each sample, all of them by default.
    """
    kept = np.ones(len(h)) if kept is None else kept
    counts = np.cumprod(np.append(kept, 1.0)[::-1])[::-1]  # of the start, then of each sample
    weighted = h * (counts[1:] * weights)[:, None]
    sums = weighted.T @ h + counts[0] * recipe.ridge * np.eye(h.shape[1])
    return np.linalg.solve(sums, weighted.T @ one_hot(labels, recipe.outputs)).T


def recursive(
    recipe: HeadRecipe, h: Array, labels: Any, weights: Any = 1.0
) -> tuple[Array, Array, bool]:
    """The weights, what older samples kept at each sample, and whether a factor reached its bound.

    The inverse of the sums is a full matrix here; the bound is put on its factors D of U D U^T.
    """
    inverse, solution = np.eye(h.shape[1]) / recipe.ridge, np.zeros((recipe.outputs, h.shape[1]))
    counts = np.broadcast_to(weights, len(h))
    kept, bounded = np.ones(len(h)), False
    for i, (row, target) in enumerate(zip(h, one_hot(labels, recipe.outputs), strict=True)):
        errors = solution @ row - target
        kept[i] = 1 - (1 - recipe.forgetting) * min(1.0, float(errors @ errors))
        gain = inverse @ row / (kept[i] / counts[i] + row @ inverse @ row)
        solution -= np.outer(errors, gain)
        inverse = (inverse - np.outer(gain, row @ inverse)) / kept[i]
        if recipe.forgetting < 1:
            inverse, reached = _bounded(inverse, recipe.most)
            bounded = bounded or reached
    return solution, kept, bounded


def _bounded(inverse: Array, most: float) -> tuple[Array, bool]:
    """U D U^T with D of at most `most`, by Cholesky from below; whether any was larger."""
    root = np.linalg.cholesky((inverse + inverse.T)[::-1, ::-1] / 2)[::-1, ::-1]
    diagonal = np.diag(root)
    if (diagonal**2 <= most * (1 + 1e-12)).all():
        return inverse, False
    root = root / diagonal
    return root * np.minimum(diagonal**2, most) @ root.T, True
