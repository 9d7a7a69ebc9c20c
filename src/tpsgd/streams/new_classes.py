"""A new class: one more row of the last layer, of the class codes and of what belongs to them.

Row c of P is a pure function of the seed, the block and the class (`projections`), so that a larger
P has the old rows in it. Rows that were learned, or scaled, are copied. The new row of the last
layer is zero: the class has the output 0 until its first sample comes.
"""

from typing import Any

import torch
from torch import Tensor, nn

from tpsgd.errors import TpsgdError
from tpsgd.nets.blocks import Block, split
from tpsgd.nets.layers import LAYERS, layer_kind
from tpsgd.solvers.least_squares import MomentSums


def last_block(model: nn.Module) -> Block:
    """The block with the outputs."""
    return split(model)[-1]


def outputs_of(model: nn.Module) -> int:
    """How many classes a model tells apart: the outputs of its last layer."""
    weight = getattr(last_block(model).layer, "weight", None)
    return 0 if weight is None else len(weight)


def why_not(block: Block) -> str | None:
    """Why a block cannot get another output, or None."""
    layer: Any = block.layer
    kind = LAYERS.get(type(layer))
    if kind is None or layer_kind(layer) is None or not kind.dense(layer):
        return "only an nn.Linear or a convolution without groups can have a new output"
    after = block.modules[block.modules.index(layer) + 1 :]
    for module in after:
        if any(True for _ in module.parameters()) or any(True for _ in module.buffers()):
            return f"{type(module).__name__} after its layer has a number for each output"
    return None


@torch.no_grad()
def add_output(model: nn.Module) -> None:
    """One more output, which is 0; the rows of the others stay as they are, bit for bit."""
    block = last_block(model)
    if reason := why_not(block):
        raise TpsgdError(f"the last block ({block}) cannot get a new class: {reason}")
    layer: Any = block.layer
    for parameter in layer.parameters(recurse=False):
        parameter.data = torch.cat([parameter.data, torch.zeros_like(parameter.data[:1])])
        parameter.grad = None
    for name in ("out_features", "out_channels"):
        if hasattr(layer, name):
            setattr(layer, name, len(layer.weight))


def overlay(new: Tensor, old: Tensor) -> Tensor:
    """`new`, with `old` written over its first rows.

    Codes whose form changes with the number of classes (`objectives.FEW`) are drawn anew: they are
    the same codes.

    Examples:
        >>> overlay(torch.zeros(3, 2), torch.ones(2, 2))
        tensor([[1., 1.],
                [1., 1.],
                [0., 0.]])
    """
    if new.dim() == old.dim() and all(map(int.__ge__, new.shape, old.shape)):
        new[tuple(map(slice, old.shape))].copy_(old)
    return new


def enlarged(value: Any, parameter: Tensor, before: torch.Size) -> Any:
    """A value of an optimizer's state, with zeros for the rows that a parameter has got."""
    if isinstance(value, Tensor) and value.shape == before != parameter.shape:
        return overlay(torch.zeros_like(parameter), value)
    return value


def with_targets(sums: MomentSums, count: int, absent: float) -> MomentSums:
    """Sums over samples for more targets, which were `absent` in all samples so far.

    Other numbers than 0 need sums with a bias, about the running means.
    """
    more = count - sums.y.shape[-1]
    if not more:
        return sums
    pad = nn.functional.pad
    sums.y, sums.xy = pad(sums.y, (0, more), value=absent), pad(sums.xy, (0, more))
    sums.yy = pad(sums.yy, (0, more, 0, more))
    return sums
