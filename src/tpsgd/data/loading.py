"""`load`: from a name or a path to tensors, by reading, splitting, thinning out and converting."""

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tpsgd.common.errors import TpsgdError, shortened
from tpsgd.common.files import is_function
from tpsgd.data import mapped, user_files
from tpsgd.data.csv_files import Columns
from tpsgd.data.dataset import Data, RawData
from tpsgd.data.download import fetch
from tpsgd.data.registry import DATASETS, as_spec, find
from tpsgd.data.scaling import METHODS, NOTES, check_word, statistics, typical_values
from tpsgd.data.split import Subset, hold_out_test, how_chosen, stratified
from tpsgd.nets.padded import Padded
from tpsgd.saved.scaling import as_trained, filled

AT_A_TIME = 1 << 12  # samples whose statistics are added together


def load(
    spec: str | os.PathLike[str],
    *,
    seed: int = 0,
    max_train: int | None = None,
    on_disk: Path | str | None = None,
    scale: str | None = None,
    label: str | None = None,
    drop: str | Sequence[str] = (),
    impute: str | None = None,
    task: str | None = None,
) -> Data:
    """Load a built-in data set by name, or your own by path.

    Images have the shape (samples, channels, height, width), in [0, 1]; tables (samples,
    features); sequences (samples, steps, features); tokens are whole numbers (samples, steps).
    Sequences of different lengths are `Padded`. Labels are classes, of samples or, as whole numbers
    (samples, steps) or (samples, height, width), of steps or pixels; or numbers to predict.

    Args:
        spec: the name of a built-in set (`tpsgd data list` lists them), or one of

            - `FILE.npz`: arrays x and y, perhaps x_test and y_test. For padded sequences, an array
              lengths (and lengths_test) with their numbers of steps. For tokens, an array tokens
              (and tokens_test) in place of x.
            - `FILE.csv` or `FILE.tsv`: a header, and columns separated by commas, semicolons or
              tabs. The label is the column of `label`, else one called label, y, class or target,
              else the last one; where another column may be it too, as `activity` beside x, y and
              z, `label` must say which. With a column sequence, each row is a time step, ordered by
              a column time or step if there is one. Without commas between columns, numbers may
              have decimal commas.
            - `FILE.py:FUNCTION`: it returns (x, y) or ((x, y), (x_test, y_test)); x may be
              `Padded`.
            - `FOLDER` of images in subfolders named after their classes, or `FOLDER@64` to resize
              them; the subfolders may be in `train` and in `test` or `val`. Images are turned as
              their EXIF orientation says, and transparent parts become white. They have one
              channel if all of them are grey, else three; grey ones of 16 bits keep them. The seed
              shuffles their order: `x[:256]` has samples of all classes.

            A built-in set is looked for in `$TPSGD_DATA`, then in the cache (`$TPSGD_CACHE`), and
            is downloaded into the cache otherwise.
        seed: chooses the test samples of data without a test set, the samples of `max_train`, and
            the order of the images of a folder.
        max_train: use at most this number of training samples; the class shares are kept.
        on_disk: a folder for the decoded samples, for data that does not fit in memory. The samples
            are decoded a few MB at a time into `.npy` files in a subfolder, and mapped read-only
            (see `Data`), the same bit for bit. A later call uses these files again, unless an
            argument or the source files have changed; the result of a function is written on every
            call. You may delete old subfolders, and those that end in `.part`, which a killed
            process leaves. Images, mapped arrays of a function and uncompressed `.npz` files
            (`numpy.savez`) are never in memory as a whole; other formats are when they are first
            read. Sequences of different lengths are refused.
        scale: of each feature of a table or of series, with statistics of the training samples:
            "standard" (mean 0, deviation 1), "minmax" (0 to 1) or "none". Default: "standard" for
            `FILE.csv`, and "none" for everything else: arrays are taken as they are, except that
            bytes (uint8) are pixels and are divided by 255, as `fit` and `evaluate` do. The
            statistics are in `Data.inputs`, which `Run.save` stores with a model.
        label: the name of a table's label column; of several, with task="regression", a list or
            "price,area".
        drop: the names of a table's columns to leave out: `["id", "time"]`, or "id,time".
        impute: fill blank cells of a table by the "mean" or the "median" of their column in the
            training samples; "none", the default, refuses them. The values are in `Data.inputs`
            too, so that new samples are filled in the same way.
        task: "regression" for labels that are numbers to predict: y is float32, and `Data.targets`
            has the names of its columns. Default: "classification".

    Returns:
        The data; its `note` says how it was split and converted.

    Examples:
        >>> data = load("digits", max_train=200)
        >>> len(data.train[1]), len(data.test[1])
        (200, 359)
        >>> data.note.split("; ")[1]
        '200 of 1438 training samples, stratified, seed 0'
    """
    spec = as_spec(spec)
    for name, value, least in (("seed", seed, 0), ("max_train", max_train, 1)):
        fits = isinstance(value, int | np.integer) and least <= value < 2**63
        if not fits and (value is not None or name == "seed"):
            raise TpsgdError(
                f"{name} must be a whole number from {least} to 2^63 - 1, got {shortened(value)}."
            )
    if on_disk is not None and not isinstance(on_disk, str | Path):
        raise TpsgdError(f"on_disk must be a folder, got {on_disk!r}.")
    check_word("scale", scale, METHODS)
    columns = Columns.of(label, drop, impute, task)
    user_file = None if spec in DATASETS and not any(columns) else user_files.find(spec, columns)
    prepare = partial(_prepare, spec, user_file, seed, max_train, scale, columns.impute)
    if on_disk is None:
        raw, train, test, note = prepare()
        pairs = _tensors(raw, train), _tensors(raw, test)
        shape = tuple(pairs[0][0].shape[1:])
        return Data(spec, *pairs, raw.classes, shape, note, raw.vocabulary, raw.reading)
    choices = seed, max_train, scale, *([columns] if any(columns) else [])
    name = mapped.folder_name(spec, user_file and user_file.path, *choices)
    folder = Path(on_disk).expanduser() / name
    data = None if is_function(spec) else mapped.read(folder)
    if data is None:
        mapped.write(folder, spec, *prepare())
        data = mapped.read(folder)
    if data is None:
        raise TpsgdError(f"the files of {spec} in {folder} were changed just now; try again.")
    return data


def _prepare(
    spec: str,
    user_file: user_files.UserFile | None,
    seed: int,
    max_train: int | None,
    scale: str | None,
    impute: str | None,
) -> tuple[RawData, Subset, Subset, str]:
    """The data with scaling as its last step of decoding, the two splits, and the note on both."""
    raw = find(spec).read(fetch(spec), find(spec)) if user_file is None else user_file.read()
    notes, train = [raw.note], Subset(*raw.train)
    if raw.test is None:
        mask, note = hold_out_test(train.y, seed, spec)
        train, test = train.keep(mask), train.keep(~mask)
        notes.append(note)
    else:
        test = Subset(*raw.test)
    if max_train is not None and max_train < len(train.y):
        chosen = how_chosen(train.y, seed)
        notes.append(f"{max_train} of {len(train.y)} training samples, {chosen}")
        train = train.keep(stratified(train.y, max_train, seed))
    if user_file is not None and os.path.isdir(user_file.path):  # its files come class by class
        train, test = train.shuffled(seed), test.shuffled(seed)
    decode, steps = raw.decode_exactly, dict[str, Any]()
    if impute:
        pieces, columns = map(decode, train.pieces(AT_A_TIME)), raw.reading["columns"]
        steps["imputation"] = typical_values(impute, pieces, columns)
        notes.append(f"blank cells filled with the {impute} of the training samples")
    method = scale or raw.scale
    if method not in (None, "none"):
        _check_scalable(spec, raw, train)
        imputation = steps.get("imputation", {})
        pieces = (filled(decode(x), imputation) for x in train.pieces(AT_A_TIME))
        steps["scaling"] = statistics(method, pieces)
    if method is not None and (method != "none" or raw.scale is not None):
        notes.append(NOTES[method])
    if steps:
        reading = raw.reading | steps
        raw = replace(raw, decode=lambda x: as_trained(decode(x), steps), reading=reading)
    return raw, train, test, "; ".join(filter(None, notes))


def _check_scalable(spec: str, raw: RawData, train: Subset) -> None:
    """Refuse to scale samples that are no table and no series of numbers."""
    shape = tuple(raw.decode(train.take(slice(1))).shape[1:])
    kind = "" if len(shape) in (1, 2) else f"samples of shape {shape}"
    kind = "tokens" if raw.vocabulary is not None else kind
    kind = "bytes, which are divided by 255" if "scaling" in raw.reading else kind
    if kind:
        raise TpsgdError(f"{spec} has {kind}; only tables and series of numbers can be scaled.")


def _tensors(raw: RawData, samples: Subset) -> tuple[Tensor | Padded, Tensor]:
    if getattr(samples.x, "dtype", None) == np.float64:  # rounded piece by piece: half the memory
        x = np.empty((len(samples.y), *raw.decode(samples.take(slice(1))).shape[1:]), np.float32)
        for i, piece in enumerate(samples.pieces(AT_A_TIME)):
            x[i * AT_A_TIME : (i + 1) * AT_A_TIME] = raw.decode(piece)
    else:
        x = raw.decode(samples.take(slice(None)))
    y = torch.from_numpy(samples.labels)
    return x if isinstance(x, Padded) else torch.from_numpy(x), y
