"""`export.c`: a training step as C files in a folder."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tpsgd.errors import TpsgdError
from tpsgd.export.exported import Exported
from tpsgd.export.inputs import Inputs, read_inputs
from tpsgd.export.read_model import as_samples, check_shape, read_model
from tpsgd.export.recipe import Recipe
from tpsgd.export.to_c.arduino import as_library
from tpsgd.export.to_c.cell_memory import cell_layout
from tpsgd.export.to_c.cell_source import cell_sources
from tpsgd.export.to_c.check import check
from tpsgd.export.to_c.codes import check_kind, check_word, with_binary_codes, with_codes
from tpsgd.export.to_c.inputs import with_inputs
from tpsgd.export.to_c.integer_check import EPOCHS, check_integers
from tpsgd.export.to_c.integer_scales import integer_net
from tpsgd.export.to_c.integer_source import integer_layout, integer_source
from tpsgd.export.to_c.memory import FLOAT, Layout, layout
from tpsgd.export.to_c.source import sources, summary
from tpsgd.files import write_together
from tpsgd.losses import Loss
from tpsgd.output import check_new, output_folder
from tpsgd.rules import Rule, default, readout, resolve
from tpsgd.train import simultaneous
from tpsgd.units import as_bytes, size


def c(
    model: nn.Module,
    folder: str | Path,
    *,
    shape: Sequence[int],
    rule: Rule | str | Sequence[Rule | str] | None = None,
    batch: int = 1,
    optimizer: str = "sgd",
    codes: str = "auto",
    schedule: Callable[..., Any] = simultaneous,
    ram: str | int | None = None,
    seed: int = 0,
    loss: Loss | None = None,
    samples: Any = None,
    labels: Any = None,
    numbers: str = "float32",
    rate: float = 2.0**-7,
    spare: int = 0,
    files: str = "plain",
    inputs: Mapping[str, Any] | None = None,
    classes: Sequence[str] | None = None,
    overwrite: bool = False,
) -> Exported:
    """Write a model and its training step as C99: no heap, no library, all bytes set beforehand.

    The folder gets `net.h`, which explains what can be called, `net.c` and `tpsgd.h`. Before they
    are written they are compiled and run beside `tpsgd.fit`, if there is a C compiler.

    Args:
        model: as for `fit`: Linear, Conv1d, Conv2d; ReLU, LeakyReLU, Tanh, Sigmoid; pools and
            Flatten; recurrent layers. A batch norm of a layer that does not learn is folded.
        folder: where the files go.
        shape: of one sample; of sequences (steps, inputs), of which any number may come.
        rule: as for `fit`: `readout`, `tpsgd_l2`, `tpsgd_l1`, `drtp` or `frozen`. Default:
            `rules.default()`; for integers, whose codes cannot learn, `readout()`.
        batch: samples of a step.
        optimizer: "sgd", "momentum" (0.9) or "adam".
        codes: class codes by "hash" or from "flash"; "auto": from flash if they are few; "binary":
            codes of -1 and +1 by hash, whatever the rule's. Integers have those, in flash.
        schedule: how the check trains; on the device, the caller says which blocks learn.
        ram: a budget such as "16KB", for the weights, the optimizer and the arena.
        seed: of the class codes.
        loss: of the last block, if not the rule's own.
        samples: inputs to calibrate readouts with; without them, the first batch does it.
        labels: of the samples; integers need them.
        numbers: "float32", or "int8" or "int16": dense nets under `readout` with binary codes,
            whose weights move by stochastic rounding. Binary points come from the samples.
        rate: the learning rate that the binary points of integers leave room for.
        spare: classes that may come later.
        files: "plain", or "arduino": a library of the Arduino IDE, with a sketch.
        inputs: `data.inputs`: the header names the columns in their order, and if they were scaled
            for training, `net_scale` does the same on the device.
        classes: `data.classes`, the names of the labels, for the header.
        overwrite: replace an earlier export.

    Examples:
        >>> import tempfile
        >>> model = nn.Sequential(nn.Linear(64, 32), nn.LeakyReLU(), nn.Linear(32, 10))
        >>> exported = c(model, tempfile.mkdtemp(), shape=(64,), ram="16KB")
        >>> exported.memory.ram_bytes
        11136
    """
    check_kind(codes)
    check_word("files", files, ("plain", "arduino"))
    check_word("numbers", numbers, ("float32", "int8", "int16"))
    if numbers != "float32" and codes not in ("auto", "binary"):
        raise TpsgdError(
            f"codes={codes!r} is for floats: {numbers} has codes of -1 and +1, a bit each, in flash"
        )
    if rule is None:
        rule = default() if numbers == "float32" else readout()
    rule = resolve(rule)
    rule = with_binary_codes(rule) if codes == "binary" or numbers != "float32" else rule
    recipe = read_model(
        model, rule, shape, batch=batch, optimizer=optimizer, loss=loss, seed=seed, spare=spare,
        samples=samples,
    )  # fmt: skip
    if samples is not None:
        samples = as_samples(samples, check_shape(shape), recipe.recurrent)
    if numbers == "float32":
        program = _floats(model, with_codes(recipe, codes), schedule, rule=rule, loss=loss)
    else:
        program = _integers(model, recipe, samples, labels, numbers, rate, rule=rule, seed=seed)
    _keep_within(ram, program.memory)
    meaning = read_inputs(inputs, classes, recipe)
    program = program.with_inputs(meaning, recipe)
    texts = program.texts
    if files == "arduino":
        texts = _library(program, recipe, numbers)
    check_new(Path(folder), overwrite, *texts)
    checked = program.check()
    with output_folder(Path(folder), tuple(texts), overwrite) as path:
        paths = write_together({path / name: text.encode() for name, text in texts.items()})
    note = meaning.note("net_scale")
    return Exported(paths, checked, memory=program.memory, note=note)


class _Program(NamedTuple):
    """Files in C, their bytes, and how they are run beside `fit`."""

    texts: dict[str, str]
    memory: Layout
    check: Callable[[], str]

    def with_inputs(self, inputs: Inputs, recipe: Recipe) -> "_Program":
        """The same with what the inputs mean, and `net_scale`."""
        texts, flash = with_inputs(self.texts, inputs, recipe), self.memory.flash
        if inputs.shift:
            flash = flash | {"shift and scale of the inputs": 2 * FLOAT * len(inputs.shift)}
        return self._replace(texts=texts, memory=replace(self.memory, flash=flash))


def _floats(model: nn.Module, recipe: Recipe, schedule: Any, **options: Any) -> _Program:
    places = (cell_layout if recipe.recurrent else layout)(recipe)
    texts = (cell_sources if recipe.recurrent else sources)(recipe)
    return _Program(texts, places, lambda: check(model, recipe, schedule, **options))


def _integers(
    model: nn.Module,
    recipe: Recipe,
    samples: Tensor | None,
    labels: Any,
    numbers: str,
    rate: float,
    **options: Any,
) -> _Program:
    if samples is None or labels is None:
        raise TpsgdError(
            f"{numbers} needs samples= and labels=, a few hundred like those of the device: its "
            "binary points come from them"
        )
    labels = _as_labels(labels, len(samples), recipe.classes)
    net = integer_net(recipe, samples, labels, numbers, rate=rate, epochs=EPOCHS)
    return _Program(
        integer_source(net),
        integer_layout(net),
        lambda: check_integers(model, net, samples, labels, rate, **options),
    )


def _as_labels(labels: Any, count: int, classes: int) -> Tensor:
    try:
        values = torch.as_tensor(labels).flatten().long()
    except (TypeError, ValueError, RuntimeError):
        values = torch.zeros(0)
    if len(values) != count or not ((values >= 0) & (values < classes)).all():
        raise TpsgdError(
            f"labels must have a class from 0 to {classes - 1} for each of the samples"
        )
    return values


def _library(program: _Program, recipe: Recipe, numbers: str) -> dict[str, str]:
    if recipe.recurrent or recipe.batch > 1 or numbers != "float32":
        raise TpsgdError(
            "files='arduino' has a sketch that learns one sample at a time, in floats: export a "
            "net that is not recurrent, with batch=1 and numbers='float32', or the plain files"
        )
    return as_library(program.texts, recipe, summary(recipe), program.memory.ram_bytes)


def _keep_within(ram: str | int | None, memory: Layout) -> None:
    if ram is None or memory.ram_bytes <= as_bytes(ram):
        return
    amounts = ", ".join(f"{name} {count:,} B" for name, count in memory.ram.items())
    raise TpsgdError(
        f"the net needs {memory.ram_bytes:,} B of RAM ({amounts}), and ram={size(as_bytes(ram))} "
        f"is {as_bytes(ram):,} B: take fewer units, a smaller batch or optimizer='sgd'"
    )
