"""Checks of x and y, which users may give in many forms."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from tpsgd.common.errors import TpsgdError, shortened
from tpsgd.engine.sources.batches import BatchForm
from tpsgd.losses import IGNORED, Loss, bce, cross_entropy
from tpsgd.nets.model_inputs import ModelInputs
from tpsgd.nets.padded import Padded
from tpsgd.targets import CLASSES, Target, are_probabilities

NO_LABEL = f"no position has a label: all are {IGNORED}"
LABELS = ("labels", "label", "targets", "target", "y")  # in a batch that is a dict
PART = 256 * 2**10  # bytes of x that are checked in one call
VOID = 255  # what data sets of pictures have for pixels without a class
FEW_OPERATIONS = (torch.uint16, torch.uint32, torch.uint64)  # types that torch hardly supports


def pair(data: Any) -> Sequence[Any]:
    """The x and y of arrays or of a batch; of a dict, y is what it calls labels."""
    if isinstance(data, Sequence) and len(data) == 2:
        return data
    if isinstance(data, Mapping) and (names := [n for n in LABELS if n in data]):
        return {name: x for name, x in data.items() if name != names[0]}, data[names[0]]
    raise TpsgdError(
        f"data must be (x, y), a Dataset or a DataLoader of such pairs, got {type(data).__name__}"
        + (f" of {len(data)}" if isinstance(data, Sequence) else "")
    )


def inputs(values: Any) -> Tensor | Padded | ModelInputs:
    """Samples: numbers in an array, sequences of different lengths, or several arrays."""
    if isinstance(values, Padded):
        return values.checked().with_finite_padding()
    if isinstance(values, ModelInputs):
        return values
    several = isinstance(values, tuple) and not isinstance(values, PackedSequence)
    if several or isinstance(values, Mapping):
        named = isinstance(values, Mapping)
        pairs: Any = values.items() if named else enumerate(values)
        tensors = {name: tensor(value, f"x[{name!r}]") for name, value in pairs}
        return ModelInputs.of(tensors if named else list(tensors.values()))
    ragged = isinstance(values, list) and len({len(v) for v in values if hasattr(v, "__len__")}) > 1
    if ragged or isinstance(values, PackedSequence):
        return Padded.of(values)
    return tensor(values, "x")


def tensor(values: Any, name: str) -> Tensor:
    """Numbers as a tensor that shares their memory, which may be a read-only file.

    Nothing may write into it; batches are gathered from it, that is, copied.
    """
    numbers = values.detach() if isinstance(values, Tensor) else _from_numpy(values, name)
    problem = ""
    if numbers.layout is not torch.strided:
        problem = f"is sparse: give {name}.to_dense()"
    elif numbers.is_complex():
        problem = (
            "is complex: give its real and imaginary parts as features, for example "
            f"torch.view_as_real({name}).flatten(1)"
        )
    elif numbers.is_meta:
        problem = "is on the meta device, where tensors have no numbers"
    elif not numbers.dim():
        problem = "must have samples as its first dimension, got a single number"
    if problem:
        raise TpsgdError(f"{name} {problem}")
    return numbers.long() if numbers.dtype in FEW_OPERATIONS else numbers


def _from_numpy(values: Any, name: str) -> Tensor:
    if hasattr(values, "toarray"):  # a matrix of scipy
        raise TpsgdError(f"{name} is sparse: give {name}.toarray()")
    try:
        array = np.asarray(values)
    except ValueError:
        raise TpsgdError(
            f"{name} has samples of different shapes; only sequences (steps, ...) may differ, in "
            "the number of steps"
        ) from None
    if array.dtype.kind not in "biuf":
        text = next((v for v in array.flat if isinstance(v, str)), None)
        if name != "y" or text is None:
            raise TpsgdError(f"{name} must be numbers, got an array of {array.dtype}")
        raise TpsgdError(
            f"y must be numbers, got names such as {shortened(text)!r}: number the classes from 0, "
            "as numpy.unique(y, return_inverse=True)[1] does; tpsgd.data.load, TPSGDClassifier and "
            "Stream(classes=[...]) take names"
        )
    if any(s < 0 for s in array.strides):
        array = array.copy()
    if array.flags.writeable:
        return torch.from_numpy(array)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)
        return torch.from_numpy(array)


def check_values(
    x: Tensor | Padded | ModelInputs,
    form: BatchForm,
    name: Callable[[int], str] = "sample {}".format,
) -> None:
    """Refuse NaN and infinity, and tokens outside the vocabulary.

    `name` is what a sample is called by its place in x.
    """
    if isinstance(x, ModelInputs):
        for t in x.tensors.values():
            check_finite(t, name)
        return
    x = x.data if isinstance(x, Padded) else x
    check_finite(x, name)
    if form.tokens > 1 and form.looks_up(x) and x.numel():
        low, high = int(x.min()), int(x.max())
        if low < 0 or high >= form.tokens:
            raise TpsgdError(
                f"token {low if low < 0 else high} is out of range: the first layer has "
                f"{form.tokens} inputs, so tokens go from 0 to {form.tokens - 1}"
            )


def check_finite(x: Tensor, name: Callable[[int], str] = "sample {}".format) -> None:
    """Refuse NaN and infinity, part by part: a file that is mapped need not fit into memory.

    The smallest and the largest number of a part are enough (NaN is both).
    """
    if not x.is_floating_point() or not x.numel():
        return
    nbytes = PART if x.device.type == "cpu" else 64 * PART  # a GPU is waited for after each part
    step = max(1, nbytes * len(x) // x.nbytes)
    for start, samples in zip(range(0, len(x), step), x.split(step), strict=True):
        if not torch.isfinite(torch.stack(samples.aminmax())).all():
            finite = torch.isfinite(samples).reshape(len(samples), -1).all(1)
            first = start + int((~finite).nonzero()[0])
            raise TpsgdError(f"x contains NaN or infinity (first in {name(first)})")


def labels(
    y: Tensor,
    loss: Loss | None,
    classes: int | None,
    complete: bool = True,
    target: Target = CLASSES,
) -> Tensor:
    """Labels as indices `(n,)` or float rows `(n, classes)`, or an error that says why not.

    Indices stay in their integer type (booleans become bytes): nothing is copied. `complete`:
    these are all labels, so a class without any gives a warning. With positions, the steps or
    pixels that have a label each come after the samples.
    """
    if target.numbers or target.positions:
        y = _placed(y, target)
        if target.numbers and y.shape[-1] != classes:
            numbers, outputs = y.shape[-1], f"{classes} output{'s' * (classes != 1)}"
            each = "position" if target.positions else "sample"
            raise TpsgdError(
                f"the model has {outputs}, and y has {numbers} number{'s' * (numbers != 1)} for "
                f"each {each}: to learn numbers, give the model {numbers} output"
                f"{'s' * (numbers != 1)}; class labels must be whole numbers (an integer type)"
            )
        if target.positions and not y.is_floating_point():
            return _of_positions(y, classes, complete and loss is not None)
        if target.positions:
            of_rows = replace(target, shape=tuple(y.shape[-1:]), positions=())
            return labels(y.flatten(0, -2), loss, classes, False, of_rows).view(y.shape)
    if classes == 1 and loss is bce:  # one yes-or-no output
        if y.numel() != len(y):
            raise TpsgdError(
                "one yes-or-no output needs one label per sample, shape (samples,), got "
                f"{tuple(y.shape)}"
            )
        y = y.reshape(-1, 1).float()
    if not y.is_floating_point():
        return _indices(y, classes, complete and loss is not None)
    if y.dim() != 2 or (classes is not None and y.shape[1] != classes):
        advice = " for yes and no choose loss='bce', for numbers loss='mse';" * (y.dim() == 1)
        raise TpsgdError(
            f"float labels must be rows of shape (samples, {classes or 'classes'}), got "
            f"{tuple(y.shape)};{advice} class labels must be whole numbers (an integer type)"
        )
    if not torch.isfinite(y).all():
        raise TpsgdError("the labels contain NaN or infinity")
    of_numbers = loss is not None and loss.of_numbers
    if of_numbers and not (target.rows or target.numbers) and not are_probabilities(y):
        raise TpsgdError("these labels are numbers, and those to learn from are classes")
    if loss in (bce, cross_entropy) and ((y < 0).any() or (y > 1).any()):
        raise TpsgdError(
            f"float labels for {loss.name} must lie between 0 and 1; for targets of any size use "  # type: ignore
            "loss='mse'"
        )
    if complete and loss is not None and not loss.of_numbers:
        _warn_missing(y.sum(0) == 0)
    if loss is cross_entropy and not are_probabilities(y):
        raise TpsgdError(
            "soft labels for cross_entropy must sum to 1 in each row; for several classes per "
            "sample use loss=tpsgd.bce, for numbers loss='mse'"
        )
    return y


def _placed(y: Tensor, target: Target) -> Tensor:
    """Labels with their positions after the samples."""
    if y.dim() < 1 + len(target.positions) or tuple(y.shape[1:]) != target.shape != ():
        squeezed = tuple(n for n in y.shape[1:] if n > 1)
        if target.rows or squeezed != target.shape:
            raise TpsgdError(
                f"y must have the shape (samples, {', '.join(map(str, target.shape))}), got "
                f"{tuple(y.shape)}"
            )
    return target.canonical(y)


def _of_positions(y: Tensor, classes: int | None, complete: bool) -> Tensor:
    """Class indices of every position; `IGNORED` where there is none."""
    known = y[y != IGNORED]
    if known.numel():  # a batch may have none
        _indices(known, classes, complete)
    return y.view(torch.uint8) if y.dtype is torch.bool else y


def _indices(y: Tensor, classes: int | None, complete: bool) -> Tensor:
    if y.dim() == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.dim() != 1:
        raise TpsgdError(
            f"class labels must have shape (samples,), got {tuple(y.shape)}; "
            "rows of several labels must be floats, with loss=tpsgd.bce; for a label for each step "
            "the model must give (batch, steps, classes), from all states of a recurrent layer"
        )
    y = y.view(torch.uint8) if y.dtype is torch.bool else y
    low, high = int(y.min()), int(y.max())
    if low < 0 or (classes is not None and high >= classes):
        label, reason = low if low < 0 else high, _out_of_range(y, low, high, classes)
        raise TpsgdError(f"label {label} is out of range: {reason}")
    if complete and classes is not None:
        _warn_missing(torch.bincount(y, minlength=classes) == 0, high)
    return y


def _out_of_range(y: Tensor, low: int, high: int, classes: int | None) -> str:
    """The labels that are possible, and what to do about the others."""
    if classes is None:
        return "classes are counted from 0"
    if classes == 1:
        return (
            "the model's last block has 1 output, which tells no classes apart: give it an output "
            "for each class, use loss=tpsgd.bce for one yes-or-no output, or give numbers that are "
            "no classes as y.float()"
        )
    advice = f"; give it {high + 1} outputs" if low >= 0 else ""
    if high == VOID:
        advice += f", or let what has no class have {IGNORED} in place of {VOID}"
    if low > 0 and high - low < classes:
        advice += f", or count classes from 0: y - {low}"
    elif low >= 0 and len(torch.unique(y)) <= classes:
        advice += ", or number the classes from 0: np.unique(y, return_inverse=True)[1]"
    outputs = f"the model's last block has {classes} outputs"
    return f"{outputs}, so labels go from 0 to {classes - 1}{advice}"


def _warn_missing(absent: Tensor, largest: int | None = None) -> None:
    if missing := absent.nonzero().flatten().tolist():
        shown = ", ".join(map(str, missing[:5])) + (" ..." if len(missing) > 5 else "")
        cause = ""
        if largest is not None and missing[0] == largest + 1:
            cause = f"; labels end at {largest}, so {largest + 1} outputs are enough"
        warnings.warn(
            f"{len(missing)} of {len(absent)} classes have no samples: {shown}{cause}", stacklevel=2
        )
