"""Arrays of unknown make, from a file or a function: checked, and images put in order."""

import numpy as np

from tpsgd.data.rows import Array, Pair, Raw, encode, numbers, pixels
from tpsgd.errors import TpsgdError

PART = 2**20  # bytes of x looked at together


def from_arrays(where: str, train: Pair, test: Pair | None) -> Raw:
    """Check the arrays and name their classes; bytes are taken for pixels, others as they are."""
    pairs = [checked(where, *pair) for pair in (train, test) if pair is not None]
    first, last = pairs[0][0], pairs[-1][0]
    of_bytes = first.dtype == np.uint8
    if first.shape[1:] != last.shape[1:] or of_bytes != (last.dtype == np.uint8):
        raise TpsgdError(
            f"{where}: x is {first.dtype} with samples of shape {first.shape[1:]}, but x_test"
            f" {last.dtype} of {last.shape[1:]}; make them alike."
        )
    decode, note = (pixels, "bytes divided by 255") if of_bytes else (numbers, "")
    if of_bytes and _nchw(first).shape != first.shape:
        pairs = [(_nchw(x), y) for x, y in pairs]
        note += ", axes put in the order channels, height, width"
    return Raw(*encode(where, pairs[0], pairs[1] if test else None), decode, note)


def checked(where: str, x: Array, y: Array) -> Pair:
    """Samples of finite numbers with one label each, or an error."""
    if x.dtype.kind not in "biuf" or x.ndim < 2:
        raise TpsgdError(
            f"{where}: x is {x.dtype} of shape {x.shape}; expected numbers of shape"
            " (samples, features), (samples, steps, features) or (samples, channels, height,"
            " width)."
        )
    y = y[:, 0] if y.ndim == 2 and y.shape[1] == 1 else y
    if y.ndim != 1:
        raise TpsgdError(
            f"{where}: y has the shape {y.shape}; expected one label a sample (one-hot rows:"
            " y.argmax(1))."
        )
    if len(x) != len(y):
        raise TpsgdError(f"{where}: x has {len(x)} samples but y has {len(y)} labels.")
    if x.size == 0:
        raise TpsgdError(f"{where}: x is empty, of shape {x.shape}.")
    if x.dtype.kind == "f":
        _check_finite(where, x)
    return x, y


def _check_finite(where: str, x: Array) -> None:
    """Part by part: x may be a file mapped into memory, and larger than that."""
    step = max(1, PART * len(x) // x.nbytes)
    for start in range(0, len(x), step):
        part = x[start : start + step]
        if not (finite := np.isfinite(part)).all():
            first, *rest = np.argwhere(~finite)[0].tolist()
            i = [start + first, *rest]
            raise TpsgdError(f"{where}: x{i} is {x[tuple(i)]}; fill it in or drop sample {i[0]}.")


def _nchw(x: Array) -> Array:
    """Grey images get their channel axis; channels at the end move to the front."""
    if x.ndim == 3:
        return x[:, None]
    at_end = x.ndim == 4 and x.shape[-1] in (1, 3, 4) and x.shape[1] not in (1, 3, 4)
    return np.moveaxis(x, -1, 1) if at_end else x
