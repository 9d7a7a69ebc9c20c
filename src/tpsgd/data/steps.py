"""From a table of time steps to sequences."""

from pathlib import Path

import numpy as np

from tpsgd.data.rows import Array, Raw, encode
from tpsgd.data.sequences import padded
from tpsgd.errors import TpsgdError


def sequences(
    file: Path, x: Array, y: Array, which: Array, when: Array | None, counted: bool, note: str
) -> Raw:
    """One sequence for each name in `which`, its steps in the order of `when` or of the rows.

    Where `when` is `counted`, it goes up by one from step to step.
    """
    names, number = np.unique(which, return_inverse=True)
    order = np.lexsort((number,) if when is None else (when, number))
    x, y, number = x[order], y[order], number[order]
    lengths = np.bincount(number)
    first = np.cumsum(lengths) - lengths
    if (change := y != y[first][number]).any():
        raise TpsgdError(
            f"{file}: the label of the sequence '{names[number[change][0]]}' changes from"
            f" {y[first][number][change][0]} to {y[change][0]}; a sequence has one label."
        )
    if when is not None:
        _check_times(file, names[number], when[order], counted)
    real = np.arange(lengths.max()) < lengths[:, None]
    rows = np.zeros((*real.shape, x.shape[1]), np.float32)
    rows[real] = x
    classes, pair, _ = encode(str(file), (np.arange(len(rows)), y[first]), None)
    decode, spread = padded(rows, lengths)
    return Raw(classes, pair, None, decode, f"{note}, {spread or f'{lengths[0]} steps'}")


def _check_times(file: Path, names: Array, when: Array, counted: bool) -> None:
    """No two steps of a sequence at one time: their order would be a guess; none lost."""
    same = names[1:] == names[:-1]
    if (twice := same & (when[1:] == when[:-1])).any():
        i = int(twice.argmax())
        raise TpsgdError(
            f"{file}: the sequence '{names[i]}' has two steps at {when[i]:.12g}; drop one of them."
        )
    if counted and (gap := same & (when[1:] != when[:-1] + 1)).any():
        i = int(gap.argmax())
        raise TpsgdError(
            f"{file}: the sequence '{names[i]}' goes from step {when[i]:.12g} to"
            f" {when[i + 1]:.12g}; fill the gap in, or call the column time."
        )
