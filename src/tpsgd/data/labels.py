"""Labels of a user: names of classes, which are numbered from 0, or numbers to predict.

A class may belong to a sample, y of shape (samples,), or to each of its steps or pixels, whole
numbers (samples, steps) or (samples, height, width); `IGNORED` is no label.
"""

import warnings
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tpsgd.common.errors import TpsgdError, suggestion
from tpsgd.data.dataset import Array, RawData

TASKS = ("classification", "regression")
IGNORED = -100  # in place of the class of a step or a pixel, as in `losses`
MOST_SINGLE_CLASSES = 20  # up to this number, most samples may be the only one of their class
FEW = 10  # samples of a class; numbers with gaps and fewer samples look like numbers to predict
LARGEST = float(np.finfo(np.float32).max)
LAST_LETTER, SURROGATES = 0x10FFFF, 0xD800 >> 11  # in Unicode
AS_NUMBERS = "say task='regression' (--task regression)"


def encode(source: str, raw: RawData) -> RawData:
    """Name the classes of the training set, and number them from 0 in sorted order.

    Those of steps or pixels are counted over all labels, those of the test set too.

    Examples:
        >>> from tpsgd.data.dataset import numbers
        >>> x, y = np.zeros((3, 2)), np.array(["dog", "cat", "dog"])
        >>> pets = encode("pets.csv", RawData((), (x, y), None, numbers, ""))
        >>> pets.classes, pets.train[1]
        (('cat', 'dog'), array([1, 0, 1]))
    """
    y, y_test = (label_values(source, pair[1]) for pair in (raw.train, raw.test or raw.train))
    if "U" in y.dtype.kind + y_test.dtype.kind:
        y, y_test = y.astype(str), y_test.astype(str)
    values = np.unique(y)
    if y.ndim > 1:
        values = np.union1d(values, y_test)
        values = values[values != IGNORED]
    if len(values) < 2:
        label = values[0] if len(values) else IGNORED
        raise TpsgdError(f"{source}: every label is {label}; at least two classes are needed.")
    if len(values) > max(MOST_SINGLE_CLASSES, y.size / 2):
        advice = f"; to predict numbers, {AS_NUMBERS}" if values.dtype.kind in "iu" else ""
        raise TpsgdError(
            f"{source}: {y.size:,} labels have {len(values):,} different values, the first is"
            f" {y.flat[0]}; a label must be the class of its sample, and classes need several"
            f" samples{advice}."
        )
    index, index_test = (_numbers_of(values, labels) for labels in (y, y_test))
    if (unknown := index_test < 0).any() and y.ndim == 1:
        raise TpsgdError(
            f"{source}: no training sample of the test set's class {y_test[unknown][0]}."
        )
    train, test = (raw.train[0], index), raw.test and (raw.test[0], index_test)
    classes = tuple(map(str, values))
    for name in classes:
        if any(
            0xD800 <= ord(letter) <= 0xDFFF for letter in name
        ):  # of files whose names are bytes
            raise TpsgdError(f"{source}: the name of the class '{name}' is no text; change it.")
    return replace(raw, classes=classes, train=train, test=test)


def _numbers_of(values: Array, labels: Array) -> Array:
    """The number of each label among sorted values, `IGNORED` for others."""
    index = np.searchsorted(values, labels).clip(max=len(values) - 1)
    return np.where(values[index] == labels, index, IGNORED)


def warn_of_numbers(source: str, raw: RawData) -> None:
    """Warn of many whole numbers, with gaps, that are taken as classes of a few samples each."""
    y, count = raw.train[1], len(raw.classes)
    try:
        values = list(map(float, raw.classes))  # also of text such as 151.0
    except ValueError:
        return
    many = y.ndim == 1 and count > max(MOST_SINGLE_CLASSES, len(y) / FEW)
    if many and max(values) - min(values) >= count:
        warnings.warn(
            f"{source}: {len(y):,} labels have {count:,} different numbers, which are taken as "
            f"classes; to predict numbers, {AS_NUMBERS}",
            stacklevel=2,
        )


def numbered(source: str, raw: RawData, columns: Sequence[str] = ()) -> RawData:
    """Labels that are numbers to predict, as float32, with the names of their columns."""
    pairs = [raw.train, *([raw.test] if raw.test else [])]
    (x, y), *test = [(x, real_numbers(source, y)) for x, y in pairs]
    names = list(columns) or ["y"]
    constant = np.array([y.min() == y.max()])
    if y.ndim == 2 and columns:
        constant = y.min(0) == y.max(0)
    elif y.ndim == 2:
        names = [f"y{i}" for i in range(1, y.shape[1] + 1)]
    if constant.any():
        i = int(constant.argmax())
        name, value = (names[i], y.flat[i]) if columns else ("y", y.flat[0])
        raise TpsgdError(
            f"{source}: the label '{name}' is {value:g} in every sample, and there is nothing to "
            "learn; name another column, label=... (--label)."
        )
    reading = raw.reading | {"targets": names}
    return replace(raw, train=(x, y), test=next(iter(test), None), reading=reading)


def real_numbers(source: str, y: Array) -> Array:
    """Labels as float32; an error names the first one that is no finite number."""
    try:
        real = y.astype(np.float64)
    except (TypeError, ValueError) as error:
        raise TpsgdError(
            f"{source}: the label {y.flat[0]} is no number; classes are predicted without "
            "task='regression' (--task regression)."
        ) from error
    if not (fits := np.abs(real) <= LARGEST).all():
        i = np.argwhere(~fits)[0].tolist()
        raise TpsgdError(
            f"{source}: the label y{i} is {real[tuple(i)]}; replace it by a number or drop sample "
            f"{i[0]}."
        )
    return real.astype(np.float32)


def label_values(source: str, y: Array) -> Array:
    """Labels as whole numbers if they are whole numbers, else as text."""
    if y.dtype.kind in "biu":
        return y
    try:
        real = y.astype(np.float64)
    except (TypeError, ValueError):
        return y.astype(str)
    if (fraction := ~np.isfinite(real) | (real != np.floor(real))).any():
        advice = f"; to predict numbers, {AS_NUMBERS}" if np.isfinite(real[fraction][0]) else ""
        raise TpsgdError(
            f"{source}: the label {y[fraction][0]} is not a whole number or a name{advice}."
        )
    if np.abs(real).max(initial=0) >= 2**63:
        if y.dtype.kind == "f":
            raise TpsgdError(
                f"{source}: the label {real.flat[np.abs(real).argmax()]} is too large."
            )
        return y.astype(str)
    whole = real.astype(np.int64)
    return whole if y.dtype.kind == "f" or (whole.astype(str) == y).all() else y.astype(str)


def class_numbers(source: str, y: Array, classes: Sequence[str]) -> Array:
    """The number of each label's class among those of a model."""
    values, index = np.unique(label_values(source, y), return_inverse=True)
    numbers = {name: number for number, name in enumerate(classes)}
    numbers |= {str(IGNORED): IGNORED} if y.ndim > 1 else {}
    if unknown := sorted(set(values.astype(str).tolist()) - numbers.keys()):
        raise TpsgdError(
            f"{source} has the label '{unknown[0]}', which is not a class of the model: "
            f"{suggestion(unknown[0], classes)}"
        )
    return np.array([numbers[name] for name in values.astype(str).tolist()])[index].reshape(y.shape)


def checked(source: str, x: Array, y: Array, are_tokens: bool, numbers: bool) -> Array:
    """A label for each sample, step or pixel, or several numbers; or an error."""
    y = y[:, 0] if y.ndim == 2 and y.shape[1] == 1 else y
    if y.dtype.kind not in "biufSUOMm":
        raise TpsgdError(f"{source}: y is {y.dtype}; expected whole numbers or names.")
    if y.dtype.kind == "S":
        try:
            y = np.char.decode(y, "utf-8")
        except UnicodeDecodeError as error:
            raise TpsgdError(
                f"{source}: the label {error.object!r} is no UTF-8 text; save labels as text (str)."
            ) from error
    fits = y.ndim == 1 or (0 not in y.shape[1:] and (numbers or _of_positions(x, y, are_tokens)))
    if y.shape[:1] != x.shape[:1] or not fits:
        advice = f"; for numbers, {AS_NUMBERS}" if y.dtype.kind == "f" and not numbers else ""
        raise TpsgdError(
            f"{source}: y has the shape {y.shape}; expected one label for each of the {len(x)}"
            f" samples (for one-hot rows, give y.argmax(1){advice})."
        )
    if y.dtype.kind == "U":  # a damaged file may have numbers in it that are no letters
        code = np.ascontiguousarray(y).view(np.dtype(np.uint32).newbyteorder(y.dtype.byteorder))
        if (code > LAST_LETTER).any() or ((code >> 11) == SURROGATES).any():
            raise TpsgdError(f"{source}: the labels are no text; save them again.")
    return y


def _of_positions(x: Array, y: Array, are_tokens: bool) -> bool:
    """Whether whole numbers are classes of steps or pixels; one-hot rows are not."""
    if y.dtype.kind not in "biu" or y.ndim > x.ndim or not (are_tokens or x.ndim > 2):
        return False
    one_hot = y.ndim == 2 and bool(((y == 0) | (y == 1)).all() and (y.sum(1) == 1).all())
    return not one_hot or y.shape[1] in x.shape[1:]
