"""New samples for a trained model: read from the formats of `load`, with or without labels.

What the model's samples looked like (`Data.inputs`) decides how new ones are read: the columns of a
table, by name and in any order; the size of images; bytes or numbers; and how they were scaled.
"""

import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tpsgd.common.errors import TpsgdError, suggestion
from tpsgd.common.files import is_function
from tpsgd.data import user_files
from tpsgd.data.arrays import RawArrays, check_arrays
from tpsgd.data.csv_files import Columns, label_names, read_table
from tpsgd.data.dataset import BYTES, RawData, converted, numbers
from tpsgd.data.images import decode_images, new_images
from tpsgd.data.labels import class_numbers, real_numbers
from tpsgd.data.loading import load
from tpsgd.data.npz_files import read_npz
from tpsgd.data.registry import DATASETS, as_spec
from tpsgd.nets.padded import Padded
from tpsgd.saved.scaling import as_trained


class NewSamples(NamedTuple):
    """Samples, a name for each, and their class indices, or numbers, if they have labels.

    The `note` says why labels were ignored; it is empty if none were.
    """

    x: Tensor | Padded
    names: list[str]
    y: Tensor | None
    note: str = ""


def read_new(
    spec: str | os.PathLike[str],
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
    spec = as_spec(spec)
    _check_inputs(inputs)
    if spec in DATASETS:
        data = load(spec, seed=seed)
        labels = np.array(data.classes)[data.test[1].numpy()]
        raw, names, note = RawData((), (data.test[0], labels), None, converted, ""), None, ""
    else:
        raw, names, note = _read_user_file(spec, inputs, needs_labels)
    x, labels = raw.decode_exactly(raw.train[0]), raw.train[1]
    trained, new = tuple(inputs.get("shape", ())), tuple(x.shape[1:])
    varies = len(trained) == 2 or "vocabulary" in inputs  # the number of steps
    if trained and (len(new) != len(trained) or new[varies:] != trained[varies:]):
        raise TpsgdError(
            f"{spec} has samples of shape {new}, the model was trained on shape {trained}."
        )
    x = as_trained(x, inputs)
    x = numbers(x) if raw.decode is numbers else x
    y = None
    try:
        if labels is not None and "targets" in inputs:
            y = torch.from_numpy(real_numbers(spec, labels))
        elif labels is not None:
            y = torch.from_numpy(class_numbers(spec, labels, classes))
    except TpsgdError as error:
        if needs_labels:
            raise
        note = str(error)
    names = names or [str(number) for number in range(1, len(x) + 1)]
    return NewSamples(x if isinstance(x, Padded) else torch.as_tensor(x), names, y, note)


def _check_inputs(inputs: Mapping[str, Any]) -> None:
    """Refuse values of another kind than `Data.inputs` has: they may come out of any file."""
    shape, columns = inputs.get("shape", []), inputs.get("columns", [])
    scaling, imputation = inputs.get("scaling", {}), inputs.get("imputation", {})
    try:
        values = np.array(imputation.get("values", []), np.float64)
        fits = all(n > 0 for n in shape) and all(isinstance(name, str) for name in columns)
        names = [*label_names(inputs.get("label")), *inputs.get("targets", [])]
        fits &= all(isinstance(name, str) for name in names)
        fits &= ("shift" in scaling) == ("scale" in scaling) and isinstance(scaling, dict)
        fits &= values.shape == (len(columns) if imputation else 0,)
        each = [values, *(np.array(scaling.get(key, []), np.float64) for key in ("shift", "scale"))]
        fits &= all(bool(np.isfinite(statistics).all()) for statistics in each)
    except (AttributeError, OverflowError, TypeError, ValueError):
        fits = False
    if not fits:
        raise TpsgdError(
            "what the model was saved with as inputs does not say how samples look: save it with "
            "inputs=data.inputs"
        )


def _read_user_file(
    spec: str, inputs: Mapping[str, Any], needs_labels: bool
) -> tuple[RawData, list[str] | None, str]:
    """The samples as they are stored, their names, and why labels of a table were ignored."""
    if (file := user_files.find(spec)) is None:
        raise TpsgdError(
            f"there is no {spec!r}: give a file, a folder or {suggestion(spec, DATASETS)}"
        )
    note, suffix = "", file.path.suffix.lower()
    if is_function(spec):
        arrays = user_files.read_function(spec)[-1]
    elif suffix in user_files.TABLES:
        arrays, note = _read_table(file.path, inputs, needs_labels)
    elif suffix == ".npz":
        arrays = read_npz(file.path, labelled=False)[-1]
    else:
        return *_read_images(file.path, inputs), ""
    raw = check_arrays(spec, [arrays], "targets" in inputs)
    if (raw.reading == BYTES) != (inputs.get("scaling", {}).get("method") == "bytes"):
        trained, new = ("numbers", "bytes") if raw.reading == BYTES else ("bytes", "numbers")
        raise TpsgdError(
            f"{spec}: the samples are {new}, but the model was trained on {trained}: convert "
            f"them as for training (bytes, uint8, are divided by 255)."
        )
    return raw, arrays.names, note


def _read_table(file: Path, inputs: Mapping[str, Any], needs_labels: bool) -> tuple[RawArrays, str]:
    if not inputs.get("columns"):
        raise TpsgdError(f"the model was not trained on a table: it cannot read {file}.")
    impute = "values" if inputs.get("imputation") else None
    features = tuple(inputs["columns"])
    columns = Columns(label_names(inputs.get("label")), (), impute, features, "targets" in inputs)
    try:
        return read_table(file, columns)[0], ""
    except TpsgdError as error:
        if needs_labels:
            raise
        return read_table(file, columns._replace(label=()))[0], str(error)


def _read_images(root: Path, inputs: Mapping[str, Any]) -> tuple[RawData, list[str]]:
    """Images with the channels and the size of those that the model was trained on."""
    files, labels = new_images(root)
    shape = tuple(inputs.get("shape", ()))
    if len(shape) != 3 or shape[0] not in (1, 3):
        raise TpsgdError(f"the model takes samples of shape {shape}, not images as {root}.")
    raw = RawData((), (files, labels), None, partial(decode_images, shape=shape), "")
    names = (os.fsencode(file.relative_to(root)) for file in files)  # perhaps not in UTF-8
    return raw, [name.decode(errors="replace") for name in names]
