"""`export.one_pass`: a head that learns from each sample once, as C files in a folder."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from tpsgd.common.errors import TpsgdError
from tpsgd.common.files import write_together
from tpsgd.common.output import check_new, output_folder
from tpsgd.common.units import as_bytes
from tpsgd_export.exported import Exported
from tpsgd_export.heads import reference
from tpsgd_export.heads.compiled import CompiledHead
from tpsgd_export.heads.recipe import HeadRecipe, most_features, unit_scale
from tpsgd_export.heads.source import Encoder, encoded, memory_of, read_encoder, sources
from tpsgd_export.inputs import read_inputs
from tpsgd_export.read_model import as_samples, check_shape
from tpsgd_export.to_c.check import NOT_RUN
from tpsgd_export.to_c.compiled import compiler
from tpsgd_export.to_c.memory import FLOAT

FEATURES = 128
TRIAL = 200  # random samples that the check learns
APART = 1e-3  # of the largest weight: a distance from float64 that is rounding


def one_pass(
    folder: str | Path,
    *,
    shape: Sequence[int],
    classes: int | Sequence[str],
    model: nn.Module | None = None,
    features: int | None = None,
    ram: str | int | None = None,
    ridge: float = 1.0,
    forgetting: float = 1.0,
    spare: int = 0,
    samples: Any = None,
    inputs: Mapping[str, Any] | None = None,
    seed: int = 0,
    name: str = "head",
    overwrite: bool = False,
) -> Exported:
    """Write a head as C99 that learns from each sample once: random features and least squares.

    The folder gets `head.h`, which explains what can be called, and `head.c`; with a model also the
    files of the encoder. Before they are written they are compiled and compared with ridge
    regression in float64, if there is a C compiler.

    Args:
        folder: where the files go.
        shape: of one sample.
        classes: how many there are, or their names, `data.classes`, for `head_class_names`.
        model: a frozen encoder, without its last layer; without it the head reads the samples.
        features: random features, whose projection is computed again from a hash; 0: none, the
            head reads the numbers themselves. RAM grows with their square. Default: 128, or as
            many as fit into `ram`.
        ram: a budget such as "40KB".
        ridge: the penalty on the squares of the weights, for features of about unit size.
        forgetting: what older samples count after a sample whose scores are all wrong: 0.999 for
            what changes over some 1,000 samples. A sample whose scores are right makes the head
            forget nothing, so that samples of one class alone do not drive out the others.
        spare: classes that may come later.
        samples: inputs whose size sets the scale of the features; without them it is that of
            standardised inputs.
        inputs: `data.inputs`: the header names the columns, and if they were scaled, `head_scale`
            does the same on the device.
        seed: of the projection.
        name: what the files and all names in them begin with, those of the encoder with
            `head_net`.
        overwrite: replace an earlier export.

    Examples:
        >>> import tempfile
        >>> exported = one_pass(tempfile.mkdtemp(), shape=(64,), classes=10, ram="12KB")
        >>> exported.memory.ram_bytes <= 12 * 1024
        True
    """
    shape = check_shape(shape)
    if not isinstance(classes, (int, Sequence)) or isinstance(classes, str):
        raise TpsgdError(f"classes must be how many there are, or their names, got {classes!r}")
    names = () if isinstance(classes, int) else tuple(map(str, classes))
    encoder = None if model is None else read_encoder(model, shape)
    count: Any = classes if isinstance(classes, int) else len(names)
    read = encoder.outputs if encoder else prod(shape)
    units = _features(features, ram, count, spare, encoder)
    recipe = HeadRecipe(
        read, units, count, spare, ridge, forgetting,
        scale=_scale(read, units, model, shape, samples), seed=seed, name=name,
    )  # fmt: skip
    memory = memory_of(recipe, encoder)
    if ram is not None and memory.ram_bytes > as_bytes(ram):
        raise TpsgdError(
            f"a head of {recipe.features} features needs {memory.ram_bytes:,} B of RAM, and "
            f"ram={ram} is {as_bytes(ram):,} B: leave features= out, and as many as fit are taken"
        )
    form: Any = SimpleNamespace(shape=shape, targets=None, classes=count)
    meaning = read_inputs(inputs, names, form)
    meaning.warn_of_lost_digits(f"{name}_scale")
    if meaning.shift:
        tables = {"shift and scale of the inputs": 2 * FLOAT * len(meaning.shift)}
        memory = replace(memory, flash=memory.flash | tables)
    texts = sources(recipe, encoder, meaning)
    check_new(Path(folder), overwrite, *texts)
    checked = check(recipe, texts, model, shape)
    with output_folder(Path(folder), tuple(texts), overwrite) as path:
        paths = write_together({path / file: text.encode() for file, text in texts.items()})
    return Exported(paths, checked, memory=memory, note=meaning.note(f"{name}_scale"))


def _features(
    features: int | None, ram: Any, classes: int, spare: int, encoder: Encoder | None
) -> int:
    if features is not None:
        return features
    if ram is None:
        return FEATURES
    return most_features(ram, classes + spare, encoder.ram_bytes if encoder else 0)


def _scale(
    inputs: int, features: int, model: nn.Module | None, shape: tuple[int, ...], samples: Any
) -> float:
    if samples is None:
        return unit_scale(inputs, features)
    x = as_samples(samples, shape)
    return unit_scale(inputs, features, x if model is None else encoded(model, x))


def check(
    recipe: HeadRecipe, texts: dict[str, str], model: nn.Module | None, shape: tuple[int, ...]
) -> str:
    """Let the C learn random samples, and say how far it is from ridge regression in float64."""
    if compiler() is None:
        return NOT_RUN
    generator = torch.Generator().manual_seed(1)
    size = unit_scale(recipe.inputs, recipe.features) / recipe.scale
    x = torch.randn(TRIAL, *shape, generator=generator) * size
    if model is not None:
        x = torch.randn(TRIAL, *shape, generator=generator)
    labels = np.arange(TRIAL) % recipe.classes
    head = CompiledHead(texts, recipe.name)
    head.learn_all(x.flatten(1).numpy(), labels)
    read = x if model is None else encoded(model, x)
    h = reference.features(recipe, read.flatten(1).numpy())
    if forgets := recipe.forgetting < 1:
        exact, *_ = reference.recursive(recipe, h, labels)
    else:
        exact = reference.ridge(h, labels, recipe)
    apart = float(np.abs(head.weights - exact).max() / np.abs(exact).max())
    if not apart < APART:
        raise TpsgdError(
            f"the C learned other weights than ridge regression, {apart:.1e} of the largest away "
            "from them, and nothing was written: take a larger ridge=, or pass samples= so that "
            "the features have unit size"
        )
    return (
        f"run on {TRIAL} samples: weights {apart:.0e} of the largest from ridge regression"
        f"{' that forgets' if forgets else ''} in float64"
    )
