"""Records: the weights of an exported net as bytes with a checksum, and back into a model.

    "TPS1", fingerprint of the layers, which blocks learn (a bit each), outputs, classes so far,
    the weights of the blocks that learn as float32, class codes that learn, measured gains,
    of labels that are numbers their means and deviations, CRC-32 of all before it

All numbers have 4 bytes, the lowest first.
"""

import json
import struct
import zlib
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tpsgd.common.errors import TpsgdError
from tpsgd.nets.blocks import Block
from tpsgd.nets.cuts.balance import Blocks
from tpsgd.nets.cuts.split import LAYERS
from tpsgd.nets.new_classes import add_output
from tpsgd_export.block_rows import cut, rows_of
from tpsgd_export.integer_records import MAGIC as INTEGERS
from tpsgd_export.integer_records import read_integer_record
from tpsgd_export.number_labels import in_units
from tpsgd_export.read_model import norms_of
from tpsgd_export.recipe import Shape, StepRecipe

MAGIC = 0x31535054
HEAD = struct.Struct("<5I")


class WeightRecord(NamedTuple):
    """What a record holds."""

    fingerprint: int
    mask: int  # bit i: block i + 1 learns
    outputs: int  # rows of the last layer
    classes: int  # of which have come so far
    numbers: Tensor | dict[int, list[Tensor]]  # integers: by the block


def fingerprint(recipe: StepRecipe) -> int:
    """A number for the layers and class codes that learn, whatever the number of classes."""
    shapes = [
        [tuple(p.shape) for row in block.rows for p in row.parameters.values()]
        for block in recipe.blocks
    ]
    codes = sum(block.learned_codes for block in recipe.blocks)
    head = len(recipe.blocks[-1].parameters)
    return _fingerprint(shapes, head, learning_mask(recipe), codes, recipe.targets is not None)


def _fingerprint(
    shapes: list[list[Shape]], head: int, mask: int, codes: int = 0, of_numbers: bool = False
) -> int:
    """`head`: tensors of the last layer; `codes`: numbers of a class code that learn, in all."""
    *hidden, last = shapes
    rows: list[Any] = [*hidden, [*last[:-head], *(shape[1:] for shape in last[-head:])]]
    learning = [r for i, r in enumerate(rows) if mask >> i & 1] + ["numbers"] * of_numbers
    return zlib.crc32(json.dumps(learning).encode(), codes)


def learning_mask(recipe: StepRecipe) -> int:
    """Bit i: block i + 1 learns."""
    return sum(1 << block.number for block in recipe.blocks if block.learns)


def parse(data: bytes) -> WeightRecord:
    """The contents of a record; a damaged one is refused."""
    if data[:4] == INTEGERS:
        return WeightRecord(*read_integer_record(data))
    if len(data) < HEAD.size + 4 or len(data) % 4 or HEAD.unpack_from(data)[0] != MAGIC:
        raise TpsgdError("this is no record of weights of an exported net")
    if zlib.crc32(data[:-4]) != int.from_bytes(data[-4:], "little"):
        raise TpsgdError("the record of weights is damaged: its checksum does not fit")
    _, layers, mask, outputs, classes = HEAD.unpack_from(data)
    numbers = torch.frombuffer(bytearray(data[HEAD.size : -4]), dtype=torch.float32)
    return WeightRecord(layers, mask, outputs, classes, numbers)


def read_weights(
    model: nn.Module, record: str | Path | bytes, *, blocks: Blocks | str | None = LAYERS
) -> int:
    """Write the weights that a device has learned into the model that was exported.

    The record is a file, or the bytes, that the C function `net_save` or the page wrote. Blocks
    that do not learn keep their weights. If the device has learned new classes, the last layer
    gets as many outputs; if it has learned numbers, they have the units of its labels. `blocks` is
    that of the export.

    Returns:
        How many classes, or numbers, there are.
    """
    if isinstance(record, (str, Path)):
        try:
            record = Path(record).read_bytes()
        except OSError as error:
            raise TpsgdError(f"cannot read {record}: {error.strerror}") from error
    content = parse(bytes(record))
    rows = [[row.block for row in rows_of(block)] for block in cut(model, blocks)]
    shapes = [[tuple(p.shape) for row in block for p in _tensors(row)] for block in rows]
    values = _by_block(content, shapes, len(_tensors(rows[-1][-1])))
    if any(not p.isfinite().all() for tensors in values.values() for p in tensors):
        raise TpsgdError("the record has weights that are not finite")
    while len(next(rows[-1][-1].layer.parameters())) < content.classes:
        add_output(model)
    with torch.no_grad():
        for i, tensors in values.items():
            of_block = iter(tensors)
            for row in rows[i]:
                own = [(p, next(of_block)) for p in _tensors(row)]
                for p, value in own:
                    p.copy_(value[: len(p)])
                _neutralise(row, own[-1][1])
    return content.classes


def _tensors(block: Block) -> list[Tensor]:
    """A layer's parameters; a layer without a bias gets that of the norm folded into it."""
    tensors: list[Tensor] = list(block.layer.parameters())
    if norms_of(block) and getattr(block.layer, "bias", 0) is None:
        tensors.append(torch.empty(len(tensors[0])))
    return tensors


def _neutralise(block: Block, bias: Tensor) -> None:
    """Norms that were folded become the identity, or add the bias that the layer has not."""
    for norm in norms_of(block):
        buffers: Any = norm
        buffers.running_mean.zero_()
        buffers.running_var.fill_(1 - buffers.eps)
        if buffers.affine:
            buffers.weight.fill_(1)
            buffers.bias.zero_()
        if getattr(block.layer, "bias", 0) is None:
            buffers.running_mean.copy_(-bias)


def _by_block(
    content: WeightRecord, shapes: list[list[Shape]], head: int
) -> dict[int, list[Tensor]]:
    """The weights of the blocks that learn; of the last layer, `head` tensors, with all rows.

    The record of another net is refused. After the weights of floats come class codes that learn,
    and a gain for each block at most: their lengths follow from that of the record. Those of
    numbers end with means and deviations, whose units the last layer gets.
    """
    numbers, last, outputs = content.numbers, len(shapes) - 1, shapes[-1][-head][0]
    by_class = [(content.outputs, *shape[1:]) for shape in shapes[-1][-head:]]
    rows = [*shapes[:-1], [*shapes[-1][:-head], *by_class]]
    full = {i: each for i, each in enumerate(rows) if content.mask >> i & 1}
    sizes, codes = [prod(shape) for each in full.values() for shape in each], {0}
    if isinstance(numbers, Tensor):
        rest, n = len(numbers) - sum(sizes), max(content.outputs, 1)
        gains = range(min(len(full), rest) + 1)
        codes = {(rest - gain) // n for gain in gains if not (rest - gain) % n}
    prints = {_fingerprint(shapes, head, content.mask, count) for count in codes}
    of_numbers = {_fingerprint(shapes, head, content.mask, n - 2, True) for n in codes if n > 1}
    known = content.fingerprint in prints | of_numbers
    if not 0 < content.mask < 1 << len(shapes) or not known:
        raise TpsgdError(
            "the record belongs to a net with other layers, or pass the blocks= of the export"
        )
    if not outputs <= content.classes <= content.outputs:
        raise TpsgdError(
            f"the record has {content.classes} classes of at most {content.outputs}, the model "
            f"{outputs} outputs"
        )
    if content.classes > outputs and last not in full:
        raise TpsgdError("the record has new classes, but no weights of the last layer")
    if isinstance(numbers, Tensor):
        tensors = iter(numbers[: sum(sizes)].split(sizes))
        values = {i: [next(tensors).view(shape) for shape in each] for i, each in full.items()}
        if content.fingerprint in of_numbers and last in values:
            in_units(values[last][-head:], numbers[-2 * outputs :])
        return values
    counts = {i: [prod(shape) for shape in each] for i, each in full.items()}
    if counts != {i: [tensor.numel() for tensor in each] for i, each in numbers.items()}:
        raise TpsgdError("the record has layers of other shapes than the model")
    return {  # a convolution's weights are a row for each filter
        i: [tensor.view(shape) for tensor, shape in zip(numbers[i], each, strict=True)]
        for i, each in full.items()
    }
