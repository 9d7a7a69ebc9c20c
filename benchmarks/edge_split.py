"""What the fused update saves, and what the local rule saves: bytes of RAM, computed.

The fused update moves the weights of a unit as soon as their gradient is there, so that no gradient
of a layer is stored. Backprop can do that, too, in the memory model of the exported C: the
derivatives of an output take its place, one feature map (or one number of a dense layer) at a time,
as soon as the weights that read it have moved. Still it has to store the outputs of all blocks for
the backward pass, and those of all time steps. A local rule needs the outputs of two blocks, and
the state of one time step. Backprop that computes outputs twice stores fewer of them. No program
with backprop was run: its bytes are computed by the functions below, those of the local step are
the plan that the compiler checks.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

import tpsgd
from tpsgd import projections, rules
from tpsgd_export.read_model import read_model
from tpsgd_export.recipe import BlockRecipe, CellLayer, Convolution, StepRecipe
from tpsgd_export.to_c.memory import FLOAT, MemoryMap, layout, summed

DEPTHS, LENGTHS, BATCHES = (1, 2, 4, 8, 12), (1, 3, 10, 30, 100, 300, 1000), (1, 16)
UNITS = 32  # of the recurrent cell
RULE = rules.readout(projection=projections.binary())
Row = dict[str, Any]


# ---- depth ---------------------------------------------------------------------------------------


def pictures(depth: int) -> tuple[nn.Sequential, tuple[int, ...]]:
    """Convolutions of 3 x 3 on 3 x 32 x 32; each four have twice the filters of smaller maps."""
    filters = [(8 << i // 4, 2 if i in (4, 8) else 1) for i in range(depth)]
    return _convolutions(filters, 3), (3, 32, 32)


def keywords(depth: int) -> tuple[nn.Sequential, tuple[int, ...]]:
    """Convolutions of 3 x 3 and 16 filters on a spectrogram of 49 x 10; the first has stride 2."""
    return _convolutions([(16, 2 if not i else 1) for i in range(depth)], 1), (1, 49, 10)


def _convolutions(filters: Sequence[tuple[int, int]], channels: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for count, stride in filters:
        layers += [nn.Conv2d(channels, count, 3, stride, padding=1), nn.LeakyReLU()]
        channels = count
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


def stored(block: BlockRecipe) -> int:
    """Numbers of a sample that a backward pass needs of a block's outputs."""
    return block.size + (block.pooled if block.pools else 0)


def derivatives(recipe: StepRecipe) -> int:
    """Numbers of a sample's derivatives that have no place among the outputs yet."""
    layers = [block.layer for block in recipe.blocks[1:]]
    maps = [
        layer.size[0] * layer.size[1] if isinstance(layer, Convolution) else 1 for layer in layers
    ]
    return max(maps, default=1)


def backprop_arena(recipe: StepRecipe) -> int:
    """Numbers of fused backprop: the outputs of all blocks, and one map of derivatives."""
    return recipe.batch * (sum(map(stored, recipe.blocks)) + derivatives(recipe))


def recomputing_arena(recipe: StepRecipe) -> int:
    """The same with the outputs of every k-th block, and those between them computed twice."""
    sizes = [stored(block) for block in recipe.blocks]

    def arena(k: int) -> int:
        groups = [sizes[i : i + k] for i in range(0, len(sizes), k)]
        return sum(g[-1] for g in groups) + max(sum(g[:-1]) for g in groups)

    least = min(arena(k) for k in range(1, len(sizes) + 1))
    return recipe.batch * (least + derivatives(recipe))


def local_arena(places: MemoryMap) -> int:
    """Numbers of the arena that the exported C has."""
    return sum(count for name, count in places.ram.items() if name.startswith("arena")) // FLOAT


def by_depth() -> list[Row]:
    """Bytes for nets of several depths."""
    rows = []
    for family in (pictures, keywords):
        for depth in DEPTHS:
            model, shape = family(depth)
            recipe = read_model(model, RULE, shape)
            for batch in BATCHES:
                of_batch = replace(recipe, batch=batch)
                local = local_arena(layout(of_batch))
                arenas = local, backprop_arena(of_batch), recomputing_arena(of_batch)
                row = {"net": family.__name__, "convolutions": depth, "batch": batch}
                rows.append(row | compared(recipe, *arenas))
    return rows


def compared(recipe: StepRecipe, local: int, backprop: int, recomputing: int) -> Row:
    """Bytes of the weights and of arenas of so many numbers, and what is saved."""
    weights = FLOAT * recipe.learned
    return {
        "weights_bytes": weights,
        "local_arena_bytes": FLOAT * local,
        "backprop_arena_bytes": FLOAT * backprop,
        "recomputing_backprop_arena_bytes": FLOAT * recomputing,
        "fused_update_saves_bytes": weights,  # the gradients
        "local_rule_saves_bytes": FLOAT * (backprop - local),
        "arena_ratio": round(backprop / local, 3),
        "ram_ratio": round((weights + FLOAT * backprop) / (weights + FLOAT * local), 3),
    }


# ---- length --------------------------------------------------------------------------------------


def through_time_arena(recipe: StepRecipe, steps: int, states: int) -> int:
    """Numbers of backprop through time for a cell and a head that stores so many states.

    Sums of gradients as in the local step, the states, the inputs of all steps, the derivatives of
    a state and of z, and the logits. Of a leaky cell, sigma(z) follows from two states.
    """
    cell, head = recipe.blocks
    assert isinstance(cell.layer, CellLayer)
    sums, units = summed(cell), cell.layer.outputs
    return sums + states * units + steps * cell.layer.inputs + 2 * units + head.size


def recomputed_states(steps: int) -> int:
    """The fewest states, if those between every k-th are computed twice."""
    return min(-(-steps // k) + k - 1 for k in range(1, steps + 1))


def by_length() -> list[Row]:
    """Bytes of a leaky cell on sequences of several lengths."""
    model = nn.Sequential(tpsgd.Recurrent(1, UNITS, leak=0.3), nn.Linear(UNITS, 2))
    rows = []
    for steps in LENGTHS:
        recipe = read_model(model, RULE, (steps, 1))
        arenas = [
            through_time_arena(recipe, steps, states)
            for states in (steps, recomputed_states(steps))
        ]
        row = compared(recipe, local_arena(layout(recipe)), *arenas)
        # all time steps have the same weights: of the cell, sums of gradients are stored
        row["fused_update_saves_bytes"] = FLOAT * recipe.blocks[-1].weights
        rows.append({"net": f"cell 1-{UNITS}-2", "steps": steps} | row)
    return rows


def measure() -> Row:
    """All of it, with what it means."""
    return {
        "how": "computed, not measured: " + " ".join((__doc__ or "").split()),
        "by_depth": by_depth(),
        "by_length": by_length(),
    }
