"""The memory of an exported net, to the byte: what lies in RAM, what in flash, and where.

Feed-forward nets: the outputs of a block and of the next lie at the two ends of one arena. Nothing
stores a gradient. Recurrent nets: the arena has the outputs, states and sums of gradients of every
block, and scratch for one time step; nothing in it depends on how long the sequences are. Behind
them are the derivatives of one unit, or of one feature map, for every sample of a batch, and the
logits of a readout.

What lasts between steps: the weights, behind them class codes that learn, then measured gains.
"""

from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod
from typing import Any

from tpsgd.common.errors import TpsgdError
from tpsgd.common.units import columns
from tpsgd_export.recipe import (
    BlockRecipe,
    CellLayer,
    Convolution,
    Dense,
    DiagonalLayer,
    StepRecipe,
)
from tpsgd_export.to_c.lifetimes import lives_of, placed

FLOAT = 4
QUANTILES = 2049 * 4  # bytes of the table of normal quantiles
MOMENTS = {"sgd": 0, "momentum": 1, "adam": 2}
FEW_CODES = 4 * QUANTILES  # bytes of codes up to which a table is worth a step three times as fast
PROGRESS = 6  # words of tps_progress in kernels/cells.h
UNPACKED = 4  # rows of small weights that become floats together: kernels/small.h
CODES, GAIN = "class codes that learn", "gain"
UNITS = "mean and deviation of the labels"
Places = tuple[dict[str, int], ...]  # of every block, by name


@dataclass(frozen=True)
class MemoryMap:
    """Bytes of everything, and places in the arena, in numbers.

    Args:
        ram: bytes by what they hold.
        flash: bytes of constants by what they hold.
        operations: multiplications and additions, in pairs, of a step or of a time step.
        unit: which of them.
        blocks: the places of each layer by name: output; of recurrent ones also sums, x, h, lambda,
            traces and mean, in blocks of several layers pooled and error, as far as they have them.
        lasting: the places by name of what lasts between steps: parameters and class codes that
            learn among the weights, parameters of a fixed block in its table; slots of gains.
        scratch: place of what a recurrent layer needs during one time step.
        dz: place of derivatives.
        logits: place of a readout's logits; under backprop, of derivatives of a block's inputs.
        arena: its numbers.
    """

    ram: dict[str, int]
    flash: dict[str, int]
    operations: int
    unit: str = "step"
    blocks: Places = ()
    lasting: Places = ()
    scratch: int = 0
    dz: int = 0
    logits: int = 0
    arena: int = 0

    @property
    def ram_bytes(self) -> int:
        """All RAM but the stack and the caller's samples."""
        return sum(self.ram.values())

    @property
    def flash_bytes(self) -> int:
        """All constants; code comes on top."""
        return sum(self.flash.values())

    def __str__(self) -> str:
        rows = [("RAM", f"{self.ram_bytes:,} B")]
        rows += [(f"  {name}", f"{count:,} B") for name, count in self.ram.items()]
        rows += [("flash, without code", f"{self.flash_bytes:,} B")]
        rows += [(f"  {name}", f"{count:,} B") for name, count in self.flash.items()]
        rows += [(f"multiply-adds a {self.unit}", f"{self.operations:,}")]
        width = max(len(number) for _, number in rows)
        return columns([(name, number.rjust(width)) for name, number in rows])


def layout(recipe: StepRecipe) -> MemoryMap:
    """Where the numbers of a net lie; recurrent nets that cannot learn step by step are refused."""
    blocks, batch = recipe.blocks, recipe.batch
    places, end, sums = (_of_sequences if recipe.recurrent else _of_samples)(recipe)
    scratch = max(map(_scratch, recipe.rows))
    dz = batch * max(pixels(row) for row in recipe.rows if row.learns)
    readouts = any(block.local and block.local.name == "readout" for block in blocks)
    logits = batch * recipe.outputs if readouts else 0
    if recipe.backprop:  # derivatives of the inputs of a block, of all but the first
        logits = batch * max([block.pooled for block in blocks[:-1]], default=0)
    arena = end + scratch + dz + logits
    rows = {"arena: outputs of two blocks, dz, logits": arena}
    if recipe.joined:
        rows = {"arena: outputs, derivatives, dz, logits": arena}
    if recipe.backprop:
        rows = {"arena: outputs of all blocks, derivatives": arena}
    if recipe.recurrent:
        rows = {
            "arena: sums of gradients": sums,
            "arena: states and outputs": end - sums,
            "arena: scratch, dz, logits": arena - end,
            "arena: losses and progress": len(blocks) + PROGRESS,
        }
    return MemoryMap(
        _lasting_ram(recipe) | {name: FLOAT * count for name, count in rows.items()},
        _flash(recipe),
        _operations(recipe),
        "time step" if recipe.recurrent else "step",
        *(places, _lasting_places(recipe), end, end + scratch, end + scratch + dz, arena),
    )


def _of_samples(recipe: StepRecipe) -> tuple[Places, int, int]:
    """Where the outputs of feed-forward blocks lie, and where they end; no sums of gradients."""
    blocks, batch = recipe.blocks, recipe.batch
    if recipe.joined:
        lives = lives_of(recipe)
        end = placed(lives)
        return tuple({name: life.place for name, life in row.items()} for row in lives), end, 0
    if recipe.backprop:
        ends = [0, *accumulate(batch * block.size for block in blocks)]
        return tuple({"output": place} for place in ends[:-1]), ends[-1], 0
    end = batch * max([blocks[0].size, *(_together(*pair) for pair in pairwise(blocks))])
    odd = [block.number % 2 * (end - batch * block.size) for block in blocks]
    return tuple({"output": place} for place in odd), end, 0


def _together(block: BlockRecipe, following: BlockRecipe) -> int:
    """Numbers of a sample in the outputs of two blocks.

    The output of an odd block ends at the end of the space for both; its pools leave a gap behind
    it, which cannot be used.
    """
    first = block.pooled if block.number % 2 == 0 else block.size
    return first + following.size


def _of_sequences(recipe: StepRecipe) -> tuple[Places, int, int]:
    """Where the numbers of recurrent nets lie, where they end, and how many are sums."""
    _refuse_sequences(recipe)
    feeds = [*(block.recurrent for block in recipe.blocks[1:]), False]
    places, end, sums = [], 0, 0
    for block, feeding in zip(recipe.blocks, feeds, strict=True):
        places.append({})
        for name, count in _sizes(block, feeding, recipe.outputs).items():
            places[-1][name], end = end, end + count
            sums += count * name.startswith("sums")
    return tuple(places), end, sums


def _sizes(block: BlockRecipe, feeds: bool, classes: int) -> dict[str, int]:
    """Numbers of the arena that a block needs for itself; `feeds`: a recurrent block follows."""
    layer: Any = block.layer
    sizes = {"output": layer.outputs}
    if isinstance(layer, DiagonalLayer):
        sizes |= {"x": layer.inputs, "h": 2 * layer.states, "lambda": 3 * layer.states}
        if layer.loss_at == "mean" and not feeds:
            sizes["mean"] = layer.outputs
        if block.learns:
            sizes["traces"] = 2 * layer.states * (1 + layer.inputs)
    if block.recurrent and block.learns:
        sizes |= {"sums": summed(block), "sums of codes": classes * block.learned_codes}
    return sizes


def summed(block: BlockRecipe) -> int:
    """Sums of gradients of a recurrent block; the two biases of a cell share theirs."""
    shared = block.layer.outputs * ("cells.0.bias_h" in block.parameters)
    return (block.weights - shared) * block.learns


def _scratch(block: BlockRecipe) -> int:
    """Numbers that a block needs only while it computes its outputs, or a time step."""
    layer = block.layer
    if isinstance(layer, CellLayer):
        return 2 * layer.outputs
    if isinstance(layer, DiagonalLayer):
        return 1 + 5 * layer.outputs + 2 * (layer.outputs + layer.states) * block.learns
    if block.scales is not None:  # four rows of weights, and their biases, as floats
        return UNPACKED * (fan_in(block) + 1)
    return 0


def pixels(block: BlockRecipe) -> int:
    """Numbers of one unit of a sample: those of a feature map, or one."""
    return prod(block.layer.out) if isinstance(block.layer, Convolution) else 1


def fan_in(block: BlockRecipe) -> int:
    """Weights of one unit."""
    layer = block.layer
    if isinstance(layer, Convolution):
        return layer.channels // layer.groups * prod(layer.kernel)
    return layer.inputs


def gains(recipe: StepRecipe) -> int:
    """How many readouts measure the size of their features."""
    return sum(bool(block.local and block.local.target) for block in recipe.blocks)


def _lasting_places(recipe: StepRecipe) -> Places:
    places, end, slots = [], 0, 0
    for block in recipe.rows:
        place = end if block.learns else 0
        places.append({})
        for name, p in block.parameters.items():
            places[-1][name], place = place, place + p.numel()
        end = place if block.learns else end
        if block.local and block.local.target:
            places[-1][GAIN], slots = slots, slots + 1
    for row, own in zip(recipe.rows, places, strict=True):
        if row.learned_codes:
            own[CODES], end = end, end + recipe.outputs * row.learned_codes
    return tuple(places)


def _lasting_ram(recipe: StepRecipe) -> dict[str, int]:
    """Bytes of what lasts between steps."""
    adam = recipe.optimizer == "adam"
    numbers = {
        "weights": recipe.parameters,
        CODES: recipe.learned - recipe.parameters,
        "moments of the optimizer": MOMENTS[recipe.optimizer] * recipe.learned,
        "scales and counters": gains(recipe) + 2 * len(recipe.blocks) * adam + bool(recipe.spare),
        UNITS: 2 * recipe.outputs * bool(recipe.targets),
    }
    return {name: FLOAT * count for name, count in numbers.items() if count}


def _flash(recipe: StepRecipe) -> dict[str, int]:
    """Bytes of constants."""
    small = sum(b.parameters["weight"].numel() for b in recipe.rows if b.scales is not None)
    tables = {"initial weights": FLOAT * (recipe.all_weights - small)}
    if small:
        tables["weights of a byte"] = small
        tables["scales of their rows"] = FLOAT * sum(
            len(block.scales) for block in recipe.rows if block.scales is not None
        )
    if recipe.targets:
        tables[UNITS] = 2 * FLOAT * recipe.outputs
    codes = [block.local.codes for block in recipe.blocks if block.local]
    words = [  # of a table; a word has 32 bits
        -(-c.table.numel() // (32 if c.distribution == "bits" else 1))
        for c in codes
        if c.table is not None
    ]
    if words:
        tables["class codes"] = FLOAT * sum(words)
    if any(c.table is None for c in codes):
        tables["hashes of classes"] = 8 * sum(len(c.streams) for c in codes)
    if any(c.distribution == "normal" for c in codes):
        tables["normal quantiles"] = QUANTILES
    return tables


def _operations(recipe: StepRecipe) -> int:
    """Multiply-adds of a step: forward, update, readouts there and back, and their update.

    Of a time step, those of the recurrent layers: the layers after them learn once a sequence.
    """
    total = 0
    for block in (b for b in recipe.blocks if b.recurrent or not recipe.recurrent):
        for row in block.rows:
            own = sum(p.numel() for p in row.parameters.values())
            products = own if row.recurrent else row.size * fan_in(row)
            carried = recipe.backprop and any(b.learns for b in recipe.blocks[: block.number])
            carried = carried or (row.learns and row.source >= 0)
            total += products * (1 + row.learns + carried)
        if block.local and block.local.name == "readout":
            total += (2 + block.local.learned) * recipe.outputs * block.local.codes.size
    return total * recipe.batch


def _refuse_sequences(recipe: StepRecipe) -> None:
    """Refuse what cannot be learned one time step at a time."""
    for block in recipe.blocks:
        who = f"block {block.number + 1} ({block.name})"
        if (
            isinstance(block.layer, DiagonalLayer)
            and block.learns
            and block.layer.loss_at == "mean"
        ):
            raise TpsgdError(
                f'{who}: a loss at the "mean" over time is known only after the last step, when '
                "the steps before it are gone; train the net with loss_at='last' (--loss-at last) "
                "or loss_at='every' (--loss-at every)"
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
