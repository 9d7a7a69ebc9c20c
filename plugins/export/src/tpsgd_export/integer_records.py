"""Records of nets of integers: what `net_save` writes, as float tensors.

    "TPI1", fingerprint of the layers, which blocks learn (a bit each), outputs, classes so far,
    bits of a weight, state of the random numbers; for each block that learns its inputs, outputs,
    1 if it has biases, the binary points of weights and of sums; all weights, then all biases (4
    bytes each), CRC-32 of all before it

All numbers have 4 bytes but the weights, the lowest byte first. A weight v of point p is v / 2^p; a
bias has the point of sums.
"""

import struct
import zlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tpsgd.common.errors import TpsgdError

MAGIC = b"TPI1"
HEAD = struct.Struct("<4s6I")
ROW = struct.Struct("<5I")
CLASSES, RANDOM = 4, 6  # the words of the head that change on the device
MOST_UNITS = 65_535  # inputs or outputs of a layer: uint16_t in C
MOST_POINT = 24

Tensors = dict[int, list[Tensor]]


class RecordRow(NamedTuple):
    """A layer that learns, as the record describes it."""

    inputs: int
    outputs: int
    biases: int  # 1 or 0
    weight_point: int
    sum_point: int


def packed_head(
    fingerprint: int, mask: int, outputs: int, bits: int, rows: Iterable[RecordRow]
) -> bytes:
    """The head of a record and its rows; the classes and the random state are 0."""
    head = HEAD.pack(MAGIC, fingerprint, mask, outputs, 0, bits, 0)
    return head + b"".join(ROW.pack(*row) for row in rows)


def read_integer_record(data: bytes) -> tuple[int, int, int, int, Tensors]:
    """The contents of a record; a damaged or contradictory one is refused.

    Returns:
        The fingerprint of the layers, the mask of the blocks that learn, the outputs of the last
        layer, the classes so far, and for each block that learns its weights and biases as floats.
    """
    if len(data) < HEAD.size + ROW.size + 4 or data[:4] != MAGIC:
        raise TpsgdError("this is no record of weights of an exported net of integers")
    if zlib.crc32(data[:-4]) != int.from_bytes(data[-4:], "little"):
        raise TpsgdError("the record of weights is damaged: its checksum does not fit")
    _, fingerprint, mask, outputs, classes, bits, random = HEAD.unpack_from(data)
    end = HEAD.size + ROW.size * mask.bit_count()
    table = data[HEAD.size : end] if end < len(data) else b""
    rows = [RecordRow(*row) for row in ROW.iter_unpack(table)]
    whole = bits in (8, 16) and random and 1 <= classes <= outputs <= MOST_UNITS
    if not (whole and rows and all(_possible(row) for row in rows)):
        raise TpsgdError("the record of weights contradicts itself: no net of integers wrote it")
    weights = sum(row.inputs * row.outputs for row in rows) * bits // 8
    biases = sum(row.outputs for row in rows if row.biases) * 4
    if len(data) != (described := end + weights + biases + 4):
        raise TpsgdError(f"the record describes {described:,} bytes and has {len(data):,}")
    W = np.frombuffer(data, f"<i{bits // 8}", offset=end, count=weights * 8 // bits)
    b = np.frombuffer(data, "<i4", offset=end + weights, count=biases // 4)
    blocks = [i for i in range(32) if mask >> i & 1]
    return fingerprint, mask, outputs, classes, dict(zip(blocks, _tensors(rows, W, b), strict=True))


def _possible(row: RecordRow) -> bool:
    sizes = 1 <= row.inputs <= MOST_UNITS and 1 <= row.outputs <= MOST_UNITS
    return sizes and row.biases in (0, 1) and row.weight_point <= row.sum_point <= MOST_POINT


def _tensors(rows: Sequence[RecordRow], W: np.ndarray, b: np.ndarray) -> list[list[Tensor]]:
    """The weight and the bias of each row, from all weights and all biases."""
    tensors = []
    for row in rows:
        count = row.inputs * row.outputs
        weight, W = W[:count].reshape(row.outputs, row.inputs), W[count:]
        tensors.append([_floats(weight, row.weight_point)])
        if row.biases:
            tensors[-1].append(_floats(b[: row.outputs], row.sum_point))
            b = b[row.outputs :]
    return tensors


def _floats(integers: np.ndarray, point: int) -> Tensor:
    return torch.tensor((integers * 2.0**-point).astype(np.float32))
