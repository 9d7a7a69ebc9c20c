"""New samples for a trained model: read from the formats of `load`, with or without labels.

What the model's samples looked like (`Data.inputs`) decides how new ones are read: the columns of a
table, by name and in any order; the size of images; bytes or numbers; and how they were scaled.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tpsgd.common.errors import TpsgdError, suggestion
from tpsgd.common.files import call_function, is_function
from tpsgd.data import user_files
from tpsgd.data.arrays import RawArrays, check_arrays, label_values
from tpsgd.data.csv_files import read_columns
from tpsgd.data.dataset import BYTES, Array
from tpsgd.data.images import decode_images, new_images
from tpsgd.data.loading import load
from tpsgd.data.npz_files import read_arrays
from tpsgd.data.registry import DATASETS
from tpsgd.data.scaling import unrounded
from tpsgd.nets.padded import Padded
from tpsgd.saved.scaling import as_trained


class NewSamples(NamedTuple):
    """Samples, a name for each, and their class indices if they have labels.

    The `note` says why labels were ignored; it is empty if none were.
    """

    x: Tensor | Padded
    names: list[str]
    y: Tensor | None
    note: str = ""


class _Labelled(NamedTuple):
    x: Any
    names: list[str]
    labels: Array | None
    note: str = ""


def read_new(
    spec: str,
    *,
    inputs: Mapping[str, Any],
    classes: Sequence[str],
    seed: int = 0,
    needs_labels: bool = True,
) -> NewSamples:
    """Read samples for a model, as `load` would, all of them and without splitting.

    Args:
        spec: as for `load`. Of a built-in set, and of a file or folder with a test set, the test
            samples are read. Labels may be missing: an `.npz` file without y, a table without the
            label's column, a folder of images without subfolders.
        inputs: `Data.inputs` of the data set that the model was trained on.
        classes: the names of the model's classes.
        seed: the seed of `load` that split a built-in set without a test set.
        needs_labels: refuse labels that are blank or no classes of the model; otherwise all labels
            are then ignored, and the `note` says why.

    Examples:
        >>> digits = load("digits")
        >>> samples = read_new("digits", inputs=digits.inputs, classes=digits.classes)
        >>> samples.x.shape, samples.names[:2]
        (torch.Size([359, 1, 8, 8]), ['1', '2'])
    """
    _check_inputs(inputs)
    samples = _built_in(spec, seed) if spec in DATASETS else _own(spec, inputs, needs_labels)
    _check_shape(spec, samples.x, inputs)
    x = as_trained(samples.x, inputs)
    x = x if isinstance(x, Padded) else torch.as_tensor(x)
    y, note = None, samples.note
    try:
        y = None if samples.labels is None else _indices(spec, samples.labels, classes)
    except TpsgdError as error:
        if needs_labels:
            raise
        note = str(error)
    return NewSamples(x, samples.names, y, note)


def _check_inputs(inputs: Mapping[str, Any]) -> None:
    """Refuse values of another kind than `Data.inputs` has: they may come out of any file."""
    shape, columns = inputs.get("shape", []), inputs.get("columns", [])
    scaling, imputation = inputs.get("scaling", {}), inputs.get("imputation", {})
    fits = isinstance(shape, list) and all(isinstance(n, int) and n > 0 for n in shape)
    fits &= isinstance(columns, list) and all(isinstance(name, str) for name in columns)
    fits &= isinstance(inputs.get("label", ""), str) and isinstance(scaling, dict)
    values = imputation.get("values", []) if isinstance(imputation, dict) else None
    fits &= isinstance(values, list) and all(map(_is_finite, values))
    fits = fits and len(values or ()) == (len(columns) if imputation else 0)
    if not fits or ("shift" in scaling) != ("scale" in scaling):
        raise TpsgdError(
            "what the model was saved with as inputs does not say how samples look: save it with "
            "inputs=data.inputs"
        )


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _built_in(spec: str, seed: int) -> _Labelled:
    data = load(spec, seed=seed)
    x, y = data.test
    return _Labelled(x, _numbered(x), np.array(data.classes)[y.numpy()])


def _own(spec: str, inputs: Mapping[str, Any], needs_labels: bool) -> _Labelled:
    file = user_files.find(spec)
    if file is None:
        raise TpsgdError(
            f"there is no {spec!r}: give a file, a folder or {suggestion(spec, DATASETS)}"
        )
    if is_function(spec):
        return _of_function(spec, inputs)
    if file.path.is_dir():
        return _of_images(file.path, inputs)
    if file.path.suffix.lower() in (".csv", ".tsv"):
        return _of_table(file.path, inputs, needs_labels)
    return _of_arrays(file.path, inputs)


def _of_images(root: Path, inputs: Mapping[str, Any]) -> _Labelled:
    files, labels = new_images(root)
    shape = tuple(inputs.get("shape", ()))
    if len(shape) != 3 or shape[0] != 3:
        raise TpsgdError(
            f"the model takes samples of shape {shape}, not images in colour as {root}."
        )
    x = decode_images(np.array([str(file) for file in files], dtype=object), shape[1:])
    names = [str(file.relative_to(root)) for file in files]
    return _Labelled(torch.from_numpy(x), names, None if labels is None else np.array(labels))


def _of_table(file: Path, inputs: Mapping[str, Any], needs_labels: bool) -> _Labelled:
    if "columns" not in inputs:
        raise TpsgdError(f"the model was not trained on a table: it cannot read {file}.")
    columns, note, blanks = inputs["columns"], "", bool(inputs.get("imputation"))
    try:
        arrays, names, labelled = read_columns(file, columns, inputs.get("label"), blanks)
    except TpsgdError as error:
        if needs_labels:
            raise
        arrays, names, labelled = read_columns(
            file, columns, None, blanks
        )  # if that was the reason
        note = str(error)
    return _converted(str(file), arrays, names, labelled, False, inputs)._replace(note=note)


def _of_arrays(file: Path, inputs: Mapping[str, Any]) -> _Labelled:
    arrays, names = read_arrays(file)
    kind = "tokens" if "tokens" in arrays else "x"
    suffix = "_test" if f"{kind}_test" in arrays else ""
    if (x := arrays.get(kind + suffix)) is None:
        raise TpsgdError(f"{file} holds {', '.join(names) or 'nothing'}; expected x, or tokens.")
    y, lengths = (arrays.get(name + suffix) for name in ("y", "lengths"))
    labels = np.zeros(len(x) if x.ndim else 0) if y is None else y
    samples = RawArrays(x, labels, lengths)
    return _converted(str(file), samples, None, y is not None, kind == "tokens", inputs)


def _of_function(spec: str, inputs: Mapping[str, Any]) -> _Labelled:
    arrays = user_files.function_arrays(spec, call_function(spec))[-1]
    return _converted(spec, arrays, None, True, user_files.are_tokens(arrays), inputs)


def _converted(
    source: str,
    arrays: RawArrays,
    names: list[str] | None,
    labelled: bool,
    tokens: bool,
    inputs: Mapping[str, Any],
) -> _Labelled:
    """Arrays in the form of the samples that the model was trained on."""
    samples = check_arrays(source, [arrays], tokens)
    (x,), (y,) = samples.x, samples.y
    scaling = inputs.get("scaling") or {}
    if (samples.reading == BYTES) != (scaling.get("method") == "bytes"):
        trained, new = ("bytes", "numbers") if samples.reading != BYTES else ("numbers", "bytes")
        raise TpsgdError(
            f"{source}: the samples are {new}, but the model was trained on {trained}: convert "
            f"them as for training (bytes, uint8, are divided by 255)."
        )
    x = unrounded(samples.decode, inputs)(x)
    return _Labelled(x, names or _numbered(x), y if labelled else None)


def _numbered(x: Any) -> list[str]:
    return [str(number) for number in range(1, len(x) + 1)]


def _check_shape(spec: str, x: Any, inputs: Mapping[str, Any]) -> None:
    """Sequences may have another number of steps; everything else must agree."""
    trained, new = tuple(inputs.get("shape", ())), tuple(x.shape[1:])
    varies = len(trained) == 2 or "vocabulary" in inputs
    if trained and (len(new) != len(trained) or new[varies:] != trained[varies:]):
        raise TpsgdError(
            f"{spec} has samples of shape {new}, the model was trained on shape {trained}."
        )


def _indices(spec: str, labels: Array, classes: Sequence[str]) -> Tensor:
    """The number of each label's class."""
    names = label_values(spec, labels).astype(str)
    numbers = {name: number for number, name in enumerate(classes)}
    if unknown := sorted(set(names.tolist()) - numbers.keys()):
        raise TpsgdError(
            f"{spec} has the label '{unknown[0]}', which is not a class of the model: "
            f"{suggestion(unknown[0], classes)}"
        )
    return torch.tensor([numbers[name] for name in names.tolist()])
