"""The memory of a recurrent net that learns while it reads, to the byte.

The arena has the sums of gradients, the states, and scratch for one time step. Nothing in it
depends on how long the sequences are.
"""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from tpsgd.errors import TpsgdError
from tpsgd.export.recipe import BlockRecipe, Cell, Dense, Diagonal, Recipe
from tpsgd.export.to_c.memory import FLOAT, Layout, flash, lasting_ram

PROGRESS = 6  # words of tps_progress in kernels/cells.h


@dataclass(frozen=True)
class CellLayout(Layout):
    """Places in the arena of a recurrent net.

    Args:
        places: of every block, by name: output, sums, and of a diagonal layer x, h, lambda, traces
            and mean.
        scratch: of one time step.
    """

    places: tuple[dict[str, int], ...] = ()
    scratch: int = 0
    sizes: tuple[dict[str, int], ...] = field(default=(), repr=False)  # of the places, in numbers


def cell_layout(recipe: Recipe) -> CellLayout:
    """Where the numbers of a recurrent net lie; what cannot learn step by step is refused."""
    _check(recipe)
    following = [*(block.recurrent for block in recipe.blocks[1:]), False]
    sizes = tuple(
        _sizes(*pair, recipe.outputs) for pair in zip(recipe.blocks, following, strict=True)
    )
    places, end = [], 0
    for each in sizes:
        places.append({})
        for name, count in each.items():
            places[-1][name], end = end, end + count
    scratch = max(map(_scratch, recipe.blocks))
    readouts = any(block.local and block.local.name == "readout" for block in recipe.blocks)
    logits = recipe.outputs if readouts else 0
    dz = end + scratch
    sums = sum(each.get("sums", 0) + each.get("sums of codes", 0) for each in sizes)
    ram = lasting_ram(recipe) | {
        "arena: sums of gradients": FLOAT * sums,
        "arena: states and outputs": FLOAT * (end - sums),
        "arena: scratch, dz, logits": FLOAT * (scratch + 1 + logits),
        "arena: losses and progress": FLOAT * (len(recipe.blocks) + PROGRESS),
    }
    return CellLayout(
        tuple(place["output"] for place in places), dz, dz + 1, dz + 1 + logits, ram, flash(recipe),
        _operations(recipe), "time step", tuple(places), end, sizes,
    )  # fmt: skip


def _sizes(block: BlockRecipe, feeds: bool, classes: int) -> dict[str, int]:
    """Numbers of the arena that a block needs for itself; the sums of codes follow the others."""
    layer: Any = block.layer
    codes = {"sums of codes": classes * block.learned_codes}
    if isinstance(layer, Dense):
        return {"output": layer.outputs}
    if isinstance(layer, Cell):
        sums = block.weights - layer.outputs * ("cells.0.bias_h" in block.parameters)  # of both
        return {"output": layer.outputs} | ({"sums": sums} | codes if block.learns else {})
    sizes = {"output": layer.outputs, "x": layer.inputs, "h": 2 * layer.states}
    sizes["lambda"] = 3 * layer.states
    if layer.loss_at == "mean" and not feeds:
        sizes["mean"] = layer.outputs
    if block.learns:
        traces = 2 * layer.states * (1 + layer.inputs)
        sizes |= {"traces": traces, "sums": block.weights} | codes
    return sizes


def _scratch(block: BlockRecipe) -> int:
    """Numbers that a block needs only while it computes a time step."""
    layer: Any = block.layer
    if isinstance(layer, Dense):
        return 0
    if isinstance(layer, Cell):
        return 2 * layer.outputs
    forward = 1 + 5 * layer.outputs
    return forward + (2 * layer.outputs + 2 * layer.states) * block.learns


def _operations(recipe: Recipe) -> int:
    """Multiply-adds of a time step; the layers after the recurrent ones learn once a sequence."""
    total = 0
    for block in recipe.blocks:
        if block.recurrent:
            total += block.weights * (1 + block.learns)
            if block.local and block.local.name == "readout":
                total += (2 + block.local.learned) * recipe.outputs * block.local.codes.size
    return total


def _check(recipe: Recipe) -> None:
    """Refuse what cannot be learned one time step at a time."""
    for block in recipe.blocks:
        who = f"block {block.number + 1} ({block.name})"
        if isinstance(block.layer, Diagonal) and block.learns and block.layer.loss_at == "mean":
            raise TpsgdError(
                f'{who}: a loss at the "mean" over time is known only after the last step, when '
                'the steps before it are gone; choose loss_at="every" or loss_at="last"'
            )
        if not block.recurrent and not isinstance(block.layer, Dense):
            raise TpsgdError(f"{who} after a recurrent layer is not exported; nn.Linear is")
    for block, after in pairwise(recipe.blocks):
        if block.recurrent and after.recurrent != (len(block.shape) == 2):
            raise TpsgdError(
                f"block {block.number + 1} ({block.name}): a recurrent layer before another needs "
                "sequence=True, and the last of them gives one vector, without it"
            )
    if recipe.inputs != recipe.blocks[0].layer.inputs:
        raise TpsgdError(
            f"a time step of shape {recipe.shape} has {recipe.inputs} numbers, but "
            f"{recipe.blocks[0].name} reads {recipe.blocks[0].layer.inputs}"
        )
