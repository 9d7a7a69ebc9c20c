"""Whether the weights of a block are the solution of linear equations."""

from typing import Any

from tpsgd.maths.random import Key
from tpsgd.nets.blocks import Block, hooked
from tpsgd.nets.layers import LAYERS, layer_kind
from tpsgd.objectives import Place, Signal, Site


def unsolvable(block: Block, rule: Any, last: bool) -> str | None:
    """Why a block's weights are not the solution of linear equations under a `Rule`, or None."""
    layer, make = block.layer, rule.last if last else rule.objective
    kind = LAYERS.get(type(layer))
    if block.earlier:
        return "it has several layers, and a solver needs a block of one; change blocks"
    if kind is None or kind.equations is None:
        return "only nn.Linear, nn.Conv1d and nn.Conv2d are linear in their weights"
    if layer_kind(layer) is None or not kind.dense(layer):
        return "its convolution has groups, or is not padded with zeros"
    if block.between:
        return f"{type(block.between[0]).__name__} lies between the layer and its activation"
    if any(hooked(m) for m in block.modules):
        return "one of its modules has a hook"
    if any(p.requires_grad for m in block.prologue for p in m.parameters()):
        return "a module before the layer learns too"
    if not all(p.requires_grad for p in layer.parameters()):
        return "its weight or its bias may not learn (requires_grad is False)"
    if make is None:
        bare = block.modules[-1] is layer
        return None if bare else "a module after the last layer is not linear"
    if rule.signal is not Signal.LABEL or not make(Site((2,), 2, Key())).squared:
        return f"{rule.name} does not lower a squared error to the projected label"
    if rule.at is not Place.BEFORE and block.activation is not None:
        return f"{rule.name} looks beyond the activation; take at=tpsgd.Place.BEFORE"
    if rule.at is Place.END and block.tail:
        return f"{rule.name} looks at the block's end; take at=tpsgd.Place.BEFORE"
    return None
