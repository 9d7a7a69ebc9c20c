"""Records: the weights of an exported net as bytes with a checksum, and back into a model.

    "TPS1", fingerprint of the layers, which blocks learn (a bit each), outputs, classes so far,
    the weights of the blocks that learn as float32, class codes that learn, measured gains,
    CRC-32 of all before it

All numbers have 4 bytes, the lowest first.
"""

import json
import struct
import zlib
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tpsgd.errors import TpsgdError
from tpsgd.export.integer_records import MAGIC as INTEGERS
from tpsgd.export.integer_records import fitting, read_integer_record
from tpsgd.export.recipe import Recipe
from tpsgd.nets.blocks import split
from tpsgd.streams.new_classes import add_output

MAGIC = 0x31535054
HEAD = struct.Struct("<5I")


class Record(NamedTuple):
    """What a record holds."""

    fingerprint: int
    mask: int  # bit i: block i + 1 learns
    outputs: int  # rows of the last layer
    classes: int  # of which have come so far
    numbers: Tensor | dict[int, list[Tensor]]  # integers: by the block


def fingerprint(recipe: Recipe) -> int:
    """A number for the layers and class codes that learn, whatever the number of classes."""
    shapes = [[tuple(p.shape) for p in b.parameters.values()] for b in recipe.blocks]
    codes = sum(block.learned_codes for block in recipe.blocks)
    return _fingerprint(shapes, learning_mask(recipe), codes)


def _fingerprint(shapes: list[list[tuple[int, ...]]], mask: int, codes: int = 0) -> int:
    """`codes`: numbers of a class code that learn, in all blocks."""
    *hidden, last = shapes
    rows = [*hidden, [shape[1:] for shape in last]]
    return zlib.crc32(json.dumps([r for i, r in enumerate(rows) if mask >> i & 1]).encode(), codes)


def learning_mask(recipe: Recipe) -> int:
    """Bit i: block i + 1 learns."""
    return sum(1 << block.number for block in recipe.blocks if block.learns)


def parse(data: bytes) -> Record:
    """The contents of a record; a damaged one is refused."""
    if data[:4] == INTEGERS:
        return Record(*read_integer_record(data))
    if len(data) < HEAD.size + 4 or len(data) % 4 or HEAD.unpack_from(data)[0] != MAGIC:
        raise TpsgdError("this is no record of weights of an exported net")
    if zlib.crc32(data[:-4]) != struct.unpack("<I", data[-4:])[0]:
        raise TpsgdError("the record of weights is damaged: its checksum does not fit")
    _, layers, mask, outputs, classes = HEAD.unpack_from(data)
    numbers = torch.frombuffer(bytearray(data[HEAD.size : -4]), dtype=torch.float32)
    return Record(layers, mask, outputs, classes, numbers)


def read_weights(model: nn.Module, record: str | Path | bytes) -> int:
    """Write the weights that a device has learned into the model that was exported.

    The record is a file, or the bytes, that the C function `net_save` or the page wrote. Blocks
    that do not learn keep their weights. If the device has learned new classes, the last layer
    gets as many outputs.

    Returns:
        How many classes there are.
    """
    data = bytes(record) if isinstance(record, (bytes, bytearray)) else _read(Path(record))
    content, blocks = parse(data), split(model)
    shapes = [[tuple(p.shape) for p in block.layer.parameters()] for block in blocks]
    values = _by_block(content, shapes, _checked_codes(content, shapes))
    if any(not p.isfinite().all() for tensors in values.values() for p in tensors):
        raise TpsgdError("the record has weights that are not finite")
    while len(next(split(model)[-1].layer.parameters())) < content.classes:
        add_output(model)
    with torch.no_grad():
        for i, tensors in values.items():
            for p, value in zip(split(model)[i].layer.parameters(), tensors, strict=True):
                p.copy_(value[: len(p)])
    return content.classes


def _checked_codes(content: Record, shapes: list[list[tuple[int, ...]]]) -> int:
    """Numbers of a class code that learn; the record of another net is refused."""
    mask, outputs = content.mask, shapes[-1][0][0]
    known = 0 < mask < 1 << len(shapes)
    possible = _possible_codes(content, shapes) if known else []
    counts = [c for c in possible if content.fingerprint == _fingerprint(shapes, mask, c)]
    if not counts:
        raise TpsgdError("the record belongs to a net with other layers")
    if not outputs <= content.classes <= content.outputs:
        raise TpsgdError(
            f"the record has {content.classes} classes of at most {content.outputs}, the model "
            f"{outputs} outputs"
        )
    if content.classes > outputs and not mask >> len(shapes) - 1:
        raise TpsgdError("the record has new classes, but no weights of the last layer")
    return counts[0]


def _possible_codes(content: Record, shapes: list[list[tuple[int, ...]]]) -> list[int]:
    """Numbers of a class code that may learn, by the length of the record."""
    if isinstance(content.numbers, dict):
        return [0]
    full = _full_shapes(content, shapes)
    rest = len(content.numbers) - sum(torch.Size(s).numel() for each in full.values() for s in each)
    outputs = max(content.outputs, 1)
    gains = range(len(full) + 1)  # one for each block, at most
    return [0, *((rest - n) // outputs for n in gains if rest > n and not (rest - n) % outputs)]


def _full_shapes(
    content: Record, shapes: list[list[tuple[int, ...]]]
) -> dict[int, list[tuple[int, ...]]]:
    """The shapes of a record's weights, by the block: the last layer has rows to spare."""
    last = len(shapes) - 1
    rows = {last: [(content.outputs, *shape[1:]) for shape in shapes[last]]}
    return {i: rows.get(i, shapes[i]) for i in range(len(shapes)) if content.mask >> i & 1}


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise TpsgdError(f"cannot read {path}: {error.strerror}") from error


def _by_block(
    content: Record, shapes: list[list[tuple[int, ...]]], codes: int
) -> dict[int, list[Tensor]]:
    """The weights of the blocks that learn; `codes`: numbers of a class code that learn."""
    if isinstance(content.numbers, dict):
        return fitting(content.numbers, content.outputs, shapes)
    values, place = {}, 0
    for i, each in _full_shapes(content, shapes).items():
        values[i] = []
        for shape in each:
            count = torch.Size(shape).numel()
            if place + count > len(content.numbers):
                raise TpsgdError("the record has fewer weights than the model")
            values[i].append(content.numbers[place : place + count].view(-1, *shape[1:]))
            place += count
    rest = len(content.numbers) - place - codes * content.outputs
    if rest > len(values):  # a gain for each block, at most
        raise TpsgdError("the record has more weights than the model")
    return values
