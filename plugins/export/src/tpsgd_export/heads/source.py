"""A head as C, and the frozen encoder in front of it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from textwrap import wrap
from typing import Any
from zlib import crc32

import torch
from torch import nn

from tpsgd import losses, rules
from tpsgd.common.errors import TpsgdError
from tpsgd.nets.modes import modes_restored
from tpsgd_export.heads.recipe import HeadRecipe
from tpsgd_export.inputs import SampleFormat
from tpsgd_export.read_model import check_shape, read_model
from tpsgd_export.to_c.inputs import c_strings, width
from tpsgd_export.to_c.memory import FLOAT, MemoryMap, layout
from tpsgd_export.to_c.names import named
from tpsgd_export.to_c.source import IN_FLASH, LICENCE, array, comment, filled, number, read_text
from tpsgd_export.to_c.source import sources as net_sources

UNSCALED = SampleFormat()
LONGEST = 60  # characters of a column's name


@dataclass(frozen=True)
class Encoder:
    """A frozen net whose last hidden output a head reads.

    Args:
        texts: its C, with an unused last layer of one output, as that of a net called `net`.
        memory: its bytes.
        inputs: numbers of a sample.
        outputs: numbers that it gives.
        place: of these in its arena.
    """

    texts: dict[str, str]
    memory: MemoryMap
    inputs: int
    outputs: int
    place: int

    @property
    def fingerprint(self) -> int:
        """Of its layers and weights."""
        return crc32(self.texts["net.c"].encode())

    @property
    def ram_bytes(self) -> int:
        """Scratch that it needs while it encodes a sample."""
        return self.memory.ram_bytes


def read_encoder(model: nn.Module, shape: Sequence[int]) -> Encoder:
    """The C of a frozen encoder; a layer that cannot be exported is refused."""
    shape = check_shape(shape)
    outputs = encoded(model, torch.zeros(1, *shape)).shape[1]
    last = nn.Linear(outputs, 1, bias=False)
    nn.init.zeros_(last.weight)
    model = nn.Sequential(model, last)
    recipe = read_model(model, rules.frozen(), shape, loss=losses.bce)
    if recipe.recurrent:
        raise TpsgdError("a recurrent encoder in front of a head is not exported")
    if len(recipe.blocks) < 2:
        raise TpsgdError("the encoder has no layer that is exported: leave model= out")
    memory = layout(recipe)
    place = memory.blocks[-2]["output"]
    return Encoder(net_sources(recipe), memory, recipe.inputs, outputs, place)


def encoded(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """What an encoder makes of samples, as rows of numbers."""
    try:
        with torch.no_grad(), modes_restored(model):
            features = model.eval()(x)
    except RuntimeError as error:
        shape = tuple(x.shape[1:])
        raise TpsgdError(f"the encoder does not take samples of shape {shape}: {error}") from error
    if features.dim() != 2:
        raise TpsgdError(
            f"the encoder must give one row of numbers for each sample, not {tuple(features.shape)}"
            ": put nn.Flatten() at its end"
        )
    return features


def memory_of(recipe: HeadRecipe, encoder: Encoder | None = None) -> MemoryMap:
    """Bytes of a head, and of the encoder in front of it."""
    memory = recipe.memory
    if encoder is None:
        return memory
    scratch = {"arena: encoder": encoder.ram_bytes}
    flash = {"encoder": encoder.memory.flash_bytes}
    return replace(
        memory, ram=memory.ram | scratch, flash=flash,
        operations=memory.operations + encoder.memory.operations,
    )  # fmt: skip


def sources(
    recipe: HeadRecipe, encoder: Encoder | None = None, samples: SampleFormat = UNSCALED
) -> dict[str, str]:
    """The files of a head by their names."""
    inputs = encoder.inputs if encoder else recipe.inputs
    words = {
        "licence": LICENCE,
        "summary": comment(*wrap(_summary(recipe, samples.classes), 94)),
        "n": recipe.name,
        "N": recipe.name.upper(),
        "encoder": encoder is not None,
        "random": recipe.features > 0,
        "inputs": inputs,
        "encoded": recipe.inputs,
        "read": recipe.inputs,
        "output": encoder.place if encoder else 0,
        "units": recipe.units,
        "outputs": recipe.outputs,
        "classes": recipe.classes,
        "triangle": recipe.triangle,
        "numbers": recipe.outputs * recipe.units,
        "ram": memory_of(recipe, encoder).ram_bytes,
        "forgetting": number(recipe.forgetting),
        "start": number(recipe.start),
        "most": number(recipe.most),
        "scale": number(recipe.scale),
        "named": bool(samples.classes),
        "names": c_strings(samples.classes, recipe.outputs).rstrip(),
        "width": width(samples.classes),
        "flash": read_text("kernels/flash.h") if samples.shift or samples.classes else "",
        "stream": f"0x{recipe.stream:08X}u",
        "fingerprint": f"0x{recipe.fingerprint ^ (encoder.fingerprint if encoder else 0):08X}u",
    } | _scaling(recipe.name, samples, inputs)
    own = {f"{recipe.name}.{end}": filled(f"one_pass.{end}", words) for end in ("h", "c")}
    return own | (named(encoder.texts, encoder_name(recipe.name)) if encoder else {})


def encoder_name(name: str) -> str:
    """What the names of the encoder begin with, in front of a head of this name."""
    return f"{name}_net"


def _scaling(name: str, samples: SampleFormat, inputs: int) -> dict[str, Any]:
    """The words of a function that scales samples, if they are scaled."""
    each = zip(samples.shift, samples.scale, strict=True)
    rows = [
        f"x[{i}] {column[:LONGEST]}: shift {shift:.7g}, scale {scale:.7g}"
        for i, (column, (shift, scale)) in enumerate(zip(samples.columns, each, strict=False))
    ]
    shift, scale = (map(number, values) for values in (samples.shift, samples.scale))
    tables = array("float", f"{name}_shift", shift, IN_FLASH)
    tables += array("float", f"{name}_scales", scale, IN_FLASH)
    return {
        "scaled": bool(samples.shift),
        "columns": comment("Inputs in their order:", *rows) if rows else "",
        "tables": tables,
        "index": "i" if len(samples.shift) == inputs else f"i % {max(1, len(samples.shift))}u",
    }


def _summary(recipe: HeadRecipe, classes: Sequence[str]) -> str:
    reads = f"{recipe.features} random features of" if recipe.features else ""
    counts = "" if recipe.forgetting == 1 else f", forgetting {recipe.forgetting:g}"
    names = ", ".join(f"{i} {name}" for i, name in enumerate(classes))
    return (
        f"Recursive least squares on {reads} {recipe.inputs} numbers: ridge {recipe.ridge:g}"
        f"{counts}, {FLOAT} bytes a number. {names and f'Classes: {names}'}"
    )
