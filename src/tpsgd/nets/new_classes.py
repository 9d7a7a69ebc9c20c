"""A new class: one more row of the last layer, of the class codes and of the optimizer's state.

Row c of P is a pure function of the seed, the block and the class (`projections`), so that a larger
P has the old rows in it. Rows that were learned, or scaled, are copied. The new row of the last
layer is zero: the class has the output 0 until its first sample comes.
"""

from typing import Any

import torch
from torch import Tensor, nn

from tpsgd.common.errors import TpsgdError
from tpsgd.nets.blocks import Block
from tpsgd.nets.cuts.split import split
from tpsgd.nets.layers import LAYERS, layer_kind


def last_block(model: nn.Module) -> Block:
    return split(model)[-1]


def outputs_of(model: nn.Module) -> int:
    """The number of outputs of a model's last layer; 0 if it has no weights."""
    layers = [m for m in last_block(model).layer.modules() if type(m) in LAYERS]
    return len(layers[-1].weight) if layers else 0  # type: ignore[arg-type]


def check_new_output(model: nn.Module) -> Any:
    """The layer with the outputs, if it can get another one."""
    block = last_block(model)
    layer: Any = block.layer
    kind, problem = layer_kind(layer), ""
    if kind is None or not kind.dense(layer):
        problem = "only an nn.Linear or a convolution without groups can have a new output"
    else:
        for module in block.modules[block.modules.index(layer) + 1 :]:
            if [*module.parameters(), *module.buffers()]:
                problem = f"{type(module).__name__} after its layer has a number for each output"
    if problem:
        raise TpsgdError(f"the last block ({block}) cannot get a new class: {problem}")
    return layer


@torch.no_grad()
def add_output(model: nn.Module) -> None:
    """One more output, which is 0; the rows of the others stay as they are, bit for bit."""
    layer = check_new_output(model)
    for parameter in layer.parameters(recurse=False):
        parameter.data = torch.cat([parameter.data, torch.zeros_like(parameter.data[:1])])
        parameter.grad = None
    for name in ("out_features", "out_channels"):
        if hasattr(layer, name):
            setattr(layer, name, len(layer.weight))


def overlay(new: Tensor, old: Tensor) -> Tensor:
    """`new`, with `old` written over its first rows.

    Codes whose form changes with the number of classes (`objectives.PIXEL_CODES`) are drawn anew:
    they are the same codes.
    """
    if new.dim() == old.dim() and all(map(int.__ge__, new.shape, old.shape)):
        new[tuple(map(slice, old.shape))].copy_(old)
    return new


def enlarged(value: Any, parameter: Tensor, before: torch.Size) -> Any:
    """A value of an optimizer's state, with zeros for the rows that a parameter has got."""
    if isinstance(value, Tensor) and value.shape == before != parameter.shape:
        return overlay(torch.zeros_like(parameter), value)
    return value
