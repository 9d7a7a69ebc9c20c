"""`export.c`: a training step as C files in a folder."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from tpsgd.common.errors import TpsgdError, shortened
from tpsgd.common.files import write_together
from tpsgd.common.output import check_new, output_folder
from tpsgd.losses import Loss
from tpsgd.losses import resolve as resolve_loss
from tpsgd.nets.cuts.balance import Blocks
from tpsgd.nets.cuts.split import LAYERS
from tpsgd.rules import Rule, readout, resolve
from tpsgd.train import simultaneous
from tpsgd_export.exported import Exported
from tpsgd_export.inputs import read_inputs
from tpsgd_export.number_labels import are_numbers
from tpsgd_export.plain_steps import read_with_plain_scales
from tpsgd_export.read_model import BACKPROP, as_samples, check_shape
from tpsgd_export.recipe import refuse_joined
from tpsgd_export.to_c.budget import check_budget
from tpsgd_export.to_c.check import EPOCHS, LEAST, check, check_integers
from tpsgd_export.to_c.codes import with_binary_codes, with_codes
from tpsgd_export.to_c.inputs import with_inputs
from tpsgd_export.to_c.integer_scales import check_classes, integer_net
from tpsgd_export.to_c.integer_source import integer_layout, integer_source
from tpsgd_export.to_c.libraries import as_library, check_library
from tpsgd_export.to_c.memory import FLOAT, layout
from tpsgd_export.to_c.names import check_name
from tpsgd_export.to_c.small import with_small_weights
from tpsgd_export.to_c.source import sources


def c(
    model: nn.Module,
    folder: str | Path,
    *,
    shape: Sequence[int],
    rule: Rule | str | Sequence[Rule | str] | None = None,
    batch: int = 1,
    optimizer: str = "sgd",
    codes: str = "auto",
    order: Callable[..., Any] = simultaneous,
    ram: str | int | None = None,
    seed: int = 0,
    loss: Loss | None = None,
    samples: Any = None,
    labels: Any = None,
    blocks: Blocks | str | None = LAYERS,
    numbers: str = "float32",
    frozen: str = "float32",
    rate: float = 2.0**-7,
    least: float = LEAST,
    spare: int = 0,
    files: str = "plain",
    inputs: Mapping[str, Any] | None = None,
    classes: Sequence[str] | None = None,
    name: str = "net",
    overwrite: bool = False,
) -> Exported:
    """Write a model and its training step as C99: no heap, no library, all bytes set beforehand.

    The folder gets `net.h`, which explains what can be called, `net.c` and `tpsgd.h`. Before they
    are written they are compiled and run beside `tpsgd.fit`, if there is a C compiler.

    Args:
        model: as for `fit`: Linear, Conv1d, Conv2d; ReLU, LeakyReLU, Tanh, Sigmoid; pools and
            Flatten; recurrent layers; modules whose `forward` adds outputs of these, as residual
            blocks do. Batch norms are folded.
        folder: where the files go.
        shape: of one sample; of sequences (steps, inputs), of which any number may come.
        rule: as for `fit`: `readout`, `tpsgd_l2`, `tpsgd_l1`, `drtp` or `frozen`; or "backprop",
            the control, for dense layers and convolutions without pools. Default:
            `rules.default()`; for integers, whose codes cannot learn, `readout()`.
        batch: samples of a step.
        optimizer: "sgd", "momentum" (0.9) or "adam".
        codes: class codes by "hash" or from "flash"; "auto": from flash up to 32 kB; "binary":
            codes of -1 and +1, whatever the rule's. Integers have those, in flash.
        order: how the check trains; on the device, the caller says which blocks learn.
        ram: a budget such as "16KB", for the weights, the optimizer and the arena.
        seed: of the class codes.
        loss: of the last block, if not the rule's own; of numbers `mse`, `l1` or `huber`.
        samples: inputs to calibrate readouts with, of all classes; without them, the first batch
            does it.
        labels: of the samples; integers need them. A class that they lack is an error. If they are
            real numbers, `(samples,)` or `(samples, k)`, the net learns numbers, standardised by
            the mean and the deviation of these; labels and predictions on the device have their
            units.
        blocks: which layers learn together, by backprop inside of their block, as for `fit`:
            "layers", a block for each, or None, a depthwise convolution with the layer after it;
            how many layers each block has, or a number of blocks. A residual block is one layer.
        numbers: "float32", or "int8" or "int16": dense nets under `readout` with binary codes,
            whose weights move by stochastic rounding. Binary points come from the samples.
        frozen: "int8": weights of layers that do not learn are a byte each in flash, with a scale
            for each unit or filter; their sums and outputs stay floats.
        rate: the learning rate that the binary points of integers leave room for, and that of
            their check.
        least: the share of the samples that integers must get right in the check.
        spare: classes that may come later.
        files: "plain", "arduino": a library of the Arduino IDE, with sketches, or "zephyr": a
            module of Zephyr.
        inputs: `data.inputs`: the header names the columns in their order, and if they were scaled
            for training, `net_scale` does the same on the device.
        classes: `data.classes`, the names of the labels, for the header.
        name: what all functions, types, macros and files begin with. Two nets of different names
            link into one program; `name="gait"` has `gait.h`, `gait_step` and `GAIT_OK`.
        overwrite: replace an earlier export.

    Examples:
        >>> import tempfile
        >>> model = nn.Sequential(nn.Linear(64, 32), nn.LeakyReLU(), nn.Linear(32, 10))
        >>> exported = c(model, tempfile.mkdtemp(), shape=(64,), ram="16KB")
        >>> exported.memory.ram_bytes
        11132
    """
    _check_words(codes, files, numbers, frozen)
    check_name(name)
    if not isinstance(least, (int, float)) or not 0 <= least <= 1:
        raise TpsgdError(f"least must be a share from 0 to 1, got {least!r}")
    floats = numbers == "float32"
    learning: Any = readout() if rule is None and not floats else as_rule(rule)
    if codes == "binary" or not floats:
        learning = with_binary_codes(learning)
    if not floats and are_numbers(labels, resolve_loss(loss)):
        raise TpsgdError(
            f"{numbers} learns classes: labels that are numbers need numbers='float32'"
        )
    settings: dict[str, Any] = {
        "batch": batch, "optimizer": optimizer, "loss": loss, "seed": seed, "spare": spare,
        "samples": samples, "labels": labels, "blocks": blocks,
    }  # fmt: skip
    learning, recipe = read_with_plain_scales(model, learning, shape, **settings)
    check_library(files, recipe, floats, name)
    if recipe.targets is None:
        _check_every_class(samples, labels, max(2, recipe.classes), classes or ())
    if not floats:
        refuse_joined(recipe, numbers)
    if frozen == "int8":
        recipe = with_small_weights(recipe)
    net = None
    if floats:
        recipe = with_codes(recipe, codes)
        texts, memory = sources(recipe), layout(recipe)
    else:
        if samples is None or labels is None:
            raise TpsgdError(
                f"{numbers} needs samples= and labels=, a few hundred like those of the device: "
                "its binary points come from them"
            )
        samples = as_samples(samples, check_shape(shape), recipe.recurrent)
        net = integer_net(recipe, samples, labels, numbers, rate=rate, epochs=EPOCHS)
        texts, memory = integer_source(net), integer_layout(net)
    check_budget(ram, memory, recipe)
    meaning = read_inputs(inputs, classes, recipe)
    meaning.warn_of_lost_digits()
    texts = with_inputs(texts, meaning, recipe, name)
    if meaning.shift:
        scaling = {"shift and scale of the inputs": 2 * FLOAT * len(meaning.shift)}
        memory = replace(memory, flash=memory.flash | scaling)
    written = texts
    if files != "plain":
        written = as_library(files, texts, recipe, memory.ram_bytes, name)
    check_new(Path(folder), overwrite, *written)
    if net is None:
        checked = check(model, recipe, texts, order, rule=learning, loss=loss)
    else:
        labelled = samples, torch.as_tensor(labels).flatten().long()
        checked = check_integers(model, net, texts, labelled, rate, least, rule=learning, seed=seed)
    with output_folder(Path(folder), tuple(written), overwrite) as path:
        paths = write_together({path / name: text.encode() for name, text in written.items()})
    return Exported(paths, checked, memory=memory, note=meaning.note(f"{name}_scale"))


def _check_every_class(samples: Any, labels: Any, classes: int, names: Sequence[str]) -> None:
    """Refuse samples whose labels lack a class, of which they show nothing."""
    if samples is None or labels is None:
        return
    y = np.asarray(labels)
    y = y.argmax(1) if y.ndim == 2 and y.shape[1] > 1 else y.ravel()
    check_classes(y, len(samples), classes)
    if missing := sorted({*range(classes)} - {*y.tolist()}):
        words = dict(enumerate(names))
        listed = shortened(", ".join(str(words.get(i, i)) for i in missing), 60)
        raise TpsgdError(
            f"the samples have none of {len(missing)} of the {classes} classes ({listed}): a net is"
            " calibrated and checked with some of every class, chosen at random"
        )


def as_rule(rule: Any) -> Any:
    """A rule, or one for each block; "backprop" is one of exported C only."""
    return BACKPROP if rule == BACKPROP.name else resolve(rule)


def _check_words(codes: str, files: str, numbers: str, frozen: str) -> None:
    """Refuse words that an export does not know, or not together."""
    check_word("codes", codes, ("auto", "hash", "flash", "binary"))
    check_word("files", files, ("plain", "arduino", "zephyr"))
    check_word("numbers", numbers, ("float32", "int8", "int16"))
    check_word("frozen", frozen, ("float32", "int8"))
    if numbers == "float32":
        return
    if codes not in ("auto", "binary"):
        raise TpsgdError(
            f"codes={codes!r} is for floats: {numbers} has codes of -1 and +1, a bit each, in flash"
        )
    if frozen == "int8":
        raise TpsgdError(f"frozen='int8' is for a net of floats: all of this one is {numbers}")


def check_word(name: str, word: str, words: Sequence[str]) -> None:
    """Refuse a word that is none of these."""
    if word not in words:
        raise TpsgdError(f"{name} must be one of {', '.join(words)}, got {word!r}")
